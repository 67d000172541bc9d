"""Causes of other running statistics."""
import itertools
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.causes.difference import (Difference, View, as_single,
                                           near_as_single, once)
from mgpu.parity.causes.norms import policies
from mgpu.parity.causes.registry import Found, cause

#: the share of the old statistic that is kept, by name
Shares = dict[str, float]


class Reading(NamedTuple):
    """How `b` updates some statistics.

    Attributes
    ----------
    names : tuple of str
    given, kept : dict of str -> float
        The share of the old statistic that `a` and `b` keep.
    how : str
        "unbiased" or "biased": what the variance of `b` is, where that of
        `a` is the other one; "": the same.
    times : int
        How often `b` updates in the step.
    residual : float
    """

    names: tuple[str, ...]
    given: Shares
    kept: Shares
    how: str
    times: int
    residual: float

    @property
    def changed(self) -> list[str]:
        """The statistics of which the sides keep other shares."""
        return [n for n in self.names
                if abs(self.kept[n] - self.given[n]) > 1e-6]

    @property
    def rounded(self) -> bool:
        """Whether one share is the other one as float32. Where both sides
        round the same, nothing differs."""
        return any(near_as_single(self.kept[n], self.given[n])
                   for n in self.names)

    @property
    def cost(self) -> tuple[bool, float, float]:
        return (self.residual > 1e-4,
                bool(self.how) + bool(self.changed) + (self.times != 1)
                + 0.5 * self.rounded, self.residual)


def readings(d: Difference) -> list[tuple[Reading, str]]:
    """The reading of the running means, and that of the variances, if they
    differ and no policy explains it; each with the name of its layer."""
    found = [_reading(d, kind, names)
             for kind, names in d.statistics().items()
             if not policies(d, names)]
    return [(r, f"batch norm {d.a.layer(r.names[0]).path}")
            for r in found if r is not None]


@once
def _reading(d: Difference, kind: str, names: tuple[str, ...]
             ) -> Reading | None:
    """The reading that explains these statistics with the fewest changes:
    ``r <- m r + (1 - m) s``, with s from the update of `a`."""
    old, own, bad = d.evidence.before.values, d.a.values, d.b.values
    if any(old[n].shape != own[n].shape for n in names):
        return None
    scales = {n: d.scales("statistic")[n] for n in names}
    mine = _shares(d, d.a, names)
    tried = [*_shares(d, d.b, names), *mine]
    hows = ("", "unbiased", "biased") if kind == "running_var" else ("",)
    fits = []
    for given in mine[:2]:
        batch = {n: (own[n] - given[n] * old[n]) / (1 - given[n])
                 for n in names}
        for kept, how, times in itertools.product(tried, hows, (1, 0, 2)):
            share = {n: kept[n] ** times for n in names}
            predicted = {n: share[n] * old[n] + (1 - share[n]) * batch[n]
                         * _factor(d, n, how) for n in names}
            reading = Reading(names, given, kept, how, times, d.residual(
                own, bad, predicted, scales))
            # without an update nothing else matters
            if reading.residual < d.limit and (
                    times or kept is tried[0] and not how):
                fits.append(reading)
    return min(fits, key=lambda reading: reading.cost, default=None)


def _shares(d: Difference, side: View, names: tuple[str, ...]
            ) -> list[Shares]:
    """The ways to read the option `momentum` of a side: as it is (None: a
    mean over all steps), as float32, and both exchanged. Empty where it is
    not known for all."""
    layers = [side.layer(n) for n in names]
    if any("momentum" not in x.options for x in layers if x) \
            or None in layers:
        return []
    known = {n: 1 - 1 / _steps(d, side, n) if _cumulative(side, n)
             else x.options["momentum"] for n, x in zip(names, layers)}
    return [known, {n: as_single(m) for n, m in known.items()},
            {n: 1 - m for n, m in known.items()},
            {n: as_single(1 - m) for n, m in known.items()}]


def _cumulative(side: View, name: str) -> bool:
    layer = side.layer(name)
    return layer is not None and layer.options.get("momentum", 0) is None


def _steps(d: Difference, side: View, name: str) -> int:
    """The number of steps that a statistic is the mean of, where the other
    side keeps a moving average."""
    right = d.b if side is d.a else d.a
    layer = right.layer(name)
    share = layer.options.get("momentum") if layer is not None else None
    if share is None or share == 1:
        return d.evidence.step
    old = d.evidence.before.values[name]
    new = (right.values[name] - share * old) / (1 - share)
    moves = np.ravel(new - old), np.ravel(side.values[name] - old)
    number = moves[0] @ moves[0] / (moves[0] @ moves[1])
    return max(1, round(number)) if np.isfinite(number) else d.evidence.step


def _factor(d: Difference, name: str, how: str) -> Any:
    """What the statistic of the batch on `b` is, times that of `a`."""
    if not how:
        return 1.0
    n = _counts(d, name)
    unbiased = np.where(n > 1, n / np.maximum(n - 1, 1), 1.0)
    return unbiased if how == "unbiased" else 1 / unbiased


@once
def _counts(d: Difference, name: str) -> np.ndarray:
    """For each device, the number of values per channel in a's statistic
    `name`; one column."""
    path, counts = d.a.layer(name).path, np.zeros((d.a.devices, 1))
    channels = d.evidence.before.values[name].shape[-1]
    for index, call in d.a.calls():
        if call.path == path and call.inputs:
            counts[index] += call.inputs[0].size / channels
    return counts.sum() + 0 * counts if d.a.run.batch_norm == "sync" \
        else counts


# -- the causes ---------------------------------------------------------------

@cause("unbiased variance", "statistic")
def unbiased_variance(d: Difference) -> Found:
    for r, layer in readings(d):
        if r.how:
            yield (f"{layer} and {len(r.names) - 1} more: "
                   f"{d.b if r.how == 'unbiased' else d.a} keeps the "
                   "unbiased variance, n/(n-1) with n = "
                   f"{_counts(d, r.names[0]).max():g} values, as torch does: "
                   "use mgpu.parity.gluonize(net), or native=False"
                   ), r.residual


@cause("cumulative statistics", "statistic")
def cumulative(d: Difference) -> Found:
    for r, _ in readings(d):
        for right, side in d.both_ways() if r.times else ():
            own = [n for n in r.names if _cumulative(side, n)
                   and not _cumulative(right, n)]
            if own:
                yield (f"batch norm {side.layer(own[0]).path}: {side} keeps "
                       "the mean of all steps (here 1/"
                       f"{_steps(d, side, own[0])} of the new one), as "
                       f"momentum=None on torch, {right} a moving average: "
                       "give both a momentum"), r.residual


@cause("statistics momentum", "statistic")
def momentum(d: Difference) -> Found:
    for r, layer in readings(d):
        names = [n for n in r.changed if not (_cumulative(d.a, n)
                                              or _cumulative(d.b, n))]
        if names and r.times:
            first = names[0]
            yield (f"{layer}: the old statistic keeps a share of "
                   f"{r.given[first]:.6g} on {d.a} and of "
                   f"{r.kept[first]:.6g} on {d.b}. Gluon's momentum is that "
                   "share, torch's is 1 minus it"), r.residual


@cause("statistics updates", "statistic")
def updates(d: Difference) -> Found:
    for r, layer in readings(d):
        if r.times == 2:
            yield (f"the running statistics of {layer} on {d.b} move twice: "
                   "two training passes before one update"), r.residual
    before, wrong = d.evidence.before.values, [
        g.name for g in d.wrong("statistic")]
    for side in (d.a, d.b):
        layers = dict.fromkeys(
            layer.path for n in wrong for layer in [d.a.layer(n)] if layer
            and np.array_equal(side.values[n], before[n]))
        if layers:
            yield (f"the running statistics of batch norm "
                   f"{', '.join([*layers][:4])} on {side} do not move: "
                   "use_global_stats, eval(), track_running_stats=False or a "
                   "momentum that keeps all; "
                   "in Gluon also where no gradient passes the layer, as in "
                   "frozen features: there use_global_stats=True, and eval() "
                   "on torch"), d.residual(
                       before, side.values, {}, {
                           n: scale for n, scale in d.scales(
                               "statistic").items() if n in wrong})
