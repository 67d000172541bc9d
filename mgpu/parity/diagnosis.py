"""Why do two runs differ? Causes, ranked, from the first difference.

Each cause is a hypothesis that *predicts* one side's tensors from what is
known of the other: the state before the step, gradients, rates, the batch,
the inputs of the first layer that differs. What the prediction leaves
unexplained of the difference is the cause's residual, the largest over all
tensors of the stage, so that no coincidence in one tensor names a cause. A
cause whose residual is not small is not named: a difference that nothing
here predicts has no cause.
"""
import itertools
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import (Any, Callable, Dict, Iterable, Iterator, List, Mapping,
                    NamedTuple, Optional, Sequence, Tuple)

import numpy as np

import mgpu
from mgpu import initializers, optimizers
from mgpu.backends import using_backend
from mgpu.split import map_leaves

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


Found = List[Cause]


def diagnose(result: Any) -> List[Cause]:
    """The likely causes of the first difference of a lock-step.

    Stages that cannot be consequences of one another (the update, and the
    running statistics) are explained separately, so several causes that act
    at once are all named.

    Parameters
    ----------
    result : Result
        With `evidence`. Its runners run the step again, in parts.

    Returns
    -------
    list of Cause
        The best first, one for each name: those that leave next to nothing
        unexplained before the others, then in the order of `CAUSES`. Empty
        where nothing explains the difference.
    """
    if result.evidence is None:
        return []
    best: Dict[str, Cause] = {}
    with np.errstate(all="ignore"):
        for evidence in (result.evidence, *result.evidence.later):
            try:
                causes = _explain(_Case(result, evidence))
            except Exception as error:
                # The comparison stands without a diagnosis, which runs
                # parts of the user's own code again.
                result.notes.append("the search for causes stopped: "
                                    f"{type(error).__name__}: {error}")
                continue
            for cause in causes:
                known = best.setdefault(cause.name, cause)
                if cause.residual < known.residual:
                    best[cause.name] = cause
    return sorted(best.values(), key=lambda c: (
        c.residual > 1e-4, c.residual > LIMIT, CAUSES.index(c.name),
        c.residual))


def _explain(case: "_Case") -> Found:
    """The causes of one step's differences."""
    found = _initial(case) if case.wrong("initial") else []
    if case.wrong("layer") or case.wrong("output"):
        return found + _forward(case)
    if case.wrong("loss"):
        found += _loss(case)
    elif case.wrong("gradient"):
        found += _gradient(case)
    elif case.wrong("devices"):
        found += _devices(case)
    found += _update(case)
    if case.wrong("statistic"):
        found += _statistics(case)
    return found


class _Case:
    """The evidence, and what every hypothesis asks of it."""

    def __init__(self, result: Any, evidence: Any):
        self.evidence = ev = evidence
        self.tolerance = result.settings["tolerance"]
        #: rounding takes part of a difference that is little above it
        self.limit = LIMIT if result.settings["dtype"] == "float64" else 0.02
        self.runners = {"a": ev.runner_a, "b": ev.runner_b}
        self.records = {"a": ev.a, "b": ev.b}
        self.gaps: Dict[str, List[Any]] = {}
        for gap in result.gaps:
            if gap.step == ev.step or (gap.stage == "initial"
                                       and ev is result.evidence):
                self.gaps.setdefault(gap.stage, []).append(gap)
        self.kinds = {e.name: e.kind for e in ev.runner_a.entries}
        self.names = {"a": {e.name: e.name for e in ev.runner_a.entries},
                      "b": {p.a: p.b for p in ev.plan.pairs}}
        self.rows = sum(ev.a.rows)
        self._calls: Dict[str, List[Tuple[int, Any]]] = {}

    def wrong(self, stage: str) -> List[Any]:
        return [g for g in self.gaps.get(stage, ())
                if g.status == "different"]

    def devices(self, side: str) -> int:
        return len(self.runners[side].devices)

    def engine(self, side: str) -> str:
        return f"{side} ({self.runners[side].name})"

    def scales(self, stage: str) -> Dict[str, float]:
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
            apart, left = _apart(a, b), _apart(p, b)
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

    def prepared(self, side: str) -> Tuple[List[np.ndarray],
                                           List[np.ndarray]]:
        """The leaves of X and y as a side's own data path gives them."""
        prepare = self.runners[side].side.prepare
        X, y = self.evidence.X, self.evidence.y
        if prepare is not None:
            X, y = prepare(X, y)
        return _flat(X), _flat(y)

    def calls(self, side: str) -> List[Tuple[int, Any]]:
        """All calls of innermost layers in the step: (device, call)."""
        if side not in self._calls:
            ev, runner = self.evidence, self.runners[side]
            runner.load(self.before(side), memory=False)
            busy = [i for i, n in enumerate(self.records[side].rows) if n]
            self._calls[side] = [(i, call) for i, calls in zip(
                busy, runner.traces(ev.X, ev.y, ev.step)) for call in calls]
        return self._calls[side]

    def local_gradients(self, side: str) -> List[Dict[str, np.ndarray]]:
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


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return float(np.where(same, 0.0, np.abs(x - y)).max(initial=0.0))


def _flat(tree: Any) -> List[np.ndarray]:
    found: List[np.ndarray] = []

    def one(x: Any) -> List[Any]:
        found.append(np.asarray(x))
        return [x]
    map_leaves(one, tree, 1)
    return found


def _left(a: np.ndarray, b: np.ndarray, predicted: np.ndarray) -> float:
    """The residual for one pair of arrays."""
    if predicted.shape != b.shape:
        return math.inf
    apart = _apart(a, b) if a.shape == b.shape \
        else float(np.abs(b).max(initial=0.0))
    left = _apart(predicted, b)
    return left / apart if apart else (0.0 if not left else math.inf)


def _sides() -> Iterator[Tuple[str, str]]:
    """(the side taken for right, the side with the fault), both ways."""
    return iter((("a", "b"), ("b", "a")))


# -- the start --------------------------------------------------------------

def _fan_in(shape: Sequence[int]) -> float:
    return math.prod(shape[1:])


def _average_fan(shape: Sequence[int]) -> float:
    return sum(initializers.fans(shape)) / 2


#: formula -> (uniform?, half width or standard deviation of a shape)
_FORMULAS: Dict[str, Tuple[bool, Callable[[Sequence[int]], float]]] = {
    "Uniform(0.07), Gluon's default": (True, lambda s: 0.07),
    "U(+-1/sqrt(fan_in)), torch's default": (
        True, lambda s: _fan_in(s) ** -0.5),
    "Xavier uniform": (True, lambda s: (3 / _average_fan(s)) ** 0.5),
    "He uniform, kaiming_uniform_": (
        True, lambda s: (6 / _fan_in(s)) ** 0.5),
    "Normal(0.01)": (False, lambda s: 0.01),
    "N(0, 1), torch's default for embeddings": (False, lambda s: 1.0),
    "Xavier normal": (False, lambda s: _average_fan(s) ** -0.5),
    "He normal, kaiming_normal_": (
        False, lambda s: (2 / _fan_in(s)) ** 0.5),
    "MSRAPrelu(), Gluon's": (
        False, lambda s: (2 / (1.0625 * _average_fan(s))) ** 0.5),
}


def _fits(value: np.ndarray, uniform: bool, size: float) -> bool:
    """Whether a draw of this formula would look like `value`: within four
    standard errors of the standard deviation (of a uniform one, 0.45 /
    sqrt(n), of a normal one, 0.71 / sqrt(n), relative), and inside the
    bounds of a uniform one."""
    n, spread = value.size, float(np.sqrt(np.mean(value ** 2)))
    if not uniform:
        # a uniform draw ends at 1.73 deviations; n normal ones go beyond
        return abs(spread / size - 1) < 4 * 0.71 / n ** 0.5 and (
            n < 64 or float(np.abs(value).max()) > 1.9 * size)
    return float(np.abs(value).max()) <= size * (1 + 1e-6) and abs(
        spread * 3 ** 0.5 / size - 1) < 4 * 0.45 / n ** 0.5


def _initial(case: _Case) -> Found:
    one, two = case.evidence.initial
    found: Found = []
    texts: Dict[str, List[str]] = {}
    weights = [g.name for g in case.wrong("initial")
               if case.kinds[g.name] == "weight" and g.a == g.a
               and one[g.name].ndim > 1]
    if weights:
        for side, values in (("a", one), ("b", two)):
            texts[side] = [
                text for text, (uniform, size) in _FORMULAS.items()
                if all(_fits(values[n], uniform, size(values[n].shape))
                       for n in weights)]
        common = [t for t in texts["a"] if t in texts["b"]]
        if common:
            found.append(Cause("initial draw", (
                f"the weights of both sides look like {common[0]}, drawn "
                "with other random numbers: engines never draw alike, seeds "
                "or not. Start both from one set, weights='a'"), 0.0))
        elif texts["a"] or texts["b"]:
            looks = {s: texts[s][0] if texts[s] else "no formula known here"
                     for s in texts}
            found.append(Cause("initialiser", (
                f"the weights of {case.engine('a')} look like {looks['a']}, "
                f"those of {case.engine('b')} like {looks['b']} (first "
                f"{weights[0]}). Give both the same: Side(init=...), or "
                "mgpu.initialize(net, init=...) on both engines"),
                0.0 if texts["a"] and texts["b"] else 1.0))
    others = [g.name for g in case.wrong("initial")
              if case.kinds[g.name] in ("bias", "gamma", "beta")]
    for side, own, other in (("a", one, two), ("b", two, one)):
        plain = [n for n in others if np.unique(own[n]).size == 1
                 and np.unique(other[n]).size > 1]
        if others and plain == others:
            far = "b" if side == "a" else "a"
            value = float(own[plain[0]].flat[0])
            text = (f"{plain[0]} and {len(plain) - 1} other biases are "
                    f"{value:g} on {case.engine(side)} and random on "
                    f"{case.engine(far)}, as torch's layers draw them: "
                    "torch.nn.init.zeros_ on torch, or Side(init=...)")
            if found and found[0].name == "initialiser":
                found[0] = found[0]._replace(
                    text=found[0].text + "; also " + text)
            else:
                found.insert(0, Cause("initialiser", text, 0.0))
    return found


# -- the forward pass -------------------------------------------------------

def _forward(case: _Case) -> Found:
    found = _data(case)
    if found:
        return found    # everything after it differs for that reason
    place = case.evidence.location
    if place is None:
        one, two = case.evidence.a.outputs, case.evidence.b.outputs
        if not one or not two:
            return []
        return _flatten(case, one[0], two[0]) \
            or _between(case, one[0], two[0], "the last layer", [])
    kind = place.a.kind if place.a is not None else ""
    same = place.b is not None and place.b.kind == kind
    if not place.inputs_agree:
        where = f"the layers before {place.call_a.path or 'the network'}"
        for u, v in zip(place.call_a.inputs, place.call_b.inputs):
            found += _between(case, u, v, where, _ahead(case, place))
        return found
    if not place.call_a.outputs or not place.call_b.outputs or not same:
        return []
    rule = _LAYERS.get(kind)
    found = rule(case, place) if rule else []
    u, v = place.call_a.outputs[0], place.call_b.outputs[0]
    where = f"layer {place.call_a.path or 'the network'} ({kind})"
    if not found and rule is not _dropout:
        found = _flatten(case, u, v) or _between(
            case, u, v, where, place.call_a.inputs[:1])
    return found or ([] if kind in _COMPUTED else _options(case, place))


def _data(case: _Case) -> Found:
    """What the sides' own data paths do with one batch."""
    (Xa, ya), (Xb, yb) = case.prepared("a"), case.prepared("b")
    found: Found = []
    if len(Xa) != len(Xb) or _same_lists(Xa, Xb) and _same_lists(ya, yb):
        return found
    order = all(_reordered(u, v) < case.limit for u, v in zip(Xa, Xb))
    if order and not _same_lists(Xa, Xb):
        return [Cause("data order", (
            f"{case.engine('b')} gets the same examples as "
            f"{case.engine('a')} in another order: take both from one "
            "sampler, DataLoader(shuffle=False) on torch, "
            "DataLoader(shuffle=False) or a sampler with the same order in "
            "Gluon"), 0.0)]
    # What does the network of a make of the data of b?
    runner, other = case.runners["a"], case.runners["b"]
    runner.load(case.before("a"), memory=False)
    mine, runner.side = runner.side, replace(runner.side,
                                             prepare=other.side.prepare)
    try:
        outputs = runner.forward(case.evidence.X, case.evidence.y,
                                 case.evidence.step)
    except Exception:       # it need not fit: then nothing is known
        return found
    finally:
        runner.side = mine
    residual = max((_left(u, v, p) for u, v, p in zip(
        case.evidence.a.outputs, case.evidence.b.outputs, outputs)),
        default=math.inf)
    if residual < case.limit:
        found.append(Cause("input preparation", (
            f"{case.engine('b')} gets other numbers than "
            f"{case.engine('a')} for the same batch{_affine(Xa, Xb)}: make "
            "the transforms of both equal (ToTensor divides by 255 in both "
            "frameworks), or drop prepare="), residual))
    return found


def _affine(xs: Sequence[np.ndarray], zs: Sequence[np.ndarray]) -> str:
    for x, z in zip(xs, zs):
        if x.shape == z.shape and x.dtype.kind == "f" and x.size > 2:
            scale, shift = np.polyfit(x.reshape(-1), z.reshape(-1), 1)
            if _apart(scale * x + shift, z) < 1e-6 * np.abs(z).max():
                return f", {scale:.6g} times its input plus {shift:.6g}"
    return ""


def _same_lists(xs: Sequence[np.ndarray], zs: Sequence[np.ndarray]) -> bool:
    return len(xs) == len(zs) and all(
        x.shape == z.shape and np.array_equal(x, z) for x, z in zip(xs, zs))


def _sorted_rows(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(len(x), -1)
    # rounding must not change the order: sort by coarse values
    keys = np.round(rows[:, :64] / (np.abs(rows).max() or 1.0), 6)
    return rows[np.lexsort(keys.T[::-1])]


def _reordered(u: np.ndarray, v: np.ndarray) -> float:
    """Residual of "`v` has the rows of `u` in another order"."""
    if u.shape != v.shape or u.ndim == 0 or len(u) < 2:
        return math.inf
    u, v = u.astype(float), v.astype(float)
    return _left(_sorted_rows(u), _sorted_rows(v), _sorted_rows(u)) \
        if np.array_equal(u, v) else _apart(
            _sorted_rows(u), _sorted_rows(v)) / _apart(u, v)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


_ACTIVATIONS: Dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "no activation": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "silu (swish)": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / 2 ** 0.5)),
    "gelu with tanh": lambda x: x / 2 * (1 + np.tanh(
        (2 / np.pi) ** 0.5 * (x + 0.044715 * x ** 3))),
    "relu6": lambda x: np.clip(x, 0, 6),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "softmax": _softmax,
    "log_softmax": lambda x: np.log(_softmax(x)),
    **{f"leaky_relu({slope:g})":
       lambda x, slope=slope: np.where(x > 0, x, slope * x)
       for slope in (0.01, 0.1, 0.2, 0.25, 0.3)},
}


def _ahead(case: _Case, place: Any) -> List[np.ndarray]:
    """Outputs of a's last layers before the place, newest first."""
    outputs: List[np.ndarray] = []
    for index, call in case.calls("a"):
        if index == 0:
            if call.path == place.call_a.path:
                break
            outputs += call.outputs[:1]
    return outputs[:-4:-1]


def _between(case: _Case, u: np.ndarray, v: np.ndarray, where: str,
             ahead: Sequence[np.ndarray]) -> Found:
    """What turns tensor `u` of a into `v` of b, or both out of one of
    `ahead`?"""
    found: Found = []
    residual = _reordered(u, v)
    if residual < case.limit:
        return [Cause("data order", (
            f"at {where} {case.engine('b')} has the rows of "
            f"{case.engine('a')} in another order: same sampler, same split "
            "over the devices"), residual)]
    found += _masks(case, u, v, where)
    if u.size == v.size and u.ndim and v.ndim and len(u) == len(v):
        n = max(1, min(len(u), PART // max(1, u[0].size)))
        x, z = u[:n], v[:n].reshape(u[:n].shape)
        starts = [s[:n].reshape(x.shape) for s in ahead if s.size == u.size
                  and len(s) == len(u)]
        for start in (*starts, x, z):
            # A linear function of itself is no activation: one of the two
            # must be what the layers before it gave.
            fits = {"a": [], "b": []}
            for name, function in _ACTIVATIONS.items():
                value = function(start)
                for side, seen in (("a", x), ("b", z)):
                    error = _apart(value, seen) / (_apart(x, z) or 1)
                    if error < case.limit:
                        fits[side].append((error, name))
            if fits["a"] and fits["b"]:
                (e, one), (f, two) = min(fits["a"]), min(fits["b"])
                if one != two:
                    found.append(Cause("activation", (
                        f"{where}: {case.engine('a')} applies {one}, "
                        f"{case.engine('b')} {two}; make them equal "
                        "(activation= in Gluon, a module on torch)"),
                        max(e, f)))
                    break
        if u.ndim == 2 and not found:
            residual = _reordered(u.T, v.reshape(u.shape).T)
            if residual < case.limit:
                found.append(Cause("dense flatten", (
                    f"{where}: the columns of {case.engine('b')} are those "
                    f"of {case.engine('a')} in another order, as when one "
                    "side flattens (rows, channels, height, width) and the "
                    "other (rows, height, width, channels): permute to one "
                    "layout before Flatten"), residual))
    return found


def _flatten(case: _Case, u: np.ndarray, v: np.ndarray) -> Found:
    """Equal numbers, another shape."""
    if u.shape == v.shape or u.size != v.size:
        return []
    residual = _apart(u.reshape(-1), v.reshape(-1)) / (
        float(np.abs(u).max(initial=0.0)) or 1.0)
    if residual > case.limit:
        return []
    flat = "a" if u.ndim < v.ndim else "b"
    return [Cause("dense flatten", (
        f"equal numbers of shape {u.shape} on {case.engine('a')} and "
        f"{v.shape} on {case.engine('b')}: {case.engine(flat)} collapses "
        "all axes but the first, as Gluon's Dense does by default, and "
        "torch's Linear acts on the last axis. Dense(flatten=False) in "
        "Gluon, or nn.Flatten before Linear on torch"), residual)]


def _masks(case: _Case, u: np.ndarray, v: np.ndarray, where: str) -> Found:
    """Zeros in other places, and one factor elsewhere."""
    if u.shape != v.shape:
        return []
    both = (u != 0) & (v != 0)
    apart = (u == 0) != (v == 0)
    if not apart.any() or both.sum() < 3:
        return []
    factor = float(np.median(v[both] / u[both]))
    residual = _apart(v[both], factor * u[both]) / _apart(u, v)
    # Half of the zeros of one ReLU are where the other's input is negative:
    # a mask does not look at signs.
    for x, z in ((u, v), (v, u)):
        only = z[(x == 0) & (z != 0)]
        if only.size > 8 and not (z[both] < 0).any() and (only < 0).all():
            return []
    if residual > case.limit or factor <= 0:
        return []
    if abs(factor - 1) < 1e-6:
        return [Cause("dropout masks", (
            f"{where}: other elements are dropped on {case.engine('b')} "
            f"than on {case.engine('a')}, the rest is equal. Engines draw "
            "other masks from one seed: use the frameworks' dropout layers, "
            "which compare gives one set of masks, or dropout='off'"),
            residual)]
    return [Cause("dropout rate", (
        f"{where}: kept elements of {case.engine('b')} are {factor:.6g} "
        f"times those of {case.engine('a')}: Dropout(rate) in Gluon and "
        "nn.Dropout(p) must be equal, and both in training mode"),
        residual)]


def _dropout(case: _Case, place: Any) -> Found:
    rates = [layer.options.get("rate") for layer in (place.a, place.b)]
    axes = [tuple(layer.options.get("axes") or ())
            for layer in (place.a, place.b)]
    u, v = place.call_a.outputs[0], place.call_b.outputs[0]
    x = place.call_a.inputs[0]
    if rates[0] == rates[1] and axes[0] == axes[1]:
        return _masks(case, u, v, f"dropout {place.call_a.path}")
    # b's own factor where b keeps an element
    kept = 1 / (1 - rates[1]) if rates[1] and rates[1] < 1 else 1.0
    residual = _left(u, v, np.where(v != 0, x * kept, 0.0))
    return [Cause("dropout rate", (
        f"dropout {place.call_a.path}: rate {rates[0]} (axes {axes[0]}) on "
        f"{case.engine('a')}, {rates[1]} (axes {axes[1]}) on "
        f"{case.engine('b')}. Dropout(rate, axes) in Gluon and nn.Dropout(p)"
        " must be equal"), residual)] if residual < case.limit else []


def _parameter(case: _Case, layer: Any, kind: str) -> Optional[np.ndarray]:
    """A parameter of a's layer before the step."""
    for name in layer.parameters:
        if case.kinds.get(name) == kind:
            return case.evidence.before.values[name]
    return None


def _axis_shape(value: np.ndarray, ndim: int, axis: int) -> np.ndarray:
    return value.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _batch_norm(case: _Case, place: Any) -> Found:
    x = place.call_a.inputs[0].astype(float)
    u, v = (c.outputs[0] for c in (place.call_a, place.call_b))
    one, two = place.a.options, place.b.options
    axis = one.get("axis", 1) % x.ndim
    axes = tuple(i for i in range(x.ndim) if i != axis)
    first = next(i for i, n in enumerate(case.evidence.a.rows) if n)
    running = [_parameter(case, place.a, kind)
               for kind in ("running_mean", "running_var")]
    shared: Dict[str, Tuple[Any, Any]] = {}
    if running[0] is not None and running[1] is not None:
        at = min(first, len(running[0]) - 1)
        shared["of the running statistics"] = (running[0][at],
                                               running[1][at])
    whole = np.concatenate([
        call.inputs[0].astype(float) for _, call in case.calls("a")
        if call.path == place.call_a.path])
    shared["of all rows"] = whole.mean(axes), whole.var(axes)
    statistics, shown = {}, ROWS
    for side in ("a", "b"):
        statistics[side] = dict(shared)
        if case.devices(side) > 1:
            rows = next(n for n in case.records[side].rows if n)
            shown = min(shown, rows)
            own = x[:rows] if len(x) == case.rows else x
            statistics[side]["of each device's own rows"] = (
                own.mean(axes), own.var(axes))
    gammas: Dict[str, Any] = {"gamma": _parameter(case, place.a, "gamma")}
    if gammas["gamma"] is None:     # fixed ones are no weights of the net
        gammas["gamma"] = next(
            (case.evidence.before.values[n] for n in place.a.parameters
             if n.endswith("gamma") and n in case.evidence.before.values),
            None)
    if gammas["gamma"] is None:
        del gammas["gamma"]
    gammas["gamma = 1"] = None
    beta = _parameter(case, place.a, "beta")
    epsilons = dict.fromkeys([one["epsilon"], two["epsilon"], 1e-5, 1e-3])

    def output(mean: Any, var: Any, gamma: Any, epsilon: float
               ) -> np.ndarray:
        y = (x[:shown] - _axis_shape(mean, x.ndim, axis)) / np.sqrt(
            _axis_shape(var, x.ndim, axis) + epsilon)
        if gamma is not None:
            y = y * _axis_shape(gamma, x.ndim, axis)
        return y if beta is None else y + _axis_shape(beta, x.ndim, axis)
    fits: Dict[str, List[Any]] = {"a": [], "b": []}
    for side, seen, layer in (("a", u, place.a), ("b", v, place.b)):
        for (s, (mean, var)), (g, gamma), e in itertools.product(
                statistics[side].items(), gammas.items(), epsilons):
            y = output(mean, var, gamma, e)
            if layer.options.get("relu"):
                y = np.maximum(y, 0)
            left = _apart(y, seen[:shown]) / (
                _apart(u[:shown], v[:shown]) or 1)
            if left < case.limit:
                fits[side].append((left, (s, g, e)))
    if not fits["a"] or not fits["b"]:
        return []
    # the pair of explanations with the fewest changes, then the best
    (f, left_a), (h, left_b) = min(
        (((x, p), (z, q)) for p, x in fits["a"] for q, z in fits["b"]),
        key=lambda pair: (sum(m != n for m, n in zip(
            pair[0][0], pair[1][0])), pair[0][1] + pair[1][1]))
    residual, path = max(left_a, left_b), place.call_a.path
    found: Found = []
    sides = f"{case.engine('a')}, {{}} on {case.engine('b')}"
    if f[2] != h[2]:
        found.append(_epsilon_cause(case, place, f[2], h[2], residual))
    if f[1] != h[1]:
        found.append(Cause("fix_gamma", (
            f"batch norm {path}: {f[1]} on " + sides.format(h[1])
            + ". Gluon's scale=False (fix_gamma of nd and sym) takes gamma "
            "for 1 whatever is stored: BatchNorm(scale=True) in Gluon, or "
            "weights of 1 that are frozen on torch"), residual))
    if f[0] != h[0]:
        name = "batch-norm mode" if "running" in f[0] + h[0] \
            else "batch-norm policy"
        found.append(Cause(name, (
            f"batch norm {path} normalises with the mean and variance "
            f"{f[0]} on " + sides.format(h[0]) + (
                ": use_global_stats in Gluon, eval() on torch" if
                name == "batch-norm mode" else
                ": give both sides one batch_norm=, 'per_device' or 'sync'")
        ), residual))
    return found


def _epsilon_cause(case: _Case, place: Any, e: float, f: float,
                   residual: float) -> Cause:
    return Cause("normalisation epsilon", (
        f"{place.a.kind} {place.call_a.path}: epsilon {e:g} on "
        f"{case.engine('a')}, {f:g} on {case.engine('b')}. Gluon's layers "
        "and torch's have 1e-5, mx.nd and mx.sym.BatchNorm 1e-3: "
        "epsilon= in Gluon, eps= on torch"), residual)


def _norm(case: _Case, place: Any) -> Found:
    """Layer, group and instance norm: another epsilon?"""
    x = place.call_a.inputs[0].astype(float)
    u, v = (c.outputs[0][:ROWS] for c in (place.call_a, place.call_b))
    gamma, beta = (_parameter(case, place.a, k) for k in ("gamma", "beta"))
    x, shape = x[:ROWS], x[:ROWS].shape
    if place.a.kind == "layer_norm":
        dims = gamma.ndim if gamma is not None else 1
        views = [(shape, tuple(range(x.ndim - dims, x.ndim)))]
    else:
        channels = shape[1]
        groups = [channels] if place.a.kind == "instance_norm" else [
            g for g in range(1, channels + 1) if channels % g == 0]
        views = [((shape[0], g, channels // g, *shape[2:]),
                  tuple(range(2, len(shape) + 1))) for g in groups]

    def output(view: Any, epsilon: float) -> np.ndarray:
        z = x.reshape(view[0])
        z = (z - z.mean(view[1], keepdims=True)) / np.sqrt(
            z.var(view[1], keepdims=True) + epsilon)
        z = z.reshape(shape)
        for p, join in ((gamma, np.multiply), (beta, np.add)):
            if p is not None:
                if place.a.kind != "layer_norm":
                    if p.size != shape[1]:
                        continue
                    p = p.reshape(-1, *[1] * (x.ndim - 2))
                z = join(z, p)
        return z
    apart = _apart(u, v) or 1
    epsilons = dict.fromkeys([place.a.options["epsilon"],
                              place.b.options["epsilon"],
                              1e-5, 1e-3, 1e-6, 1e-12])
    for view in views:
        e, f = (min((_apart(output(view, e), y) / apart, e)
                    for e in epsilons) for y in (u, v))
        if max(e[0], f[0]) < case.limit and e[1] != f[1]:
            return [_epsilon_cause(case, place, e[1], f[1],
                                   max(e[0], f[0]))]
    return []


class _Pooling(NamedTuple):
    """What decides a pooling layer's output."""

    kernel: Tuple[int, ...]
    stride: Tuple[int, ...]
    padding: Tuple[int, ...]
    ceil: bool
    count_include_pad: bool
    keep: bool      # a last window that lies wholly in the padding


def _pool(x: np.ndarray, average: bool, rule: _Pooling) -> np.ndarray:
    """Sources: pool.h of MXNet 1.9.1 and torch's pooling_output_shape."""
    axes: List[List[Tuple[int, int, int]]] = []
    for n, k, s, p in zip(x.shape[2:], rule.kernel, rule.stride,
                          rule.padding):
        count = (n + 2 * p - k) // s + 1
        if rule.ceil:
            count = -(-(n + 2 * p - k) // s) + 1
            if not rule.keep and (count - 1) * s >= n + p:
                count -= 1
        axes.append([(max(i * s - p, 0), min(i * s - p + k, n),
                      min(i * s - p + k, n + p) - (i * s - p))
                     for i in range(count)])
    y = np.empty((*x.shape[:2], *map(len, axes)))
    for place in itertools.product(*map(range, y.shape[2:])):
        window = [axes[d][i] for d, i in enumerate(place)]
        part = x[(..., *(slice(b, max(b, e)) for b, e, _ in window))]
        part = part.reshape(*x.shape[:2], -1)
        size = math.prod(w for *_, w in window) \
            if rule.count_include_pad else part.shape[2]
        y[(..., *place)] = (part.sum(2) / size if average
                            else part.max(2, initial=-math.inf))
    return y


def _pooling(case: _Case, place: Any) -> Found:
    if "kernel" not in place.a.options:
        return []
    x = place.call_a.inputs[0][:ROWS].astype(float)
    u, v = (c.outputs[0][:ROWS] for c in (place.call_a, place.call_b))
    average = place.a.kind.startswith("avg")

    def rule(options: Mapping[str, Any], keep: bool) -> _Pooling:
        return _Pooling(options["kernel"], options["stride"],
                        options["padding"], options["ceil"],
                        options.get("count_include_pad", True), keep)

    def left(r: _Pooling, seen: np.ndarray) -> float:
        y = _pool(x, average, r)
        if y.shape != seen.shape:
            return math.inf
        empty = ~np.isfinite(y)     # what an empty window gives is no matter
        return _apart(y[~empty], seen[~empty]) / (
            _apart(u, v) if u.shape == v.shape else np.abs(seen).max() or 1)
    own = [rule(place.a.options, keep) for keep in (False, True)]
    theirs = [rule(place.b.options, keep) for keep in (False, True)]
    tried = dict.fromkeys(own + theirs + [
        r._replace(**{f: value}) for r in own + theirs
        for f in ("ceil", "count_include_pad") for value in (False, True)])
    fits = [[(left(r, seen), r) for r in tried] for seen in (u, v)]
    pairs = [(r, s, max(e, f)) for e, r in fits[0] if e < case.limit
             for f, s in fits[1] if f < case.limit]
    if not pairs:
        return []
    # An option that differs for all to see is blamed before one that would
    # have to differ behind the options.
    shown = {f for f, p, q in zip(_Pooling._fields, own[0], theirs[0])
             if p != q}

    def cost(pair: Any) -> Any:
        changed = {f for f, p, q in zip(_Pooling._fields, *pair[:2])
                   if p != q}
        return (len(changed - shown), len(changed), pair[0] not in own,
                pair[1] not in theirs, pair[2])
    r, s, residual = min(pairs, key=cost)
    texts = {
        "keep": ("windows in the padding", (
            "a last window that lies wholly in the padding is kept on {} "
            "and dropped on {}: Gluon keeps it, torch does not. Use "
            "ceil_mode=False with explicit padding on both")),
        "ceil": ("pooling ceil_mode", (
            "the size is rounded up on {} and down on {}: ceil_mode= of "
            "both frameworks must be equal")),
        "count_include_pad": ("count_include_pad", (
            "zeros of the padding count in the mean on {} and not on {}: "
            "count_include_pad= of both frameworks must be equal"))}
    found: Found = []
    for field, p, q in zip(_Pooling._fields, r, s):
        if p == q:
            continue
        name, text = texts.get(field, ("layer options", (
            f"{field} is {p} on {case.engine('a')} and {q} on "
            f"{case.engine('b')}")))
        order = ("a", "b") if p is True else ("b", "a")
        found.append(Cause(name, f"{place.a.kind} {place.call_a.path}: "
                           + text.format(*map(case.engine, order)),
                           residual))
    return found


def _convolve(x: np.ndarray, weight: np.ndarray, bias: Optional[np.ndarray],
              options: Mapping[str, Any]) -> np.ndarray:
    """A convolution of any number of dimensions, (rows, channels, ...)."""
    pads, dilation = options["padding"], options["dilation"]
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pads)])
    dims = len(pads)
    size = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation))
    windows = np.lib.stride_tricks.sliding_window_view(
        x, size, tuple(range(2, 2 + dims)))
    windows = windows[(slice(None), slice(None),
                       *(slice(None, None, s) for s in options["stride"]),
                       *(slice(None, None, d) for d in dilation))]
    groups = options["groups"]
    parts = []
    for xs, ws in zip(np.split(windows, groups, 1),
                      np.split(weight, groups, 0)):
        axes = [1, *range(2 + dims, 2 + 2 * dims)]
        y = np.tensordot(xs, ws, (axes, [1, *range(2, 2 + dims)]))
        parts.append(np.moveaxis(y, -1, 1))
    y = np.concatenate(parts, 1)
    return y if bias is None else y + _axis_shape(bias, y.ndim, 1)


def _conv(case: _Case, place: Any) -> Found:
    differ = [k for k in ("stride", "padding", "dilation", "groups")
              if place.a.options.get(k) != place.b.options.get(k)]
    weight = _parameter(case, place.a, "weight")
    if not differ or weight is None \
            or isinstance(place.b.options["padding"], str):
        return []
    x = place.call_a.inputs[0][:ROWS].astype(float)
    u, v = (c.outputs[0][:ROWS] for c in (place.call_a, place.call_b))
    predicted = _convolve(x, weight, _parameter(case, place.a, "bias"),
                          place.b.options)
    act = _ACTIVATIONS.get(place.b.options.get("activation")
                           or "no activation")
    residual = _left(u, v, act(predicted)) if act else math.inf
    if residual > case.limit:
        return []
    return [Cause("layer options", (
        f"conv {place.call_a.path}: " + _differences(case, place, differ)),
        residual)]


def _differences(case: _Case, place: Any, differ: Sequence[str]) -> str:
    return "; ".join(
        f"{k} is {place.a.options.get(k)!r} on {case.engine('a')} and "
        f"{place.b.options.get(k)!r} on {case.engine('b')}"
        for k in differ) + ". Make them equal"


def _leaky(case: _Case, place: Any) -> Found:
    x = place.call_a.inputs[0]
    u, v = (c.outputs[0] for c in (place.call_a, place.call_b))
    slopes = []
    for y in (u, v):
        below = x < 0
        slopes.append(float(np.median(y[below] / x[below]))
                      if below.any() else 0.0)
    residual = max(_left(u, v, np.where(x > 0, x, slopes[1] * x)),
                   _left(v, u, np.where(x > 0, x, slopes[0] * x)))
    return [Cause("activation", (
        f"leaky_relu {place.call_a.path}: slope {slopes[0]:.6g} on "
        f"{case.engine('a')}, {slopes[1]:.6g} on {case.engine('b')}: "
        "LeakyReLU(alpha) in Gluon, LeakyReLU(negative_slope) on torch"),
        residual)] if residual < case.limit else []


def _options(case: _Case, place: Any) -> Found:
    """The last resort: name options that differ, without a computation."""
    differ = [k for k in place.a.options if k in place.b.options
              and place.a.options[k] != place.b.options[k]
              and k != "flatten"]
    return [Cause("layer options", (
        f"{place.a.kind} {place.call_a.path}: "
        + _differences(case, place, differ)
        + "; the effect was not computed"), 1.0)] if differ else []


_LAYERS: Dict[str, Callable[[_Case, Any], Found]] = {
    "batch_norm": _batch_norm, "dropout": _dropout, "layer_norm": _norm,
    "group_norm": _norm, "instance_norm": _norm, "max_pool": _pooling,
    "avg_pool": _pooling, "conv": _conv, "leaky_relu": _leaky}
#: kinds whose rule above leaves nothing to guess
_COMPUTED = {"batch_norm", "dropout", "layer_norm", "instance_norm",
             "conv", "leaky_relu", "dense", "embedding"}


# -- the loss ---------------------------------------------------------------

def _loss(case: _Case) -> Found:
    one, two = case.evidence.a.losses, case.evidence.b.losses
    found: Found = []
    shards = [n for n in case.evidence.a.rows if n]
    for own, other, side in ((one, two, "b"), (two, one, "a")):
        if len(own) != case.rows:
            continue
        cuts = np.split(own, np.cumsum([
            n for n in case.records[side].rows if n])[:-1])
        spread = len(other) == case.rows
        for how, reduce in (("mean", np.mean), ("sum", np.sum)):
            values = [float(reduce(cut)) for cut in cuts]
            if spread:
                values = [v for v, cut in zip(values, cuts) for _ in cut]
            for factor in (1.0, 2.0, 0.5):
                predicted = factor * np.asarray(values)
                if predicted.shape != other.shape or (
                        spread and np.allclose(own, predicted)):
                    continue
                residual = _left(own, other, predicted)
                if residual > case.limit:
                    continue
                found.append(Cause("loss reduction", (
                    f"the loss of {case.engine(side)} is one {how} over the "
                    f"batch (rows per device: {shards}), the other one value "
                    "per example. Gluon's losses do not reduce, torch's do: "
                    "reduction='none' on torch, or "
                    "mgpu.losses.per_example(loss); the division by the "
                    "batch happens once, in Trainer.step"), residual))
                if factor != 1.0:
                    found.append(_half(case, factor, side, residual))
    if one.shape != two.shape:
        return found
    found += _labels(case)
    if found:
        return found
    nonzero = one != 0
    factor = float(np.median(two[nonzero] / one[nonzero])) \
        if nonzero.any() else 1.0
    residual = _left(one, two, factor * one)
    if residual > case.limit:
        return found
    outputs = case.evidence.a.outputs
    axes = math.prod(outputs[0].shape[1:]) if outputs else 1
    for names, text in (
            ((case.rows, *shards), "divides by the rows of the batch"),
            ((axes,), "averages over the other axes of the output, and "
                      "other sums over them")):
        for n in names:
            if n > 1 and _near(factor, n, 1 / n):
                side = "b" if factor < 1 else "a"
                found.append(Cause("loss reduction", (
                    f"the losses of {case.engine('b')} are {factor:.6g} "
                    f"times those of {case.engine('a')}: "
                    f"{case.engine(side)} {text}. Compare the values of "
                    "single examples: reduction='none' on torch, "
                    "mgpu.losses on both"), residual))
    if _near(factor, 2, 0.5):
        found.append(_half(case, factor, "b", residual))
    if not found:
        found.append(Cause("loss weight", (
            f"the losses of {case.engine('b')} are {factor:.6g} times those "
            f"of {case.engine('a')}: a weight= in Gluon, a factor on torch, "
            "or Huber's rho (torch's huber_loss is rho times Gluon's)"),
            residual))
    return found


def _half(case: _Case, factor: float, side: str, residual: float) -> Cause:
    twice = side if factor > 1 else ("a" if side == "b" else "b")
    return Cause("L2 loss", (
        f"the loss of {case.engine(twice)} is twice the other's: Gluon's "
        "L2Loss is half the mean square, torch's MSELoss the mean square. "
        "Use mgpu.losses.L2Loss on both, or halve torch's"), residual)


def _near(factor: float, *values: float) -> bool:
    return any(abs(factor / v - 1) < 1e-6 for v in values)


def _labels(case: _Case) -> Found:
    """Cross-entropy with labels that are out of range, not whole, or in
    another order."""
    ev = case.evidence
    (_, ya), (_, yb) = case.prepared("a"), case.prepared("b")
    found: Found = []
    if len(ya) == 1 and len(yb) == 1 and not _same_lists(ya, yb):
        residual = _reordered(*(y.reshape(len(y), -1)
                                for y in (ya[0], yb[0])))
        if residual < case.limit:
            return [Cause("data order", (
                "the labels come in another order on "
                f"{case.engine('b')}, the inputs do not: shuffle them "
                "together"), residual)]
    outputs = ev.a.outputs
    if len(ya) != 1 or len(outputs) != 1 or outputs[0].ndim != 2 \
            or ya[0].reshape(-1).shape != ev.a.losses.shape:
        return found
    y, logits = ya[0].reshape(-1).astype(float), outputs[0]
    classes = logits.shape[1]
    odd = (np.trunc(y) < 0) | (np.trunc(y) >= classes) | (y != np.trunc(y))
    if not odd.any():
        return found
    log_p = logits - logits.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))

    def entropy(labels: np.ndarray) -> np.ndarray:
        picked = np.clip(labels, 0, classes - 1).astype(int)
        return -log_p[np.arange(len(y)), picked]
    known = {
        "takes the nearest class": entropy(np.trunc(y)),
        "counts from the last class": entropy(np.trunc(y) % classes),
        "leaves such examples out": np.where(odd, 0, entropy(np.trunc(y))),
        "rounds to the next class": entropy(np.round(y))}
    fits: Dict[str, List[Any]] = {}
    for side in ("a", "b"):
        values = case.records[side].losses
        fits[side] = [(_apart(p, values) / (_apart(
            ev.a.losses, ev.b.losses) or 1), how)
            for how, p in known.items()]
        if not min(fits[side])[0] < case.limit:
            return found
    (e, one), (f, two) = min(fits["a"]), min(fits["b"])
    if one == two:
        return found
    row = int(np.argmax(odd))
    return [Cause("labels out of range", (
        f"{int(odd.sum())} labels are no class (row {row}: {y[row]:g}, "
        f"classes 0 to {classes - 1}); the loss of {case.engine('a')} {one}, "
        f"that of {case.engine('b')} {two}. Gluon's loss clips in silence, "
        "torch's refuses or ignores (ignore_index): clean the labels, or "
        "clip them for both"), max(e, f))]


# -- the gradients ----------------------------------------------------------

def _factors(case: _Case) -> Iterator[Tuple[float, str, str]]:
    """What a whole gradient may be multiplied by on b: (factor, name,
    text)."""
    mine, yours = case.devices("a"), case.devices("b")
    both = (("a", mine), ("b", yours))
    for side, k in both:
        if k < 2:
            continue
        text = (f"{case.engine(side)} averages gradients over its {k} "
                "devices where the other side sums them: Gluon's Trainer "
                "sums and divides once by the batch size; on torch "
                "all-reduce with the sum (DistributedDataParallel averages)")
        yield (1 / k if side == "b" else k), "sum or mean over devices", text
        text = (f"{case.engine(side)} is 2^({k} - 1) times too large, as "
                "when its replicas share their arrays: .to(device) and "
                "as_in_context copy nothing where the array is there "
                "already. Clone when replicating (mgpu.initialize does)")
        power = 2.0 ** (k - 1)
        yield (power if side == "b" else 1 / power), "aliased replicas", text
    n = case.rows
    for side, k in both:
        for size in dict.fromkeys((n, n / k)):
            if size > 1:
                yield (1 / size if side == "b" else size), \
                    "loss reduction", (
                        f"{case.engine(side)} has divided by {size:g} "
                        "already: its loss is a mean over the rows. "
                        "reduction='sum' or 'none' on torch; divide once, "
                        "in Trainer.step")
    for factor, side in ((2.0, "b"), (0.5, "a")):
        yield factor, "L2 loss", (
            f"{case.engine(side)} is twice the other side: torch's MSELoss "
            "against Gluon's L2Loss, which halves the square")


def _gradient(case: _Case) -> Found:
    ev = case.evidence
    one, two = ev.a.gradients, ev.b.gradients
    scales = case.scales("gradient")
    found = _missing(case)
    if found and not [n for n in scales if n in {
            g.name for g in case.wrong("gradient")}]:
        return found

    def tell(name: str, text: str, predicted: Any, base: Any = one,
             target: Any = two) -> bool:
        residual = case.residual(base, target, predicted, scales)
        if residual < case.limit:
            found.append(Cause(name, text, residual))
        return residual < case.limit
    aliased = {s for s in ("a", "b") if _aliased(case, s)}
    for factor, name, text in _factors(case):
        if aliased and name in ("sum or mean over devices", "L2 loss"):
            continue
        tell(name, text, {n: factor * g for n, g in one.items()})
    for right, side in _sides():
        own, bad = case.records[right].gradients, \
            case.records[side].gradients
        past = [pair[side == "b"].gradients for pair in ev.earlier[::-1]]
        sums = [(f"that of step {ev.step - 1 - i}", g)
                for i, g in enumerate(past)]
        if len(past) > 1:
            sums.append(("those of the last two steps", {
                n: past[0][n] + past[1][n] for n in past[0]
                if n in past[1]}))
        for which, old in sums:
            text = (f"the gradient of {case.engine(side)} {{}} {which}: "
                    "zero it before each backward pass on torch "
                    "(zero_grad), grad_req='write' in Gluon, or "
                    "Replicas.zero_grad with 'add'; no ignore_stale_grad")
            tell("stale gradient", text.format("is"),
                 {n: old.get(n, g) for n, g in own.items()}, own, bad)
            tell("stale gradient", text.format("still contains"),
                 {n: g + old.get(n, 0.0) for n, g in own.items()}, own, bad)
        # Left as it was in some parameters only?
        for old in past[:1]:
            stale = {n for n in bad if n in old
                     and np.array_equal(bad[n], old[n]) and np.any(old[n])}
            if stale and len(stale) < len(own):
                tell("stale gradient", (
                    f"the gradients of {', '.join(sorted(stale)[:4])} on "
                    f"{case.engine(side)} are those of the last step: no "
                    "backward pass reached them; no ignore_stale_grad"),
                    {n: old[n] if n in stale else g
                     for n, g in own.items()}, own, bad)
    if not found:
        for right, side in _sides():
            found += _subsets(case, right, side, scales)
    if not found:
        tell("gradient clipping", "all elements of b are within a limit", {
            n: np.clip(g, -(m := max(np.abs(x).max() for x in two.values())),
                       m) for n, g in one.items()})
        tell("gradient clipping", "all elements of a are within a limit", {
            n: np.clip(g, -(m := max(np.abs(x).max() for x in one.values())),
                       m) for n, g in two.items()}, two, one)
    if not found:
        pairs = [(one[n], two[n]) for n in scales if n in one and n in two]
        power = sum(float((x * x).sum()) for x, _ in pairs)
        factor = sum(float((x * z).sum()) for x, z in pairs) / (power or 1)
        tell("gradient scale", (
            f"all gradients of {case.engine('b')} are {factor:.9g} times "
            f"those of {case.engine('a')}, and the losses agree: look for a "
            "loss scale or for clipping of the global norm (Gluon adds 1e-8 "
            "to the norm, torch 1e-6)"),
            {n: factor * g for n, g in one.items()})
    return found


def _missing(case: _Case) -> Found:
    """Parameters with a gradient on one side only."""
    found: Found = []
    one, two = case.evidence.a.gradients, case.evidence.b.gradients
    for have, lack, side in ((one, two, "b"), (two, one, "a")):
        names = [g.name for g in case.wrong("gradient")
                 if g.name in have and g.name not in lack]
        fixed = [n for n in names if case.layer(side, n) is not None
                 and case.layer(side, n).options.get("scale") is False]
        names = [n for n in names if n not in fixed]
        if fixed:
            found.append(Cause("fix_gamma", (
                f"{', '.join(fixed[:4])} is trained on one side only: "
                f"scale=False (fix_gamma) holds it at 1 on "
                f"{case.engine(side)}. BatchNorm(scale=True) in Gluon, or "
                "requires_grad_(False) on torch"), 0.0))
        if names:
            found.append(Cause("frozen parameter", (
                f"{', '.join(names[:4])} gets no gradient on "
                f"{case.engine(side)}: frozen (grad_req='null', "
                "requires_grad=False), detached, or not used"), 0.0))
    return found


def _aliased(case: _Case, side: str) -> bool:
    """Whether replicas of a side share memory."""
    runner = case.runners[side]
    with using_backend(runner.name):
        for p in runner.replicas.params():
            places = [runner.backend.memory(x) for x in p.list_data()]
            for (s, b, e), (t, c, f) in itertools.combinations(places, 2):
                if s == t and b < f and c < e:
                    return True
    return False


def _subsets(case: _Case, right: str, side: str,
             scales: Mapping[str, float]) -> Found:
    """Is a side's sum one over some of its devices, or of their means?"""
    k = case.devices(side)
    if k < 2 or case.devices(right) != k:
        return []
    local = case.local_gradients(right)
    own, bad = (case.records[s].gradients for s in (right, side))
    rows = case.records[right].rows
    found: Found = []

    def tell(name: str, text: str, factors: Sequence[float]) -> None:
        predicted = {n: sum(f * g[n] for f, g in zip(factors, local))
                     for n in own if n in local[0]}
        residual = case.residual(own, bad, predicted, scales)
        if residual < case.limit:
            found.append(Cause(name, text, residual))
    choices = [c for size in (*range(1, min(k, 3)), k - 1)
               for c in itertools.combinations(range(k), size)]
    for chosen in dict.fromkeys(choices):
        mask = [float(i in chosen) for i in range(k)]
        lacks = [i for i in range(k) if i not in chosen]
        text = (f"{case.engine(side)} leaves the gradients of device "
                f"{', '.join(map(str, lacks))} out of the sum")
        tell("device left out", text + ": all-reduce every gradient over "
             "all devices, in place", mask)
        doubled = [1 + m for m in mask]
        tell("device left out", f"{case.engine(side)} adds the gradients of "
             f"device {', '.join(map(str, chosen))} twice", doubled)
    for scale in (1.0, 1 / k, case.rows / k):
        tell("loss reduction", (
            f"{case.engine(side)} adds up the means of its devices, whose "
            f"shards have {rows} rows: a mean of means is no mean. Sum over "
            "the examples, reduction='sum' on torch, and divide once"),
            [scale / n if n else 0.0 for n in rows])
    return found


def _devices(case: _Case) -> Found:
    """Copies of one side that are no longer equal."""
    for right, side in _sides():
        seen, k = case.records[side].apart, case.devices(side)
        if not seen or case.records[right].apart or k < 2 \
                or case.devices(right) != k:
            continue
        local = case.local_gradients(right)
        total = case.records[right].gradients
        names = [n for n in seen if n in total and n in local[0]]
        text = (f"copies of {case.engine(side)} differ between devices "
                f"after the step ({', '.join(names[:3])}): ")
        others = {
            "the sum stays on the first device, the others keep their own "
            "gradients": lambda n, i: local[i][n],
            "the others add the sum to their own gradients":
                lambda n, i: total[n] + local[i][n],
            "the others get nothing": lambda n, i: 0.0 * total[n]}
        found: Found = []
        scales = case.scales("gradient")
        for how, copy in others.items():
            worst = 0.0
            for n in names:
                spread = max(_apart(copy(n, i), total[n])
                             for i in range(1, k))
                if n in scales and seen[n] > 1e-9 * scales[n]:
                    worst = max(worst, abs(spread - seen[n]) / seen[n])
            if names and worst < case.limit:
                found.append(Cause("missing broadcast", text + how + (
                    ". Write the sum into every copy in place (data[i][:] = "
                    "total): rebinding a list entry changes no replica"),
                    worst))
        return found or [Cause("missing broadcast", text + (
            "what is there was not derived. Start all replicas from one "
            "copy, and write reduced gradients into every copy"), 1.0)]
    return []


# -- the update -------------------------------------------------------------

_OPS = SimpleNamespace(
    abs=np.abs, sign=np.sign, sqrt=np.sqrt, exp=np.exp, log=np.log,
    maximum=np.maximum, minimum=np.minimum, zeros_like=np.zeros_like)


class _Rule(NamedTuple):
    """How one side updates, by the names of a."""

    side: str
    optimizer: Any
    rate: float
    lr_mult: Dict[str, float]
    wd_mult: Dict[str, float]
    gradients: Dict[str, np.ndarray]
    divisor: float
    slots: Dict[Tuple[str, str], Any]
    counts: Dict[str, int]
    last_rate: Dict[str, float]     # of the update before
    decay: str = "own"              # or "outside", "inside" the rule
    repeats: int = 1


def _rule_of(case: _Case, side: str) -> _Rule:
    ev, runner, record = (case.evidence, case.runners[side],
                          case.records[side])
    trainer, names = runner.trainer, case.names[side]
    own = {p.name: p for p in runner.replicas.params()}
    names = {n: o for n, o in names.items() if o in own}
    before = ev.before.optimizer
    slots: Dict[Tuple[str, str], Any] = dict(before.slots)
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
        {n: trainer._lr_mult.get(o, own[o].lr_mult)
         for n, o in names.items()},
        {n: trainer._wd_mult.get(o, own[o].wd_mult)
         for n, o in names.items()},
        record.gradients, record.divisor, slots, before.counts,
        {n: runner.last_rate(o, before.num_update)
         for n, o in names.items()} if before.num_update else {})


def _parts(case: _Case, names: Iterable[str]) -> Dict[str, np.ndarray]:
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


def _move(case: _Case, rule: _Rule, parts: Mapping[str, np.ndarray]
          ) -> Tuple[Dict[str, np.ndarray], Dict[str, np.ndarray]]:
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
    order = sorted(states, key=case.runners["a"].trainer._gluons_order())
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


def _options_of(optimizer: Any) -> Dict[str, Any]:
    options = {}
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.name == "betas":
            options["beta1"], options["beta2"] = value
        else:
            options[_SAME.get(field.name, field.name)] = value
    return options


def _with(optimizer: Any, options: Mapping[str, Any],
          kind: Optional[type] = None) -> Any:
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


def _counterpart(optimizer: Any, name: Optional[str] = None
                 ) -> Optional[type]:
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


Change = Tuple[str, str, Callable[[_Rule], _Rule]]


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


def _single(x: Any) -> Any:
    """A number as float32 keeps it."""
    return float(np.float32(x)) if isinstance(x, float) else x


def _changes(case: _Case, rule: _Rule, other: _Rule) -> List[Change]:
    """What a side (that of `other`) may do in another way than `rule`."""
    side, right = case.engine(other.side), case.engine(rule.side)
    mine, yours = map(_options_of, (rule.optimizer, other.optimizer))
    kind = type(rule.optimizer).__name__
    changes: List[Change] = []

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
    for factor, name, text in _factors(case):
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
        shown = ", ".join(f"{n} {yours[n]!r} (not {mine[n]!r})"
                          for n in names)
        single = all(isinstance(mine[n], float)
                     and _near_single(mine[n], yours[n]) for n in names)
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
    if rule.rate != other.rate and not _near_single(rule.rate, other.rate):
        add("learning rate", (
            f"the rate is {other.rate:g} on {side} and {rule.rate:g} on "
            f"{right}: give both the same learning_rate (lr on torch) and "
            "the same schedule, counted in updates"),
            lambda r: r._replace(rate=other.rate))
    text = (f"{side} keeps learning rate, weight decay or momentum as "
            f"float32, as MXNet's own kernels do, {right} as double: use "
            "values that float32 holds, such as 0.125")
    add("float32 hyper-parameters", text,
        lambda r: r._replace(rate=_single(r.rate)))
    add("float32 hyper-parameters", text, lambda r: r._replace(
        rate=_single(r.rate), optimizer=_with(r.optimizer, {
            n: _single(v) for n, v in _options_of(r.optimizer).items()})))
    if rule.rate != other.rate:
        add("float32 hyper-parameters", text,
            lambda r: r._replace(rate=other.rate))
        if not _near_single(rule.rate, other.rate):
            changes.pop()
    return changes


def _near_single(x: float, y: float) -> bool:
    """Whether `x` and `y` are one number but for rounding to float32."""
    return x != y and (_single(x) == y or _single(y) == x)


def _update(case: _Case) -> Found:
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

    def seen(side: str) -> Dict[str, np.ndarray]:
        after = case.records[side].after
        if stage == "weight":
            return {n: after.values[n].reshape(-1)[parts[n]] for n in names}
        return {f"{n}.{s}": np.asarray(v).reshape(-1)[parts[n]]
                for (n, s), v in after.optimizer.slots.items()
                if n in parts and np.ndim(v)}

    def predicted(rule: _Rule) -> Dict[str, np.ndarray]:
        moved = _move(case, rule, parts)[stage == "memory"]
        if stage == "memory":   # in the terms of a, as b's record is
            inside = [type(o).__name__ in ("SGD", "NAG") for o in (
                rules["a"].optimizer, rule.optimizer)]
            for key in moved:
                rate = -rule.rate * rule.lr_mult.get(
                    key.rpartition(".")[0], 1.0)
                if key.endswith(".momentum") and inside[0] != inside[1]:
                    moved[key] = moved[key] * (
                        rate if inside[0] else 1 / rate)
        return moved

    def near(x: Mapping[str, np.ndarray], z: Mapping[str, np.ndarray],
             times: float) -> bool:
        return all(_apart(x[n], z[n]) <= times * case.tolerance * scales[n]
                   for n in scales if n in x and n in z)
    found: Found = []
    for right, side in _sides():
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
            still = [n for n in scales if _apart(
                target[n], ev.before.values[n].reshape(-1)[parts[n]]) == 0
                and _apart(base[n], target[n]) > case.tolerance * scales[n]
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
                    shown += [Cause(n1, t1, residual),
                              Cause(n2, t2, residual)]
                    break
        found += shown
    return found


# -- running statistics -----------------------------------------------------

def _counts(case: _Case, name: str) -> List[float]:
    """Values per channel that a's statistics `name` were taken over, for
    each device."""
    layer = case.layer("a", name)
    k = case.devices("a")
    counts = [0.0] * k
    if layer is None:
        return counts
    channels = case.evidence.before.values[name].shape[-1]
    for index, call in case.calls("a"):
        if call.path == layer.path and call.inputs:
            counts[index] += call.inputs[0].size / channels
    policy = case.runners["a"].side.batch_norm
    return [sum(counts)] * k if policy == "sync" else counts


def _statistics(case: _Case) -> Found:
    """Predict every running statistic of b from a's, from before the step:
    ``r <- m r + (1 - m) s``."""
    found: Found = []
    scales = case.scales("statistic")
    for which in ("running_mean", "running_var"):
        names = {n: s for n, s in scales.items() if case.kinds[n] == which}
        if not any(g.name in names for g in case.wrong("statistic")):
            continue
        found += _policy(case, names) or _statistic(case, which, names)
    return found


def _policy(case: _Case, names: Mapping[str, float]) -> Found:
    one, two = (case.records[s].after.values for s in ("a", "b"))
    if any(one[n].shape != two[n].shape for n in names):
        k = case.devices("a"), case.devices("b")
        return [Cause("batch-norm policy", (
            f"the sides keep running statistics of {k[0]} and {k[1]} "
            "devices, whose rows differ. batch_norm='sync' makes the number "
            "of devices irrelevant"), 1.0)]
    found: Found = []
    for right, side in _sides():
        own, bad = (case.records[s].after.values for s in (right, side))
        if case.devices(side) < 2:
            continue
        for how, make in (
                ("the means over devices, as batch_norm='average' does",
                 lambda x: np.repeat(x.mean(0, keepdims=True), len(x), 0)),
                ("those of the first device, as torch's DataParallel does",
                 lambda x: np.repeat(x[:1], len(x), 0))):
            residual = case.residual(own, bad, {
                n: make(own[n]) for n in names}, names)
            if residual < case.limit:
                found.append(Cause("batch-norm policy", (
                    f"every device of {case.engine(side)} keeps {how}; "
                    f"{case.engine(right)} keeps {{}}. Give both sides one "
                    "batch_norm= ('per_device' is Gluon's)".format(
                        case.runners[right].side.batch_norm)), residual))
    return found


def _statistic(case: _Case, which: str, names: Mapping[str, float]) -> Found:
    ev = case.evidence
    variance = which == "running_var"
    own, bad = ev.a.after.values, ev.b.after.values
    options = {s: {n: case.layer(s, n).options.get("momentum")
                   for n in names if case.layer(s, n) is not None}
               for s in ("a", "b")}
    counts = {n: np.asarray(_counts(case, n))[:, None] for n in names}

    def shares(side: str) -> Dict[str, Dict[str, float]]:
        """Ways to read the option: the share of the old statistic."""
        known = {n: m for n, m in options[side].items() if m is not None}
        return {
            "": known,
            "single": {n: _single(m) for n, m in known.items()},
            "exchanged": {n: 1 - m for n, m in known.items()},
            "exchanged, single": {n: _single(1 - m)
                                  for n, m in known.items()}}
    factors: Dict[str, Any] = {"": lambda n: 1.0}
    if variance:
        factors["unbiased"] = lambda n: np.where(
            counts[n] > 1, counts[n] / np.maximum(counts[n] - 1, 1), 1.0)
        factors["biased"] = lambda n: 1 / factors["unbiased"](n)
    best: Optional[Tuple[Any, float, Any]] = None
    tried = {**{("b",) + (k,): v for k, v in shares("b").items()},
             **{("a",) + (k,): v for k, v in shares("a").items()},
             ("mean",): dict.fromkeys(names, 1 - 1 / ev.step)}
    for start in ("", "single"):
        given = shares("a")[start]
        if any(n not in given for n in names):
            continue
        for (key, kept), (how, factor), times in itertools.product(
                tried.items(), factors.items(), (1, 0, 2)):
            if any(n not in kept for n in names):
                continue
            predicted = {}
            for n in names:
                old = ev.before.values[n]
                if old.shape != own[n].shape:
                    return []
                batch = (own[n] - given[n] * old) / (1 - given[n])
                new = old
                for _ in range(times):
                    new = kept[n] * new + (1 - kept[n]) * factor(n) * batch
                predicted[n] = new
            residual = case.residual(own, bad, predicted, names)
            if not residual < case.limit or times == 0 and (
                    key[-1] or how):
                continue
            # float32 here and there is no change of its own
            rounding = any(kept[n] != given[n] and _near_single(
                kept[n], given[n]) for n in names)
            value = any(abs(kept[n] - given[n]) > 1e-6 for n in names)
            cost = (residual > 1e-4, bool(how) + value + (times != 1)
                    + 0.5 * rounding, residual)
            if best is None or cost < best[0]:
                best = (cost, residual, (kept, given, how, times, rounding,
                                         value))
    if best is None:
        return []
    _, residual, (kept, given, how, times, rounding, value) = best
    found: Found = []
    first = next(iter(names))
    layer = case.layer("a", first).path
    if how:
        side = "b" if how == "unbiased" else "a"
        n = float(counts[first].max())
        found.append(Cause("unbiased variance", (
            f"batch norm {layer} and {len(names) - 1} more: "
            f"{case.engine(side)} keeps the unbiased variance of the batch, "
            f"n/(n-1) with n = {n:g} values, as torch does; Gluon keeps the "
            "biased one. mgpu.parity.gluonize(net) on torch, or "
            "native=False"), residual))
    if times != 1:
        found.append(Cause("statistics updates", (
            f"the running statistics of batch norm {layer} move "
            f"{'twice' if times else 'not at all'} in a step on "
            f"{case.engine('b')}: " + (
                "two training passes before one update" if times else
                "frozen, use_global_stats in Gluon, eval() or "
                "track_running_stats=False on torch")), residual))
    if value and times:
        found.append(Cause("statistics momentum", (
            f"batch norm {layer}: the old statistic keeps a share of "
            f"{given[first]:.6g} on {case.engine('a')} and of "
            f"{kept[first]:.6g} on {case.engine('b')}. Gluon's momentum is "
            "that share, torch's is 1 minus it: BatchNorm(momentum=0.9) is "
            "BatchNorm2d(momentum=0.1)"), residual))
    elif rounding:
        found.append(Cause("float32 statistics momentum", (
            f"batch norm {layer}: MXNet keeps the momentum as float32, "
            f"{_single(given[first])!r}, torch as double; about 1e-8 of a "
            "statistic. mgpu.parity.gluonize(net) on torch, native=False, "
            "or a momentum that float32 holds, such as 0.875"), residual))
    return found
