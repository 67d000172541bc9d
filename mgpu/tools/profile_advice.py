"""What a profile says of a step, in words: see `Profile.verdict`."""
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from mgpu.utils import environment

#: the columns of a profile's table, in the order of a step
STAGES = ("dispatch", "copy", "compute", "reduce", "update", "wait")
#: the stages that running code opens; the other two are found by measuring
PARTS = ("copy", "compute", "reduce", "update")
HOST = "host"


class Span(NamedTuple):
    """A piece of one step, on one device or on the host."""

    step: int           # its number, from 0
    stage: str          # one of `STAGES`
    name: str           # split, forward, loss, backward, all-reduce, update
    during: str         # copy, compute, reduce or update: what a dispatch
    #                     was for, or a wait; else the stage itself
    device: str         # "cpu(0)", or "host"
    begin: float        # seconds since the Profile was first entered
    seconds: float


class Step(NamedTuple):
    """One train step, all devices waited for before and after it."""

    number: int         # from 0
    rows: int | None
    begin: float        # seconds since the Profile was first entered
    seconds: float
    staged: bool        # whether it was measured stage by stage


_WHAT = {"dispatch": "issuing work takes the host",
         "copy": "copying the batch to the devices takes",
         "compute": "the host waits for forward and backward for",
         "reduce": "summing the gradients takes",
         "update": "the optimizer's update takes",
         "other": "what is outside of mgpu's stages takes"}
_ADVICE = {
    "dispatch": "More devices will not help, because each adds work to "
                "issue; larger batches or a compiled (hybridized) network "
                "will.",
    "copy": "More devices will not help; a smaller dtype, or data that are "
            "on the device, will.",
    "reduce": "Fewer devices or larger batches help: the sum takes the same "
              "time for any number of rows.",
    "update": "More devices will not help; larger batches need fewer "
              "updates for the same rows.",
    "other": "More devices will not help; look at what your loop does "
             "between split, forward, backward and step."}


def advice(measured: Sequence[Step], every_part: Sequence[dict[str, Any]],
           steps: Sequence[Step], spans: Sequence[Span],
           devices: Sequence[str]) -> str:
    """The text of `Profile.verdict`. `measured`: the steps that were measured
    by stage, those with most rows; `every_part`: what `Profile.parts` returns;
    `steps`, `spans`: those of the Profile."""
    numbers = {s.number: s.rows for s in measured}
    if not numbers:
        raise ValueError("a verdict needs a measured step; received "
                         "none. Train a batch inside the Profile.")
    most = max(n or 0 for n in numbers.values())
    parts = [p for p in every_part if p["step"] in numbers]
    mean = {name: sum(p[name] for p in parts) / len(parts)
            for name in ("seconds", *_WHAT)}
    order = sorted(_WHAT, key=mean.__getitem__, reverse=True)
    shares = [f"{_WHAT[name]} {mean[name] / mean['seconds']:.0%}"
              for name in order]
    step = (f"of a step of {1000 * mean['seconds']:.1f} ms on "
            f"{_count(len(devices))}" + (f", batch {most}." if most else "."))
    bound = order[0]
    if round(mean[bound] / mean["seconds"], 2) >= 0.5:
        said = [f"{bound}-bound: {shares[0]} {step}",
                _gain(mean, devices) if bound == "compute"
                else _ADVICE[bound]]
    else:
        said = [f"No part takes half of a step: {shares[0]}, {shares[1]} "
                f"{step}"]
    return " ".join(filter(None, [*said, _by_batch(steps),
                                  _balance(spans, parts)]))


def _by_batch(steps: Sequence[Step]) -> str:
    known = [s for s in steps if s.rows]
    sizes = sorted({s.rows for s in known if s.rows})
    if len(sizes) < 2:
        return ""
    for kind in (False, True):
        found = [s for s in known if s.staged is kind]
        if {s.rows for s in found} == set(sizes):
            known = found
            break
    fixed, per_row = fit(sizes, [float(np.median(
        [s.seconds for s in known if s.rows == n])) for n in sizes])
    line = (f"(batches of {', '.join(map(str, sizes))}: "
            f"{1000 * fixed:.2f} ms + {1e6 * per_row:.1f} us per row)")
    if not fixed:
        return f"The time of a step is proportional to its rows {line}."
    if not per_row:
        return (f"Dispatch-bound at all of these batches {line}: more "
                "devices will not help.")
    equal = ceil(fixed / per_row - 1e-9)    # rounding must not add a row
    return (f"Dispatch-bound below batch {equal} "
            f"{line}: there more devices will not help.")


def _balance(spans: Sequence[Span], parts: Sequence[dict[str, Any]]) -> str:
    steps = {p["step"] for p in parts}
    total: dict[str, float] = {}
    for s in spans:
        if s.stage == "compute" and s.step in steps:
            total[s.device] = total.get(s.device, 0.0) + s.seconds
    if not total:
        return ""
    slow = max(total, key=total.__getitem__)
    fast = min(total, key=total.__getitem__)
    if total[slow] < 1.25 * total[fast]:
        return ""
    a, b = (f"{d} computes {1000 * total[d] / len(parts):.1f} ms"
            for d in (slow, fast))
    if slow.startswith("cpu") and fast.startswith("cpu"):
        return (f"Uneven: {a} a step, {b}. Logical CPU devices are equally "
                "fast, so their shards differ in size or other work keeps a "
                "core busy.")
    return (f"Uneven: {a} a step, {b}; split_batch takes weights for "
            "devices of unequal power.")


def _count(k: int) -> str:
    return f"{k} device{'s' * (k != 1)}"


def _gain(mean: dict[str, float], devices: Sequence[str]) -> str:
    k, factor = len(devices), 2.0
    on_cpus = all(d.startswith("cpu") for d in devices)
    if on_cpus:
        capacity = cpu_capacity()
        factor = min(2 * k, capacity) / min(k, capacity)
        if factor == 1:
            return (f"More devices will not help: the cores run {capacity} "
                    "in parallel, which compute already.")
    gain = mean["seconds"] / (mean["seconds"] + mean["dispatch"]
                              - mean["compute"] * (1 - 1 / factor))
    more = f"{_count(2 * k)} can give up to {gain:.1f}x" if gain >= 1.05 \
        else f"Even so {_count(2 * k)} would gain less than 5%"
    return more + (f" (the cores run {capacity} in parallel)."
                   if on_cpus and factor < 2 else ".")


def cpu_capacity() -> int:
    """The number of logical CPU devices that run in parallel: the cores that
    this process may use, divided by ``MGPU_THREADS_PER_DEVICE``."""
    return max(1, environment.cpu_cores() // environment.threads_per_device())


def fit(rows: Sequence[float], seconds: Sequence[float]
        ) -> tuple[float, float]:
    """Fit the line ``fixed + per_row * rows`` by least squares, with
    non-negative numbers.

    Raises
    ------
    ValueError
        Fewer than two numbers of rows.
    """
    x, y = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    if len(set(x.tolist())) < 2:
        raise ValueError("a line needs two batch sizes; received "
                         f"{sorted(set(x.tolist()))}. Measure another one.")
    slope, level = np.polyfit(x, y, 1)
    nothing = 1e-9 * np.abs(y).max()    # what rounding may leave
    if slope * x.max() <= nothing:
        return float(max(y.mean(), 0)), 0.0
    if level <= nothing:
        return 0.0, float((x @ y) / (x @ x))
    return float(level), float(slope)
