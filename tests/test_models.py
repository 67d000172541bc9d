"""The book's two networks: sizes, order, initial bits; the same on both
backends."""
import numpy as np
import pytest

import mgpu
from helpers import assert_bit_equal, on, relative_difference
from mgpu.nn import initializers, models


# -- LeNet --------------------------------------------------------------------

def test_lenet_has_the_texts_parameters():
    params = models.lenet_params()
    assert [p.shape for p in params] == [
        (20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,),
        (128, 10), (10,)]
    assert sum(p.size for p in params) == 129_068


# -- ResNet-18 ----------------------------------------------------------------

def resnet_specs(in_channels=1, classes=10):
    """Names, kinds and shapes as the book describes them."""
    def conv(name, n_in, n_out, size):
        return [(f"{name}.weight", "weight", (n_out, n_in, size, size)),
                (f"{name}.bias", "bias", (n_out,))]

    def norm(name, n):
        return [(f"{name}.gamma", "gamma", (n,)),
                (f"{name}.beta", "beta", (n,))]
    specs = conv("0", in_channels, 64, 3) + norm("1", 64)
    n_in = 64
    for stage, n in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage + 3}.{block}"
            specs += conv(f"{name}.conv1", n_in, n, 3)
            specs += conv(f"{name}.conv2", n, n, 3)
            if stage and not block:
                specs += conv(f"{name}.conv3", n_in, n, 1)
            specs += norm(f"{name}.bn1", n) + norm(f"{name}.bn2", n)
            n_in = n
    return specs + [("9.weight", "weight", (classes, 512)),
                    ("9.bias", "bias", (classes,))]


def resnet_statistics():
    return [(name.replace("gamma", kind), kind, shape)
            for name, gamma, shape in resnet_specs() if gamma == "gamma"
            for kind in ("running_mean", "running_var")]


def test_resnet18_is_the_texts(engine):
    """76 arrays, 11,175,818 values, 34 running statistics; names, order and
    initial bits are the same on both backends, and on both devices."""
    replicas = mgpu.initialize(models.resnet18(10), on(0, 1),
                               initializers.Normal(0.01))
    assert [(p.name, p.kind, p.shape) for p in replicas.params()] \
        == resnet_specs()
    assert [(p.name, p.kind, p.shape) for p in replicas.statistics()] \
        == resnet_statistics()
    assert len(replicas.params()) == 76
    assert sum(int(np.prod(p.shape)) for p in replicas.params()) \
        == 11_175_818
    assert len(replicas.statistics()) == 34
    # What NumPy draws, whatever the backend and the device.
    for number, p in enumerate(replicas.params()):
        wanted = initializers.draw_parameter(
            p.kind, p.shape, "float32", initializers.Normal(0.01), seed=0,
            index=number)
        for x in p.list_data():
            assert_bit_equal(mgpu.to_numpy(x), wanted)
    for p in replicas.statistics():
        for x in p.list_data():
            assert (mgpu.to_numpy(x) == (p.kind == "running_var")).all()
    # The book's demonstration: four random images over two devices, and
    # the first kernel of the first convolution on both.
    X = np.random.default_rng(0).uniform(size=(4, 1, 28, 28))
    outputs = [mgpu.to_numpy(out) for out in replicas(mgpu.split_and_load(
        X.astype("float32"), replicas.devices))]
    assert [out.shape for out in outputs] == [(2, 10)] * 2
    size = np.abs(np.concatenate(outputs))
    assert 1e-7 < size.min() and size.max() < 6e-6
    first = replicas.params()[0]
    assert_bit_equal(mgpu.to_numpy(first.data("cpu:0"))[0, 0],
                     mgpu.to_numpy(first.data("cpu:1"))[0, 0])


def test_resnet18_with_other_sizes(engine):
    replicas = mgpu.initialize(models.resnet18(5, in_channels=3), on(0))
    assert [(p.name, p.kind, p.shape) for p in replicas.params()] \
        == resnet_specs(3, 5)
    out, = replicas([mgpu.put(np.ones((1, 3, 32, 32), "float32"),
                              mgpu.cpu(0))])
    assert tuple(out.shape) == (1, 5)
    small = models.resnet18(np.int64(2), np.int64(1))
    assert mgpu.initialize(small, on(0), "uniform").params()[-1].shape == (2,)


def test_wrong_sizes_are_refused(engine):
    for name in ("num_classes", "in_channels"):
        for wrong in (0, -1, 1.5, "10", None, True):
            with pytest.raises(ValueError) as caught:
                models.resnet18(**{"num_classes": 10, name: wrong})
            assert str(caught.value) == (f"{name} must be an integer of 1 or "
                                         f"more; received {wrong!r}.")


def test_resnet18s_batch_norm_is_gluons_outside_of_mgpu_too(engine):
    """In the framework's own loop: biased variance, momentum 0.9 rounded to
    float32, epsilon 1e-5."""
    net = mgpu.initialize(models.resnet18(), on(0), dtype="float64").net
    layer = net[1]
    x = mgpu.put(np.random.default_rng(0).normal(2, 3, (2, 64, 3, 3)),
                 mgpu.cpu(0))
    host = mgpu.to_numpy(x)
    if engine.name == "torch":
        layer.train()
        found = layer(x).detach()
        mean, var = layer.running_mean, layer.running_var
    else:
        from mxnet import autograd
        with autograd.record():
            found = layer(x)
        found.backward()
        mean, var = layer.running_mean.data(), layer.running_var.data()
    axes, move = (0, 2, 3), 1 - float(np.float32(0.9))
    wanted = (host - host.mean(axes, keepdims=True)) / np.sqrt(
        host.var(axes, keepdims=True) + 1e-5)
    # float64; another momentum is off by 2e-8
    assert relative_difference(mgpu.to_numpy(found), wanted) < 1e-13
    assert relative_difference(mgpu.to_numpy(mean),
                               move * host.mean(axes)) < 1e-13
    assert relative_difference(mgpu.to_numpy(var), 1 - move + move
                               * host.var(axes)) < 1e-13
