"""Causes of another output: masks and activations, seen in one tensor."""
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mgpu.parity.causes.difference import (PART, Difference, Tensors, distance,
                                           nearest, once, unexplained)
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.location import kind_of, unmasked
from mgpu.parity.run import CannotRun

# -- dropout ------------------------------------------------------------------

#: a factor as near to 1 as this is 1
_EQUAL = 1e-6


def _mask_factor(u: np.ndarray, v: np.ndarray) -> tuple[float, float] | None:
    """If `u` and `v` have zeros in other places, and one factor elsewhere:
    that factor and the residual."""
    if u.shape != v.shape:
        return None
    both = (u != 0) & (v != 0)
    if ((u == 0) == (v == 0)).all() or both.sum() < max(
            3, 0.1 * ((u != 0) | (v != 0)).sum()):
        return None
    # Half of the zeros of one ReLU are where the other's input is negative:
    # a mask does not look at signs.
    for x, z in ((u, v), (v, u)):
        only = z[(x == 0) & (z != 0)]
        if only.size and (only < 0).all() and (
                only.size + both.sum() > 8 and not (z[both] < 0).any()
                or only.size > 8 and (z[both] > 0).any()):
            return None
    factor = float(np.median(v[both] / u[both]))
    if abs(factor - 1) < _EQUAL and not (
            ((u == 0) > (v == 0)).any() and ((u == 0) < (v == 0)).any()):
        return None     # one side alone has zeros, and no other scale
    residual = distance(v[both], factor * u[both]) / distance(u, v)
    return (factor, residual) if factor > 0 else None


def _settings(d: Difference) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """The rate and the axes of the dropout layer on both sides."""
    return tuple(zip(d.options("rate"), map(tuple, d.options("axes"))))


def _masked(d: Difference) -> list[tuple[float, float, str]]:
    """The tensors that differ by a mask: factor, residual, where. Zeros of a
    network that drops nothing are those of padding."""
    if not (d.a.run.drops() or d.b.run.drops()):
        return []
    tensors = d.tensors()
    if d.kind == "dropout" and len(set(_settings(d))) == 1:
        tensors = [Tensors(*d.outputs(), d.layer)]
    found = ((_mask_factor(t.a, t.b), t.where) for t in tensors)
    return [(*factor, where) for factor, where in found if factor]


@cause("dropout masks", "forward", resort=1, kinds=["dropout"])
@cause("dropout masks", "forward", resort=4)
def masks(d: Difference) -> Found:
    for factor, residual, where in _masked(d):
        if abs(factor - 1) < _EQUAL:
            yield (f"{where}: {d.b} drops other elements than {d.a}. Use the "
                   "frameworks' dropout layers, which get one set of masks, "
                   "or dropout='off'"), residual


@cause("dropout rate", "forward", resort=1, kinds=["dropout"])
@cause("dropout rate", "forward", resort=4)
def rate(d: Difference) -> Found:
    for factor, residual, where in _masked(d):
        if abs(factor - 1) >= _EQUAL:
            yield (f"{where}: kept elements of {d.b} are {factor:.6g} times "
                   f"those of {d.a}: give both the same rate (Dropout(rate) "
                   "in Gluon, nn.Dropout(p) on torch)"), residual


@cause("dropout rate", "forward", resort=1, kinds=["dropout"])
def other_rates(d: Difference) -> Found:
    (p, axes), (q, other_axes) = _settings(d)
    if (p, axes) != (q, other_axes):
        x, u, v = d.rows_of_layer()
        # b's own factor where b keeps an element
        kept = 1 / (1 - q) if q and q < 1 else 1.0
        yield (f"{d.layer}: rate {p} (axes {axes}) on {d.a}, {q} (axes "
               f"{other_axes}) on {d.b}: make them equal"), unexplained(
                   u, v, np.where(v != 0, x * kept, 0.0))


# -- activations --------------------------------------------------------------

def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _leaky_relu(slope: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(x > 0, x, slope * x)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
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
    **{f"leaky_relu({slope:g})": _leaky_relu(slope)
       for slope in (0.01, 0.1, 0.2, 0.25, 0.3)},
}


# -- softmax ------------------------------------------------------------------

@cause("attention mask", "forward", resort=4)
def attention_mask(d: Difference) -> Found:
    """Scores that one side moves by one large number, as a mask does."""
    place = d.place
    if not (place and place.a and place.a.kind == "softmax") \
            or place.inputs_agree:
        return
    for u, v, where, _ in d.tensors():
        if u.shape != v.shape:
            continue
        moves = np.abs(v - u)
        most = float(moves.max())
        masked = moves > most / 2
        kept = np.abs(np.where(masked, 0.0, [u, v]))
        size = kept.max(where=kept < most / 2, initial=0.0)
        if moves[~masked].max(initial=0.0) <= d.tolerance * size:
            both = [(side, int((masked & lower).sum())) for side, lower in (
                (d.a, u < v), (d.b, v < u))]
            yield (f"{where}: " + ", ".join(
                f"{side} masks {count} of {u.size} scores that the other "
                "does not" for side, count in both if count)
                + f" (they differ by {most:.6g}): give both the same mask"
                   ), float(np.ptp(moves[masked])) / most


@cause("softmax axis", "forward", resort=4)
def softmax_axis(d: Difference) -> Found:
    for u, v, where, ahead in d.tensors():
        for x in (s for s in ahead if s.shape == u.shape == v.shape):
            values: dict[Any, np.ndarray] = {
                axis: np.moveaxis(_softmax(np.moveaxis(
                    x, axis, -1)), -1, axis) for axis in range(x.ndim)}
            if d.kind == "softmax" and 1 not in x.shape:
                values["one of length 1"] = np.ones_like(x)
            (e, one), (f, two) = (nearest(values, seen, distance(u, v) or 1)
                                  for seen in (u, v))
            if one != two:
                yield (f"{where}: softmax along axis {one} on {d.a}, {two} on "
                       f"{d.b}: give both the same axis= (MXNet's default is "
                       "the last)"), max(e, f)


@cause("activation", "forward", resort=4)
def activation(d: Difference) -> Found:
    for where, found, exchanged in _applied(d):
        if not exchanged:
            one, two, residual = found
            yield (f"{where}: {d.a} applies {one}, {d.b} {two}; make "
                   "them equal (activation= in Gluon, a module on torch)"
                   ), residual


@once
def _applied(d: Difference
             ) -> list[tuple[str, tuple[str, str, float], bool]]:
    """Where the sides apply different activations: the place, the two and
    the residual, and whether they are `_exchanged` with a layer."""
    return [(tensors.where, found, _exchanged(d, found))
            for tensors in d.tensors()
            for found in [_activations(d, tensors)] if found]


def _exchanged(d: Difference, found: tuple[str, str, float]) -> bool:
    """Whether the activation that one side applies before a layer, and the
    other does not, comes behind that layer there."""
    place, plain = d.place, "no activation"
    if place is None or place.inputs_agree or plain not in found[:2]:
        return False
    which = found.index(plain)
    try:
        behind = [next((after.path for before, after in itertools.pairwise(
            call for device, call in side.calls() if device == 0)
            if before.path == at.path), "") for side, at in (
                (d.a, place.call_a), (d.b, place.call_b))]
    except CannotRun:       # a recorded side
        return False
    kinds = [kind_of(path, side.run.by_path())
             for path, side in zip(behind, (d.a, d.b))]
    return kinds[which] == found[1 - which] != kinds[1 - which]


@cause("order of layers", "forward", resort=4)
def behind(d: Difference) -> Found:
    """An activation before a layer, and behind it on the other side."""
    for where, found, exchanged in _applied(d):
        if exchanged:
            own = max(found[:2], key=lambda text: text != "no activation")
            sides = (d.a, d.b) if found[0] == own else (d.b, d.a)
            yield (f"{where}: {sides[0]} applies {own} before "
                   f"{d.place.call_a.path}, {sides[1]} behind it: call them "
                   "in one order"), found[2]


def _factors(d: Difference, scores: bool = False
             ) -> Iterator[tuple[str, float]]:
    """Tensors of b that are a number times those of a, and the residual;
    `scores`: beside a mask that both have."""
    for u, v, where, _ in d.tensors():
        beside, other = unmasked(u), unmasked(v)
        if scores and np.array_equal(beside, other):
            u, v = u[beside], v[beside]
        if u.shape == v.shape and u.size > 4 and u.any():
            c = float((u * v).sum() / (u * u).sum())
            yield (f"at {where} {d.b} has {c:.6g} times the numbers of {d.a}"
                   ), max(unexplained(u, v, c * u), distance(v, c * u) / (
                       float(np.abs(v).max()) or 1.0))


@cause("attention scale", "forward", resort=5)
def attention_scale(d: Difference) -> Found:
    place = d.place
    if place and place.a and place.a.kind == "softmax" \
            and not place.inputs_agree:
        for text, residual in _factors(d, scores=True):
            yield (f"{text}: in attention, divide the scores by the root of "
                   "the width of a head before the softmax, on both"
                   ), residual


@cause("constant factor", "forward", resort=5)
def factor(d: Difference) -> Found:
    for text, residual in _factors(d):
        yield (f"{text}: a scale, a mean in the place of a sum, or a rate of "
               "dropout"), residual


def _activations(d: Difference, tensors: Tensors
                 ) -> tuple[str, str, float] | None:
    """Two activations that make `tensors` out of one tensor, and the
    residual."""
    u, v = tensors.a, tensors.b
    if u.size != v.size or not u.ndim or not v.ndim or len(u) != len(v):
        return None
    n = max(1, min(len(u), PART // max(1, u[0].size)))
    x, z = u[:n], v[:n].reshape(u[:n].shape)
    if not np.ptp(x) or not np.ptp(z):
        return None     # which many functions give
    starts = [s[:n].reshape(x.shape) for s in tensors.ahead
              if s.size == u.size and len(s) == len(u)]
    for start in (*starts, x, z):
        values = {name: y for name, f in ACTIVATIONS.items()
                  for y in [f(start)] if np.ptp(y)}
        (e, one), (f, two) = found = [
            _nearest(values, start, seen, distance(x, z) or 1, d.limit)
            for seen in (x, z)]
        # A linear function of itself is no activation: one of the two must
        # be what the layers before it gave.
        if max(e, f) < d.limit and one != two and _elsewhere(
                d, start, x, z, [values[key] for _, key in found]) \
                and unexplained(x, z, x * (float((x * z).sum()) / float(
                    (x * x).sum()))) > 10 * max(e, f, 1e-12):
            return one, two, max(e, f)
    return None


def _elsewhere(d: Difference, start: np.ndarray, x: np.ndarray,
               z: np.ndarray, values: Sequence[np.ndarray]) -> bool:
    """Whether `values` are `x` and `z` also where these hardly differ, next
    to a mask of -1e9, and where the one is small next to the other."""
    apart = np.abs(x - z)
    near = apart <= 1e-3 * apart.max(initial=0.0)
    return all(
        np.abs(value - seen)[part].max() <= d.limit * np.abs(
            seen[part]).max() + d.tolerance * np.abs(start[part]).max()
        for value, seen in zip(values, (x, z))
        for part in (near, ~near) if part.sum() > 2)


def _nearest(values: dict[str, np.ndarray], start: np.ndarray,
             seen: np.ndarray, apart: float, limit: float
             ) -> tuple[float, Any]:
    """`nearest` of the known activations; where none is near, of those that
    have a number of their own, which joins them: the slope or alpha that
    fits the median. Negative numbers alone do not tell a slope from a
    constant factor."""
    found = nearest(values, seen, apart)
    below = start < 0
    if found[0] < limit or below.sum() < 3 or (start > 0).sum() < 3:
        return found
    slope = float(np.median(seen[below] / start[below]))
    alpha = float(np.median(seen[below] / np.expm1(start[below])))
    own = {f"leaky_relu({slope:.6g})": _leaky_relu(slope)(start),
           f"elu({alpha:.6g})": np.where(below, alpha * np.expm1(start),
                                         start)}
    values.update(own)
    return nearest(own, seen, apart)


@cause("activation", "forward", resort=1, kinds=["elu"])
def alpha(d: Difference) -> Found:
    x, u, v = d.rows_of_layer()
    one, two = d.options("alpha")
    if one and two and one != two:
        yield (f"{d.layer}: alpha {one:.6g} on {d.a}, {two:.6g} on {d.b}: "
               "make them equal"), unexplained(
                   u, v, np.where(x > 0, u, u * (two / one)))


@cause("activation", "forward", resort=1, kinds=["leaky_relu"])
def slope(d: Difference) -> Found:
    x, u, v = d.rows_of_layer()
    below = x < 0
    one, two = (float(np.median(y[below] / x[below])) if below.any() else 0.0
                for y in (u, v))
    yield (f"{d.layer}: slope {one:.6g} on {d.a}, {two:.6g} on {d.b}: make "
           "them equal (alpha= in Gluon, negative_slope= on torch)"), max(
               unexplained(u, v, np.where(x > 0, x, two * x)),
               unexplained(v, u, np.where(x > 0, x, one * x)))
