"""What an engine tells of a user's network: layers, shared tensors, calls,
dropout. One body for both engines."""
import contextlib
import copy
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS, ENGINES
from helpers import using_engine


@pytest.fixture
def build(backend):
    """``build(name)`` makes a network on the engine at hand."""
    if backend.name == "torch":
        from torch import nn
        return {
            "plain": lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4, 1e-3, 0.25),
                nn.ReLU(), nn.MaxPool2d(2, 1, 1, ceil_mode=True),
                nn.AvgPool2d(2, count_include_pad=False),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.25),
                nn.LeakyReLU(0.2), nn.Linear(4, 3)),
            "dropout": lambda: nn.Sequential(nn.Dropout(0.5),
                                             nn.Dropout2d(0.5)),
            "tied": lambda: tie(nn)}

    from mxnet.gluon import nn

    def stack(*layers):
        net = nn.HybridSequential()
        net.add(*layers)
        return net
    first = nn.Dense(3, in_units=3)
    return {
        "plain": lambda: stack(
            nn.Conv2D(4, 3, 2, 1, in_channels=2),
            nn.BatchNorm(in_channels=4, epsilon=1e-3, momentum=0.75),
            nn.Activation("relu"), nn.MaxPool2D(2, 1, 1, ceil_mode=True),
            nn.AvgPool2D(2, count_include_pad=False), nn.GlobalAvgPool2D(),
            nn.Flatten(), nn.Dropout(0.25), nn.LeakyReLU(0.2),
            nn.Dense(3, in_units=4)),
        "dropout": lambda: stack(nn.Dropout(0.5),
                                 nn.Dropout(0.5, axes=(2, 3))),
        "tied": lambda: stack(first, nn.Activation("tanh"), nn.Dense(
            3, in_units=3, params=first.params))}


def tie(nn):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net


def test_layers_in_words_of_no_framework(backend, build):
    layers = backend.network(build["plain"]()).layers()
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


def test_shared_tensors(backend, build):
    network = backend.network(build["tied"]())
    assert network.aliases() == {"0.weight": ["0.weight", "2.weight"],
                                 "0.bias": ["0.bias", "2.bias"]}
    assert backend.network(build["plain"]()).aliases() == {}


@pytest.mark.parametrize("k", (1, 3))
def test_watch_is_told_of_every_call(backend, build, k):
    places = [mgpu.cpu(i) for i in range(k)]
    x = np.random.default_rng(0).normal(size=(5, 2, 8, 8)).astype("float32")
    replicas = mgpu.initialize(build["plain"](), places, "uniform", sample=x)
    shards, _ = mgpu.split_batch(x, np.zeros(5, "int32"), places)
    seen = []
    with replicas.network.watch_layers(
            lambda path, inputs, output, index: seen.append(
                (index, path, tuple(inputs[0].shape), tuple(output.shape)))):
        outputs = replicas(shards)
    for i, shard in enumerate(shards):
        mine = [entry for entry in seen if entry[0] == i]
        assert [path for _, path, *_ in mine] == [str(n) for n in range(10)]
        assert mine[0][2] == tuple(shard.shape)
        assert mine[-1][3] == tuple(outputs[i].shape)
    seen.clear()
    replicas(shards)
    assert not seen     # no longer


def test_dropout_takes_the_rules_masks(backend, build):
    places = [mgpu.cpu(0), mgpu.cpu(1)]
    x = np.ones((2, 4, 3, 3), "float32")
    replicas = mgpu.initialize(build["dropout"](), places, "uniform", sample=x)
    calls = []

    def rule(array, rate, axes, index):
        calls.append((index, rate, axes))
        return backend.put(np.full((1, 1, 1, 1), 3.0 + index, "float32"),
                           array)
    shards = mgpu.split_and_load(x, places)
    with replicas.network.use_masks(rule):
        with mgpu.record():
            training = replicas(shards)
        predicted = replicas(shards)
    assert sorted(calls) == [(0, 0.5, ()), (0, 0.5, (2, 3)),
                             (1, 0.5, ()), (1, 0.5, (2, 3))]
    assert (mgpu.to_numpy(training[0]) == 9).all()
    assert (mgpu.to_numpy(training[1]) == 16).all()
    assert (mgpu.to_numpy(predicted[0]) == 1).all()     # no dropout there
    with mgpu.record():
        again = mgpu.to_numpy(replicas(shards)[0])
    assert set(np.unique(again)) <= {0.0, 2.0, 4.0}     # its own masks again


def test_a_compiled_network_runs_layer_by_layer_for_that_time():
    with mgpu.using_backend("mxnet") as backend:
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(3, in_units=4, activation="relu"), nn.Dropout(0.5))
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


# -- what the user has put on a module (torch) --------------------------------

TORCH = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "torch"], indirect=True)
MXNET = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "mxnet"], indirect=True)


def trained(net, k, steps=2, prepare=None):
    """`net` after steps of mgpu on `k` devices, or of plain torch (0)."""
    import torch
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 6)), rng.normal(size=(12, 4))
    if k:
        replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if prepare is not None:
        prepare(net)
    for _ in range(steps):
        if k:
            mgpu.train_batch(X, y, replicas, mgpu.losses.L2Loss(), trainer)
            replicas.check_equal()
        else:
            optimizer.zero_grad()
            (net(torch.from_numpy(X)) - torch.from_numpy(y)).square().mean(
                1).sum().div(2 * len(X)).backward()
            optimizer.step()
    return {name: p.detach().numpy().copy()
            for name, p in net.named_parameters()}


def perceptron():
    import torch
    from torch import nn
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def mask_by_hand(net):
    import torch
    mask = (torch.arange(48) % 3 > 0).double().reshape(8, 6)
    net[0].weight.register_hook(lambda g: g * mask)


def scale_afterwards(net):
    net[0].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", p.grad * 3))


def prune(net):
    from torch.nn.utils import prune
    prune.l1_unstructured(net[0], "weight", 0.5)


def legacy_weight_norm(net):
    from torch.nn.utils import weight_norm
    weight_norm(net[0])


@TORCH
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("when, what", [
    ("before", mask_by_hand), ("after", mask_by_hand),
    ("before", scale_afterwards), ("after", scale_afterwards),
    ("before", prune), ("before", legacy_weight_norm)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_hooks_on_parameters_act_on_every_device(backend, k, when, what):
    """Put on the network before `initialize` and after it."""
    found = []
    for devices in (0, k):
        net = perceptron()
        if when == "before":
            what(net)
        found.append(trained(net, devices, prepare=what if when == "after"
                             else None))
    for name, value in found[0].items():
        assert np.abs(found[1][name] - value).max() < 1e-12, name


@dataclass(slots=True)
class Slots:
    divisor: float = 1.0


class OwnAttributes(dict):
    """``copy.deepcopy`` leaves it without attributes."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


def configured():
    """A network whose forward pass depends on what is no array."""
    from types import SimpleNamespace

    from torch import nn

    class Configured(nn.Sequential):
        temperature, calls = 1.0, 0

        def forward(self, x):
            self.calls += 1
            for hook in self.own_hooks:
                x = hook(x)
            x = super().forward(x) * self.calls * self.table["scale"][
                0] / (self.temperature * self.config.divisor
                      * self.config.nested.divisor) * self.array[0] \
                * self.own.factor * self.own.inner[0].factor
            return x + self.shift + sum(self.shifts)
    net = Configured(*perceptron())
    net.handle = net[0].register_forward_hook(lambda m, x, out: 2 * out)
    net.table = {"scale": [1.0]}
    net.config = SimpleNamespace(divisor=1.0, nested=Slots())
    net.array = np.ones(1)
    net.own = OwnAttributes(factor=0.5, inner=[OwnAttributes(factor=2.0)])
    net.own_hooks, net.no_hooks, net.n_hooks = [], None, 0
    net.shift, net.shifts = 2 * a_one(net), []
    return net


def as_temperature(net):
    net.temperature = 2.0


def in_a_table(net):
    net.table["scale"][0] = 3.0


def in_an_object(net):
    net.config.divisor = 2.0


def deep_in_an_object(net):
    net.config.nested.divisor = 2.0


def in_an_array(net):
    net.array[0] = 2.0


def in_its_own_attributes(net):
    net.own.factor = 2.0
    net.own.inner[0].factor = 0.25


def as_its_own_attributes(net):
    net.own = OwnAttributes(factor=3.0, inner=[net.own])


def beside_a_lock(net):
    net.lock = threading.Lock()
    net.temperature = 2.0


def beside_a_cycle(net):
    net.cycle = [net]
    net.cycle.append(net.cycle)
    net.temperature = 2.0


def as_forward_hook(net):
    net[2].register_forward_hook(lambda m, x, out: 3 * out)


def as_hook_with_a_tensor(net):
    import torch

    class Scale:
        def __init__(self):
            self.by = 2 * torch.ones((), dtype=torch.float64)

        def __call__(self, module, x, out):
            return out * self.by
    net[2].register_forward_hook(Scale())


def as_backward_hook(net):
    net[1].register_full_backward_hook(lambda m, before, after: (
        2 * before[0],))


def as_a_tensor(net):
    net.temperature = 2 * a_one(net)


def as_another_tensor(net):
    net.shift = a_one(net)


def as_tensors_in_a_list(net):
    net.shifts = [a_one(net), -3 * a_one(net)]


def a_one(net):
    return net[0].weight.new_ones(())


def in_a_list_named_as_torchs_tables(net):
    net.own_hooks.append(lambda x: 2 * x)


def as_a_hook_that_goes(net):
    net.handle.remove()


def as_count(net):
    net.calls = 5


@TORCH
@pytest.mark.parametrize("change", [
    as_temperature, in_a_table, in_an_object, deep_in_an_object, in_an_array,
    beside_a_lock, beside_a_cycle, as_forward_hook, as_hook_with_a_tensor,
    as_backward_hook, as_a_hook_that_goes, as_count,
    in_a_list_named_as_torchs_tables, as_a_tensor, as_another_tensor,
    as_tensors_in_a_list, in_its_own_attributes, as_its_own_attributes])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_attributes_and_hooks_of_layers_follow_replica_0(backend, k, change):
    """What is no parameter acts on every device too, however it is
    changed."""
    plain, here = (trained(configured(), devices, prepare=change)
                   for devices in (0, k))
    for name, value in plain.items():
        assert np.abs(here[name] - value).max() < 1e-12, name


@TORCH
@pytest.mark.parametrize("seeds", [(5, 6, 7), (5, 5, 5)])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_generator_that_the_user_seeds_is_seeded_on_every_device(
        backend, k, seeds):
    """Each device's own goes on from there. Here all draw as many numbers as
    one device does."""
    import torch

    class Noisy(torch.nn.Sequential):
        def forward(self, x):
            own, other = self.streams["own"], self.streams["other"][0]
            return super().forward(x) * (
                torch.rand((), generator=own, dtype=x.dtype)
                + torch.rand((), generator=other, dtype=x.dtype))
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 6)), rng.normal(size=(12, 4))
    loss, found = mgpu.losses.L2Loss(), []
    for devices in (0, k):
        net = Noisy(*perceptron())
        net.streams = {"own": torch.Generator().manual_seed(3),
                       "other": [torch.Generator().manual_seed(4)]}
        if devices:
            replicas = mgpu.initialize(net, list(map(mgpu.cpu, range(k))))
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
        else:
            optimizer = torch.optim.SGD(net.parameters(), 0.1 / len(X))
        for seed in seeds:
            net.streams["own"].manual_seed(seed)
            if devices:
                mgpu.train_batch(X, y, replicas, loss, trainer)
            else:
                optimizer.zero_grad()
                loss(net(torch.from_numpy(X)), torch.from_numpy(y)) \
                    .sum().backward()
                optimizer.step()
        found.append([p.detach().numpy() for p in net.parameters()])
    for plain, value in zip(*found, strict=True):
        assert np.abs(value - plain).max() < 1e-12


@TORCH
def test_tensors_that_a_pass_keeps_stay_with_their_device(backend):
    from torch import nn

    class Sum(nn.Linear):
        so_far = None

        def forward(self, x):
            self.so_far = x if self.so_far is None else self.so_far + x
            return super().forward(self.so_far)
    net = Sum(6, 6).double()
    nn.init.zeros_(net.bias)
    nn.init.eye_(net.weight)
    replicas = mgpu.initialize(net, [mgpu.cpu(0), mgpu.cpu(1)])
    shards = mgpu.split_and_load(np.eye(6)[:4], replicas.devices)
    for calls in (1, 2, 3):
        for shard, output in zip(shards, replicas(shards)):
            assert (output == calls * shard).all()
    replicas[0](shards[0])      # alone
    for calls, shard, output in zip((5, 4), shards, replicas(shards)):
        assert (output == calls * shard).all()


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_two_parameters_have_one_name(backend, k):
    """Where a norm has a gamma, a beta or a buffer of these names beside its
    own weight and bias: one state of the optimiser for each, and all values
    go to a file and back. Only torch's own are drawn anew."""
    import torch
    from torch import nn

    class Norm(nn.LayerNorm):
        def __init__(self):
            super().__init__(4)
            self.gamma = nn.Parameter(torch.full((4,), 0.5))
            self.register_buffer("beta", torch.full((4,), 3.0))

        def forward(self, x):
            return super().forward(x) * self.gamma + self.beta
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), Norm()).double()
    with torch.no_grad():
        net[1].weight.fill_(2.0)
    plain = copy.deepcopy(net)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    assert [p.name for p in replicas.all_parameters()] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "1.gamma", "1.beta"]
    trainer = mgpu.Trainer(replicas, "adam", {"lr": 0.1}, semantics="torch")
    optimizer = torch.optim.Adam(plain.parameters(), 0.1)
    X, y = np.random.default_rng(0).normal(size=(2, 8, 6))
    for _ in range(3):
        mgpu.train_batch(X, y[:, :4], replicas, mgpu.losses.L2Loss(), trainer)
        optimizer.zero_grad()
        (plain(torch.tensor(X)) - torch.tensor(y[:, :4])).square().mean(
            1).sum().div(16).backward()
        optimizer.step()
    values = replicas.export_numpy()
    for name, x in plain.state_dict().items():
        assert abs(values[name] - x.numpy()).max() < 1e-12
    replicas.import_numpy({n: x + 1 for n, x in values.items()})
    for name, x in net.state_dict().items():
        assert (x.numpy() == values[name] + 1).all()
    mgpu.initialize(net, replicas.devices, "xavier", force_reinit=True)
    assert (net[1].weight == 1).all()
    assert (net[1].gamma.detach().numpy() == values["1.gamma"] + 1).all()


def replace_layer(net):
    from torch import nn
    net[1] = nn.Sigmoid()


def append_layer(net):
    from torch import nn
    net.append(nn.Tanh())


def change_class(net):
    net[1].__class__ = type("Other", (type(net[1]),), {})


def remove_parameter(net):
    net[2].bias = None


def tie_parameters(net):
    net[0].bias = net[0].weight


@TORCH
@pytest.mark.parametrize("change, where", [
    (replace_layer, "1"), (append_layer, "3"), (change_class, "1"),
    (prune, r"0\.weight"), (remove_parameter, r"2\.bias"),
    (tie_parameters, r"0\.bias")])
@pytest.mark.parametrize("k", [1, 2])
def test_other_layers_are_refused_until_the_network_is_made_anew(
        backend, k, change, where):
    net, devices = perceptron(), [mgpu.cpu(i) for i in range(k)]
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(np.eye(6)[:4], devices)
    replicas(shards)
    change(net)
    with pytest.raises(RuntimeError, match=f"others under .*'{where}'"):
        replicas(shards)
    if change in (prune, remove_parameter):     # of its layer
        with pytest.raises(RuntimeError, match=f"others under '{where}'"):
            [p.data() for p in replicas.params()]
    if change is not tie_parameters:
        replicas = mgpu.initialize(net, devices, init="keep",
                                   force_reinit=True)
        assert len(replicas(shards)) == k


def caching(grows):
    import torch
    from torch import nn

    class Caching(nn.Linear):
        def __init__(self):
            super().__init__(6, 4, dtype=torch.float64)
            self.register_buffer("cache", torch.zeros(1) if grows else None)

        def forward(self, x):
            if grows == "in place":
                self.cache.resize_(2).fill_(0)
            elif grows:
                self.cache = torch.cat([self.cache, torch.zeros(1)])
            elif self.cache is None:
                self.register_buffer("cache", torch.ones(1))
            return super().forward(x) + self.cache.sum()
    torch.manual_seed(0)
    return Caching()


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_buffers_that_passes_make_belong_to_their_device(backend, k):
    """All devices have them then; on one device a buffer may even grow."""
    outputs = []
    for devices in (1, k):
        replicas = mgpu.initialize(
            caching(False), [mgpu.cpu(i) for i in range(devices)])
        shards = mgpu.split_and_load(np.eye(6)[:4], replicas.devices,
                                     even_split=False)
        replicas(shards)
        outputs.append(np.concatenate(
            [mgpu.to_numpy(x) for x in replicas(shards)]))
    assert np.abs(outputs[0] - outputs[1]).max() < 1e-12
    replicas.net.register_buffer("late", mgpu.put(np.ones(1), mgpu.cpu(0)))
    with contextlib.nullcontext() if k == 1 else pytest.raises(
            RuntimeError, match="others under 'late'"):
        replicas(shards)
    for grows in (True, "in place"):
        replicas = mgpu.initialize(caching(grows), replicas.devices)
        replicas.export_numpy()
        with mgpu.record(), contextlib.nullcontext() if k == 1 \
                else pytest.raises(
                    ValueError, match=r"'cache' keeps its shape, \(1,\); "
                    r"received \(2,\)"):
            replicas(shards)


def rotating(length=3):
    """A network that makes its table of angles longer when a longer text
    comes."""
    import torch
    from torch import nn

    class Rotating(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3).double()
            self.make(length)

        def make(self, length):
            self.register_buffer("cos", torch.arange(length).double().cos()[
                :, None].repeat(1, 4), persistent=False)

        def forward(self, text):
            if text.shape[1] > len(self.cos):
                self.make(text.shape[1])
            return self.out((text * self.cos[:text.shape[1]]).mean(1))
    return Rotating()


def texts(length):
    return (np.random.default_rng(length).normal(size=(4, length, 4)),
            np.arange(4) % 3)


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
@pytest.mark.parametrize("grows_in", ["training", "predicting", "net"])
def test_a_buffer_that_a_longer_text_makes_longer(grows_in, tmp_path):
    """On one device training goes on as in plain PyTorch, and the values of
    the longer one are saved and read; before one is there, refused whole."""
    import torch
    with mgpu.using_backend("torch"):
        plain = rotating()
        replicas = mgpu.initialize(copy.deepcopy(plain), [mgpu.cpu(0)])
        loss = mgpu.losses.SoftmaxCrossEntropyLoss()
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        own = torch.optim.SGD(plain.parameters(), 0.125)
        short, path = replicas.export_numpy(), tmp_path / "one.npz"
        for length in (3, 5, 3, 7, 3):
            X, y = texts(length)
            if length > 3 and grows_in == "predicting":
                replicas(mgpu.split_and_load(X, replicas.devices))
            elif length > 3 and grows_in == "net":
                replicas.net(torch.from_numpy(X))
            else:
                own.zero_grad()
                torch.nn.functional.cross_entropy(
                    plain(torch.from_numpy(X)), torch.from_numpy(y)).backward()
                own.step()
                mgpu.train_batch(X, y, replicas, loss, trainer)
                assert replicas.all_parameters()[-1].shape == tuple(
                    replicas.net.cos.shape)
            if length > 3:
                before = replicas.net.out.weight.detach().clone()
                with pytest.raises(ValueError, match=r"cos: shape \(3, 4\)"):
                    replicas.import_numpy(short)
                assert bool((before == replicas.net.out.weight).all())
            mgpu.save_checkpoint(path, replicas, trainer)
            mgpu.load_checkpoint(path, replicas, trainer)
        assert replicas.export_numpy()["cos"].shape == (7, 4)
        for p, q in zip(plain.parameters(), replicas.net.parameters()):
            assert bool(((p - q).abs() < 1e-12).all())


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
@pytest.mark.parametrize("k", [2, 3])
def test_a_longer_buffer_on_several_devices_may_be_put_back(k):
    """Refused by name; with one of its own shape in its place all goes on."""
    import torch
    with mgpu.using_backend("torch"):
        replicas = mgpu.initialize(rotating(), [mgpu.cpu(i)
                                                for i in range(k)])
        loss = mgpu.losses.SoftmaxCrossEntropyLoss()
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        values = replicas.export_numpy()
        replicas.net(torch.from_numpy(texts(5)[0]))
        for call in (lambda: replicas.import_numpy(values),
                     lambda: mgpu.train_batch(*texts(3), replicas, loss,
                                              trainer)):
            with pytest.raises(ValueError, match="Put one of its own in that "
                               "place, and the replicas go on"):
                call()
        replicas.net.make(3)
        replicas.import_numpy(values)
        mgpu.train_batch(*texts(3), replicas, loss, trainer)
        replicas.check_equal()


def counting(how):
    """A network whose passes count themselves."""
    from types import SimpleNamespace

    import torch
    from torch import nn

    class Counting(nn.Sequential):
        def __init__(self):
            super().__init__(*perceptron())
            self.n = torch.zeros(())
            if how == "buffer of a pass":
                del self.n
                self.register_buffer("n", None)
            elif how == "tables":
                self.kept = {"n": [torch.zeros(())]}
            elif how == "object":
                self.kept = SimpleNamespace(n=torch.zeros(()), late=False)
            elif how == "large array":
                self.kept = np.zeros(2000)
            elif how == "number":
                self.kept = 0
            elif how == "generator":
                self.kept = [torch.Generator().manual_seed(3)]
                self.same = self.kept[0]
            elif how == "with history":
                self.n = None

        def forward(self, x):
            with torch.no_grad():
                factor = self.count(x)
            y = super().forward(x)
            if how == "with history":
                self.n = y.mean() * 0 + 1 + (
                    0 if self.n is None else self.n.detach())
                factor = 1 + 0.1 * self.n.detach()
            return y * factor

        def count(self, x):
            if how == "attribute":
                self.n = self.n + 1
            elif how == "in place":
                self.n += 1
            elif how == "buffer of a pass":
                self.n = x.new_ones(()) if self.n is None else self.n + 1
            elif how == "registered in a pass":
                if "late" not in self._buffers:
                    self.register_buffer("late", torch.zeros(()))
                self.late += 1
                return 1 + 0.1 * self.late
            elif how == "tables":
                self.kept["n"].append(self.kept["n"][-1] + 1)
                return 1 + 0.1 * self.kept["n"][-1]
            elif how == "object":
                self.kept.n = self.kept.n + 1
                return 1 + 0.1 * self.kept.n
            elif how == "large array":
                self.kept[7] += 1
                return 1 + 0.1 * self.kept[7]
            elif how == "number":
                self.kept += 1
                return 1 + 0.1 * self.kept
            elif how == "generator":
                return torch.rand((), generator=self.same)
            return 1 + 0.1 * (self.n or 0)
    torch.manual_seed(0)
    return Counting()


@TORCH
@pytest.mark.parametrize("how", [
    "attribute", "in place", "buffer of a pass", "registered in a pass",
    "tables", "object", "large array", "number", "generator",
    "with history"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_devices_without_rows_have_what_a_pass_keeps(backend, k, how):
    """Of the first device that ran, whichever that is: in steps, and in
    predictions."""
    import torch
    rng = np.random.default_rng(0)
    loss = torch.nn.MSELoss(reduction="none")
    plain, net = counting(how), counting(how)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    for rows in (8, 1, 2, 8, 1, 3):
        X, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 4))
        mgpu.train_batch(X, y, replicas, lambda out, y: loss(out, y).mean(1),
                         trainer)
        optimizer.zero_grad()
        loss(plain(torch.from_numpy(X)),
             torch.from_numpy(y)).mean(1).sum().div(rows).backward()
        optimizer.step()
        for name, p in plain.named_parameters():
            assert (net.get_parameter(name) - p).abs().max() < 1e-12, name
    X = rng.normal(size=(4, 6))
    with torch.no_grad():
        for last in (False, True, False):
            shards = [None] * k
            shards[-last] = mgpu.put(X, mgpu.cpu(-last % k))
            expected = plain(torch.from_numpy(X))
            assert (replicas(shards)[-last] - expected).abs().max() < 1e-12
        found = torch.cat([out for out in replicas(mgpu.split_batch(
            X, X, replicas.devices)[0])])
    assert (found - plain(torch.from_numpy(X)).detach()).abs().max() < 1e-12


def mxnet_layer(net):
    from mxnet.gluon import nn
    new = nn.Dense(6, in_units=6)
    new.initialize(ctx=net[0].weight.list_ctx())
    return new


def replace_dense(net):
    net._children["1"] = mxnet_layer(net)


def append_dense(net):
    net.add(mxnet_layer(net))


@MXNET
@pytest.mark.parametrize("change, where", [
    (replace_dense, "1.weight"), (append_dense, "2.weight")])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_other_parameters_are_refused_until_the_network_is_made_anew(
        backend, k, change, where):
    """No trainer would train them. What has no parameters acts at once."""
    from mxnet.gluon import nn
    net, devices = nn.HybridSequential(), [mgpu.cpu(i) for i in range(k)]
    net.add(nn.Dense(6, in_units=6), nn.Dense(6, in_units=6))
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(np.ones((2 * k, 6), "float32"), devices)
    replicas(shards)
    change(net)
    with pytest.raises(RuntimeError, match=f"others under '{where}'"):
        replicas(shards)
    replicas = mgpu.initialize(net, devices, init="keep", force_reinit=True)
    net.add(nn.Activation("tanh"))
    assert len(replicas(shards)) == k
    assert len(replicas.params()) == 2 * (len(net) - 1)


@TORCH
def test_a_tensor_that_was_computed_once_is_refused(backend):
    """A copy would hold the value, and not how it was computed."""
    net = perceptron()
    net[0].twice = net[0].weight * 2
    with pytest.raises(ValueError, match=r"received '0\.twice'"):
        mgpu.initialize(net, [mgpu.cpu(0), mgpu.cpu(1)])
    del net[0].twice
    assert len(mgpu.initialize(net, [mgpu.cpu(0), mgpu.cpu(1)])) == 2


def normalised():
    import torch
    from torch import nn
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4),
                         nn.Linear(4, 4)).double()


@TORCH
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_layer_in_eval_mode_is_frozen(backend, k, when):
    """Under a network in training mode; it normalises by its statistics,
    which stay. Evaluation leaves the modes as they are."""
    found = []
    for devices in (0, k):
        net = normalised()
        net[1].running_mean += 0.5
        if when == "before":
            net[1].eval()
        found.append(trained(net, devices, prepare=lambda net: net[1].eval()))
        assert [m.training for m in net] == [True, False, True]
        assert (net[1].running_mean == 0.5).all()
    for name, value in found[0].items():
        assert np.abs(found[1][name] - value).max() < 1e-12, name


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_a_network_in_eval_mode_predicts_while_others_train(
        backend, k, batch_norm):
    """A teacher next to its student; gradients of its predictions."""
    import torch
    net, x = normalised().eval(), np.random.default_rng(0).normal(size=(7, 6))
    net[1].running_mean += 0.5
    expected = net(torch.from_numpy(x)).detach().numpy()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)],
                               batch_norm=batch_norm)
    shards, _ = mgpu.split_batch(x, x, replicas.devices)
    with mgpu.record():
        with torch.no_grad():
            found = replicas(shards)
            one = replicas[0](shards[0])
        assert mgpu.get_backend().is_training() and torch.is_grad_enabled()
    found = np.concatenate([mgpu.to_numpy(out) for out in found])
    assert np.abs(found - expected).max() < 1e-12
    assert not one.requires_grad and replicas.recorded == [False] * k
    assert (net[1].running_mean == 0.5).all()
    assert not any(m.training for m in net.modules())
    shards = [shard.requires_grad_() for shard in shards]
    with mgpu.record(train_mode=False):
        mgpu.backward([out.sum() for out in replicas(shards)])
    x = torch.from_numpy(x).requires_grad_()
    net(x).sum().backward()
    assert np.abs(np.concatenate([mgpu.to_numpy(shard.grad)
                                  for shard in shards])
                  - x.grad.numpy()).max() < 1e-12


@TORCH
def test_a_network_in_eval_mode_is_not_trained(backend):
    net = normalised().eval()
    before = [x.clone() for x in net.state_dict().values()]
    with pytest.raises(ValueError) as caught:
        trained(net, 2)
    assert str(caught.value) == (
        "a network in eval mode does not train; received Sequential, which "
        "is, inside record(). Call net.train() to train it; use "
        "mgpu.record(train_mode=False) for gradients of its predictions, and "
        "torch.no_grad() for predictions without them.")
    assert all((x == y).all()
               for x, y in zip(net.state_dict().values(), before))
    net = normalised().eval()
    net[2].train()
    with pytest.raises(ValueError, match=r"received one whose '2' is"):
        trained(net, 2)


def sharing(how):
    """A network whose forward pass reads the memory of a parameter under
    another name."""
    import torch
    from torch import nn

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = perceptron(), nn.Linear(6, 4).double()
            weight = self.b.weight.data
            if how == "buffer":
                self.register_buffer("proto", weight)
            elif how == "part of a buffer":
                self.register_buffer("proto", torch.zeros(
                    8, 6, dtype=torch.float64))
                self.b.weight.data = self.proto[:4]
            elif how == "attribute":
                self.proto = self.b.weight.detach()
            elif how == "list":
                self.protos = [[weight.t()]]
            elif how == "parameter":
                self.c = nn.Linear(6, 4, bias=False).double()
                self.c.weight.data = weight
            elif how == "buffer of a buffer":
                self.register_buffer("count", torch.zeros(4, 6).double())
                self.counts = {"all": self.count.view(-1)}

        def forward(self, x):
            y = self.a(x)
            if hasattr(self, "counts"):
                with torch.no_grad():
                    self.count += 0.25
                proto = self.counts["all"].view(4, 6)
            elif hasattr(self, "protos"):
                proto = self.protos[0][0].t()
            else:
                proto = self.c.weight if hasattr(self, "c") else self.proto
            return y + self.b(x) + nn.functional.linear(x, proto[:4].clone())
    torch.manual_seed(0)
    return Sharing()


@TORCH
@pytest.mark.filterwarnings("error:.*had other values")
@pytest.mark.parametrize("how", [
    "buffer", "part of a buffer", "attribute", "list", "parameter",
    "buffer of a buffer"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_what_shares_memory_does_so_on_every_device(backend, k, how):
    """A buffer, an attribute or a parameter that is a view of another
    parameter."""
    plain, here = (trained(sharing(how), devices, 4) for devices in (0, k))
    for name, value in plain.items():
        assert np.abs(here[name] - value).max() < 1e-12, name

    def later(net):
        net.proto = net.b.weight.detach()
    plain, here = (trained(sharing("attribute"), devices, 4, later)
                   for devices in (0, k))
    for name, value in plain.items():
        assert np.abs(here[name] - value).max() < 1e-12, name


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3])
def test_memory_that_only_one_device_would_share_is_refused(backend, k):
    """A large NumPy view; and what takes another array's place."""
    import torch
    from torch import nn
    devices = [mgpu.cpu(i) for i in range(k)]
    refused = contextlib.nullcontext() if k == 1 else pytest.raises(
        ValueError, match="received 'views', which is one of '0.weight'")
    net = nn.Sequential(nn.Linear(60, 40))
    net.views = {"first": net[0].weight.detach().numpy()[3:]}
    with refused:
        mgpu.initialize(net, devices)
    net.views = net[0].weight.detach()
    mgpu.initialize(net, devices, force_reinit=True, init="keep")
    net = sharing("buffer")
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(np.ones((2 * k, 6)), devices)
    replicas(shards)
    net.proto = net.b.weight.data       # as before
    replicas(shards)
    net.proto = torch.zeros_like(net.b.weight.data)
    with contextlib.nullcontext() if k == 1 else pytest.raises(
            ValueError, match=r"place of 'proto' that changes that, for "
            r"\['b\.weight'\]"):
        replicas(shards)


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_cache_of_weights_is_of_one_device(backend, k):
    """In the forward pass the devices take turns; around it, it is
    refused."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations, parametrize

    class Twice(nn.Module):
        def __init__(self, cache):
            super().__init__()
            self.l = parametrizations.orthogonal(nn.Linear(6, 6))
            self.o, self.cache = nn.Linear(6, 4), cache

        def forward(self, x):
            if not self.cache:
                return self.o(self.l(self.l(x)))
            with parametrize.cached():
                return self.o(self.l(self.l(x)))

    def made(cache=True):
        torch.manual_seed(0)
        return Twice(cache).double()
    plain, here = (trained(made(), devices, 4) for devices in (0, k))
    for name, value in plain.items():
        assert np.abs(here[name] - value).max() < 1e-12, name
    with parametrize.cached(), contextlib.nullcontext() if k == 1 \
            else pytest.raises(ValueError, match="in the network's forward"):
        trained(made(False), k, 1)


def partly(*flagged):
    """In eval mode, with a layer that adds in training mode."""
    import torch
    from torch import nn

    class Flagged(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(3 * x, 1.0) + x * 5 \
                if self.training else x
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), Flagged(), nn.Dropout(0.5),
                        nn.BatchNorm1d(4), Flagged()).double().eval()
    for number in flagged:
        net[number].train()
    return net


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_layer_in_training_mode_trains_in_predictions(backend, k):
    """Under a network in eval mode: Monte Carlo dropout. By itself and in
    gradients of predictions; no statistics move."""
    import torch
    x = np.random.default_rng(0).normal(size=(9, 6))
    net, plain = partly(1), partly(1)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])

    def passed():
        shards, _ = mgpu.split_batch(x, x, replicas.devices)
        return np.concatenate([mgpu.to_numpy(out)
                               for out in replicas(shards)])
    for mode in (True, False):
        given = torch.from_numpy(x).requires_grad_()
        expected = plain(given)
        assert np.abs(passed() - expected.detach().numpy()).max() < 1e-12
        expected.sum().backward()
        shards, _ = mgpu.split_batch(x, x, replicas.devices)
        shards = [shard.requires_grad_() for shard in shards]
        with mgpu.record(train_mode=False):
            mgpu.backward([out.sum() for out in replicas(shards)])
        assert np.abs(np.concatenate([mgpu.to_numpy(shard.grad)
                                      for shard in shards])
                      - given.grad.numpy()).max() < 1e-12
        assert [m.training for m in net.modules()] \
            == [m.training for m in plain.modules()]
        for one in (net, plain):
            one[1].train(not mode)
            one[4].train(mode)
    net[4].eval()
    once = passed()
    assert (once == passed()).all()
    net[2].train()
    drawn = []
    for _ in range(2):
        mgpu.seed(3)
        drawn += [passed(), passed()]
    assert (drawn[0] != drawn[1]).any() and (drawn[0] != once).any()
    assert (drawn[0] == drawn[2]).all() and (drawn[1] == drawn[3]).all()
    net[3].train()
    with pytest.raises(ValueError, match=r"received \['3'\] in training "
                       r"mode.*replicas\.net itself"):
        passed()
    net(torch.from_numpy(x))
    net[3].eval()
    assert (net[3].running_mean != 0).all()
    for p in replicas.statistics():
        passed()
        assert all((y == p.data()).all() for y in p.list_data())


@TORCH
def test_a_layer_that_trains_later_draws_in_turn(backend):
    """Whether a replica draws from torch's default stream is asked again
    where layers have other modes."""
    import torch
    from torch import nn
    torch.manual_seed(0)

    class Functional(nn.Module):
        def forward(self, x):       # no name of one that draws
            function = getattr(nn.functional, "".join(("drop", "out")))
            return function(x, 0.5, self.training)
    x = np.ones((40, 50))
    found = []
    for _ in range(2):
        net = nn.Sequential(Functional())
        net[0].eval()
        replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(4)])
        shards = mgpu.split_and_load(x, replicas.devices)
        with mgpu.record():
            replicas(shards)
            net[0].train()
            mgpu.seed(5)
            torch.manual_seed(7)
            before = torch.get_rng_state()
            found.append(np.concatenate(
                [mgpu.to_numpy(out) for out in replicas(shards)]))
        assert (torch.get_rng_state() == before).all()
    assert (found[0] == found[1]).all() and set(np.unique(found)) == {0, 2}


def noise_like(x):
    import torch
    return torch.randn_like(x)


def with_noise(x, net):
    return x + net.share * noise_like(x)


def _sampled(self, h):
    import torch
    return self.share * torch.distributions.Normal(
        torch.zeros_like(h), 1).sample()


def _dropped(self, h):
    from torch.nn import functional
    return functional.dropout(h, self.share, training=True)


def _seeded(self, h):
    import torch
    torch.manual_seed(4)
    return h * torch.rand(300)


def _unseen(h, net):
    import torch
    return h + net.share * getattr(torch, "_".join(("randn", "like")))(h)


class Sampler:
    def __init__(self, function):
        self.function = function

    def __call__(self, h):
        return self.function(h)


NOISES = {
    "attribute": lambda self, h: h + self.share * self.held(h),
    "torch": lambda self, h: h + self.share * self.held(h),
    "partial": lambda self, h: h + self.share * self.held(h),
    "object": lambda self, h: h + self.share * self.held(h),
    "table": lambda self, h: h + self.share * self.held["noise"][0](h),
    "text": lambda self, h: h + self.share * _by_name(self.held, h),
    "function": lambda self, h: with_noise(h, self),
    "method": lambda self, h: h + self.noise(h),
    "unseen": lambda self, h: _unseen(h, self),
    "hook": lambda self, h: h, "loss": lambda self, h: h,
    "mc dropout": _dropped, "seeded": _seeded}


def _by_name(name, h):
    import torch
    return getattr(torch, name)(h)


_turn = threading.Lock()


def alone(h):
    import torch
    assert _turn.acquire(blocking=False), "another device runs"
    time.sleep(0.001)
    _turn.release()
    return torch.randn_like(h)


def in_attribute(how):
    """What an attribute of the network holds, of which its code says
    nothing."""
    import torch
    return {"attribute": alone, "partial": partial(alone),
            "object": Sampler(alone), "table": {"noise": [alone]},
            "torch": torch.randn_like, "text": "randn_like"}.get(how)


def noisy(how):
    """A network of torch that begins to draw when ``net.share`` is set."""
    import torch
    from torch import nn

    def dropout(self, h):
        return nn.functional.dropout(h, self.share, self.training)

    class Net(nn.Module):
        share = 0.0
        noise = _sampled
        change = NOISES.get(how, dropout)

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 3)
            self.rand = nn.Identity()   # that layer draws nothing
            self.held = in_attribute(how)
            if how == "hook":
                self.first.register_forward_hook(lambda m, given, out: (
                    with_noise(out, self) if self.share else out))

        def forward(self, x):
            h = self.rand(self.first(x))
            return self.last(self.change(h) if self.share else h)
    torch.manual_seed(3)
    return Net().double()


def drawn(how, k, steps=24):
    """What a network gives that begins to draw in its third step."""
    import torch
    predicts = how.partition(" ")[2] == "prediction"
    net = noisy(how.partition(" ")[0] if predicts else how)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.01})
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(8, 6)), rng.integers(0, 3, 8)

    def loss(pred, label):
        values = torch.nn.functional.cross_entropy(
            pred, label.long(), reduction="none")
        for _ in range(20 if how == "loss" and net.share else 0):
            values = values + torch.rand_like(values)
        return values
    mgpu.seed(5)
    before = torch.get_rng_state()
    found = []
    begins = 0 if how in ("loss", "mc dropout") else 2
    for step in range(steps):
        net.share = 0.25 if step >= begins else 0.0
        if predicts or how == "mc dropout":
            net.eval()
            found += map(mgpu.to_numpy, replicas(mgpu.split_and_load(
                X, replicas.devices, even_split=False)))
        else:
            found += [mgpu.to_numpy(x) for x in mgpu.train_batch(
                X, y, replicas, loss, trainer)]
    assert (torch.get_rng_state() == before).all()
    return np.concatenate(found, axis=None)


@TORCH
@pytest.mark.parametrize("k", (1, 2, 3, 4))
@pytest.mark.parametrize("how", ("function", "method", "hook", "dropout",
                                 "loss", "method prediction", "mc dropout",
                                 *(f"{held}{when}" for held in (
                                     "attribute", "torch", "partial",
                                     "object", "table", "text")
                                   for when in ("", " prediction"))))
def test_what_begins_to_draw_later_draws_the_same_in_every_run(
        backend, how, k):
    """From torch's default stream, which the threads of all devices share:
    a network that may draw, by the functions that it names, takes turns."""
    runs = [drawn(how, k) for _ in range(3)]
    assert (runs[0] == runs[1]).all() and (runs[0] == runs[2]).all()
    assert (runs[0][-8:] != runs[0][-16:-8]).all()


def noisy_backward(how):
    """A network of torch whose backward passes draw."""
    import torch
    from torch import nn

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            return gradient + alone(gradient)

    class Unread(torch.autograd.Function):
        forward = staticmethod(Noise.forward)

        @staticmethod
        def backward(context, gradient):
            return gradient + getattr(torch, "".join(("randn", "_like")))(
                gradient)

    kind = {"function": Noise, "unread": Unread}.get(how)
    hook = alone if how == "tensor" else None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            h = self.first(x)
            if kind is not None:
                h = kind.apply(h)
            if hook is not None and h.requires_grad:
                h.register_hook(lambda g: g + hook(g))
            return self.last(h)
    torch.manual_seed(3)
    net = Net().double()
    if how == "parameter":
        net.first.weight.register_hook(lambda g: g + alone(g))
    if how == "layer":
        net.last.register_full_backward_hook(
            lambda m, given, out: (given[0] + alone(given[0]),))
    if how == "before":
        net.last.register_full_backward_pre_hook(
            lambda m, out: (out[0] + alone(out[0]),))
    return net


@TORCH
@pytest.mark.parametrize("k", (1, 2, 3, 4))
@pytest.mark.parametrize("how", ("function", "unread", "tensor", "parameter",
                                 "layer", "before"))
@pytest.mark.parametrize("own", (False, True))
def test_backward_passes_that_draw_take_turns(backend, how, k, own):
    import torch
    rng, found = np.random.default_rng(0), []
    X, y = rng.normal(size=(8, 6)), rng.integers(0, 3, 8)

    def loss(pred, label):
        return torch.nn.functional.cross_entropy(pred, label.long(),
                                                 reduction="none")
    for _ in range(2):
        net = noisy_backward(how)
        replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
        mgpu.seed(5)
        before = torch.get_rng_state()
        for _ in range(12):
            if own:
                shards, labels = mgpu.split_batch(X, y, replicas.devices)
                with mgpu.record():
                    losses = mgpu.parallel(loss, replicas(shards), labels)
                mgpu.backward(losses)
                trainer.step(8)
            else:
                mgpu.train_batch(X, y, replicas, loss, trainer)
        assert (torch.get_rng_state() == before).all()
        found.append(mgpu.to_numpy(net.first.weight))
    assert (found[0] == found[1]).all()


@TORCH
@pytest.mark.parametrize("k", (1, 3))
def test_a_backward_pass_that_fails_ends_its_turn(backend, k):
    import torch
    from torch import nn
    layer, wrong = nn.Linear(6, 3), []
    layer.register_full_backward_hook(
        lambda m, given, out: 1 / (not wrong) > 1 or None)
    replicas = mgpu.initialize(nn.Sequential(nn.Linear(6, 6), layer),
                               [mgpu.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    X, y = np.ones((6, 6), np.float32), np.zeros(6, np.int64)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    layer.register_full_backward_hook(
        lambda m, given, out: None if torch.rand(1) < 2 else given)
    for fails in (True, False, True, False):
        wrong[:] = [1] * fails
        with pytest.raises(ZeroDivisionError) if fails \
                else contextlib.nullcontext():
            mgpu.train_batch(X, y, replicas, loss, trainer)


@TORCH
@pytest.mark.parametrize("trained", (False, True))
def test_the_first_prediction_of_code_that_is_not_read_takes_turns(
        backend, trained):
    """Not of torch's layers alone."""
    import torch
    from torch import nn

    from mgpu.backends._torch.draws import code_of, named_draws
    plain = [*nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(),
                            nn.LSTM(2, 3)).modules()]
    assert named_draws(plain, code_of(plain))[False] is False
    x, inside, met = np.ones((8, 6), np.float32), [], []

    class Layer(nn.Module):
        def forward(self, x):
            met.append(inside.append(1))
            time.sleep(0.01)
            assert len(inside) == 1, "another device runs"
            inside.pop()
            return x + getattr(torch, "_".join(("randn", "like")))(x)
    for _ in range(2):
        replicas = mgpu.initialize(nn.Sequential(Layer(), nn.Linear(6, 3)),
                                   [mgpu.cpu(i) for i in range(4)])
        shards = mgpu.split_and_load(x, replicas.devices)
        if trained:
            with mgpu.record():
                replicas(shards)
        for _ in range(3):
            replicas(shards)
    assert len(met) == 2 * 4 * (4 if trained else 3)


@TORCH
@pytest.mark.parametrize("k", (2, 3, 4))
@pytest.mark.parametrize("predicting", (False, True))
def test_a_network_that_seeds_itself_draws_the_same_on_all_devices(
        backend, k, predicting):
    import torch
    net = noisy("seeded")
    net.share = 1.0
    net.train(not predicting)
    x = np.random.default_rng(0).normal(size=(9, 6))
    wanted = net(torch.from_numpy(x)).detach().numpy()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    shards = mgpu.split_and_load(x, replicas.devices, even_split=False)
    with mgpu.record(train_mode=not predicting):
        for _ in range(12):
            found = np.concatenate([mgpu.to_numpy(y) for y in
                                    replicas(shards)])
            assert abs(found - wanted).max() < 1e-12


@TORCH
def test_draws_that_no_name_tells_of_are_said(backend, monkeypatch):
    """Once; from then on the devices take turns."""
    from mgpu.backends._torch import draws
    monkeypatch.setattr(draws.watch, "_warned", False)
    import torch
    torch.manual_seed(0)
    net = noisy("unseen")
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(4)])
    shards = mgpu.split_and_load(np.ones((8, 6)), replicas.devices)
    with mgpu.record():
        replicas(shards)
        net.share = 0.25
        with pytest.warns(UserWarning, match="default random stream while "
                          "several devices ran"):
            replicas(shards)
        found = []
        for _ in range(2):
            mgpu.seed(5)
            before = torch.get_rng_state()
            found.append([mgpu.to_numpy(x) for _ in range(9)
                          for x in replicas(shards)])
            assert (torch.get_rng_state() == before).all()
    assert np.array_equal(*found)


_global = {}


def _into_global(module, inputs, output):
    _global["h"] = output.detach()


class Taker:
    def __init__(self):
        self.found, self.last = {"a": []}, None

    def take(self, module, inputs, output):
        self.found["a"].append(output)

    def __call__(self, module, inputs, output):
        self.last = output


def _hook(way):
    found = {}

    def into_closure(module, inputs, output):
        found["h"] = output

    def add(module, inputs, output):
        found["sum"] = found.get("sum", 0) + output.detach().sum()

    def into_default(module, inputs, output, kept=[]):      # noqa: B006
        kept.append(output)
    return {"closure": into_closure, "sum": add, "default": into_default,
            "partial": partial(lambda kept, m, i, o: kept.update(h=o), {}),
            "method": Taker().take, "object": Taker(),
            "global": _into_global}[way]


@TORCH
@pytest.mark.parametrize("way", ["closure", "sum", "default", "partial",
                                 "method", "object", "global"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_hook_keeps_nothing_where_devices_share_it(backend, k, way):
    """By hand and in train_batch; one device may."""
    x = np.random.default_rng(0).normal(size=(7, 6))
    net = normalised()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    hook = _hook(way)
    net[1].register_forward_hook(hook)
    before = net[0].weight.detach().clone()
    shards, _ = mgpu.split_batch(x, x, replicas.devices)

    def by_hand():
        with mgpu.record():
            replicas(shards)

    def step():
        mgpu.train_batch(x, x[:, :4], replicas, mgpu.losses.L2Loss(), trainer)
    for call in (by_hand, step):
        if k == 1:
            call()
            continue
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value).startswith(
            "on several devices a forward hook keeps tensors on its module, "
            "of which each device has one; received ")
        assert (net[0].weight == before).all()
    with mgpu.record():
        for i, shard in enumerate(shards):  # one at a time: read in between
            replicas[i](shard)


_gradients = {}


def _put(found):
    def put(module, before, after):
        found["g"] = after[0].detach()
    return put


def _sum_up(found):
    def add(module, before, after):
        g = after[0].detach()
        found[module] = found.get(module, 0) + g.T @ g
    return add


def _with_backward_hook(way):
    import torch
    from torch import nn
    net, found = normalised(), {}

    class Watched(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                self.watch(y)
            return y

        def watch(self, y):
            y.register_hook(lambda g: _gradients.update(g=g))
    if way == "full":
        net[0].register_full_backward_hook(_put(found))
    elif way == "by module":
        net[0].register_full_backward_hook(_sum_up(found))
    elif way == "pre":
        net[2].register_full_backward_pre_hook(
            lambda module, after: found.update(g=after[0].clone()))
    elif way == "NumPy":
        net[2].register_full_backward_pre_hook(
            lambda module, after: found.update(g=after[0].numpy().copy()))
    elif way == "made in a hook":
        net[0].register_forward_hook(lambda m, x, out: out.register_hook(
            lambda g: found.update(g=g)) and None)
    elif way == "made in forward":
        torch.manual_seed(0)
        net = Watched(*net)
    elif way == "added":
        net[0].register_full_backward_hook(_put(_gradients))
    return net


BACKWARD_HOOKS = ["full", "by module", "pre", "NumPy", "made in a hook",
                  "made in forward", "added"]


@TORCH
@pytest.mark.parametrize("way", BACKWARD_HOOKS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_backward_hook_keeps_nothing_where_devices_share_it(
        backend, k, way):
    """By hand, with mgpu's backward and with torch's own, in train_batch,
    and in gradients of predictions; one device may."""
    x = np.random.default_rng(0).normal(size=(7, 6))
    net = _with_backward_hook(way)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    before = net[0].weight.detach().clone()
    shards, _ = mgpu.split_batch(x, x, replicas.devices)

    def losses(**mode):
        with mgpu.record(**mode):
            return [out.sum() for out in replicas(shards)]

    def by_hand():
        mgpu.backward(losses())

    def of_predictions():
        mgpu.backward(losses(train_mode=False))

    def natively():
        sum(losses()).backward()
        trainer.step(7)

    def step():
        mgpu.train_batch(x, x[:, :4], replicas, mgpu.losses.L2Loss(), trainer)
    for call in (by_hand, of_predictions, natively, step):
        if k == 1:
            call()
            continue
        _gradients.clear()
        with pytest.raises(ValueError, match=r"on several devices a \w+ hook "
                           r"keeps tensors .*retain_grad\(\)"):
            call()
        assert (net[0].weight == before).all()
        replicas.zero_grad()
    for loss in losses():       # one at a time: read in between
        mgpu.backward(loss)
    with mgpu.record():
        for i, shard in enumerate(shards):
            mgpu.backward(replicas[i](shard).sum())


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_of_a_layer_are_taken_from_its_output(backend, k):
    """What the refusal of a backward hook says, and a backward hook that
    writes to its module."""
    import torch
    from torch import nn

    class Net(nn.Sequential):
        def forward(self, x):
            h = self[0](x)
            return self[2](self[1](h)), h
    torch.manual_seed(0)
    net, plain = Net(*perceptron()), Net(*perceptron())
    for one in (net, plain):
        one.load_state_dict(plain.state_dict())
        one[0].register_full_backward_hook(
            lambda m, before, after: setattr(m, "kept", after[0]))
    x = np.random.default_rng(0).normal(size=(7, 6))
    out, h = plain(torch.from_numpy(x))
    h.retain_grad()
    out.square().sum().backward()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    shards, _ = mgpu.split_batch(x, x, replicas.devices)
    with mgpu.record():
        outputs = replicas(shards)
        for _, own in outputs:
            own.retain_grad()
        mgpu.backward([out.square().sum() for out, _ in outputs])
    assert (torch.cat([own.grad for _, own in outputs])
            - h.grad).abs().max() < 1e-12
    assert (torch.cat([r.module[0].kept for r in replicas.of_engine()])
            - plain[0].kept).abs().max() < 1e-12


@TORCH
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_hook_on_several_parameters_is_refused_on_several_devices(
        backend, k, mode):
    """It counts the gradients of the first device. Between the halves of a
    step they are those of all rows."""
    import torch
    found = []

    def norms(gradients):
        found.append([g.norm() for g in gradients]
                     if mode == "all" else gradients.norm())

    def hooked(net):
        return torch.autograd.graph.register_multi_grad_hook(
            list(net.parameters()), norms, mode=mode)
    net = perceptron()
    before = net[0].weight.detach().clone()
    handle = hooked(net)
    if k == 1:
        trained(net, k)
        assert len(found) == 2
        return
    with pytest.raises(ValueError, match="received torch.autograd.graph."
                       "register_multi_grad_hook"):
        trained(net, k)
    assert (net[0].weight == before).all() and not found
    handle.remove()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)],
                               force_reinit=True, init="keep")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    x = np.random.default_rng(0).normal(size=(7, 6))
    with mgpu.record():
        losses = [out.square().sum() for out in replicas(
            mgpu.split_batch(x, x, replicas.devices)[0])]
    mgpu.backward(losses)
    trainer.allreduce_grads()
    plain = perceptron()
    plain(torch.from_numpy(x)).square().sum().backward()
    for p, own in zip(plain.parameters(), net.parameters()):
        assert (p.grad - own.grad).abs().max() < 1e-12
    trainer.update(7)


@TORCH
@pytest.mark.parametrize("change", [
    lambda net: net.float(), lambda net: net.half(),
    lambda net: setattr(net[0].weight, "data", net[0].weight.data.t())],
    ids=["float", "half", "shape"])
@pytest.mark.parametrize("when", ["pass", "backward", "allreduce_grads",
                                  "checkpoint"])
@pytest.mark.parametrize("k", [2, 3])
def test_another_dtype_or_shape_is_refused(
        backend, k, change, when, tmp_path):
    """In the middle of a training on several devices; until the network is
    made anew."""
    net, devices = perceptron(), [mgpu.cpu(i) for i in range(k)]
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1,
                                             "momentum": 0.9})
    x = np.random.default_rng(0).normal(size=(7, 6))

    def step(dtype):
        mgpu.train_batch(x.astype(dtype), x[:, :4].astype(dtype), replicas,
                         mgpu.losses.L2Loss(), trainer)
    step("float64")
    states = [mgpu.to_numpy(p.list_data()[1]) for p in replicas.params()]
    if when in ("backward", "allreduce_grads"):
        with mgpu.record():
            losses = [out.square().sum() for out in replicas(
                mgpu.split_batch(x, x, devices)[0])]
        mgpu.backward(losses)
        if when == "allreduce_grads":
            trainer.allreduce_grads()
    change(net)
    then = [p.data.clone() for p in net.parameters()]
    dtype = str(net[0].weight.dtype).removeprefix("torch.")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        if when == "pass":
            step(dtype)
        elif when == "checkpoint":
            mgpu.save_checkpoint(tmp_path / "x", replicas, trainer)
        elif when == "backward":
            trainer.step(7)
        else:
            trainer.update(7)
    if when in ("pass", "checkpoint"):
        assert "force_reinit=True" in str(caught.value)
    for p, x0 in zip(net.parameters(), then):
        assert (p == x0).all()
    for p, x0 in zip(replicas.params(), states):
        if dtype != "float64" or when in ("pass", "checkpoint"):
            assert (mgpu.to_numpy(p.list_data()[1]) == x0).all()
    if dtype == "float32":
        replicas = mgpu.initialize(net, devices, init="keep",
                                   force_reinit=True)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
        step(dtype)
        assert {x.dtype for p in replicas.params()
                for x in p.list_data()} == {net[0].weight.dtype}


@pytest.mark.parametrize("name", [name for name in ENGINES
                                  if name.startswith("mxnet")])
@pytest.mark.parametrize("way", ["closure", "default", "partial", "method",
                                 "object"])
@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_a_hook_of_gluon_keeps_nothing_where_devices_share_it(
        name, batch_norm, way):
    """It may read arrays there, and write to its block."""
    factors = {}

    def kept(block, inputs, output):
        block.kept = output * factors["h"]
    with using_engine(name) as engine:
        from mxnet.gluon import nn
        x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
        for k, hook in ((1, _hook(way)), (3, _hook(way)), (3, kept)):
            net = nn.Sequential()
            net.add(nn.Dense(4), nn.Dense(4))
            net.initialize()
            devices = [mgpu.cpu(i) for i in range(k)]
            factors["h"] = engine.put(np.float32([2]), devices[0])
            replicas = mgpu.initialize(net, devices, batch_norm=batch_norm,
                                       sample=x)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
            net[1].register_forward_hook(hook)
            before = net[0].weight.list_data()[0].asnumpy()
            shards, _ = mgpu.split_batch(x, x, devices)

            def step():
                mgpu.train_batch(x, x[:, :4], replicas,
                                 mgpu.losses.L2Loss(), trainer)
            if k == 1 or hook is kept:
                step()
                continue
            with pytest.raises(ValueError, match="a forward hook keeps "
                               "tensors on its module, of which each device "
                               "has one"):
                with mgpu.record():
                    replicas(shards)
            with pytest.raises(ValueError, match="a forward hook keeps"):
                step()
            assert (net[0].weight.list_data()[0].asnumpy() == before).all()


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_hook_may_read_tensors_and_write_to_its_module(backend, k):
    import torch
    factors = {"h": torch.full((4,), 2.0, dtype=torch.float64)}

    def hook(module, inputs, output):
        module.kept = output * factors["h"]
        return module.kept
    found = []
    for devices in (0, k):
        net = normalised()
        net[1].eval()
        net[2].register_forward_hook(hook)
        found.append(trained(net, devices))
    for name, value in found[0].items():
        assert np.abs(found[1][name] - value).max() < 1e-12, name


@TORCH
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("told", [True, False])
def test_the_users_own_train_is_called_where_the_mode_changes(
        backend, k, told):
    """It may freeze layers, or change more than flags."""
    from torch import nn

    class Frozen(nn.Sequential):
        calls = 0

        def train(self, mode=True):
            super().train(mode)
            self.calls += 1
            self[1].eval()
            return self

    def made():
        return Frozen(*normalised()).double()
    plain = trained(made().train(), 0)
    net = made().train() if told else made()
    calls = net.calls
    found = trained(net, k)
    for name, value in plain.items():
        assert np.abs(found[name] - value).max() < 1e-12, name
    assert (net.calls > calls) is not told
    net = made().train()
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    calls = net.calls
    replicas[0](mgpu.put(np.ones((2, 6)), mgpu.cpu(0)))     # it predicts
    assert net.calls == calls + 2
    assert [m.training for m in net] == [True, False, True]


@TORCH
@pytest.mark.parametrize("k", (1, 2, 3, 4))
@pytest.mark.parametrize("request_", ("write", "add"))
def test_what_is_frozen_after_the_forward_pass_has_no_gradient(backend, k,
                                                               request_):
    """As in plain torch, and it is not updated: as in plain torch, where the
    gradient was set to None."""
    import torch
    from torch import nn

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(),
                             nn.Linear(4, 3)).double()
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(7, 6))), torch.arange(7) % 3

    def loss(pred, label):
        return nn.functional.cross_entropy(pred, label, reduction="none")
    plain, net = network(), network()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
    for p in replicas.params():
        p.grad_req = request_
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    for frozen in (False, True, False):
        optimizer.zero_grad()
        values = loss(plain(x), y).mean()
        plain[0].requires_grad_(not frozen)
        values.backward()
        optimizer.step()
        shards, labels = mgpu.split_batch(x, y, replicas.devices)
        with mgpu.record():
            losses = mgpu.parallel(loss, replicas(shards), labels)
        net[0].requires_grad_(not frozen)
        mgpu.backward(losses)
        trainer.step(7)
        if request_ == "add":
            replicas.zero_grad()
        for p in (plain, net):
            p[0].requires_grad_(True)
    for p, wanted in zip(replicas.params(), plain.parameters()):
        for found in p.list_data():
            assert abs(found - wanted).max() < 1e-12
