"""`mgpu.compat.mxnet` as a package, and what its batches give."""
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import forked
import mgpu
from batches import rows
from conftest import BACKENDS
from helpers import mlp, on
from mgpu.compat import mxnet as mx
from mgpu.compat.mxnet import autograd, gluon

X, LABELS = rows(7, dtype="float64"), (np.arange(7) % 3).astype("int32")
GLUON = pytest.mark.skipif("mxnet" not in BACKENDS, reason="a user of Gluon")


def run(code, *absent):
    """What code prints in a process that cannot import `absent`."""
    hide = f"import sys\nfor x in {absent}: sys.modules[x] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(forked.ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


IMPORTS = """
from mgpu.compat.mxnet import autograd, gluon, nd
from mgpu.compat.mxnet.gluon import nn
import mgpu.compat.mxnet as mx
from mgpu.compat.mxnet.gluon.data import DataLoader
from mgpu.compat.mxnet.gluon.loss import L2Loss
from mgpu.compat.mxnet.gluon.model_zoo.vision import resnet18_v1
from mgpu.compat.mxnet.gluon.nn import Dense
from mgpu.compat.mxnet.gluon.utils import split_and_load
from mgpu.compat.mxnet.init import Xavier
from mgpu.compat.mxnet.lr_scheduler import FactorScheduler
"""


@GLUON
def test_the_modules_of_a_gluon_script_are_found():
    """Importing the package makes MXNet importable, and its own modules are
    MXNet's."""
    found = run(IMPORTS + """
import mxnet
print(nn is mxnet.gluon.nn is gluon.nn, Dense is mxnet.gluon.nn.Dense)
print(resnet18_v1 is mxnet.gluon.model_zoo.vision.resnet18_v1)
print(gluon.Block is mxnet.gluon.Block)
print(DataLoader is gluon.data.DataLoader, L2Loss is gluon.loss.L2Loss)
print(Xavier is mx.init.Xavier is mx.initializer.Xavier)
""")
    assert found == ["True True", "True", "True", "True True", "True"]


def test_without_mxnet_its_modules_say_what_is_missing():
    """And the rest works."""
    found = run("""
        from mgpu.compat.mxnet import autograd, gluon, nd, init
        from mgpu.compat.mxnet.gluon.loss import L2Loss
        for line in ("from mgpu.compat.mxnet.gluon import nn",
                     "gluon.nn.Dense", "gluon.Block"):
            try:
                exec(line)
            except ImportError as error:
                print("pip install mxnet==1.9.1" in str(error))
        """, "mxnet")
    assert found == ["True"] * 3


def test_a_loop_prints_the_mean_of_its_losses(backend):
    net = mx.initialize(mlp(backend, units=(6, 4, 3)), "xavier", on(0, 1),
                        dtype="float64")
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    data, label = (np.asarray(x).view(mx.HostArray).as_in_context(on(0, 1))
                   for x in (X, LABELS))
    with autograd.record():
        losses = loss(net(data), label)
    values = losses.asnumpy()
    assert losses.mean().asscalar() == values.mean()
    assert losses.sum().asscalar() == values.sum()
    total = 0.0
    total += losses.mean()
    assert total == float(losses.mean()) == values.mean()
    with pytest.raises(AttributeError, match=r"Use mean\(\).asscalar\(\)"):
        losses.asscalar()
    with pytest.raises(RuntimeError, match="which divides"):
        losses.mean().backward()
    # which works
    losses.backward()
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.5})
    trainer.step(len(data))
    assert trainer.num_update == 1


def test_a_script_saves_and_loads_its_parameters(backend, tmp_path):
    net = mx.initialize(mlp(backend, units=(6, 4, 3)), mx.init.Xavier(),
                        on(0, 1), dtype="float64")
    before = net.export_numpy()
    net.save_parameters(tmp_path / "net.params")
    net.import_numpy({name: 0 * x for name, x in before.items()})
    net.load_parameters(tmp_path / "net.params", ctx=on(0, 1))
    for name, value in net.export_numpy().items():
        np.testing.assert_array_equal(value, before[name])


@GLUON
def test_a_line_of_gluon_that_stayed_names_the_call():
    net = gluon.nn.Dense(3, in_units=6)
    with pytest.raises(TypeError, match=r"net = mx.initialize\(net, init, "):
        net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    replicas = mx.initialize(net, mx.init.Xavier(), [mx.cpu(0), mx.cpu(1)])
    assert isinstance(replicas, mgpu.Replicas)
