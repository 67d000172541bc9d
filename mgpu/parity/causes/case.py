"""What all causes are made of: see `mgpu.parity.diagnosis`."""
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import mgpu
from mgpu.backends import using_backend
from mgpu.nested import map_leaves

#: every name that a `Cause` can have; those above come first where several
#: explain a difference equally well
CAUSES = (
    "data order", "input preparation", "labels out of range",
    "dropout masks", "dropout rate", "activation",
    "normalisation epsilon", "fix_gamma", "batch-norm policy",
    "batch-norm mode", "windows in the padding", "pooling ceil_mode",
    "count_include_pad", "dense flatten", "layer options",
    "loss reduction", "sum or mean over devices", "aliased replicas",
    "L2 loss", "loss weight", "device left out",
    "missing broadcast", "stale gradient", "frozen parameter",
    "gradient clipping", "gradient scale",
    "batch divisor", "rate inside the velocity", "Adam epsilon",
    "weight decay on biases", "coupled weight decay", "multipliers",
    "optimizer options", "optimizer formula", "learning rate",
    "initialiser", "initial draw",
    "unbiased variance", "statistics momentum", "statistics updates",
    "float32 hyper-parameters", "float32 statistics momentum")

#: a prediction that leaves more than this of a difference is no explanation
LIMIT = 1e-3
#: elements of a tensor that element-wise rules are tried on
PART = 1024
#: examples that a layer is recomputed for
ROWS = 4


class Cause(NamedTuple):
    """A likely cause.

    Attributes
    ----------
    name : str
        One of `CAUSES`.
    text : str
        What it is and what to change.
    residual : float
        How much of the difference the cause leaves unexplained, from 0
        (none) to 1. 1: what differs is known, its effect was not computed.
    """

    name: str
    text: str
    residual: float

    def __str__(self) -> str:
        return f"{self.name}: {self.text} (unexplained: {self.residual:.1e})"


Found = list[Cause]


class Case:
    """The evidence, and what every hypothesis asks of it."""

    def __init__(self, result: Any, evidence: Any):
        self.evidence = ev = evidence
        self.tolerance = result.settings["tolerance"]
        #: rounding takes part of a difference that is little above it
        self.limit = LIMIT if result.settings["dtype"] == "float64" else 0.02
        self.runners = {"a": ev.runner_a, "b": ev.runner_b}
        self.records = {"a": ev.a, "b": ev.b}
        self.gaps: dict[str, list[Any]] = {}
        for gap in result.gaps:
            if gap.step == ev.step or (gap.stage == "initial"
                                       and ev is result.evidence):
                self.gaps.setdefault(gap.stage, []).append(gap)
        self.kinds = {e.name: e.kind for e in ev.runner_a.entries}
        self.names = {"a": {e.name: e.name for e in ev.runner_a.entries},
                      "b": {p.a: p.b for p in ev.plan.pairs}}
        self.rows = sum(ev.a.rows)
        self._calls: dict[str, list[tuple[int, Any]]] = {}

    def wrong(self, stage: str) -> list[Any]:
        return [g for g in self.gaps.get(stage, ()) if g.status == "different"]

    def devices(self, side: str) -> int:
        return len(self.runners[side].devices)

    def engine(self, side: str) -> str:
        return f"{side} ({self.runners[side].name})"

    def scales(self, stage: str) -> dict[str, float]:
        """By name, what a tensor is measured against; without those whose
        difference is rounding."""
        return {g.name: g.scale for g in self.gaps.get(stage, ())
                if g.status in ("same", "different")
                and np.isfinite(g.absolute)}

    def residual(self, base: Mapping[str, np.ndarray],
                 target: Mapping[str, np.ndarray],
                 predicted: Mapping[str, np.ndarray],
                 scales: Mapping[str, float]) -> float:
        """What `predicted` leaves of the difference of `target` from
        `base`: the largest part over all tensors. A tensor without a
        difference must be predicted to have none."""
        worst = 0.0
        for name, scale in scales.items():
            if name not in base or name not in target:
                continue
            a, b = base[name], target[name]
            p = predicted.get(name, a)
            if p.shape != b.shape:
                return math.inf
            apart, left = distance(a, b), distance(p, b)
            if apart <= self.tolerance * scale:
                apart = 1e3 * self.tolerance * scale
            if left:
                worst = max(worst, left / apart if apart else math.inf)
        return worst if worst == worst else math.inf

    def layer(self, side: str, name: str) -> Any:
        """The layer of a parameter that `a` calls `name`."""
        own = self.names[side].get(name)
        return next((x for x in self.runners[side].layers
                     if own in x.parameters), None)

    def before(self, side: str) -> Any:
        """The state before the step in the terms of a side."""
        from mgpu.parity.sides import translate
        ev = self.evidence
        return ev.before if side == "a" else translate(
            ev.before, ev.plan, ev.runner_a, ev.runner_b)

    def prepared(self, side: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The leaves of X and y as a side's own data path gives them."""
        prepare = self.runners[side].side.prepare
        X, y = self.evidence.X, self.evidence.y
        if prepare is not None:
            X, y = prepare(X, y)
        return _flat(X), _flat(y)

    def calls(self, side: str) -> list[tuple[int, Any]]:
        """All calls of innermost layers in the step: (device, call)."""
        if side not in self._calls:
            ev, runner = self.evidence, self.runners[side]
            runner.load(self.before(side), memory=False)
            busy = [i for i, n in enumerate(self.records[side].rows) if n]
            self._calls[side] = [(i, call) for i, calls in zip(
                busy, runner.traces(ev.X, ev.y, ev.step)) for call in calls]
        return self._calls[side]

    def local_gradients(self, side: str) -> list[dict[str, np.ndarray]]:
        """Each device's own gradients, by the names and in the layout of
        `a`, before they are summed."""
        from mgpu.parity import sides
        ev, runner = self.evidence, self.runners[side]
        runner.load(self.before(side), memory=False)
        with using_backend(runner.name):
            runner.replicas.zero_grad()
            Xs, ys = runner._shards(ev.X, ev.y)
            with runner._running(sides._rows(Xs), ev.step), mgpu.record():
                losses = mgpu.parallel(runner._loss, runner.replicas(Xs), ys)
            mgpu.backward([x for x in losses if x is not None])
            runner.replicas.recorded = [False] * len(runner.devices)
            rows, own = sides._rows(Xs), []
            for i, n in enumerate(rows):
                own.append({p.name: runner.backend.to_numpy(p.list_grad()[i])
                            * (1.0 if n else 0.0)
                            for p in runner.replicas.params()
                            if p.grad_req != "null"})
        return own if side == "a" else [ev.plan.to_a(g) for g in own]


def distance(x: np.ndarray, y: np.ndarray) -> float:
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return float(np.where(same, 0.0, np.abs(x - y)).max(initial=0.0))


def _flat(tree: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    map_leaves(lambda x: found.append(np.asarray(x)), tree)
    return found


def unexplained(a: np.ndarray, b: np.ndarray, predicted: np.ndarray) -> float:
    """The residual for one pair of arrays."""
    if predicted.shape != b.shape:
        return math.inf
    apart = distance(a, b) if a.shape == b.shape \
        else float(np.abs(b).max(initial=0.0))
    left = distance(predicted, b)
    return left / apart if apart else (0.0 if not left else math.inf)


def both_sides() -> Iterator[tuple[str, str]]:
    """(the side taken for right, the side with the fault), both ways."""
    return iter((("a", "b"), ("b", "a")))
