"""Causes in pooling layers, and in those that enlarge."""
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.causes.difference import (ROWS, Difference, distance, nearest,
                                           once, unexplained)
from mgpu.parity.causes.registry import Found, cause

KINDS = ("max_pool", "avg_pool")


class Pooling(NamedTuple):
    """What decides the output of a pooling layer."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil: bool
    count_include_pad: bool
    keep: bool      # a last window that lies wholly in the padding


def pool(x: np.ndarray, average: bool, rule: Pooling) -> np.ndarray:
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
        window = [axes[dim][i] for dim, i in enumerate(place)]
        inside: Any = (..., *(slice(b, max(b, e)) for b, e, _ in window))
        part = x[inside].reshape(*x.shape[:2], -1)
        size = math.prod(w for *_, w in window) \
            if rule.count_include_pad else part.shape[2]
        y[(..., *place)] = (part.sum(2) / size if average
                            else part.max(2, initial=-math.inf))
    return y


@once
def rules(d: Difference) -> tuple[Pooling, Pooling, float] | None:
    """The rules of both sides that explain their outputs, and the
    residual."""
    # the options of the layers, with either fate of a window in the padding
    own, theirs = ([Pooling(o["kernel"], o["stride"], o["padding"], o["ceil"],
                            o.get("count_include_pad", True), keep)
                    for keep in (False, True)]
                   for o in (d.place.a.options, d.place.b.options))
    tried = dict.fromkeys(own + theirs + [
        r._replace(**{f: value}) for r in own + theirs  # type: ignore
        for f in ("ceil", "count_include_pad") for value in (False, True)])
    x, u, v = d.rows_of_layer(ROWS)

    def left(rule: Pooling, seen: np.ndarray) -> float:
        y = pool(x, d.kind == "avg_pool", rule)
        if y.shape != seen.shape:
            return math.inf
        filled = np.isfinite(y)     # an empty window may give anything
        return distance(y[filled], seen[filled]) / (
            distance(u, v) if u.shape == v.shape else np.abs(seen).max() or 1)
    fits = [[(e, r) for r in tried if (e := left(r, seen)) < d.limit]
            for seen in (u, v)]
    # An option that differs in the layers is blamed before one that would
    # have to differ in spite of equal options.
    shown = _changed(own[0], theirs[0])

    def cost(pair: tuple[Pooling, Pooling, float]) -> Any:
        changed = _changed(*pair[:2])
        return (len(changed - shown), len(changed), pair[0] not in own,
                pair[1] not in theirs, pair[2])
    return min(((r, s, max(e, f)) for e, r in fits[0] for f, s in fits[1]),
               key=cost, default=None)


def _changed(one: Pooling, two: Pooling) -> set[str]:
    return {f for f, p, q in zip(Pooling._fields, one, two) if p != q}


def _differs(d: Difference, field: str, text: str) -> Found:
    """If the rules differ in a switch: `text`, with the side where it is on
    and the other one."""
    found = rules(d)
    if found and field in _changed(*found[:2]):
        on, off = (d.a, d.b) if getattr(found[0], field) else (d.b, d.a)
        yield f"{d.layer}: {text.format(on, off)}", found[2]


@cause("windows in the padding", "forward", resort=1, kinds=KINDS)
def windows(d: Difference) -> Found:
    yield from _differs(d, "keep", (
        "{} keeps a last window that lies wholly in the padding (as Gluon), "
        "{} does not: use ceil_mode=False and explicit padding on both"))


@cause("pooling ceil_mode", "forward", resort=1, kinds=KINDS)
def ceil_mode(d: Difference) -> Found:
    yield from _differs(d, "ceil", "{} rounds the size up, {} down: give "
                        "both the same ceil_mode=")


@cause("count_include_pad", "forward", resort=1, kinds=KINDS)
def padding_counts(d: Difference) -> Found:
    yield from _differs(d, "count_include_pad", (
        "zeros of the padding count in the mean on {} and not on {}: give "
        "both the same count_include_pad="))


@cause("kind of pooling", "forward")
def kind(d: Difference) -> Found:
    place = d.place
    kinds = [layer.kind for layer in (place.a, place.b)
             if layer is not None] if place is not None else []
    if len(kinds) < 2 or not place.inputs_agree or not all(
            k.endswith(KINDS) for k in kinds) \
            or kinds[0][-8:] == kinds[1][-8:]:
        return
    x, u, v = d.rows_of_layer(ROWS)
    average, options = kinds[1].endswith("avg_pool"), place.b.options
    if "kernel" in options:
        y = pool(x, average, Pooling(
            options["kernel"], options["stride"], options["padding"],
            options["ceil"], options.get("count_include_pad", True), False))
    elif kinds[1].startswith("global"):
        axes = tuple(range(2, x.ndim))
        y = (np.mean if average else np.max)(x, axes).reshape(v.shape)
    else:
        return
    yield (f"layer {place.call_a.path}: {kinds[0]} on {d.a} and {kinds[1]} on "
           f"{d.b}: use one of them"), unexplained(u, v, y)


# -- interpolation ------------------------------------------------------------

#: which place between the n inputs each of m outputs has
_PLACES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "nearest": lambda i, n, m: i * n // m,
    "nearest-exact": lambda i, n, m: (2 * i + 1) * n // (2 * m),
    "bilinear with align_corners=False": lambda i, n, m: np.clip(
        (i + 0.5) * n / m - 0.5, 0, n - 1),
    "bilinear with align_corners=True": lambda i, n, m:
        i * (n - 1) / max(m - 1, 1)}


def _interpolated(x: np.ndarray, size: tuple[int, ...], mode: str
                  ) -> np.ndarray:
    for axis, m in enumerate(size, 2):
        n = x.shape[axis]
        at = _PLACES[mode](np.arange(m), n, m)
        weights = np.maximum(1 - np.abs(at[:, None] - np.arange(n)), 0)
        x = np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)
    return x


@cause("interpolation", "forward", resort=1)
def interpolation(d: Difference) -> Found:
    for u, v, where, ahead in d.tensors():
        u, v = u[:ROWS], v[:ROWS]
        for x in ahead if u.shape == v.shape else ():
            if x.ndim < 3 or x.shape[1:2] != u.shape[1:2] \
                    or x.ndim != u.ndim or x.shape[2:] == u.shape[2:]:
                continue
            known = {mode: _interpolated(x[:ROWS].astype(float), u.shape[2:],
                                         mode) for mode in _PLACES}
            (e, one), (f, two) = (nearest(known, seen, distance(u, v) or 1)
                                  for seen in (u, v))
            if one != two:
                yield (f"{where}: interpolation is {one} on {d.a}, {two} on "
                       f"{d.b}: give both the same mode and align_corners= "
                       "(True by default in MXNet's BilinearResize2D, False "
                       "on torch)"), max(e, f)
