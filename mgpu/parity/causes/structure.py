"""Causes between layers: sums, reductions and columns."""
import itertools
import math

import numpy as np

from mgpu.parity.causes.difference import (ROWS, Difference, View, distance,
                                           nearest, once, reordered,
                                           unexplained)
from mgpu.parity.causes.registry import Found, cause

#: tensors that are tried as summands
_SUMMANDS = 24


def _sums(d: Difference) -> bool:
    """Whether a sum before a layer may differ."""
    return d.place is None or not d.place.inputs_agree


@once
def _skips(d: Difference) -> list[tuple[View, np.ndarray, str, float]]:
    """Tensors that a side does not add to what the other one has: that side,
    the tensor, where, and the residual."""
    return [] if not _sums(d) else [
        (side, s, where, unexplained(x, z, x - s))
        for u, v, where, _ in d.tensors() if u.any() and v.any()
        for s in d.earlier() if s.shape == u.shape == v.shape and s.any()
        for side, x, z in ((d.b, u, v), (d.a, v, u))]


@cause("order of layers", "forward", resort=5)
def added_behind(d: Difference) -> Found:
    """Is the tensor added to what the layer returns?"""
    for side, s, where, left in _skips(d):
        call = d.place and (d.place.call_b if side is d.b
                            else d.place.call_a)
        if left < d.limit and call and call.outputs \
                and call.outputs[0].shape == s.shape:
            total = call.outputs[0] + s
            seen = [*(x for _, c in side.calls() for x in c.inputs),
                    *side.step.outputs]
            found = min((unexplained(call.outputs[0], x, total) for x in seen
                         if x.shape == total.shape), default=1.0)
            yield (f"{where}: {side} adds the skip connection behind "
                   f"{call.path}, the other side before it: call them in one "
                   "order"), max(left, found)


@cause("residual connection", "forward", resort=5)
def not_added(d: Difference) -> Found:
    if any(residual is not None and residual < d.limit
           for _, residual in added_behind(d)):
        return
    for side, _, where, left in _skips(d):
        yield (f"{where}: {side} does not add what a layer before has given, "
               "the other side does: add the skip connection, x + f(x)"), left


@cause("dropout rate", "forward", resort=5)
def no_dropout(d: Difference) -> Found:
    """Does a side add what a dropout layer of the other one gets?"""
    for right, side in d.both_ways() if _sums(d) else ():
        layers = right.run.by_path()
        for index, call in right.calls():
            layer = layers.get(call.path)
            if index or layer is None or layer.kind != "dropout":
                continue
            x, y = call.inputs[0], call.outputs[0]
            for u, v, where, _ in d.tensors():
                one, two = (u, v) if right is d.a else (v, u)
                if x.shape == y.shape == one.shape == two.shape:
                    yield (f"{where}: {right} has {call.path}, {side} adds "
                           "what that gets: drop out on both, or on "
                           "neither"), unexplained(one, two, one - y + x)


@cause("residual connection", "forward", resort=6)
def added_from_elsewhere(d: Difference) -> Found:
    for u, v, where, _ in d.tensors() if _sums(d) else ():
        u, v = u[:ROWS], v[:ROWS]
        known = [s[:ROWS] for s in d.earlier()[:-_SUMMANDS:-1]
                 if s[:ROWS].shape == u.shape == v.shape]
        for one, two in itertools.permutations(known, 2):
            if not (np.allclose(one, u) or np.allclose(two, v)):
                yield (f"{where}: {d.b} adds what another layer has given "
                       f"than {d.a} adds: take the skip connection from the "
                       "same place"), unexplained(u, v, u - one + two)


@cause("kind of pooling", "forward", resort=5)
def reduction(d: Difference) -> Found:
    """A mean and a maximum by functions."""
    for u, v, where, ahead in d.tensors():
        if u.shape != v.shape or u.ndim < 2:
            continue
        u, v = u[:ROWS], v[:ROWS]
        apart = np.abs(u - v).max((0, *range(2, u.ndim)))
        # where it was joined to what is equal: the part that differs
        differ = apart > d.tolerance * np.abs(u).max()
        u, v = u[:, differ], v[:, differ]
        for x in ahead if differ.any() else ():
            x = x[:ROWS].astype(float)
            for axes in _axes(x.shape, u.size):
                known = {how.__name__: how(x, axes).reshape(u.shape)
                         for how in (np.mean, np.max, np.min, np.sum)}
                (e, one), (f, two) = (nearest(
                    known, seen, distance(u, v) or 1) for seen in (u, v))
                if one != two:
                    yield (f"{where}: the {one} over the axes {axes} on "
                           f"{d.a}, the {two} on {d.b}: use one of them"
                           ), max(e, f)


def _axes(shape: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Axes behind the rows without which an array has `size` elements."""
    behind = range(1, len(shape))
    return [axes for n in behind for axes in itertools.combinations(behind, n)
            if size == np.prod([m for i, m in enumerate(shape)
                                if i not in axes]) < np.prod(shape)]


def channels_last(u: np.ndarray, v: np.ndarray) -> float:
    """The residual of "one of two matrices has the columns of pictures with
    the channels first, the other one with the channels last"."""
    n, columns = u.shape
    return min((unexplained(u, v, u.reshape(n, m, -1).swapaxes(1, 2).reshape(
        n, -1)) for m in range(2, columns // 2 + 1) if not columns % m),
        default=math.inf) if u.shape == v.shape else math.inf


@cause("order of columns", "forward", resort=5)
def other_order(d: Difference) -> Found:
    """Channels, or parts that were joined, in another order."""
    for u, v, where, _ in d.tensors():
        if u.shape != v.shape or u.ndim < 2:
            continue
        axis = 1 if u.ndim > 3 else u.ndim - 1
        x, z = (np.moveaxis(t, axis, 0) for t in (u, v))
        x, z = (t.reshape(len(t), -1) for t in (x, z))
        first = int(np.abs(x - z[0]).max(1).argmin())
        left = unexplained(x, z, np.roll(x, -first, 0))
        if left >= d.limit and (u.ndim > 3 or u.ndim == 2 and _sums(d)
                                and channels_last(u, v) >= d.limit):
            left = reordered(x, z)
        yield (f"{where}: along axis {axis} {d.b} has the numbers of {d.a} in "
               "another order: join the parts in one order (concat, "
               "torch.cat), and do not shuffle channels"), left
