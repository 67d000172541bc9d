"""A step in which two runs differ: what every cause works on."""
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mgpu.data.nested import leaves, map_leaves
from mgpu.parity.causes.registry import LIMIT, LIMIT_FLOAT32
from mgpu.parity.location import ACTIVATIONS, NAMES
from mgpu.parity.matching import close
from mgpu.parity.measure import Gap
from mgpu.parity.result import Evidence, Result
from mgpu.parity.run import (Arrays, LayerCall, Run, State, StepResult,
                             translate)
from mgpu.training.parameters import STATISTICS

#: elements of a tensor that element-wise formulas are tried on
PART = 1024
#: rows that a layer is recomputed for
ROWS = 4

_Function = TypeVar("_Function", bound=Callable)


def once(function: _Function) -> Any:
    """Compute a function of a `Difference`, or a method of a `View`, once
    for the same arguments."""
    @wraps(function)
    def known(owner: Any, *arguments: Any) -> Any:
        key = function, arguments
        if key not in owner.known:
            owner.known[key] = function(owner, *arguments)
        return owner.known[key]
    return known


class View:
    """One side in the step. As text it is what messages call the side: "a
    (mxnet)".

    Attributes
    ----------
    run : Run
    step : StepResult
    names : dict of str -> str
        The side's own names, by the names of `a`.
    devices : int
    rows : list of int
        The numbers of rows of the devices that have some.
    gradients, values : dict of str -> ndarray
        Those of the step, and those after it.
    """

    def __init__(self, letter: str, evidence: Evidence, run: Run,
                 step: StepResult, names: Mapping[str, str]):
        self.evidence, self._letter = evidence, letter
        self.run, self.step, self.names = run, step, names
        self.devices, self.rows = len(run.devices), [*filter(None, step.rows)]
        self.gradients, self.values = step.gradients, step.after.values
        self.known: dict[Any, Any] = {}     # see `once`

    def __str__(self) -> str:
        return f"{self._letter} ({self.run.name})"

    def layer(self, name: str) -> Any:
        """The layer of a parameter that `a` calls `name`, or None."""
        own = self.names.get(name)
        return next((x for x in self.run.layers if own in x.parameters), None)

    def before(self, change: Callable[[Any], Any] | None = None) -> State:
        """The state before the step in the terms of this side."""
        ev = self.evidence
        state = ev.before if change is None else ev.before._replace(
            values={n: change(v) for n, v in ev.before.values.items()})
        return state if self.run is ev.run_a else translate(
            state, ev.plan, ev.run_a, ev.run_b)

    def prepared(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The leaves of X and y after the side's `prepare`."""
        X, y = self.run.prepared(self.evidence.X, self.evidence.y)
        return ([np.asarray(x) for x in leaves(X)],
                [np.asarray(x) for x in leaves(y)])

    @once
    def calls(self) -> list[tuple[int, LayerCall]]:
        """All calls of innermost layers in the step: (device, call)."""
        ev, busy = self.evidence, [i for i, n in enumerate(self.step.rows)
                                   if n]
        if ev.calls is not None:
            known = ev.calls[self.run is not ev.run_a]
        else:
            self.run.load(self.before(), memory=False)
            known = self.run.calls(ev.X, ev.y, ev.step)
        return [(i, call) for i, calls in zip(busy, known) for call in calls]

    @once
    def local_gradients(self) -> list[Arrays]:
        """See `gradients_again`."""
        return self.gradients_again()

    def gradients_again(self, change: Callable[[Any], Any] | None = None
                        ) -> list[Arrays]:
        """Each device's own gradients, before they are summed, by the names
        and in the layout of `a`. `change` changes each value before the step,
        in the terms of `a`, and each leaf of X."""
        ev = self.evidence
        X = ev.X if change is None else map_leaves(change, ev.X)
        self.run.load(self.before(change), memory=False)
        own = self.run.local_gradients(X, ev.y, ev.step)
        return own if self.run is ev.run_a else [ev.plan.to_a(g) for g in own]

    def past_gradients(self) -> list[Arrays]:
        """Those of up to two steps before, the last one first."""
        which = self.run is not self.evidence.run_a
        return [pair[which].gradients for pair in self.evidence.earlier[::-1]]


class Tensors(NamedTuple):
    """A tensor that differs for the first time.

    Attributes
    ----------
    a, b : ndarray
        What the sides make of it.
    where : str
    ahead : sequence of ndarray
        Tensors of `a` that it was computed from, the nearest first.
    """

    a: np.ndarray
    b: np.ndarray
    where: str
    ahead: Sequence[np.ndarray] = ()


class Difference:
    """A step in which something differs for the first time, and what the
    causes ask of it.

    Attributes
    ----------
    evidence : Evidence
    tolerance : float
    limit : float
        The largest residual of a cause.
    a, b : View
    kinds : dict of str -> str
        The kind of each tensor of `a`.
    trained : dict of str -> bool
    rows : int
        Of the whole batch.
    place : Location or None
        The first layer whose output differs.
    rates : list of (float, float)
        Of both sides in each step, where a step is of the user's own.
    """

    def __init__(self, result: Result, evidence: Evidence):
        self.evidence = ev = evidence
        self.tolerance = result.settings["tolerance"]
        self.limit = LIMIT if result.settings["dtype"] == "float64" \
            else LIMIT_FLOAT32
        self.kinds = {e.name: e.kind for e in ev.run_a.entries}
        self.trained = {e.name: e.trained for e in ev.run_a.entries}
        self.a = View("a", ev, ev.run_a, ev.a, {n: n for n in self.kinds})
        self.b = View("b", ev, ev.run_b, ev.b, ev.plan.names())
        self._gaps = [g for g in result.gaps if g.step == ev.step or (
            g.stage == "initial" and ev is result.evidence)]
        self.rows = sum(ev.a.rows)
        self.rates = [(g.a, g.b) for g in result.gaps if g.stage == "rate"]
        self.place: Any = ev.location
        self.known: dict[Any, Any] = {}     # see `once`

    def both_ways(self) -> list[tuple[View, View]]:
        """(the side taken for right, the side with the fault), both ways."""
        return [(self.a, self.b), (self.b, self.a)]

    # -- what differs -------------------------------------------------------

    def wrong(self, stage: str) -> list[Gap]:
        return [g for g in self._gaps
                if g.stage == stage and g.status == "different"]

    def scales(self, stage: str) -> dict[str, float]:
        """By name, the scale of each tensor; without tensors whose
        difference is rounding or not finite."""
        return {g.name: g.scale for g in self._gaps if g.stage == stage
                and g.status in ("same", "different")
                and np.isfinite(g.absolute)}

    def residual(self, base: Arrays, target: Arrays, predicted: Arrays,
                 scales: Mapping[str, float] | None = None) -> float:
        """The share of the difference of `target` from `base` that
        `predicted` leaves: the largest one of all tensors. A tensor without
        a difference must be predicted to have none. Default `scales`: those
        of the gradients."""
        scales = self.scales("gradient") if scales is None else scales
        worst, names = 0.0, [n for n in scales if n in base and n in target]
        for name in names:
            a, b, scale = base[name], target[name], scales[name]
            p = predicted.get(name, a)
            if p.shape != b.shape:
                return math.inf
            apart, left = distance(a, b), distance(p, b)
            if apart <= self.tolerance * scale:
                apart = 1e3 * self.tolerance * scale
            # of the smaller: the difference, or what is to be explained
            apart = min(apart, max(float(np.abs(b).max(initial=0.0)),
                                   self.tolerance * scale))
            if left:
                worst = max(worst, left / apart if apart else math.inf)
        return worst if names and worst == worst else math.inf

    def statistics(self) -> dict[str, tuple[str, ...]]:
        """The kinds of running statistics that differ, with all names."""
        wrong = {self.kinds[g.name] for g in self.wrong("statistic")}
        return {kind: tuple(n for n in self.scales("statistic")
                            if self.kinds[n] == kind)
                for kind in STATISTICS if kind in wrong}

    # -- where it arises ----------------------------------------------------

    @cached_property
    def kind(self) -> str:
        """The kind of the first layer whose output differs, "activation" for
        two kinds of activations; "" unless both sides have it there, and
        their inputs agree."""
        place = self.place
        if place is None or not (
                place.inputs_agree and place.call_a.outputs
                and place.call_b.outputs and place.a and place.b):
            return ""
        one, other = place.a.kind, place.b.kind
        if one == other:
            return one
        return "activation" if ACTIVATIONS.issuperset(
            NAMES.get(kind, kind) for kind in (one, other)) else ""

    @property
    def layer(self) -> str:
        """What messages call that layer."""
        return f"{self.place.a.kind} {self.place.call_a.path}".strip()

    def options(self, name: str) -> tuple[Any, Any]:
        """An option of that layer on both sides."""
        return (self.place.a.options.get(name), self.place.b.options.get(name))

    @once
    def tensors(self) -> list[Tensors]:
        """The tensors that differ first in the forward pass."""
        place = self.place
        if place is None:
            return [Tensors(u, v, "the last layer") for u, v in zip(
                self.evidence.a.outputs[:1], self.evidence.b.outputs[:1])]
        path = place.call_a.path or "the network"
        if not place.inputs_agree:
            ahead = self._given(place.call_a.path)[:-4:-1]
            both = [*zip(place.call_a.inputs, place.call_b.inputs)]
            return [Tensors(u, v, f"the layers before {path}", ahead)
                    for u, v in [
                        (u, v) for u, v in both if u.size != v.size
                        or not close(u.reshape(-1), v.reshape(-1),
                                     self.tolerance)] or both]
        # A dropout layer computes nothing but its mask.
        return [Tensors(*self.outputs(), f"layer {path} ({self.kind})",
                        [*place.inner, *place.call_a.inputs[:1]])] \
            if self.kind not in ("", "dropout") else []

    def _given(self, path: str, inputs: bool = False) -> list[np.ndarray]:
        """Outputs of the layers of `a` before `path`; with their `inputs`."""
        given: list[np.ndarray] = []
        for index, call in self.a.calls():
            if index == 0:
                if call.path == path:
                    break
                given += (call.inputs if inputs else []) + call.outputs[:1]
        return given

    def earlier(self) -> list[np.ndarray]:
        """What the layers of `a` before that place got and gave."""
        return self._given(self.place.call_a.path if self.place else "",
                           inputs=True)

    def outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """What the first layer that differs puts out on both sides."""
        return self.place.call_a.outputs[0], self.place.call_b.outputs[0]

    def rows_of_layer(self, most: int | None = None
                      ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of that layer's input, in double precision, and of the
        outputs of both sides."""
        u, v = self.outputs()
        n = min(len(u), most or len(u))
        return self.place.call_a.inputs[0][:n].astype(float), u[:n], v[:n]

    def parameter(self, kind: str) -> np.ndarray | None:
        """A parameter of that layer of `a`, before the step."""
        return next((self.evidence.before.values[name]
                     for name in self.place.a.parameters
                     if self.kinds.get(name) == kind), None)

    # -- gradients ----------------------------------------------------------

    def without_gradient(self, fixed: bool) -> list[tuple[View, list[str]]]:
        """For each side, parameters that get a gradient only on the other
        side: gammas that a layer holds at 1 (`fixed`), or the others."""
        def is_fixed(side: View, name: str) -> bool:
            layer = side.layer(name)
            return layer is not None and layer.options.get("scale") is False
        def has(side: View, name: str) -> bool:
            # MXNet's BlockGrad gives zeros.
            return bool(side.gradients.get(name, np.zeros(1)).any())
        names = [g.name for g in self.wrong("gradient")]
        return [(side, [n for n in names if n in right.gradients
                        and (n not in side.gradients or
                             has(right, n) and not has(side, n))
                        and is_fixed(side, n) is fixed])
                for right, side in self.both_ways()]

    @once
    def aliased(self) -> bool:
        """Whether replicas of a side share memory."""
        return any(side.run.shares_memory() for side in (self.a, self.b))

    def weighted(self, right: View, side: View, factors: Sequence[float]
                 ) -> float:
        """The residual of: the gradients of `side` are the sum over devices
        of those of `right`, each times its factor."""
        local, own = right.local_gradients(), right.gradients
        return self.residual(own, side.gradients, {
            n: np.sum([f * g[n] for f, g in zip(factors, local)], 0)
            for n in own if n in local[0]})


# -- arrays -------------------------------------------------------------------

def distance(x: np.ndarray, y: np.ndarray) -> float:
    """``max|x - y|``; NaN on both sides is equal."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return float(np.where(same, 0.0, np.abs(x - y)).max(initial=0.0))


def unexplained(a: np.ndarray, b: np.ndarray, predicted: np.ndarray) -> float:
    """The residual for one pair of arrays: a share of the difference, or of
    `b` if that is smaller, since numbers near 0 predict a small one."""
    if predicted.shape != b.shape:
        return math.inf
    apart = float(np.abs(b).max(initial=0.0))
    if a.shape == b.shape:
        apart = min(apart, distance(a, b))
    left = distance(predicted, b)
    return left / apart if apart else (0.0 if not left else math.inf)


def nearest(candidates: Mapping[Any, np.ndarray], seen: np.ndarray,
            apart: float) -> tuple[float, Any]:
    """The candidate of its shape that is nearest to `seen`, the first one of
    several: its distance as a share of `apart`, and its key."""
    found = (math.inf, None)
    for key, value in candidates.items():
        if value.shape != seen.shape:
            continue
        far = distance(value, seen) / apart
        found = (far, key) if far < found[0] else found
    return found


def same_lists(xs: Sequence[np.ndarray], zs: Sequence[np.ndarray]) -> bool:
    return len(xs) == len(zs) and all(map(np.array_equal, xs, zs))


def reordered(u: np.ndarray, v: np.ndarray) -> float:
    """The residual of "`v` has the rows of `u` in another order"."""
    if u.shape != v.shape or u.ndim == 0 or len(u) < 2:
        return math.inf
    if np.array_equal(u, v):
        return 0.0
    u, v = u.astype(float), v.astype(float)
    return distance(_sorted_rows(u), _sorted_rows(v)) / (distance(u, v) or 1.0)


def _sorted_rows(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(len(x), -1)
    # rounding must not change the order: sort by coarse values
    keys = np.round(rows[:, :64] / (np.abs(rows).max() or 1.0), 6)
    return rows[np.lexsort(keys.T[::-1])]


def as_single(x: Any) -> Any:
    """A number as float32 keeps it."""
    return float(np.float32(x)) if isinstance(x, float) else x


def near_as_single(x: float, y: float) -> bool:
    """Whether `x` and `y` are equal but for rounding to float32."""
    return x != y and (as_single(x) == y or as_single(y) == x)
