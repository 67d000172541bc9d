"""Formulas of the frameworks that differ, put in for each other.

Gluon's and PyTorch's optimisers and their clipping compute other things in
places. Where a side takes steps of the user's own, such a difference is no
mistake of the port: it is proven by computing one side's update, from that
side's own gradients, with the other's formula.
"""
from typing import Any, NamedTuple

import numpy as np

from mgpu.optimizers import Optimizer, counterpart
from mgpu.parity.causes.update_search import (OPS, as_class,
                                              options_of)
from mgpu.parity.measure import Gap
from mgpu.parity.own import OwnRun
from mgpu.parity.run import (Arrays, Run, State, StepResult, common_factor,
                             rate_outside_velocity, translate)
from mgpu.trainer_states import TrainerStates

#: stages that another formula of the update or of clipping explains
_STAGES = {"clipping", "weight", "memory"}
#: what makes all that follows differ
_FORWARD = {"initial", "output", "prediction"}
#: a share of a limit that is rounding
_ROUNDING = 1e-10


class _Way(NamedTuple):
    """A formula of updates, and whether its numbers are rounded to float32,
    as MXNet's own optimisers do."""

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

    def explain(self, number: int, before: State, one: StepResult,
                two: StepResult, gaps: list[Gap]) -> list[Gap]:
        """`gaps`, with the status "formula" in the place of "different" if
        formulas explain all of them."""
        wrong = {g.stage for g in gaps if g.status == "different"}
        if not self._able or wrong & _FORWARD:
            return gaps
        proven: dict[str, tuple[str, ...]] = {}     # stages by text
        clipped = "clipping" in wrong
        if wrong & _STAGES and not wrong & {"gradient", "rate"} \
                and (
                    not clipped or self._clip_alike(one, two)):
            names = self._by_formulas(number, before, one, two, clipped)
            proven |= dict.fromkeys(names or (), ("weight", "memory"))
            if clipped and names is not None:
                proven[_CLIPPING] = "clipping", "weight", "memory"
        if "statistic" in wrong:
            proven |= dict.fromkeys(self._statistics(
                before, one, two, gaps), ("statistic",))
        for text, stages in proven.items():
            size = max((g.relative for g in gaps if g.stage == stages[0]
                        and g.status == "different"), default=0.0)
            known = self.found.setdefault(text, {"text": text, "size": 0.0})
            known["size"] = max(known["size"], size)
        explained = {stage for stages in proven.values() for stage in stages}
        return [g._replace(status="formula") if g.status == "different"
                and g.stage in explained else g for g in gaps]

    # -- clipping -----------------------------------------------------------

    def _clip_alike(self, one: StepResult, two: StepResult) -> bool:
        """Whether both sides clip to one norm, each by its own formula:
        ``factor (norm + epsilon)`` is the limit."""
        limits = []
        for run, step in zip(self._runs, (one, two)):
            if not isinstance(run, OwnRun) or step.own is None:
                return False
            factor = common_factor(step.own.left, step.gradients)
            if factor is None:
                return False
            # as the code sees them: what optimisers multiply by comes after
            norm = np.sqrt(sum(float(np.vdot(g, g)) for g
                               in step.own.left.values())) \
                / (step.divisor * step.own.scale)
            limits.append(factor * (norm + run.parts.clip_epsilon)
                          * step.own.scale)
        return bool(np.isclose(limits[0], limits[1], rtol=_ROUNDING, atol=0))

    # -- the update ---------------------------------------------------------

    def _by_formulas(self, number: int, before: State, one: StepResult,
                two: StepResult, clipped: bool) -> list[str] | None:
        """The names of the formulas with which the update of `b` is that of
        `a`; None if none do it."""
        rules = [run.updates.optimizer for run in self._runs]
        ways = [_Way(type(rule), isinstance(run, OwnRun)
                     and run.name == "mxnet")
                for run, rule in zip(self._runs, rules)]
        if ways[0].kind not in (ways[1].kind, counterpart(
                ways[1].kind, ways[0].kind.semantics)) \
                or "" in (kind.family for kind, _ in ways):
            return None
        scales = [s.own.scale if s.own else 1 / s.divisor for s in (one, two)]
        if not self._near(number, two, self._moved(
                before, two, ways[1], two.gradients, scales[1])):
            return None     # b does not do what its optimiser says
        gradients = one.gradients if clipped else two.gradients
        if not self._near(number, one, self._moved(
                before, two, ways[0], gradients, scales[0])):
            return None
        others = {
            _NAMES.get(ways[0].kind.family, (
                "another formula of Gluon's and PyTorch's "
                f"{ways[0].kind.family}")):
            ways[0]._replace(kind=ways[1].kind),
            _SINGLE: ways[0]._replace(single=ways[1].single)}
        # those without which the sides differ
        return [name for name, way in others.items() if way != ways[0]
                and not self._near(number, one, self._moved(
                    before, two, way, gradients, scales[0]))]

    def _moved(self, before: State, step: StepResult, way: _Way,
               gradients: Arrays, scale: float) -> StepResult:
        """The step of `b` in terms of `a`, updated by `way`, which is told
        to multiply gradients by `scale`."""
        a, b = self._runs
        plan = self._work.plan
        start = translate(before, plan, a, b)
        rule = b.updates.optimizer
        optimizer = _by(rule, way)
        grads = plan.to_b(gradients)
        values, slots = dict(start.values), dict(start.optimizer.slots)
        counts = dict(start.optimizer.counts)
        outside = [rate_outside_velocity(k) for k in (type(rule), way.kind)]
        divisor: float = step.divisor
        states, moving = {}, [n for n in b.updates.order if n in grads]
        for name in moving:
            values[name] = values[name].copy()
            state = optimizer.create_state(values[name], OPS)
            factor = 1.0
            if outside[0] != outside[1] and counts.get(name):
                last = b.updates.last_rate(name, start.optimizer.num_update)
                factor = -1 / last if outside[1] else -last
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
        if way.single:      # as MXNet gets it
            divisor *= scale / float(np.float32(scale))
        for name in moving:
            lr = b.updates.last_rate(name, step.after.optimizer.num_update)
            wd = rule.wd * b.updates.wd_mult[name]
            # Gluon's code has the options themselves, its kernel not.
            exact, bias = (_bias(x, counts[name]) for x in (
                _by(rule, way._replace(single=False)), optimizer))
            optimizer.update(
                values[name], grads[name] / divisor,
                states[name], lr=float(single(lr * exact)) / bias,
                wd=float(single(wd)), t=counts[name], ops=OPS)
        for name, state in states.items():
            factor = 1.0
            if outside[0] != outside[1]:    # as `b` keeps it
                now = b.updates.last_rate(name,
                                          step.after.optimizer.num_update)
                factor = -now if outside[1] else -1 / now
            slots.update({(name, slot): np.asarray(value) * (
                factor if slot == "momentum" else 1.0)
                for slot, value in state.items()})
        memory: TrainerStates = step.after.optimizer._replace(
            slots=slots, counts=counts)
        return StepResult([], np.zeros(0), {}, translate(
            State(values, memory), plan.inverse(), b, a))

    def _near(self, number: int, step: StepResult, moved: StepResult) -> bool:
        """Whether the weights and the memory of a step are `moved`."""
        names = {e.name for e in self._runs[0].entries if not e.is_statistic}
        for x, z in ((step.after.values, moved.after.values),
                     ({"/".join(k): v for k, v
                       in step.after.optimizer.slots.items()},
                      {"/".join(k): v for k, v
                       in moved.after.optimizer.slots.items()})):
            for name in x.keys() & z.keys():
                if x is step.after.values and name not in names:
                    continue
                if np.ndim(x[name]) and self._work.single_gap(
                        number, "weight", name, x[name], z[name]
                        ).status == "different":
                    return False
        return True


    # -- running statistics -------------------------------------------------

    def _statistics(self, before: State, one: StepResult, two: StepResult,
                    gaps: list[Gap]) -> list[str]:
        """The names of the formulas with which the running statistics of
        both sides come from one batch; none if they do not."""
        a, b = self._runs
        found: dict[str, None] = {}
        wrong = {g.name for g in gaps
                 if g.stage == "statistic" and g.status == "different"}
        pairs = {pair.a[0]: pair.b[0] for pair in self._work.plan.pairs}
        keep = [{name: (layer, layer.options["momentum"]) for layer
                 in run.layers if layer.kind == "batch_norm"
                 for name in layer.parameters} for run in (a, b)]
        for name in wrong:
            if name not in keep[0] or pairs.get(name) not in keep[1]:
                return []
            momenta = [own[n][1] for own, n in zip(
                keep, (name, pairs[name]))]
            if None in momenta:
                return []
            exact = [float(np.float32(m)) if run.name == "mxnet" else m
                     for m, run in zip(momenta, (a, b))]
            x, z = ((step.after.values[name] - m * before.values[name])
                    / (1 - m) for m, step in zip(exact, (one, two)))
            ratio = 1.0
            if name.endswith("var"):
                ratio = _ratio_of_counts(x, z, one.rows)
            tolerance = self._work.tolerance / (1 - exact[0])
            if momenta[0] != momenta[1] or not np.allclose(
                    x * ratio, z, rtol=tolerance,
                    atol=tolerance * float(np.abs(z).max(initial=0.0))):
                return []
            if ratio != 1.0:
                found[_UNBIASED] = None
            if exact[0] != exact[1]:
                found[_MOMENTUM] = None
        return list(found)


def _ratio_of_counts(x: np.ndarray, z: np.ndarray, rows: list[int]) -> float:
    """What all of `z` are of `x`: n / (n - 1), or its inverse, for a number
    of values n that the rows have; else 1."""
    square = float(np.vdot(x, x))
    ratio = float(np.vdot(x, z)) / square if square else 1.0
    for factor, power in ((ratio, 1), (1 / ratio if ratio else 1.0, -1)):
        if factor > 1 + 1e-9:
            count = round(factor / (factor - 1))
            if count > 1 and count % sum(rows) == 0:
                return (count / (count - 1)) ** power
    return 1.0


_SINGLE = "MXNet's optimisers round rates and options to float32"
_CLIPPING = ("clipping by the global norm: Gluon adds 1e-8 to the norm, "
             "PyTorch 1e-6")
_UNBIASED = ("batch norm: PyTorch keeps the unbiased variance, n / (n - 1) "
             "times that of the batch, Gluon the batch's own")
_MOMENTUM = "batch norm: MXNet reads the momentum as float32"
_NAMES = {
    "sgd": "momentum: Gluon keeps the rate inside the velocity, PyTorch "
    "outside, which differ where the rate changes",
    "nag": "momentum: Gluon keeps the rate inside the velocity, PyTorch "
    "outside, which differ where the rate changes",
    "adam": "Adam's epsilon: Gluon adds it outside of the bias correction, "
    "PyTorch inside"}


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
