"""Causes in a training step of the user's own: modes, clipping, schedules."""
import itertools
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.causes.difference import Difference, View, unexplained
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.causes.update_search import Changes, Update, replaced
from mgpu.parity.run import (Arrays, common_factor, gradients_left,
                             norms_left)

#: layers that do something else in prediction mode
_MODES = ("dropout", "batch_norm")


@cause("training mode", "forward", resort=-1)
def training_mode(d: Difference) -> Found:
    for right, side in d.both_ways():
        own = side.step.own
        layers = side.run.by_path()
        frozen = [path for path in (own.predicted if own else ())
                  if path in layers and layers[path].kind in _MODES]
        if frozen and right.step.predictions is not None:
            named = ", ".join(repr(path) for path in frozen[:4])
            first = d.place and {c.path for c in (d.place.call_a,
                                                  d.place.call_b)}
            left = 0.0 if first and first & {*frozen} else _far(
                right.step.outputs, side.step.outputs,
                right.step.predictions)
            yield (f"{side} trains in prediction mode (layers {named}): call "
                   "net.train() on torch, or autograd.record() without "
                   "train_mode=False in Gluon, before each step"), left


def _far(base: list[Any], target: list[Any], predicted: list[Any]
         ) -> float | None:
    try:
        return max((unexplained(*xs) for xs in zip(base, target, predicted)),
                   default=None)
    except ValueError:      # other shapes: called in another form
        return None


# -- clipping -----------------------------------------------------------------

class _Limit(NamedTuple):
    """The global norm that a side clips to, and the norm before."""

    limit: float
    norm: float


def _limit(side: View) -> _Limit | None:
    """None: a side does not clip, or not to a global norm. Which gradients
    are in the norm, its limit tells: nobody writes one with many digits."""
    factor = common_factor(gradients_left(side.step), side.gradients)
    if factor is None or factor > 1 - 1e-9:
        return None
    return min((_Limit(factor * norm, norm)
                for norm in norms_left(side.step)),
               key=lambda own: abs(own.limit - float(f"{own.limit:.3g}"))
               > 1e-5 * own.limit)


def _clips_not(side: View) -> bool:
    factor = common_factor(gradients_left(side.step), side.gradients)
    return factor is not None and _limit(side) is None


@cause("left out of the update", "clipping", resort=-1)
def left_out(d: Difference) -> Found:
    """Gradients that the optimizer of one side only gets."""
    for right, side in d.both_ways():
        still = [n for n in d.kinds if np.any(right.gradients.get(n, 0.0))
                 and not np.any(side.gradients.get(n, 0.0))]
        if still:
            yield (f"{side} does not update {', '.join(still[:4])}: give it "
                   "to the optimizer, call optimizer.step() or "
                   "Trainer.step(), and zero_grad() before the backward pass"
                   ), 0.0


@cause("clipping", "clipping")
def clipping(d: Difference) -> Found:
    one, two = _limit(d.a), _limit(d.b)
    if one is not None and two is not None:
        for side, own, limit in ((d.a, one, two), (d.b, two, one)):
            scale = side.step.own.loss_scale if side.step.own else 1.0
            if scale != 1 and np.isclose(own.limit * scale, limit.limit,
                                         rtol=1e-4):
                yield (f"{side} clips gradients that are still multiplied by "
                       f"the loss scale {scale:g}: call "
                       "scaler.unscale_(optimizer) before clipping"), 0.0
                return
        yield (f"{d.a} clips gradients to the global norm {one.limit:.6g} "
               f"(here {one.norm:.6g}), {d.b} to {two.limit:.6g} (here "
               f"{two.norm:.6g})"), 0.0
        return
    for right, side in d.both_ways():
        mine = one if right is d.a else two
        text = (f"{right} clips gradients to the global norm {mine.limit:.6g} "
                f"(here {mine.norm:.6g})" if mine else
                f"{right} does not clip")
        if _clips_not(side) and mine is not None:
            yield f"{text}, {side} does not clip", 0.0
            return
        if mine is None and not _clips_not(right):
            continue
        for how, clipped in _other_ways(side):
            yield f"{text}, {side} {how}", d.residual(
                gradients_left(side.step), side.gradients, clipped,
                d.scales("clipping"))


def _other_ways(side: View) -> list[tuple[str, Arrays]]:
    """Ways to clip that are not by the global norm: in words, and what they
    make of the gradients."""
    left, divisor = gradients_left(side.step), side.step.divisor
    most = max((float(np.abs(g).max(initial=0.0))
                for g in side.gradients.values()), default=0.0)
    found = [(f"clips each element to {most / divisor:.6g}",
              {n: np.clip(g, -most, most) for n, g in left.items()})]
    norms = {n: float(np.linalg.norm(g)) for n, g in left.items()}
    limit = max((float(np.linalg.norm(side.gradients[n])) for n in norms
                 if n in side.gradients), default=0.0)
    found.append((f"clips each tensor by its own norm, to "
                  f"{limit / divisor:.6g}", {
                      n: g * min(1.0, limit / norms[n]) if norms[n] else g
                      for n, g in left.items()}))
    return found


# -- updates ------------------------------------------------------------------

@cause("updates in a step", "update")
def several_updates(d: Difference, rule: Update, other: Update) -> Changes:
    own = other.side.step.own
    if own is not None and own.updates > 1:
        yield (f"{other.side} updates its weights {own.updates} times in a "
               "step: call optimizer.step() or Trainer.step() once"), \
            replaced(repeats=own.updates)


# -- schedules ----------------------------------------------------------------

@cause("schedule", "rate")
def schedule(d: Difference) -> Found:
    step = d.evidence.step
    rates = [list(own) for own in zip(*d.rates)]
    text = (f"the rate of step {step} is {rates[0][step - 1]:.6g} on {d.a} "
            f"and {rates[1][step - 1]:.6g} on {d.b}: ")
    for (right, side), wanted, own in zip(d.both_ways(), rates, rates[::-1]):
        moves = [sum(x != z for x, z in itertools.pairwise(all_))
                 for all_ in (own, wanted)]
        if not moves[0] and moves[1]:
            yield (f"{text}the schedule of {side} does not move; call "
                   "scheduler.step() after optimizer.step()"), 0.0
            return
        if moves[1] and own[2:] and np.allclose(
                own[:-1], wanted[1:], rtol=1e-9, atol=0):
            yield (f"{text}the schedule of {side} is one step ahead of that "
                   f"of {right}; call scheduler.step() after "
                   "optimizer.step(), and mind that Gluon's schedules count "
                   "from 1, torch's from 0"), 0.0
            return
        if 0 < moves[0] < moves[1]:
            yield (f"{text}the schedule of {side} moves {moves[0]} times, "
                   f"that of {right} {moves[1]} times; call "
                   "scheduler.step() once per step, or once per epoch, as the "
                   "other side does"), 0.0
            return
    yield f"{text}give both the same schedule, by step or by epoch", 0.0
