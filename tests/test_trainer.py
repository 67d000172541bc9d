"""`Trainer`: one meaning for any number of devices.

Networks are in float64 and without batch norm unless a test says otherwise,
so that K devices differ from one by rounding only, about 1e-16 a step, and
1e-12 leaves no room for another formula.
"""
import importlib
import json
import pickle
import signal
import threading
from contextlib import nullcontext
from copy import deepcopy
from queue import SimpleQueue

import numpy as np
import pytest

import mgpu
import mgpu.trainer
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, bricks, convnet,
                     foreign_array, mlp, on, relative_difference,
                     using_engine)
from mgpu import files
from mgpu.collectives.strategies import Balanced

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]
#: rows of successive batches: even, uneven, fewer than four devices, one
ROWS = (8, 7, 3, 1, 6)
#: the same in powers of two, which MXNet's float32 ``1 / rows`` holds exactly
DYADIC = (8, 4, 2, 1, 8)
OPTIMIZERS = [
    ("sgd", {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25,
             "clip_gradient": 0.25}),
    ("nag", {"learning_rate": 0.125, "momentum": 0.5}),
    ("adam", {"learning_rate": 0.125, "epsilon": 2.0 ** -10}),
    ("nadam", {"learning_rate": 0.125, "epsilon": 2.0 ** -10}),
    ("rmsprop", {"learning_rate": 2.0 ** -6, "centered": True,
                 "epsilon": 2.0 ** -10}),
    ("ftrl", {"learning_rate": 0.125}),
]


def initialize(net, devices, **options):
    return mgpu.initialize(net, devices, "xavier", seed=1, dtype="float64",
                           **options)


def batch(rows, seed=0, width=6):
    rng = np.random.default_rng([rows, seed])
    return rng.normal(size=(rows, width)), rng.integers(0, 3, rows)


def backward(replicas, X, y):
    """Forward and backward passes on all devices, no step."""
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    Xs, ys = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = [None if out is None else loss(out, label)
                  for out, label in zip(replicas(Xs), ys)]
    mgpu.backward(losses)


def train(replicas, trainer, batches=ROWS, first=0):
    for seed, rows in enumerate(batches, first):
        X, y = batch(rows, seed)
        backward(replicas, X, y)
        trainer.step(rows)


def values(replicas):
    """Name -> one array per device."""
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in replicas.params()}


def gradients(replicas):
    return {p.name: [mgpu.to_numpy(g) for g in p.list_grad()]
            for p in replicas.params() if p.grad_req != "null"}


def assert_replicas_equal(found):
    """All copies keep the same bits."""
    for copies in found.values():
        for copy in copies:
            assert_bit_equal(copy, copies[0])


def adding(engine, devices):
    """Replicas of which all gradients are added up."""
    replicas = initialize(mlp(engine), devices)
    for p in replicas.params():
        p.grad_req = "add"
    return replicas


def assert_close(found, wanted, limit=1e-12):
    """The first device's arrays, tensor by tensor."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        gap = relative_difference(found[name][0], wanted[name][0])
        assert gap < limit, (name, gap)


def assert_unchanged(found, before):
    assert found.keys() == before.keys()
    for name in before:
        for a, b in zip(found[name], before[name]):
            assert_bit_equal(a, b)


# -- K devices are one device -------------------------------------------------

@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("name, options", OPTIMIZERS,
                         ids=[name for name, _ in OPTIMIZERS])
def test_k_devices_are_one_device(backend, k, name, options):
    """Also with uneven shards, and with devices that have no rows."""
    results = []
    for devices in (on(0), on(*range(k))):
        replicas = initialize(mlp(backend), devices)
        start = values(replicas)
        trainer = mgpu.Trainer(replicas, name, options)
        train(replicas, trainer)
        assert trainer.num_update == len(ROWS)
        results.append(values(replicas))
        assert_replicas_equal(results[-1])
    assert_close(results[1], results[0])
    for label in start:     # and all moved
        move = np.abs(results[0][label][0] - start[label][0]).max()
        assert move > 1e-3, label


@pytest.mark.parametrize("allreduce", [
    "naive", "tree", "ring", "sharded", "native"])
def test_every_strategy_trains_as_one_device(backend, devices, allreduce):
    """The order of additions is another one, and nothing else. NCCL, torch's
    "native", refuses CPU devices: tests/test_gpu.py has it."""
    if backend.name == "torch" and allreduce == "native":
        allreduce = Balanced()
    results = []
    for places, how in ((on(0), "auto"), (devices, allreduce)):
        replicas = initialize(mlp(backend), places)
        train(replicas, mgpu.Trainer(replicas, "sgd", {"momentum": 0.5},
                                     allreduce=how))
        results.append(values(replicas))
        assert_replicas_equal(results[-1])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("options", [
    {"optimizer_params": 0.1}, {"lr_mult": 2.0}, {"wd_mult": [1, 2]}])
def test_what_must_be_a_dict_is_named(backend, options):
    (name, wrong), = options.items()
    with pytest.raises(TypeError, match=f"{name} must be a dict with names "
                       f"as keys; received {type(wrong).__name__}"):
        mgpu.Trainer(initialize(mlp(backend), on(0)), "sgd", **options)


def test_an_unknown_strategy_is_refused(backend):
    with pytest.raises(ValueError, match="unknown allreduce; received 'nccl'"):
        mgpu.Trainer(initialize(mlp(backend), on(0)), "sgd",
                     allreduce="nccl")


#: rules that need no norm, or row, of a whole weight
PIECEWISE = [(semantics, name)
             for semantics, rules in mgpu.optimizers.RULES.items()
             for name, rule in rules.items() if not rule.needs_whole]


@pytest.mark.crosses_devices("of work in the host's memory, which the mode "
                             "leaves out")
@pytest.mark.parametrize("semantics, name", PIECEWISE,
                         ids=["-".join(rule) for rule in PIECEWISE])
def test_blocks_of_a_weight_are_the_whole(backend, semantics, name,
                                          monkeypatch):
    """In the host's memory a rule gets a few numbers of a weight at a time,
    in NumPy; by itself it gets whole arrays of the engine."""
    monkeypatch.setattr(mgpu.host_memory, "UPDATE_BLOCK", 64)
    monkeypatch.setattr(mgpu.host_memory, "SHARE", 16)
    monkeypatch.setattr(mgpu.host_memory, "cpu_cores", lambda: 3)
    blocks = mgpu.host_memory.update_blocks
    results, calls = [], []
    monkeypatch.setattr(mgpu.host_memory, "update_blocks", lambda *arguments: (
        calls.append(arguments), blocks(*arguments)))
    for in_blocks in (True, False):
        monkeypatch.setattr(mgpu.optimizers.Optimizer, "elementwise",
                            in_blocks)
        replicas = initialize(mlp(backend), on(0, 1))
        train(replicas, mgpu.Trainer(
            replicas, name, {"momentum": 0.5} if name == "nag" else {},
            semantics=semantics))
        results.append(values(replicas))
        assert len(calls) == 2 * len(ROWS)
    # To rounding: torch's square root is a unit in the last place off now
    # and then, and MXNet's compiled expressions round in another order.
    assert_close(*results)


# -- the real gluon.Trainer ---------------------------------------------------

def gluons(name, options, setup=lambda net: None,
           between=lambda trainer: None):
    """The weights that the real `gluon.Trainer` reaches on one device."""
    with using_engine("mxnet-nd") as backend:
        from mxnet import autograd, gluon
        net = initialize(mlp(backend), on(0)).net
        setup(net)
        trainer = gluon.Trainer(net.collect_params(), name, options)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        for seed, n in enumerate(DYADIC):
            X, y = (mgpu.put(a, mgpu.cpu(0)) for a in batch(n, seed))
            with autograd.record():
                losses = loss(net(X), y)
            losses.backward()
            trainer.step(n)
            between(trainer)
        return {name: [p.data().asnumpy()] for name, p
                in net._collect_params_with_prefix().items()}


GLUONS = [
    ("sgd", {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25,
             "clip_gradient": 0.25}, 1e-12),
    ("nag", {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25}, 1e-12),
    # Its kernel takes the rate with the bias correction in float32.
    ("adam", {"learning_rate": 0.125, "beta1": 0.75, "beta2": 0.9375,
              "epsilon": 2.0 ** -10, "wd": 0.25}, 1e-7),
    ("nadam", {"learning_rate": 0.125, "beta1": 0.75, "beta2": 0.9375,
               "epsilon": 2.0 ** -10, "schedule_decay": 0.5}, 1e-12),
    ("signum", {"learning_rate": 0.125, "momentum": 0.5, "wd_lh": 0.25},
     1e-12),
]


@pytest.mark.parametrize("name, options, limit", GLUONS if MXNET else [],
                         ids=[name for name, *_ in GLUONS if MXNET])
def test_the_real_gluon_trainer_on_one_device(
        engine, devices, name, options, limit):
    """Dyadic options, which MXNet's float32 scalars hold exactly."""
    replicas = initialize(mlp(engine), devices)
    train(replicas, mgpu.Trainer(replicas, name, options), DYADIC)
    assert_close(values(replicas), gluons(name, options), limit)


@pytest.mark.parametrize("engine_name", MXNET)
def test_multipliers_of_gluons_parameters(engine_name, devices):
    """``p.lr_mult`` and ``p.wd_mult`` of the user's network count."""
    def setup(net):
        net.collect_params(".*bias").setattr("lr_mult", 2.0)
        net.collect_params(".*weight").setattr("wd_mult", 0.5)
    options = {"learning_rate": 0.125, "wd": 0.25}
    with using_engine(engine_name) as backend:
        net = mlp(backend)
        replicas = initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", options)
        setup(net)      # as late as Gluon allows it
        train(replicas, trainer, DYADIC)
        found = values(replicas)
    assert_close(found, gluons("sgd", options, setup=setup))


def test_multipliers_by_name(engine, devices):
    """lr_mult and wd_mult of a plain SGD step, by its formula."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(
        replicas, "sgd", {"learning_rate": 0.125, "wd": 0.25},
        lr_mult={"0.weight": 0.5, "2.bias": 0.0}, wd_mult={"2.weight": 2.0})
    start = values(replicas)
    train(replicas, trainer, [6])
    moved, summed = values(replicas), gradients(replicas)
    for name, lr, wd in (("0.weight", 0.5, 1), ("0.bias", 1, 1),
                         ("2.weight", 1, 2), ("2.bias", 0, 1)):
        wanted = start[name][0] - 0.125 * lr * (
            summed[name][0] / 6 + 0.25 * wd * start[name][0])
        assert relative_difference(moved[name][0], wanted) < 1e-15


@pytest.mark.parametrize("size", [
    6, 6.0, 2.5, 0.25, np.float32(7.3), np.float64(3), np.int64(3),
    np.array(7.0), np.array(3)], ids=repr)
def test_a_step_divides_by_any_number_above_0(engine, devices, size):
    """The tokens of a batch, the sum of its weights, as masks give them."""
    for how in ("step", "update", "native"):
        replicas = initialize(mlp(engine), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        start, divisor = values(replicas), float(size)
        backward(replicas, *batch(6))
        if how == "update":
            trainer.allreduce_grads()
            norm = trainer.clip_global_norm(1e9, size)
            summed = gradients(replicas)
            assert relative_difference(norm, np.sqrt(sum(
                (g[0] ** 2).sum() for g in summed.values())) / divisor) < 1e-14
            trainer.update(size)
        else:       # `x.sum()` of torch, or of mx.np, has the shape ()
            scalar = engine.put(np.array([divisor]), replicas.devices[0]).sum()
            trainer.step(size if how == "step" or scalar.shape else scalar)
        summed = gradients(replicas)
        for name, (found, *_) in values(replicas).items():
            wanted = start[name][0] - 0.125 * summed[name][0] / divisor
            assert relative_difference(found, wanted) < 1e-14


def test_multipliers_by_torchs_names_of_norms(engine):
    """Their weight and bias are gamma and beta here."""
    for given, own in (("weight", "gamma"), ("bias", "beta")):
        replicas = initialize(convnet(engine), on(0, 1))
        trainer = mgpu.Trainer(replicas, "sgd", lr_mult={
            f"1.{given}": 0.5}, wd_mult={f"1.{own}": 0.25, "0.bias": 2.0})
        assert trainer.lr_mult == {f"1.{own}": 0.5}
        assert trainer.wd_mult == {f"1.{own}": 0.25, "0.bias": 2.0}
        with pytest.raises(ValueError, match="lr_mult names parameters of the "
                           f"network; received .'1.{given}'.. It has"):
            mgpu.Trainer(replicas, "sgd", lr_mult={f"1.{own}": 0.5,
                                                   f"1.{given}": 0.5})


@pytest.mark.parametrize("engine_name", MXNET)
def test_the_schedule_of_the_real_gluon_trainer(engine_name, devices):
    with using_engine(engine_name) as backend:
        import mxnet as mx
        replicas = initialize(mlp(backend), devices)
        trainer = mgpu.Trainer(
            replicas, "sgd", {"learning_rate": 0.5, "momentum": 0.5,
                              "lr_scheduler": mgpu.lr_scheduler
                              .FactorScheduler(step=2, factor=0.25)})
        train(replicas, trainer, DYADIC)
        found = values(replicas)
    rates = []
    assert_close(found, gluons(
        "sgd", {"learning_rate": 0.5, "momentum": 0.5, "lr_scheduler":
                mx.lr_scheduler.FactorScheduler(step=2, factor=0.25)},
        between=lambda trainer: rates.append(trainer.learning_rate)))
    assert trainer.learning_rate == rates[-1] == 0.5 / 16


# -- learning rate ------------------------------------------------------------

@pytest.mark.parametrize("engine_name", MXNET)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_gluon_asks_a_schedule_for(engine_name, frozen, devices):
    """The largest number of updates that any parameter has had: two branches
    that are trained in turns."""
    def run(network, call, step, asked):
        network.body.collect_params().setattr("grad_req", "null")
        for sign in (-1, -1, 1, -1, 1):
            if frozen:
                for branch, own in ((network.left, -1), (network.right, 1)):
                    branch.collect_params().setattr(
                        "grad_req", "write" if sign == own else "null")
            X, y = sides(*[sign] * 4)
            call(X, y)
            step(4, ignore_stale_grad=not frozen)
        return asked
    with using_engine(engine_name) as engine:
        from mxnet import autograd, gluon
        net, asked = gated(engine), []
        net.initialize()
        net.cast("float64")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {
            "lr_scheduler": lambda n: asked.append(n) or 2.0 ** -n})
        loss = gluon.loss.SoftmaxCrossEntropyLoss()

        def plain(X, y):
            with autograd.record():
                losses = loss(net(mgpu.put(X, mgpu.cpu(0))),
                              mgpu.put(y, mgpu.cpu(0)))
            losses.backward()
        want = run(net, plain, trainer.step, asked)
        for semantics, numbers in (("gluon", list(dict.fromkeys(want))),
                                   ("torch", [1, 2, 3, 4, 5])):
            asked = []
            replicas = initialize(gated(engine), devices)
            options = dict(lr_scheduler=lambda n: asked.append(n) or 2.0 ** -n,
                           semantics=semantics)
            ours = mgpu.Trainer(replicas, "sgd", **options)
            run(replicas.net, lambda X, y: backward(replicas, X, y),
                ours.step, asked)
            assert list(dict.fromkeys(asked)) == numbers


@pytest.mark.parametrize("name, use", [
    ("lr", "learning_rate and set_learning_rate"),
    ("wd", "optimizer.wd, or wd_mult"),
    ("weight_decay", "optimizer.wd, or wd_mult"),
    ("_scale", "rescale_grad in optimizer_params, the batch_size of step or "
     "update, or loss_scale"),
    ("param_groups", "set_learning_rate, lr_mult and wd_mult")])
def test_a_frameworks_attribute_is_not_set_for_nothing(engine, name, use):
    """Gluon's and torch's names: they would do nothing."""
    trainer = mgpu.Trainer(mgpu.initialize(mlp(engine), on(0), "xavier"),
                           "sgd")
    for call in (lambda: setattr(trainer, name, 0.5),
                 lambda: getattr(trainer, name)):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. "
                           f"Use {use}"):
            call()
    trainer.note = 0.5                              # of the user's own

    class Own(mgpu.Trainer):
        lr = 0.25
    own = Own(trainer.replicas, "sgd")
    own.lr = 0.5
    assert own.lr == 0.5


def test_the_learning_rate(engine):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5})
    assert trainer.learning_rate == 0.5
    before = values(replicas)
    trainer.set_learning_rate(0)
    assert trainer.learning_rate == 0
    train(replicas, trainer, [4])
    assert_unchanged(values(replicas), before)
    trainer.set_learning_rate(np.float64(0.25))
    train(replicas, trainer, [4])
    wanted = before["2.bias"][0] - 0.25 / 4 * gradients(replicas)["2.bias"][0]
    assert relative_difference(values(replicas)["2.bias"][0], wanted) < 1e-15
    for wrong, error, text in (
            (-0.5, ValueError, "received -0.5"),
            (float("nan"), ValueError, "received nan"),
            (float("inf"), ValueError, "received inf"),
            ("0.1", TypeError, "received '0.1' of type str"),
            (True, TypeError, "received True of type bool")):
        with pytest.raises(error) as caught:
            trainer.set_learning_rate(wrong)
        assert str(caught.value) == ("the learning rate must be a finite "
                                     f"number, 0 or more; {text}.")
    assert trainer.learning_rate == 0.25


def test_a_schedule(engine):
    """It is asked for the update that comes, from 1; the property tells the
    rate of the last update, and of the first one before it."""
    replicas = initialize(mlp(engine), on(0, 1))
    asked = []

    def schedule(number):
        asked.append(number)
        return 2.0 ** -number
    trainer = mgpu.Trainer(replicas, "sgd", lr_scheduler=schedule)
    assert trainer.learning_rate == 0.5
    moves = []
    for _ in range(3):
        before = values(replicas)["2.bias"][0]
        asked.clear()
        train(replicas, trainer, [4])
        assert asked == [len(moves) + 1]
        moves.append((before - values(replicas)["2.bias"][0])
                     / gradients(replicas)["2.bias"][0] * 4)
    for number, move in enumerate(moves, 1):
        # a difference of weights: rounding of 1e-16 over a move of 1e-2
        assert relative_difference(move, np.full(3, 2.0 ** -number)) < 1e-12
    assert trainer.learning_rate == 0.125
    with pytest.raises(ValueError, match="the learning rate follows the "
                       "trainer's lr_scheduler; received 0.5. Change the "
                       "schedule"):
        trainer.set_learning_rate(0.5)


class Halving:
    """As MXNet's own: it only goes forward."""

    def __init__(self, step=2, inner=None, log=None):
        self.step, self.base_lr, self.inner = step, 0.5, inner
        self.count, self.log = 0, [] if log is None else log

    def __call__(self, number):
        while number > self.count + self.step:
            self.count += self.step
            self.base_lr *= 0.5
        self.log.append(number)
        self.last = np.float32(self.base_lr)
        return self.base_lr * (self.inner(number) if self.inner else 1)

    def rate(self, number):
        return self(number)


def counting():
    """By calls, in an attribute of a function."""
    def schedule(number):
        schedule.calls += 1
        return 0.5 ** schedule.calls
    schedule.calls = 0
    return schedule


STATEFUL = {
    "halving": Halving, "inside": lambda: Halving(3, Halving()),
    "method": lambda: Halving().rate, "function": counting,
    "pure": lambda: lambda number: 0.5 ** number,
    "own": lambda: mgpu.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5),
    **({"gluon": lambda: importlib.import_module(
            "mxnet.lr_scheduler").FactorScheduler(2, 0.5, base_lr=0.5),
        "gluon-multi": lambda: importlib.import_module(
            "mxnet.lr_scheduler").MultiFactorScheduler(
                [2, 5], 0.5, base_lr=0.5)} if "mxnet" in BACKENDS else {})}


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("how", ["file", "checkpoint", "states"])
def test_a_schedule_goes_back_with_the_states(engine, devices, kind, how,
                                              tmp_path):
    """Also one that changes as it is called; and a look changes nothing."""
    def start():
        replicas = initialize(mlp(engine), devices)
        return replicas, mgpu.Trainer(replicas, "sgd",
                                      lr_scheduler=STATEFUL[kind]())

    def save(replicas, trainer):
        if how == "states":
            return trainer.export_states()
        if how == "checkpoint":
            mgpu.save_checkpoint(tmp_path / "x.npz", replicas, trainer)
        else:
            trainer.save_states(tmp_path / "x.npz")
        return None

    def load(replicas, trainer, saved):
        if how == "states":
            trainer.import_states(saved)
        elif how == "checkpoint":
            mgpu.load_checkpoint(tmp_path / "x.npz", replicas, trainer)
        else:
            trainer.load_states(tmp_path / "x.npz")

    def rates(replicas, trainer, steps, look=False):
        found = []
        for _ in range(steps):
            before = values(replicas)["2.bias"][0]
            train(replicas, trainer, [4])
            found.append(np.mean((before - values(replicas)["2.bias"][0])
                                 / gradients(replicas)["2.bias"][0]) * 4)
            if look:
                assert trainer.rate(100) >= 0
        return found
    replicas, trainer = start()
    schedule = STATEFUL[kind]()
    wanted = [schedule(number) for number in range(1, 8)]
    assert relative_difference(rates(replicas, trainer, 2, look=True),
                               wanted[:2]) < 1e-10
    saved = save(replicas, trainer)
    assert relative_difference(rates(replicas, trainer, 5, look=True),
                               wanted[2:]) < 1e-10
    load(replicas, trainer, saved)
    assert relative_difference(rates(replicas, trainer, 5), wanted[2:]) \
        < 1e-10
    others = start()        # of a process that goes on
    load(*others, saved)
    assert relative_difference(rates(*others, 5), wanted[2:]) < 1e-10


def test_options_of_a_schedule_stay_with_the_program(engine):
    """What its calls change goes back only into the schedule that it is of;
    a log that the user has too stays the same list."""
    log = []

    def start(schedule):
        replicas = initialize(mlp(engine), on(0, 1))
        return replicas, mgpu.Trainer(replicas, "sgd", lr_scheduler=schedule)
    replicas, trainer = start(Halving(log=log))
    train(replicas, trainer, [4] * 3)
    saved = trainer.export_states()
    for other, rate in ((Halving(1), 0.125), (Halving(5), 0.5),
                        (counting(), 0.5)):
        _, second = start(other)
        second.import_states(saved)
        assert second.rate(3) == rate
    trainer.lr_scheduler.step = 1       # the user's, no call's
    train(replicas, trainer, [4])
    trainer.import_states(saved)
    assert trainer.lr_scheduler.step == 1
    assert trainer.lr_scheduler.log is log == [1, 2, 3]
    trainer.import_states(saved._replace(schedule=None))    # older files
    assert log == [1, 2, 3]


def test_a_refused_update_moves_no_schedule(engine):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", lr_scheduler=counting())
    trainer.lr_mult["2.bias"] = float("nan")
    with pytest.raises(ValueError, match="lr_mult"):
        train(replicas, trainer, [4])
    assert trainer.lr_scheduler.calls == 0


def test_who_says_the_base_rate(engine):
    """As in Gluon: a rate that is given, else the schedule's own."""
    replicas = initialize(mlp(engine), on(0))
    schedule = mgpu.lr_scheduler.FactorScheduler(step=10, base_lr=0.25)
    assert mgpu.Trainer(replicas, "sgd", lr_scheduler=schedule
                        ).learning_rate == 0.25
    assert mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5},
                        lr_scheduler=schedule).learning_rate == 0.5
    assert schedule.base_lr == 0.5


# -- stale gradients ----------------------------------------------------------

def gated(engine):
    """A layer `body`, then the layer `left` or `right`: which one, the sign
    of the first value says."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.body = dense(6, 3)
            self.left, self.right = dense(3, 3), dense(3, 3)

        def forward(self, x):
            y = self.body(x)
            return self.left(y) if mgpu.to_numpy(x)[0, 0] < 0 \
                else self.right(y)
    return Net()


def sides(*signs):
    """One row per device that takes the left (-1) or the right (1) layer."""
    X, y = batch(len(signs))
    X[:, 0] = signs
    return X, y


STALE = ("parameter {!r} has no new gradient{} since the last step: no "
         "backward pass reached it. Run the forward pass inside record() and "
         "call backward on every device's loss; freeze the parameter "
         "(grad_req='null', requires_grad=False); or pass "
         "ignore_stale_grad=True to skip it.")


OTHERS = STALE.replace("no backward pass reached it", "the last backward "
                       "pass did not reach it").replace("; freeze", (
                           "; add up losses, or use grad_req='add', where "
                           "each had a backward pass of its own; freeze"))


@pytest.mark.parametrize("signs, name", [
    ([-1, -1], "right.weight"), ([1, 1], "left.weight"),
    ([-1], "right.weight")], ids=str)
def test_a_stale_gradient_is_an_error_that_names_it(engine, signs, name):
    replicas = initialize(gated(engine), on(*range(len(signs))))
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125,
                                             "momentum": 0.5})
    backward(replicas, *sides(*signs))
    before, held = values(replicas), gradients(replicas)
    for call in (lambda: trainer.step(2), trainer.allreduce_grads):
        with pytest.raises(mgpu.StaleGradientError) as caught:
            call()
        assert str(caught.value) == OTHERS.format(name, "")
    assert isinstance(caught.value, RuntimeError)
    assert_unchanged(values(replicas), before)
    assert_unchanged(gradients(replicas), held)
    assert trainer.num_update == 0
    trainer.step(2, ignore_stale_grad=True)     # the same gradients, later


@pytest.mark.parametrize("passes", ["none", "forward", "predicted", "first",
                                    "one by one"])
def test_a_step_without_a_backward_pass(engine, devices, passes):
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    X, y = batch(8)
    shards = mgpu.split_and_load(X, devices, even_split=False)
    stale = ""
    if passes == "forward":
        with mgpu.record():
            replicas(shards)
    elif passes == "predicted":
        replicas(shards)
    elif len(devices) == 1:
        backward(replicas, X, y)
        trainer.step(8)         # the second step has no new gradients
    elif passes != "none":      # and no backward pass for the others
        with mgpu.record():
            outputs = replicas(shards) if passes == "first" else [
                replica(shard) for replica, shard in zip(replicas, shards)]
        mgpu.backward(outputs[:1])
        stale = f" on {devices[1]}"
    before = values(replicas)
    with pytest.raises(mgpu.StaleGradientError) as caught:
        trainer.step(8)
    text = STALE if not stale else STALE.replace(
        "freeze", "in a forward pass of Gluon's read p.data(x.context), not "
        "p.data(); freeze")
    assert str(caught.value) == text.format("0.weight", stale)
    assert_unchanged(values(replicas), before)


def test_ignored_stale_gradients_are_skipped_on_every_device(engine):
    """A layer that no device's rows reached does not move, and the step is
    not counted for it."""
    replicas = initialize(gated(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "adam", {"learning_rate": 0.125})
    start = values(replicas)
    backward(replicas, *sides(1, 1))
    trainer.step(2, ignore_stale_grad=True)
    found = values(replicas)
    assert_replicas_equal(found)
    for name in found:
        same = (found[name][0] == start[name][0]).all()
        assert same == name.startswith("left"), name
    # The first real step is Adam's t = 1, a step of one rate for each element
    # with a gradient.
    mgpu.train_batch(*sides(-1, -1), replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), trainer,
                     ignore_stale_grad=True)
    move = values(replicas)["left.bias"][0] - start["left.bias"][0]
    # epsilon 1e-8 next to gradients of 1e-2
    assert relative_difference(np.abs(move), np.full(3, 0.125)) < 1e-5
    assert trainer.num_update == 2


def test_a_skipped_gradient_is_zero_until_the_user_writes_it(engine, devices):
    """Clipping by hand, and surgery on gradients, in a step by hand: nothing
    of an earlier batch counts, and what is written is applied."""
    replicas = initialize(gated(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    for side in (-1, 1):
        backward(replicas, *sides(*[side] * 4))
        trainer.allreduce_grads(ignore_stale_grad=True)
        if side == -1:
            trainer.update(4)
    skipped = {p.name: p for p in replicas.params()
               if p.name.startswith("left")}
    for p in skipped.values():
        for g in p.list_grad():
            assert not mgpu.to_numpy(g).any()
    before, weight = values(replicas), skipped["left.weight"]
    with mgpu.no_grad():
        weight.list_grad()[0][:] += 2
    assert [p.name for p in trainer.summed() if p.name in skipped] == [
        "left.weight"]
    trainer.update(4)
    after = values(replicas)
    assert_replicas_equal(after)
    for name in skipped:
        move = 0.125 * 2 / 4 * (name == "left.weight")
        assert np.abs(before[name][0] - after[name][0] - move).max() < 1e-12


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("stepped", ["by hand", "train_batch"])
def test_an_edit_that_leaves_zeros_is_none(engine, devices, stepped,
                                           request_):
    """Clipping multiplies all gradients of the network, also those that the
    batch did not reach: these stay skipped, and what it did reach is scaled.
    What is written there counts, on any number of devices."""
    def scale():
        for p in replicas.params():
            g = p.data().grad
            if g is not None:
                with mgpu.no_grad():
                    g *= 0.5

    class Clipping(mgpu.Trainer):
        def update(self, batch_size):
            scale()
            super().update(batch_size)
    options = {"learning_rate": 0.125, "momentum": 0.5, "wd": 0.25}
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []
    for made, rescale in ((Clipping, 1), (mgpu.Trainer, 2)):
        replicas = initialize(gated(engine), devices)
        for p in replicas.params():
            p.grad_req = request_
        trainer = made(replicas, "sgd", options)
        for side in (-1, 1):
            before = values(replicas)
            X, y = sides(*[side] * 4)
            if made is Clipping and stepped == "train_batch":
                mgpu.train_batch(X, y, replicas, loss, trainer,
                                 ignore_stale_grad=True)
            else:
                backward(replicas, X, y)
                trainer.allreduce_grads(ignore_stale_grad=True)
                trainer.update(4 * rescale)
            replicas.zero_grad()
        found.append(values(replicas))
        for name in ("left.weight", "left.bias"):
            assert_bit_equal(found[-1][name][0], before[name][0])
        assert_replicas_equal(found[-1])
    assert_close(*found)
    backward(replicas, X, y)
    trainer.allreduce_grads(ignore_stale_grad=True)
    before = values(replicas)
    with mgpu.no_grad():
        replicas.params()[0].list_grad()
        {p.name: p for p in replicas.params()}["left.bias"].list_grad()[0][
            :] += 2
    trainer.update(4)
    after = values(replicas)
    assert_replicas_equal(after)
    assert not np.array_equal(after["left.bias"][0], before["left.bias"][0])
    assert_bit_equal(after["left.weight"][0], before["left.weight"][0])


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs torch")
def test_an_own_optimiser_skips_what_was_skipped(devices):
    """`torch.optim` on summed gradients, clipped by torch, leaves a parameter
    alone that had no gradient, as in plain PyTorch."""
    import torch
    found = []
    for K in (0, len(devices)):
        with using_engine("torch") as engine:
            replicas = initialize(gated(engine), devices if K else on(0))
            net = replicas.net
            if not K:   # plain from here on
                net = deepcopy(net)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 1.0})
            own = torch.optim.SGD(net.parameters(), 0.125, momentum=0.5,
                                  weight_decay=0.25)
            for side in (-1, 1, 1, -1):
                X, y = sides(*[side] * 4)
                own.zero_grad()
                if K:
                    backward(replicas, X, y)
                    trainer.allreduce_grads(ignore_stale_grad=True)
                else:
                    torch.nn.functional.cross_entropy(
                        net(torch.from_numpy(X)), torch.from_numpy(y),
                        reduction="sum").backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                other = net.right if side == -1 else net.left
                assert other.weight.grad is None
                own.step()
            found.append({name: [p.detach().numpy().copy()]
                          for name, p in net.named_parameters()})
    assert_close(found[1], found[0])


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_layer_that_only_some_devices_rows_reach(engine, k):
    """A mixture of experts: the step depends on the batch, not on how it was
    cut. (`gated` looks at the first row: here a device has one row, or it
    has all of them, each gone through by itself.)"""
    X, y = sides(*[-1, 1, 1, -1][:k])
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []
    for devices in (on(0), on(*range(k))):
        replicas = initialize(gated(engine), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125,
                                                 "momentum": 0.5})
        for _ in range(3):
            rows = [(mgpu.put(X[i:i + 1], d), mgpu.put(y[i:i + 1], d), r)
                    for i in range(k) for r, d in [(
                        replicas[i % len(devices)],
                        devices[i % len(devices)])]]
            with mgpu.record():
                losses = [loss(replica(row), label).sum()
                          for row, label, replica in rows]
                if len(devices) == 1:
                    losses = [sum(losses[1:], losses[0])]
            mgpu.backward(losses)
            trainer.step(k)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
    assert_close(found[1], found[0])


# -- one batch ----------------------------------------------------------------

def native_backward(loss):
    (loss.sum() if hasattr(loss, "grad_fn") else loss).backward()


@pytest.mark.parametrize("passes", ["together", "one by one", "native",
                                    "each replica", "device by device"])
def test_a_step_applies_one_batch(engine, devices, passes):
    """A batch that was abandoned after its backward pass is not applied with
    the next one, though that leaves devices idle; cleared or not."""
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []
    backward_of = native_backward if passes == "native" else mgpu.backward

    def go(replicas, X, y):
        Xs, ys = mgpu.split_batch(X, y, replicas.devices)
        with mgpu.record():
            outputs = replicas(Xs) if passes != "each replica" else [
                replica(x) if len(x) else None
                for replica, x in zip(replicas, Xs)]
            losses = [loss(out, label) for out, label
                      in zip(outputs, ys) if out is not None]
        if passes in ("together", "each replica"):
            losses = [losses]       # in one call
        for one in losses:
            backward_of(one)

    def go_by_device(replicas, X, y):
        for replica, x, label in zip(
                replicas, *mgpu.split_batch(X, y, replicas.devices)):
            if len(x):
                with mgpu.record():
                    one = loss(replica(x), label)
                backward_of(one)
    if passes == "device by device":
        go = go_by_device
    for abandoned in ("", "as it is", "cleared"):
        replicas = initialize(mlp(engine), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        if abandoned:
            go(replicas, *batch(8, 7))
        if abandoned == "cleared":
            replicas.zero_grad()
        go(replicas, *batch(1))
        if passes == "together":    # a look at the outputs changes nothing
            replicas(mgpu.split_batch(*batch(8), devices)[0])
            with mgpu.record():
                replicas(mgpu.split_batch(*batch(1), devices)[0])
        trainer.step(1)
        found.append(values(replicas))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def attacked(run, x, labels, times):
    """`x` after some backward passes through the network `run`."""
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    for _ in range(times):
        x = mgpu.put(mgpu.to_numpy(x), x)
        mgpu.attach_grad(x)
        with mgpu.record():
            one = loss(run(x), labels)
        mgpu.backward([one])
        x = mgpu.put(mgpu.to_numpy(x) + np.sign(mgpu.to_numpy(mgpu.grad(x))),
                     x)
    return x


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("order", ["device by device", "all, then all"])
def test_of_several_passes_the_last_of_each_device_counts(
        engine, devices, order, native):
    """An attack on the rows and then the pass that trains, as on one device:
    a second pass of one device does not void what others hold."""
    if native and engine.name == "torch":
        pytest.skip("the network itself is on the first device")
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []
    for places in (on(0), devices):
        replicas = initialize(mlp(engine), places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for rows in ROWS:
            Xs, ys = mgpu.split_batch(*batch(rows), places)
            shards = [(replicas.net if native else replica, x, labels)
                      for replica, x, labels in zip(replicas, Xs, ys)
                      if len(x)]
            for together in ([[one] for one in shards]
                             if order == "device by device" else [shards]):
                changed = [attacked(*one, 2) for one in together]
                with mgpu.record():
                    losses = [loss(run(x), labels) for (run, _, labels), x
                              in zip(together, changed)]
                for one in losses:
                    mgpu.backward([one])
            trainer.step(rows)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
    assert_close(found[1], found[0])


def test_passes_that_do_not_tell_their_batch_are_refused(engine):
    """Before anything changes; what the message says helps."""
    devices, loss = on(0, 1), mgpu.losses.SoftmaxCrossEntropyLoss()
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    Xs, ys = mgpu.split_batch(*batch(8), devices)

    def losses():
        with mgpu.record():
            return [loss(replica(x), labels)
                    for replica, x, labels in zip(replicas, Xs, ys)]

    def passes():
        for one in losses():
            mgpu.backward([one])
        mgpu.backward(losses()[1:])
    passes()
    before = values(replicas), gradients(replicas)
    for call in (trainer.allreduce_grads, lambda: trainer.step(8)):
        with pytest.raises(RuntimeError, match=(
                r"in the latest batch: 1 on cpu\(0\), 2 on cpu\(1\)\. Give "
                r"the losses of all.*mgpu.backward\(losses\).*zero_grad")):
            call()
    assert_unchanged(values(replicas), before[0])
    assert_unchanged(gradients(replicas), before[1])
    mgpu.backward(losses())
    trainer.step(8)
    passes()
    replicas.zero_grad()        # the batch is given up
    for one in losses():
        mgpu.backward([one])
    trainer.step(8)
    assert_replicas_equal(values(replicas))


@pytest.mark.parametrize("edited", [False, True])
def test_gradients_of_the_network_itself(engine, devices, edited):
    """Gluon's own loop, ``net(x)`` for each shard (torch: of the first
    device): what is written to the first device's weight alone is refused
    before anything changes, as no replica was run that would copy it."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    reached = 1 if engine.name == "torch" else len(devices)
    for rows in ROWS:
        X, y = mgpu.split_batch(*batch(rows), devices)
        if edited:
            weight = replicas.params()[0].data()
            getattr(weight, "data", weight)[:] = weight * 0.5
        before = values(replicas)
        with mgpu.record():
            losses = [loss(replicas.net(x), labels)
                      for x, labels in zip(X[:reached], y) if len(x)]
        mgpu.backward(losses)
        if edited and len(devices) > 1:
            with pytest.raises(mgpu.ReplicaMismatchError, match=(
                    r"'0.weight' on cpu\(0\) and on cpu\(1\) does not.*"
                    "write with Parameter.set_data")):
                trainer.step(rows)
            assert_unchanged(values(replicas), before)
            return
        trainer.step(rows)
        assert_replicas_equal(values(replicas))


def test_an_error_in_a_loss_leaves_no_gradients(engine, devices):
    """Some devices have gone through their backward pass, others have not."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    plain = mgpu.losses.SoftmaxCrossEntropyLoss()
    X, y = batch(8)
    X[-1] = 1e6

    def loss(output, label):
        if np.abs(mgpu.to_numpy(output)).max() > 1e3:
            raise ZeroDivisionError("the last one")
        return plain(output, label)
    with pytest.raises(ZeroDivisionError):
        mgpu.train_batch(X, y, replicas, loss, trainer)
    with pytest.raises(mgpu.StaleGradientError):
        trainer.step(8)


def test_after_a_refused_step_gradients_are_the_users(engine, devices):
    """`train_batch` does not look for what nobody can write."""
    replicas = initialize(gated(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    with pytest.raises(mgpu.StaleGradientError):
        mgpu.train_batch(*sides(*[1] * 8), replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    reached = [p for p in replicas.params()
               if mgpu.to_numpy(p.list_grad()[0]).any()]
    gradient = reached[0].list_grad()[0]
    if mgpu.get_backend().name == "torch":
        gradient.data.mul_(0.5)     # no version counts it
    else:
        gradient *= 0.5
    with nullcontext() if len(devices) == 1 else pytest.raises(
            RuntimeError, match="on some devices"):
        trainer.step(8, ignore_stale_grad=True)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("edit", ["scale", "row"])
def test_a_gradient_that_is_changed_between_two_passes_of_a_step(
        engine, devices, edit, everywhere):
    """``grad_req="add"``: the second pass adds to the change."""
    found = []
    for places in (on(0), devices):
        replicas = initialize(mlp(engine), places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for p in replicas.params():
            p.grad_req = "add"
        before = values(replicas)
        for seed in range(2):
            backward(replicas, *batch(8, seed))
            changed = replicas.params()[0].list_grad()
            for g in changed if everywhere else changed[:1]:
                if seed == 0 and edit == "row":
                    g[0] = 0
                elif seed == 0:
                    g *= 0.5
        if len(places) > 1 and not everywhere:
            with pytest.raises(RuntimeError, match="on some devices"):
                trainer.step(16)
            assert_unchanged(values(replicas), before)
            return
        trainer.step(16)
        found.append(values(replicas))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("loop", ["replicas", "native",
                                  "with a forward pass for a log"])
def test_sums_that_grow_are_summed_once(engine, devices, loop):
    """``grad_req="add"`` without `zero_grad`: the sum goes on growing, by the
    next batch's gradients, on any number of devices."""
    if loop == "native" and engine.name == "torch":
        pytest.skip("the network itself is on the first device")
    found = []
    for places in (on(0), devices):
        replicas = adding(engine, places)
        # of each device's own gradients
        trainer = mgpu.Trainer(replicas, "nadam", {
            "learning_rate": 0.125, "epsilon": 2.0 ** -10})
        for rows in ROWS:
            one = batch(rows)
            (train_natively if loop == "native" else backward)(replicas, *one)
            trainer.allreduce_grads()
            if loop.startswith("with"):
                with mgpu.record():
                    replicas(mgpu.split_batch(*one, places)[0])
            trainer.update(rows)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
    assert_close(found[1], found[0])


def test_a_sum_that_the_user_changes_goes_on(engine, devices):
    """``grad_req="add"``: a change between sum and update is of that step,
    and of all devices."""
    found = []
    for places in (on(0), devices):
        replicas = adding(engine, places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for rows in ROWS:
            backward(replicas, *batch(rows))
            trainer.allreduce_grads()
            for p in replicas.params():
                p.list_grad()[0][:] = p.list_grad()[0] * 0.5
            trainer.update(rows)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
    assert_close(found[1], found[0])


def test_zeroed_gradients_are_no_change_of_the_users(engine, devices):
    """Devices without rows hold the zeros that `zero_grad` wrote."""
    found = []
    for places in (on(0), devices):
        replicas = adding(engine, places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        backward(replicas, *batch(8))
        replicas.zero_grad()
        backward(replicas, *batch(1))
        trainer.step(1)
        found.append(values(replicas))
    assert_close(found[1], found[0])


# -- gradients that the user changes ------------------------------------------

def clip_natively(replicas, max_norm):
    """Clip the gradients of the user's network, as its framework does it."""
    gradients = [p.list_grad()[0] for p in replicas.params()]
    if hasattr(gradients[0], "grad_fn"):
        import torch
        torch.nn.utils.clip_grad_norm_(replicas.net.parameters(), max_norm)
        return
    # Gluon's clip_global_norm fails on float64 by itself.
    norm = np.sqrt(sum((mgpu.to_numpy(g) ** 2).sum() for g in gradients))
    for g in gradients:
        g *= min(1.0, max_norm / (norm + 1e-6))


def test_clipping_one_devices_part_is_refused(engine, devices):
    """The commonest habit clips one device's part of the sum: refused before
    anything changes. On one device the part is the whole."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    backward(replicas, *batch(8))
    clip_natively(replicas, 1e-3)
    before = values(replicas), gradients(replicas)
    if len(devices) == 1:
        trainer.step(8)
        return
    for call in (trainer.allreduce_grads, lambda: trainer.step(8)):
        with pytest.raises(RuntimeError, match="allreduce_grads.*changed on "
                           "some devices.*clip_global_norm"):
            call()
    assert_unchanged(values(replicas), before[0])
    assert_unchanged(gradients(replicas), before[1])
    for p in replicas.params():     # a change on all devices is the user's
        for g in p.list_grad():
            g *= 0.5
    trainer.step(8)
    # And the next batch is a new one.
    backward(replicas, *batch(8))
    trainer.step(8)


def test_what_is_added_on_a_device_without_rows_counts(engine, devices):
    """Each adds its share of a penalty; to zeros there, not to the gradient
    of an earlier batch, which the next pass voids after an abandoned one
    too."""
    found = []
    for places in (on(0), devices):
        replicas = initialize(mlp(engine), places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        train(replicas, trainer)
        for rows in (1, 2):
            backward(replicas, *batch(rows))
            for p in replicas.params():
                for g, w in zip(p.list_grad(), p.list_data()):
                    g += w / len(places)
            trainer.step(rows)
        backward(replicas, *batch(8))       # abandoned
        backward(replicas, *batch(1))
        trainer.step(1)
        backward(replicas, *batch(8))
        with mgpu.record():         # a forward pass for a log
            replicas(mgpu.split_batch(*batch(1), places)[0])
        trainer.step(8)
        found.append(values(replicas))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("when", ["before the sum", "after the sum"])
def test_a_gradient_that_the_user_takes_away_is_not_applied(when, devices):
    """As ``torch.optim`` passes over a parameter whose ``.grad`` is None: no
    momentum, no weight decay, no count."""
    if "torch" not in BACKENDS:
        pytest.skip("a habit of torch")
    import torch
    torch.manual_seed(0)
    with mgpu.using_backend("torch"):
        plain = torch.nn.Linear(6, 3).double()
        net = deepcopy(plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.125)
        replicas = mgpu.initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "adamw", {"lr": 0.125},
                               semantics="torch")
        for step in range(4):
            X = np.random.default_rng(step).normal(size=(8, 6))
            optimizer.zero_grad()
            plain(torch.from_numpy(X)).square().sum().div(8).backward()
            with mgpu.record():
                losses = [out.square() for out in replicas(
                    mgpu.split_and_load(X, devices, even_split=False))]
            mgpu.backward(losses)
            if when == "after the sum":
                trainer.allreduce_grads()
            if step % 2:
                plain.bias.grad = net.bias.grad = None
            if when == "after the sum":
                assert trainer.clip_global_norm(1e9, 8) > 0
                trainer.update(8)
            elif step % 2 and len(devices) > 1:
                with pytest.raises(RuntimeError, match="'bias' changed on "):
                    trainer.step(8)
                return
            else:
                trainer.step(8)
            optimizer.step()
        replicas.check_equal()
    for p, q in zip(net.parameters(), plain.parameters()):
        assert (p - q).abs().max() < 1e-12


@pytest.mark.parametrize("overridden", ["update", "allreduce_grads", "both",
                                        "an attribute"])
@pytest.mark.parametrize("stepped", ["train_batch", "by hand"])
def test_a_step_calls_what_a_subclass_overrides(engine, devices, overridden,
                                                stepped):
    """With what it writes to gradients there, also in ways that torch does
    not count."""
    def halve(trainer):
        for p in trainer.summed():
            gradient = p.data().grad
            if engine.name == "torch":
                gradient = gradient.data
            gradient *= 0.5

    class Half(mgpu.Trainer):
        def update(self, batch_size):
            halve(self)
            super().update(batch_size)

    class Doubled(mgpu.Trainer):
        def allreduce_grads(self, ignore_stale_grad=False):
            super().allreduce_grads(ignore_stale_grad)
            for p in self.summed():
                for g in p.list_grad():
                    g *= 2.0

    class Both(Half, Doubled):
        pass
    kind, factor = {"update": (Half, 0.5), "allreduce_grads": (Doubled, 2.0),
                    "both": (Both, 1.0), "an attribute": (mgpu.Trainer, 0.5)
                    }[overridden]
    loss, found = mgpu.losses.SoftmaxCrossEntropyLoss(), []
    for made, rate in ((kind, 0.5), (mgpu.Trainer, 0.5 * factor)):
        replicas = initialize(mlp(engine), devices)
        trainer = made(replicas, "sgd", {"learning_rate": rate})
        if overridden == "an attribute" and not found:
            own = trainer.update
            trainer.update = lambda rows: (halve(trainer), own(rows))
        for seed, rows in enumerate(ROWS):
            X, y = batch(rows, seed)
            if stepped == "train_batch":
                mgpu.train_batch(X, y, replicas, loss, trainer)
            else:
                backward(replicas, X, y)
                trainer.step(rows)
        found.append(values(replicas))
        if overridden != "both":    # which writes to all, and then to one
            assert_replicas_equal(gradients(replicas))
    assert_replicas_equal(found[0])
    assert_close(*found)


def test_a_change_of_replica_0s_sum_reaches_all(engine, devices):
    """Between all-reduce and update the framework's own clipping works as on
    one device; a change of another replica's sum alone is refused."""
    found = []
    for places in (on(0), devices):
        replicas = initialize(mlp(engine), places)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for seed in range(3):
            backward(replicas, *batch(8, seed))
            trainer.allreduce_grads()
            clip_natively(replicas, 0.5)
            trainer.update(8)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
        assert_replicas_equal(gradients(replicas))
    assert_close(found[1], found[0])
    if len(devices) > 1:
        backward(replicas, *batch(8))
        trainer.allreduce_grads()
        replicas.params()[0].list_grad()[1][:] = 7.0
        with pytest.raises(RuntimeError, match="on replica 0, or on all"):
            trainer.update(8)


@pytest.mark.parametrize("engine_name", [e for e in ENGINES if e == "torch"])
@pytest.mark.parametrize("edit", [
    lambda g: g.data.clamp_(-1e-3, 1e-3), lambda g: g.data.neg_(),
    lambda g: g.numpy().__imul__(0.5)])
def test_writes_that_torch_does_not_count_are_seen(
        engine_name, devices, edit):
    """Of the user's network, as in `p.grad.data.clamp_`."""
    found = []
    with using_engine(engine_name) as engine:
        for places in (on(0), devices):
            replicas = initialize(mlp(engine), places)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
            backward(replicas, *batch(8))
            if len(places) > 1:
                edit(replicas.params()[0].list_grad()[0])
                with pytest.raises(RuntimeError, match="on some devices"):
                    trainer.step(8)
                backward(replicas, *batch(8))
            trainer.allreduce_grads()
            for p in replicas.params():
                edit(p.list_grad()[0])
            trainer.update(8)
            found.append(values(replicas))
    assert_replicas_equal(found[1])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("engine_name", [e for e in ENGINES if e == "torch"])
@pytest.mark.parametrize("edit", [
    lambda g: g.copy_(g.roll(1, 0)), lambda g: g.copy_(g.roll(1, 1)),
    lambda g: g.neg_(), lambda g: g[0, -2:].neg_()],
    ids=["rows", "columns", "signs", "two_signs"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_writes_that_change_no_plain_sum_are_seen(engine_name, edit, dtype):
    """A large gradient whose rows are opposites: its values add up to 0."""
    from torch import nn
    with using_engine(engine_name):
        net = nn.Linear(2048, 2)
        replicas = mgpu.initialize(net, on(0, 1), "xavier", dtype=dtype)
        trainer = mgpu.Trainer(replicas, "sgd")
        X = np.random.default_rng(0).normal(size=(4, 2048)).astype(dtype)
        with mgpu.record():
            losses = [out[:, 0] - out[:, 1] for out in replicas(
                mgpu.split_and_load(X, replicas.devices))]
        mgpu.backward(losses)
        edit(net.weight.grad.data)
        with pytest.raises(RuntimeError, match="on some devices"):
            trainer.step(4)


def test_sums_that_another_trainer_has_applied_are_not_applied_again(
        engine, devices):
    replicas = initialize(mlp(engine), devices)
    first, second = (mgpu.Trainer(replicas, "sgd") for _ in range(2))
    backward(replicas, *batch(8))
    first.allreduce_grads()
    backward(replicas, *batch(8, 1))
    second.step(8)
    before = values(replicas)
    with pytest.raises(RuntimeError, match="received those of another"):
        first.update(8)
    assert_unchanged(values(replicas), before)


@pytest.mark.parametrize("wrong, error", [
    (float("nan"), ValueError), (float("inf"), ValueError),
    (-1.0, ValueError), ("0.1", TypeError), (None, TypeError)], ids=str)
def test_a_wrong_rate_of_a_schedule_changes_nothing(engine, devices, wrong,
                                                    error):
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", lr_scheduler=lambda n: wrong)
    before = values(replicas)
    with pytest.raises(error, match="what a schedule returns must be"):
        mgpu.train_batch(*batch(8), replicas,
                         mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    assert_unchanged(values(replicas), before)
    trainer.lr_scheduler = lambda n: 0.125
    train(replicas, trainer)        # nothing is torn


@pytest.mark.parametrize("which", ["lr_mult", "wd_mult"])
def test_a_multiplier_that_is_no_number_changes_nothing(engine, which):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd")
    getattr(trainer, which)["0.bias"] = float("nan")
    before = values(replicas)
    with pytest.raises(ValueError, match=f"{which} of '0.bias' must be a "
                       "finite number; received nan"):
        train(replicas, trainer)
    assert_unchanged(values(replicas), before)
    del getattr(trainer, which)["0.bias"]
    train(replicas, trainer)


@pytest.mark.parametrize("semantics", ["gluon", "torch"])
@pytest.mark.parametrize("name, option, value, error", [
    ("sgd", "momentum", 0.5, ValueError), ("sgd", "wd", "x", TypeError),
    ("sgd", "learning_rate", float("nan"), ValueError),
    ("rmsprop", "centered", True, ValueError)])
def test_a_wrong_option_in_the_middle_of_a_training_changes_nothing(
        engine, semantics, name, option, value, error):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, name, semantics=semantics)
    train(replicas, trainer)
    before, good = values(replicas), getattr(trainer.optimizer, option)
    setattr(trainer.optimizer, option, value)
    with pytest.raises(error):
        train(replicas, trainer)
    assert_unchanged(values(replicas), before)
    setattr(trainer.optimizer, option, good)
    trainer.optimizer.learning_rate = 0.5
    train(replicas, trainer)        # nothing is torn


def test_what_is_frozen_after_the_sum_stays(engine, devices):
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    backward(replicas, *batch(8))
    trainer.allreduce_grads()
    before = values(replicas)
    replicas.params()[0].grad_req = "null"
    trainer.update(8)
    now = values(replicas)
    for p in replicas.params():
        assert (now[p.name][0] != before[p.name][0]).any() \
            == (p.name != "0.weight")
    assert_replicas_equal(now)


def test_a_backward_pass_after_the_sum_is_refused(engine, devices):
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    backward(replicas, *batch(8))
    trainer.allreduce_grads()
    backward(replicas, *batch(8, 1))
    before = values(replicas)
    with pytest.raises(RuntimeError, match="a backward pass has written since"
                       ".* penalties too .* grad_req='add' and call"):
        trainer.update(8)
    assert_unchanged(values(replicas), before)
    trainer.step(8)     # sums the new ones


def test_a_penalty_has_the_same_pass_or_is_added(engine, devices):
    """The two cures that the refusal of a second pass names are one number,
    that of the formula; to call allreduce_grads again is right for "add"."""
    found, X, y = [], *batch(8)
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    for way in ("formula", "one pass", "before the sum", "after the sum"):
        replicas = adding(engine, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        if way in ("formula", "one pass"):
            for p in replicas.params():
                p.grad_req = "write"
        before = values(replicas)
        Xs, ys = mgpu.split_batch(X, y, devices)

        def penalties():
            return [(p.data() * p.data()).sum() * 0.5 * 8
                    for p in replicas.params()]
        with mgpu.record():
            losses = mgpu.parallel(loss, replicas(Xs), ys)
            if way == "one pass":
                losses = losses + penalties()
        mgpu.backward(losses)
        if way == "after the sum":
            trainer.allreduce_grads()
        if way.endswith("the sum"):
            with mgpu.record():
                alone = penalties()
            mgpu.backward(alone)
        if way == "after the sum":
            with pytest.raises(RuntimeError, match="has written since. Call "
                               "allreduce_grads again"):
                trainer.update(8)
        trainer.allreduce_grads()
        trainer.update(8)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
        if way == "formula":
            for name, copies in before.items():
                found[0][name][0] = found[0][name][0] - 0.125 * copies[0]
        else:
            assert_close(found[-1], found[0])


def test_losses_of_one_device_in_one_pass(engine, devices):
    """They share no leaf. What is known of a network's leaves on a device is
    of one pass at a time."""
    replicas = initialize(mlp(engine, (6, *[3] * 20)), devices)
    for _ in range(8):
        with mgpu.record():
            alone = [(p.data() * p.data()).sum() for p in replicas.params()]
        mgpu.backward(alone)
        for p in replicas.params():
            assert_bit_equal(mgpu.to_numpy(p.grad()),
                             2 * mgpu.to_numpy(p.data()))


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_freezing_the_users_network_freezes_all(engine, devices, grad_req):
    """By the framework's own means, between steps, and thawing it again. What
    adds up goes on doing so."""
    def freeze(replicas, frozen):
        if mgpu.get_backend().name == "torch":
            replicas.net[0].requires_grad_(not frozen)
        else:
            replicas.net[0].collect_params().setattr(
                "grad_req", "null" if frozen else grad_req)
    found = []
    for places in (on(0), devices):
        replicas = initialize(mlp(engine), places)
        for p in replicas.params():
            p.grad_req = grad_req
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for first, frozen in enumerate((False, True, False)):
            freeze(replicas, frozen)
            before = values(replicas)
            train(replicas, trainer, [7, 2], 2 * first)
            same = (values(replicas)["0.weight"][0]
                    == before["0.weight"][0]).all()
            assert same == frozen
            assert [p.grad_req for p in replicas.params()[:2]] \
                == 2 * ["null" if frozen else grad_req]
            assert_replicas_equal(values(replicas))
        found.append(values(replicas))
    assert_close(found[1], found[0])


# -- who uses the replicas ----------------------------------------------------

def test_replicas_made_void_are_refused(engine, devices, tmp_path):
    net = mlp(engine)
    old = initialize(net, devices)
    trainer = mgpu.Trainer(old, "sgd")
    values = old.export_numpy()
    mgpu.save_checkpoint(tmp_path / "old", old, trainer)
    new = initialize(net, devices, force_reinit=True)
    now = new.export_numpy()
    zeros = {name: 0 * value for name, value in values.items()}
    for call in (lambda: trainer.step(1), trainer.allreduce_grads,
                 lambda: old[0](mgpu.put(batch(2)[0], devices[0])),
                 lambda: old(mgpu.split_and_load(
                     batch(8)[0], devices, even_split=False))):
        with pytest.raises(RuntimeError, match="are void.*force_reinit"):
            call()
    for call in (lambda: old.import_numpy(zeros), old.zero_grad,
                 old.export_numpy, lambda: mgpu.Trainer(old, "sgd"),
                 lambda: mgpu.load_checkpoint(tmp_path / "old", old,
                                              trainer)):
        with pytest.raises(RuntimeError, match="are void.*force_reinit"):
            call()
    after = new.export_numpy()
    assert all(np.array_equal(after[name], now[name]) for name in now)
    train(new, mgpu.Trainer(new, "sgd"))


def test_an_update_that_fails_midway_breaks_the_trainer(engine, devices):
    """Replicas may differ then: every later call says so, until values and
    states are loaded."""
    class Failing(type(mgpu.optimizers.create("sgd"))):
        left = 3

        def update(self, *args, **kwargs):
            Failing.left -= 1
            if not Failing.left:
                raise ZeroDivisionError("in the rule")
            super().update(*args, **kwargs)
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, Failing(learning_rate=0.125))
    kept, states = replicas.export_numpy(), trainer.export_states()
    backward(replicas, *batch(8))
    with pytest.raises(ZeroDivisionError):
        trainer.step(8)
    assert trainer.num_update == 0
    for call in (lambda: trainer.step(8), trainer.allreduce_grads,
                 lambda: trainer.update(8),
                 lambda: backward(replicas, *batch(8))):
        with pytest.raises(RuntimeError, match="failed midway"):
            call()
    trainer.import_states(states)
    replicas.import_numpy(kept)
    backward(replicas, *batch(8))
    trainer.step(8)
    assert_replicas_equal(values(replicas))


@pytest.mark.parametrize("engine", MXNET, indirect=True)
def test_a_pass_that_fails_late_updates_nothing(engine, devices):
    """Its error comes when its results are read, and only once."""
    import mxnet as mx
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    train(replicas, trainer, [8])
    before = replicas.export_numpy()
    X, y = batch(8)
    Xs, ys = mgpu.split_batch(X, y, devices)
    with mgpu.record():
        losses = mgpu.parallel(mgpu.losses.SoftmaxCrossEntropyLoss(),
                               replicas(Xs), ys)
        bad = mx.nd.linalg.potrf(mx.nd.zeros(
            (1, 1), ctx=losses[-1].ctx, dtype="float64") - 1)[0]
        losses[-1] = losses[-1].as_nd_ndarray() * bad
    mgpu.backward(losses)
    with pytest.raises(mgpu.errors.DeviceError,
                       match=rf"cpu\({len(devices) - 1}\), in step 2.*Check "
                       "failed") as caught:
        trainer.step(8)
    assert isinstance(caught.value.__cause__, mx.MXNetError)
    with pytest.raises(RuntimeError, match="none since the last update"):
        trainer.update(8)
    after = replicas.export_numpy()
    assert all((before[name] == after[name]).all() for name in before)
    train(replicas, trainer, [8])
    assert trainer.num_update == 2


def test_one_thread_at_a_time(engine, devices):
    """A second thread is refused without waiting, and the first goes on."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    plain, refused = mgpu.losses.SoftmaxCrossEntropyLoss(), SimpleQueue()

    def other():
        for call in (lambda: trainer.step(8), lambda: replicas[0](
                mgpu.put(batch(2)[0], devices[0]))):
            try:
                call()
            except RuntimeError as error:
                refused.put(str(error))

    def loss(output, label):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(5)      # one that is not refused waits for this one
        return plain(output, label)
    mgpu.train_batch(*batch(8), replicas, loss, trainer)
    texts = [refused.get() for _ in range(refused.qsize())]
    assert len(texts) == 2 * len(devices)
    assert all("one thread at a time" in text for text in texts)
    assert trainer.num_update == 1


def test_gradients_are_summed_once(engine, devices):
    """A second sum would multiply them by K: it is an error for any K."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    X, y = batch(6)
    backward(replicas, X, y)
    trainer.allreduce_grads()
    held = gradients(replicas)
    for call in (trainer.allreduce_grads, lambda: trainer.step(6)):
        with pytest.raises(mgpu.StaleGradientError):
            call()
    assert_unchanged(gradients(replicas), held)
    trainer.update(6)           # what was summed is still there to apply
    before = values(replicas)
    for call, name in ((lambda: trainer.update(6), "update"),
                       (lambda: trainer.clip_global_norm(1.0),
                        "clip_global_norm")):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} works on gradients that allreduce_grads has summed; "
            "received none since the last update. Call allreduce_grads "
            "first, or step for both.")
    assert_unchanged(values(replicas), before)
    assert trainer.num_update == 1


def test_a_device_without_rows_contributes_zero(engine, devices):
    """Not the gradient that it wrote for an earlier batch."""
    k = len(devices)
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0})
    train(replicas, trainer, [4 * k])
    for device in range(k):
        X, y = batch(2, seed=device)
        shards = [None] * k
        shards[device] = mgpu.put(X, devices[device])
        with mgpu.record():
            out = replicas(shards)[device]
            loss = mgpu.losses.SoftmaxCrossEntropyLoss()(
                out, mgpu.put(y, devices[device]))
        mgpu.backward(loss)
        own = {n: g[device] for n, g in gradients(replicas).items()}
        trainer.step(2)
        for name, copies in gradients(replicas).items():
            for copy in copies:
                # Sums with exact zeros: to the last bit.
                assert_bit_equal(copy + 0.0, own[name] + 0.0)


def test_a_failed_pass_leaves_no_trace(engine):
    """A device that ran in a pass that failed is idle in the next one."""
    replicas = initialize(mlp(engine), on(0, 1, 2))
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    one = initialize(mlp(engine), on(0))
    X, y = batch(6)
    with pytest.raises(ZeroDivisionError), mgpu.record():
        replicas(mgpu.split_and_load(X, replicas.devices))
        raise ZeroDivisionError
    train(replicas, trainer, [1])
    train(one, mgpu.Trainer(one, "sgd", {"learning_rate": 0.125}), [1])
    assert_close(values(replicas), values(one))
    assert_replicas_equal(values(replicas))


# -- between allreduce_grads and update ---------------------------------------

class Interrupted(mgpu.optimizers.SGD):
    """Ctrl-C comes while the second weight is updated."""
    elementwise, calls = True, 0

    def update(self, *arguments, **options):
        self.calls += 1
        if self.calls == 2:
            signal.raise_signal(signal.SIGINT)
        super().update(*arguments, **options)


@pytest.mark.crosses_devices("of updates in the host's memory")
def test_ctrl_c_leaves_no_half_update(backend, devices):
    replicas = initialize(mlp(backend), devices)
    trainer = mgpu.Trainer(replicas, Interrupted(learning_rate=0.125))
    before = values(replicas)
    backward(replicas, *batch(6))
    trainer.allreduce_grads()
    with pytest.raises(KeyboardInterrupt):
        trainer.update(6)
    for name, copies in values(replicas).items():
        assert (copies[0] != before[name][0]).any()
        for copy in copies:
            assert_bit_equal(copy, copies[0])


def wide_convolutions(backend):
    """MXNet's convolution libraries bring such weights into an order of
    their own for predictions."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.Sequential()
        net.add(nn.Conv2D(32, 3, padding=1, in_channels=16),
                nn.Conv2D(32, 3, in_channels=32), nn.GlobalAvgPool2D())
        return net
    from torch import nn
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1),
                         nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1))


@pytest.mark.parametrize("k", [1, 2])
def test_a_prediction_that_nobody_has_read(backend, k):
    """It may still be running when the weights are written."""
    found = []
    for waits in (True, False):
        replicas = mgpu.initialize(wide_convolutions(backend), on(*range(k)),
                                   "xavier", seed=1)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        rng = np.random.default_rng(0)
        few, many = (mgpu.split_and_load(
            rng.normal(size=(n * k, 16, 20, 20)).astype("float32"),
            replicas.devices) for n in (2, 64))
        for _ in range(2):
            with mgpu.record():
                losses = [(out * out).sum() for out in replicas(few)]
            mgpu.backward(losses)
            trainer.allreduce_grads()
            replicas(many)
            if waits:
                mgpu.synchronize(replicas.devices)
            trainer.update(2 * k)
        found.append(values(replicas))
    assert_unchanged(found[1], found[0])


@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_clip_global_norm(engine, devices, max_norm):
    """Once per parameter, not per device; with `batch_size` the norm of what
    will be applied."""
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    for rows in (1, 6):
        backward(replicas, *batch(6))
        trainer.allreduce_grads()
        summed = gradients(replicas)
        norm = np.sqrt(sum((g[0] ** 2).sum() for g in summed.values())) / rows
        assert norm > 0.25      # so that clipping is seen
        returned = trainer.clip_global_norm(max_norm, batch_size=rows)
        assert type(returned) is float
        assert abs(returned - norm) < 1e-14 * norm
        scale = min(1.0, max_norm / (norm + 1e-8))
        clipped = gradients(replicas)
        for name, copies in clipped.items():
            for copy, g in zip(copies, summed[name]):
                assert relative_difference(copy, g * scale) < 1e-14
        if max_norm > norm:
            assert_unchanged(clipped, summed)
        trainer.update(6)


@pytest.mark.parametrize("engine_name", MXNET[:1])
def test_clip_global_norm_is_gluons(engine_name, devices):
    with using_engine(engine_name) as backend:
        from mxnet import gluon
        replicas = initialize(mlp(backend), devices)
        trainer = mgpu.Trainer(replicas, "sgd")
        backward(replicas, *batch(6))
        trainer.allreduce_grads()
        native = [mgpu.put(p.grad(), mgpu.cpu(0)).astype("float32")
                  for p in replicas.params()]
        wanted = gluon.utils.clip_global_norm(native, 0.25)
        found = trainer.clip_global_norm(0.25)
        # Gluon takes the scale in float32.
        assert abs(found - wanted) < 1e-6 * wanted
        for p, g in zip(replicas.params(), native):
            for copy in p.list_grad():
                assert relative_difference(mgpu.to_numpy(copy),
                                           g.asnumpy()) < 1e-6


def test_a_norm_that_is_not_finite_is_refused(engine, devices):
    replicas = initialize(mlp(engine), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    backward(replicas, *batch(4))
    trainer.allreduce_grads()
    replicas.params()[2].list_grad()[0][:] = float("nan")
    held = gradients(replicas)
    with pytest.raises(FloatingPointError, match="the gradients have norm "
                       "nan; they were not clipped. Lower the learning rate"):
        trainer.clip_global_norm(1.0)
    assert_unchanged(gradients(replicas), held)
    for wrong, error in ((0, ValueError), (-1.0, ValueError),
                         ("1", TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match="max_norm must be .*; received"):
            trainer.clip_global_norm(wrong)


# -- states in files ----------------------------------------------------------

SAVED = [("sgd", {"momentum": 0.5}), ("adam", {}), ("nadam", {}),
         ("ftrl", {}), ("sgd", {})]


@pytest.mark.parametrize("name, options", SAVED, ids=[
    "momentum", "adam", "nadam", "ftrl", "sgd"])
def test_a_resumed_training_is_the_uninterrupted_one(
        engine, devices, tmp_path, name, options):
    """Bit for bit on the same engine and devices, the schedule's position
    and the rate included."""
    def trainer_of(replicas):
        return mgpu.Trainer(
            replicas, name, {"learning_rate": 0.125, **options},
            lr_scheduler=mgpu.lr_scheduler.FactorScheduler(2, 0.5))
    whole = initialize(mlp(engine), devices)
    trainer = trainer_of(whole)
    train(whole, trainer, ROWS[:3])
    trainer.save_states(tmp_path / "states")
    checkpoint = whole.export_numpy()
    train(whole, trainer, ROWS[3:], first=3)
    resumed = mgpu.initialize(mlp(engine), devices, "uniform", dtype="float64")
    resumed.import_numpy(checkpoint)
    again = trainer_of(resumed)
    again.load_states(str(tmp_path / "states"))
    assert again.num_update == 3
    train(resumed, again, ROWS[3:], first=3)
    assert_unchanged(values(resumed), values(whole))
    assert again.learning_rate == trainer.learning_rate


@pytest.mark.parametrize("source", BACKENDS)
@pytest.mark.parametrize("target", BACKENDS)
@pytest.mark.parametrize("k, other", [(1, 3), (3, 1), (2, 2)])
def test_states_cross_engines_and_device_counts(
        source, target, k, other, tmp_path):
    options = {"learning_rate": 0.125, "momentum": 0.5}
    with mgpu.using_backend(source) as backend:
        whole = initialize(mlp(backend), on(*range(k)))
        trainer = mgpu.Trainer(whole, "sgd", options)
        train(whole, trainer, ROWS[:3])
        trainer.set_learning_rate(0.25)
        trainer.save_states(tmp_path / "states")
        checkpoint = whole.export_numpy()
        train(whole, trainer, ROWS[3:], first=3)
        wanted = values(whole)
    with mgpu.using_backend(target) as backend:
        resumed = initialize(mlp(backend), on(*range(other)))
        resumed.import_numpy(checkpoint)
        again = mgpu.Trainer(resumed, "sgd", options)
        again.load_states(tmp_path / "states")
        assert again.learning_rate == 0.25
        train(resumed, again, ROWS[3:], first=3)
        assert_close(values(resumed), wanted)
        assert_replicas_equal(values(resumed))


def test_a_file_of_states_holds_numbers_alone(engine, tmp_path):
    """No pickle: whatever reads it executes nothing."""
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
    train(replicas, trainer, [4])
    trainer.save_states(tmp_path / "states")
    header, kinds = files.read_arrays(
        tmp_path / "states", ["mgpu trainer states 2"], "states",
        lambda header, arrays: (header, {
            name: x.dtype.kind for name, x in arrays.items()}))
    assert kinds == {f"{p.name}|momentum": "f" for p in replicas.params()}
    assert header["optimizer"] == "SGD"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states"]


class Attack:
    """Unpickling it would leave a mark."""

    marks = []

    def __reduce__(self):
        return (Attack.marks.append, (1,))


def damaged(folder, trainer, kind):
    """A file that is no whole file of this trainer's states."""
    path = folder / "states"
    trainer.save_states(path)
    whole = path.read_bytes()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(whole[:len(whole) // 2])
    elif kind == "flipped":
        at = len(whole) - 40    # in the data: the digest does not fit
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255])
                         + whole[at + 1:])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Attack()))
    elif kind == "object array":
        with open(path, "wb") as file:
            np.savez(file, header=np.array([Attack()], dtype=object))
    elif kind == "weights":
        with open(path, "wb") as file:
            np.savez(file, **trainer.replicas.export_numpy())
    else:
        header = {"format": kind, "optimizer": "SGD"}
        with open(path, "wb") as file:
            np.savez(file, header=np.array(json.dumps(header)))
    return path


@pytest.mark.parametrize("kind", [
    "empty", "truncated", "flipped", "pickle", "object array", "weights",
    "mgpu trainer states 0", "mgpu trainer states 1"])
def test_a_damaged_file_is_refused_and_nothing_changes(
        engine, tmp_path, kind):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125,
                                             "momentum": 0.5})
    twin = initialize(mlp(engine), on(0, 1))
    other = mgpu.Trainer(twin, "sgd", {"learning_rate": 0.125,
                                       "momentum": 0.5})
    for r, t in ((replicas, trainer), (twin, other)):
        train(r, t, ROWS)
    path = damaged(tmp_path, trainer, kind)
    with pytest.raises(ValueError) as caught:
        trainer.load_states(path)
    text = str(caught.value)
    if kind == "pickle":
        assert text.startswith("expected a file of Trainer.save_states of "
                               f"mgpu; received {str(path)!r}, which looks")
        assert "mgpu.resume_from_gluon" in text
    else:
        assert text.startswith("expected a file of Trainer.save_states; "
                               f"{str(path)!r} is not one, or is damaged (")
        assert text.endswith("). Use a whole file.")
    assert not Attack.marks
    for r, t in ((replicas, trainer), (twin, other)):
        train(r, t, ROWS)
    assert_unchanged(values(replicas), values(twin))


def wider(engine):
    return mlp(engine, units=(6, 7, 3))


@pytest.mark.parametrize("build, name, options, text", [
    (mlp, "adam", {}, "the state of SGD instead of Adam"),
    (wider, "sgd", {"momentum": 0.5},
     "momentum of 0.weight with shape (5, 6) instead of (7, 6)"),
    (mlp, "sgd", {}, "unused momentum of 0.weight"),
    (lambda engine: mlp(engine, units=(6, 3)), "sgd", {"momentum": 0.5},
     "unknown parameter 2.bias; unknown parameter 2.weight"),
], ids=["optimiser", "shape", "slot", "parameter"])
def test_states_of_something_else_are_refused(
        engine, tmp_path, build, name, options, text):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
    train(replicas, trainer, ROWS)
    trainer.save_states(tmp_path / "states")
    replicas = initialize(build(engine), on(0))
    trainer = mgpu.Trainer(replicas, name, {"learning_rate": 0.5, **options})
    train(replicas, trainer, [4])
    with pytest.raises(ValueError) as caught:
        trainer.load_states(tmp_path / "states")
    assert text in str(caught.value)
    assert "must hold the states of this trainer; received" \
        in str(caught.value)
    assert (trainer.num_update, trainer.learning_rate) == (1, 0.5)
    train(replicas, trainer, ROWS)


def test_states_without_momentum_do_not_fit_momentum(engine, tmp_path):
    replicas = initialize(mlp(engine), on(0))
    trainer = mgpu.Trainer(replicas, "sgd")
    train(replicas, trainer, [4])
    trainer.save_states(tmp_path / "states")
    other = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
    with pytest.raises(ValueError, match="received no momentum of 0.weight; "
                       "no momentum of 0.bias; .* Load it into a trainer"):
        other.load_states(tmp_path / "states")


def test_a_missing_file_is_an_os_error(engine, tmp_path):
    trainer = mgpu.Trainer(initialize(mlp(engine), on(0)), "sgd")
    with pytest.raises(FileNotFoundError):
        trainer.load_states(tmp_path / "states")
    with pytest.raises(FileNotFoundError):
        trainer.save_states(tmp_path / "absent" / "states")


# -- arguments ----------------------------------------------------------------

@pytest.mark.parametrize("size", [0, -1, "2", None, True, np.inf, np.nan,
                                  -0.5, np.bool_(True), 1j, np.ones(2)],
                         ids=repr)
def test_a_wrong_batch_size_is_refused(engine, size):
    replicas = initialize(mlp(engine), on(0, 1))
    trainer = mgpu.Trainer(replicas, "sgd")
    backward(replicas, *batch(4))
    before, held = values(replicas), gradients(replicas)
    calls = [trainer.step, trainer.update]
    if size is not None:        # which clips the sums as they are
        calls.append(lambda n: trainer.clip_global_norm(1.0, batch_size=n))
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call(size)
        assert str(caught.value) == (
            "batch_size must be a finite number above 0; received "
            f"{size!r}. Pass the rows of the whole batch, over all devices, "
            "or what else the loss is divided by: its tokens, or the sum of "
            "its weights.")
    assert_unchanged(values(replicas), before)
    assert_unchanged(gradients(replicas), held)
    trainer.step(np.int64(4))       # a whole number of NumPy is one


@pytest.mark.parametrize("arguments, error, text", [
    (("rprop",), ValueError, "unknown optimiser; received 'rprop'. Use one "
     "of sgd, nag, adam"),
    (("sgd", {"lr": 0.1}), ValueError, "the optimiser 'sgd' has no option "
     "'lr' with semantics='gluon'. Use"),
    (("sgd", {"learning_rate": -1}), ValueError, "learning_rate must be"),
    (("sgd", None, "jax"), ValueError, "unknown semantics; received 'jax'"),
    (("sgd", {"lr_scheduler": float}, "gluon", float), ValueError,
     "expected one lr_scheduler; received one as an argument and one in "
     "optimizer_params."),
    (("sgd", None, "gluon", 0.5), TypeError, "lr_scheduler is called with "
     "the number of an update; received float."),
    (("sgd", None, "gluon", None, {"weight": 2.0}), ValueError,
     "lr_mult names parameters of the network; received ['weight']. It has "
     "['0.bias', '0.weight', '2.bias', '2.weight']."),
    (("sgd", None, "gluon", None, None, {"0.bias": "2"}), TypeError,
     "wd_mult of '0.bias' must be a finite number; received '2' of type "
     "str."),
    (("sgd", None, "gluon", None, {"0.bias": float("nan")}), ValueError,
     "lr_mult of '0.bias' must be a finite number; received nan."),
    ((mgpu.optimizers.SGD(), {"momentum": 0.5}), ValueError,
     "optimizer_params go with an optimiser's name; received ['momentum'] "
     "with an Optimizer object."),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_wrong_arguments(engine, arguments, error, text):
    replicas = initialize(mlp(engine), on(0, 1))
    with pytest.raises(error) as caught:
        mgpu.Trainer(replicas, *arguments)
    assert str(caught.value).startswith(text)


def test_a_trainer_takes_replicas(engine):
    net = mlp(engine)
    for wrong in (net, [np.ones(3)], foreign_array(engine)[0]):
        with pytest.raises(TypeError) as caught:
            mgpu.Trainer(wrong, "sgd")
        assert str(caught.value) == (
            "a Trainer takes the Replicas that mgpu.initialize returns; "
            f"received {type(wrong).__name__}. Use Trainer(replicas, ...) or "
            "Trainer(net.collect_params(), ...) of a network that "
            "mgpu.initialize has put on devices, and for lists of arrays "
            "mgpu.sgd.")


def test_a_network_with_unknown_shapes(engine, devices, tmp_path):
    """A trainer may be made before the first forward pass, not step."""
    replicas = initialize(mlp(engine, deferred=True), devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125},
                           lr_mult={"0.bias": 2.0})
    for call in (lambda: trainer.step(4), trainer.allreduce_grads,
                 lambda: trainer.load_states(tmp_path / "none")):
        with pytest.raises(RuntimeError, match="a shape is unknown until the "
                           r"first forward pass. Run one, replicas\(shards\)"
                           ", or pass sample="):
            call()
    train(replicas, trainer)
    explicit = initialize(mlp(engine), devices)
    train(explicit, mgpu.Trainer(explicit, "sgd", {"learning_rate": 0.125},
                                 lr_mult={"0.bias": 2.0}))
    assert_unchanged(values(replicas), values(explicit))


def train_natively(replicas, X, y):
    """The passes of Gluon's own loop, ``net(x)`` for each shard."""
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    with mgpu.record():
        losses = [loss(replicas.net(x), label) for x, label in zip(
            *mgpu.split_batch(X, y, replicas.devices)) if len(x)]
    for one in losses:
        native_backward(one)


def halved(engine):
    """A network that computes with half of what its first weight stores, as
    a mask or dropout of weights does."""
    from mxnet import gluon

    class Halved(gluon.Parameter):
        def data(self, ctx=None):
            return super().data(ctx) * 0.5
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(4, in_units=6, activation="tanh"),
            gluon.nn.Dense(3, in_units=4))
    old = net[0].weight
    new = Halved(old.name, shape=old.shape)
    net[0]._reg_params["weight"] = net[0].params._params[new.name] = new
    object.__setattr__(net[0], "weight", new)
    net.initialize()
    net.cast("float64")
    for i, p in enumerate(net.collect_params().values()):
        p.set_data(engine.put(np.random.default_rng(i).normal(
            size=p.shape), on(0)[0]))
    return net


def stored(net):
    return [p.list_data() for p in net.collect_params().values()]


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("loop", ["step", "native"])
def test_a_parameter_that_gives_forward_something_else_than_it_stores(
        name, devices, loop, tmp_path):
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    with using_engine(name) as engine:
        from mxnet import autograd
        plain = halved(engine)
        replicas = mgpu.initialize(halved(engine), devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        for rows in (8, 7, 3):
            X, y = batch(rows)
            with autograd.record():
                losses = loss(plain(engine.put(X, on(0)[0])),
                              engine.put(y, on(0)[0]))
            losses.backward()
            for p in plain.collect_params().values():
                p.set_data(p.list_data()[0]
                           - p.list_grad()[0] * (0.125 / rows))
            if loop == "step":
                mgpu.train_batch(X, y, replicas, loss, trainer)
            else:
                train_natively(replicas, X, y)
                trainer.step(rows)
        now = [mgpu.to_numpy(x) for x, in stored(plain)]

        def check(wanted):
            for arrays, x in zip(stored(replicas.net), wanted, strict=True):
                for array in arrays:
                    assert relative_difference(array.asnumpy(), x) < 1e-12
        check(now)
        mgpu.save_checkpoint(tmp_path / "halved", replicas, trainer)
        saved = replicas.export_numpy()
        assert relative_difference(saved["0.weight"], now[0]) < 1e-12
        for put_back in (
                lambda: mgpu.load_checkpoint(tmp_path / "halved", replicas,
                                             trainer),
                lambda: replicas.import_numpy(saved)):
            replicas.net[0].weight.set_data(engine.put(0 * now[0], on(0)[0]))
            put_back()
            check(now)
        replicas.net[0].weight.set_data(engine.put(now[0] * 2, on(0)[0]))
        check([now[0] * 2, *now[1:]])


@pytest.mark.parametrize("name", MXNET)
def test_gluons_own_loop_completes_shapes(name, devices):
    """Unknown shapes come with its first call; nothing of that is lost."""
    found = []
    for deferred in (False, True):
        with using_engine(name) as engine:
            replicas = initialize(mlp(engine, deferred=deferred), devices)
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
            for rows in (4, 1):
                train_natively(replicas, *batch(rows))
                trainer.step(rows)
            found.append(values(replicas))
    assert_unchanged(*found)


@pytest.mark.parametrize("name", MXNET)
@pytest.mark.parametrize("requests", [("add",), ("null", "write")],
                         ids="-".join)
def test_gluons_own_loop_follows_another_grad_req(name, devices, requests):
    """Set on the network after `initialize`: of micro-batches none is lost,
    of an abandoned batch nothing is applied."""
    found = []
    for early in (True, False):
        with using_engine(name) as engine:
            net = mlp(engine)

            def change(net=net):
                for request in requests:
                    net.collect_params().setattr("grad_req", request)
            if early:
                change()
            replicas = initialize(net, devices)
            if not early:
                change()
            trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
            train_natively(replicas, *batch(4))
            train_natively(replicas, *batch(1))
            trainer.step(5)
            found.append(values(replicas))
    assert_unchanged(*found)


@pytest.mark.parametrize("name", MXNET)
def test_a_list_of_gluons_contexts(name, devices, tmp_path):
    """Serves Gluon's own calls and mgpu's."""
    import mxnet as mx
    with using_engine(name) as engine:
        contexts = [mx.cpu(d.index) for d in devices]
        net, source = mlp(engine), mlp(engine)
        source.initialize()
        source.save_parameters(str(tmp_path / "saved"))
        net.load_parameters(str(tmp_path / "saved"), ctx=contexts)
        replicas = mgpu.initialize(net, contexts)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        X, y = batch(4)
        Xs, ys = mgpu.split_batch(X.astype("float32"), y, contexts)
        with mx.autograd.record():
            losses = [mgpu.losses.SoftmaxCrossEntropyLoss()(out, label)
                      for out, label in zip(replicas(Xs), ys)]
        mgpu.backward(losses)
        trainer.step(4)
        net.load_parameters(str(tmp_path / "saved"), ctx=contexts)
        assert replicas.devices == devices


@pytest.mark.parametrize("name", MXNET)
def test_gluons_own_loop_refuses_new_layers(name, devices):
    """A step, and a new trainer: it would not train them."""
    with using_engine(name) as engine:
        net = mlp(engine)
        replicas = initialize(net, devices)
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
        layer = type(net[0])(3, in_units=3)
        layer.initialize(ctx=[engine.handle(d) for d in devices])
        layer.cast("float64")
        net.add(layer)
        train_natively(replicas, *batch(4))
        before = values(replicas)
        for call in (lambda: trainer.step(4),
                     lambda: mgpu.Trainer(replicas, "sgd")):
            with pytest.raises(RuntimeError, match="a network keeps its "
                               "layers, .*make a new Trainer"):
                call()
        assert_unchanged(values(replicas), before)


@pytest.mark.parametrize("ours, other", [(a, b) for a in BACKENDS
                                         for b in BACKENDS if a != b])
@pytest.mark.parametrize("policy", ["per_device", "average"])
def test_a_trainer_remembers_its_engine(ours, other, policy, tmp_path):
    """A step, or a file, while the other one is in use."""
    with mgpu.using_backend(ours) as backend:
        replicas = initialize(convnet(backend), on(0, 1), batch_norm=policy)
        trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
        rng = np.random.default_rng(0)
        X = rng.normal(size=(4, 2, 6, 6))
        for _ in range(2):
            with mgpu.using_backend(ours):
                backward(replicas, X, np.arange(4) % 3)
            with mgpu.using_backend(other):
                trainer.allreduce_grads()
                trainer.clip_global_norm(10.0)
                trainer.update(4)
                trainer.save_states(tmp_path / "states")
                trainer.load_states(tmp_path / "states")
                replicas.params()[0].set_data(np.zeros((4, 2, 3, 3)))
                replicas.zero_grad()
                replicas.export_numpy(all_devices=True)
    assert trainer.num_update == 2


def test_states_of_a_parameter_that_was_frozen_later(engine, tmp_path):
    replicas = mgpu.initialize(mlp(engine), [mgpu.cpu(0)], "xavier")
    trainer = mgpu.Trainer(replicas, "adam")
    rng = np.random.default_rng(0)
    X = rng.random((4, 6), dtype="float32")
    loss = mgpu.losses.SoftmaxCrossEntropyLoss()
    for _ in range(2):
        mgpu.train_batch(X, np.zeros(4, "int32"), replicas, loss, trainer)
        replicas.params()[0].grad_req = "null"
    trainer.save_states(tmp_path / "states")
    trainer.load_states(tmp_path / "states")
    mgpu.train_batch(X, np.zeros(4, "int32"), replicas, loss, trainer)
    assert trainer.num_update == 3


def test_a_states_file_may_begin_like_a_pickle(backend, tmp_path):
    """Its first byte is of a length; a pickle begins with 0x80 too."""
    replicas = initialize(mlp(backend), on(0))
    trainer = mgpu.Trainer(replicas, "sgd", {"momentum": 0.5})
    first = set()
    for n in range(300):    # headers of other lengths
        trainer._counts = {"x" * n: 1}
        trainer.save_states(tmp_path / "states")
        first.add((tmp_path / "states").read_bytes()[0])
        if 0x80 in first:
            break
    assert 0x80 in first
    with pytest.raises(ValueError) as caught:
        trainer.load_states(tmp_path / "states")
    assert "x" * n in str(caught.value)     # read, and no parameter has it
