"""What a forward pass keeps: the network has it, and each device its part."""
import importlib
import time
import weakref

import numpy as np
import pytest

import mgpu
from conftest import ENGINES
from helpers import (bricks, name_of, on, on_torch, relative_difference,
                     using_engine)

on_mxnet = pytest.mark.parametrize("engine", [
    name for name in ENGINES if name == "mxnet-np"], indirect=True)
RATE = 0.125
ROWS = 8
LOSS = mgpu.losses.L2Loss()


@pytest.fixture(params=[name for name in ENGINES if name != "mxnet-nd"])
def engine(request):
    """MXNet with one family of arrays: what keeps attributes treats both
    alike."""
    with using_engine(request.param) as backend:
        yield backend


def network(engine, forward, **kept):
    """Two layers with the `kept` attributes; ``forward(net, x, F)``."""
    Base, dense = bricks(engine)
    F = importlib.import_module(engine.name)

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.a, self.b = dense(4, 4), dense(4, 3)
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


def plain(engine, net, data, loss=LOSS, between=lambda net: None):
    """The frameworks themselves, with an update in NumPy."""
    if engine.name == "mxnet":
        from mxnet import autograd
        for X, y in data:
            with autograd.record():
                total = loss(net(engine.put(X, mgpu.cpu(0))),
                             engine.put(y, mgpu.cpu(0)))
            total.backward()
            for p in net.collect_params().values():
                p.set_data(engine.put(p.data().asnumpy() - RATE / len(X)
                                      * p.grad().asnumpy(), mgpu.cpu(0)))
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


def step(replicas, trainer, X, y, loss=LOSS, how="step"):
    """One step on the batch: by `train_batch`, or by "hand"."""
    if how == "step":
        mgpu.train_batch(X, y, replicas, loss, trainer)
        return
    xs, ys = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = mgpu.parallel(
            lambda o, y: None if o is None else loss(o, y), replicas(xs), ys)
    mgpu.backward(losses)
    trainer.step(len(X))


def replicated(net, devices, batch_norm="per_device"):
    """Replicas and their trainer."""
    replicas = mgpu.initialize(net, devices, batch_norm=batch_norm)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": RATE})


def trained(net, devices, data, loss=LOSS, batch_norm="per_device",
            how="step", between=lambda net: None):
    replicas, trainer = replicated(net, devices, batch_norm)
    for X, y in data:
        step(replicas, trainer, X, y, loss, how)
        between(replicas.net)
    return values(net)


def predicted(replicas, X):
    """The outputs of all rows."""
    return np.concatenate([mgpu.to_numpy(out) for out in replicas(
        mgpu.split_and_load(X, replicas.devices, even_split=False))
        if out is not None])


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert relative_difference(x, y) < 1e-12


def trains_as_plain(engine, new, devices, edit=lambda net: None, *,
                    data=None, batch_norm="per_device", how="step"):
    """Asserts it of the networks that ``new()`` makes, edited after each
    step."""
    data = batches(4) if data is None else data
    expected = plain(engine, new(), data, LOSS, edit)
    same(trained(new(), devices, data, LOSS, batch_norm, how, edit),
         expected)


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


def _state(net, x, F):
    h = net.a(x) if net.state is None else net.a(x) + net.state
    net.state = h.detach()
    return net.b(h)


def _in_a_dict(net, x, F):
    h = net.a(x) + net.cache["h"] if net.cache else net.a(x)
    net.cache["h"] = h.detach()
    return net.b(h)


class ItemsAsAttributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def _in_a_configuration(net, x, F):
    net.config.inner[0].count += 1
    return net.b(net.a(x)) / net.config.inner[0].count


def _reset_state(net):
    net.state = None


def _clear(net):
    net.cache.clear()


def _configure(net):
    net.config.inner[0].count = 2


def _configured():
    return ItemsAsAttributes(inner=[ItemsAsAttributes(count=0)])


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


def _detach_in_place(net):
    net.state[0] = net.state[0].detach()
    net.state[1]["c"] = net.state[1]["c"].detach()


def _zero(net):
    net.state = net.state.detach() * 0


def _zero_in_place(net):
    net.state = net.state.detach()
    net.state[:] = 0


def _half_in_place(net):
    net.state *= 0.5


def _same_on_all(net, x, F):
    net.state = net.state + 1 if net.state is not None \
        else net.a(x)[0, 0].detach() * 0 + 1
    return net.b(net.a(x) * net.state.sum())


def _plus_two(net):
    net.state = net.state + 2


def _fills_again(net, x, F):
    if net.state is None:
        net.state = []
    net.state.clear()
    net.state.append(net.a(x))
    return net.b(net.state[-1])


def _on_a_layer(net, x, F):
    net.a.state = net.a(x)
    net.state = [net.a.state]       # d2l's decoders
    return net.b(net.state[0])


def _call_natively(net):
    for n in (ROWS, 1):
        with mgpu.no_grad():
            net(mgpu.put(batches(1, n)[0][0], mgpu.cpu(0)))


def _nothing(net):
    pass


STATE = {"state": None}


@pytest.mark.parametrize("forward, kept, edit, batch_norm, how", [
    (_number, {"count": 0}, _nothing, "per_device", "step"),
    (_number, {"count": 0}, _nothing, "per_device", "hand"),
    (_in_a_list, {"counts": lambda: [0], "seen": list}, _nothing,
     "per_device", "step"),
    (_in_an_array, {"array": lambda: np.zeros(2)}, _nothing, "average",
     "step"),
    (_in_a_configuration, {"config": _configured}, _nothing, "per_device",
     "step"),
    (_in_a_configuration, {"config": _configured}, _configure, "per_device",
     "step"),
    (_state, STATE, _nothing, "per_device", "step"),
    (_state, STATE, _nothing, "sync", "step"),
    (_state, STATE, _reset_state, "per_device", "step"),
    (_state, STATE, _half_in_place, "per_device", "step"),
    (_state, STATE, _call_natively, "per_device", "step"),
    (_state, STATE, _call_natively, "sync", "step"),
    (_fills_again, STATE, _call_natively, "per_device", "step"),
    (_on_a_layer, STATE, _call_natively, "per_device", "step"),
    (_in_a_dict, {"cache": dict}, _nothing, "per_device", "hand"),
    (_in_a_dict, {"cache": dict}, _clear, "per_device", "step"),
    (_carries, STATE, _detach, "per_device", "step"),
    (_carries, STATE, _detach, "sync", "step"),
    (_carries, STATE, _zero, "per_device", "hand"),
    (_carries, STATE, _zero_in_place, "per_device", "step"),
    (_same_on_all, STATE, _plus_two, "per_device", "step"),
    (_carries_two, STATE, _detach_in_place, "per_device", "step")],
    ids=name_of)
def test_what_a_pass_keeps_is_as_on_one_device(
        engine, devices, forward, kept, edit, batch_norm, how):
    """Numbers are counted once for a batch, whatever the number of devices;
    arrays keep the examples of their device. What the user changes between
    steps, changes on every device."""
    trains_as_plain(engine, lambda: network(engine, forward, **kept), devices,
                    edit, data=batches(3), batch_norm=batch_norm, how=how)


@on_mxnet
@pytest.mark.device_counts(2)        # shards of one size
def test_a_loss_reads_what_the_pass_of_its_device_has_kept(engine, devices):
    def forward(net, x, F):
        net.kept = net.a(x)
        return net.b(net.kept)
    found = []
    for train in (plain, lambda engine, net, *rest: trained(
            net, devices, *rest)):
        net = network(engine, forward)
        found.append(train(
            engine, net, batches(2), lambda o, y, net=net:
            ((o - y) ** 2).sum(axis=1)
            + (net.kept ** 2).sum(axis=1)))
    same(*found)


@on_mxnet
def test_the_pass_that_completes_shapes_keeps_nothing(engine, devices):
    """It counts nothing, and writes into no array."""
    import mxnet as mx

    def forward(net, x, F):
        net.count += 1
        net.seen.append(net.count)
        net.array += 1
        return net.c(net.b(net.a(x)))
    net = network(engine, forward, count=0, seen=list,
                  array=lambda: engine.put(np.zeros(2), mgpu.cpu(0)))
    net.c = mx.gluon.nn.Dense(2, dtype="float64")
    for _ in range(2):
        mgpu.initialize(net, devices, dtype="float64",
                        sample=np.ones((2, 4)), force_reinit=True)
        assert (net.count, net.seen) == (0, [])
        assert not net.array.asnumpy().any()


# -- arrays and counts where some devices have no rows ------------------------

def counting(how, engine):
    """A network that counts its passes, and divides by the number."""
    def forward(net, x, F):
        one = x[:1, :1] * 0 + 1
        if how == "number":
            net.n = n = (net.n or 0) + 1
        elif how == "array":
            net.n = n = one if net.n is None else net.n + one
        elif how == "list":
            net.n = [one if net.n is None else net.n[0] + one]
            n = net.n[0]
        elif how == "in place":
            with mgpu.no_grad():
                net.n += 1
            n = net.n
        elif how == "buffer":
            if net.n is None:
                net.n = one
            else:
                net.n = net.n + 1
            n = net.n
        else:
            net.n = h = net.a(x).mean() * 0 + 1 + (
                0 if net.n is None else net.n.detach())
            n = h.detach()
        return net.b(net.a(x)) / n
    net = network(engine, forward, n=None)
    if how == "in place":
        net.n = engine.put(np.zeros(()), on(0)[0])
    elif how == "buffer":
        del net.n
        net.register_buffer("n", None)
    return net


def lags_nowhere(engine, how, devices):
    """Asserts that steps and predictions of fewer rows than devices give
    what one device gives."""
    data = [batches(1, rows)[0] for rows in (ROWS, 1, ROWS, 2)]
    net = counting(how, engine)
    weights = plain(engine, net, data)
    with mgpu.no_grad():
        expected = [mgpu.to_numpy(net(engine.put(X, on(0)[0])))
                    for X, _ in data]
    net = counting(how, engine)
    replicas, trainer = replicated(net, devices)
    for X, y in data:
        step(replicas, trainer, X, y)
    same(values(net), weights)
    same([predicted(replicas, X) for X, _ in data], expected)


def carries(net, x, F):
    y = net.a(x)
    if net.h is not None:
        y = y + net.h.detach()[:len(x)]
    net.h = y
    return net.b(y)


def test_a_state_that_the_user_sets_for_a_batch_of_another_size(
        engine, devices):
    data = [*batches(2), *batches(2, rows=7), *batches(1, rows=5)]
    sizes = [len(X) for X, _ in data]

    def new():
        rest = iter(sizes[1:])

        def set_anew(net):
            size = next(rest, None)
            if size:
                net.h = engine.put(np.arange(4. * size).reshape(size, 4) / 20,
                                   mgpu.cpu(0))
        return network(engine, carries, h=None), set_anew
    net, between = new()
    expected = plain(engine, net, data, between=between)
    net, between = new()
    same(trained(net, devices, data, between=between), expected)


def carries_by_size(net, x, F):
    """The state begins anew with each batch of another size."""
    y = net.a(x)
    if net.h is not None and net.h.shape[0] == len(x):
        y = y + net.h.detach()
    net.h = y
    return net.b(y)


@pytest.mark.device_counts(2)
def test_the_size_of_a_state_is_compared_as_on_one_device(engine, devices):
    """Also where a device's part is as large as an earlier batch."""
    data = [pair for rows in (8, 4, 8, 8, 4)
            for pair in batches(1, rows=rows)]
    expected = plain(engine, network(engine, carries_by_size, h=None), data)
    same(trained(network(engine, carries_by_size, h=None), devices, data),
         expected)


@pytest.mark.device_counts(2)
def test_a_state_that_the_user_cuts_to_the_size_of_a_part(engine, devices):
    data = [*batches(2), *batches(1, rows=4)]

    def halved(net):
        halved.steps += 1
        if halved.steps == 2:
            net.h = net.h.detach()[:4]
    found = []
    for run in (plain, lambda engine, net, data, between: trained(
            net, devices, data, between=between)):
        halved.steps = 0
        found.append(run(engine, network(engine, carries_by_size, h=None),
                         data, between=halved))
    same(found[1], found[0])


def test_a_state_of_a_batch_of_another_size_is_refused(engine, devices):
    """No device knows which entries are its own."""
    net = network(engine, carries, h=None)
    with pytest.raises(RuntimeError, match=r"the attribute Net.h has an entry "
                       r"for each example of an earlier batch, of shape "
                       r"\(8, 4\); this batch has another size"):
        trained(net, devices, [*batches(2), *batches(1, rows=7)])
    assert tuple(net.h.shape) == (8, 4)


@pytest.mark.parametrize("how", ["number", "array"])
def test_the_last_device_alone_has_what_passes_kept(engine, how):
    """It counts a pass; the first device, alone, then counts on."""
    plain_net, net = (counting(how, engine) for _ in range(2))
    replicas, _ = replicated(net, on(0, 1))
    for X, _ in batches(1, 4) * 3:
        for i in (1, 0, 1):
            shards = [None, None]
            shards[i] = mgpu.put(X, replicas.devices[i])
            with mgpu.no_grad():
                same([mgpu.to_numpy(replicas(shards)[i])], [mgpu.to_numpy(
                    plain_net(engine.put(X, replicas.devices[0])))])


@pytest.mark.parametrize("how", ["number", "array", "list"])
def test_arrays_that_passes_keep_reach_devices_without_rows(
        engine, devices, how):
    """A count of passes, a number or another array each time."""
    lags_nowhere(engine, how, devices)


@on_torch
@pytest.mark.parametrize("how", ["in place", "buffer", "with history"])
def test_devices_without_rows_have_what_a_pass_keeps(engine, devices, how):
    """In an array that is written to, a buffer that the first pass makes, an
    array with its history."""
    lags_nowhere(engine, how, devices)


# -- arrays that a pass writes to ---------------------------------------------


def _added(net, array):
    array += 1


def _through_a_new_view(net, array):
    view = array[:1]
    view += 1


def writing(engine, write, late):
    """A network whose passes write to an array after the first `late`."""
    def forward(net, x, F):
        net.passes += 1
        if net.passes > late:
            write(net, net.array)
        return net.b(net.a(x)) / float(1 + mgpu.to_numpy(net.array)[0])
    return network(engine, forward, passes=0,
                   array=engine.put(np.zeros(2), on(0)[0]))


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("write", [_added, _through_a_new_view],
                         ids=lambda f: f.__name__)
def test_an_array_that_passes_write_to(engine, devices, write, late):
    trains_as_plain(engine, lambda: writing(engine, write, late), devices)


@on_mxnet
def test_arrays_and_weights_without_a_context_are_the_devices(engine, devices):
    """``p.data()`` in a forward pass is the array of the device that runs."""
    def forward(net, x, F):
        y = F.nd.dot(F.nd.tanh(net.a(x).as_nd_ndarray()),
                     net.a.weight.data().as_nd_ndarray())
        return net.b(y.as_np_ndarray())
    expected = plain(engine, network(engine, forward), batches(2))
    net = network(engine, forward)
    replicas, trainer = replicated(net, devices)
    for X, y in batches(2):
        step(replicas, trainer, X, y)
    same(values(net), expected)


# -- what the user edits of it ------------------------------------------------

class _Holder:
    def __init__(self, factor):
        self.factor = factor


KINDS = {"array": (lambda x: x, lambda v: v),
         "list": (lambda x: [x], lambda v: v[0]),
         "tuple": (lambda x: (x, 2.0), lambda v: v[0]),
         "object": (_Holder, lambda v: v.factor),
         "beside a weight": (lambda x: [None, x], lambda v: v[1])}


@pytest.mark.parametrize("kind, how", [
    ("array", "put"), ("list", "in place"),
    ("tuple", "in place"), ("object", "put there"),
    ("beside a weight", "in place")])
def test_arrays_in_attributes_that_the_user_changes(engine, devices, kind,
                                                    how):
    """On every device, where no pass keeps any there."""
    make, part = KINDS[kind]

    def forward(net, x, F):
        y, factor = net.b(net.a(x)), part(net.holder)
        return y * (factor.as_in_context(x.context)
                    if engine.name == "mxnet" else factor)

    def edit(net):
        x = part(net.holder)
        if how == "in place":
            with mgpu.no_grad():
                x *= 0.75
        elif how == "put":
            net.holder = make(x * 0.75)
        else:
            net.holder.factor = x * 0.75

    def new():
        net = network(engine, forward)
        net.holder = make(engine.put(np.ones(3), mgpu.cpu(0)))
        if kind == "beside a weight":       # which each step writes to
            net.holder[0] = net.b.weight
        return net
    trains_as_plain(engine, new, devices, edit)


@on_torch
def test_layers_that_are_not_registered_follow(engine, devices):
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
    trains_as_plain(engine, new, devices, edit)


@on_torch
def test_an_attribute_with_a_history(engine, devices):
    """The gradient flows through it."""
    import torch
    (X, y), = batches(1)
    found = []
    for places in (on(0), devices):
        net = network(engine, lambda net, x, F: net.b(
            net.a(x) * net.holder))
        outer = torch.ones(4, dtype=torch.float64, requires_grad=True)
        replicas, trainer = replicated(net, places)
        net.holder = outer * 2
        step(replicas, trainer, X, y)
        found.append([*values(net), outer.grad.numpy()])
    same(*found)


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


@pytest.mark.parametrize("rows, state", [
    (1, lambda: None), (ROWS, lambda: {"h": 0})], ids=["attribute", "dict"])
def test_a_prediction_keeps_the_state_of_training(engine, devices, rows,
                                                  state):
    """Also where some devices have no rows in it."""
    expected = plain(engine, network(engine, _training_keeps, state=state),
                     batches(4))
    net = network(engine, _training_keeps, state=state)
    replicas, trainer = replicated(net, devices)
    for X, y in batches(4):
        step(replicas, trainer, X, y)
        predicted(replicas, X[:rows])
    same(values(net), expected)


def buffered(engine, forward, *shape):
    """A network with a buffer ``net.own`` of zeros."""
    net = network(engine, forward)
    if engine.name == "mxnet":
        net.own = net.params.get("own", shape=shape, init="zeros",
                                 grad_req="null", dtype="float64")
        net.own.initialize()
    else:
        net.register_buffer("own", engine.put(np.zeros(shape), mgpu.cpu(0)))
    return net


def buffer_of(net, x):
    """Its array on the device of `x`."""
    return net.own.data(x.context) if hasattr(net.own, "list_ctx") \
        else net.own


def scope(mode):
    return mgpu.record(train_mode=False) if mode == "record" \
        else mgpu.no_grad()


@pytest.mark.parametrize("mode", ["prediction", "evaluation", "record"])
def test_buffers_that_predictions_write_reach_devices_without_rows(
        engine, devices, mode):
    """A count of all passes, and batches of fewer rows than devices."""
    def forward(net, x, F):
        count = buffer_of(net, x)
        with mgpu.no_grad():
            count[:] = count + 1
        return net.b(net.a(x)) * (count * 1)
    (X, _), = batches(1)
    found = []
    for on_devices in (devices, on(0)):
        replicas = mgpu.initialize(buffered(engine, forward, 1), on_devices)
        for rows in (ROWS, 1, ROWS, 2, 1, ROWS):
            if mode == "evaluation":
                mgpu.evaluate_accuracy_gpus(replicas, [
                    (X[:rows], np.zeros(rows, "int32"))])
            with scope(mode):
                found.append(predicted(replicas, X[:rows]))
    for x, y in zip(found[:6], found[6:], strict=True):
        assert relative_difference(x, y) < 1e-12


def test_a_carried_state_that_is_put_back_is_that_of_every_device(
        engine, devices):
    """Saved and put back around an evaluation."""
    (X, _), = batches(1)

    def around(net, evaluate):
        saved, net.state = net.state, None
        evaluate()
        net.state = saved
    net = network(engine, _state, state=None)
    expected = plain(engine, net, batches(4), LOSS, lambda net: around(
        net, lambda: net(engine.put(X, on(0)[0]))))
    net = network(engine, _state, state=None)
    replicas, trainer = replicated(net, devices)
    for A, y in batches(4):
        step(replicas, trainer, A, y)
        around(net, lambda: predicted(replicas, X))
    same(values(net), expected)


# -- leaves with gradients ----------------------------------------------------

LEAVES = {"attribute": (lambda x: x, lambda v: v),
          "parameter": (lambda x: [x], lambda v: v[0]),
          "list": (lambda x: [[x]], lambda v: v[0][0]),
          "dict": (lambda x: {"a": x, "last": None}, lambda v: v["a"])}


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
    return net


def _zeroed(leaf):
    leaf.grad = None


def _added_up(leaf):
    pass


def _hooked(leaf):
    _zeroed(leaf)
    if not leaf._backward_hooks:
        leaf.register_hook(lambda g: g.clamp(-0.5, 0.5))


@on_torch
@pytest.mark.parametrize("kind, how, change, rows, batch_norm", [
    ("attribute", "step", _zeroed, [ROWS] * 3, "sync"),
    ("attribute", "step", _added_up, [ROWS] * 3, "per_device"),
    ("attribute", "step", _hooked, [ROWS] * 3, "per_device"),
    ("parameter", "step", _zeroed, [ROWS] * 3, "per_device"),
    ("attribute", "hand", _zeroed, [ROWS] * 3, "per_device"),
    ("dict", "step", _zeroed, [8, 2, 8, 1, 3], "per_device"),
    ("dict", "step", _zeroed, [8, 2, 8, 1, 3], "sync")], ids=name_of)
def test_a_leaf_in_an_attribute_gets_the_gradient_of_all_rows(
        engine, devices, kind, change, how, rows, batch_norm):
    """As with an optimizer of its own: architecture weights, temperatures,
    prompts. Also where some devices have no rows."""
    import torch
    gradients = []

    def edit(net):
        leaf = LEAVES[kind][1](net.holder)
        gradients.append(leaf.grad.numpy().copy())
        with torch.no_grad():
            leaf.sub_(leaf.grad, alpha=RATE / ROWS)
        change(leaf)
    trains_as_plain(engine, lambda: _with_leaf(engine, kind), devices, edit,
                    data=[batches(1, n)[0] for n in rows],
                    batch_norm=batch_norm, how=how)
    same(gradients[:len(rows)], gradients[len(rows):])


@on_torch
def test_gradients_that_are_asked_for_of_a_leaf_in_an_attribute(
        engine, devices):
    """``torch.autograd.grad``, also of the second order."""
    import torch

    def asked(devices):
        net = _with_leaf(engine, "list")
        leaf = net.holder[0][0]
        (X, y), = batches(1)
        if devices is None:
            losses = [net(torch.tensor(X)).square().sum()]
        else:
            replicas = mgpu.initialize(net, devices)
            with mgpu.record():
                losses = [o.square().sum() for o in replicas(
                    mgpu.split_and_load(X, devices, even_split=False))]
        first, = torch.autograd.grad(sum(losses), leaf, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), leaf)
        return [first.detach().numpy(), second.numpy()]
    same(asked(devices), asked(None))


@on_torch
@pytest.mark.device_counts(4)
def test_a_leaf_in_an_attribute_has_the_same_bits_in_every_run(
        engine, devices):
    """Gradients are added in the order of the devices, whatever threads have
    done before."""
    import torch

    def bits(warm):
        net = _with_leaf(engine, "attribute")
        replicas = mgpu.initialize(net, devices)
        X = np.random.default_rng(2).normal(size=(64, 4))

        def record(i):
            x = torch.ones(1, requires_grad=True)
            for _ in range(warm[i] * 100):
                x = x * 1
        mgpu.parallel(record, list(range(4)))
        with mgpu.record():
            outputs = replicas(mgpu.split_and_load(X, devices))
            losses = [o.exp().sum() for o in outputs]
        # Backward passes in threads would reach the leaf in this order.
        for output, n in zip(outputs, warm):
            output.register_hook(lambda g, n=n: time.sleep(n / 200))
        mgpu.backward(losses)
        return net.holder.grad.numpy().tobytes()
    assert len({bits(warm) for warm in (
        (0, 10, 20, 30), (30, 20, 10, 0), (10, 30, 0, 20))}) == 1


@on_torch
def test_a_leaf_that_the_forward_pass_writes_to(engine, devices):
    import torch

    def forward(net, x, F):
        with torch.no_grad():
            net.leaf.mul_(0.75)
        return net.b(net.a(x)) * net.leaf
    trains_as_plain(engine, lambda: network(
        engine, forward, leaf=lambda: torch.ones(
            3, dtype=torch.float64, requires_grad=True)), devices)


@on_torch
def test_a_buffer_with_a_gradient(engine, devices):
    """No trainer moves it; its gradient is that of one device."""
    import torch

    def new():
        net = network(engine, lambda net, x, F: net.b(net.a(x)) * net.gain)
        net.register_buffer("gain", torch.ones(
            3, dtype=torch.float64, requires_grad=True))
        made.append(net)
        return net
    made = []
    trains_as_plain(engine, new, devices, data=batches(1))
    one, several = (net.gain.grad.numpy() for net in made)
    assert relative_difference(several, one) < 1e-12


# -- other things in attributes -----------------------------------------------

WEAK = {"attribute": (weakref.ref, lambda v: v()),
        "list": (lambda net: [weakref.ref(net)], lambda v: v[0]()),
        "method": (lambda net: weakref.WeakMethod(net.itself),
                   lambda v: v()())}


@on_torch
@pytest.mark.parametrize("kind, later", [
    ("list", False), ("attribute", True), ("method", False)])
def test_a_weak_reference_to_a_layer_is_one_to_that_of_its_device(
        engine, devices, kind, later):
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
    trains_as_plain(engine, new, devices, edit)


@on_torch
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_sparse_matrices_in_attributes(engine, devices):
    """Of a graph, which the user changes between steps."""
    import torch
    graph = [[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 3, 0], [0, 1, 0, 1]]
    trains_as_plain(engine, lambda: network(
        engine, lambda net, x, F: net.b(
            torch.sparse.mm(net.graph, net.a(x).T).T),
        graph=lambda: torch.tensor(
            graph, dtype=torch.float64).to_sparse_csr()),
        devices, lambda net: net.graph.values().mul_(0.5))
