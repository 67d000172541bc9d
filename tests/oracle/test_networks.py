"""MXNet against PyTorch, in lock-step, in float64: networks that are too
large, or steps that are too many, to be written out there."""
import numpy as np
import pytest

import mgpu
from helpers import convnet
from mgpu import parity
from threeway import ROUNDING, compare, covers, host

#: docs/design.md: lock-step holds to 1e-12 for LeNet-like networks; ResNet-18
#: sums over 10^4 terms a layer, and its convolution biases are noise at the
#: floor.
CONV, RESNET = 1e-12, 1e-10


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, 1, 28, 28)), rng.integers(0, 10, n).astype("int32")


def side(engine, make):
    """`make` on one backend, with the same initial weights on both."""
    def network():
        with mgpu.using_backend(engine):
            return make()
    return parity.Side(network, init=mgpu.initializers.Xavier())


def lockstep(make, batches, tolerance, **options):
    """The result of a comparison in which nothing may differ."""
    result = parity.compare(
        side("mxnet", make), side("torch", make), batches=batches,
        weights="own", tolerance=tolerance, **options)
    assert result.same, str(result)
    assert not any(g.absolute for g in result.gaps if g.stage == "initial")
    assert "no weight moved" not in " ".join(result.notes)
    assert {"output", "loss", "gradient", "weight"} <= set(result.worst)
    return result


@covers("models.lenet")
def test_lenet(devices):
    """LeNet from scratch and LeNet as a network are one network."""
    result = lockstep(mgpu.models.lenet, [batch(8)] * 3, CONV,
                      devices=devices, optimizer_params={"learning_rate":
                                                         0.125})
    assert len(result.plan.pairs) == len(mgpu.models.LENET)
    with mgpu.using_backend("torch") as backend:
        replicas = mgpu.initialize(mgpu.models.lenet(), [mgpu.cpu(0)],
                                   dtype="float64")
        X = backend.put(batch(3)[0], mgpu.cpu(0))
        own = [backend.put(x.T if x.ndim == 2 else x, mgpu.cpu(0))
               for x in replicas.export_numpy().values()]
        compare(host([replicas[0](X)]),
                host([mgpu.models.lenet_forward(X, own)]),
                ROUNDING, "the network against its function")


@covers("models.resnet18")
def test_resnet18():
    """A step of two devices: the layers do not depend on their number."""
    result = lockstep(mgpu.models.resnet18, [batch(6)], RESNET, devices=2,
                      optimizer_params={"learning_rate": 2.0 ** -5})
    assert len([g for g in result.gaps if g.stage == "gradient"]) == 76


@pytest.mark.parametrize("policy", ("per_device", "average", "sync"))
def test_convnet(policy, devices):
    """Batch norm under every policy, over uneven shards."""
    # one batch again and again: the loss must fall
    result = lockstep(
        lambda: convnet(mgpu.get_backend(), 1, 10), [batch(5)] * 6, CONV,
        devices=devices, batch_norm=policy,
        optimizer_params={"learning_rate": 0.125, "momentum": 0.5,
                          "wd": 2.0 ** -10})
    assert result.losses["a"][-1] < result.losses["a"][0]
