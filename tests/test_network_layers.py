"""Properties of native networks: layers, shared tensors, calls, dropout. One
body for both backends."""
import numpy as np
import pytest

import mgpu
import nets
from conftest import BACKENDS


def stack(backend, torch_layers, gluon_layers):
    """A network of the layers that one of two functions of ``nn`` gives."""
    if backend.name == "torch":
        return nets.torch(torch_layers)()
    return nets.gluon(gluon_layers)()


def ten_layers(backend):
    return stack(backend, lambda nn: [
        nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4, 1e-3, 0.25),
        nn.ReLU(), nn.MaxPool2d(2, 1, 1, ceil_mode=True),
        nn.AvgPool2d(2, count_include_pad=False), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.25), nn.LeakyReLU(0.2), nn.Linear(4, 3),
    ], lambda nn: [
        nn.Conv2D(4, 3, 2, 1, in_channels=2),
        nn.BatchNorm(in_channels=4, epsilon=1e-3, momentum=0.75),
        nn.Activation("relu"), nn.MaxPool2D(2, 1, 1, ceil_mode=True),
        nn.AvgPool2D(2, count_include_pad=False), nn.GlobalAvgPool2D(),
        nn.Flatten(), nn.Dropout(0.25), nn.LeakyReLU(0.2),
        nn.Dense(3, in_units=4)])


def test_layers_in_words_of_no_framework(backend):
    layers = backend.network(ten_layers(backend)).layers()
    assert [(layer.path, layer.kind) for layer in layers] == [
        (str(i), kind) for i, kind in enumerate((
            "conv", "batch_norm", "relu", "max_pool", "avg_pool",
            "global_avg_pool", "flatten", "dropout", "leaky_relu", "dense"))]
    conv, norm, _, largest, mean, _, _, dropout, leaky, dense = (
        layer.options for layer in layers)
    assert (conv["kernel"], conv["stride"], conv["padding"]) \
        == ((3, 3), (2, 2), (1, 1))
    assert norm["epsilon"] == 1e-3 and norm["momentum"] == 0.75
    assert (largest["ceil"], largest["padding"]) == (True, (1, 1))
    assert mean["count_include_pad"] is False
    assert dropout["rate"] == 0.25 and leaky["slope"] == 0.2
    assert dense["units"] == 3
    assert layers[0].parameters == ("0.weight", "0.bias")
    assert layers[1].parameters[:4] == (
        "1.gamma", "1.beta", "1.running_mean", "1.running_var")


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="needs MXNet")
def test_a_compiled_network_runs_layer_by_layer_for_that_time():
    with mgpu.using_backend("mxnet") as backend:
        net = nets.gluon(lambda nn: [
            nn.Dense(3, in_units=4, activation="relu"), nn.Dropout(0.5)])()
        replicas = mgpu.initialize(net, [mgpu.cpu(0)], "uniform")
        net.hybridize()
        x = mgpu.put(np.ones((2, 4), "float32"), mgpu.cpu(0))
        before = mgpu.to_numpy(replicas[0](x))
        seen = []
        with replicas.network.watch_layers(lambda path, *_: seen.append(path)):
            during = mgpu.to_numpy(replicas[0](x))
        # the activation belongs to its dense layer
        assert seen == ["0", "1"] and net._active and (before == during).all()
        with replicas.network.use_masks(
                lambda x, *_: backend.ops.zeros_like(x)), mgpu.record():
            assert not mgpu.to_numpy(replicas[0](x)).any()
        assert net._active


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_native_arithmetic_is_the_frameworks_own():
    """`Network.native`: torch keeps the unbiased variance then."""
    with mgpu.using_backend("torch"):
        from torch import nn
        x = np.random.default_rng(0).normal(size=(4, 3))
        found = []
        for native in (False, True):
            replicas = mgpu.initialize(nn.BatchNorm1d(3), [mgpu.cpu(0)],
                                       "uniform",
                                       dtype="float64")
            replicas.network.own_arithmetic = native
            with mgpu.record():
                y = replicas[0](mgpu.put(x, mgpu.cpu(0)))
            mgpu.backward(y)
            found.append(replicas.export_numpy()["running_var"])
        share = [(v - 0.9) / 0.1 / x.var(0) for v in found]
        assert np.allclose(share[0], 1, rtol=1e-6)
        assert np.allclose(share[1], 4 / 3, rtol=1e-6)
