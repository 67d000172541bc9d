"""Networks of MXNet on several contexts: what only Gluon's have. (What they
compute: tests/test_data_parallel.py, against plain Gluon on one.)"""
import numpy as np
import pytest

import mgpu
from conftest import BACKENDS

if "mxnet" in BACKENDS:
    with mgpu.using_backend("mxnet"):
        import mxnet as mx
    from mxnet import autograd
    from mxnet.gluon import nn

pytestmark = [pytest.mark.skipif("mxnet" not in BACKENDS, reason="no MXNet"),
              pytest.mark.parametrize("backend", ["mxnet"], indirect=True)]


def made(*layers):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="n_")
    net.add(*layers)
    net.initialize(mx.init.Xavier(), ctx=mx.cpu(0))
    net.cast("float64")
    return net


def rows(devices, *sizes, columns=6):
    """A shard of so many rows for each device."""
    x = np.random.default_rng(0).normal(size=(sum(sizes), columns))
    return list(map(mgpu.put, np.split(x, np.cumsum(sizes)[:-1]), devices))


def close(found, expected, tolerance=1e-12):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def test_losses_one_by_one_raise(backend, devices):
    """Each would overwrite the gradient of the one before."""
    for hybridize in (False, True):
        net = made(nn.Dense(5, in_units=6, activation="tanh"),
                   nn.Dense(3, in_units=5))
        net.hybridize(hybridize)
        replicas = mgpu.initialize(net, devices)
        with autograd.record():
            first, second, *_ = ((z * z).sum() for z in replicas(
                rows(devices, 3, 2, 3)))
        first.backward()
        before = net[0].weight.grad().asnumpy()
        with pytest.raises(mx.MXNetError, match="no inputs in computation"):
            second.backward()
        with pytest.raises(RuntimeError, match="once with the losses of all"):
            backend.backward([second])
        assert (net[0].weight.grad().asnumpy() == before).all()


@pytest.mark.parametrize("hybridize", [False, True])
def test_what_is_written_to_running_statistics_reaches_all(
        backend, devices, hybridize):
    """Each device's differ before, and after the next pass."""
    net = made(nn.BatchNorm(in_channels=2))
    net.hybridize(hybridize, static_alloc=hybridize)
    replicas = mgpu.initialize(net, devices)
    mean = replicas.statistics()[0]
    for begin in (0.0, 5.0):
        net[0].running_mean.set_data(mx.nd.full(2, begin))
        shards = rows(devices, 3, 4, 5, columns=2)
        assert all((x.asnumpy() == begin).all() for x in mean.list_data())
        with mgpu.record():
            outputs = replicas(shards)
        mgpu.backward(outputs)
        momentum = float(np.float32(0.9))
        close([x.asnumpy() for x in mean.list_data()], [
            momentum * begin + (1 - momentum) * x.asnumpy().mean(0)
            for x in shards])


def test_writes_to_parameters_raise(backend, devices):
    class Writes(nn.Dense):
        def forward(self, x):
            with autograd.pause():
                self.weight.set_data(self.weight.data() * 2)
            return super().forward(x)
    replicas = mgpu.initialize(made(Writes(3, in_units=6)), devices)
    with autograd.record(), pytest.raises(RuntimeError, match="forward "
                                          "writes to the parameter writes"):
        replicas(rows(devices, 2, 1, 2))


# -- parity's view ------------------------------------------------------------

def test_masks_and_layers_know_their_device(backend, devices):
    net = made(nn.Dense(4, in_units=6, activation="relu"), nn.Dropout(0.5),
               nn.Dense(3, in_units=4))
    net.hybridize()
    replicas = mgpu.initialize(net, devices)
    network = replicas.network
    shards, seen, drawn = rows(devices, 2, 1, 2), [], []

    def draw(x, rate, axes, index):
        drawn.append(index)
        return mx.nd.ones_like(x) * index
    with network.watch_layers(lambda path, x, y, i: seen.append(
            (path, i, x[0].ctx))), network.use_masks(draw), \
            backend.scope(recording=True, training=True):
        outputs = replicas(shards)
    count = len(devices)
    assert drawn == list(range(count))
    assert [(path, i) for path, i, _ in seen] == [
        (path, i) for i in range(count) for path in ("0", "1", "2")]
    assert all(ctx == mx.cpu(i) for _, i, ctx in seen)
    x, bias = shards[0], net[2].bias.data()
    close([outputs[0].asnumpy()], [(x[:, :3] * 0 + bias).asnumpy()])
    assert net._active and "forward" not in vars(net[1])


# -- the network stays Gluon's own --------------------------------------------

def test_the_first_contexts_values_count(backend, devices):
    net = made(nn.Dense(3, in_units=6))
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    net[0].weight.list_data()[1][:] = 7
    expected = net[0].weight.data(mx.cpu(0)).asnumpy()
    mgpu.initialize(net, devices)
    assert net[0].weight.list_ctx() == [mx.cpu(0)]
    assert (net[0].weight.data().asnumpy() == expected).all()
