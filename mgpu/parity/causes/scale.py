"""Causes that multiply a whole loss, or all gradients, by a number."""
import math
from collections.abc import Iterable, Iterator

import numpy as np

from mgpu.parity.causes.difference import Difference, View, once, unexplained
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.update_search import Changes, Update, replaced, scaled

#: numbers by which a side is multiplied: (side, factor, text)
Factors = Iterator[tuple[View, float, str]]


def _times(d: Difference, factors: Iterable[tuple[View, float, str]]) -> Found:
    """Are all gradients of the side that factor times those of the other?"""
    one, two = d.a.gradients, d.b.gradients
    for side, factor, text in factors:
        factor = factor if side is d.b else 1 / factor
        yield text, d.residual(one, two, {
            n: factor * g for n, g in one.items()})


def _near(factor: float, *values: float) -> bool:
    return any(abs(factor / v - 1) < 1e-6 for v in values)


# -- loss reduction -----------------------------------------------------------

@once
def _reduced(d: Difference) -> list[tuple[View, str, float, float]]:
    """The side whose loss is a mean or a sum of the other's values, "mean"
    or "sum", a factor, and the residual."""
    found = []
    for right, side in d.both_ways():
        own, other = right.step.losses, side.step.losses
        if len(own) != d.rows:
            continue
        cuts = np.split(own, np.cumsum(side.rows)[:-1])
        spread = len(other) == d.rows
        for how, reduce in (("mean", np.mean), ("sum", np.sum)):
            values = np.array([float(reduce(cut)) for cut in cuts])
            if spread:
                values = np.repeat(values, [len(cut) for cut in cuts])
            found += [
                (side, how, factor, unexplained(own, other, factor * values))
                for factor in (1.0, 2.0, 0.5) if values.shape == other.shape
                and not (spread and np.allclose(own, factor * values))]
    return [f for f in found if f[-1] < d.limit]


@once
def _loss_factor(d: Difference) -> list[tuple[float, float]]:
    """The number that the losses of b are times those of a, and the
    residual; [] where they cannot be compared."""
    one, two = d.a.step.losses, d.b.step.losses
    if one.shape != two.shape:
        return []
    nonzero = one != 0
    factor = float(np.median(two[nonzero] / one[nonzero])) \
        if nonzero.any() else 1.0
    if one.size > 1:
        return [(factor, unexplained(one, two, factor * one))]
    # One number always has a factor; then the gradients must have it too.
    return [(factor, d.residual(d.a.gradients, d.b.gradients, {
        n: factor * g for n, g in d.a.gradients.items()}))]


@cause("loss reduction", "loss")
def one_number(d: Difference) -> Found:
    for side, how, _, residual in _reduced(d):
        yield (f"the loss of {side} is one {how} over the batch (rows per "
               f"device: {d.a.rows}), that of the other side one value per "
               "example: use reduction='none' on torch, or "
               "mgpu.losses.per_example(loss)"), residual


@cause("loss reduction", "loss", resort=1)
def divided_losses(d: Difference) -> Found:
    outputs = d.a.step.outputs
    numbers = [(n, "divides by the rows of the batch")
               for n in dict.fromkeys((d.rows, *d.a.rows))]
    numbers.append((math.prod(outputs[0].shape[1:]) if outputs else 1,
                    "averages over the other axes of the output"))
    for factor, residual in _loss_factor(d):
        for n, text in numbers:
            if n > 1 and _near(factor, n, 1 / n) \
                    and not (n == 2 and _squares(d)):   # see "L2 loss"
                yield (f"the losses of {d.b} are {factor:.6g} times those of "
                       f"{d.a}: {d.b if factor < 1 else d.a} {text}. Use "
                       "reduction='none' on torch"), residual


def _reductions(d: Difference) -> Factors:
    for side in (d.a, d.b):
        for size in dict.fromkeys((d.rows, d.rows / side.devices)):
            if size > 1:
                yield side, 1 / size, (
                    f"{side} has divided by {size:g} already: its loss is a "
                    "mean. Divide only in Trainer.step (reduction='none')")


@cause("loss reduction", "gradient")
def divided_before(d: Difference) -> Found:
    yield from _times(d, _reductions(d))


@cause("loss reduction", "gradient", resort=1)
def mean_of_means(d: Difference) -> Found:
    for right, side in d.both_ways():
        k, rows = side.devices, right.step.rows
        for scale in (1.0, 1 / k, d.rows / k) if 1 < k == len(rows) else ():
            factors = [scale / n if n else 0.0 for n in rows]
            if any(abs(f - 1) > 1e-6 for f in factors):     # not a plain sum
                yield (f"{side} adds up the means of its devices, whose "
                       f"shards have {rows} rows: sum over the examples, "
                       "divide once"), d.weighted(right, side, factors)


@cause("loss reduction", "update")
def divided_twice(d: Difference, rule: Update, other: Update) -> Changes:
    for side, factor, _ in _reductions(d):
        if rule.divisor == other.divisor:
            factor = factor if side is other.side else 1 / factor
            yield (f"{other.side} moves as with {factor:.6g} times its "
                   "gradients: it divides by the batch twice, or not at all. "
                   "Divide only in Trainer.step"), scaled(factor)


# -- devices ------------------------------------------------------------------

def _means(d: Difference) -> Factors:
    for side in (d.a, d.b):
        if side.devices > 1:
            yield side, 1 / side.devices, (
                f"{side} averages gradients over its {side.devices} devices "
                "(as DistributedDataParallel): all-reduce with the sum, "
                "divide once by the batch size")


@cause("sum or mean over devices", "gradient")
def averaged(d: Difference) -> Found:
    yield from _times(d, () if d.aliased() else _means(d))


@cause("sum or mean over devices", "update")
def averaged_in_the_update(d: Difference, rule: Update, other: Update
                           ) -> Changes:
    # A rate that is known to differ comes before what no setting shows.
    for side, factor, text in _means(d) if rule.rate == other.rate else ():
        yield text, scaled(factor if side is other.side else 1 / factor)


@cause("aliased replicas", "gradient")
def aliased(d: Difference) -> Found:
    yield from _times(d, [(side, 2.0 ** (side.devices - 1), (
        f"{side} is 2^({side.devices} - 1) times too large: its replicas "
        "share their arrays, as .to(device) and as_in_context may not copy. "
        "Clone when replicating (mgpu.initialize does)"))
        for side in (d.a, d.b) if side.devices > 1])


@cause("aliased replicas", "update")
def moved_several_times(d: Difference, rule: Update, other: Update) -> Changes:
    k = other.side.devices
    if k > 1 and rule.rate == other.rate:
        yield (f"{other.side} moves its weights {k} times: its replicas "
               "share their arrays. Clone when replicating (mgpu.initialize "
               "does)"), replaced(repeats=k)


# -- L2 loss and others -------------------------------------------------------

def _squares(d: Difference) -> bool:
    """Whether the loss may be one of squares: a label for each output, and
    no other losses than their squares give."""
    _, labels = d.a.prepared()
    outputs, losses = d.a.step.outputs, d.a.step.losses
    if sum(y.size for y in labels) != sum(x.size for x in outputs):
        return False
    if len(outputs) != 1 or len(labels) != 1 or losses.size != len(
            outputs[0]) or losses.size < 2:
        return True
    x = outputs[0].astype(float).reshape(len(losses), -1)
    squares = ((x - labels[0].reshape(x.shape)) ** 2).mean(1)
    factor = np.median(losses[squares > 0] / squares[squares > 0]) \
        if squares.any() else 0.0
    return bool(np.allclose(losses, factor * squares, rtol=1e-4,
                            atol=1e-6 * np.abs(losses).max()))


def _half(twice: View) -> str:
    return (f"the loss of {twice} is twice the other's: torch's MSELoss is "
            "twice Gluon's L2Loss. Use mgpu.losses.L2Loss on both (or "
            "Huber's, with rho = 2: torch's is rho times Gluon's)")


@cause("L2 loss", "loss")
def half_in_one_number(d: Difference) -> Found:
    for side, _, factor, residual in _reduced(d):
        if factor != 1 and _squares(d):
            yield _half(d.b if (factor > 1) is (side is d.b) else d.a), \
                residual


@cause("L2 loss", "loss", resort=1)
def half(d: Difference) -> Found:
    for factor, residual in _loss_factor(d):
        if _near(factor, 2, 0.5) and _squares(d):
            yield _half(d.b if factor > 1 else d.a), residual


@cause("L2 loss", "gradient")
def half_gradients(d: Difference) -> Found:
    yield from _times(d, [] if d.aliased() or not _squares(d) else [
        (side, 2.0, _half(side)) for side in (d.b, d.a)])


@cause("loss weight", "loss", resort=2)
def weight(d: Difference) -> Found:
    for factor, residual in _loss_factor(d):
        yield (f"the losses of {d.b} are {factor:.6g} times those of {d.a}: "
               "a weight= in Gluon, a factor on torch, or Huber's rho"
               ), residual
