"""What a user puts on the modules and parameters of a torch network, and on
Gluon's blocks: hooks and attributes act on every device."""
import copy
import operator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from nets import mlp, perceptron, plain_or_replicated, trains_as_plain

TORCH = pytest.mark.parametrize("backend", [
    name for name in BACKENDS if name == "torch"], indirect=True)


# -- on parameters ------------------------------------------------------------


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


def keep_after_the_layer(net):
    net.found = {}
    net[0].register_full_backward_hook(
        lambda module, before, after: net.found.update(g=after[0].detach()))


def keep_in_forward(net):
    found = {}

    class Watched(type(net)):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: found.update(g=g))
            return y
    net.__class__ = Watched


def another_layer(net):
    from torch import nn
    net[1] = nn.Sigmoid()


def one_layer_more(net):
    """Which no trainer moves that was made before."""
    from torch import nn
    net.append(nn.Linear(4, 4).double())
    for p in net[-1].parameters():
        nn.init.constant_(p, 0.5)


@TORCH
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated",
                            "ignore:Full backward hook is firing")
@pytest.mark.parametrize("when, what", [
    ("before", mask_by_hand), ("after", scale_afterwards),
    ("before", prune), ("before", legacy_weight_norm),
    ("after", keep_after_the_layer), ("after", keep_in_forward),
    ("after", another_layer), ("after", one_layer_more)])
def test_hooks_and_other_layers_act_on_every_device(backend, devices, when,
                                                    what):
    """Put on the network before `initialize` and after it."""
    def make():
        net = perceptron()
        if when == "before":
            what(net)
        return net
    trains_as_plain(make, devices, what if when == "after" else None)


@TORCH
def test_a_hook_on_several_parameters_gets_the_sums(backend, devices):
    import torch
    found = []
    for places in (None, devices):
        net = perceptron()
        torch.autograd.graph.register_multi_grad_hook(
            list(net.parameters()), lambda gradients: found.append(
                [g.numpy().copy() for g in gradients]))
        plain_or_replicated(net, places, 1)
    (plain, sums) = found
    for one, other in zip(plain, sums, strict=True):
        # of the mean of 12 rows, and of their sum
        assert np.abs(one * 12 - other).max() < 1e-12


# -- on modules, and attributes -----------------------------------------------

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


def a_one(net):
    return net[0].weight.new_ones(())


def in_its_own_attributes(net):
    net.own.factor = 2.0
    net.own.inner[0].factor = 0.25


def as_hook_with_a_tensor(net):
    class Scale:
        def __init__(self):
            self.by = 2 * a_one(net).detach()

        def __call__(self, module, x, out):
            return out * self.by
    net[2].register_forward_hook(Scale())


#: what the user changes of the network of `configured`
CHANGES = {
    "attribute": lambda net: setattr(net, "temperature", 2.0),
    "in a table": lambda net: operator.setitem(net.table["scale"], 0, 3.0),
    "deep in an object": lambda net: setattr(
        net.config.nested, "divisor", 2.0),
    "in an array": lambda net: operator.setitem(net.array, 0, 2.0),
    "in its own attributes": in_its_own_attributes,
    "tensor": lambda net: setattr(net, "temperature", 2 * a_one(net)),
    "tensors in a list": lambda net: setattr(
        net, "shifts", [a_one(net), -3 * a_one(net)]),
    "forward hook": lambda net: net[2].register_forward_hook(
        lambda m, x, out: 3 * out),
    "hook with a tensor": as_hook_with_a_tensor,
    "backward hook": lambda net: net[1].register_full_backward_hook(
        lambda m, before, after: (2 * before[0],)),
    "removed hook": lambda net: net.handle.remove(),
    "hooks of its own": lambda net: net.own_hooks.append(lambda x: 2 * x)}


@TORCH
@pytest.mark.parametrize("change", CHANGES)
def test_attributes_and_hooks_of_layers_follow_replica_0(backend, devices,
                                                         change):
    """What is no parameter acts on every device too, however it is
    changed."""
    trains_as_plain(configured, devices, CHANGES[change])


# -- hooks that keep what they see --------------------------------------------

class Taker:
    def __init__(self):
        self.found = []

    def take(self, module, inputs, output):
        self.found.append(output)


def _closure(found):
    def put(module, inputs, output):
        found["h"] = output
    return put


def _writes_to_its_module(module, inputs, output):
    module.kept = output * 2
    return module.kept * 1


HOOKS = {"closure": lambda: _closure({}), "method": lambda: Taker().take,
         "attribute": lambda: _writes_to_its_module}


@pytest.mark.parametrize("way", HOOKS)
def test_what_a_forward_hook_keeps(backend, devices, way):
    """It changes no number; on the module it is joined."""
    found, x = [], np.random.default_rng(0).normal(size=(7, 6))
    for places in (devices, devices[:1]):
        net = mlp(backend, (6, 5, 4))
        net[2].register_forward_hook(HOOKS[way]())
        replicas = mgpu.initialize(net, places, "uniform", seed=1,
                                   dtype="float64")
        trainer = mgpu.Trainer(replicas, "sgd")
        for _ in range(2):
            mgpu.train_batch(x, x[:, :4], replicas, mgpu.losses.L2Loss(),
                             trainer)
        found.append(replicas.export_numpy())
        assert way != "attribute" or net[2].kept.shape == (7, 4)
    for name, value in found[0].items():
        assert np.abs(found[1][name] - value).max() < 1e-12, name


@pytest.mark.device_counts(1)
def test_on_one_device_a_hook_keeps_what_it_likes(backend, devices):
    found, net = {}, mlp(backend, (6, 5, 4))
    net[2].register_forward_hook(_closure(found))
    replicas = mgpu.initialize(net, devices, "uniform")
    shards = mgpu.split_and_load(np.ones((2, 6), "float32"), devices)
    output, = replicas(shards)
    assert (mgpu.to_numpy(found["h"]) == mgpu.to_numpy(output)).all()


def _keeping(how):
    """A network with a dropout layer that keeps a gradient in an attribute,
    and a number of backward passes."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.0)
            self.passes, self.kept = 0, None
            if how == "layer":
                self.a.register_full_backward_hook(self.keep)

        def keep(self, *given):
            self.passes += 1
            gradient = given[-1]
            self.kept = gradient[0] if how == "layer" else gradient

        def forward(self, x):
            y = self.a(x)
            if how == "tensor" and y.requires_grad:
                self.features = y
                y.register_hook(self.keep)
            return self.norm(self.drop(self.b(y)))
    torch.manual_seed(0)
    return Net().double()


@TORCH
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("how", ["tensor", "layer"])
def test_attributes_that_a_backward_hook_sets_are_the_networks(
        backend, devices, how):
    """As in Grad-CAM: arrays of all rows, on one device or on several."""
    x = np.random.default_rng(0).normal(size=(4 * len(devices), 6))
    x = np.concatenate([x[:4]] * len(devices))  # the same batch statistics
    net = _keeping(how)
    replicas = mgpu.initialize(net, devices)
    for step in range(3):
        plain = _keeping(how)
        (plain(replicas.backend.put(x, devices[0])) ** 2).sum().backward()
        with mgpu.record():
            losses = [(y ** 2).sum() for y in replicas(
                mgpu.split_and_load(x, devices))]
        mgpu.backward(losses)
        assert net.passes == step + 1 and plain.passes == 1
        assert net.kept.shape == plain.kept.shape
        assert np.abs(mgpu.to_numpy(net.kept - plain.kept)).max() < 1e-12


@TORCH
def test_what_backward_hooks_keep_is_freed(backend, devices):
    """Though a hook holds the network, and that a tensor of its graph."""
    import gc
    import weakref
    net, ends = _keeping("tensor"), []
    replicas = mgpu.initialize(net, devices)
    for _ in range(4):
        with mgpu.record():
            losses = [(y ** 2).sum() for y in replicas(mgpu.split_and_load(
                np.ones((6, 6)), devices))]
        mgpu.backward(losses)
        ends.append(weakref.ref(net.features))
        del losses
    gc.collect()
    # devices still work on their parts of the last but one
    assert all(end() is None for end in ends[:-2])


# -- layers and parameters that are changed -----------------------------------

@pytest.mark.skipif("mxnet" not in BACKENDS, reason="of Gluon")
def test_other_layers_of_gluon_are_refused_until_it_is_made_anew(devices):
    with mgpu.using_backend("mxnet") as backend:
        from mxnet.gluon import nn
        net = mlp(backend, (6, 6, 5))
        replicas = mgpu.initialize(net, devices, "uniform")
        shards = mgpu.split_and_load(np.eye(6, dtype="float32"), devices)
        new = nn.Dense(5, in_units=5)
        new.initialize()
        net.add(new)
        with pytest.raises(RuntimeError, match=r"others under .*'3\.weight'"):
            replicas(shards)
        replicas = mgpu.initialize(net, devices)
        assert len(replicas(shards)) == len(devices)


@TORCH
@pytest.mark.parametrize("change, where", [
    (prune, r"0\.weight"),
    (lambda net: setattr(net[2], "bias", None), r"2\.bias")],
    ids=["pruned", "removed"])
def test_other_parameters_are_refused_until_the_network_is_made_anew(
        backend, devices, change, where):
    with pytest.raises(RuntimeError, match=f"others under .*'{where}'"):
        plain_or_replicated(perceptron(), devices, prepare=change)


@TORCH
def test_no_two_parameters_have_one_name(backend, devices):
    """Where a norm has a gamma, a beta or a buffer of these names beside its
    own weight and bias: one state of the optimizer for each, and all values
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
    replicas = mgpu.initialize(net, devices)
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
