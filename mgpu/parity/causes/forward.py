"""Causes of another output: the data, or the first layer that differs."""
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.causes.case import (PART, ROWS, Case, Cause, Found, distance,
                                     unexplained)


def causes(case: Case) -> Found:
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


def _data(case: Case) -> Found:
    """What the sides' own data paths do with one batch."""
    (Xa, ya), (Xb, yb) = case.prepared("a"), case.prepared("b")
    found: Found = []
    if len(Xa) != len(Xb) or same_lists(Xa, Xb) and same_lists(ya, yb):
        return found
    order = all(reordered(u, v) < case.limit for u, v in zip(Xa, Xb))
    if order and not same_lists(Xa, Xb):
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
    residual = max((unexplained(u, v, p) for u, v, p in zip(
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
            if distance(scale * x + shift, z) < 1e-6 * np.abs(z).max():
                return f", {scale:.6g} times its input plus {shift:.6g}"
    return ""


def same_lists(xs: Sequence[np.ndarray], zs: Sequence[np.ndarray]) -> bool:
    return len(xs) == len(zs) and all(
        x.shape == z.shape and np.array_equal(x, z) for x, z in zip(xs, zs))


def _sorted_rows(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(len(x), -1)
    # rounding must not change the order: sort by coarse values
    keys = np.round(rows[:, :64] / (np.abs(rows).max() or 1.0), 6)
    return rows[np.lexsort(keys.T[::-1])]


def reordered(u: np.ndarray, v: np.ndarray) -> float:
    """Residual of "`v` has the rows of `u` in another order"."""
    if u.shape != v.shape or u.ndim == 0 or len(u) < 2:
        return math.inf
    u, v = u.astype(float), v.astype(float)
    return unexplained(_sorted_rows(u), _sorted_rows(v), _sorted_rows(u)) \
        if np.array_equal(u, v) else distance(
            _sorted_rows(u), _sorted_rows(v)) / distance(u, v)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
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


def _ahead(case: Case, place: Any) -> list[np.ndarray]:
    """Outputs of a's last layers before the place, newest first."""
    outputs: list[np.ndarray] = []
    for index, call in case.calls("a"):
        if index == 0:
            if call.path == place.call_a.path:
                break
            outputs += call.outputs[:1]
    return outputs[:-4:-1]


def _between(case: Case, u: np.ndarray, v: np.ndarray, where: str,
             ahead: Sequence[np.ndarray]) -> Found:
    """What turns tensor `u` of a into `v` of b, or both out of one of
    `ahead`?"""
    found: Found = []
    residual = reordered(u, v)
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
                    error = distance(value, seen) / (distance(x, z) or 1)
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
            residual = reordered(u.T, v.reshape(u.shape).T)
            if residual < case.limit:
                found.append(Cause("dense flatten", (
                    f"{where}: the columns of {case.engine('b')} are those "
                    f"of {case.engine('a')} in another order, as when one "
                    "side flattens (rows, channels, height, width) and the "
                    "other (rows, height, width, channels): permute to one "
                    "layout before Flatten"), residual))
    return found


def _flatten(case: Case, u: np.ndarray, v: np.ndarray) -> Found:
    """Equal numbers, another shape."""
    if u.shape == v.shape or u.size != v.size:
        return []
    residual = distance(u.reshape(-1), v.reshape(-1)) / (
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


def _masks(case: Case, u: np.ndarray, v: np.ndarray, where: str) -> Found:
    """Zeros in other places, and one factor elsewhere."""
    if u.shape != v.shape:
        return []
    both = (u != 0) & (v != 0)
    apart = (u == 0) != (v == 0)
    if not apart.any() or both.sum() < 3:
        return []
    factor = float(np.median(v[both] / u[both]))
    residual = distance(v[both], factor * u[both]) / distance(u, v)
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


def _dropout(case: Case, place: Any) -> Found:
    rates = [layer.options.get("rate") for layer in (place.a, place.b)]
    axes = [tuple(layer.options.get("axes") or ())
            for layer in (place.a, place.b)]
    u, v = place.call_a.outputs[0], place.call_b.outputs[0]
    x = place.call_a.inputs[0]
    if rates[0] == rates[1] and axes[0] == axes[1]:
        return _masks(case, u, v, f"dropout {place.call_a.path}")
    # b's own factor where b keeps an element
    kept = 1 / (1 - rates[1]) if rates[1] and rates[1] < 1 else 1.0
    residual = unexplained(u, v, np.where(v != 0, x * kept, 0.0))
    return [Cause("dropout rate", (
        f"dropout {place.call_a.path}: rate {rates[0]} (axes {axes[0]}) on "
        f"{case.engine('a')}, {rates[1]} (axes {axes[1]}) on "
        f"{case.engine('b')}. Dropout(rate, axes) in Gluon and nn.Dropout(p)"
        " must be equal"), residual)] if residual < case.limit else []


def _parameter(case: Case, layer: Any, kind: str) -> np.ndarray | None:
    """A parameter of a's layer before the step."""
    for name in layer.parameters:
        if case.kinds.get(name) == kind:
            return case.evidence.before.values[name]
    return None


def _axis_shape(value: np.ndarray, ndim: int, axis: int) -> np.ndarray:
    return value.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _batch_norm(case: Case, place: Any) -> Found:
    x = place.call_a.inputs[0].astype(float)
    u, v = (c.outputs[0] for c in (place.call_a, place.call_b))
    one, two = place.a.options, place.b.options
    axis = one.get("axis", 1) % x.ndim
    axes = tuple(i for i in range(x.ndim) if i != axis)
    first = next(i for i, n in enumerate(case.evidence.a.rows) if n)
    running = [_parameter(case, place.a, kind)
               for kind in ("running_mean", "running_var")]
    shared: dict[str, tuple[Any, Any]] = {}
    if running[0] is not None and running[1] is not None:
        at = min(first, len(running[0]) - 1)
        shared["of the running statistics"] = (running[0][at], running[1][at])
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
    gammas: dict[str, Any] = {"gamma": _parameter(case, place.a, "gamma")}
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

    def output(mean: Any, var: Any, gamma: Any, epsilon: float) -> np.ndarray:
        y = (x[:shown] - _axis_shape(mean, x.ndim, axis)) / np.sqrt(
            _axis_shape(var, x.ndim, axis) + epsilon)
        if gamma is not None:
            y = y * _axis_shape(gamma, x.ndim, axis)
        return y if beta is None else y + _axis_shape(beta, x.ndim, axis)
    fits: dict[str, list[Any]] = {"a": [], "b": []}
    for side, seen, layer in (("a", u, place.a), ("b", v, place.b)):
        for (s, (mean, var)), (g, gamma), e in itertools.product(
                statistics[side].items(), gammas.items(), epsilons):
            y = output(mean, var, gamma, e)
            if layer.options.get("relu"):
                y = np.maximum(y, 0)
            left = distance(y, seen[:shown]) / (
                distance(u[:shown], v[:shown]) or 1)
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


def _epsilon_cause(case: Case, place: Any, e: float, f: float,
                   residual: float) -> Cause:
    return Cause("normalisation epsilon", (
        f"{place.a.kind} {place.call_a.path}: epsilon {e:g} on "
        f"{case.engine('a')}, {f:g} on {case.engine('b')}. Gluon's layers "
        "and torch's have 1e-5, mx.nd and mx.sym.BatchNorm 1e-3: "
        "epsilon= in Gluon, eps= on torch"), residual)


def _norm(case: Case, place: Any) -> Found:
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
    apart = distance(u, v) or 1
    epsilons = dict.fromkeys([place.a.options["epsilon"],
                              place.b.options["epsilon"],
                              1e-5, 1e-3, 1e-6, 1e-12])
    for view in views:
        e, f = (min((distance(output(view, e), y) / apart, e)
                    for e in epsilons) for y in (u, v))
        if max(e[0], f[0]) < case.limit and e[1] != f[1]:
            return [_epsilon_cause(case, place, e[1], f[1], max(e[0], f[0]))]
    return []


class _Pooling(NamedTuple):
    """What decides a pooling layer's output."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil: bool
    count_include_pad: bool
    keep: bool      # a last window that lies wholly in the padding


def _pool(x: np.ndarray, average: bool, rule: _Pooling) -> np.ndarray:
    """Sources: pool.h of MXNet 1.9.1 and torch's pooling_output_shape."""
    axes: list[list[tuple[int, int, int]]] = []
    for n, k, s, p in zip(x.shape[2:], rule.kernel, rule.stride, rule.padding):
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


def _pooling(case: Case, place: Any) -> Found:
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
        return distance(y[~empty], seen[~empty]) / (
            distance(u, v) if u.shape == v.shape else np.abs(seen).max() or 1)
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
        changed = {f for f, p, q in zip(_Pooling._fields, *pair[:2]) if p != q}
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


def _convolve(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None,
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


def _conv(case: Case, place: Any) -> Found:
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
    residual = unexplained(u, v, act(predicted)) if act else math.inf
    if residual > case.limit:
        return []
    return [Cause("layer options", (
        f"conv {place.call_a.path}: " + _differences(case, place, differ)),
        residual)]


def _differences(case: Case, place: Any, differ: Sequence[str]) -> str:
    return "; ".join(
        f"{k} is {place.a.options.get(k)!r} on {case.engine('a')} and "
        f"{place.b.options.get(k)!r} on {case.engine('b')}"
        for k in differ) + ". Make them equal"


def _leaky(case: Case, place: Any) -> Found:
    x = place.call_a.inputs[0]
    u, v = (c.outputs[0] for c in (place.call_a, place.call_b))
    slopes = []
    for y in (u, v):
        below = x < 0
        slopes.append(float(np.median(y[below] / x[below]))
                      if below.any() else 0.0)
    residual = max(unexplained(u, v, np.where(x > 0, x, slopes[1] * x)),
                   unexplained(v, u, np.where(x > 0, x, slopes[0] * x)))
    return [Cause("activation", (
        f"leaky_relu {place.call_a.path}: slope {slopes[0]:.6g} on "
        f"{case.engine('a')}, {slopes[1]:.6g} on {case.engine('b')}: "
        "LeakyReLU(alpha) in Gluon, LeakyReLU(negative_slope) on torch"),
        residual)] if residual < case.limit else []


def _options(case: Case, place: Any) -> Found:
    """The last resort: name options that differ, without a computation."""
    differ = [k for k in place.a.options if k in place.b.options
              and place.a.options[k] != place.b.options[k]
              and k != "flatten"]
    return [Cause("layer options", (
        f"{place.a.kind} {place.call_a.path}: "
        + _differences(case, place, differ)
        + "; the effect was not computed"), 1.0)] if differ else []


_LAYERS: dict[str, Callable[[Case, Any], Found]] = {
    "batch_norm": _batch_norm, "dropout": _dropout, "layer_norm": _norm,
    "group_norm": _norm, "instance_norm": _norm, "max_pool": _pooling,
    "avg_pool": _pooling, "conv": _conv, "leaky_relu": _leaky}
#: kinds whose rule above leaves nothing to guess
_COMPUTED = {"batch_norm", "dropout", "layer_norm", "instance_norm",
             "conv", "leaky_relu", "dense", "embedding"}
