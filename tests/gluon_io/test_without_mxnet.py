"""What MXNet 1.9.1 has left on disk, where MXNet is not installed: the tests
run in a process in which importing it fails. ``tests/files/gluon/make.py``
makes the files, and what MXNet predicts with them, its gradients, and what its
next step makes of the parameters."""
import subprocess
import sys

import pytest

from conftest import BACKENDS

from .mutations import FILES

FOLDER = FILES / "networks"
#: how far numbers may be from MXNet's, relative to the largest of an array;
#: a Module trains in float32
BARS = {"resnet": 1e-9, "lstm": 1e-9, "mixer": 1e-9, "module": 2e-6}

pytestmark = pytest.mark.skipif("torch" not in BACKENDS,
                                reason="PyTorch takes them over")

START = f'''
import sys


class Hides:
    """As if it were not installed."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] == "mxnet":
            raise ModuleNotFoundError(f"No module named {{name!r}}",
                                      name=name)


sys.meta_path.insert(0, Hides())
import os, numpy as np, mgpu
assert "mxnet" not in sys.modules
mgpu.set_backend("torch")
folder, name, bar = {str(FOLDER)!r}, sys.argv[1], float(sys.argv[2])
os.makedirs(name)
os.chdir(name)
prefix = os.path.join(folder, name)
epoch = "0002" if name == "module" else "0000"
files = prefix + "-symbol.json", f"{{prefix}}-{{epoch}}.params"
states = f"{{prefix}}-{{epoch}}.states" if name == "module" \\
    else prefix + ".states"
steps = dict(np.load(prefix + "-steps.npz"))
x, label = steps["x"], steps["label"]
kind = "float32" if name == "module" else "float64"
if x.dtype.kind == "f":
    x = x.astype(kind)


def near(found, expected, of=()):
    """By the largest of an array, or by a tenth of the largest `of` the
    network: a bias before batch norm has a gradient of rounding alone."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    size = max([abs(expected).max(), *(abs(x).max() / 10 for x in of)])
    assert abs(found - expected).max() <= bar * size, (
        abs(found - expected).max(), size)
'''


CODE = """
net = mgpu.from_gluon(*files)
replicas = mgpu.initialize(net, [mgpu.cpu(0)])
predict = replicas([mgpu.put(x, mgpu.cpu(0))])[0]
near(mgpu.to_numpy(predict), steps["predicted"])

more = {"optimizer": "sgd", "optimizer_params": {
    "learning_rate": 0.25, "momentum": 0.5, "begin_num_update": 2}} \\
    if name == "module" else {"order": "sorted"}
gradients = [x for key, x in steps.items() if key.startswith("gradient:")]
after = [x for key, x in steps.items() if key.startswith("after:")]
for devices in [mgpu.cpu(0)], [mgpu.cpu(0), mgpu.cpu(1)]:
    replicas, trainer, notes = mgpu.resume_from_gluon(
        *files, states, devices, batch_norm="sync", **more)
    names = replicas.network.gluon_names()
    X, y = mgpu.split_batch(x, label, devices)
    with mgpu.record():
        losses = mgpu.parallel(mgpu.losses.SoftmaxCrossEntropyLoss(),
                               replicas(X), y)
    mgpu.backward(losses)
    for p in replicas.params():
        if "gradient:" + names[p.name] in steps:
            near(mgpu.to_numpy(p.grad()),
                 steps["gradient:" + names[p.name]], gradients)
    trainer.step(len(x))
    compared = 0
    for key, value in replicas.export_numpy().items():
        if key in names:
            near(value, steps["after:" + names[key]], after)
            compared += 1
    assert compared == sum(key.startswith("after:") for key in steps)

# the command line
import importlib.util, torch
from click.testing import CliRunner
from mgpu.cli import cli


def run(*arguments):
    done = CliRunner(env={"COLUMNS": "100"}).invoke(
        cli, list(arguments), prog_name="mgpu")
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.output


assert "Each has a rule on PyTorch." in run("inspect", *files)
assert "arrays" in run("inspect", states)
shape = "x".join(map(str, x.shape[1:]))
given = ["--input", shape + ":int64"] if x.dtype.kind == "i" else [
    "--input", shape]

run("convert", *files, "-o", "net.py")
found = importlib.util.spec_from_file_location("net", "net.py")
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
weights = "net.safetensors" if os.path.exists("net.safetensors") else "net.pt"
near(module.load(weights).eval()(torch.from_numpy(x)).detach().numpy(),
     steps["predicted"])

done = CliRunner().invoke(cli, ["convert", *files, "-o", "x.params", *given,
                                "--check"])
assert done.exit_code == 2 and "by --trace" in done.output, done.output
assert not os.path.exists("x.params")
if os.path.exists(prefix + ".trace"):
    text = run("convert", *files, "-o", "other.py", "--trace",
               prefix + ".trace", "--report", "page.html")
    assert "SAME (lock-step)" in text and os.path.exists("page.html")
"""


def test_it_predicts_trains_and_converts(tmp_path):
    """All networks in one process."""
    program = f"""
import os, sys
for name, bar in {BARS!r}.items():
    sys.argv[1:] = name, str(bar)
    exec({START + CODE!r}, {{"__name__": "__main__"}})
    os.chdir("..")
"""
    done = subprocess.run([sys.executable, "-c", program], text=True,
                          capture_output=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_small():
    sizes = [path.stat().st_size for path in FILES.rglob("*")
             if path.is_file()]
    assert sum(sizes) < 2e6
