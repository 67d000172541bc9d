"""Recording, backward, `parallel`, the step and the loop."""
import argparse
import array
import collections
import ctypes
import functools
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import re
import sys
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import conftest
import mgpu
from helpers import (BACKENDS, assert_bit_equal, bricks, convnet,
                     foreign_array, mlp, on, refusal_of_foreign,
                     relative_difference)
from mgpu import functional as F


def batch(rows, seed=0):
    rng = np.random.default_rng([rows, seed])
    return rng.normal(size=(rows, 6)), rng.integers(0, 3, rows)


def batches(*rows):
    return [batch(n, i) for i, n in enumerate(rows)]


def set_up(engine, devices, lr=0.125, **options):
    """(replicas, loss, trainer) of a small network in float64."""
    replicas = mgpu.initialize(mlp(engine), devices, "xavier", seed=1,
                               dtype="float64", **options)
    return (replicas, mgpu.losses.SoftmaxCrossEntropyLoss(),
            mgpu.Trainer(replicas, "sgd", {"learning_rate": lr}))


def values(replicas):
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in replicas.params()}


def assert_close(found, wanted):
    """float64 sums in another order."""
    for name in wanted:
        assert relative_difference(found[name][0], wanted[name][0]) < 1e-12


def assert_unchanged(found, before):
    for name in before:
        for a, b in zip(found[name], before[name]):
            assert_bit_equal(a, b)


# -- pieces -------------------------------------------------------------------

def test_put_and_back(engine, devices):
    for x in (np.arange(6).reshape(2, 3), np.float32([1.5]),
              np.float64([[2.0]]), np.int32([1]), np.uint8([255])):
        for device in devices:
            copy = mgpu.put(x, device)
            assert_bit_equal(mgpu.to_numpy(copy), x)
            again = mgpu.put(copy, device)      # also where it is already
            with mgpu.no_grad():
                again[:] = 0
            assert_bit_equal(mgpu.to_numpy(copy), x)
            assert mgpu.to_numpy(mgpu.put(x, copy)).tolist() == x.tolist()
    assert mgpu.to_numpy(mgpu.put(np.ones(2), "cpu:3", dtype="float32")
                         ).dtype == np.float32
    with pytest.raises(ValueError, match=r"gpu\(99\) is not there"):
        mgpu.put(np.ones(2), "gpu:99")
    with pytest.raises(TypeError, match="expected a device"):
        mgpu.put(np.ones(2), on(0, 1))


def flags():
    backend = mgpu.get_backend()
    return backend.is_recording(), backend.is_training()


def test_scopes_nest_and_come_back(engine):
    assert flags() == (False, False)
    with mgpu.record():
        assert flags() == (True, True)
        with mgpu.no_grad():
            assert flags() == (False, False)
            with mgpu.record(train_mode=False):
                assert flags() == (True, False)
            assert flags() == (False, False)
        assert flags() == (True, True)
        with pytest.raises(KeyError), mgpu.no_grad():
            raise KeyError
        assert flags() == (True, True)
    assert flags() == (False, False)
    with pytest.raises(KeyError), mgpu.record():
        raise KeyError
    assert flags() == (False, False)
    scope = mgpu.record()
    for _ in range(2):
        with scope, scope:      # one object, again and inside itself
            assert flags() == (True, True)
        assert flags() == (False, False)


def leaf(value, device=None):
    x = mgpu.put(np.array([value]), device or mgpu.cpu(0))
    mgpu.attach_grad(x)
    return x


def test_wrong_losses_are_refused(engine):
    foreign, name = foreign_array(engine)
    x = leaf(2.0)
    with mgpu.record():
        good = x * x
    with mgpu.no_grad():
        outside = x * x
    unreal = mgpu.put(np.ones(1), mgpu.cpu(0))
    text = ("backward takes arrays of the {} backend; received {}. Pass what "
            "the loss returned.")
    for losses, error, message in (
            (outside, RuntimeError, "backward needs losses that were computed "
             "inside mgpu.record() from arrays with gradients attached; "
             "received one that was not. Put the forward pass inside `with "
             "mgpu.record():`."),
            (unreal, RuntimeError, None), ([good, unreal], RuntimeError, None),
            (1.0, TypeError, text.format(engine.name, "float")),
            ([good, 1.0], TypeError, text.format(engine.name, "float")),
            (np.ones(2), TypeError, text.format(engine.name, "ndarray")),
            (foreign, TypeError, refusal_of_foreign(engine, name)),
            ([foreign], TypeError, refusal_of_foreign(engine, name)),
            ([], ValueError, "backward needs at least one loss; received "
             "none. Give some device rows."),
            ([None, None], ValueError, None)):
        with pytest.raises(error) as caught:
            mgpu.backward(losses)
        assert message is None or str(caught.value) == message
    assert mgpu.to_numpy(mgpu.grad(x)).tolist() == [0]
    for read in (mgpu.grad, engine.grad):
        with pytest.raises(ValueError, match="the array has no gradient "
                           "attached; use mgpu.attach_grad"):
            read(unreal)
    with pytest.raises(ValueError, match="unknown grad_req; received 'no'"):
        mgpu.attach_grad(unreal, "no")


def test_parallel(engine, devices):
    """Results in order; the modes of the caller; the first error by number;
    a nested call runs one after the other."""
    numbers = range(len(devices))
    with mgpu.record():
        found = mgpu.parallel(
            lambda i, device: (i, device, flags(), mgpu.get_backend().name),
            numbers, devices)
    assert found == [(i, d, (True, True), engine.name)
                     for i, d in zip(numbers, devices)]
    assert mgpu.parallel(lambda i: mgpu.parallel(lambda j: (i, j), numbers),
                         numbers) == [[(i, j) for j in numbers]
                                      for i in numbers]
    ran = []

    def fail(i):
        ran.append(i)
        raise LookupError(i)
    with pytest.raises(LookupError, match="^0$"):
        mgpu.parallel(fail, numbers)
    assert sorted(ran) == list(numbers)     # all of them were waited for
    for lists, lengths in ((([1], [1, 2]), "[1, 2]"), ((), "[]")):
        with pytest.raises(ValueError) as caught:
            mgpu.parallel(max, *lists)
        assert str(caught.value) == (
            "parallel takes lists of one length, with an entry per device; "
            f"received lengths {lengths}. Give each list an entry for every "
            "device.")


def test_parallel_leaves_devices_without_rows_out(engine, devices):
    """So the guide's step by hand takes any loss; a list of None alone is
    what `fn` is called with."""
    rest = [None] * len(devices[1:])
    assert mgpu.parallel(lambda x, y: (x, y), [1, *rest],
                         range(len(devices))) == [(1, 0), *rest]
    assert mgpu.parallel(lambda x: x is None, [None] * len(devices)) \
        == [True] * len(devices)

    def squares(pred, label):
        return (pred * pred).sum(1) + 0 * label     # None has no sum
    found = []
    for on_devices in (devices, on(0)):
        replicas, _, trainer = set_up(engine, on_devices)
        for rows in (1, 3):
            X, y = batch(rows)
            X_shards, y_shards = mgpu.split_batch(X, y * 1.0,
                                                  replicas.devices)
            with mgpu.record():
                losses = mgpu.parallel(squares, replicas(X_shards), y_shards)
            mgpu.backward(losses)
            trainer.step(rows)
        found.append(values(replicas))
    assert_close(*found)


def test_sgd(engine, devices):
    """The book's function: p -= lr * grad / batch_size, grad = 0."""
    for device in devices:
        params = mgpu.get_params([np.array([[4.0, 8.0]]), np.ones(3)], device)
        with mgpu.record():
            loss = params[0] * params[0]
        mgpu.backward(loss)
        mgpu.sgd(params, lr=0.5, batch_size=4)
        assert mgpu.to_numpy(params[0]).tolist() == [[3, 6]]
        assert mgpu.to_numpy(params[1]).tolist() == [1, 1, 1]
        assert not mgpu.to_numpy(mgpu.grad(params[0])).any()
        with mgpu.record():     # still a leaf
            loss = params[0] * params[0]
        mgpu.backward(loss)
        assert mgpu.to_numpy(mgpu.grad(params[0])).tolist() == [[6, 12]]


@pytest.mark.parametrize("size", [0, -2, -1.5, None])
def test_sgd_refuses_before_it_changes_anything(engine, size):
    params = mgpu.get_params([np.ones(2)], mgpu.cpu(0))
    with mgpu.record():
        loss = params[0] * 2
    mgpu.backward(loss)
    with pytest.raises(ValueError, match="batch_size must be a finite number "
                       f"above 0; received {size}. Pass the rows"):
        mgpu.sgd(params, 0.5, size)
    with pytest.raises(ValueError, match="the array has no gradient attached"):
        mgpu.sgd([params[0], mgpu.put(np.ones(1), mgpu.cpu(0))], 0.5, 1)
    assert mgpu.to_numpy(params[0]).tolist() == [1, 1]
    assert mgpu.to_numpy(mgpu.grad(params[0])).tolist() == [2, 2]


@pytest.mark.parametrize("wrong", [-1, 1.5, "0", None, True])
def test_a_wrong_seed_is_refused(engine, wrong):
    with pytest.raises(ValueError) as caught:
        mgpu.seed(wrong)
    assert str(caught.value) == (
        f"seed must be an integer of 0 or more; received {wrong!r}.")


# -- train_batch --------------------------------------------------------------

def test_train_batch_is_one_step_of_the_whole_batch(engine, devices):
    """Of native and of NumPy data; fewer rows than devices included."""
    one = set_up(engine, on(0))
    many = set_up(engine, devices)
    start = values(many[0])
    for i, (X, y) in enumerate(batches(8, 7, 2, 1)):
        wanted, = mgpu.train_batch(X, y, *one)
        data = (X, y) if i % 2 else (mgpu.put(X, mgpu.cpu(0)),
                                     mgpu.put(y, mgpu.cpu(0)))
        losses = mgpu.train_batch(*data, *many)
        assert len(losses) == len(devices)
        for i, loss in enumerate(losses):
            assert (loss is None) == (i >= len(X))
        losses = [mgpu.to_numpy(loss) for loss in losses if loss is not None]
        assert relative_difference(np.concatenate(losses),
                                   mgpu.to_numpy(wanted)) < 1e-12
        assert_close(values(many[0]), values(one[0]))
    for name, copies in values(many[0]).items():
        assert (copies[0] != start[name][0]).any()
        for copy in copies:
            assert_bit_equal(copy, copies[0])


def test_unequal_shards(engine, devices):
    """``weights=[1, 2, ...]``: the same step."""
    weights = [i + 1.0 for i in range(len(devices))]

    def split(X, y, devices):
        return mgpu.split_batch(X, y, devices, weights=weights)
    X, y = batch(20)
    one, many = set_up(engine, on(0)), set_up(engine, devices)
    mgpu.train_batch(X, y, *one)
    losses = mgpu.train_batch(X, y, *many, split_f=split)
    sizes = [len(loss) for loss in losses]
    assert sizes == sorted(sizes) and sum(sizes) == 20
    assert_close(values(many[0]), values(one[0]))


def test_several_inputs_and_labels(engine, devices):
    """X a list, as data loaders give it, and y a dict."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 3)

        def forward(self, a, b):
            return self.dense(a) * b
    replicas = mgpu.initialize(Net(), devices, "xavier", dtype="float64")
    ce = mgpu.losses.SoftmaxCrossEntropyLoss()
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    X, y = batch(5)
    before = values(replicas)
    losses = mgpu.train_batch([X, X[:, :3] ** 2], {"class": y}, replicas,
                              lambda out, y: ce(out, y["class"]), trainer)
    assert sum(len(loss) for loss in losses if loss is not None) == 5
    assert (values(replicas)["dense.weight"][0]
            != before["dense.weight"][0]).any()


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_rows_are_those_of_the_first_input(engine, devices, batch_norm):
    """Images in a list and a dict of what is on each, in the inputs and in
    the labels: there may be nothing on one."""
    ops = engine.ops
    base, dense = bricks(engine)

    class Detector(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 4)

        def forward(self, images, found):
            return [self.dense(x.reshape((1, 6))) * (1 + len(boxes["boxes"]))
                    for x, boxes in zip(images, found, strict=True)]

    def loss(out, found):
        return ops.concat([
            ops.sum((o - f["boxes"]) ** 2 if len(f["boxes"]) else o,
                    axis=(0, 1)).reshape((1,))
            for o, f in zip(out, found, strict=True)])
    X, _ = batch(5)
    boxes = [np.random.default_rng(i).normal(size=(i, 4)) for i in range(5)]

    def split(X, y, devices):
        shards = [
            ([mgpu.put(X[i].reshape(2, 3), device) for i in range(a, b)],
             [{"boxes": mgpu.put(boxes[i], device)} for i in range(a, b)])
            for device, (a, b) in zip(devices, mgpu.split.shard_bounds(
                len(X), len(devices)))]
        return shards, [found for _, found in shards]

    def trained(devices, rows, by_hand):
        replicas = mgpu.initialize(Detector(), devices, "xavier", seed=1,
                                   dtype="float64", batch_norm=batch_norm)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        if by_hand:
            shards, found = split(X[:rows], None, devices)
            with mgpu.record():
                losses = mgpu.parallel(
                    lambda out, y: None if out is None else loss(out, y),
                    replicas(*zip(*shards)), found)
            mgpu.backward(losses)
            trainer.step(rows)
        else:
            losses = mgpu.train_batch(X[:rows], None, replicas, loss, trainer,
                                      split)
        assert [0 if x is None else len(x) for x in losses] == [
            b - a for a, b in mgpu.split.shard_bounds(rows, len(devices))]
        return values(replicas)
    for rows in (5, 1):
        for by_hand in (False, True):
            assert_close(trained(devices, rows, by_hand),
                         trained(on(0), rows, True))


def test_labels_without_inputs_are_refused(engine):
    replicas, loss, trainer = set_up(engine, on(0, 1))
    before, (X, y) = values(replicas), batch(4)

    def split(X, y, devices):
        xs, ys = mgpu.split_batch(X, y, devices)
        return [xs[0], xs[1][:0]], ys
    with pytest.raises(ValueError) as caught:
        mgpu.train_batch(X, y, replicas, loss, trainer, split)
    assert str(caught.value) == (
        "a device has inputs where it has labels; received 2 rows of labels "
        "without inputs on cpu(1). The first array of the inputs is the one "
        "whose rows count.")
    assert_unchanged(values(replicas), before)


class Counter:
    calls = 0

    def add(self, n):
        self.calls += n


class Slots:
    __slots__ = ("counter", "last")

    def __init__(self):
        self.counter, self.last = Counter(), 0.0

    def __call__(self, pred, label):
        self.last += len(label)
        return LOSS(pred, label)


LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
TOTAL = {"rows": 0}


def counted(pred, label):
    global COUNT
    COUNT = globals().get("COUNT", 0) + 1
    return LOSS(pred, label) * COUNT


def annotated(pred, label):
    annotated.calls = getattr(annotated, "calls", 0) + 1
    return LOSS(pred, label) * annotated.calls


def by_attribute(box):
    """A loss that counts in an attribute of `box`."""
    box.calls = 0

    def loss(pred, label):
        box.calls += 1
        return LOSS(pred, label) * box.calls
    return loss


def by_item(box):
    def loss(pred, label):
        box[0] += 1
        return LOSS(pred, label) * box[0]
    return loss


def by_call(draw):
    return lambda pred, label: LOSS(pred, label) * draw()


def by_next(iterator):
    return by_call(lambda: next(iterator))


def in_containers():
    """Losses that count in objects of the standard library."""
    waiting, written = queue.Queue(), io.StringIO()
    module = sys.modules["counting_module"] = types.ModuleType(
        "counting_module")
    module.calls = 0

    class Attributes(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    class Kept(collections.UserDict):
        pass

    def imports():
        import counting_module
        counting_module.calls += 1
        return counting_module.calls
    shared = multiprocessing.Value("i", 0)

    def shares():
        shared.value += 1
        return shared.value
    zipped = zip(range(1, 99), range(1, 99), strict=True)
    return {
        "namespace": by_attribute(argparse.Namespace()),
        "simple": by_attribute(types.SimpleNamespace()),
        "userdict": by_item(Kept({0: 0})),
        "attributes": by_attribute(Attributes()),
        "numbers": by_item(array.array("l", [0])),
        "bytes": by_item(bytearray(1)), "shared": by_call(shares),
        "of_ctypes": by_item((ctypes.c_int * 1)(0)),
        "of_logger": by_attribute(logging.getLogger("counts")),
        "of_partial": by_attribute(functools.partial(int)),
        "queue": by_call(lambda: (waiting.put(1), waiting.qsize())[1]),
        "written": by_call(lambda: written.write("xx") and written.tell()),
        "generator": by_next(i for i in range(1, 99)),
        "cycle": by_next(itertools.cycle([1, 2])),
        "zipped": by_call(lambda: next(zipped)[0]),
        "listed": by_next(iter([1, 2, 3, 4, 5])), "imports": by_call(imports),
        "python_random": by_call(lambda: random.random()),
        "numpy_random": by_call(lambda: np.random.random())}


def counters(engine):
    """By name: losses that count, or sum up, in all places that there are."""
    counter, log, stream = Counter(), [], np.random.default_rng(0)
    array = mgpu.put(np.zeros(1), mgpu.cpu(0))
    host = np.zeros(2)

    def sums(pred, label):
        TOTAL["rows"] += len(label)
        return LOSS(pred, label)

    def of_another(pred, label):
        counter.add(1)
        return LOSS(pred, label) * counter.calls

    def logs(pred, label):
        log.append(len(label))
        return LOSS(pred, label)

    def in_an_array(pred, label):
        array[:] = array + 1
        return LOSS(pred, label)

    def in_numpy(pred, label):
        host[0] += 1
        return LOSS(pred, label) * host[0]

    def draws(pred, label):
        return LOSS(pred, label) * stream.random()

    def defaults(pred, label, kept={"n": 0}):       # noqa: B006
        kept["n"] += 1
        return LOSS(pred, label)

    class Annealed(mgpu.losses.Loss):
        steps = 0.0

        def __call__(self, pred, label):
            self.steps += 0.1
            return LOSS(pred, label) * self.steps

    class Method:
        calls = 0

        def loss(self, pred, label):
            Method.calls += 1
            return LOSS(pred, label)
    found = {f.__name__: f for f in (
        counted, annotated, sums, of_another, logs, in_an_array, in_numpy,
        draws, defaults)}
    found |= {"slots": Slots(), "annealed": Annealed(),
              "method": Method().loss,
              "adapted": mgpu.losses.per_example(
                  lambda pred, label: sums(pred, label).mean())}
    found |= in_containers()
    if engine.name == "torch":
        import torch

        class Buffer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, pred, label):
                self.calls += 1
                return LOSS(pred, label) * self.calls

        class Inside(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(3)

            def forward(self, pred, label):
                return LOSS(self.norm(pred.float()).double(), label)
        layer = torch.nn.Linear(1, 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(
            [torch.zeros(1, requires_grad=True)], 1.0), lambda step: step + 1)
        schedule.optimizer.step()       # or torch warns
        found |= {"buffer": Buffer(), "inside": Inside(),
                  "layer": by_attribute(layer),
                  "schedule": by_call(lambda: (
                      schedule.step(), schedule.get_last_lr()[0])[1])}
    else:
        from mxnet import gluon

        class Block(gluon.Block):
            calls = 0

            def forward(self, pred, label):
                self.calls += 1
                return LOSS(pred, label) * self.calls
        found["block"] = Block()
    return found


KINDS = ("counted annotated sums of_another logs in_an_array in_numpy draws "
         "defaults slots annealed method adapted buffer inside block layer "
         "schedule").split() + list(in_containers())


@pytest.mark.parametrize("stage_by_stage", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_counts_its_calls_is_refused_on_several_devices(
        engine, devices, kind, stage_by_stage):
    """Before anything changes. On one device, or where one has all rows, it
    is called once."""
    loss = counters(engine).get(kind)
    if loss is None:        # of the other engine
        return
    replicas, _, trainer = set_up(engine, devices)
    if stage_by_stage:
        for p in replicas.params():
            p.grad_req = "add"
    for rows in (1, 8):
        replicas.zero_grad()
        before = values(replicas)
        if rows == 1 and kind == "inside":
            continue        # no statistics of one row
        if rows == 1 or len(devices) == 1:
            mgpu.train_batch(*batch(rows), replicas, loss, trainer)
            continue
        with pytest.raises(ValueError, match="keeps no state.*outside"):
            mgpu.train_batch(*batch(rows), replicas, loss, trainer)
        assert_unchanged(values(replicas), before)


def test_a_loss_that_reads_what_changes_between_steps(engine, devices):
    """Settings, parameters, caches and what is made in the first call."""
    class Free:
        def __init__(self):
            self.step, self.ones, self.cache = 0, None, {}
            self.weight = [mgpu.put(np.full(1, 2.0), d) for d in devices]
            self.log = []

        def __call__(self, pred, label):
            if self.ones is None:
                self.ones = np.ones(1)
            key = str(getattr(pred, "ctx", len(label)))
            self.cache.setdefault(key, np.zeros(1))
            return LOSS(pred, label) * float(self.step * self.ones[0]) \
                * float(mgpu.to_numpy(self.weight[0])[0])
    found = []
    for on_devices in (devices, on(0)):
        replicas, _, trainer = set_up(engine, on_devices)
        loss = Free()
        for step, rows in enumerate((5, 8, 2, 1), 1):
            loss.step = step
            loss.weight[0] += 0.5
            losses = mgpu.train_batch(*batch(rows), replicas, loss, trainer)
            loss.log.append(sum(len(x) for x in losses if x is not None))
        found.append(values(replicas))
    assert_close(*found)


def test_a_loss_that_reads_objects_of_the_standard_library(engine, devices):
    """What is set between steps, at its end, or drawn from elsewhere."""
    args = argparse.Namespace(scale=0.5, inner=types.SimpleNamespace(n=[1]))
    done = (i for i in ())
    log = logging.getLogger("reads")

    def loss(pred, label):
        log.debug("rows: %d", len(label))
        assert list(done) == [] and random and np.random
        return LOSS(pred, label) * (args.scale * args.inner.n[0])
    assert list(done) == []
    found = []
    for on_devices in (devices, on(0)):
        replicas, _, trainer = set_up(engine, on_devices)
        for args.scale in (0.5, 0.25):
            args.inner.n[0] += 1
            random.random()
            mgpu.train_batch(*batch(8), replicas, loss, trainer)
        args.inner.n[0] = 1
        found.append(values(replicas))
    assert_close(*found)


def test_a_leaf_that_all_losses_share(engine, devices):
    """Its gradient is the sum over devices, and each step's own."""
    replicas, _, trainer = set_up(engine, devices)
    weight, labels = leaf(2.0), np.arange(1.0, 6.0)
    for _ in range(2):
        mgpu.train_batch(
            batch(5)[0], labels, replicas, lambda out, y:
            F.sum(out, axis=1) + y * mgpu.put(weight, y), trainer)
        assert mgpu.to_numpy(mgpu.grad(weight)).tolist() == [15]
        for copies in values(replicas).values():
            for copy in copies:
                assert_bit_equal(copy, copies[0])


@pytest.mark.parametrize("name", [n for n in BACKENDS if n == "torch"])
def test_a_loss_of_another_replicas_parameters(name):
    """MXNet queues all passes, and goes through them together."""
    with mgpu.using_backend(name) as engine:
        replicas, _, trainer = set_up(engine, on(0, 1))
        first = replicas.params()[0]

        def loss(out, y):
            return F.sum(out, axis=1) + F.sum(mgpu.put(first.data(), y))
        before = values(replicas)
        refuse(lambda: mgpu.train_batch(*batch(4), replicas, loss, trainer),
               RuntimeError,
               "the loss of a device depends on the parameters of its own "
               "replica; received one of device number 1 that reaches those "
               "of number 0. Compute it from the replica's own parameters, "
               "or call replicas(shards), mgpu.backward and Trainer.step "
               "yourself.")
        assert_unchanged(values(replicas), before)


def refuse(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_wrong_batches_and_losses_change_nothing(engine):
    """And the next batch, of one row, is trained as if nothing was."""
    devices = on(0, 1, 2)
    replicas, loss, trainer = set_up(engine, devices)
    before = values(replicas)
    X, y = batch(6)
    foreign, name = foreign_array(engine)

    def step(X=X, y=y, loss=loss):
        return lambda: mgpu.train_batch(X, y, replicas, loss, trainer)
    rows = ("X and y must have equally many rows; received {}. Cut them to "
            "one length.")
    shape = ("the loss must return one value per example, shape (2,); "
             "received {}. Use a loss of mgpu.losses, or wrap one that "
             "averages: mgpu.losses.per_example(loss); on torch also "
             "reduction='none'.")
    # (A zero-dimensional array exists only in MXNet's NumPy mode.)
    legacy = engine.name == "mxnet" and not type(
        mgpu.put(X, mgpu.cpu(0))).__module__.startswith("mxnet.numpy")
    scalar = "(1,)" if legacy else "()"
    for call, error, text in (
            (step(y=y[:5]), ValueError, rows.format("6 and 5")),
            (step(X=X[:1]), ValueError, rows.format("1 and 6")),
            (step(X[:0], y[:0]), ValueError, "a batch needs at least one "
             "row; received an empty one. Leave it out."),
            (step(X=foreign, y=y[:3]), TypeError,
             refusal_of_foreign(engine, name)),
            (step(X=X[:3], y=foreign), TypeError,
             refusal_of_foreign(engine, name)),
            (step(loss=lambda out, y: loss(out, y).sum()), ValueError,
             shape.format(f"shape {scalar}")),
            (step(loss=lambda out, y: loss(out, y).mean()), ValueError,
             shape.format(f"shape {scalar}")),
            (step(loss=lambda out, y: loss(out, y)[:1]), ValueError,
             shape.format("shape (1,)")),
            (step(loss=lambda out, y: out), ValueError,
             shape.format("shape (2, 3)")),
            (step(loss=lambda out, y: 0.5), ValueError,
             shape.format("a float")),
            (step(loss=lambda out, y: None), ValueError,
             shape.format("None")),
            (step(y=y + 2), ValueError, None)):
        if text is None:
            with pytest.raises(error, match="labels must be class numbers 0 "
                               "to 2; received"):
                call()
        else:
            refuse(call, error, text)
        assert flags() == (False, False)
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 0
    one = set_up(engine, on(0))
    for target in ((replicas, loss, trainer), one):
        mgpu.train_batch(*batch(1), *target)
    assert_close(values(replicas), values(one[0]))


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
def test_a_wrong_label_is_named_by_its_row_in_the_batch(engine, devices,
                                                        batch_norm):
    """Not in its shard; both ways through a step."""
    replicas, loss, trainer = set_up(engine, devices, batch_norm=batch_norm)
    X, y = batch(7)
    y[5] = 3
    with pytest.raises(mgpu.losses.LabelError,
                       match="received 3 in row 5. ") as caught:
        mgpu.train_batch(X, y, replicas, loss, trainer)
    assert caught.value.row == 5


def test_a_trainer_of_other_replicas_is_refused(engine):
    a, loss, _ = set_up(engine, on(0))
    b, _, trainer = set_up(engine, on(0, 1))
    with pytest.raises(ValueError, match="a trainer steps the replicas that "
                       "it was made with; received one of .* Make a new "
                       "Trainer after each initialize"):
        mgpu.train_batch(*batch(4), a, loss, trainer)


def test_a_trainer_of_the_framework_is_named_with_its_module(engine):
    """"expected a Trainer; received Trainer" helps nobody."""
    replicas, loss, _ = set_up(engine, on(0))

    class Trainer:
        pass
    with pytest.raises(TypeError, match=r"expected an mgpu.Trainer; received "
                       rf"{__name__}\..*\.Trainer. Make one"):
        mgpu.train_batch(*batch(4), replicas, loss, Trainer())
    with pytest.raises(TypeError, match=rf"received {__name__}\..*\.Trainer"):
        mgpu.train_batch(*batch(4), Trainer(), loss, Trainer())


# -- recurrent layers ---------------------------------------------------------

def recurrent(engine, kind):
    """Two layers of `kind` and a dense one, for 5 numbers at each time."""
    if engine.name == "mxnet":
        from mxnet.gluon import Block as base, nn, rnn
        layers = [getattr(rnn, kind)(6, 2, layout="NTC", input_size=5),
                  nn.Dense(3, in_units=6)]
    else:
        from torch import nn
        base = nn.Module
        layers = [getattr(nn, kind)(5, 6, 2, batch_first=True),
                  nn.Linear(6, 3)]

    class Net(base):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = layers

        def forward(self, x):
            y = self.rnn(x)
            return self.out((y[0] if isinstance(y, tuple) else y)[:, -1])
    return Net()


def plain_steps(engine, net, values, data, labels, steps):
    """Train `net`, from `values`, without mgpu; return its values."""
    if engine.name == "mxnet":
        from mxnet import autograd, gluon
        net.initialize()
        parameters = net._collect_params_with_prefix()
        for name, p in parameters.items():
            p.set_data(mgpu.put(values[name], mgpu.cpu(0)))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        trainer = gluon.Trainer(net.collect_params(), "sgd",
                                {"learning_rate": 0.25, "momentum": 0.5})
        x, y = (mgpu.put(a, mgpu.cpu(0)) for a in (data, labels))
        for _ in range(steps):
            with autograd.record():
                losses = loss(net(x), y)
            losses.backward()
            trainer.step(len(data))
        return {name: p.data().asnumpy() for name, p in parameters.items()}
    import torch
    net.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    optimizer = torch.optim.SGD(net.parameters(), 0.25, momentum=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            net(torch.tensor(data)), torch.tensor(labels)).backward()
        optimizer.step()
    return {n: p.detach().numpy() for n, p in net.named_parameters()}


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_recurrent_layers_train_as_without_mgpu(engine, kind):
    """In float32: MXNet's own are wrong in float64."""
    devices = on(0, 1, 2)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(7, 4, 5)).astype("float32")
    y = rng.integers(0, 3, 7)
    replicas = mgpu.initialize(recurrent(engine, kind), devices,
                               mgpu.initializers.Uniform(0.5), seed=1)
    start = replicas.export_numpy()
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.25,
                                             "momentum": 0.5})
    for _ in range(3):
        mgpu.train_batch(X, y, replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    wanted = plain_steps(engine, recurrent(engine, kind), start, X, y, 3)
    for name, found in replicas.export_numpy().items():
        assert relative_difference(found, wanted[name]) < 1e-5
        assert relative_difference(found, start[name]) > 1e-3
    replicas.check_equal()


# -- the loop -----------------------------------------------------------------

def test_train(engine, devices):
    replicas, loss, trainer = set_up(engine, devices, lr=0.25)
    train_iter, test_iter = batches(8, 7, 1), batches(5, 1)
    history = mgpu.train(replicas, train_iter, test_iter, loss, trainer, 3,
                         progress=False)
    assert history.devices == [str(d) for d in devices]
    assert len(history.loss_per_step) == trainer.num_update == 9
    for epoch in range(3):
        # per example, so that the batch of one row counts as one
        steps = history.loss_per_step[3 * epoch:3 * epoch + 3]
        assert relative_difference(history.train_loss[epoch],
                                   np.dot(steps, [8, 7, 1]) / 16) < 1e-15
        assert history.seconds[epoch] > 0
        assert history.images_per_second[epoch] \
            == 16 / history.seconds[epoch]
    assert history.train_loss[0] > history.train_loss[-1] > 0
    assert history.test_acc[-1] == mgpu.evaluate_accuracy_gpus(
        replicas, test_iter)
    assert len(history.test_acc) == 3
    assert re.fullmatch(
        fr"test acc: {history.test_acc[-1]:.2f}, \d+\.\d sec/epoch on "
        fr"\[{', '.join(map(re.escape, history.devices))}\]",
        history.summary())
    # The losses are those of one device, and of single steps.
    one = set_up(engine, on(0), lr=0.25)
    losses = [mgpu.to_numpy(mgpu.train_batch(*train_iter[i % 3], *one)[0])
              .mean() for i in range(9)]
    assert relative_difference(history.loss_per_step, losses) < 1e-12


def test_train_without_test_data(engine):
    replicas, loss, trainer = set_up(engine, on(0, 1))
    history = mgpu.train(replicas, batches(4), None, loss, trainer,
                         np.int64(2), progress=False)
    assert history.test_acc == [] and len(history.seconds) == 2
    assert history.summary().startswith(
        f"train loss: {history.train_loss[-1]:.3f}, ")
    assert mgpu.History(["cpu(0)"]).summary() \
        == "no finished epoch on [cpu(0)]"


def test_a_network_with_one_output_has_its_own_measure(engine, devices):
    """`test_iter` wants scores of classes: refused before a step, not after
    an epoch, and also where the first outputs are 0."""
    replicas = mgpu.initialize(mlp(engine, units=(6, 1)), devices, "zeros",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    loss = mgpu.losses.SigmoidBCELoss()
    data = [(X, (X[:, :1] > 0) * 1.0) for X, _ in batches(8, 7)]
    before = values(replicas)

    def train(test_iter, **options):
        return mgpu.train(replicas, data, test_iter, loss, trainer, 2,
                          progress=False, **options)

    def measure():
        return mgpu.evaluate_accuracy_gpus(
            [lambda x, run=run: run(x) > 0 for run in replicas], data,
            devices=replicas.devices)
    with pytest.raises(ValueError, match=r"scores \(n, classes\); received "
                       r"an output of shape \(\d, 1\). Pass test_iter=None, "
                       "and a measure of your own, if you like, as "
                       "evaluate="):
        train(data)
    with pytest.raises(ValueError, match="in the place of test_iter; "
                       "received both"):
        train(data, evaluate=measure)
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 0
    history = train(None, evaluate=measure)
    assert len(history.test_acc) == 2 and trainer.num_update == 4
    assert history.test_acc[-1] == measure()


def test_evaluation_on_one_device(engine):
    """`device`: what per-device batch statistics need."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(9, 2, 6, 6)), rng.integers(0, 3, 9)
    replicas = mgpu.initialize(convnet(engine), on(0, 1), "xavier",
                               dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    history = mgpu.train(replicas, [(X, y)], [(X, y)], loss, trainer, 2,
                         device="cpu:1", progress=False)
    assert history.test_acc[-1] == mgpu.evaluate_accuracy_gpu(
        replicas, [(X, y)], mgpu.cpu(1))


def test_progress_bar(engine, capsys):
    replicas, loss, trainer = set_up(engine, on(0))
    mgpu.train(replicas, batches(4, 4), None, loss, trainer, 3,
               progress=False)
    assert capsys.readouterr() == ("", "")
    # With a length, and from an iterable that has none.
    class Endless:
        def __iter__(self):
            return iter(batches(4, 4))
    for train_iter, total in ((batches(4, 4), "/6 "), (Endless(), "batch")):
        mgpu.train(replicas, train_iter, batches(3), loss, trainer, 3)
        drawn = capsys.readouterr()
        assert "train" in drawn.err and total in drawn.err
        assert drawn.out == ""


def test_an_animator_gets_each_epoch(engine):
    replicas, loss, trainer = set_up(engine, on(0))
    points = []

    class Animator:
        def add(self, x, y):
            points.append((x, y))
    for test_iter in (batches(3), None):
        history = mgpu.train(replicas, batches(4), test_iter, loss, trainer,
                             2, progress=False, animator=Animator())
        assert points == [
            (i + 1, [history.train_loss[i],
                     history.test_acc[i] if test_iter else None])
            for i in range(2)]
        points.clear()


@pytest.mark.parametrize("epoch, step, window", [
    (0, 0, 2), (0, 2, 2), (1, 1, 2), (0, 0, 1), (1, 1, 1), (0, 0, 4)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_step(
        engine, epoch, step, window, bad):
    devices = on(0, 1)
    replicas, loss, trainer = set_up(engine, devices)

    class Source:
        epochs = -1

        def __iter__(self):
            self.epochs += 1
            for i, (X, y) in enumerate(batches(8, 2, 5)):
                if (self.epochs, i) == (epoch, step):
                    X[1, 0] = bad
                yield X, y
    with pytest.raises(mgpu.NonFiniteLoss) as caught:
        mgpu.train(replicas, Source(), None, loss, trainer, 4,
                   progress=False, max_inflight=window)
    text = str(caught.value)
    assert re.match(
        fr"the loss must be finite; received (nan|inf) in step "
        fr"{3 * epoch + step + 1} \(epoch {epoch + 1}\) on "
        fr"{re.escape(str(devices))}\. Lower the learning rate", text), text
    assert isinstance(caught.value, FloatingPointError)
    history = caught.value.history
    assert len(history.loss_per_step) == 3 * epoch + step + 1
    assert np.isfinite(history.loss_per_step[:-1]).all()
    assert not np.isfinite(history.loss_per_step[-1])
    assert len(history.train_loss) == epoch
    assert history.summary()
    # It is read when it leaves the window, or at the end of the epoch.
    assert trainer.num_update == 3 * epoch + min(step + window, 3)


def test_what_ends_a_training_early_has_its_history(engine, devices):
    replicas, loss, trainer = set_up(engine, devices)

    class NoPlace(Exception):
        history = property()        # cannot be set
    for kind in (KeyboardInterrupt, ZeroDivisionError, NoPlace):
        class Source:
            epochs = 0

            def __iter__(self):
                self.epochs += 1
                for i, batch in enumerate(batches(8, 2, 5)):
                    if (self.epochs, i) == (3, 2):
                        raise kind      # noqa: B023
                    yield batch
        with pytest.raises(kind) as caught:
            mgpu.train(replicas, Source(), None, loss, trainer, 4,
                       progress=False)
        if kind is NoPlace:
            continue
        history = getattr(caught.value, "history", mgpu.History())
        assert len(history.train_loss) == len(history.seconds) == 2
        assert len(history.loss_per_step) == 7      # 1 is in flight
    with pytest.raises(KeyboardInterrupt) as caught:
        mgpu.train_epochs(
            lambda X, y: mgpu.train_batch(X, y, replicas, loss, trainer),
            batches(8, 2, 5), 2, devices, evaluate=stop_at_once)
    assert len(caught.value.history.train_loss) == 1


def stop_at_once():
    raise KeyboardInterrupt


def test_the_window_changes_no_number(engine, devices):
    """And `max_inflight` 1 waits for the devices after each step."""
    found, waits = [], []
    wait = engine.synchronize
    for window in (1, 2, 4):
        replicas, loss, trainer = set_up(engine, devices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "synchronize",
                          lambda x: (waits.append(window), wait(x)))
            history = mgpu.train(replicas, batches(8, 7, 1, 3, 5), None,
                                 loss, trainer, 2, progress=False,
                                 max_inflight=window)
        found.append((history.loss_per_step, values(replicas)))
    (losses, weights), *others = found
    assert len(losses) == 10
    for other, other_weights in others:
        assert other == losses
        assert_unchanged(other_weights, weights)
    assert waits.count(1) == waits.count(2) + 10 == waits.count(4) + 10


@pytest.mark.parametrize("window", [1, 2, 4])
def test_losses_outside_the_window_are_let_go(engine, window):
    replicas, loss, trainer = set_up(engine, on(0, 1))

    class Losses(list):     # which has weak references
        pass
    alive, counts = weakref.WeakValueDictionary(), []

    def step(X, y):
        counts.append(len(alive))
        found = Losses(mgpu.train_batch(X, y, replicas, loss, trainer))
        alive[len(counts)] = found
        return found
    history = mgpu.train_epochs(step, batches(*[4] * 6), 2, on(0, 1),
                                max_inflight=window)
    # Each step finds those of the steps before it that are in the window.
    assert counts == [min(i, window - 1) for i in range(6)] * 2
    assert not alive and len(history.loss_per_step) == 12


@pytest.mark.parametrize("wrong", [0, -1, 1.5, None, True])
def test_a_wrong_window_is_refused(backend, wrong):
    replicas, loss, trainer = set_up(backend, on(0))
    refuse(lambda: mgpu.train(replicas, batches(2), None, loss, trainer, 1,
                              max_inflight=wrong), ValueError,
           "max_inflight must be an integer of 1 or more; received "
           f"{wrong!r}.")
    assert trainer.num_update == 0


def test_wrong_loops_are_refused(engine):
    replicas, loss, trainer = set_up(engine, on(0))
    for wrong in (0, -1, 1.5, None, True):
        refuse(lambda: mgpu.train(replicas, batches(2), None, loss, trainer,
                                  wrong), ValueError,
               "num_epochs must be an integer of 1 or more; received "
               f"{wrong!r}.")
    for what, data in (
            ("list_iterator", (iter(batches(2)), None)),
            ("generator", ((x for x in batches(2)), None)),
            ("zip", (batches(2), zip([1], [2])))):
        name = "train_iter" if data[1] is None else "test_iter"
        refuse(lambda: mgpu.train(replicas, *data, loss, trainer, 2,
                                  progress=False), ValueError,
               f"{name} is gone through in each epoch; received a {what}, "
               "which gives its batches once, for 2 epochs. Pass a list, or a "
               "data loader.")
    assert trainer.num_update == 0

    class Once:
        left = batches(2)

        def __iter__(self):
            while self.left:
                yield self.left.pop()
    for source, epoch in (([], 1), (Once(), 2)):
        refuse(lambda: mgpu.train(replicas, source, None, loss, trainer, 2,
                                  progress=False), ValueError,
               "train_iter must give a batch or more in each epoch; received "
               f"none in epoch {epoch}. Use an iterable that can be gone "
               "through again, such as a list.")


@pytest.mark.parametrize("name, wrong, words", [
    ("loss", None, "a loss is called with the outputs and the labels"),
    ("train_iter", None, "train_iter must be an iterable of batches"),
    ("test_iter", 3, "test_iter must be an iterable of batches"),
    ("test_iter", [1, 2], "int"), ("test_iter", "ab", "str"),
    ("test_iter", [(1, 2, 3)], "3 things"),
    ("evaluate", 3, "split_f and evaluate are functions"),
    ("split_f", None, "split_f and evaluate are functions"),
    ("animator", True, "animator must be an mgpu.plotting.Animator")])
def test_arguments_of_another_kind_are_named(engine, name, wrong, words):
    replicas, loss, trainer = set_up(engine, on(0))
    with pytest.raises(TypeError, match=words):
        mgpu.train(replicas, **{
            "train_iter": batches(2), "test_iter": None, "loss": loss,
            "trainer": trainer, "num_epochs": 1, "progress": False,
            name: wrong})
    assert trainer.num_update == 0


@pytest.mark.parametrize("split_f, words", [
    (None, "split_f is a function"), (lambda *_: None, "returns two lists"),
    (lambda *_: [1], "returns two lists")])
def test_what_splits_nothing_is_refused(backend, split_f, words):
    replicas, loss, trainer = set_up(backend, on(0, 1))
    X, y = next(iter(batches(1)))
    with pytest.raises(TypeError, match=words):
        mgpu.train_batch(X, y, replicas, loss, trainer, split_f=split_f)
    assert trainer.num_update == 0
    mgpu.train(replicas, [(X, y)] * 3, None, loss, trainer, 1,
               progress=False, accumulate=10 ** 20)
    assert trainer.num_update == 1


@pytest.mark.parametrize("wrong, words", [
    ((1, 2, 3), "3 things"), ([1], "1 things"),
    (np.ones((2, 6)), "a ndarray"),
    (SimpleNamespace(data=[1], label=[2]), "a SimpleNamespace")])
def test_batches_that_are_no_pairs_are_refused(engine, wrong, words):
    replicas, loss, trainer = set_up(engine, on(0, 1))
    for call in (lambda: mgpu.train(replicas, [wrong], None, loss, trainer, 1,
                                    progress=False),
                 lambda: mgpu.evaluate_accuracy_gpus(replicas, [wrong])):
        refuse(call, TypeError, "a data iterator gives batches that are "
               f"pairs, (X, y), or dicts; received {words}. Make pairs of "
               "them: ("
               + ("(b.data[0], b.label[0])" if words.endswith("space")
                  else "(b['x'], b['y'])")
               + " for b in batches), or ((X, X) for X in batches).")


def loaders(engine, X, y, size):
    """The framework's own DataLoader over arrays."""
    if engine.name == "mxnet":
        from mxnet import gluon
        return gluon.data.DataLoader(
            gluon.data.ArrayDataset(X, y), batch_size=size, last_batch="keep")
    import torch
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
        torch.from_numpy(X), torch.from_numpy(y)), batch_size=size)


def test_the_frameworks_own_data_loaders(engine, devices):
    """Give the same training as a list of the same batches."""
    X, y = batch(11)
    X = X.astype("float32")
    plain = [(X[i:i + 4], y[i:i + 4]) for i in range(0, 11, 4)]
    found = []
    for source in (plain, loaders(engine, X, y, 4)):
        replicas = mgpu.initialize(mlp(engine), devices, "xavier")
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.25})
        loss = mgpu.losses.SoftmaxCrossEntropyLoss()
        history = mgpu.train(replicas, source, source, loss, trainer, 2,
                             progress=False)
        found.append((history, values(replicas)))
    (a, first), (b, second) = found
    assert a.loss_per_step == b.loss_per_step and a.test_acc == b.test_acc
    assert_unchanged(first, second)


@pytest.mark.parametrize("closed", [False, True])
def test_a_training_without_standard_error(engine, closed, monkeypatch):
    replicas, loss, trainer = set_up(engine, on(0, 1))
    stream = open(os.devnull, "w") if closed else None
    if closed:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    mgpu.train(replicas, batches(2), None, loss, trainer, 1, progress=True)
    assert trainer.num_update == 1


def test_the_engine_of_the_replicas_is_used(backend):
    """Whichever is chosen when the loop runs."""
    replicas, loss, trainer = set_up(backend, on(0, 1))
    for name in conftest.BACKENDS:
        with mgpu.using_backend(name):
            history = mgpu.train(replicas, batches(4, 1), batches(3), loss,
                                 trainer, 1, progress=False)
            assert len(history.loss_per_step) == 2


# -- what a review found ------------------------------------------------------

def test_weights_that_are_not_finite_stop_the_training(engine):
    """MXNet's ReLU turns a NaN into a number, so the loss may look well."""
    X = np.random.default_rng(0).random((4, 6), dtype="float32")
    X[0] = np.nan
    net = mlp(engine, (6, 5, 3))
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], "xavier")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    batches = [(X, np.zeros(4, "int32"))] * 3
    with pytest.raises(mgpu.NonFiniteLoss, match="must be finite") as caught:
        mgpu.train(replicas, batches, None,
                   mgpu.losses.SoftmaxCrossEntropyLoss(), trainer, 1,
                   progress=False)
    assert caught.value.history.loss_per_step


def test_no_array_of_the_engine_is_refused_alike(engine):
    wrong = np.ones(2, "float32")
    for call in (mgpu.attach_grad, mgpu.grad,
                 lambda x: mgpu.sgd([x], 0.1, 1)):
        with pytest.raises(TypeError, match="expected an array of the "
                           f"{engine.name} backend; received ndarray"):
            call(wrong)


@pytest.mark.parametrize("own, other", [("torch", "mxnet")]
                         if len(conftest.BACKENDS) > 1 else [])
def test_recording_on_the_other_engine_is_an_error(own, other):
    with mgpu.using_backend(own) as engine:
        replicas = mgpu.initialize(mlp(engine), [mgpu.cpu(0)], "uniform")
        x = mgpu.put(np.ones((2, 6), "float32"), mgpu.cpu(0))
    with mgpu.using_backend(other), mgpu.record(), pytest.raises(
            RuntimeError, match=f"received one of '{other}'"):
        replicas[0](x)
