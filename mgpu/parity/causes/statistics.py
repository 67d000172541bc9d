"""Causes of other running statistics."""
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mgpu.parity.causes.case import Case, Cause, Found, both_sides
from mgpu.parity.causes.update import as_single, near_as_single


def _counts(case: Case, name: str) -> list[float]:
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


def causes(case: Case) -> Found:
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


def _policy(case: Case, names: Mapping[str, float]) -> Found:
    one, two = (case.records[s].after.values for s in ("a", "b"))
    if any(one[n].shape != two[n].shape for n in names):
        k = case.devices("a"), case.devices("b")
        return [Cause("batch-norm policy", (
            f"the sides keep running statistics of {k[0]} and {k[1]} "
            "devices, whose rows differ. batch_norm='sync' makes the number "
            "of devices irrelevant"), 1.0)]
    found: Found = []
    for right, side in both_sides():
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


def _statistic(case: Case, which: str, names: Mapping[str, float]) -> Found:
    ev = case.evidence
    variance = which == "running_var"
    own, bad = ev.a.after.values, ev.b.after.values
    options = {s: {n: case.layer(s, n).options.get("momentum")
                   for n in names if case.layer(s, n) is not None}
               for s in ("a", "b")}
    counts = {n: np.asarray(_counts(case, n))[:, None] for n in names}

    def shares(side: str) -> dict[str, dict[str, float]]:
        """Ways to read the option: the share of the old statistic."""
        known = {n: m for n, m in options[side].items() if m is not None}
        return {
            "": known,
            "single": {n: as_single(m) for n, m in known.items()},
            "exchanged": {n: 1 - m for n, m in known.items()},
            "exchanged, single": {n: as_single(1 - m)
                                  for n, m in known.items()}}
    factors: dict[str, Any] = {"": lambda n: 1.0}
    if variance:
        factors["unbiased"] = lambda n: np.where(
            counts[n] > 1, counts[n] / np.maximum(counts[n] - 1, 1), 1.0)
        factors["biased"] = lambda n: 1 / factors["unbiased"](n)
    best: tuple[Any, float, Any] | None = None
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
            if not residual < case.limit or times == 0 and (key[-1] or how):
                continue
            # float32 here and there is no change of its own
            rounding = any(kept[n] != given[n] and near_as_single(
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
            f"{as_single(given[first])!r}, torch as double; about 1e-8 of a "
            "statistic. mgpu.parity.gluonize(net) on torch, native=False, "
            "or a momentum that float32 holds, such as 0.875"), residual))
    return found
