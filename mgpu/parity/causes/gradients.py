"""Causes of other gradients from equal losses, and of unequal copies."""
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mgpu.parity.causes.difference import Arrays, Difference, View, distance
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.update_search import Changes, Update, replaced


@cause("device left out", "gradient", resort=1)
def left_out(d: Difference) -> Found:
    for right, side in d.both_ways():
        k = side.devices
        choices = [c for size in (*range(1, min(k, 3)), k - 1)
                   for c in itertools.combinations(range(k), size)]
        for chosen in dict.fromkeys(choices) if 1 < k == right.devices else ():
            mask = [float(i in chosen) for i in range(k)]
            lacks = [str(i) for i in range(k) if i not in chosen]
            for how, factors in (
                    ("leaves device {} out of the sum", mask),
                    ("adds device {} once more", [2 - m for m in mask])):
                yield (f"{side} {how.format(', '.join(lacks))}: all-reduce "
                       "every gradient over all devices, in place"
                       ), d.weighted(right, side, factors)


@cause("padding_idx", "gradient")
def padding_index(d: Difference) -> Found:
    for right, side in d.both_ways():
        rows, predicted = {}, dict(right.gradients)
        for name in (g.name for g in d.wrong("gradient")):
            x, z = (v.gradients.get(name) for v in (right, side))
            if x is None or z is None or x.ndim != 2 or x.shape != z.shape:
                continue
            still = x.any(1) & ~z.any(1)
            if still.sum() == 1:
                rows[name] = int(np.argmax(still))
                predicted[name] = np.where(still[:, None], 0.0, x)
        if rows:
            words = ", ".join(f"{row} of {n}" for n, row in rows.items())
            yield (f"{side} does not train row {words}, as with padding_idx: "
                   "Gluon's Embedding trains all rows"), d.residual(
                       right.gradients, side.gradients, predicted)


@cause("SELU's gradient", "gradient")
def selu(d: Difference) -> Found:
    for right, side in d.both_ways():
        chosen = right.run.float32
        if chosen is None or "selu" not in chosen.names:
            continue
        chosen.gradients = True
        try:
            local = right.gradients_again()
        finally:
            chosen.gradients = False
        yield (f"for x <= 0 the gradient of SELU is lambda (alpha + y) on "
               f"{side}, with its output y, and on {right} lambda alpha + y, "
               "which is right: write SELU with F.where and F.expm1 in Gluon",
               d.residual(right.gradients, side.gradients, {
                   n: np.sum([g[n] for g in local], 0) for n in local[0]}))


@cause("derivative at a kink", "gradient")
def kink(d: Difference) -> Found:
    """Exact zeros (a bias at the start, black pixels, what Ftrl cuts off)
    meet the kink of a ReLU, or are equal where a maximum is taken."""
    def off_zero(x: Any) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype.kind != "f" or x.all():
            return x
        # the same numbers on both sides
        noise = np.random.default_rng(x.size).normal(size=x.shape)
        return np.where(x == 0, 1e-6 * noise, x).astype(x.dtype)
    if any(g.name not in side.gradients for g in d.wrong("gradient")
           for side in (d.a, d.b)):
        return      # a gradient that only one side has is no other derivative
    names = [n for n, v in d.evidence.before.values.items() if not np.all(v)]
    if all(np.all(x) for x in d.a.prepared()[0]) and not names:
        return
    # of both sides, each with these zeros and with other numbers
    one, two, one_off, two_off = (
        {n: np.sum([g[n] for g in local], 0) for n in local[0]}
        for change in (None, off_zero) for side in (d.a, d.b)
        for local in [side.gradients_again(change) if change
                      else side.local_gradients()])
    predicted = {}
    for n in (n for n in one if n in two and n in d.a.gradients):
        off = two_off[n] - one_off[n]
        if np.abs(off).max(initial=0.0) <= d.tolerance * np.abs(
                one_off[n]).max(initial=0.0):
            off = 0.0 * off     # rounding
        predicted[n] = d.a.gradients[n] + two[n] - one[n] - off
    yield (f"{d.a} and {d.b} take different derivatives where a value is "
           "exactly 0, or where two are equal; with other numbers for the "
           f"zeros of {names[0] if names else 'X'} they agree. At 0 the "
           "derivative of ReLU is 0, that of maximum(x, 0) is 1 in MXNet and "
           "1/2 in torch, and that of clip and clamp is 1: write it as relu "
           "on both sides",
           d.residual(d.a.gradients, d.b.gradients, predicted))


@cause("missing broadcast", "devices")
def missing_broadcast(d: Difference) -> Found:
    """The copies of one side are no longer equal."""
    right, side = (d.a, d.b) if d.b.step.apart else (d.b, d.a)
    if right.step.apart or not 1 < side.devices == right.devices:
        return
    local, total, seen = (right.local_gradients(), right.gradients,
                          side.step.apart)
    names = [n for n in seen if n in total and n in local[0]]
    text = (f"copies of {side} differ between devices after the step "
            f"({', '.join(names[:3])}): ")
    cure = ("Write the sum into every copy in place: data[i][:] = total. "
            "Rebinding a list entry changes no replica")
    held = {        # by the devices after the first one
        "the sum stays on the first device, the others keep their own "
        "gradients": local[1:],
        "the others add the sum to their own gradients": [
            {n: total[n] + g[n] for n in g if n in total}
            for g in local[1:]],
        "the others get nothing": [{n: 0.0 * g for n, g in total.items()}]}
    left = {how: _spread(d, copies, total, {n: seen[n] for n in names})
            for how, copies in held.items() if names}
    for how, residual in left.items():
        yield f"{text}{how}. {cure}", residual
    if not any(residual < d.limit for residual in left.values()):
        yield text + cure, None


def _spread(d: Difference, copies: list[Arrays], total: Arrays,
            seen: Mapping[str, float]) -> float:
    """How far the spread of these copies is from the one that was seen."""
    scales, worst = d.scales("gradient"), 0.0
    for n, apart in seen.items():
        if n in scales and apart > 1e-9 * scales[n]:
            spread = max(distance(copy[n], total[n]) for copy in copies)
            worst = max(worst, abs(spread - apart) / apart)
    return worst


@cause("stale gradient", "gradient")
def stale(d: Difference) -> Found:
    for right, side in d.both_ways():
        own, bad = right.gradients, side.gradients
        for which, old in _earlier(d, side):
            text = (f"the gradient of {side} {{}} {which}: zero_grad() on "
                    "torch, grad_req='write' in Gluon, no ignore_stale_grad")
            yield text.format("is"), d.residual(
                own, bad, {n: old.get(n, g) for n, g in own.items()})
            yield text.format("still contains"), d.residual(
                own, bad, {n: g + old.get(n, 0.0) for n, g in own.items()})


def _earlier(d: Difference, side: View) -> Iterator[tuple[str, Arrays]]:
    """Gradients of earlier steps, and what they are called."""
    past = side.past_gradients()
    for i, gradients in enumerate(past, 1):
        yield f"that of step {d.evidence.step - i}", gradients
    if len(past) > 1:
        yield "those of the last two steps", {
            n: past[0][n] + past[1][n] for n in past[0] if n in past[1]}


@cause("stale gradient", "gradient")
def partly_stale(d: Difference) -> Found:
    """Some parameters still have the gradient of the last step."""
    for right, side in d.both_ways():
        own, bad = right.gradients, side.gradients
        for old in side.past_gradients()[:1]:
            left = {n for n, g in bad.items() if n in old
                    and np.array_equal(g, old[n]) and np.any(g)}
            if left and len(left) < len(own):
                names = ", ".join(sorted(left)[:4])
                yield (f"no backward pass reached {names} on {side}: no "
                       "ignore_stale_grad"), d.residual(own, bad, {
                           n: old[n] if n in left else g
                           for n, g in own.items()})


@cause("frozen parameter", "gradient")
def frozen(d: Difference) -> Found:
    for (right, _), (side, names) in zip(
            d.both_ways(), d.without_gradient(fixed=False)):
        if names:
            still = {n: np.zeros_like(right.gradients[n]) for n in names}
            yield (f"{', '.join(names[:4])} gets no gradient on {side}: "
                   "frozen (grad_req='null', requires_grad=False), detached, "
                   "or not used"), d.residual(
                       right.gradients,
                       {**right.gradients, **side.gradients, **still}, still)


@cause("frozen parameter", "update", resort=1)
def not_moved(d: Difference, rule: Update, other: Update) -> Changes:
    before, after = d.evidence.before.values, other.side.values
    still = [g.name for g in d.wrong("weight") if g.name in after
             and np.array_equal(before[g.name], after[g.name])]
    if still:
        yield (f"{', '.join(still[:4])} does not move on {other.side}: not "
               "given to its optimizer, or a multiplier of 0"), \
            replaced(frozen=tuple(still))


@cause("gradient clipping", "gradient", resort=2)
def clipped(d: Difference) -> Found:
    for right, side in d.both_ways():
        own, bad = right.gradients, side.gradients
        limit = max((np.abs(x).max(initial=0.0) for x in bad.values()),
                    default=0.0)
        yield f"all elements of {side} are within a limit", d.residual(
            own, bad, {n: np.clip(g, -limit, limit) for n, g in own.items()})


@cause("gradient scale", "gradient", resort=3)
def scaled_gradients(d: Difference) -> Found:
    one, two = d.a.gradients, d.b.gradients
    pairs = [(one[n], two[n]) for n in d.scales("gradient")
             if n in one and n in two]
    power = sum(float((x * x).sum()) for x, _ in pairs)
    factor = sum(float((x * z).sum()) for x, z in pairs) / (power or 1)
    yield (f"all gradients of {d.b} are {factor:.9g} times those of {d.a}, "
           "and the losses agree: look for a loss scale or for clipping of "
           "the global norm (Gluon adds 1e-8 to the norm, torch 1e-6)"), \
        d.residual(one, two, {n: factor * g for n, g in one.items()})
