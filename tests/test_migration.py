"""The steps of examples/migration in one folder; and its scripts, which keep
their numbers."""
import contextlib
import difflib
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import forked
import mgpu
from conftest import BACKENDS
from helpers import relative_difference
from mgpu import gluon_io

STEPS = Path(__file__).parent.parent / "examples" / "migration"
ORDER = ("legacy", "wrapped", "prove")
#: these run after them, in one process, where importing MXNet fails
RETIRED = ("convert", "switched", "resumed", "retired")
ALONE = """
import os, runpy, sys
sys.modules["mxnet"] = None
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
    print("the end of", os.path.basename(file))
"""


@pytest.fixture(scope="module")
def both():
    if set(BACKENDS) < {"mxnet", "torch"}:
        pytest.skip("needs both backends")


@pytest.fixture(scope="module")
def printed(both, tmp_path_factory):
    """What each step printed, and the folder where all ran."""
    folder = tmp_path_factory.mktemp("migration")
    found = {"folder": folder}
    for start, *names in (*(([forked.python()], name) for name in ORDER),
                          ([sys.executable, "-c", ALONE], *RETIRED)):
        done = subprocess.run([*start, *(STEPS / f"{x}.py" for x in names)],
                              cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{names}\n{done.stderr}"
        found |= zip(names, re.split("the end of .*\n", done.stdout))
    return found


def losses(text):
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", text)]


def test_the_loop_of_mgpu_starts_as_gluons(printed):
    gluon, ours = losses(printed["legacy"]), losses(printed["wrapped"])
    assert len(gluon) == len(ours) == 2
    # The mean of four steps in float32. Rounding noise grows with each step:
    # in the second epoch the losses differ by 1.4e-3.
    assert ours[0] == pytest.approx(gluon[0], abs=2e-3)


def test_the_converted_network_trains_the_same(printed):
    assert printed["prove"].startswith("same (lockstep, 3 steps")


def test_training_continues_from_the_weights(printed):
    """A start from random weights would have 2.3. With the optimizer state
    the rate, 0.125 at first, has been halved after step 4 of 8."""
    for name in ("switched", "resumed"):
        assert losses(printed[name])[0] < losses(printed["legacy"])[0] / 2
    assert "running statistics" in printed["resumed"]
    folder = printed["folder"]
    with mgpu.using_backend("torch"):
        _, trainer, _ = mgpu.resume_from_gluon(
            folder / "net-symbol.json", folder / "net-0000.params",
            folder / "net.states", mgpu.list_devices(2), order="sorted")
    assert (trainer.learning_rate, trainer.num_update) == (0.0625, 8)


def test_the_exported_network_predicts_as_the_trained_one(printed):
    """Which `resumed` has written: device 0's, with its statistics."""
    import torch
    from safetensors.torch import load_model
    folder = printed["folder"]
    with mgpu.using_backend("torch"):
        net = mgpu.from_gluon(folder / "net-symbol.json",
                              folder / "net-0000.params")
    load_model(net, folder / "trained.safetensors")
    exported = torch.export.load(folder / "trained.pt2").module()
    right = []
    for X, y in mgpu.datasets.digits(64, resize=16, limit=256)[1]:
        with torch.no_grad():
            found, wanted = (run(torch.from_numpy(X)).numpy()
                             for run in (exported, net.eval()))
        # float32, in another order of operations
        assert relative_difference(found, wanted) < 1e-5
        right.append((wanted.argmax(1) == y).mean())
    assert f"accuracy {np.mean(right):.3f}\n" in printed["retired"]
    assert np.mean(right) > 0.2     # 0.1 is chance


# -- three scripts, each in both forms ----------------------------------------

SCRIPTS = STEPS / "scripts"
#: numbers that float32, in which MXNet has the scalars of SGD, holds exactly
EXACT = {"mnist": ["--batch-size", "64", "--lr", "0.125", "--momentum",
                   "0.875"], "pictures": [], "sentences": []}
#: lines of the script in mgpu that its own form does not have, at most
CHANGED = {"mnist": 6, "pictures": 6, "sentences": 7}


def changed(old, new):
    """The lines of `new` that `old` does not have, where it has them."""
    diff = difflib.ndiff(*(
        (SCRIPTS / name).read_text(encoding="utf-8").splitlines()
        for name in (old, new)))
    return [line for line in diff if line.startswith("+ ") and line[2:]]


@pytest.mark.parametrize("old, new", [
    ("mnist_gluon.py", "mnist.py"), ("pictures_gluon.py", "pictures.py"),
    ("sentences_torch.py", "sentences.py")])
def test_the_guide_shows_what_changes(old, new):
    page = (STEPS.parent.parent / "docs" / "guide" / "habits.md").read_text(
        encoding="utf-8")
    found = re.search(rf"`{new}`,.*?```diff\n(.*?)```", page, re.S)
    assert found, f"the page has no `{new}`, with a diff after it"
    shown = [line[1:] for line in found[1].splitlines()
             if line.startswith("+")]
    assert shown == [line[2:] for line in changed(old, new)]


def run(script, folder, *options, network="gluon_networks"):
    """What a script prints, and the arrays that it writes."""
    source = (SCRIPTS / script).read_text(encoding="utf-8").replace(
        "from gluon_networks ", f"from {network} ")
    assert ("gluon_networks" in source) == (network == "gluon_networks") \
        or script.startswith("sentences")
    out = folder / f"{script}.{network}.out"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() \
            as patch:
        patch.setattr(sys, "argv", [script, "--dtype", "float64", "--out",
                                    str(out), *options])
        patch.syspath_prepend(SCRIPTS)
        exec(compile(source, script, "exec"), {"__name__": "__main__"})
    return printed.getvalue(), out


def numbers(text):
    return [float(x) for x in re.findall(r"\d+\.\d+", text)]


@pytest.fixture(scope="module")
def trained(both, tmp_path_factory):
    """For each Gluon script, the options with the file of weights that it
    begins with, what it prints, and the weights that it ends with."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for script, options in (("mnist", []), ("pictures", ["--devices", "1"])):
        _, start = run(f"{script}_gluon.py", folder, *EXACT[script])
        start = start.rename(folder / f"{script}.start")
        own = ["--start", str(start), *EXACT[script]]
        found[script] = own, *run(f"{script}_gluon.py", folder, *own,
                                  *options)
    return found


@pytest.mark.parametrize("network", ["gluon_networks", "torch_networks"])
@pytest.mark.parametrize("script", ["mnist", "pictures"])
def test_a_gluon_script_in_mgpu_has_its_numbers(script, network, trained,
                                                tmp_path):
    assert 0 < len(changed(f"{script}_gluon.py", f"{script}.py")) \
        <= CHANGED[script]
    options, expected, weights = trained[script]
    engine = "torch" if network == "torch_networks" else "mxnet"
    with mgpu.using_backend(engine):
        printed, ours = run(f"{script}.py", tmp_path, *options,
                            "--devices", "1", network=network)
    assert len(numbers(expected)) > 5
    assert numbers(printed) == pytest.approx(numbers(expected), abs=1e-10)
    theirs, ours = (gluon_io.load_params(file) for file in (weights, ours))
    assert sorted(ours) == sorted(theirs)
    for name, values in theirs.items():
        assert relative_difference(ours[name], values) < 1e-10


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_a_torch_script_in_mgpu_has_its_numbers(tmp_path):
    """On two devices, where the script in mgpu runs."""
    import torch
    assert 0 < len(changed("sentences_torch.py", "sentences.py")) \
        <= CHANGED["sentences"]
    expected, weights = run("sentences_torch.py", tmp_path)
    with mgpu.using_backend("torch"):
        printed, ours = run("sentences.py", tmp_path)
    assert len(numbers(expected)) == 6
    assert numbers(printed) == pytest.approx(numbers(expected), abs=1e-10)
    theirs, ours = (torch.load(file) for file in (weights, ours))
    for name, values in theirs.items():
        assert relative_difference(ours[name].numpy(), values.numpy()) < 1e-10
