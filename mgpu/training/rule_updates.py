"""Updates by the rules of `mgpu.optimizers`."""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from mgpu import backends, optim
from mgpu.backends import Backend
from mgpu.backends.native_objects import (Memory, OptimizerGroup,
                                          OptimizerObject, Step)
from mgpu.backends.types import Array
from mgpu.collectives import host_memory
from mgpu.collectives.host_memory import Update
from mgpu.compat.gluon import replaces_base_lr, rule_options
from mgpu.optim import RULES, Optimizer
from mgpu.optim.schedule_state import Schedule, rate_of
from mgpu.training.replicas import Replicas


class RuleUpdates(OptimizerObject):
    """An optimizer of mgpu and its states, as a `Trainer` steps them.

    Parameters
    ----------
    rule : Optimizer
    backend : Backend
    scale : float
        Gluon's ``rescale_grad``.
    schedule : callable, optional

    Attributes
    ----------
    fixed : sequence of str
        Parameters whose MXNet updates change only Nadam's schedule.
    """

    def __init__(self, rule: Optimizer, backend: Backend, scale: float,
                 schedule: Schedule | None) -> None:
        super().__init__(rule)
        self.semantics, self.scale = rule.semantics, scale
        self.schedule = schedule
        self.fixed: Sequence[str] = ()
        self._backend = backend
        self._states: dict[str, optim.State] = {}
        #: checked options of the rule, and the slots of its states
        self._options: dict[str, Any] = {}
        self._slots: tuple[str, ...] = ()

    @property
    def learning_rate(self) -> float:
        return float(self.object.learning_rate)

    def set_learning_rate(self, rate: float) -> None:
        self.object.learning_rate = rate

    def groups(self) -> list[OptimizerGroup]:
        rule = self.object
        return [OptimizerGroup(None, rule.family if rule.built_in else None,
                               dict(vars(rule)))]

    # -- a step -------------------------------------------------------------

    def step(self, step: Step) -> None:
        rule, ops = self.object, self._backend.ops
        if rule.built_in and vars(rule) != self._options:
            self._check_options(rule)
        for name, x in step.arrays.items():
            if name not in self._states:
                self._states[name] = rule.create_state(x, ops)
        rate = rule.learning_rate if self.schedule is None \
            else rate_of(self.schedule, step.number)
        work = []
        for name, x in step.arrays.items():
            lr_mult, wd_mult = step.factors[name]
            if rule.divides_by_rate:
                rule.check_rate(rate * lr_mult)
            work.append(Update(name, x, self._backend.grad(x), rate * lr_mult,
                               rule.wd * wd_mult, step.counts[name]))
        # All states and rates exist: from here on weights change.
        if type(rule).begin_step is not Optimizer.begin_step:
            self._begin_step(step.counts)
        if rule.elementwise and host_memory.update(
                self._backend, rule, work, self._states, step.scale,
                step.loss_scale):
            return
        for one in work:
            gradient = one.gradient
            if step.loss_scale != 1.0:
                # A separate division: MXNet parses numbers from text, and
                # does not read every quotient of two exactly.
                gradient = gradient / step.loss_scale
            rule.update(one.weight, gradient * step.scale,
                        self._states[one.name], lr=one.lr, wd=one.wd,
                        t=one.t, ops=ops)

    def _check_options(self, rule: Optimizer) -> None:
        """Handle options of the rule that the user has changed."""
        rule.__post_init__()
        slots = rule.slots()
        if self._states and slots != self._slots:
            raise ValueError(
                "an optimizer keeps the same state arrays from its first "
                f"update; received {rule!r} with {[*slots]}, but the state "
                f"has {[*self._slots]}. Make a new Trainer.")
        self._options, self._slots = dict(vars(rule)), slots

    def _begin_step(self, counts: Mapping[str, int]) -> None:
        # All parameters: the order must not depend on a trainer's subset.
        if counts:
            counts = {**counts, **dict.fromkeys(self.fixed,
                                                -max(counts.values()))}
        self.object.begin_step(
            [self._states.get(name, {}) for name in self.order],
            [counts.get(name) if name in self._states else None
             for name in self.order])

    # -- states -------------------------------------------------------------

    def memory(self) -> Memory:
        backend = self._backend
        return {(name, slot): backend.to_numpy(x) if backend.is_native(x)
                else np.array(x) for name, state in self._states.items()
                for slot, x in state.items()}, {}

    def load(self, memory: Memory, arrays: Mapping[str, Array]) -> None:
        (slots, counts), backend = memory, self._backend
        self._options, self._slots = {}, self.object.slots()
        with backend.scope(recording=False):
            self._states = {name: self.object.create_state(
                arrays[name], backend.ops) for name in counts}
            for name, state in self._states.items():
                for slot, x in state.items():
                    if backend.is_native(x):
                        x[...] = backend.put(slots[name, slot], x)
                    else:
                        state[slot] = slots[name, slot].item()

    def fit(self, saved: Sequence[Mapping[str, Any]] | None, rate: float
            ) -> Callable[[], None]:
        if len(saved or ()) > 1:
            raise ValueError(
                "expected the states of one group of parameters for each "
                f"group; received those of {len(saved or ())} groups of an "
                "optimizer object. Give the Trainer such an object.")
        return partial(self.set_learning_rate, rate)


def updates_of(replicas: Replicas, optimizer: Any, options: dict[str, Any],
               semantics: str, schedules: Sequence[Any]) -> OptimizerObject:
    """Make the updates of the network of `replicas` from the arguments of a
    `Trainer`; `schedules`: the ones it was given."""
    schedule: Any = schedules[0] if schedules else None
    if not (schedule is None or callable(schedule)):
        raise TypeError(
            "lr_scheduler must be callable with an update number; received "
            f"{type(schedule).__name__}. Use mgpu.lr_scheduler, or a "
            "function: lambda n: 0.1 * 0.5 ** (n // 100). For a "
            "torch schedule, pass its optimizer object to the Trainer, and "
            "step the schedule as in torch.")
    if isinstance(optimizer, type):
        raise TypeError(
            "expected an optimizer's name, or an object; received the class "
            f"{optimizer.__qualname__}. Pass an instance of it.")
    is_rule = isinstance(optimizer, Optimizer)
    known = None if is_rule or isinstance(optimizer, str) \
        else backends.given(optimizer)
    own = None if known is None else known.optimizer(
        optimizer, replicas.network)
    if options and (is_rule or own is not None):
        raise ValueError("optimizer_params require an optimizer's name; "
                         f"received {sorted(options)} with an Optimizer "
                         "object.")
    if len(schedules) > 1 or schedules and own is not None and (
            own.schedule is not None or not own.takes_schedule):
        raise ValueError(
            "expected one lr_scheduler; received one as an argument and one "
            "in optimizer_params or in the optimizer object, whose groups "
            "may have its rates. Pass one of them; step a torch "
            "schedule as in torch.")
    if own is not None:
        if schedules:
            own.schedule = schedule
        return own
    scale = 1.0
    replaces = is_rule or "learning_rate" in options or "lr" in options
    if not is_rule:
        if semantics == "gluon":
            scale, options = rule_options(optimizer, options, {
                p.name: p.dtype for p in replicas.params()})
        optimizer = optim.create(optimizer, semantics, **options)
        if semantics == "gluon":
            replaces = replaces_base_lr(optimizer.family, replaces)
    if hasattr(schedule, "base_lr"):
        # Gluon: an explicit rate replaces the schedule's own, and so does
        # the default rate of some optimizers.
        if replaces:
            schedule.base_lr = optimizer.learning_rate
        else:
            optimizer.learning_rate = schedule.base_lr
    return RuleUpdates(optimizer, replicas.backend, scale, schedule)


def rule_of(own: OptimizerObject) -> Optimizer:
    """`own` as a rule of mgpu, with its current options. Raises ValueError
    for an optimizer object whose formula mgpu does not have, or whose groups
    have different formulas."""
    if isinstance(own.object, Optimizer):
        return own.object
    (_, family, options), *others = own.groups()
    rule = RULES[own.semantics].get(family or "")
    if rule is None or any(one[1:] != (family, options) for one in others):
        raise ValueError(
            "expected an optimizer whose formula mgpu has, with one set of "
            f"options; received {own.object!r}. Pass a name and "
            "optimizer_params.")
    known = {field.name for field in fields(rule)}
    return rule(**{name: x for name, x in options.items() if name in known})
