"""What MXNet 1.9.1 has left on disk, where MXNet is not installed: the checks
run in a process in which importing it fails. ``tests/files/gluon/make.py``
makes the files, and what MXNet predicts with them, its gradients, and what its
next step makes of the parameters."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import mgpu
from conftest import BACKENDS
from mgpu.cli import cli

from .conftest import imported
from .mutations import FILES, TESTS

FOLDER = FILES / "networks"
#: how far numbers may be from MXNet's, relative to the largest of an array;
#: a Module trains in float32
BARS = {"resnet": 1e-9, "lstm": 1e-9, "mixer": 1e-9, "module": 2e-6}

pytestmark = pytest.mark.skipif("torch" not in BACKENDS,
                                reason="PyTorch takes them over")


class Stored:
    """A network of MXNet's, and what it computes."""

    def __init__(self, name):
        module = name == "module"
        prefix, epoch = FOLDER / name, "0002" if module else "0000"
        self.files = f"{prefix}-symbol.json", f"{prefix}-{epoch}.params"
        self.states = f"{prefix}-{epoch}.states" if module \
            else f"{prefix}.states"
        self.trace, self.bar = Path(f"{prefix}.trace"), BARS[name]
        self.options = {"optimizer": "sgd", "optimizer_params": {
            "learning_rate": 0.25, "momentum": 0.5, "begin_num_update": 2}} \
            if module else {"order": "sorted"}
        self.steps = dict(np.load(f"{prefix}-steps.npz"))
        self.x, self.label = self.steps["x"], self.steps["label"]
        if self.x.dtype.kind == "f":
            self.x = self.x.astype("float32" if module else "float64")

    def assert_near(self, found, key):
        """By the largest of an array, or by a tenth of the largest of the
        network: a bias before batch norm has a gradient of rounding alone."""
        expected, kind = self.steps[key], key.partition(":")[0]
        assert found.shape == expected.shape, key
        size = max(abs(x).max() / (1 if name == key else 10)
                   for name, x in self.steps.items()
                   if name.partition(":")[0] == kind)
        assert abs(found - expected).max() <= self.bar * size, key


def check_training(stored):
    """It predicts as MXNet, and takes MXNet's next step, on one device and on
    two."""
    net = mgpu.from_gluon(*stored.files)
    predict = mgpu.initialize(net, [mgpu.cpu(0)])[0]
    stored.assert_near(mgpu.to_numpy(predict(mgpu.put(
        stored.x, mgpu.cpu(0)))), "predicted")
    for count in (1, 2):
        devices = [mgpu.cpu(i) for i in range(count)]
        replicas, trainer, _ = mgpu.resume_from_gluon(
            *stored.files, stored.states, devices, batch_norm="sync",
            **stored.options)
        names = replicas.network.gluon_names()
        mgpu.train_batch(stored.x, stored.label, replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
        for p in replicas.params():
            key = f"gradient:{names[p.name]}"
            if key in stored.steps:
                stored.assert_near(mgpu.to_numpy(p.grad()), key)
        after = {f"after:{names[key]}": x for key, x in
                 replicas.export_numpy().items() if key in names}
        assert after.keys() == {key for key in stored.steps
                                if key.startswith("after:")}
        for key, x in after.items():
            stored.assert_near(x, key)


def check_commands(stored):
    def run(*arguments, status=0):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(
            cli, list(map(str, arguments)), prog_name="mgpu")
        assert done.exit_code == status, (arguments, done.output)
        return done.output

    import torch
    assert "Each has a rule on PyTorch." in run("inspect", *stored.files)
    assert "arrays" in run("inspect", stored.states)
    written = run("convert", *stored.files, "-o", "net.py", "--force")
    weights = "net.pt" if "net.pt" in written else "net.safetensors"
    net = imported("net.py").load(weights).eval()
    stored.assert_near(net(torch.from_numpy(stored.x)).detach().numpy(),
                       "predicted")
    shape = "x".join(map(str, stored.x.shape[1:]))
    assert "by --trace" in run(
        "convert", *stored.files, "-o", "x.params", "--check", "--input",
        shape + ":int64" * (stored.x.dtype.kind == "i"), status=2)
    assert not os.path.exists("x.params")
    if stored.trace.exists():
        assert "SAME (lock-step)" in run(
            "convert", *stored.files, "-o", "other.py", "--trace",
            stored.trace, "-o", "page.html")
        assert os.path.exists("page.html")


def check_all():
    """In the folder of the process."""
    assert sys.modules["mxnet"] is None
    with mgpu.using_backend("torch"):
        for stored in map(Stored, BARS):
            check_training(stored)
            check_commands(stored)


def test_it_predicts_trains_and_converts(tmp_path):
    """All networks in one process."""
    program = """
import sys
sys.modules["mxnet"] = None     # importing it raises
from gluon_io import test_without_mxnet
test_without_mxnet.check_all()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True,
        timeout=400, cwd=tmp_path, env={
            **os.environ, "MGPU_TEST_BACKENDS": "torch",
            "PYTHONPATH": os.pathsep.join((str(TESTS), *filter(None,
                                                               sys.path)))})
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_small():
    sizes = [path.stat().st_size for path in FILES.rglob("*")
             if path.is_file()]
    assert sum(sizes) < 2e6
