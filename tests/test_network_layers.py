"""Properties of native networks: layers, shared tensors, calls, dropout. One
body for both backends."""
import numpy as np
import pytest

import mgpu
import nets
from conftest import BACKENDS
from helpers import assert_bit_equal, relative_difference


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
def test_own_arithmetic_is_that_of_plain_torch():
    """`Probe.own_arithmetic`: torch keeps the unbiased variance."""
    import torch
    x = np.random.default_rng(0).normal(size=(4, 3))
    plain, found = torch.nn.BatchNorm1d(3).double(), []
    expected = plain(torch.from_numpy(x)).detach().numpy()
    with mgpu.using_backend("torch"):
        for own in (False, True):
            replicas = mgpu.initialize(torch.nn.BatchNorm1d(3).double(),
                                       [mgpu.cpu(0)])
            replicas.network.own_arithmetic = own
            with mgpu.record():
                y = replicas[0](mgpu.put(x, mgpu.cpu(0)))
            mgpu.backward(y)
            found.append((mgpu.to_numpy(y), replicas.export_numpy()))
    (_, gluons), (y, torchs) = found
    assert_bit_equal(y, expected)
    for name, value in plain.state_dict().items():
        if name.startswith("running"):
            assert_bit_equal(torchs[name], value.numpy())
    kept = float(np.float32(0.9))       # MXNet's option is a float32
    assert relative_difference(gluons["running_var"],
                               kept + (1 - kept) * x.var(0)) < 1e-15
