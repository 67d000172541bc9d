"""What users write to their network between passes reaches all devices; what
a pass writes to a buffer is the network's."""
import contextlib

import numpy as np
import pytest

import mgpu
from batches import rows
from conftest import ENGINES
from helpers import (assert_all_equal, assert_bit_equal, mlp, on, on_mxnet,
                     on_torch, relative_difference)
from nets import on_each, shards_of, train

TORCH = [engine for engine in ENGINES if engine == "torch"]


# -- parameters ---------------------------------------------------------------

def in_another_order(net, value):
    """The number of strides changes, and torch counts no write."""
    import torch
    weight = net[0].weight
    if weight.is_contiguous():
        weight.data = weight.data.t().contiguous().t()
    weight.data.copy_(torch.from_numpy(value))


def assign(net, value):
    import torch
    net.load_state_dict({**net.state_dict(),
                         "0.weight": torch.from_numpy(value.copy())},
                        assign=True)


def replace(net, value):
    import torch
    net[0].weight = torch.nn.Parameter(torch.from_numpy(value.copy()))


@pytest.mark.filterwarnings("ignore:'0.weight' differed")
@on_torch
@pytest.mark.parametrize("edit", [in_another_order, assign, replace])
def test_what_is_written_to_the_network_reaches_all(engine, edit, devices):
    """K devices train as one that is edited alike between steps."""
    found = []
    for places in (on(0), devices):
        net = mlp(engine)
        replicas = mgpu.initialize(net, places, "xavier", dtype="float64")
        trainer = mgpu.Trainer(replicas, "sgd", {
            "learning_rate": 0.125, "momentum": 0.5})
        for step in range(3):
            shards = shards_of(rows(7, dtype="float64", seed=step), replicas)
            with mgpu.record():
                losses = [(out * out).sum() for out in replicas(shards)]
            mgpu.backward(losses)
            trainer.step(7)
            edit(net, np.random.default_rng(step).normal(size=(5, 6)))
        outputs = [one(x) for one, x in zip(replicas, shards_of(
            rows(8, dtype="float64"), replicas))]
        found.append((on_each(replicas), np.concatenate(
            [mgpu.to_numpy(x) for x in outputs])))
    (one, output), (several, outputs) = found
    for name, values in several.items():
        for value in values:
            assert relative_difference(value, one[name][0]) < 1e-12
    assert relative_difference(outputs, output) < 1e-12


@on_torch
def test_what_is_written_between_two_replicas_calls(engine, devices):
    """Each replica is called by itself, and the network is loaded in
    between."""
    import torch
    net = torch.nn.BatchNorm1d(6)
    replicas = mgpu.initialize(net, devices, "xavier")
    shards = shards_of(np.ones((8, 6), "float32"), replicas)
    for step, (replica, x) in enumerate(zip(replicas, shards)):
        net.load_state_dict({**net.state_dict(), **{
            "running_mean": torch.full((6,), float(step)),
            "bias": torch.full((6,), float(step))}})
        out = mgpu.to_numpy(replica(x))
        # (1 - step) / sqrt(1 + 1e-5) + step, in float32
        assert np.abs(out - 1.0).max() < 1e-4
    for x in replicas.statistics()[0].list_data():
        assert mgpu.to_numpy(x).tolist() == [len(devices) - 1.0] * 6


@on_torch
@pytest.mark.parametrize("when", ["at once", "backward", "allreduce_grads"])
def test_what_is_written_to_the_network_is_exported(engine, devices, when):
    """Before it has reached the other devices; and it is not lost where the
    update comes afterwards."""
    import torch
    net = torch.nn.BatchNorm1d(6)
    replicas = mgpu.initialize(net, devices, "xavier")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0})
    if when != "at once":
        with mgpu.record():
            losses = replicas(shards_of(rows(8), replicas))
        mgpu.backward(losses)
        if when == "allreduce_grads":
            trainer.allreduce_grads()
    with torch.no_grad():
        for x in (net.weight, net.running_mean):
            x.fill_(3.0)
    if when != "at once":
        if when == "backward":
            trainer.allreduce_grads()
        trainer.update(8)
    for options in ({}, {"device": devices[-1]}, {"all_devices": True}):
        values = replicas.export_numpy(**options)
        for p in (replicas.params()[0], replicas.statistics()[0]):
            assert (values[p.name] == 3.0).all()


@on_torch
def test_a_parameter_in_the_place_of_a_frozen_one_trains(
        engine, devices):
    import torch
    net = torch.nn.Linear(6, 3)
    net.weight.requires_grad_(False)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1.0})
    net.weight = torch.nn.Parameter(torch.zeros(3, 6))
    with mgpu.record():
        losses = replicas(shards_of(np.ones((8, 6), "float32"), replicas))
    mgpu.backward(losses)
    trainer.step(8)
    assert replicas.params()[0].grad_req == "write"
    for x in replicas.params()[0].list_data():
        assert (mgpu.to_numpy(x) == -1.0).all()


@on_torch
def test_attributes_of_parameters_reach_all(engine, devices):
    import torch

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(self.weight, "factor", 1.0)
    net, x = Scaled(6, 3), rows(8)
    net.weight.factor = 0.5
    replicas = mgpu.initialize(net, devices)
    for factor in (0.5, 0.25, None):
        if factor is None:
            del net.weight.factor
        else:
            net.weight.factor = factor
        found = np.concatenate([mgpu.to_numpy(out) for out in
                                replicas(shards_of(x, replicas))])
        want = mgpu.to_numpy(net(torch.from_numpy(x)).detach())
        assert relative_difference(found, want) < 1e-6


# -- weights that a forward pass writes ---------------------------------------

def max_norm():
    import torch

    class MaxNorm(torch.nn.Linear):
        def forward(self, x):
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
            return super().forward(x)
    return MaxNorm(6, 3)


def written_in_place():
    import torch

    class Net(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x)
    return Net(6, 3)


@on_torch
@pytest.mark.parametrize("make", [max_norm, written_in_place])
def test_weights_that_a_pass_writes_are_refused(engine, devices, make):
    """Each device would write for its own rows. One device may: a call of
    the network itself, or a batch of one row."""
    net = make()
    replicas = mgpu.initialize(net, devices)
    for mode in (mgpu.record, mgpu.no_grad):
        with mode(), pytest.raises(RuntimeError, match="forward writes to "
                                   "the parameter weight"):
            replicas(shards_of(rows(8), replicas))
    train(replicas, rows(1))


# -- buffers ------------------------------------------------------------------

@on_torch
@pytest.mark.parametrize("how", ["in place", "replaced", "assigned"])
def test_statistics_follow_where_the_user_wrote_the_networks(
        engine, how, devices):
    """Statistics differ by device, and stay so; what the user writes to the
    network's reaches all."""
    import torch

    def write(net, new):
        if how == "in place":
            net.running_mean.copy_(new)
        elif how == "replaced":
            net.running_mean = new.clone()
        else:
            net.load_state_dict({**net.state_dict(), "running_mean": new},
                                assign=True)
    net = torch.nn.BatchNorm1d(6)
    replicas = mgpu.initialize(net, devices, "xavier")
    shards = shards_of(rows(8), replicas)
    with mgpu.record():
        replicas(shards)
    own = on_each(replicas)
    replicas(shards)
    assert_all_equal(on_each(replicas), own)
    for value in (3.0, 4.0):
        write(net, torch.full((6,), value))
        new = net.running_mean.clone()
        replicas(shards)
        for x in replicas.statistics()[0].list_data():
            assert_bit_equal(mgpu.to_numpy(x), new.numpy())


@on_torch
def test_a_frozen_bias_in_one_of_two_recurrent_layers(engine, devices):
    """Each has a list of its weights, which is made anew for a device."""
    import torch

    class Net(torch.nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer(x)[0]
            return x

    def make(frozen):
        torch.manual_seed(1)
        net = Net(*(torch.nn.GRU(6, 6, batch_first=True) for _ in range(4)))
        net[frozen].bias_ih_l0.requires_grad_(False)
        return net.double()
    x = torch.from_numpy(rows(12, dtype="float64").reshape(6, 2, 6))
    for frozen in range(3):
        expected = make(frozen)(x).detach().numpy()
        replicas = mgpu.initialize(make(frozen), devices)
        for one in replicas:
            assert relative_difference(mgpu.to_numpy(one(x)), expected) < 1e-14


@on_torch
@pytest.mark.parametrize("kind", ["weight norm", "old weight norm", "list",
                                  "replaced"])
def test_weights_in_lists_are_those_of_the_device(engine, devices, kind):
    """Forward computes weights of a recurrent layer, or keeps a list of
    weights; the user replaces some between two passes."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.GRU(6, 3, batch_first=True)

        def forward(self, x):
            self.used = [self.layer.weight_hh_l0]
            return self.layer(x[:, None])[0][:, 0]

    def make():
        torch.manual_seed(2)
        net = Net()
        if kind == "weight norm":
            torch.nn.utils.parametrizations.weight_norm(
                net.layer, "weight_hh_l0")
        elif kind == "old weight norm":
            torch.nn.utils.weight_norm(net.layer, "weight_hh_l0")
        return net.double()

    def steps(net, forward):
        found = []
        for step in range(3):
            if kind == "replaced" and step == 1:
                net.layer.weight_hh_l0 = torch.nn.Parameter(
                    torch.full((9, 3), 0.1, dtype=torch.float64))
            out = forward(torch.from_numpy(rows(7, dtype="float64")))
            out.pow(2).sum().backward()
            found += [out.detach(), *(p.grad for p in net.parameters())]
        return [x.clone() for x in found]
    plain, net = make(), make()
    expected = steps(plain, plain)
    for x, y in zip(steps(net, mgpu.DataParallel(net, devices)), expected,
                    strict=True):
        assert relative_difference(x.numpy(), y.numpy()) < 1e-13


def with_buffer(engine, updated):
    """A dense layer whose forward sets a buffer to ``updated(buffer, x)``."""
    if engine.name == "torch":
        import torch

        class Dense(torch.nn.Linear):
            def forward(self, x):
                self.seen = updated(self.seen, x.detach())
                return super().forward(x)
        net = Dense(6, 3)
        net.register_buffer("seen", torch.zeros(6))
        return net
    import mxnet as mx

    class Dense(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.dense = mx.gluon.nn.Dense(3, in_units=6)
            self.seen = mx.gluon.Parameter("seen", grad_req="null", shape=(6,),
                                           init="zeros")
            self.params._params["seen"] = self.seen

        def forward(self, x):
            with mx.autograd.pause():
                self.seen.set_data(updated(self.seen.data(x.ctx), x))
            return self.dense(x)
    return Dense()


def test_a_buffer_that_all_devices_update_alike(engine, devices):
    replicas = mgpu.initialize(with_buffer(engine, lambda seen, x: seen + 1),
                               devices, "xavier")
    with mgpu.record():
        replicas(shards_of(rows(8), replicas))
    replicas(shards_of(rows(8), replicas))
    for x in replicas.buffers()[0].list_data():
        assert_bit_equal(mgpu.to_numpy(x), np.full(6, 2, "float32"))


@on_torch
@pytest.mark.parametrize("update, error", [
    (lambda net, x: net.seen.data.add_(x.sum(0)), "updates the buffer seen"),
    (lambda net, x: setattr(net, "weight", type(net.weight)(net.weight * 2)),
     "replaces its parameter or layer 'weight'"),
    (lambda net, x: net.seen.fill_(float("nan")), None)])
def test_what_forward_updates_unnoticed(engine, devices, update, error):
    import torch

    class Dense(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                update(self, x.detach())
            return super().forward(x)
    net = Dense(6, 3)
    net.register_buffer("seen", torch.zeros(6))
    replicas = mgpu.initialize(net, devices, "xavier")
    with mgpu.record(), pytest.raises(RuntimeError, match=error) if error \
            else contextlib.nullcontext():
        replicas(shards_of(rows(8), replicas))


@pytest.mark.parametrize("door", ["initialize", "DataParallel"])
def test_a_buffer_that_depends_on_the_examples_is_refused(
        engine, devices, door):
    """A codebook, a normalizer of observations: one device's examples would
    update it."""
    net = with_buffer(engine, lambda seen, x: seen + x.sum(0))
    replicas = mgpu.initialize(net, devices, "xavier")
    with mgpu.record(), pytest.raises(
            RuntimeError, match="forward updates the buffer .*seen.* from"):
        if door == "initialize":
            replicas(shards_of(rows(8), replicas))
        else:
            mgpu.DataParallel(net, devices)(mgpu.put(rows(8), devices[0]))


# -- what a pass of MXNet sets ------------------------------------------------

def spectral_norm(mx):
    """As in MXNet's example sn_gan: a pass keeps the vector of the power
    iteration by ``set_data``."""
    numpy = mx.util.is_np_array()

    def dot(a, b):
        return mx.np.dot(a, b) if numpy else mx.nd.dot(a, b)

    class Net(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(3, 4))
            self.u = self.params.get("u", shape=(1, 3), grad_req="null")

        def forward(self, x):
            w, u = self.weight.data(x.ctx), self.u.data(x.ctx)
            v = dot(u, w)
            v = v / (v * v).sum() ** 0.5
            u = dot(v, w.T)
            u = u / (u * u).sum() ** 0.5
            with mx.autograd.pause():
                self.u.set_data(u)
            return dot(x, (w / (dot(u, w) * v).sum()).T)
    return Net()


@on_mxnet
@pytest.mark.parametrize("size", [6, 1])
def test_what_a_pass_sets_is_set_once_a_step(engine, devices, size):
    """Not once per device, on devices without rows too; outside of passes
    ``set_data`` writes to all, as in Gluon."""
    import mxnet as mx
    rng, found = np.random.default_rng(0), []
    start = {"weight": rng.normal(size=(3, 4)), "u": rng.normal(size=(1, 3))}
    X, y = rng.normal(size=(size, 4)), np.arange(size) % 3
    for some in (devices[:1], devices):
        net = spectral_norm(mx)
        replicas = mgpu.initialize(net, some, "uniform", dtype="float64")
        for key, value in start.items():
            getattr(net, key).set_data(engine.put(value, mgpu.cpu(0)))
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for _ in range(3):
            mgpu.train_batch(X, y, replicas, mgpu.losses.
                             SoftmaxCrossEntropyLoss(), trainer)
        found.append({p.name: list(map(mgpu.to_numpy, p.list_data()))
                      for p in replicas.all_parameters()})
    for key, (one,) in found[0].items():
        for copies in found[1][key]:
            assert relative_difference(copies, one) < 1e-12


# -- a network that is read once ----------------------------------------------

def _edits():
    """By name, what changes the modules, arrays or references of a network
    with the layers 0 and 1, and the attributes that `_edited` sets."""
    import torch
    from torch import nn

    def parameter(net):
        return nn.Parameter(torch.zeros_like(net[0].weight))

    def table(module):
        module.__dict__ = {**vars(module), "scale": 2.0}

    def parametrized(net):
        nn.utils.parametrize.register_parametrization(
            net[0], "weight", nn.ReLU())
    return {
        "a module replaced": lambda net: net.__setitem__(1, nn.ReLU()),
        "added": lambda net: net.append(nn.ReLU()),
        "deleted": lambda net: net.__delitem__(1),
        "a parameter replaced": lambda net: setattr(
            net[0], "weight", parameter(net)),
        "tied": lambda net: setattr(net[1], "weight", net[0].weight),
        "a table replaced": lambda net: setattr(
            net[0], "_parameters", dict(net[0]._parameters)),
        "all tables": lambda net: table(net[0]),
        "a buffer replaced": lambda net: setattr(
            net, "buffer", torch.zeros(2)),
        "a class": lambda net: setattr(net[1], "__class__", nn.Identity),
        "a mode": lambda net: net[1].eval(),
        "requires_grad": lambda net: net[0].bias.requires_grad_(False),
        "of an attribute": lambda net: net.held[0].requires_grad_(),
        "an attribute set": lambda net: setattr(net, "more", net[0].weight),
        "removed": lambda net: delattr(net, "held"),
        "an empty list": lambda net: net.empty.append(net[0].weight),
        "a dict": lambda net: net.nested["a"][0].update(b=net[0].weight),
        "a deque": lambda net: net.queue.appendleft(net[1]),
        "a set": lambda net: net.seen.add(net[1]),
        "a closure": lambda net: net.use(net[1]),
        "a partial": lambda net: net.bound.keywords.update(x=net[1]),
        "a hook": lambda net: net[0].register_forward_hook(lambda *_: None),
        "no hook": lambda net: net.hook.remove(),
        "a parametrization": parametrized,
    }


@on_torch
@pytest.mark.parametrize("name", _edits() if TORCH else [])
def test_a_network_that_has_changed_is_read_again(engine, name):
    import collections
    import functools

    import torch
    from mgpu.backends._torch.tree import Tree
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    used = None

    def use(x):
        nonlocal used
        used = x
        return used
    net.register_buffer("buffer", torch.ones(2))
    net.held, net.empty, net.use = [torch.zeros(1)], [], use
    net.nested, net.queue = {"a": ({},)}, collections.deque()
    net.seen, net.bound = set(), functools.partial(print, x=1)
    net.hook = net[0].register_forward_pre_hook(lambda *_: None)
    tree = Tree(net)
    net(torch.zeros(2, 3)).sum().backward()
    net[0].weight.data.fill_(2.0)
    assert tree.is_current()
    _edits()[name](net)
    assert not tree.is_current()


@on_torch
def test_one_device_keeps_nothing_of_an_earlier_pass(engine):
    """The graph of a stored output, and what is only weakly referred to."""
    import gc
    import weakref

    import torch

    class Net(torch.nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last
    net = Net(6, 3)
    net.other = torch.nn.Linear(2, 2)
    net.weak = other = weakref.ref(net.other)
    replicas, outputs = mgpu.initialize(net, on(0)), []
    for step in range(3):
        with mgpu.record():
            outputs += map(weakref.ref, replicas([torch.ones(2, 6)]))
        if not step:
            del net.other
    gc.collect()
    assert [x() is None for x in outputs] == [True, True, False]
    assert other() is None


@on_torch
def test_a_layer_made_in_forward_on_one_device_is_refused(engine):
    import torch

    class Late(torch.nn.Linear):
        def forward(self, x):
            self.more = torch.nn.Linear(3, 3)
            return self.more(super().forward(x))
    replicas = mgpu.initialize(Late(6, 3), [mgpu.cpu()])
    with pytest.raises(RuntimeError, match="made a layer"):
        replicas([mgpu.put(np.ones((2, 6), "float32"), mgpu.cpu())])
