"""What a forward pass keeps: each device has its own, as on one device."""
import itertools
import re
import threading
import time
import weakref

import numpy as np
import pytest

import mgpu
from conftest import ENGINES
from helpers import name_of, on, relative_difference, using_engine

MXNET = [name for name in ENGINES if name.startswith("mxnet")]
RATE = 0.125
ROWS = 8


def network(engine, forward, **kept):
    """Two layers with the `kept` attributes; ``forward(net, x, F)``."""
    if engine.name == "mxnet":
        import mxnet as mx
        Base, F = mx.gluon.Block, mx

        def dense(n):
            return mx.gluon.nn.Dense(n, in_units=4)
    else:
        import torch
        Base, F = torch.nn.Module, torch

        def dense(n):
            return torch.nn.Linear(4, n)

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.a, self.b = dense(4), dense(3)
            for name, x in kept.items():
                setattr(self, name, x() if callable(x) else x)

        def forward(self, x):
            return forward(self, x, F)
    net = Net()
    if engine.name == "mxnet":
        net.initialize()
        net.cast("float64")
        parameters = net.collect_params().values()
    else:
        net.double()
        parameters = net.parameters()
    rng = np.random.default_rng(3)
    for p in parameters:
        value = engine.put(rng.normal(0, 0.5, p.shape), mgpu.cpu(0))
        if engine.name == "mxnet":
            p.set_data(value)
        else:
            p.data = value
    return net


def values(net):
    """By position, as NumPy arrays."""
    if hasattr(net, "collect_params"):
        return [p.list_data()[0].asnumpy()
                for p in net.collect_params().values()]
    return [p.detach().numpy() for p in net.parameters()]


def batches(steps, rows=ROWS):
    rng = np.random.default_rng(5)
    return [(rng.normal(size=(rows, 4)), rng.normal(size=(rows, 3)))
            for _ in range(steps)]


def plain(engine, net, data, loss, between=lambda net: None):
    """The frameworks themselves, with an update in NumPy."""
    device, = on(0)
    if engine.name == "mxnet":
        from mxnet import autograd
        for X, y in data:
            with autograd.record():
                total = loss(net(engine.put(X, device)),
                             engine.put(y, device))
            total.backward()
            for p in net.collect_params().values():
                p.set_data(engine.put(p.data().asnumpy() - RATE / len(X)
                                      * p.grad().asnumpy(), device))
            between(net)
    else:
        import torch
        for X, y in data:
            net.zero_grad()
            loss(net(torch.tensor(X)), torch.tensor(y)).sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= RATE / len(X) * p.grad
            between(net)
    return values(net)


def trained(net, devices, data, loss, batch_norm="per_device", how="step",
            between=lambda net: None):
    replicas = mgpu.initialize(net, devices, batch_norm=batch_norm)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    for X, y in data:
        if how == "step":
            mgpu.train_batch(X, y, replicas, loss, trainer)
        else:
            xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                if how == "hand":
                    outputs = replicas(xs)
                else:
                    outputs = [replicas[i](x) for i, x in enumerate(xs)]
                losses = mgpu.parallel(
                    lambda o, y: None if o is None else loss(o, y),
                    outputs, ys)
            mgpu.backward(losses)
            trainer.step(len(X))
        between(replicas.net)
    return values(net)


def same(found, expected):
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        assert relative_difference(x, y) < 1e-12


def edited_as_plain(engine, new, devices, edit):
    """A network that is edited after each step trains as on one device."""
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, new(), batches(4), loss, edit)
    same(trained(new(), devices, batches(4), loss, "per_device", "step",
                 edit), expected)


def _number(net, x, F):
    net.count += 1
    return net.b(net.a(x)) / net.count


def _in_a_list(net, x, F):
    net.counts[0] += 1
    net.seen.append(len(net.seen))
    return net.b(net.a(x)) / (net.counts[0] + len(net.seen))


def _in_an_array(net, x, F):
    net.array += 1
    return net.b(net.a(x)) / float(net.array[0])


def _in_an_object(net, x, F):
    return net.b(net.a(x)) / next(net.numbers)


def _state(net, x, F):
    h = net.a(x) if net.state is None else net.a(x) + net.state
    net.state = h.detach()
    return net.b(h)


def _in_a_tuple(net, x, F):
    h = net.a(x) if net.state is None else net.a(x) + net.state[0]
    net.state = (h.detach(), 1)
    return net.b(h)


def _in_a_dict(net, x, F):
    h = net.a(x) + net.cache["h"] if net.cache else net.a(x)
    net.cache["h"] = h.detach()
    return net.b(h)


class OwnAttributes(dict):
    """``copy.deepcopy`` leaves it without attributes."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class ItemsAsAttributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def _in_a_configuration(net, x, F):
    net.config.inner[0].count += 1
    return net.b(net.a(x)) / net.config.inner[0].count


CONFIGURED = {kind.__name__: {
    "config": lambda kind=kind: kind(inner=[kind(count=0)])}
    for kind in (OwnAttributes, ItemsAsAttributes)}
#: (batch_norm, how a step is taken)
STEPS = [("per_device", "step"), ("per_device", "hand"),
         ("per_device", "single"), ("sync", "step")]


def by_turns(cases, steps=STEPS):
    """Each case with two of the ways of a step, each of these with half of
    the cases: all of them would take minutes."""
    for i, one in enumerate(cases):
        one = one if hasattr(one, "values") else pytest.param(*(
            one if isinstance(one, tuple) else (one,)))
        for j in (0, 1):
            step = steps[(2 * i + i // len(steps) + j) % len(steps)]
            yield pytest.param(*step, *one.values, id="-".join(
                [*step, one.id or "-".join(map(name_of, one.values))]))


WAYS = [*(pytest.param(_in_a_configuration, kept, id=name)
          for name, kept in CONFIGURED.items()),
        (_number, {"count": 0}),
        (_in_a_list, {"counts": lambda: [0], "seen": list}),
        (_in_an_array, {"array": lambda: np.zeros(2)}),
        (_in_an_object, {"numbers": lambda: itertools.count(1)}),
        (_state, {"state": None}), (_in_a_tuple, {"state": None}),
        (_in_a_dict, {"cache": dict})]


@pytest.mark.parametrize("batch_norm, how, forward, kept", by_turns(
    WAYS, [*STEPS, ("average", "step")]))
def test_what_a_pass_keeps_is_as_on_one_device(
        engine, devices, batch_norm, how, forward, kept):
    """Numbers are counted once for a batch, whatever the number of devices;
    arrays go on with the rows of their device."""
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, forward, **kept), batches(3),
                     loss)
    net = network(engine, forward, **kept)
    same(trained(net, devices, batches(3), loss, batch_norm, how), expected)
    if "count" in kept:
        assert net.count == 3


def _reset_state(net):
    net.state = None


def _clear(net):
    net.cache.clear()


def _configure(net):
    net.config.inner[0].count = 2


def _reset_count(net):
    net.count = 0


@pytest.mark.parametrize("forward, kept, between", [
    (_state, {"state": None}, _reset_state),
    (_in_a_dict, {"cache": dict}, _clear),
    *(pytest.param(_in_a_configuration, kept, _configure, id=name)
      for name, kept in CONFIGURED.items()),
    (_number, {"count": 0}, _reset_count)], ids=name_of)
def test_what_the_user_resets_is_reset_on_every_device(
        engine, devices, forward, kept, between):
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, forward, **kept), batches(3),
                     loss, between)
    net = network(engine, forward, **kept)
    same(trained(net, devices, batches(3), loss, between=between), expected)


def test_a_short_batch_leaves_counts_as_on_one_device(engine, devices):
    """Devices without rows have counted as the others at the next pass."""
    data = [*batches(1), *batches(1, 1), *batches(2)]
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, _number, count=0), data, loss)
    same(trained(network(engine, _number, count=0), devices, data, loss),
         expected)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_loss_reads_what_the_pass_of_its_device_has_kept(name, k):
    def forward(net, x, F):
        net.kept = net.a(x)
        return net.b(net.kept)
    with using_engine(name) as engine:
        found = []
        for train in (plain, lambda engine, net, *rest: trained(
                net, on(*range(k)), *rest)):
            net = network(engine, forward)
            found.append(train(
                engine, net, batches(2), lambda o, y, net=net:
                ((o - y) ** 2).sum(axis=1)
                + (net.kept ** 2).sum(axis=1)))
        same(*found)


@pytest.mark.parametrize("name", MXNET)
def test_the_pass_that_completes_shapes_keeps_nothing(name):
    with using_engine(name) as engine:
        def forward(net, x, F):
            net.count += 1
            net.seen.append(net.count)
            return net.b(net.a(x))
        import mxnet as mx
        net = network(engine, forward, count=0, seen=list)
        net.c = mx.gluon.nn.Dense(2, dtype="float64")
        net.register_forward_hook(lambda net, inputs, output: net.c(output))
        mgpu.initialize(net, on(0, 1), dtype="float64",
                        sample=np.ones((2, 4)))
        assert (net.count, net.seen) == (0, [])


# -- what has no meaning on several devices -----------------------------------

_outside = {"count": 0}
_number_outside = 0


def _count_in_a_dict(self, x):
    _outside["count"] += 1
    return self.b(self.a(x))


def _count_in_a_global(self, x):
    global _number_outside
    _number_outside += 1
    return self.b(self.a(x))


class _Held:
    n = 0


_held = _Held()


def _count_in_an_object(self, x):
    _held.n += 1
    return self.b(self.a(x))


def _count_in_its_class(self, x):
    type(self).passes += 1
    return self.b(self.a(x))


def _note(self):
    _held.n += 1


def _count_in_a_method(self, x):
    self.note()
    return self.b(self.a(x))


def _fill(self, x):
    self.array[:] = self.array + 1
    return self.b(self.a(x))


def _draw(self, x):
    return self.b(self.a(x)) / next(self.numbers)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("forward, words", [
    (_count_in_a_dict, "the variable '_outside' outside of it"),
    (_count_in_a_global, "the variable '_number_outside' outside of it"),
    (_count_in_an_object, "variable '_held.n' outside.*Write self.n "),
    (_count_in_its_class, "variable 'Net.passes' outside.*Write self.passes "),
    (_count_in_a_method, "variable '_held.n' outside of it"),
    (_fill, "writes into the array 'array', which was there before"),
    (_draw, "received a generator in 'numbers'")], ids=name_of)
def test_what_devices_cannot_have_apart_is_refused(name, forward, words):
    with using_engine(name) as engine:
        for k in (1, 2):
            net = network(engine, None)
            type(net).forward, type(net).passes = forward, 0
            type(net).note = _note
            net.array = engine.put(np.zeros(2), mgpu.cpu(0))
            net.numbers = (i for i in range(1, 9)) if forward is _draw else 0
            before = values(net)
            try:
                trained(net, on(*range(k)), batches(2), mgpu.losses.L2Loss())
            except ValueError as error:
                assert k == 2 and re.search(words, str(error)), error
                same(values(net), before)
            else:
                assert k == 1


def _assigned(net, array):
    array[:] = array + 1


def _added(net, array):
    array += 1


def _a_row(net, array):
    array[0] = array[0] + 1


def _through_a_view(net, array):
    net.row += 1


def _through_a_new_view(net, array):
    view = array[:1]
    view += 1


def _in_the_list(net, array):
    net.arrays[0] += 1


WRITES = [_assigned, _added, _a_row, _through_a_view, _through_a_new_view,
          _in_the_list]


@pytest.mark.parametrize("first", ["step", "prediction"])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_an_array_of_all_devices_stays_as_it_is_or_is_each_devices(
        engine, devices, write, late, first):
    """What a pass writes in place, whenever it begins to."""
    def forward(net, x, F):
        net.passes += 1
        if net.passes > late:
            with mgpu.no_grad():
                write(net, net.array)
        arrays = map(mgpu.to_numpy, (net.array, net.arrays[0]))
        return net.b(net.a(x)) / float(1 + sum(a[0] for a in arrays))

    def filled():
        array, other = (engine.put(np.zeros(2), on(0)[0]) for _ in "ab")
        return network(engine, forward, passes=0, array=array,
                       row=array[:1], arrays=[other])
    loss, data = mgpu.losses.L2Loss(), batches(4)
    fits = engine.name == "torch" or len(devices) == 1
    net = filled()
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    done = 0
    try:
        if first == "prediction":
            replicas(mgpu.split_and_load(data[0][0], devices,
                                         even_split=False))
        for X, y in data:
            mgpu.train_batch(X, y, replicas, loss, trainer)
            done += 1
    except ValueError as error:
        assert not fits and re.search(
            "writes into the array '(array|row|arrays)'", str(error)), error
    else:
        assert fits
    if not fits:
        assert done == max(0, late - (first == "prediction"))
        assert not mgpu.to_numpy(net.array).any()
    expected = filled()
    if first == "prediction":
        with mgpu.no_grad():
            expected(engine.put(data[0][0], on(0)[0]))
    same(values(net), plain(engine, expected, data[:done], loss))


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("mode", ["train", "predict", "global"])
@pytest.mark.parametrize("k", [1, 2])
def test_batch_norm_moves_no_statistics_that_devices_share(name, mode, k):
    """Of a function, which writes to two of its inputs."""
    def forward(net, x, F):
        norm = F.npx.batch_norm if name == "mxnet-np" else F.nd.BatchNorm
        return net.b(norm(net.a(x), *net.arrays,
                          use_global_stats=mode == "global"))
    with using_engine(name) as engine:
        net = network(engine, forward, arrays=[
            engine.put(np.ones(4), mgpu.cpu(0)) for _ in range(4)])
        replicas = mgpu.initialize(net, on(*range(k)))
        shards = [mgpu.put(batches(1)[0][0], d) for d in replicas.devices]
        try:
            with mgpu.record(train_mode=mode != "predict"):
                replicas(shards)
        except ValueError as error:
            assert "writes into the array 'arrays'" in str(error)
            assert k == 2 and mode == "train"
        else:
            assert k == 1 or mode != "train"


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("k", [1, 2])
def test_the_pass_that_completes_shapes_writes_nothing(name, k):
    with using_engine(name) as engine:
        import mxnet as mx

        def forward(net, x, F):
            net.array += 1
            return net.c(net.b(net.a(x)))
        net = network(engine, forward,
                      array=engine.put(np.zeros(2), mgpu.cpu(0)))
        net.c = mx.gluon.nn.Dense(2, dtype="float64")
        for _ in range(2):
            mgpu.initialize(net, on(*range(k)), dtype="float64",
                            sample=np.ones((2, 4)), force_reinit=True)
            assert not net.array.asnumpy().any()


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("how", ["step", "hand"])
def test_arrays_and_weights_without_a_context_are_the_devices(
        name, devices, how):
    """``p.data()`` in a forward pass is the array of the device that runs,
    also where each loss has a backward pass of its own."""
    def forward(net, x, F):
        y = F.nd.dot(F.nd.tanh(net.a(x).as_nd_ndarray()),
                     net.a.weight.data().as_nd_ndarray())
        return net.b(y.as_np_ndarray() if name == "mxnet-np" else y)
    loss = mgpu.losses.L2Loss()
    with using_engine(name) as engine:
        expected = plain(engine, network(engine, forward), batches(2), loss)
        net = network(engine, forward)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
        for X, y in batches(2):
            if how == "step":
                mgpu.train_batch(X, y, replicas, loss, trainer)
                continue
            xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                losses = mgpu.parallel(loss, replicas(xs), ys)
            for one in losses:
                one.backward()
            trainer.step(len(X))
        same(values(net), expected)


# -- what the user edits of it ------------------------------------------------

def _carries(net, x, F):
    """A state with its history, which the loop ends."""
    h = net.a(x) if net.state is None else net.a(x) + net.state
    net.state = h * h * 0.25
    return net.b(net.state)


def _carries_two(net, x, F):
    h = net.a(x)
    if net.state is not None:
        h = h + net.state[0] * net.state[1]["c"]
    net.state = [h, {"c": h * 0.5}]
    return net.b(h)


def _detach(net):
    net.state = net.state.detach()


def _detach_twice(net):
    net.state = net.state.detach().detach()


def _detach_in_a_list(net):
    h, c = net.state
    net.state = [h.detach(), {"c": c["c"].detach()}]


def _detach_in_place(net):
    net.state[0] = net.state[0].detach()
    net.state[1]["c"] = net.state[1]["c"].detach()


def _zero(net):
    net.state = net.state.detach() * 0


def _zero_in_place(net):
    net.state = net.state.detach()
    net.state[:] = 0


EDITS = [(_carries, _detach), (_carries, _detach_twice),
         (_carries, _zero), (_carries, _zero_in_place),
         (_carries_two, _detach_in_a_list), (_carries_two, _detach_in_place)]


@pytest.mark.parametrize("batch_norm, how, forward, edit", by_turns(EDITS))
def test_what_the_loop_does_to_a_carried_state_is_done_on_every_device(
        engine, devices, forward, edit, batch_norm, how):
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, forward, state=None),
                     batches(4), loss, edit)
    same(trained(network(engine, forward, state=None), devices, batches(4),
                 loss, batch_norm, how, edit), expected)


def _device_keeps(net, x, F):
    h = net.a(x)
    if net.state is not None:
        h = h + net.state
    net.state = h.detach()
    return net.b(h)


def _writes_first(self, x):
    self.state = self.a(x)
    return self.b(self.state * self.state)


def _reads_sometimes(self, x):
    if self.state is None:
        self.state = self.a(x)
    return self.b(self.state * self.state)


def _may_write(self, x):
    if self.a is not None:
        self.state = self.a(x)
    return self.b(self.state * self.state)


@pytest.mark.parametrize("forward, when", [
    (_writes_first, "before"), (_writes_first, "between"),
    (_reads_sometimes, "before"), (_reads_sometimes, "between"),
    (_may_write, "between")])
def test_the_network_itself_is_called_in_between(engine, devices, when,
                                                 forward):
    """What its pass leaves in an attribute matters only where another pass
    reads it before it writes it; there it is refused."""
    def new():
        net = network(engine, None, state=None)
        base = type(net).__mro__[1]
        object.__setattr__(net, "__class__",
                           type("Own", (base,), {"forward": forward}))
        return net
    loss = mgpu.losses.L2Loss()
    net = new()
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})

    def call():
        net.state = None
        with mgpu.record():
            net(engine.put(batches(1)[0][0][:3], mgpu.cpu(0)))

    def train():
        if when == "before":
            call()
        for X, y in batches(3):
            mgpu.train_batch(X, y, replicas, loss, trainer)
            if when == "between":
                call()
    if forward is not _reads_sometimes:
        train()
        same(values(net), plain(engine, new(), batches(3), loss))
    elif len(devices) > 1:
        # Before the first pass it is the user's, with the wrong rows.
        with pytest.raises(ValueError, match="." if when == "before" else
                           "do not say what the other devices are to have"):
            train()


class _Holder:
    def __init__(self, factor):
        self.factor = factor


KINDS = {"array": (lambda x: x, lambda v: v),
         "list": (lambda x: [x], lambda v: v[0]),
         "tuple": (lambda x: (x, 2.0), lambda v: v[0]),
         "nested": (lambda x: {"a": [x]}, lambda v: v["a"][0]),
         "object": (_Holder, lambda v: v.factor),
         "beside a weight": (lambda x: [None, x], lambda v: v[1])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["in place", "data", "put", "put there"])
def test_arrays_in_attributes_that_the_user_changes(engine, devices, kind,
                                                    how):
    """On every device, where no pass keeps any there."""
    make, part = KINDS[kind]

    def ones():
        return engine.put(np.ones(3), mgpu.cpu(0))

    def forward(net, x, F):
        y, factor = net.b(net.a(x)), part(net.holder)
        return y * (factor.as_in_context(x.context)
                    if engine.name == "mxnet" else factor)

    def edit(net):
        x = part(net.holder)
        if how == "in place":
            with mgpu.no_grad():
                x *= 0.75
        elif how == "data":
            x = getattr(x, "data", x)
            x[:] = x * 0.75
        elif how == "put" or kind in ("array", "tuple"):
            net.holder = make(x * 0.75)
        elif isinstance(net.holder, list):
            net.holder[-1] = x * 0.75
        elif kind == "nested":
            net.holder["a"][0] = x * 0.75
        else:
            net.holder.factor = x * 0.75

    def new():
        net = network(engine, forward)
        net.holder = make(ones())
        if kind == "beside a weight":       # which each step writes to
            net.holder[0] = net.b.weight
        return net
    edited_as_plain(engine, new, devices, edit)


class Linked:
    """An object that many paths lead to."""

    def __init__(self):
        self.others, self.value = [], 0.5


def test_an_attribute_may_be_a_graph_of_objects(engine, devices):
    """It is read once, not along each of its paths."""
    def forward(net, x, F):
        return net.b(net.a(x)) * net.linked.others[0].value

    def edit(net):
        net.linked.others[0].value *= 1.5

    def new():
        net = network(engine, forward)
        nodes = [Linked() for _ in range(30)]
        for node in nodes:
            node.others = [other for other in nodes if other is not node]
        net.linked = nodes[0]
        return net
    edited_as_plain(engine, new, devices, edit)


@pytest.mark.parametrize("name", ["torch"])
def test_layers_that_are_not_registered_follow(name, devices):
    """A teacher in a list, which a moving average moves."""
    def forward(net, x, F):
        return net.b(net.a(x)) * F.sigmoid(net.teacher[0](x))

    def edit(net):
        for p, q in zip(net.teacher[0].parameters(), net.b.parameters()):
            p.data.mul_(0.5).add_(q.data, alpha=0.5)

    def new():
        import copy
        net = network(engine, forward)
        net.teacher = [copy.deepcopy(net.b).requires_grad_(False)]
        return net
    with using_engine(name) as engine:
        edited_as_plain(engine, new, devices, edit)


@pytest.mark.parametrize("name", ["torch"])
def test_an_attribute_with_a_history_is_refused(name):
    """Each device would have a copy, and the gradient would end there."""
    import torch

    def forward(net, x, F):
        return net.b(net.a(x) * net.holder)
    outer = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with using_engine(name) as engine:
        net = network(engine, forward)
        net.holder = torch.ones(4, dtype=torch.float64)
        replicas = mgpu.initialize(net, on(0, 1))
        shards = mgpu.split_and_load(batches(1)[0][0], replicas.devices)
        net.holder = outer * 2
        with pytest.raises(ValueError, match="no history.*'holder'"):
            replicas(shards)
        net.holder = net.holder.detach()
        replicas(shards)


def _training_keeps(net, x, F):
    training = net.training if hasattr(net, "training") \
        else F.autograd.is_training()
    h = net.a(x)
    if training and net.state is not None:
        h = h + (net.state["h"] if isinstance(net.state, dict) else net.state)
    if training and isinstance(net.state, dict):
        net.state["h"] = h.detach()
    elif training:
        net.state = h.detach()
    return net.b(h)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("state", [lambda: None, lambda: {"h": 0}],
                         ids=["attribute", "dict"])
def test_a_prediction_keeps_the_state_of_training(engine, devices, rows,
                                                  state):
    """Also where some devices have no rows in it."""
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, _training_keeps, state=state),
                     batches(4), loss)
    net = network(engine, _training_keeps, state=state)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    for X, y in batches(4):
        mgpu.train_batch(X, y, replicas, loss, trainer)
        replicas(mgpu.split_and_load(X[:rows], devices, even_split=False))
    same(values(net), expected)


@pytest.mark.parametrize("mode", ["prediction", "one by one", "record"])
def test_buffers_that_predictions_write_are_each_devices(engine, devices,
                                                         mode):
    """A cache of the rows so far; what the user writes is for all."""
    def forward(net, x, F):
        cache = net.cache
        if engine.name == "mxnet":
            cache = cache.data(x.context)
        with mgpu.no_grad():
            cache[:len(x)] = cache[:len(x)] / 2 + net.a(x)
        return net.b(cache[:len(x)] * 1)

    def caching():
        net = network(engine, forward)
        if engine.name == "mxnet":
            net.cache = net.params.get("cache", shape=(ROWS, 4), init="zeros",
                                       grad_req="null", dtype="float64")
            net.cache.initialize()
        else:
            net.register_buffer("cache", engine.put(np.zeros((ROWS, 4)),
                                                    mgpu.cpu(0)))
        return net

    def outputs(replicas, X):
        shards = mgpu.split_and_load(X, replicas.devices, even_split=False)
        with mgpu.record(train_mode=False) if mode == "record" \
                else mgpu.no_grad():
            found = replicas(shards) if mode != "one by one" \
                else [replica(x) for replica, x in zip(replicas, shards)]
        return np.concatenate(list(map(mgpu.to_numpy, found)))
    found = []
    for on_devices in (devices, on(0)):
        net = caching()
        replicas = mgpu.initialize(net, on_devices)
        for X, _ in batches(3):
            found.append(outputs(replicas, X))
        cache = net.cache.data(net.cache.list_ctx()[0]) \
            if engine.name == "mxnet" else net.cache
        with mgpu.no_grad():
            cache[:] = 0
        found.append(outputs(replicas, X))
    for x, y in zip(found[:4], found[4:]):
        assert relative_difference(x, y) < 1e-12


@pytest.mark.parametrize("mode", ["prediction", "evaluation", "record"])
def test_buffers_that_predictions_write_reach_devices_without_rows(
        engine, devices, mode):
    """A count of all passes, and batches of fewer rows than devices."""
    def forward(net, x, F):
        count = net.count.data(x.context) if engine.name == "mxnet" \
            else net.count
        with mgpu.no_grad():
            count[:] = count + 1
        return net.b(net.a(x)) * (count * 1)

    def counting():
        net = network(engine, forward)
        if engine.name == "mxnet":
            net.count = net.params.get("count", shape=(1,), init="zeros",
                                       grad_req="null", dtype="float64")
            net.count.initialize()
        else:
            net.register_buffer("count", engine.put(np.zeros(1), on(0)[0]))
        return net
    found = []
    for on_devices in (devices, on(0)):
        replicas = mgpu.initialize(counting(), on_devices)
        for rows in (ROWS, 1, ROWS, 2, 1, ROWS):
            shards = mgpu.split_and_load(batches(1)[0][0][:rows], on_devices,
                                         even_split=False)
            if mode == "evaluation":
                mgpu.evaluate_accuracy_gpus(replicas, [
                    (batches(1)[0][0][:rows], np.zeros(rows, "int32"))])
            with mgpu.record(train_mode=False) if mode == "record" \
                    else mgpu.no_grad():
                found.append(np.concatenate([
                    mgpu.to_numpy(x) for x in replicas(shards)
                    if x is not None]))
    for x, y in zip(found[:6], found[6:]):
        assert relative_difference(x, y) < 1e-12


@pytest.mark.parametrize("held", [
    (lambda x: x, lambda x: x), (lambda x: [x], lambda x: x[0]),
    (lambda x: {"n": (x,)}, lambda x: x["n"][0])],
    ids=["attribute", "list", "dict"])
def test_arrays_that_passes_keep_reach_devices_without_rows(
        engine, devices, held):
    """A count of passes, another array each time, in steps and predictions
    of fewer rows than devices."""
    hold, held_in = held

    def forward(net, x, F):
        one = x[:1, :1] * 0 + 1
        n = one if net.n is None else held_in(net.n) + one
        net.n = hold(n)
        return net.b(net.a(x)) / n
    loss = mgpu.losses.L2Loss()
    data = [pair for rows in (ROWS, 1, ROWS, 2, 1, ROWS)
            for pair in batches(1, rows)]
    net = network(engine, forward, n=None)
    weights = plain(engine, net, data, loss)
    with mgpu.no_grad():
        expected = [mgpu.to_numpy(net(engine.put(X, on(0)[0])))
                    for X, _ in data]
    net = network(engine, forward, n=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    for X, y in data:
        mgpu.train_batch(X, y, replicas, loss, trainer)
    same(values(net), weights)
    same([np.concatenate([mgpu.to_numpy(out) for out in replicas(
        mgpu.split_and_load(X, devices, even_split=False))
        if out is not None]) for X, _ in data], expected)


@pytest.mark.parametrize("in_between", ["pass", "none", "detached", "step"])
def test_a_carried_state_that_is_put_back_is_that_of_every_device(
        engine, devices, in_between):
    """Saved and put back around an evaluation."""
    def around(run):
        def between(net):
            saved = net.state.detach() if in_between == "detached" \
                else net.state
            net.state = None
            if in_between != "none":
                run(net)
            net.state = saved
        return between
    X, = (x for x, _ in batches(1))
    loss = mgpu.losses.L2Loss()
    data = batches(4)
    net = network(engine, _device_keeps, state=None)
    expected = plain(engine, net, data, loss, around(
        lambda net: net(engine.put(X, on(0)[0]))))
    net = network(engine, _device_keeps, state=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    edit = around(lambda net: replicas(
        mgpu.split_batch(X, X, devices)[0]))
    refused = False
    for A, y in data:
        before = values(net)
        try:
            mgpu.train_batch(A, y, replicas, loss, trainer)
        except ValueError as error:
            refused = True
            assert in_between == "detached" and len(devices) > 1, error
            assert "received another array in 'state'" in str(error)
            assert all((x == y).all() for x, y in zip(values(net), before))
            break
        edit(net)
    if not refused:
        same(values(net), expected)


def _half(net):
    net.state = net.state.detach() * 0.5


def _half_in_place(net):
    net.state *= 0.5


def _half_of_a_view(net):
    h = net.state.detach()
    h *= 0.5
    net.state = h


def _row(net):
    net.state[0] = 0.25


def _in_a_list_half(net):
    net.state = [net.state]
    net.state = net.state[0] * 0.5


@pytest.mark.parametrize("edit", [
    _half, _half_in_place, _half_of_a_view, _row, _in_a_list_half],
    ids=name_of)
def test_other_values_in_a_carried_state_are_refused(engine, devices, edit):
    """What a pass keeps belongs to each device, and the network shows that
    of the first one. None resets it."""
    loss = mgpu.losses.L2Loss()
    net = network(engine, _device_keeps, state=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    (X, y), = batches(1)
    mgpu.train_batch(X, y, replicas, loss, trainer)
    edit(net)
    before = values(net)
    if len(devices) == 1:
        mgpu.train_batch(X, y, replicas, loss, trainer)
        return
    for _ in range(2):
        with pytest.raises(ValueError, match="received another array in "
                           "'state', or other values"):
            mgpu.train_batch(X, y, replicas, loss, trainer)
    assert all((x == y).all() for x, y in zip(values(net), before))
    net.state = None
    mgpu.train_batch(X, y, replicas, loss, trainer)


def _same_on_all(net, x, F):
    net.state = net.state + 1 if net.state is not None \
        else net.a(x)[0, 0].detach() * 0 + 1
    return net.b(net.a(x) * net.state.sum())


def _user_sets(net):
    net.state = net.state + 2


def test_an_array_that_is_the_same_on_all_devices_stays_the_users(
        engine, devices):
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, _same_on_all, state=None),
                     batches(3), loss, _user_sets)
    same(trained(network(engine, _same_on_all, state=None), devices,
                 batches(3), loss, between=_user_sets), expected)


@pytest.mark.parametrize("read", [False, True])
def test_what_passes_only_write_the_users_own_calls_may_write_too(
        engine, devices, read):
    """``net(x)`` beside the replicas keeps what one pass keeps; a state that
    the next pass reads would be that of these rows everywhere."""
    layers = type(network(engine, None)).__mro__[1]

    class Keeps(layers):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.out = inner, None

        def forward(self, x):
            y = self.inner(x)
            self.out = y
            return y

    class Reads(Keeps):
        def forward(self, x):
            h = self.inner(x) if self.out is None \
                else self.inner(x) + self.out.detach()
            self.out = h
            return h
    (X, y), = batches(1)
    net = (Reads if read else Keeps)(network(engine, None).b)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    loss = mgpu.losses.L2Loss()
    mgpu.train_batch(X, y, replicas, loss, trainer)
    net.out = None
    net(engine.put(X, on(0)[0]))
    if read and len(devices) > 1:
        with pytest.raises(ValueError, match="received another array in "
                           "'out'"):
            mgpu.train_batch(X, y, replicas, loss, trainer)
    else:
        mgpu.train_batch(X, y, replicas, loss, trainer)


@pytest.mark.parametrize("state", ["array", "list"])
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("rows", [8, 7])
def test_a_state_of_the_whole_batch_is_refused_by_name(
        engine, devices, state, when, rows):
    def forward(net, x, F):
        h = net.a(x)
        if net.state is not None:
            h = h + (net.state if state == "array" else net.state[0])
        net.state = h.detach() if state == "array" else [h.detach()]
        return net.b(h)
    net = network(engine, forward, state=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    loss = mgpu.losses.L2Loss()
    (X, y), = batches(1, rows)
    if when == "later":
        mgpu.train_batch(X, y, replicas, loss, trainer)
    whole = engine.put(np.zeros((rows, 4)), mgpu.cpu(0))
    net.state = whole if state == "array" else [whole]
    before = values(net)
    if len(devices) == 1:
        mgpu.train_batch(X, y, replicas, loss, trainer)
        return
    with pytest.raises(ValueError, match=rf"received 'state' of shape "
                       rf"\({rows}, 4\) where the device has \d rows"):
        mgpu.train_batch(X, y, replicas, loss, trainer)
    assert all((x == y).all() for x, y in zip(values(net), before))
    net.state = None
    mgpu.train_batch(X, y, replicas, loss, trainer)


# -- leaves with gradients ----------------------------------------------------

LEAVES = {"attribute": (lambda x: x, lambda v: v),
          "parameter": (lambda x: [x], lambda v: v[0]),
          "list": (lambda x: [[x]], lambda v: v[0][0]),
          "dict": (lambda x: {"a": x, "last": None}, lambda v: v["a"]),
          "object": (_Holder, lambda v: v.factor)}


def _with_leaf(engine, kind):
    """A network that mixes its two ways by a leaf, twice."""
    import torch
    make, part = LEAVES[kind]

    def forward(net, x, F):
        leaf = part(net.holder)
        h = net.a(x) * torch.sigmoid(leaf[0]) + x * leaf[1]
        if kind == "dict":      # a pass keeps something beside it
            net.holder["last"] = h.detach()
        return net.b(h * leaf[1].exp())
    leaf = torch.tensor([0.25, -0.5], dtype=torch.float64, requires_grad=True)
    net = network(engine, forward)
    net.holder = make(torch.nn.Parameter(leaf.detach())
                      if kind == "parameter" else leaf)
    return net, lambda: part(net.holder)


def _trained_leaf(engine, kind, devices, change, how, batch_norm="per_device",
                  rows=(ROWS,) * 5):
    """The leaf after steps of an optimiser of its own, its gradients, and
    what the network has then; without `devices`: plainly."""
    import torch
    net, leaf = _with_leaf(engine, kind)
    loss = mgpu.losses.L2Loss()
    if devices:
        replicas = mgpu.initialize(net, devices, batch_norm=batch_norm)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    gradients = []
    for number, (n, (X, y)) in enumerate(zip(rows, batches(5))):
        X, y = torch.tensor(X[:n]), torch.tensor(y[:n])
        if not devices:
            net.zero_grad()
            loss(net(X), y).sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= RATE / n * p.grad
        elif how == "step":
            mgpu.train_batch(X, y, replicas, loss, trainer)
        else:
            xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                losses = [loss(o, y) for o, y in zip(replicas(xs), ys)
                          if o is not None]
            if how == "hand":
                mgpu.backward(losses)
            else:
                for one in losses:
                    one.sum().backward()
            trainer.step(n)
        if leaf().grad is not None:
            gradients.append(leaf().grad.numpy().copy())
            with torch.no_grad():
                leaf().sub_(leaf().grad, alpha=RATE / n)
        change(number, net, leaf, kind)
        if devices:
            replicas(mgpu.split_and_load(X, devices, even_split=False))
    return gradients, [*values(net), leaf().detach().numpy()]


def _zeroed(number, net, leaf, kind):
    leaf().grad = None


def _added_up(number, net, leaf, kind):
    pass


def _frozen_for_a_while(number, net, leaf, kind):
    leaf().grad = None
    leaf().requires_grad_(number not in (1, 2))
    if number == 2:
        leaf().data.mul_(0.5)


def _replaced(number, net, leaf, kind):
    new = (leaf().detach() * 0.5).requires_grad_()
    if kind == "list":
        net.holder[0][0] = new
    elif kind == "dict" and number != 3:
        _zeroed(number, net, leaf, kind)
    else:
        net.holder = LEAVES[kind][0](new)


def _hooked(number, net, leaf, kind):
    _zeroed(number, net, leaf, kind)
    if number == 0:
        leaf().register_hook(lambda g: g.clamp(-0.5, 0.5))


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("change", [
    _zeroed, _added_up, _frozen_for_a_while, _replaced, _hooked],
    ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind, how", [
    *((kind, "step") for kind in LEAVES), ("attribute", "hand"),
    ("attribute", "each")])
def test_a_leaf_in_an_attribute_gets_the_gradient_of_all_rows(
        name, devices, kind, change, how):
    """As with an optimiser of its own: architecture weights, temperatures,
    prompts."""
    if change is _hooked and how == "each" and len(devices) > 1:
        pytest.skip("each pass of the user's calls the hook")
    if change is _replaced and kind == "dict":
        pytest.skip("passes keep tensors there too")
    with using_engine(name) as engine:
        expected = _trained_leaf(engine, kind, None, change, how)
        for batch_norm in ("per_device", "sync"):
            found = _trained_leaf(engine, kind, devices, change, how,
                                  batch_norm)
            same(found[0], expected[0])
            same(found[1], expected[1])


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("kind", LEAVES)
def test_a_leaf_in_an_attribute_where_devices_have_no_rows(
        name, devices, kind):
    with using_engine(name) as engine:
        expected, found = (_trained_leaf(engine, kind, on_devices, _zeroed,
                                         "step", rows=(8, 2, 8, 1, 3))
                           for on_devices in (None, devices))
        same(found[0], expected[0])
        same(found[1], expected[1])


@pytest.mark.parametrize("name", ["torch"])
def test_gradients_that_are_asked_for_of_a_leaf_in_an_attribute(
        name, devices):
    """``torch.autograd.grad``, also of the second order."""
    import torch

    def asked(devices):
        net, leaf = _with_leaf(engine, "list")
        (X, y), = batches(1)
        if devices is None:
            losses = [net(torch.tensor(X)).square().sum()]
        else:
            replicas = mgpu.initialize(net, devices)
            with mgpu.record():
                losses = [o.square().sum() for o in replicas(
                    mgpu.split_and_load(X, devices, even_split=False))]
        first, = torch.autograd.grad(sum(losses), leaf(), create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), leaf())
        return [first.detach().numpy(), second.numpy()]
    with using_engine(name) as engine:
        same(asked(devices), asked(None))


def test_a_leaf_in_an_attribute_has_the_same_bits_in_every_run():
    """Gradients are added in the order of the devices, whatever threads have
    done before."""
    import torch

    def bits(warm):
        with using_engine("torch") as engine:
            net, leaf = _with_leaf(engine, "attribute")
            replicas = mgpu.initialize(net, on(0, 1, 2, 3))
            X = np.random.default_rng(2).normal(size=(64, 4))

            def record(i):
                x = torch.ones(1, requires_grad=True)
                for _ in range(warm[i] * 1000):
                    x = x * 1
            mgpu.parallel(record, list(range(4)))
            with mgpu.record():
                outputs = replicas(mgpu.split_and_load(X, replicas.devices))
                losses = [o.exp().sum() for o in outputs]
            # Backward passes in threads would reach the leaf in this order.
            for output, n in zip(outputs, warm):
                output.register_hook(lambda g, n=n: time.sleep(n / 100))
            mgpu.backward(losses)
            return leaf().grad.numpy().tobytes()
    assert len({bits(warm) for warm in (
        (0, 0, 0, 0), (4, 1, 9, 2), (30, 20, 10, 0), (0, 30, 10, 20),
        (20, 0, 30, 10))}) == 1


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("how", ["step", "prediction"])
def test_a_forward_pass_leaves_such_a_leaf_as_it_is(name, devices, how):
    """All devices hold it: it would be written once for each."""
    import torch

    def forward(net, x, F):
        with torch.no_grad():
            net.leaf.mul_(0.5)
        return net.b(net.a(x)) * net.leaf
    (X, y), = batches(1)
    with using_engine(name) as engine:
        net = network(engine, forward)
        net.leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
        before = values(net)

        def run():
            if how == "step":
                mgpu.train_batch(X, y, replicas, mgpu.losses.L2Loss(),
                                 trainer)
            else:
                replicas(mgpu.split_and_load(X, devices, even_split=False))
        if len(devices) == 1:
            run()
            assert (net.leaf == 0.5).all()
            return
        with pytest.raises(ValueError, match="received 'leaf', which the "
                           "pass of each device has written to"):
            run()
        assert all((x == y).all() for x, y in zip(values(net), before))


@pytest.mark.parametrize("name", ["torch"])
def test_a_buffer_with_a_gradient_is_refused_on_several_devices(
        name, devices):
    import torch
    with using_engine(name) as engine:
        net = network(engine, lambda net, x, F: net.b(net.a(x)) * net.gain)
        net.register_buffer("gain", torch.ones(3).requires_grad_())
        if len(devices) == 1:
            mgpu.initialize(net, devices)
            return
        with pytest.raises(ValueError, match=r"requires_grad in \['gain'\]"):
            mgpu.initialize(net, devices)


# -- what calls of the network itself leave -----------------------------------

class _Locked:
    """What cannot be copied."""

    def __init__(self, h):
        self.h, self.lock = h, threading.Lock()


def _middle(net):
    return net.kept


def _reads_elsewhere(net, x, F):
    net.kept = net.a(x)
    return _middle(net) * 1


def _fills_again(net, x, F):
    if net.kept is None:
        net.kept = []
    net.kept.clear()
    net.kept.append(net.a(x))
    return net.kept[-1] * 1


def _fills_anew(net, x, F):
    net.kept = []
    for _ in range(2):
        net.kept.append(net.a(x))
    return net.kept[0] + net.kept[1]


def _only_appends(net, x, F):
    net.kept = net.kept or []
    net.kept.append(net.a(x).detach())
    return net.a(x) / len(net.kept)


def _an_entry(net, x, F):
    net.kept = net.kept or {}
    net.kept["h"] = net.a(x)
    return net.kept["h"] * 1


def _on_a_layer(net, x, F):
    net.a.kept = net.a(x)
    net.kept = [net.a.kept]         # d2l's decoders
    return net.kept[0] * 1


def _locked(net, x, F):
    net.kept = _Locked(net.a(x))
    return net.kept.h * 1


def _ratio(net, x, F):
    net.kept = x.mean()
    return net.a(x / net.kept) * net.kept * 0 + net.a(x)


def _call(engine, net, X, recorded):
    x = engine.put(X, on(0)[0])
    with mgpu.record() if recorded else mgpu.no_grad():
        net(x)


def _own_head(forward):
    return lambda net, x, F: net.b(forward(net, x, F))


@pytest.mark.parametrize("forward", [
    _reads_elsewhere, _fills_again, _fills_anew, _only_appends, _an_entry,
    _on_a_layer, _locked, _ratio], ids=name_of)
@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_native_call_leaves_is_written_anew(engine, devices, forward,
                                                   recorded):
    """However forward() writes it before it reads it."""
    data = batches(4)
    X, _ = data[0]

    def between(net, replicas=None):
        for rows in (1, ROWS // 2, ROWS, ROWS + 1):
            _call(engine, net, np.resize(X, (rows, 4)), recorded)
        for rows in (1, ROWS):      # some devices have none
            if replicas is None:
                _call(engine, net, X[:rows], False)
            else:
                replicas(mgpu.split_and_load(X[:rows], devices,
                                             even_split=False))
                _call(engine, net, X[:1], recorded)
        if replicas is None and forward is _only_appends:
            net.kept += net.kept[:2]
    loss = mgpu.losses.L2Loss()
    expected = plain(engine, network(engine, _own_head(forward), kept=None),
                     data, loss, between)
    net = network(engine, _own_head(forward), kept=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
    for X, y in data:
        mgpu.train_batch(X, y, replicas, loss, trainer)
        X, _ = data[0]
        between(net, replicas)
    same(values(net), expected)


def _carried(net, x, F):
    h = net.a(x) if net.kept is None else net.a(x) + net.kept
    net.kept = h.detach()
    return h


def _carried_by_name(net, x, F):
    before = vars(net).get("kept")
    h = net.a(x) if before is None else net.a(x) + before
    vars(net)["kept"] = h.detach()
    return h


def _carried_in_a_list(net, x, F):
    net.kept = net.kept or []
    h = net.a(x) + net.kept[-1] if net.kept else net.a(x)
    net.kept.append(h.detach())
    return h


def _carried_in_a_dict(net, x, F):
    net.kept = net.kept or {}
    h = net.a(x) + net.kept["h"] if net.kept else net.a(x)
    net.kept["h"] = h.detach()
    return h


def _carried_beside_a_lock(net, x, F):
    h = net.a(x) if net.kept is None else net.a(x) + net.kept.h
    net.kept = _Locked(h.detach())
    return h


def _carried_on_a_layer(net, x, F):
    before = getattr(net.b, "kept", None)
    h = net.a(x) if before is None or net.kept is None else net.a(x) + before
    net.kept = net.b.kept = h.detach()
    return h


def _carried_input(net, x, F):
    y = x if net.kept is None else x - net.kept
    net.kept = x * 1
    return net.a(y)


def _carried_and_caught(net, x, F):
    h = net.a(x)
    if net.kept is not None:
        try:
            h = h + net.kept
        except Exception:
            h = h * 1
    net.kept = h.detach()
    return h


CARRIED = [_carried, _carried_and_caught, _carried_in_a_list,
           _carried_in_a_dict, _carried_beside_a_lock, _carried_on_a_layer,
           _carried_input, _carried_by_name]


@pytest.mark.parametrize("batch_norm, how, forward", by_turns(CARRIED))
def test_a_state_that_a_native_call_leaves_is_refused(
        engine, devices, forward, how, batch_norm):
    """The other devices' rows have none from it. None ends that."""
    data = batches(3)
    loss = mgpu.losses.L2Loss()

    def none(net):
        net.kept = None
    expected = plain(engine, network(engine, _own_head(forward), kept=None),
                     data, loss, none)
    net = network(engine, _own_head(forward), kept=None)
    replicas = mgpu.initialize(net, devices, batch_norm=batch_norm)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})

    def step(X, y):
        if how == "step":
            mgpu.train_batch(X, y, replicas, loss, trainer)
            return
        xs, ys = mgpu.split_batch(X, y, devices)
        with mgpu.record():
            outputs = replicas(xs) if how == "hand" else [
                replicas[i](x) for i, x in enumerate(xs)]
            losses = mgpu.parallel(loss, outputs, ys)
        mgpu.backward(losses)
        trainer.step(len(X))
    for X, y in data:
        step(X, y)
        _call(engine, net, X[:1], False)
        before = values(net)
        for _ in range(2 * (len(devices) > 1)):
            with pytest.raises(ValueError, match="received another array in "
                               r"'\S*kept'.*net\(x\).*Validate by replicas"):
                step(X, y)
        assert all((x == y).all() for x, y in zip(values(net), before))
        replicas.zero_grad()
        none(net)
    same(values(net), expected)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_the_loop_changes_what_a_native_call_has_left(engine, devices, zero,
                                                      seen):
    """Zeros are those of every device; what it detaches is not. `seen`: the
    replicas have followed the network in between."""
    loss, data = mgpu.losses.L2Loss(), batches(2)

    def edit(net, follow=lambda: None):
        _call(engine, net, data[0][0][:1], True)
        follow()
        net.kept = net.kept.detach()
        if zero:
            net.kept = net.kept[:1] * 0
    expected = plain(engine, network(engine, _own_head(_carried), kept=None),
                     data, loss, edit)
    net = network(engine, _own_head(_carried), kept=None)
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})

    def follow():
        if seen:
            mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})

    def train():
        for X, y in data:
            mgpu.train_batch(X, y, replicas, loss, trainer)
            edit(net, follow)
    if zero or len(devices) == 1:
        train()
        same(values(net), expected)
    else:
        with pytest.raises(ValueError, match="received another array in "
                           "'kept'"):
            train()


def test_all_attributes_that_a_native_call_has_left_are_named(engine):
    def forward(net, x, F):
        h = net.a(x)
        if net.one is not None:
            h = h + net.one + net.b.other
        net.one, net.b.other = h.detach(), h.detach()
        return net.b(h)
    net = network(engine, forward, one=None)
    replicas = mgpu.initialize(net, on(0, 1))
    X, _ = batches(1)[0]
    shards = mgpu.split_and_load(X, replicas.devices)
    replicas(shards)
    net.one = None
    _call(engine, net, X[:1], False)
    with pytest.raises(ValueError, match=r"(?s)'one'.*'b\.other'"):
        replicas(shards)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_gluons_own_loop_keeps_what_it_likes(name, k):
    """`Trainer.step` of gradients that the network itself has left, after an
    evaluation by the replicas."""
    loss, devices = mgpu.losses.L2Loss(), on(*range(k))
    with using_engine(name) as engine:
        forward = _own_head(_on_a_layer)
        expected = plain(engine, network(engine, forward, kept=None),
                         batches(3), loss)
        net = network(engine, forward, kept=None)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})
        for X, y in batches(3):
            xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                losses = [loss(net(a), b) for a, b in zip(xs, ys)]
            for one in losses:
                one.backward()
            trainer.step(len(X))
            replicas(xs)
        same(values(net), expected)


WEAK = {"attribute": (weakref.ref, lambda v: v()),
        "list": (lambda net: [weakref.ref(net)], lambda v: v[0]()),
        "object": (lambda net: _Holder(weakref.ref(net)),
                   lambda v: v.factor()),
        "method": (lambda net: weakref.WeakMethod(net.itself),
                   lambda v: v()()),
        "proxy": (lambda net: [weakref.proxy(net)], lambda v: v[0])}


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", WEAK)
def test_a_weak_reference_to_a_layer_is_one_to_that_of_its_device(
        name, devices, kind, later):
    """To the network around it, so that it is no part of this layer."""
    import torch
    make, parent = WEAK[kind]

    class Inner(torch.nn.Linear):
        def forward(self, x):
            net = self.parent and parent(self.parent)
            if net is None:
                return super().forward(x)
            net.aux = x.square().mean(1, keepdim=True)
            return super().forward(x) * net.scale

    def forward(net, x, F):
        y = net.b(net.a(x))
        return y if net.aux is None else y * net.aux

    def new():
        net = network(engine, forward, scale=1.0, aux=None)
        type(net).itself = lambda net: net
        inner = Inner(4, 4).double()
        inner.load_state_dict(net.a.state_dict())
        net.a, inner.parent = inner, None if later else make(net)
        return net

    def edit(net):
        net.scale += 0.5
        if later:
            net.a.parent = make(net)
    with using_engine(name) as engine:
        edited_as_plain(engine, new, devices, edit)


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_sparse_matrices_in_attributes(name, devices, layout):
    """Of a graph; the user may change one between steps."""
    import torch

    def forward(net, x, F):
        return net.b(torch.sparse.mm(net.graph, net.a(x).T).T)

    def sparse(factor):
        return getattr(torch.tensor([[0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 3, 0],
                                     [0, 1, 0, 1]], dtype=torch.float64)
                       * factor, f"to_sparse_{layout}")()

    def edit(net):
        if layout == "coo":
            net.graph = sparse(0.5)
        else:
            net.graph.values().mul_(0.5)
    loss = mgpu.losses.L2Loss()
    with using_engine(name) as engine:
        expected, found = (how(network(engine, forward,
                                       graph=lambda: sparse(1)))
                           for how in (
            lambda net: plain(engine, net, batches(3), loss, edit),
            lambda net: trained(net, devices, batches(3), loss, "per_device",
                                "step", edit)))
        same(found, expected)
