"""The search for causes of another update from equal gradients.

A cause of stage "update" is a function ``find(d, rule, other)``. `rule` is
how the side taken for right updates, with the gradients of the other side;
`other` is how that other side, the one with the fault, says that it updates.
The function yields (text, change) for each thing that may differ, where
``change(rule)`` is the rule with that difference. A change whose weights are
those of the side with the fault is a cause.
"""
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from mgpu.collectives.host_memory import HOST_OPS
from mgpu.optim import Optimizer
from mgpu.parity.causes.difference import (PART, Arrays, Difference, View,
                                           as_single, distance)
from mgpu.parity.causes.registry import RULES, Cause
from mgpu.parity.run import velocity_factor


# -- how a side updates -------------------------------------------------------

class Update(NamedTuple):
    """How a side updates its weights in the step, by the names of `a`.

    Attributes
    ----------
    side : View
    optimizer : Optimizer
    rate : float
    lr_mult, wd_mult : dict of str -> float
    gradients : mapping of str -> ndarray
    divisor : float
    slots : dict of (str, str) -> value
        The optimizer's memory before the step.
    last_rate : dict of str -> float
        The rate of each weight in the update before; empty before the first.
    order : list of str
        The weights in the order in which the optimizer gets them.
    decay : str
        Where weight decay is added: by the optimizer's "own" formula, or
        "outside" or "inside" of it.
    repeats : int
        How often each update is made.
    frozen : tuple of str
        Weights that do not move.
    single : bool
        Whether its options are of float32, as in MXNet's own kernels.
    """

    side: View
    optimizer: Optimizer
    rate: float
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    gradients: Arrays
    divisor: float
    slots: dict[tuple[str, str], Any]
    last_rate: dict[str, float]
    order: list[str]
    decay: str = "own"
    repeats: int = 1
    frozen: tuple[str, ...] = ()
    single: bool = False

    def with_options(self, options: Mapping[str, Any],
                     kind: type[Optimizer] | None = None) -> "Update":
        """With an optimizer of class `kind`, and those of `options`, and of
        its own, that this class has."""
        made = as_class(self.optimizer, kind or type(self.optimizer), options)
        return self if made is None else self._replace(optimizer=made)


Change = Callable[[Update], Update]
Changes = Iterator[tuple[str, Change]]


def replaced(**values: Any) -> Change:
    """The change of these fields of `Update`."""
    return lambda rule: rule._replace(**values)


def scaled(factor: float) -> Change:
    """The change of all gradients by a factor."""
    return lambda rule: rule._replace(divisor=rule.divisor / factor)


#: names in Gluon of options that torch calls otherwise
_GLUONS = {"eps": "epsilon", "alpha": "gamma1", "momentum_decay":
           "schedule_decay"}


def as_class(optimizer: Optimizer, kind: type[Optimizer],
             options: Mapping[str, Any]) -> Optimizer | None:
    """An optimizer of class `kind` with `options`, and those of `optimizer`,
    that this class has; None where they exclude each other."""
    given: dict[str, Any] = {}
    options = {**options_of(optimizer), **options}
    for field in fields(kind):
        name = _GLUONS.get(field.name, field.name)
        if field.name == "betas":
            given["betas"] = (options.get("beta1", 0.9),
                              options.get("beta2", 0.999))
        elif name in options:
            given[field.name] = options[name]
    try:
        return kind(**given)
    except (TypeError, ValueError):
        return None


def lost_options(optimizer: Optimizer, kind: type[Optimizer]) -> list[str]:
    """The options of an optimizer that a class does not have, and that are
    not what they are by default."""
    known = {_GLUONS.get(field.name, field.name) for field in fields(kind)}
    return [field.name for field in fields(optimizer)
            if _GLUONS.get(field.name, field.name) not in known
            and not (field.name == "betas" and "beta1" in known)
            and not (field.name in ("beta1", "beta2") and "betas" in known)
            and getattr(optimizer, field.name) != field.default]


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """The options of an optimizer, under one name for both semantics."""
    options = {_GLUONS.get(field.name, field.name):
               getattr(optimizer, field.name) for field in fields(optimizer)}
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    return options


def _as_kernels(rule: Update, t: int) -> tuple[Optimizer, float]:
    """The optimizer with options of float32, and a factor of the rate, whose
    correction by Adam's betas is none of the kernel."""
    own = rule.optimizer
    single = as_class(own, type(own), {
        n: as_single(v) for n, v in options_of(own).items()})
    if single is None:
        return own, 1.0
    one, two = ({"beta1": 0.0, "beta2": 0.0} | options_of(o)
                for o in (own, single))
    if own.family not in ("adam", "adamw"):
        return single, 1.0
    return single, float(
        ((1 - one["beta2"] ** t) / (1 - two["beta2"] ** t)) ** 0.5
        * (1 - two["beta1"] ** t) / (1 - one["beta1"] ** t))


def _update_of(d: Difference, side: View) -> Update:
    """How a side says that it updates."""
    ev, updates, step = d.evidence, side.run.updates, side.step
    names = {n: own for n, own in side.names.items() if own in updates.lr_mult}
    before, mine = ev.before.optimizer, d.a.run.updates
    slots: dict[tuple[str, str], Any] = dict(before.slots)
    if side is d.b and mine.slots == updates.slots:
        slots = {(n, s): v * velocity_factor(
            mine, updates, n, names[n], before.num_update)
            if s == "momentum" else v
            for (n, s), v in before.slots.items() if n in names}
    elif side is d.b:
        slots = dict(ev.earlier[-1][1].after.optimizer.slots) \
            if ev.earlier else {}
    return Update(
        side, updates.optimizer, step.rate,
        {n: updates.lr_mult[own] for n, own in names.items()},
        {n: updates.wd_mult[own] for n, own in names.items()},
        step.gradients, step.divisor, slots,
        {n: updates.last_rate(own, before.num_update)
         for n, own in names.items()} if before.num_update else {},
        sorted(names, key=lambda n: updates.order.index(names[n])
               if names[n] in updates.order else len(updates.order)))


# -- the search ---------------------------------------------------------------

def explain_update(d: Difference) -> list[Cause]:
    """Does one rule explain the weights of both sides, each from its own
    gradients? If not, what was changed?"""
    stage = "weight" if d.wrong("weight") else "memory"
    if not d.wrong(stage) or any(
            type(side.run.updates.optimizer) is Optimizer
            for side in (d.a, d.b)):
        return []       # a rule that is not known is not tried
    search = _Search(d, stage)
    found: list[Cause] = []
    for right, side in d.both_ways():
        if side is d.b or stage == "weight":
            found += search.causes(right, side)
    return found


class _Search:
    """The elements that updates are tried on, and what they became."""

    def __init__(self, d: Difference, stage: str):
        self.d, self.stage = d, stage
        self.updates = {side: _update_of(d, side) for side in (d.a, d.b)}
        names = [n for n in d.scales("weight") if n in d.a.gradients
                 and n in d.b.gradients and n in self.updates[d.b].lr_mult]
        self.parts = {n: self._part(n) for n in names}
        self.scales = {n: s for n, s in d.scales(stage).items()
                       if n in names or stage == "memory"}

    def _part(self, name: str) -> np.ndarray:
        """Which elements of a tensor are tried: all of a small one, and
        where a rule needs it as a whole; of a large one else some, and that
        with the largest difference."""
        apart = np.abs(self.d.a.values[name] - self.d.b.values[name])
        return np.arange(apart.size) if apart.size <= PART or any(
            rule.optimizer.needs_whole for rule in self.updates.values()
        ) else np.append(
            np.random.default_rng(0).integers(0, apart.size, PART),
            apart.argmax())

    def _seen(self, side: View) -> Arrays:
        """The weights, or the memory, of a side after the step."""
        after = side.step.after
        if self.stage == "weight":
            return {n: after.values[n].reshape(-1)[part]
                    for n, part in self.parts.items()}
        return {f"{n}.{s}": self._tried(n, np.asarray(v))
                for (n, s), v in after.optimizer.slots.items()
                if n in self.parts and np.ndim(v)}

    def _tried(self, name: str, x: np.ndarray) -> np.ndarray:
        """The elements of a tensor of a weight that are tried, flat."""
        part, flat = self.parts.get(name, np.arange(0)), x.reshape(-1)
        if part.size and x.shape != self.d.a.values[name].shape:
            return flat         # a number for each row: it is needed whole
        return flat[part]

    def _predicted(self, rule: Update) -> Arrays:
        """The same after an update by `rule`."""
        weights, states = self._move(rule)
        if self.stage == "weight":
            return weights
        memory = {f"{n}.{s}": v for n, state in states.items()
                  if n in weights for s, v in state.items() if np.ndim(v)}
        inside = [type(u.optimizer).rate_in_velocity
                  for u in (self.updates[self.d.a], rule)]
        for n in states:        # in the terms of a, as the memory of b is
            if f"{n}.momentum" in memory and inside[0] != inside[1]:
                rate = -rule.rate * rule.lr_mult.get(n, 1.0)
                memory[f"{n}.momentum"] *= rate if inside[0] else 1 / rate
        return memory

    def _move(self, rule: Update) -> tuple[dict[str, np.ndarray],
                                           dict[str, dict[str, Any]]]:
        """The weights and the memory after an update by `rule`, flat."""
        weights, states = {}, {}
        optimizer, before = rule.optimizer, self.d.evidence.before

        def taken(name: str, x: Any) -> np.ndarray:
            x = np.array(x)
            return x if optimizer.needs_whole else self._tried(name, x)
        # Some rules look at the others: no element of those not tried.
        for name in rule.order:
            w = taken(name, before.values[name])
            if name in self.parts:
                weights[name] = w
            states[name] = optimizer.create_state(w, HOST_OPS)
            for slot, value in states[name].items():
                old = rule.slots.get((name, slot))
                if old is not None:
                    states[name][slot] = taken(name, old) \
                        if np.ndim(value) else float(old)
        counts = {n: before.optimizer.counts.get(n, 0) + 1 for n in states
                  if n in rule.gradients}
        optimizer.begin_step([states[n] for n in rule.order],
                             [counts.get(n) for n in rule.order])
        for name in counts.keys() & weights.keys() - set(rule.frozen):
            w = weights[name]
            g = taken(name, rule.gradients[name]) / rule.divisor
            lr = rule.rate * rule.lr_mult.get(name, 1.0)
            if rule.single:
                optimizer, factor = _as_kernels(rule, counts[name])
                lr *= factor
            wd = optimizer.wd * rule.wd_mult.get(name, 1.0)
            for _ in range(rule.repeats):
                loose = w * (lr * wd) if rule.decay == "outside" else 0.0
                if rule.decay == "inside":
                    g = g + w * wd
                optimizer.update(
                    w, g, states[name], lr=lr, t=counts[name], ops=HOST_OPS,
                    wd=wd if rule.decay == "own" else 0.0)
                w -= loose
        return {n: w.reshape(-1) for n, w in weights.items()}, {
            n: {s: v.reshape(-1) if np.ndim(v) else v
                for s, v in state.items()} for n, state in states.items()}

    def _near(self, x: Arrays, z: Arrays, times: float) -> bool:
        return all(distance(x[n], z[n]) <= times * self.d.tolerance * scale
                   for n, scale in self.scales.items() if n in x and n in z)

    def _as_it_does(self, side: View) -> Update | None:
        """How a side says that it updates, if that gives what it has."""
        for single in (False, True):
            rule = self.updates[side]._replace(single=single)
            if self._near(self._predicted(rule), self._seen(side), 1e3):
                return rule
        return None

    def causes(self, right: View, side: View) -> list[Cause]:
        """The changes of the rule of `right` that explain `side`, else pairs
        of them."""
        own = self._as_it_does(right)
        if own is None:
            return []       # `right` does not do what it says
        rule = own._replace(gradients=side.gradients)
        base, target = self._predicted(rule), self._seen(side)
        if self._near(base, target, 1.0):
            return []       # the gradients explain it all
        other = self._as_it_does(side)
        as_side = rule._replace(single=other is not None and other.single)
        if self.d.residual(base, target, self._predicted(as_side),
                           self.scales) >= self.d.limit:
            rule = as_side  # rounding is not all that differs

        def residual(*changes: Change) -> float:
            changed = rule
            for change in changes:
                changed = change(changed)
            return self.d.residual(base, target, self._predicted(changed),
                                   self.scales)
        single: list[tuple[str, str, Change]] = []
        for resort in (0, 1):
            changes = [(known.name, *found) for known in RULES
                       if (known.stage, known.resort) == ("update", resort)
                       for found in known.find(self.d, rule,
                                               self.updates[side])]
            found = [Cause(name, text, left) for name, text, change in changes
                     if (left := residual(change)) < self.d.limit]
            if found:
                return found
            single += changes
        for (n1, t1, c1), (n2, t2, c2) in itertools.combinations(single, 2):
            if n1 != n2 and (left := residual(c1, c2)) < self.d.limit:
                return [Cause(n1, t1, left), Cause(n2, t2, left)]
        return []
