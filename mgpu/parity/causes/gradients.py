"""Causes of other gradients from equal losses, and of copies apart."""
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import using_backend
from mgpu.parity.causes.case import Case, Cause, Found, both_sides, distance


def known_factors(case: Case) -> Iterator[tuple[float, str, str]]:
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


def causes(case: Case) -> Found:
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
    for factor, name, text in known_factors(case):
        if aliased and name in ("sum or mean over devices", "L2 loss"):
            continue
        tell(name, text, {n: factor * g for n, g in one.items()})
    for right, side in both_sides():
        own, bad = case.records[right].gradients, case.records[side].gradients
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
        for right, side in both_sides():
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


def _missing(case: Case) -> Found:
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


def _aliased(case: Case, side: str) -> bool:
    """Whether replicas of a side share memory."""
    runner = case.runners[side]
    with using_backend(runner.name):
        for p in runner.replicas.params():
            places = [runner.backend.memory(x) for x in p.list_data()]
            for (s, b, e), (t, c, f) in itertools.combinations(places, 2):
                if s == t and b < f and c < e:
                    return True
    return False


def _subsets(case: Case, right: str, side: str,
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


def device_causes(case: Case) -> Found:
    """Copies of one side that are no longer equal."""
    for right, side in both_sides():
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
                spread = max(distance(copy(n, i), total[n])
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
