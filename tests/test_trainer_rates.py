"""Learning rates, schedules and multipliers of a `Trainer`."""
import importlib

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, convnet, mlp, on, relative_difference,
                     using_engine)
from nets import gated
from steps import (LOSS, assert_unchanged, backward, batch, gradients,
                   initialize, sgd, sides, train, values)

MXNET = [engine for engine in ENGINES if engine.startswith("mxnet")]


def test_multipliers_by_torchs_names_of_norms(backend):
    """Their weight and bias are gamma and beta here."""
    for given, own in (("weight", "gamma"), ("bias", "beta")):
        replicas = initialize(convnet(backend), on(0, 1))
        trainer = mgpu.Trainer(replicas, "sgd", lr_mult={
            f"1.{given}": 0.5}, wd_mult={f"1.{own}": 0.25, "0.bias": 2.0})
        assert trainer.lr_mult == {f"1.{own}": 0.5}
        assert trainer.wd_mult == {f"1.{own}": 0.25, "0.bias": 2.0}
        with pytest.raises(ValueError, match="lr_mult must name parameters of "
                           f"the network; received .'1.{given}'.. It has"):
            mgpu.Trainer(replicas, "sgd", lr_mult={f"1.{own}": 0.5,
                                                   f"1.{given}": 0.5})


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


def test_a_frameworks_attribute_is_not_set_for_nothing(backend):
    """Gluon's and torch's names: they would do nothing."""
    trainer = mgpu.Trainer(initialize(mlp(backend), on(0)), "sgd")
    for name, use in (
            ("lr", "learning_rate and set_learning_rate"),
            ("wd", "optimizer.wd, or wd_mult"),
            ("weight_decay", "optimizer.wd, or wd_mult"),
            ("param_groups", "set_learning_rate, or wd_mult and lr_mult")):
        for call in (lambda: setattr(trainer, name, 0.5),
                     lambda: getattr(trainer, name)):
            with pytest.raises(AttributeError, match="no attribute "
                               f"'{name}'. Use {use}"):
                call()
    trainer.note = 0.5                              # a user's attribute


def test_a_wrong_learning_rate_is_refused(backend):
    _, trainer = sgd(backend, on(0, 1))
    for wrong, error, text in (
            (-0.5, ValueError, "received -0.5"),
            (float("nan"), ValueError, "received nan"),
            ("0.1", TypeError, "received '0.1' of type str"),
            (True, TypeError, "received True of type bool")):
        with pytest.raises(error) as caught:
            trainer.set_learning_rate(wrong)
        assert str(caught.value) == ("the learning rate must be a finite "
                                     f"number, 0 or more; {text}.")
    assert trainer.learning_rate == 0.125
    scheduled = mgpu.Trainer(trainer.replicas, "sgd",
                             lr_scheduler=lambda number: 0.5)
    with pytest.raises(ValueError, match="the learning rate follows the "
                       "trainer's lr_scheduler; received 0.5. Change the "
                       "schedule"):
        scheduled.set_learning_rate(0.5)


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
    for number in range(1, 4):
        before = values(replicas)["2.bias"][0]
        asked.clear()
        train(replicas, trainer, [4])
        assert asked == [number]
        move = (before - values(replicas)["2.bias"][0]) \
            / gradients(replicas)["2.bias"][0] * 4
        # a difference of weights: rounding of 1e-16 over a move of 1e-2
        assert relative_difference(move, np.full(3, 2.0 ** -number)) < 1e-12
    assert trainer.learning_rate == 0.125


class Halving:
    """As MXNet's own: it only goes forward."""

    def __init__(self, step=2, log=None):
        self.step, self.base_lr, self.count = step, 0.5, 0
        self.log = [] if log is None else log

    def __call__(self, number):
        while number > self.count + self.step:
            self.count += self.step
            self.base_lr *= 0.5
        self.log.append(number)
        self.last = np.float32(self.base_lr)
        return self.base_lr


def counting():
    """By calls, in an attribute of a function."""
    def schedule(number):
        schedule.calls += 1
        return 0.5 ** schedule.calls
    schedule.calls = 0
    return schedule


STATEFUL = {
    "halving": Halving, "function": counting,
    "own": lambda: mgpu.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5),
    **({"gluon": lambda: importlib.import_module(
            "mxnet.lr_scheduler").FactorScheduler(2, 0.5, base_lr=0.5)}
       if "mxnet" in BACKENDS else {})}


@pytest.mark.parametrize("kind, how", [
    *zip(STATEFUL, ("file", "checkpoint") * 2)])
def test_a_schedule_goes_back_with_the_states(backend, devices, kind, how,
                                              tmp_path):
    """Also one that changes as it is called; and a look changes nothing."""
    def start():
        replicas = initialize(mlp(backend), devices)
        return replicas, mgpu.Trainer(replicas, "sgd",
                                      lr_scheduler=STATEFUL[kind]())

    def save(replicas, trainer):
        if how == "checkpoint":
            mgpu.save_checkpoint(tmp_path / "x.npz", replicas, trainer)
        else:
            trainer.save_states(tmp_path / "x.npz")

    def load(replicas, trainer):
        if how == "checkpoint":
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
    save(replicas, trainer)
    assert relative_difference(rates(replicas, trainer, 5, look=True),
                               wanted[2:]) < 1e-10
    load(replicas, trainer)
    assert relative_difference(rates(replicas, trainer, 5), wanted[2:]) \
        < 1e-10
    others = start()        # of a resumed process
    load(*others)
    assert relative_difference(rates(*others, 5), wanted[2:]) < 1e-10


def test_options_of_a_schedule_stay_with_the_program(backend):
    """What its calls change goes back only into the schedule that it is of;
    a log that the user has too stays the same list."""
    log = []

    def start(schedule):
        replicas = initialize(mlp(backend), on(0, 1))
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


def test_a_wrong_rate_of_a_schedule_changes_nothing(backend, devices):
    replicas, trainer = sgd(backend, devices)
    before = values(replicas)
    for wrong, error in ((float("nan"), ValueError), (-1.0, ValueError),
                         ("0.1", TypeError), (None, TypeError)):
        trainer.lr_scheduler = lambda n, wrong=wrong: wrong
        with pytest.raises(error, match="what a schedule returns must be"):
            mgpu.train_batch(*batch(8), replicas, LOSS, trainer)
        assert_unchanged(values(replicas), before)
    trainer.lr_scheduler = lambda n: 0.125
    train(replicas, trainer)        # nothing is torn


def test_a_multiplier_that_is_no_number_changes_nothing(backend):
    """Nor does it move a schedule that counts its calls."""
    for which in ("lr_mult", "wd_mult"):
        replicas = initialize(mlp(backend), on(0, 1))
        trainer = mgpu.Trainer(replicas, "sgd", lr_scheduler=counting())
        getattr(trainer, which)["0.bias"] = float("nan")
        before = values(replicas)
        with pytest.raises(ValueError, match=f"{which} of '0.bias' must be a "
                           "finite number; received nan"):
            train(replicas, trainer)
        assert_unchanged(values(replicas), before)
        assert trainer.lr_scheduler.calls == 0
        del getattr(trainer, which)["0.bias"]
        train(replicas, trainer)
