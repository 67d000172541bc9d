"""What a user puts on the modules and parameters of a torch network, and on
Gluon's blocks: hooks and attributes act on every device."""
import copy
import operator
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from nets import (mlp, normalised, perceptron, plain_or_replicated,
                  trains_as_plain)

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


@TORCH
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("when, what", [
    ("before", mask_by_hand), ("after", mask_by_hand),
    ("before", scale_afterwards), ("after", scale_afterwards),
    ("before", prune), ("before", legacy_weight_norm)])
def test_hooks_on_parameters_act_on_every_device(backend, devices, when,
                                                 what):
    """Put on the network before `initialize` and after it."""
    def make():
        net = perceptron()
        if when == "before":
            what(net)
        return net
    trains_as_plain(make, devices, what if when == "after" else None)


@TORCH
@pytest.mark.device_counts(2)
def test_a_hook_on_several_parameters_is_refused_on_several_devices(
        backend, devices):
    """It counts the gradients of the first device."""
    import torch
    found, net = [], perceptron()
    before = net[0].weight.detach().clone()
    torch.autograd.graph.register_multi_grad_hook(
        list(net.parameters()), found.append)
    with pytest.raises(ValueError, match="received torch.autograd.graph."
                       "register_multi_grad_hook"):
        plain_or_replicated(net, devices)
    assert (net[0].weight == before).all() and not found


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


def beside_a_lock(net):
    net.lock = threading.Lock()
    net.temperature = 2.0


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
    "count": lambda net: setattr(net, "calls", 5),
    "in a table": lambda net: operator.setitem(net.table["scale"], 0, 3.0),
    "deep in an object": lambda net: setattr(
        net.config.nested, "divisor", 2.0),
    "in an array": lambda net: operator.setitem(net.array, 0, 2.0),
    "in its own attributes": in_its_own_attributes,
    "beside a lock": beside_a_lock,
    "tensor": lambda net: setattr(net, "temperature", 2 * a_one(net)),
    "another tensor": lambda net: setattr(net, "shift", a_one(net)),
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


@TORCH
def test_gradients_of_a_layer_are_taken_from_its_output(backend, devices):
    """What the refusal of a backward hook says, and a backward hook that
    writes to its module."""
    import torch
    from torch import nn

    class Net(nn.Sequential):
        def forward(self, x):
            h = self[0](x)
            return self[2](self[1](h)), h
    net, plain = Net(*perceptron()), Net(*perceptron())
    for one in (net, plain):
        one[0].register_full_backward_hook(
            lambda m, before, after: setattr(m, "kept", after[0]))
    x = np.random.default_rng(0).normal(size=(7, 6))
    out, h = plain(torch.from_numpy(x))
    h.retain_grad()
    out.square().sum().backward()
    replicas = mgpu.initialize(net, devices)
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


# -- what has no meaning on several devices -----------------------------------

class Taker:
    def __init__(self):
        self.found = []

    def take(self, module, inputs, output):
        self.found.append(output)


def _closure(found):
    def put(module, inputs, output):
        found["h"] = output
    return put


#: forward hooks that keep what they see in one place for all devices
HOOKS = {"closure": lambda: _closure({}), "method": lambda: Taker().take}


@pytest.mark.parametrize("way", HOOKS)
def test_a_hook_keeps_nothing_where_devices_share_it(engine, devices, way):
    """By hand and in train_batch; nothing has changed then."""
    net = mlp(engine, (6, 5, 4))
    replicas = mgpu.initialize(net, devices, "uniform")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    net[2].register_forward_hook(HOOKS[way]())
    x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
    shards, _ = mgpu.split_batch(x, x, devices)
    before = replicas.export_numpy()

    def by_hand():
        with mgpu.record():
            replicas(shards)

    def step():
        mgpu.train_batch(x, x[:, :4], replicas, mgpu.losses.L2Loss(), trainer)
    for call in (by_hand, step):
        with pytest.raises(ValueError, match="on several devices a forward "
                           "hook keeps tensors on its module, of which each "
                           "device has one; received "):
            call()
        for name, value in replicas.export_numpy().items():
            assert (value == before[name]).all()


def _writes_to_its_module(factors):
    def hook(module, inputs, output):
        own = output * mgpu.to_numpy(factors).item()
        module.kept = own * 1
        return own
    return hook


def test_a_hook_may_read_arrays_and_write_to_its_module(engine, devices):
    found, x = [], np.random.default_rng(0).normal(size=(7, 6))
    for on_devices in (devices, devices[:1]):
        net = mlp(engine, (6, 5, 4))
        net[2].register_forward_hook(_writes_to_its_module(
            engine.put(np.float32([2]), devices[0])))
        replicas = mgpu.initialize(net, on_devices, "uniform", seed=1,
                                   dtype="float64")
        trainer = mgpu.Trainer(replicas, "sgd")
        for _ in range(2):
            mgpu.train_batch(x, x[:, :4], replicas, mgpu.losses.L2Loss(),
                             trainer)
        found.append(replicas.export_numpy())
        assert net[2].kept.shape == (7 if len(on_devices) == 1 else 3, 4)
    for name, value in found[0].items():
        assert np.abs(found[1][name] - value).max() < 1e-12, name


@pytest.mark.device_counts(1)
def test_on_one_device_a_hook_keeps_what_it_likes(engine, devices):
    found, net = {}, mlp(engine, (6, 5, 4))
    net[2].register_forward_hook(_closure(found))
    replicas = mgpu.initialize(net, devices, "uniform")
    shards = mgpu.split_and_load(np.ones((2, 6), "float32"), devices)
    output, = replicas(shards)
    assert (mgpu.to_numpy(found["h"]) == mgpu.to_numpy(output)).all()


def _full(net, found):
    net[0].register_full_backward_hook(
        lambda module, before, after: found.update(g=after[0].detach()))


def _made_in_forward(net, found):
    class Watched(type(net)):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: found.update(g=g))
            return y
    net.__class__ = Watched


@TORCH
@pytest.mark.parametrize("put", [_full, _made_in_forward],
                         ids=lambda f: f.__name__)
def test_a_backward_hook_keeps_nothing_where_devices_share_it(
        backend, devices, put):
    """By hand, with mgpu's backward and with torch's own, in train_batch,
    and in gradients of predictions; one device at a time may."""
    x = np.random.default_rng(0).normal(size=(7, 6))
    net, found = normalised(), {}
    put(net, found)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    before = net[0].weight.detach().clone()
    shards, _ = mgpu.split_batch(x, x, replicas.devices)

    def losses(**mode):
        with mgpu.record(**mode):
            return [out.sum() for out in replicas(shards)]

    def natively():
        sum(losses()).backward()
        trainer.step(7)
    for call in (lambda: mgpu.backward(losses()),
                 lambda: mgpu.backward(losses(train_mode=False)), natively,
                 lambda: mgpu.train_batch(x, x[:, :4], replicas,
                                          mgpu.losses.L2Loss(), trainer)):
        found.clear()
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


def _one_step(net, devices, x):
    """Replicas of `net`, their trainer, and a function that takes a step."""
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1,
                                             "momentum": 0.9})

    def step(dtype="float64"):
        mgpu.train_batch(x.astype(dtype), x[:, :4].astype(dtype), replicas,
                         mgpu.losses.L2Loss(), trainer)
    step()
    return replicas, trainer, step


X = np.random.default_rng(0).normal(size=(7, 6))


@TORCH
@pytest.mark.parametrize("change", [
    lambda net: net.float(), lambda net: net.half(),
    lambda net: setattr(net[0].weight, "data", net[0].weight.data.t())],
    ids=["float", "half", "shape"])
def test_another_dtype_or_shape_is_refused(backend, devices, change,
                                           tmp_path):
    """In the middle of a training: by a pass, and by a checkpoint."""
    net = perceptron()
    replicas, trainer, step = _one_step(net, devices, X)
    before = [mgpu.to_numpy(p.list_data()[1]) for p in replicas.params()]
    change(net)
    then = [p.data.clone() for p in net.parameters()]
    dtype = str(net[0].weight.dtype).removeprefix("torch.")
    for call in (lambda: step(dtype), lambda: mgpu.save_checkpoint(
            tmp_path / "x", replicas, trainer)):
        with pytest.raises((ValueError, RuntimeError),
                           match="force_reinit=True"):
            call()
    assert all((p == x).all() for p, x in zip(net.parameters(), then))
    for p, x in zip(replicas.params(), before):
        assert (mgpu.to_numpy(p.list_data()[1]) == x).all()
    if dtype == "float32":      # made anew, it trains
        replicas = mgpu.initialize(net, devices, init="keep",
                                   force_reinit=True)
        mgpu.train_batch(X.astype(dtype), X[:, :4].astype(dtype), replicas,
                         mgpu.losses.L2Loss(), mgpu.Trainer(replicas, "sgd"))


def change_layers(net):
    """Returns the name of what is new."""
    if not hasattr(net, "collect_params"):
        from torch import nn
        net[1] = nn.Sigmoid()
        return "1"
    from mxnet.gluon import nn
    new = nn.Dense(5, in_units=5)
    new.initialize(ctx=net[0].weight.list_ctx())
    net.add(new)
    return r"3\.weight"


def test_other_layers_are_refused_until_the_network_is_made_anew(
        backend, devices):
    """No trainer would train them."""
    net = mlp(backend, (6, 6, 5))
    replicas = mgpu.initialize(net, devices, "uniform")
    shards = mgpu.split_and_load(np.eye(6, dtype="float32"), devices)
    replicas(shards)
    where = change_layers(net)
    with pytest.raises(RuntimeError, match=f"others under .*'{where}'"):
        replicas(shards)
    replicas = mgpu.initialize(net, devices, init="keep", force_reinit=True)
    assert len(replicas(shards)) == len(devices)


@TORCH
@pytest.mark.parametrize("change, where", [
    (prune, r"0\.weight"),
    (lambda net: setattr(net[2], "bias", None), r"2\.bias"),
    (lambda net: setattr(net[0], "bias", net[0].weight), r"0\.bias")],
    ids=["pruned", "removed", "tied"])
def test_other_parameters_are_refused_until_the_network_is_made_anew(
        backend, devices, change, where):
    net = perceptron()
    replicas = mgpu.initialize(net, devices)
    shards = mgpu.split_and_load(np.eye(6), devices)
    change(net)
    with pytest.raises(RuntimeError, match=f"others under .*'{where}'"):
        replicas(shards)


@TORCH
def test_no_two_parameters_have_one_name(backend, devices):
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
