"""Causes of another update from equal gradients."""
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mgpu import optimizers
from mgpu.parity.causes.case import (PART, Case, Cause, Found, both_sides,
                                     distance)
from mgpu.parity.causes.gradients import known_factors

_OPS = SimpleNamespace(
    abs=np.abs, sign=np.sign, sqrt=np.sqrt, exp=np.exp, log=np.log,
    maximum=np.maximum, minimum=np.minimum, zeros_like=np.zeros_like)


class _Rule(NamedTuple):
    """How one side updates, by the names of a."""

    side: str
    optimizer: Any
    rate: float
    lr_mult: dict[str, float]
    wd_mult: dict[str, float]
    gradients: dict[str, np.ndarray]
    divisor: float
    slots: dict[tuple[str, str], Any]
    counts: dict[str, int]
    last_rate: dict[str, float]     # of the update before
    decay: str = "own"              # or "outside", "inside" the rule
    repeats: int = 1


def _rule_of(case: Case, side: str) -> _Rule:
    ev, runner, record = (case.evidence, case.runners[side],
                          case.records[side])
    trainer, names = runner.trainer, case.names[side]
    own = {p.name: p for p in runner.replicas.params()}
    names = {n: o for n, o in names.items() if o in own}
    before = ev.before.optimizer
    slots: dict[tuple[str, str], Any] = dict(before.slots)
    if side == "b":
        from mgpu.parity.sides import _momentum_factor
        slots = {}
        if ev.runner_a.slots() == ev.runner_b.slots():
            slots = {(n, s): v * _momentum_factor(
                ev.runner_a, ev.runner_b, n, names[n], before)
                if s == "momentum" else v
                for (n, s), v in before.slots.items() if n in names}
        elif ev.earlier:
            slots = dict(ev.earlier[-1][1].after.optimizer.slots)
    return _Rule(
        side, trainer.optimizer, record.rate,
        {n: trainer.multipliers(own[o])[0] for n, o in names.items()},
        {n: trainer.multipliers(own[o])[1] for n, o in names.items()},
        record.gradients, record.divisor, slots, before.counts,
        {n: runner.last_rate(o, before.num_update)
         for n, o in names.items()} if before.num_update else {})


def _parts(case: Case, names: Iterable[str]) -> dict[str, np.ndarray]:
    """By name, which elements the rules are tried on: all of a small
    tensor, and that with the largest difference."""
    parts = {}
    for name in names:
        size = case.evidence.before.values[name].size
        picked = np.arange(size) if size <= PART else np.append(
            np.random.default_rng(0).integers(0, size, PART),
            np.abs(case.evidence.a.after.values[name]
                   - case.evidence.b.after.values[name]).argmax())
        parts[name] = picked
    return parts


def _move(case: Case, rule: _Rule, parts: Mapping[str, np.ndarray]
          ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights after an update by `rule`, and the memory, flat."""
    weights, states = {}, {}
    for name, part in parts.items():
        w = case.evidence.before.values[name].reshape(-1)[part].copy()
        state = rule.optimizer.create_state(w, _OPS)
        for slot, value in state.items():
            old = rule.slots.get((name, slot))
            if old is not None:
                state[slot] = np.array(old).reshape(-1)[part] \
                    if np.ndim(value) else float(old)
        weights[name], states[name] = w, state
    counts = {n: rule.counts.get(n, 0) + 1 for n in parts}
    order = sorted(states, key=case.runners["a"].trainer.gluon_order())
    rule.optimizer.begin_step([states[n] for n in order],
                              [counts[n] if n in rule.gradients else None
                               for n in order])
    for name, w in weights.items():
        if name not in rule.gradients:
            continue
        g = rule.gradients[name].reshape(-1)[parts[name]] / rule.divisor
        lr = rule.rate * rule.lr_mult.get(name, 1.0)
        wd = rule.optimizer.wd * rule.wd_mult.get(name, 1.0)
        for _ in range(rule.repeats):
            loose = w * (lr * wd) if rule.decay == "outside" else 0.0
            if rule.decay == "inside":
                g = g + w * wd
            rule.optimizer.update(
                w, g, states[name], lr=lr, t=counts[name], ops=_OPS,
                wd=wd if rule.decay == "own" else 0.0)
            w -= loose
    return weights, {f"{n}.{s}": v for n, state in states.items()
                     for s, v in state.items() if np.ndim(v)}


#: options under one name, for those that the two libraries call otherwise
_SAME = {"eps": "epsilon", "alpha": "gamma1", "momentum_decay":
         "schedule_decay"}


def _options_of(optimizer: Any) -> dict[str, Any]:
    options = {}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.name == "betas":
            options["beta1"], options["beta2"] = value
        else:
            options[_SAME.get(field.name, field.name)] = value
    return options


def _with(optimizer: Any, options: Mapping[str, Any],
          kind: type | None = None) -> Any:
    """An optimiser of class `kind` with those of `options` that it has."""
    kind, given = kind or type(optimizer), {}
    for field in fields(kind):
        name = _SAME.get(field.name, field.name)
        if field.name == "betas":
            given["betas"] = (options.get("beta1", 0.9),
                              options.get("beta2", 0.999))
        elif name in options:
            given[field.name] = options[name]
    try:
        return kind(**given)
    except (TypeError, ValueError):     # options that exclude each other
        return optimizer


def _counterpart(optimizer: Any, name: str | None = None) -> type | None:
    """The class of the other semantics, or of the rule `name` in the same
    semantics."""
    for semantics, rules in optimizers._RULES.items():
        for key, kind in rules.items():
            if kind is type(optimizer):
                if name is not None:
                    return rules.get(name)
                other = "torch" if semantics == "gluon" else "gluon"
                return optimizers._RULES[other].get(key)
    return None


Change = tuple[str, str, Callable[[_Rule], _Rule]]


def _other_semantics(rule: _Rule) -> _Rule:
    kind = _counterpart(rule.optimizer)
    if kind is None:
        return rule
    inside = ("SGD", "NAG")
    slots = rule.slots
    if type(rule.optimizer).__name__ in inside:
        slots = {(n, s): -v / rule.last_rate.get(n, 1.0) for (n, s), v
                 in slots.items()}
    elif kind.__name__ in inside:
        slots = {(n, s): -v * rule.last_rate.get(n, 1.0) for (n, s), v
                 in slots.items()}
    return rule._replace(optimizer=_with(
        rule.optimizer, _options_of(rule.optimizer), kind), slots=slots)


def as_single(x: Any) -> Any:
    """A number as float32 keeps it."""
    return float(np.float32(x)) if isinstance(x, float) else x


def _changes(case: Case, rule: _Rule, other: _Rule) -> list[Change]:
    """What a side (that of `other`) may do in another way than `rule`."""
    side, right = case.engine(other.side), case.engine(rule.side)
    mine, yours = map(_options_of, (rule.optimizer, other.optimizer))
    kind = type(rule.optimizer).__name__
    changes: list[Change] = []

    def add(name: str, text: str, change: Callable[[_Rule], _Rule]) -> None:
        changes.append((name, text, change))
    formulas = {
        "rate inside the velocity": (
            "SGD", "NAG", "TorchSGD", "TorchNAG"),
        "Adam epsilon": ("Adam", "AdamW", "TorchAdam", "TorchAdamW")}
    name = next((n for n, kinds in formulas.items() if kind in kinds),
                "optimizer formula")
    text = {
        "rate inside the velocity": (
            "of two sides with momentum one has the learning rate inside "
            "the velocity (Gluon: v <- m v - lr g) and one outside (torch: "
            "w <- w - lr b), which part where the rate changes"),
        "Adam epsilon": (
            "epsilon is added inside the bias correction on one side and "
            "outside on the other (Gluon: sqrt(v) + epsilon, torch: "
            "sqrt(v / (1 - beta2^t)) + eps, 31.6 times less at t = 1)"),
        "optimizer formula": (
            f"Gluon and torch mean other things by {kind}, where epsilon "
            "stands or how weights decay")}[name]
    add(name, f"{text}. Give {side} the semantics of {right}: "
        "semantics='gluon' or 'torch' of Side and mgpu.Trainer for both",
        _other_semantics)
    # weight decay
    wd = max(mine["wd"], yours["wd"])
    one_d = [n for n, k in case.kinds.items() if k != "weight"]
    for which, names in (
            ("biases, gammas and betas", one_d),
            ("biases and betas", [n for n in one_d
                                  if case.kinds[n] != "gamma"])):
        def bare(r: _Rule, names: Sequence[str] = names) -> _Rule:
            return r._replace(wd_mult={
                n: 0.0 if n in names else f for n, f in r.wd_mult.items()})
        if wd and any(rule.wd_mult.get(n) for n in names):
            add("weight decay on biases", (
                f"{side} does not decay {which}, {right} does. Gluon's "
                "Trainer and torch's optimisers decay every parameter: use "
                "wd_mult on mgpu and in Gluon (collect_params('.*bias|"
                ".*gamma|.*beta').setattr('wd_mult', 0)), or parameter "
                "groups with weight_decay=0 on torch"), bare)
    if wd:
        coupled = ("adds weight decay to the gradient (L2) where "
                   f"{right} takes it off the weight (AdamW)")
        loose = ("takes weight decay off the weight (decoupled, AdamW) "
                 f"where {right} adds it to the gradient (L2)")
        advice = ": use adam on both, or adamw on both"
        for decay, words in (("outside", loose), ("inside", coupled)):
            if "NAG" in kind:   # whose velocity holds the decay
                continue
            add("coupled weight decay", f"{side} {words}{advice}",
                lambda r, decay=decay: r._replace(decay=decay))
        for key, words in (("adamw", loose), ("adam", coupled)):
            other_kind = _counterpart(rule.optimizer, key)
            if "Adam" in kind and other_kind not in (
                    None, type(rule.optimizer)):
                add("coupled weight decay", f"{side} {words}{advice}",
                    lambda r, k=other_kind: r._replace(optimizer=_with(
                        r.optimizer, _options_of(r.optimizer), k)))
    # what the gradients are divided by
    rows = case.rows
    before = [pair[0].divisor for pair in case.evidence.earlier[-1:]]
    for divisor in dict.fromkeys((*before, other.divisor)):
        if divisor != rule.divisor:
            add("batch divisor", (
                f"{side} divides the gradients of a batch of {rows} rows by "
                f"{divisor}, {right} by {rule.divisor:g}" + (
                    ": this batch is shorter than the one before. Drop it "
                    "(last_batch='discard' in Gluon, drop_last=True on "
                    "torch), or" if before and before[0] > rows else ":")
                + " divide by the rows of each batch, Trainer.step(rows)"),
                lambda r, d=divisor: r._replace(divisor=d))
    for factor, name, text in known_factors(case):
        if other.side == "a":
            factor = 1 / factor
        if name == "loss reduction" and rule.divisor == other.divisor:
            add(name, (
                f"{side} moves as with gradients {factor:.6g} times those "
                "it shows: it divides by the batch twice, or not at all. "
                "Divide once, in Trainer.step, and not in the loss"),
                lambda r, f=factor: r._replace(divisor=r.divisor / f))
        elif name == "sum or mean over devices":
            add(name, text, lambda r, f=factor: r._replace(
                divisor=r.divisor / f))
    k = case.devices(other.side)
    if k > 1:
        add("aliased replicas", (
            f"{side} moves its weights {k} times, once for each device: its "
            "replicas share their arrays. Clone when replicating "
            "(mgpu.initialize does)"), lambda r: r._replace(repeats=k))
    for factors in ("lr_mult", "wd_mult"):
        if getattr(rule, factors) != getattr(other, factors):
            differ = [n for n in rule.lr_mult
                      if getattr(rule, factors)[n]
                      != getattr(other, factors).get(n)]
            add("multipliers", (
                f"{factors} of {', '.join(differ[:4])} differs: give both "
                f"sides the same {factors} (parameter attributes in Gluon, "
                "parameter groups on torch)"),
                lambda r, f=factors: r._replace(**{f: getattr(other, f)}))
        add("multipliers", f"{side} ignores {factors}, {right} does not",
            lambda r, f=factors: r._replace(**{f: dict.fromkeys(
                getattr(r, f), 1.0)}))
    # the optimisers as they stand
    differ = [n for n in mine if n in yours and mine[n] != yours[n]
              and n != "learning_rate"]
    for names in ([[n] for n in differ] + [differ] * (len(differ) > 1)):
        shown = ", ".join(f"{n} {yours[n]!r} (not {mine[n]!r})" for n in names)
        single = all(isinstance(mine[n], float)
                     and near_as_single(mine[n], yours[n]) for n in names)
        add("float32 hyper-parameters" if single else "optimizer options",
            f"{side} has {shown}, {right} has not: make them equal",
            lambda r, names=tuple(names): r._replace(optimizer=_with(
                r.optimizer, {**_options_of(r.optimizer),
                              **{n: yours[n] for n in names}})))
    if type(other.optimizer) not in (type(rule.optimizer),
                                     _counterpart(rule.optimizer)):
        add("optimizer formula", (
            f"{side} has {other.optimizer!r}, {right} "
            f"{rule.optimizer!r}"), lambda r: r._replace(
                optimizer=other.optimizer, slots=other.slots,
                rate=other.rate))
    if rule.rate != other.rate and not near_as_single(rule.rate, other.rate):
        add("learning rate", (
            f"the rate is {other.rate:g} on {side} and {rule.rate:g} on "
            f"{right}: give both the same learning_rate (lr on torch) and "
            "the same schedule, counted in updates"),
            lambda r: r._replace(rate=other.rate))
    text = (f"{side} keeps learning rate, weight decay or momentum as "
            f"float32, as MXNet's own kernels do, {right} as double: use "
            "values that float32 holds, such as 0.125")
    add("float32 hyper-parameters", text,
        lambda r: r._replace(rate=as_single(r.rate)))
    add("float32 hyper-parameters", text, lambda r: r._replace(
        rate=as_single(r.rate), optimizer=_with(r.optimizer, {
            n: as_single(v) for n, v in _options_of(r.optimizer).items()})))
    if rule.rate != other.rate:
        add("float32 hyper-parameters", text,
            lambda r: r._replace(rate=other.rate))
        if not near_as_single(rule.rate, other.rate):
            changes.pop()
    return changes


def near_as_single(x: float, y: float) -> bool:
    """Whether `x` and `y` are one number but for rounding to float32."""
    return x != y and (as_single(x) == y or as_single(y) == x)


def causes(case: Case) -> Found:
    """Does one rule explain both sides' weights, each from its own
    gradients? If not, what was changed?"""
    ev = case.evidence
    rules = {side: _rule_of(case, side) for side in ("a", "b")}
    stage = "weight" if case.wrong("weight") else "memory"
    if not case.wrong(stage):
        return []
    scales = case.scales(stage)
    names = [n for n in case.scales("weight") if n in ev.a.gradients
             and n in ev.b.gradients and n in rules["b"].lr_mult]
    if stage == "weight":
        scales = {n: s for n, s in scales.items() if n in names}
    parts = _parts(case, names)

    def seen(side: str) -> dict[str, np.ndarray]:
        after = case.records[side].after
        if stage == "weight":
            return {n: after.values[n].reshape(-1)[parts[n]] for n in names}
        return {f"{n}.{s}": np.asarray(v).reshape(-1)[parts[n]]
                for (n, s), v in after.optimizer.slots.items()
                if n in parts and np.ndim(v)}

    def predicted(rule: _Rule) -> dict[str, np.ndarray]:
        moved = _move(case, rule, parts)[stage == "memory"]
        if stage == "memory":   # in the terms of a, as b's record is
            inside = [type(o).__name__ in ("SGD", "NAG") for o in (
                rules["a"].optimizer, rule.optimizer)]
            for key in moved:
                rate = -rule.rate * rule.lr_mult.get(
                    key.rpartition(".")[0], 1.0)
                if key.endswith(".momentum") and inside[0] != inside[1]:
                    moved[key] = moved[key] * (rate if inside[0] else 1 / rate)
        return moved

    def near(x: Mapping[str, np.ndarray], z: Mapping[str, np.ndarray],
             times: float) -> bool:
        return all(distance(x[n], z[n]) <= times * case.tolerance * scales[n]
                   for n in scales if n in x and n in z)
    found: Found = []
    for right, side in both_sides():
        if stage == "memory" and side == "a":
            continue
        # The other rule, on this side's own gradients.
        rule = rules[right]._replace(gradients=case.records[side].gradients)
        base, target = predicted(rule), seen(side)
        if not near(predicted(rules[right]), seen(right), 1e3):
            continue        # not even this side follows its own rule
        if near(base, target, 1.0):
            continue        # the gradients explain it all
        changes = _changes(case, rule, rules[side])
        shown: Found = []
        for name, text, change in changes:
            residual = case.residual(base, target, predicted(change(rule)),
                                     scales)
            if residual < case.limit:
                if stage == "memory" and name == "rate inside the velocity":
                    name, text = "optimizer formula", (
                        f"the velocities of {case.engine('a')} and "
                        f"{case.engine('b')} differ, the weights do not: "
                        "Gluon's NAG keeps the decay of the new weight in "
                        "its velocity, torch's that of the old one. Give "
                        "both sides one semantics=")
                shown.append(Cause(name, text, residual))
        if not shown:
            still = [n for n in scales if distance(
                target[n], ev.before.values[n].reshape(-1)[parts[n]]) == 0
                and distance(base[n], target[n]) > case.tolerance * scales[n]
                ] if stage == "weight" else []
            frozen = {n: ev.before.values[n].reshape(-1)[parts[n]]
                      if n in still else base[n] for n in base}
            if still and case.residual(base, target, frozen,
                                       scales) < case.limit:
                shown.append(Cause("frozen parameter", (
                    f"{', '.join(still[:4])} does not move on "
                    f"{case.engine(side)}: not given to its optimiser, or "
                    "a multiplier of 0"), 0.0))
        if not shown:
            for (n1, t1, c1), (n2, t2, c2) in itertools.combinations(
                    changes, 2):
                if n1 == n2:
                    continue
                residual = case.residual(base, target, predicted(
                    c2(c1(rule))), scales)
                if residual < case.limit:
                    shown += [Cause(n1, t1, residual), Cause(n2, t2, residual)]
                    break
        found += shown
    return found
