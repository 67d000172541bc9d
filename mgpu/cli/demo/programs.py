"""What ``mgpu demo`` runs: a plain PyTorch script, the same with one changed
line, and a port with a bug (`port`)."""
import difflib
import runpy
from pathlib import Path

import numpy as np

from mgpu import backends, parity
from mgpu.cli.demo import port
from mgpu.utils import files

#: lines of plain.py, and what they become
CHANGES = {
    "import torch": "import mgpu\nimport torch",
    "net = network()":
        "net = mgpu.DataParallel(network(), mgpu.list_devices(2))"}


def write_scripts(folder: Path) -> tuple[Path, Path]:
    """Write plain.py and two_devices.py, the same on two devices."""
    text = Path(__file__).with_name("plain.py").read_text(encoding="utf-8")
    changed = "\n".join(CHANGES.get(line, line) for line in text.split("\n"))
    paths = folder / "plain.py", folder / "two_devices.py"
    for path, content in zip(paths, (text, changed), strict=True):
        with files.replacing(path) as file:
            file.write(content)
    return paths


def changed_lines(plain: Path, changed: Path) -> list[str]:
    """The lines that differ, with "- " or "+ " before them."""
    before, after = (path.read_text(encoding="utf-8").splitlines()
                     for path in (plain, changed))
    return [line for line in difflib.ndiff(before, after)
            if line[0] in "-+"]


def losses_of(script: Path) -> np.ndarray:
    """Run a script in this process; the losses of its steps."""
    with backends.using_backend("torch"):
        return np.array(runpy.run_path(str(script))["losses"])


def compared_port() -> parity.Result:
    """The comparison of the port with its original, in three steps."""
    backends.mxnet_compat()
    rng = np.random.default_rng(0)
    return parity.compare(port.original, port.port, batches=[
        (rng.normal(size=(8, 1, 12, 12)), rng.integers(0, 10, 8))
        for _ in range(3)])
