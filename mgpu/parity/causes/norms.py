"""Causes in normalization layers."""
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.causes.difference import (ROWS, Difference, View, distance,
                                           once)
from mgpu.parity.causes.registry import Found, cause

Moments = tuple[np.ndarray, np.ndarray]     # mean and variance


# -- batch norm, recomputed ---------------------------------------------------

class Reading(NamedTuple):
    """One way to compute a batch-norm layer."""

    statistics: str
    gamma: str
    epsilon: float


@once
def _readings(d: Difference) -> tuple[Reading, Reading, float] | None:
    """The readings of both sides that explain their outputs, and the
    residual: the pair with the fewest differences, then the best."""
    fits = [list(_fits(d, side, which))
            for which, side in enumerate((d.a, d.b))]
    pairs = [(sum(m != n for m, n in zip(one, two)), e + f, one, two,
              max(e, f)) for one, e in fits[0] for two, f in fits[1]]
    return min(pairs, key=lambda pair: pair[:2])[2:] if pairs else None


def _fits(d: Difference, side: View, which: int
          ) -> Iterator[tuple[Reading, float]]:
    """The readings that explain the output of a side, with residuals."""
    # the rows of one device, where a side has several
    x, *outputs = d.rows_of_layer(min([ROWS, *(
        view.rows[0] for view in (d.a, d.b) if view.devices > 1)]))
    axis = (d.options("axis")[0] or 1) % x.ndim
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    apart, beta = distance(*outputs) or 1, d.parameter("beta")
    epsilons = dict.fromkeys([*d.options("epsilon"), 1e-5, 1e-3])
    for (s, (mean, var)), (g, gamma), e in itertools.product(
            _moments(d, side, axis).items(), _gammas(d).items(), epsilons):
        y = (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + e)
        y = y if gamma is None else y * gamma.reshape(shape)
        y = y if beta is None else y + beta.reshape(shape)
        y = np.maximum(y, 0) if d.options("relu")[which] else y
        left = distance(y, outputs[which]) / apart
        if left < d.limit:
            yield Reading(s, g, e), left


def _moments(d: Difference, side: View, axis: int) -> dict[str, Moments]:
    """The statistics that a side may have normalized with."""
    def moments(x: np.ndarray) -> Moments:
        axes = tuple(i for i in range(x.ndim) if i != axis)
        return x.mean(axes), x.var(axes)
    found: dict[str, Moments] = {}
    mean, var = d.parameter("running_mean"), d.parameter("running_var")
    if mean is not None and var is not None:
        first = next(i for i, n in enumerate(d.a.step.rows) if n)
        at = min(first, len(mean) - 1)
        found["of the running statistics"] = mean[at], var[at]
    found["of all rows"] = moments(np.concatenate([
        call.inputs[0].astype(float) for _, call in d.a.calls()
        if call.path == d.place.call_a.path]))
    if side.devices > 1:
        x = d.place.call_a.inputs[0].astype(float)
        found["of each device's own rows"] = moments(
            x[:side.rows[0]] if len(x) == d.rows else x)
    return found


def _gammas(d: Difference) -> Mapping[str, np.ndarray | None]:
    values, gamma = d.evidence.before.values, d.parameter("gamma")
    if gamma is None:       # a fixed one is not a weight of the network
        gamma = next((values[n] for n in d.place.a.parameters
                      if n.endswith("gamma") and n in values), None)
    return {**({} if gamma is None else {"gamma": gamma}), "gamma = 1": None}


# -- the causes ---------------------------------------------------------------

def _epsilon(d: Difference, e: float, f: float) -> str:
    return (f"{d.layer}: epsilon {e:g} on {d.a}, {f:g} on {d.b}: make them "
            "equal (epsilon= in Gluon, eps= on torch)")


@cause("normalization epsilon", "forward", resort=1, kinds=["batch_norm"])
def epsilon(d: Difference) -> Found:
    for one, two, residual in filter(None, [_readings(d)]):
        if one.epsilon != two.epsilon:
            yield _epsilon(d, one.epsilon, two.epsilon), residual


@cause("normalization epsilon", "forward", resort=1,
       kinds=["layer_norm", "group_norm", "instance_norm"])
def epsilon_of_rows(d: Difference) -> Found:
    for one, two, residual in _rows(d):
        if one[-1] != two[-1]:
            yield _epsilon(d, one[-1], two[-1]), residual


@cause("layer options", "forward", resort=1, kinds=["group_norm"])
def groups(d: Difference) -> Found:
    for one, two, residual in _rows(d):
        if one[0] != two[0]:
            yield (f"{d.layer}: {one[0][1]} groups on {d.a}, {two[0][1]} on "
                   f"{d.b}: make them equal"), residual


@cause("normalization axis", "forward", resort=1, kinds=["layer_norm"])
def axes_of_rows(d: Difference) -> Found:
    for one, two, residual in _rows(d):
        if one[1] != two[1]:
            yield (f"{d.layer} normalizes over the axes {one[1]} on {d.a}, "
                   f"{two[1]} on {d.b}: make them equal (axis= in Gluon, "
                   "normalized_shape on torch)"), residual


#: the shape that the input gets, the axes to normalize over, epsilon
_Rows = tuple[tuple[int, ...], tuple[int, ...], float]


@once
def _rows(d: Difference) -> list[tuple[_Rows, _Rows, float]]:
    """How the sides normalize each row, with the residual: the pair with the
    fewest differences."""
    x, u, v = d.rows_of_layer(ROWS)
    epsilons = dict.fromkeys([*d.options("epsilon"), 1e-5, 1e-3, 1e-6, 1e-12])
    apart = distance(u, v) or 1
    keys = [(*group, e) for group in _groups(d, x.shape) for e in epsilons]
    fits = [[(left, key) for key in keys if (left := distance(_normalized(
        d, x, *key), seen) / apart) < d.limit] for seen in (u, v)]
    pairs = [(one, two, max(e, f)) for e, one in fits[0]
             for f, two in fits[1]]
    return sorted(pairs, key=lambda pair: (
        sum(p != q for p, q in zip(*pair[:2])), pair[2]))[:1]


def _groups(d: Difference, shape: tuple[int, ...]
            ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes to give the input, and axes to normalize over."""
    if d.kind == "layer_norm":
        gamma = d.parameter("gamma")
        dims = gamma.ndim if gamma is not None else 1
        for first in range(len(shape) - dims, 0, -1):
            yield shape, tuple(range(first, len(shape)))
        return
    channels = shape[1]
    for g in range(1, channels + 1):
        if channels % g == 0 and (g == channels or d.kind == "group_norm"):
            yield ((shape[0], g, channels // g, *shape[2:]),
                   tuple(range(2, len(shape) + 1)))


def _normalized(d: Difference, x: np.ndarray, shape: tuple[int, ...],
                axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    z = x.reshape(shape)
    z = (z - z.mean(axes, keepdims=True)) / np.sqrt(
        z.var(axes, keepdims=True) + epsilon)
    z = z.reshape(x.shape)
    for p, join in ((d.parameter("gamma"), np.multiply),
                    (d.parameter("beta"), np.add)):
        if p is not None and d.kind == "layer_norm":
            z = join(z, p)
        elif p is not None and p.size == x.shape[1]:
            z = join(z, p.reshape(-1, *[1] * (x.ndim - 2)))
    return z


@cause("fix_gamma", "forward", resort=1, kinds=["batch_norm"])
def fixed_gamma(d: Difference) -> Found:
    for one, two, residual in filter(None, [_readings(d)]):
        if one.gamma != two.gamma:
            yield (f"{d.layer}: {one.gamma} on {d.a}, {two.gamma} on {d.b}. "
                   "Gluon's scale=False (fix_gamma) takes gamma for 1: use "
                   "scale=True, or freeze weights of 1 on torch"), residual


@cause("fix_gamma", "gradient")
def gamma_without_gradient(d: Difference) -> Found:
    for side, names in d.without_gradient(fixed=True):
        if names:
            yield (f"{', '.join(names[:4])} stays 1 on {side}: scale=False "
                   "(fix_gamma). Use scale=True in Gluon, or "
                   "requires_grad_(False) on torch"), 0.0


def _other_moments(d: Difference, running: bool, cure: str) -> Found:
    for one, two, residual in filter(None, [_readings(d)]):
        a, b = one.statistics, two.statistics
        if a != b and ("running" in a + b) is running:
            yield (f"{d.layer} normalizes with the mean and variance {a} on "
                   f"{d.a}, {b} on {d.b}: {cure}"), residual


@cause("batch-norm policy", "forward", resort=1, kinds=["batch_norm"])
def policy(d: Difference) -> Found:
    yield from _other_moments(d, False, "give both sides one batch_norm=")


@cause("batch-norm policy", "statistic")
def policy_of_statistics(d: Difference) -> Found:
    for names in d.statistics().values():
        yield from policies(d, names)


@once
def policies(d: Difference, names: tuple[str, ...]
             ) -> list[tuple[str, float | None]]:
    """Policies that explain the running statistics `names`."""
    if any(d.a.values[n].shape != d.b.values[n].shape for n in names):
        return [(f"the sides keep running statistics of {d.a.devices} and "
                 f"{d.b.devices} devices: use batch_norm='sync'", None)]
    makers: dict[str, Any] = {
        "the means over devices (batch_norm='average')":
            lambda x: np.repeat(x.mean(0, keepdims=True), len(x), 0),
        "those of the first device (DataParallel)":
            lambda x: np.repeat(x[:1], len(x), 0)}
    scales = {n: d.scales("statistic")[n] for n in names}
    found = [(f"every device of {side} keeps {how}, {right} has "
              f"batch_norm={right.run.batch_norm!r}: make them equal",
              d.residual(right.values, side.values, {
                  n: make(right.values[n]) for n in names}, scales))
             for right, side in d.both_ways() if side.devices > 1
             for how, make in makers.items()]
    return [(text, residual) for text, residual in found if residual < d.limit]


@cause("batch-norm mode", "forward", resort=1, kinds=["batch_norm"])
def mode(d: Difference) -> Found:
    yield from _other_moments(d, True, "use_global_stats, or eval()")
