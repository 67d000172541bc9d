"""Formulas of the frameworks that differ, put in for each other.

Gluon's and PyTorch's optimizers and their clipping compute other things in
places. Where a side takes steps of the user's own, such a difference is no
mistake of the port: it is proven by computing one side's update, from that
side's own gradients, with the other's formula.
"""
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends.probing import AVERAGE
from mgpu.checkpoints.trainer_states import TrainerStates
from mgpu.collectives.host_memory import HOST_OPS
from mgpu.optim import Optimizer, counterpart
from mgpu.optim.gluon_rules import COMPILED
from mgpu.parity.causes.update_search import as_class, lost_options, options_of
from mgpu.parity.live import LiveRun
from mgpu.parity.measure import Gap
from mgpu.parity.own import OwnRun, Update
from mgpu.parity.run import (Arrays, Run, State, StepResult, common_factor,
                             norms_left, rate_outside_velocity, translate)

#: stages that another formula of the update or of clipping explains
_STAGES = {"clipping", "weight", "memory"}
#: what makes all that follows differ
_FORWARD = {"initial", "output", "prediction"}
#: a share of a limit that is rounding
_ROUNDING = 1e-10


class _Way(NamedTuple):
    """A formula of updates, and whether its numbers are rounded to float32,
    as MXNet's own optimizers do."""

    kind: type[Optimizer]
    single: bool


class Formulas:
    """Finds formulas that explain all differences of a step.

    Parameters
    ----------
    comparison : mgpu.parity.comparison.Comparison

    Attributes
    ----------
    found : dict of str -> dict
        See `mgpu.parity.result.Result.formulas`, by "text".
    """

    def __init__(self, comparison: Any) -> None:
        self._work = comparison
        self._runs: tuple[Run, Run] = comparison.a, comparison.b
        self._able = any(isinstance(run, OwnRun) for run in self._runs)
        self.found: dict[str, dict[str, Any]] = {}

    def explain(self, number: int, X: Any, y: Any, before: State,
                one: StepResult, two: StepResult, gaps: list[Gap]
                ) -> list[Gap]:
        """`gaps`, with the status "formula" in the place of "different" if
        formulas explain all of them."""
        wrong = {g.stage for g in gaps if g.status == "different"}
        if self._able and wrong & {"output", "loss", "gradient"} and all(
                step.own and step.own.passes > 1 for step in (one, two)):
            return self._by_replay(number, X, y, before, one, two, gaps)
        if not self._able or wrong & _FORWARD:
            return gaps
        #: by text: the size of a formula, and which gaps it explains
        proven: dict[str, tuple[float, Callable[[Gap], bool]]] = {}
        clipped = "clipping" in wrong
        if wrong & _STAGES and "gradient" not in wrong \
                and (not clipped or self._clip_alike(one, two)):
            # Where rates differ, so does whatever they are multiplied with.
            sizes, explains = self._by_formulas(
                before, one, two, clipped) if "rate" not in wrong else (
                    None, lambda g: False)
            if clipped:
                proven[_CLIPPING] = max(
                    g.relative for g in gaps if g.stage == "clipping"), \
                    lambda g: g.stage == "clipping" or explains(g)
            proven |= {text: (size, explains)
                       for text, size in (sizes or {}).items()}
        if "statistic" in wrong:
            proven |= {
                text: (size, lambda g: g.stage == "statistic") for text, size
                in self._statistics(before, one, two, gaps).items()}
        explained = {
            i for i, g in enumerate(gaps) if g.status == "different"
            and any(holds(g) for _, holds in proven.values())}
        names = {gaps[i].name for i in explained}
        explained |= {
            i for i, g in enumerate(gaps) if g.status == "different"
            and _averaged(g) in names and self._follow(
                _averaged(g), before, one, two)}
        return self._named(gaps, {text: size for text, (size, _)
                                  in proven.items()}, explained)

    # -- clipping -----------------------------------------------------------

    def _clip_alike(self, one: StepResult, two: StepResult) -> bool:
        """Whether both sides clip to one norm, each by its own formula:
        ``factor (norm + epsilon)`` is the limit."""
        limits = []
        for run, step, other in zip(self._runs, (one, two), (two, one)):
            if any(g.any() for n, g in step.gradients.items()
                   if n not in other.gradients):
                return False    # one side does not update it
            if not isinstance(run, OwnRun) or step.own is None:
                return False
            factor = common_factor(step.own.left, step.gradients)
            if factor is None:
                return False
            # as the code sees them: what optimizers multiply by comes after
            limits.append([(norm, factor * (
                norm / step.own.scale + epsilon) * step.own.scale)
                for norm in norms_left(step)
                for epsilon in (run.parts.clip_epsilon, 0.0)])
        # code of the user's own that clips may add nothing to the norm
        return any(np.isclose(norm, other, rtol=1e-6, atol=0)
                   and np.isclose(x, z, rtol=_ROUNDING, atol=0)
                   for norm, x in limits[0] for other, z in limits[1])

    # -- the update ---------------------------------------------------------

    def _by_formulas(self, before: State, one: StepResult,
                     two: StepResult, clipped: bool
                     ) -> tuple[dict[str, float] | None,
                                Callable[[Gap], bool]]:
        """How large a difference each formula makes between the updates of
        both sides, from equal gradients, and whether they explain a gap;
        None if one side does not do what its optimizer says."""
        ways, nothing = self._ways(), (None, lambda g: False)
        if not ways:
            return nothing
        scales = [s.own.scale if s.own else 1 / s.divisor for s in (one, two)]
        gradients = one.gradients

        def moved(kind: type[Optimizer], single: bool, scale: float
                  ) -> StepResult:
            return self._moved(before, two, _Way(kind, single), gradients,
                               scale)
        if not self._near(one, moved(*ways[0], scales[0])) \
                or not self._near(two, self._moved(
                    before, two, ways[1], two.gradients, scales[1])):
            return nothing
        kind, single = ways[0]
        sizes = {name: size for name, x, z in (
            (_name(kind), moved(kind, False, scales[0]),
             moved(ways[1].kind, False, scales[0])),
            (_SINGLE, moved(kind, single, scales[0]),
             moved(kind, ways[1].single, scales[1])))
            if (size := self._apart(x, z)) > self._work.tolerance}
        if clipped:     # each by its own formula
            factor = common_factor(one.gradients, two.gradients) or 1.0
            gradients = {n: g * factor for n, g in gradients.items()}
        # What is left comes from gradients that agree up to rounding.
        other = moved(*ways[1], scales[1])

        def explains(g: Gap) -> bool:
            x, z = _tensor(g, two), _tensor(g, other)
            return x is not None and z is not None \
                and self._gap(x, z) <= self._work.tolerance
        return sizes, explains

    def _ways(self) -> list[_Way]:
        """The formulas of both sides; none where they are not forms of one
        with equal options."""
        rules = [run.updates.optimizer for run in self._runs]
        ways = [_Way(type(rule), isinstance(run, OwnRun)
                     and run.backend.semantics == "gluon"
                     and rule.family in COMPILED)
                for run, rule in zip(self._runs, rules)]
        if "" in (kind.family for kind, _ in ways) or ways[0].kind not in (
                ways[1].kind, counterpart(ways[1].kind,
                                          ways[0].kind.semantics)) \
                or lost_options(rules[1], ways[0].kind) \
                or lost_options(rules[0], ways[1].kind):
            return []
        return ways

    def _moved(self, before: State, step: StepResult, way: _Way,
               gradients: Arrays, scale: float) -> StepResult:
        """The step of `b` in terms of `a`, updated by `way`, which is told
        to multiply gradients by `scale`."""
        a, b = self._runs
        plan = self._work.plan
        start = translate(before, plan, a, b)
        divisor = step.divisor * _rounded(scale, way)
        after = self._updated(
            start, {n: g / divisor for n, g in plan.to_b(gradients).items()},
            way, lambda n: b.updates.last_rate(
                n, step.after.optimizer.num_update),
            lambda n: b.updates.last_rate(n, start.optimizer.num_update))
        memory: TrainerStates = step.after.optimizer._replace(
            slots=after.optimizer.slots, counts=after.optimizer.counts)
        return StepResult([], np.zeros(0), {}, translate(
            State(after.values, memory), plan.inverse(), b, a))

    def _updated(self, start: State, grads: Arrays, way: _Way,
                 now: Callable[[str], float], last: Callable[[str], float]
                 ) -> State:
        """A state of `b`, updated by `way` with divided gradients and the
        rates `now`; `last`: those of the update before."""
        b = self._runs[1]
        rule = b.updates.optimizer
        # Gluon's code has the options themselves, its kernel not.
        optimizer = _by(rule, way)
        exactly = _by(rule, way._replace(single=False))
        values = dict(start.values)
        slots = {key: x for key, x in start.optimizer.slots.items()
                 if key[1] != AVERAGE}      # which no optimizer moves
        counts = dict(start.optimizer.counts)
        outside = [rate_outside_velocity(k) for k in (type(rule), way.kind)]
        states, moving = {}, [n for n in b.updates.order if n in grads]
        for name in moving:
            values[name] = values[name].copy()
            state = optimizer.create_state(values[name], HOST_OPS)
            factor = 1.0
            if outside[0] != outside[1] and counts.get(name):
                rate = last(name)
                factor = -rate if not outside[1] else -1 / rate if rate else 0
            for slot, value in state.items():
                old = slots.get((name, slot))
                if old is not None:
                    state[slot] = old * factor if np.ndim(value) \
                        else float(old)
            states[name] = state
            counts[name] = counts.get(name, 0) + 1
        optimizer.begin_step([states[n] for n in moving],
                             [counts[n] for n in moving])
        single = np.float32 if way.single else float
        for name in moving:
            wd = rule.wd * b.updates.wd_mult[name]
            exact, bias = (_bias(x, counts[name])
                           for x in (exactly, optimizer))
            optimizer.update(
                values[name], grads[name],
                states[name], lr=float(single(now(name) * exact)) / bias,
                wd=float(single(wd)), t=counts[name], ops=HOST_OPS)
        for name, state in states.items():
            factor = 1.0
            if outside[0] != outside[1]:    # as `b` keeps it
                rate = now(name)
                factor = -rate if outside[1] else -1 / rate if rate else 0.0
            slots.update({(name, slot): np.asarray(value) * (
                factor if slot == "momentum" else 1.0)
                for slot, value in state.items()})
        return State(values, start.optimizer._replace(slots=slots,
                                                      counts=counts))

    # -- several updates in a step ------------------------------------------

    def _by_replay(self, number: int, X: Any, y: Any, before: State,
                   one: StepResult, two: StepResult, gaps: list[Gap]
                   ) -> list[Gap]:
        """As `explain`, where what follows an update in a step starts from
        other weights. The step of `b` is taken again with updates computed
        here: by its own formula all must come out as it did, by that of `a`
        as it is on `a`."""
        ways = self._ways()
        if not ways:
            return gaps
        exact = [way._replace(single=False) for way in ways]
        taken = {way: self._replayed(number, X, y, before, one, two, way)
                 for way in dict.fromkeys((exact[0], exact[1], *ways))}
        other, same = (taken[way] for way in ways)
        left = [[g for g in self._work.compare_results(number, *pair)
                 if g.status == "different"]
                for pair in ((two, same), (one, other))]
        statistics = self._statistics(before, one, other, left[1]) \
            if any(g.stage == "statistic" for g in left[1]) else {}
        if left[0] or any(g.stage != "statistic" or not statistics
                          for g in left[1]):
            return gaps
        for text, pairs in ((_name(ways[0].kind), [exact]), (
                _SINGLE, zip(exact, ways))):
            size = max(self._apart(taken[x], taken[z]) for x, z in pairs)
            if size > self._work.tolerance:
                statistics[text] = size
        return self._named(gaps, statistics, [
            i for i, g in enumerate(gaps) if g.status == "different"])

    def _replayed(self, number: int, X: Any, y: Any, before: State,
                  one: StepResult, two: StepResult, way: _Way) -> StepResult:
        """The step of `b` with updates by `way`, in terms of `a`."""
        b, plan = self._runs[1], self._work.plan
        assert isinstance(b, OwnRun) and one.own and two.own
        mine, yours = one.own, two.own
        partners = {n: pair.a[0] for pair in plan.pairs for n in pair.b}

        def scale(name: str) -> float:
            return mine.scales.get(partners.get(name, name), mine.scale) \
                if way.single and not yours.scales else yours.scales.get(
                    name, yours.scale)

        def instead(update: Update) -> State:
            start = update.before
            return self._updated(
                start, {n: g / _rounded(scale(n), way)
                        for n, g in update.gradients.items()}, way,
                update.rates.__getitem__,
                lambda n: update.last[n] if n in update.last
                else b.updates.last_rate(n, start.optimizer.num_update))
        rule = b.updates
        self._work.load_b(before)
        b.instead = instead
        try:
            found = b.step(X, y, number, predict=False)
        finally:
            b.instead, b.updates = None, rule
        return self._work.in_terms_of_a(found)

    def _named(self, gaps: list[Gap], sizes: dict[str, float],
               explained: Iterable[int]) -> list[Gap]:
        """`gaps`, of which some are explained by formulas of these sizes."""
        which = set(explained) if sizes else set()
        for text, size in sizes.items() if which else ():
            known = self.found.setdefault(text, {"text": text, "size": 0.0})
            known["size"] = max(known["size"], size)
        return [g._replace(status="formula") if i in which else g
                for i, g in enumerate(gaps)]

    # -- what both have in common -------------------------------------------

    def _near(self, step: StepResult, moved: StepResult) -> bool:
        return self._apart(step, moved) <= self._work.tolerance

    def _apart(self, step: StepResult, moved: StepResult) -> float:
        """How far the weights and the memory of a step are from `moved`."""
        names = {e.name for e in self._runs[0].entries if not e.is_statistic}
        mine, yours = step.after, moved.after
        return max(itertools.chain(
            (self._gap(mine.values[n], yours.values[n])
             for n in names & yours.values.keys()),
            (self._gap(mine.optimizer.slots[key], x)
             for key, x in yours.optimizer.slots.items()
             if key in mine.optimizer.slots)), default=0.0)

    def _gap(self, x: Any, z: Any) -> float:
        return self._work.single_gap(0, "", "", x, z).relative \
            if np.ndim(x) else 0.0

    def _follow(self, name: str, before: State, *steps: StepResult) -> bool:
        """Whether the averages of both sides move by one share of the way
        from the old average to the new value."""
        slots = [state.optimizer.slots for state in (
            before, *(step.after for step in steps))]
        if any((name, AVERAGE) not in own for own in slots):
            return False
        old, *after = (own[name, AVERAGE] for own in slots)
        (mine, own), (yours, other) = (
            (np.ravel(step.after.values[name] - old), np.ravel(x - old))
            for step, x in zip(steps, after))
        share = float(yours @ other) / (float(yours @ yours) or 1.0)
        return all(self._gap(np.ravel(x), np.ravel(old) + share * way)
                   <= self._work.tolerance
                   for x, way in zip(after, (mine, yours)))

    # -- running statistics -------------------------------------------------

    def _statistics(self, before: State, one: StepResult, two: StepResult,
                    gaps: list[Gap]) -> dict[str, float]:
        """How large a difference the formulas make with which the running
        statistics of both sides come from one batch; none if they do not."""
        a, b = self._runs
        found: dict[str, float] = {}
        wrong = {g.name for g in gaps
                 if g.stage == "statistic" and g.status == "different"}
        pairs = {pair.a[0]: pair.b[0] for pair in self._work.plan.pairs}
        keep = [{name: (layer, layer.options["momentum"]) for layer
                 in run.layers if layer.kind == "batch_norm"
                 for name in layer.parameters} for run in (a, b)]
        for name in wrong:
            if name not in keep[0] or pairs.get(name) not in keep[1]:
                return {}
            momenta = [own[n][1] for own, n in zip(
                keep, (name, pairs[name]))]
            if None in momenta:
                return {}
            exact = [float(np.float32(m)) if _is_gluons(run) else m
                     for m, run in zip(momenta, (a, b))]
            x, z = ((step.after.values[name] - m * before.values[name])
                    / (1 - m) for m, step in zip(exact, (one, two)))
            ratio = 1.0
            if name.endswith("var"):
                factors = [_unbiased(run, step, n) for run, step, n in zip(
                    (a, b), (one, two), (name, pairs[name]))]
                ratio = factors[1] / factors[0]
            tolerance = self._work.tolerance / (1 - exact[0])
            if momenta[0] != momenta[1] or not np.allclose(
                    x * ratio, z, rtol=tolerance,
                    atol=tolerance * float(np.abs(z).max(initial=0.0))):
                return {}
            old, new = before.values[name], two.after.values[name]
            for text, size in (
                    (_UNBIASED, self._gap(new, new - z * (1 - exact[1])
                                          * (1 - 1 / ratio))),
                    (_MOMENTUM, self._gap(new, new + (old - z)
                                          * (exact[0] - exact[1])))):
                if size > self._work.tolerance:
                    found[text] = max(size, found.get(text, 0.0))
        return found


def _tensor(gap: Gap, step: StepResult) -> Any:
    """What a gap of weights or memory is about, in a step; None where there
    is no such tensor."""
    if gap.stage == "weight":
        return step.after.values[gap.name]
    if gap.stage != "memory":
        return None
    name, _, slot = gap.name.rpartition(".")
    return step.after.optimizer.slots.get((name, slot))


def _averaged(gap: Gap) -> str:
    """The name of the value of whose average a gap is, or ""."""
    name, _, slot = gap.name.rpartition(".")
    return name if gap.stage == "memory" and slot == AVERAGE else ""


def _is_gluons(run: Run) -> bool:
    return isinstance(run, LiveRun) and run.backend.semantics == "gluon"


def _unbiased(run: Run, step: StepResult, name: str) -> float:
    """What a side multiplies the variance of a batch by: n / (n - 1) in
    torch's own code."""
    count = step.own.counts.get(name, 0) if step.own else 0
    return count / (count - 1) if count > 1 and isinstance(run, OwnRun) \
        and run.backend.semantics == "torch" else 1.0


_SINGLE = "MXNet's optimizers round rates and options to float32"
_CLIPPING = ("clipping by the global norm: Gluon adds 1e-8 to the norm, "
             "PyTorch 1e-6")
_UNBIASED = ("batch norm: PyTorch keeps the unbiased variance, n / (n - 1) "
             "times that of the batch, Gluon the batch's own")
_MOMENTUM = "batch norm: MXNet reads the momentum as float32"
_NAMES = {
    **dict.fromkeys(("sgd", "nag"), "momentum: Gluon keeps the rate inside "
                    "the velocity, PyTorch outside, which differ where the "
                    "rate changes"),
    "adam": "Adam's epsilon: Gluon adds it outside of the bias correction, "
    "PyTorch inside"}


def _name(kind: type[Optimizer]) -> str:
    """What the two forms of an optimizer are called."""
    return _NAMES.get(kind.family, "another formula of Gluon's and PyTorch's "
                      f"{kind.family}")


def _rounded(scale: float, way: _Way) -> float:
    """What a scale is divided by where it becomes float32."""
    return scale / float(np.float32(scale)) if way.single else 1.0


def _bias(optimizer: Optimizer, t: int) -> float:
    """What Gluon's own code multiplies the rate of Adam by, before it hands
    the product on."""
    if type(optimizer).family == "adam" and optimizer.semantics == "gluon":
        beta1, beta2 = optimizer.beta1, optimizer.beta2  # type: ignore
        return float(np.sqrt(1 - beta2 ** t) / (1 - beta1 ** t))
    return 1.0


def _by(rule: Optimizer, way: _Way) -> Optimizer:
    """`rule` with the formula of `way`, and equal options."""
    own = {} if not way.single else {
        name: float(np.float32(x)) for name, x in options_of(rule).items()
        if type(x) is float}
    return as_class(rule, way.kind, own) or rule
