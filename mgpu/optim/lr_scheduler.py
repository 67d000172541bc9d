"""Learning-rate schedules with Gluon's names, arguments and values.

The formulas are those of Gluon 1.9.1 (`mxnet/lr_scheduler.py`). The
difference: here a schedule is a pure function of the number of updates,
where Gluon's objects change as they are called. So a run that is resumed at
update n continues with the rates of an uninterrupted one, and a schedule may
be asked twice, out of order, or by two trainers.

`Trainer` takes any callable ``f(num_update: int) -> float``; these classes
are only the usual ones. `num_update` counts from 1 at the first step.
"""
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from mgpu.utils.arguments import described, integer, number, one_of

__all__ = ["LRScheduler", "FactorScheduler", "MultiFactorScheduler",
           "PolyScheduler", "CosineScheduler"]


class LRScheduler:
    """What the schedules share: a base rate and a warm-up before it.

    A subclass defines `after_warmup`, or `__call__` itself, as in Gluon.

    Parameters
    ----------
    base_lr : float
        The rate at which the schedule proper starts.
    warmup_steps : int
        Updates 0 to ``warmup_steps - 1`` are the warm-up.
    warmup_begin_lr : float
        The rate at update 0; not above `base_lr`.
    warmup_mode : {"linear", "constant"}
        Rise in equal steps towards `base_lr`, or stay at `warmup_begin_lr`.

    Attributes
    ----------
    base_lr : float
        May be set; a trainer that has a learning rate of its own sets it.
        As in Gluon, that moves the start of `FactorScheduler` and
        `MultiFactorScheduler` only: the rate at which a warm-up ends, and
        the start of `PolyScheduler` and `CosineScheduler`, are what the
        constructor was given (`warmup_final_lr`, `base_lr_orig`).

    Raises
    ------
    ValueError
        A negative rate or number of steps, a warm-up that starts above
        `base_lr`, an unknown mode.
    """

    def __init__(self, base_lr: float = 0.01, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear"
                 ) -> None:
        self.base_lr = number("base_lr", base_lr, 0)
        self.warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self.warmup_begin_lr = number("warmup_begin_lr", warmup_begin_lr, 0,
                                      self.base_lr)
        self.warmup_final_lr = self.base_lr
        self.warmup_mode = one_of("warmup_mode", warmup_mode,
                                  ("linear", "constant"))

    def __repr__(self) -> str:
        return described(self)

    def get_warmup_lr(self, num_update: int) -> float:
        """The rate at an update before `warmup_steps`."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        rise = self.warmup_final_lr - self.warmup_begin_lr
        return self.warmup_begin_lr + rise * num_update / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """The rate at an update from `warmup_steps` on. Must depend on
        `num_update` and the options only."""
        raise NotImplementedError("a schedule defines after_warmup")

    def __call__(self, num_update: int) -> float:
        """The learning rate of an update.

        Parameters
        ----------
        num_update : int
            The largest number of updates that any parameter has had, the
            one to come included: 1 at the first step, as in Gluon.

        Raises
        ------
        ValueError
            `num_update` is not an integer of 0 or more.
        """
        num_update = integer("num_update", num_update, 0)
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.after_warmup(num_update)


class FactorScheduler(LRScheduler):
    """Multiply the rate by `factor` after every `step` updates.

    The first change comes with update ``step + 1``. The updates of the
    warm-up count: the first rate after a long one may be reduced already.

    Parameters
    ----------
    step : int
        1 or more.
    factor : float
        From 0 to 1.
    stop_factor_lr : float
        A change that would lead below this rate leads to it, and is the
        last one.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    def __init__(self, step: int, factor: float = 1,
                 stop_factor_lr: float = 1e-8, base_lr: float = 0.01,
                 warmup_steps: int = 0, warmup_begin_lr: float = 0,
                 warmup_mode: str = "linear") -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = integer("step", step, 1)
        self.factor = number("factor", factor, 0, 1)
        self.stop_factor_lr = number("stop_factor_lr", stop_factor_lr, 0)
        # The last answer, from which the next one is reached without going
        # through all changes again: (options, number of changes, rate).
        self._last: tuple[Any, int, float] = (None, 0, 0.0)

    def after_warmup(self, num_update: int) -> float:
        changes = max(0, (num_update - 1) // self.step)
        options = (self.base_lr, self.factor, self.stop_factor_lr)
        # Read and written as one tuple, so that threads cannot mix two.
        last_options, done, lr = self._last
        if last_options != options or done > changes:
            done, lr = 0, self.base_lr
        # One product a change, not a power: the rounding is Gluon's.
        for _ in range(done, changes):
            lower = max(lr * self.factor, self.stop_factor_lr)
            if lower == lr:
                break                   # nothing changes from here on
            lr = lower
        self._last = (options, changes, lr)
        return lr


class MultiFactorScheduler(LRScheduler):
    """Multiply the rate by `factor` after each of the updates in `step`.

    Parameters
    ----------
    step : sequence of int
        Increasing, each 1 or more; the change comes with the next update.
    factor : float
        From 0 to 1.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    def __init__(self, step: Sequence[int], factor: float = 1,
                 base_lr: float = 0.01, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear"
                 ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = [integer("each step", s, 1) for s in step]
        if not step or any(a >= b for a, b in itertools.pairwise(self.step)):
            raise ValueError("step must be a list of one or more integers "
                             f"that increase; received {step!r}.")
        self.factor = number("factor", factor, 0, 1)

    def after_warmup(self, num_update: int) -> float:
        lr = self.base_lr
        for _ in range(bisect_left(self.step, num_update)):
            lr *= self.factor
        return lr


class _Decay(LRScheduler):
    """From `base_lr` at the end of the warm-up down a curve to `final_lr`
    at `max_update`, and `final_lr` from then on."""

    def __init__(self, max_update: int, base_lr: float = 0.01,
                 final_lr: float = 0, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear"
                 ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update = integer("max_update", max_update,
                                  self.warmup_steps + 1)
        self.base_lr_orig = self.base_lr
        self.final_lr = number("final_lr", final_lr, 0)
        self.max_steps = self.max_update - self.warmup_steps

    def curve(self, done: int) -> float:
        """The part of ``base_lr - final_lr`` that is left after `done` of
        `max_steps` updates: 1 at first, 0 at last."""
        raise NotImplementedError

    def after_warmup(self, num_update: int) -> float:
        done = min(num_update, self.max_update) - self.warmup_steps
        return self.final_lr + \
            (self.base_lr_orig - self.final_lr) * self.curve(done)


class PolyScheduler(_Decay):
    """Decay by a power of what is left.

    With w = `warmup_steps` the rate is ::

        final_lr + (base_lr - final_lr)
                   * (1 - (num_update - w) / (max_update - w)) ** pwr

    up to `max_update`, and the last of these values from then on.

    Parameters
    ----------
    max_update : int
        More than `warmup_steps` (Gluon divides by zero, or never decays).
    base_lr : float
    pwr : float
        0 or more.
    final_lr : float
    warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    def __init__(self, max_update: int, base_lr: float = 0.01, pwr: float = 2,
                 final_lr: float = 0, warmup_steps: int = 0,
                 warmup_begin_lr: float = 0, warmup_mode: str = "linear"
                 ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps,
                         warmup_begin_lr, warmup_mode)
        self.power = number("pwr", pwr, 0)

    @property
    def pwr(self) -> float:
        """`power`, as the option is called."""
        return self.power

    def curve(self, done: int) -> float:
        return (1 - done / self.max_steps) ** self.power


class CosineScheduler(_Decay):
    """Decay along half a cosine wave.

    With w = `warmup_steps` the rate is ::

        final_lr + (base_lr - final_lr)
                   * (1 + cos(pi (num_update - w) / (max_update - w))) / 2

    up to `max_update`, and `final_lr` from then on.

    Parameters
    ----------
    max_update : int
        More than `warmup_steps` (Gluon divides by zero, or never decays).
    base_lr, final_lr : float
    warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.

    References
    ----------
    Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm
    restarts", arXiv:1608.03983, without the restarts.
    """

    def curve(self, done: int) -> float:
        return (1 + math.cos(math.pi * done / self.max_steps)) / 2
