"""Schedules: the values of Gluon's own objects, from pure functions."""
import copy
import inspect
import itertools
import random

import pytest

import mgpu
from conftest import BACKENDS
from helpers import name_of
from mgpu.optim import lr_scheduler
from mgpu.optim.lr_scheduler import (CosineScheduler, FactorScheduler,
                                     LRScheduler, MultiFactorScheduler,
                                     PolyScheduler)

N = 60

WARMUPS = [
    {},
    {"warmup_steps": 7},
    {"warmup_steps": 7, "warmup_begin_lr": 0.03},
    {"warmup_steps": 9, "warmup_begin_lr": 0.01, "warmup_mode": "constant"},
]
# Rates and factors that are no dyadic numbers, so that a product formed in
# another order would show; max_update below N, so that the end shows too.
SCHEDULES = [
    ("FactorScheduler", {"step": 1, "factor": 0.9}),
    ("FactorScheduler", {"step": 3, "factor": 0.7}),
    ("FactorScheduler", {"step": 4, "factor": 0.3, "stop_factor_lr": 0.02}),
    ("FactorScheduler", {"step": 4, "factor": 0, "stop_factor_lr": 0}),
    ("FactorScheduler", {"step": 2, "factor": 0.5, "stop_factor_lr": 0.5}),
    ("FactorScheduler", {"step": 5}),
    ("MultiFactorScheduler", {"step": [4], "factor": 0.1}),
    ("MultiFactorScheduler", {"step": [1, 2, 11, 12, 30], "factor": 0.7}),
    ("PolyScheduler", {"max_update": 50}),
    ("PolyScheduler", {"max_update": 37, "pwr": 0.9, "final_lr": 0.003}),
    ("PolyScheduler", {"max_update": 10, "pwr": 3, "final_lr": 0.5}),
    ("PolyScheduler", {"max_update": 10, "pwr": 0}),
    ("CosineScheduler", {"max_update": 50}),
    ("CosineScheduler", {"max_update": 37, "final_lr": 0.003}),
]
GRID = [(name, {**options, "base_lr": base_lr, **warmup})
        for name, options in SCHEDULES for base_lr in (0.1, 1 / 3)
        for warmup in WARMUPS]


def make(name, options):
    return getattr(lr_scheduler, name)(**options)


class TestAgainstGluon:
    """Compared with the real objects, called at every update in order. No
    tolerance: the operations are the same, in the same order."""

    __test__ = "mxnet" in BACKENDS      # else there is nothing to compare to

    @pytest.fixture
    def mx(self):
        with mgpu.using_backend("mxnet"):
            import mxnet
            yield mxnet

    def test_every_value(self, mx):
        """Also with the base rate that an optimizer sets."""
        for (name, options), rate in itertools.product(GRID, (None, 0.77)):
            ours = make(name, options)
            theirs = getattr(mx.lr_scheduler, name)(**options)
            if rate is not None:
                mx.optimizer.SGD(learning_rate=rate, lr_scheduler=theirs)
                ours.base_lr = rate
            wanted = [theirs(n) for n in range(N)]
            assert [ours(n) for n in range(N)] == wanted, (name, options)

    def test_arguments(self, mx):
        def arguments(module, name):
            return [(p.name, p.default) for p in inspect.signature(
                getattr(module, name)).parameters.values()]
        for name in lr_scheduler.__all__:
            assert arguments(lr_scheduler, name) \
                == arguments(mx.lr_scheduler, name)


def test_a_value_depends_on_the_update_alone():
    for name, options in GRID:
        in_order = make(name, options)
        wanted = [in_order(n) for n in range(N)]
        updates = list(range(N)) * 2
        random.Random(0).shuffle(updates)
        used = make(name, options)
        assert [used(n) for n in updates] == [wanted[n] for n in updates]
        assert [used(n) for n in range(N)] == wanted
        # A resumed run: a new object, first asked in the middle.
        assert [make(name, options)(n) for n in range(N)] == wanted
        assert [copy.deepcopy(used)(n) for n in range(N)] == wanted
        assert all(type(lr) is float for lr in wanted)
        assert used.base_lr == options["base_lr"]


@pytest.mark.parametrize("scheduler, values", [
    # Computed manually, from update 0 on; all numbers are dyadic, hence exact.
    (FactorScheduler(2, 0.5, 0.25, 1.0), [1, 1, 1, .5, .5, .25, .25, .25]),
    (FactorScheduler(2, 0.5, base_lr=1.0, warmup_steps=4),
     [0, .25, .5, .75, .5, .25, .25]),
    (FactorScheduler(1, base_lr=2), [2, 2, 2]),
    (MultiFactorScheduler([1, 3], 0.5, 1.0), [1, 1, .5, .5, .25, .25]),
    (PolyScheduler(4, 1.0), [1, .5625, .25, .0625, 0, 0]),
    (PolyScheduler(6, 1.0, 1, 0.5, 2, 0.25, "constant"),
     [.25, .25, 1, .875, .75, .625, .5, .5]),
    (CosineScheduler(2, 1.0, 0.5), [1, .75, .5, .5]),
], ids=name_of)
def test_values_by_hand(scheduler, values):
    # cos(pi / 2) is 6e-17 in floating point; the others are exact.
    assert [scheduler(n) for n in range(len(values))] \
        == pytest.approx(values, rel=0, abs=1e-16)


def test_many_updates_cost_nothing():
    """Reached without going through a billion changes one by one (the
    test would not end)."""
    assert FactorScheduler(1, 0.5, 1e-3)(10 ** 9) == 1e-3
    assert FactorScheduler(1)(10 ** 9) == 0.01
    assert FactorScheduler(1, 0.5, 0)(10 ** 9) == 0.0


def test_a_user_defined_schedule():
    class Halves(LRScheduler):
        def after_warmup(self, num_update):
            return self.base_lr / (1 + num_update - self.warmup_steps)

    class Flat(LRScheduler):        # as Gluon's users write it
        def __call__(self, num_update):
            if num_update < self.warmup_steps:
                return self.get_warmup_lr(num_update)
            return self.base_lr

    options = {"base_lr": 1.0, "warmup_steps": 2}
    assert [Halves(**options)(n) for n in range(4)] == [0, .5, 1, .5]
    assert [Flat(**options)(n) for n in range(4)] == [0, .5, 1, 1]


def test_the_base_class_has_no_schedule():
    base = LRScheduler(base_lr=1.0, warmup_steps=2)
    assert base(1) == 0.5
    with pytest.raises(NotImplementedError, match="after_warmup"):
        base(2)


BAD = [
    (lambda: LRScheduler(base_lr=-1), "base_lr must .* received -1"),
    (lambda: LRScheduler(base_lr="0.1"), "base_lr must .* '0.1'"),
    (lambda: LRScheduler(0.1, 1.5), "warmup_steps must .* 1.5"),
    (lambda: LRScheduler(0.1, 5, 0.2), "begin_lr must .* 0.1 or less.* 0.2"),
    (lambda: LRScheduler(warmup_mode="cubic"), "'cubic'.*'linear', 'con"),
    (lambda: FactorScheduler(0), "step must .* 1 or more; received 0"),
    (lambda: FactorScheduler(1, 1.1), "factor must .* 1 or less.* 1.1"),
    (lambda: FactorScheduler(1, 0.5, -1), "stop_factor_lr must .* -1"),
    (lambda: MultiFactorScheduler([]), r"step must be a list .* \[\]"),
    (lambda: MultiFactorScheduler([2, 2]), r"increase.* \[2, 2\]"),
    (lambda: PolyScheduler(0), "max_update must .* 0"),
    (lambda: PolyScheduler(9, pwr=-1), "pwr must .* -1"),
    (lambda: PolyScheduler(5, warmup_steps=5), "max_update .* 6 or more"),
    (lambda: CosineScheduler(9)(-1), "num_update must .* -1"),
]


def test_bad_input_is_refused():
    for make_bad, message in BAD:
        with pytest.raises(ValueError, match=message):
            make_bad()
