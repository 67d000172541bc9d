"""Causes in a training step of the user's own: modes, clipping, schedules."""
from typing import Any

import numpy as np

from mgpu.parity.causes.difference import Difference, View, unexplained
from mgpu.parity.causes.registry import Found, cause
from mgpu.parity.run import Arrays, common_factor

#: layers that do something else in prediction mode
_MODES = ("dropout", "batch_norm")


@cause("training mode", "forward")
def training_mode(d: Difference) -> Found:
    for right, side in d.both_ways():
        own = side.step.own
        layers = side.run.by_path()
        frozen = [path for path in (own.predicted if own else ())
                  if path in layers and layers[path].kind in _MODES]
        if frozen and right.step.predictions is not None:
            named = ", ".join(repr(path) for path in frozen[:4])
            yield (f"{side} trains in prediction mode (layers {named}): call "
                   "net.train() on torch, or autograd.record() without "
                   "train_mode=False in Gluon, before each step"), _far(
                       right.step.outputs, side.step.outputs,
                       right.step.predictions)


def _far(base: list[Any], target: list[Any], predicted: list[Any]
         ) -> float | None:
    try:
        return max((unexplained(*xs) for xs in zip(base, target, predicted)),
                   default=None)
    except ValueError:      # other shapes: called in another form
        return None


# -- clipping -----------------------------------------------------------------

def _left(side: View) -> Arrays:
    own = side.step.own
    return own.left if own else side.gradients


def _norm(side: View) -> float:
    """Of all gradients, divided as the optimiser divides them."""
    return float(np.sqrt(sum(float(np.vdot(g, g)) for g in _left(
        side).values()))) / side.step.divisor


def _limit(side: View) -> float | None:
    """The global norm that a side clips to; None: it does not, or not to
    one."""
    factor = common_factor(_left(side), side.gradients)
    return None if factor is None or factor > 1 - 1e-9 \
        else factor * _norm(side)


def _clips_not(side: View) -> bool:
    return common_factor(_left(side), side.gradients) is not None \
        and _limit(side) is None


@cause("clipping", "clipping")
def clipping(d: Difference) -> Found:
    for right, side in d.both_ways():
        limit, own = _limit(right), _limit(side)
        one = (f"{right} clips gradients to the global norm {limit:.6g} "
               f"(here {_norm(right):.6g})" if limit is not None
               else f"{right} does not clip")
        if own is not None and limit is not None:
            scale = side.step.own.loss_scale if side.step.own else 1.0
            if scale != 1 and np.isclose(own * scale, limit, rtol=1e-4):
                yield (f"{side} clips gradients that are still multiplied by "
                       f"the loss scale {scale:g}: call "
                       "scaler.unscale_(optimizer) before clipping"), 0.0
            else:
                yield f"{one}, {side} to {own:.6g}", 0.0
            return
        if _clips_not(side) and limit is not None:
            yield f"{one}, {side} does not clip", 0.0
            return
        if limit is None and not _clips_not(right):
            continue
        for text, clipped in _other_ways(side):
            yield f"{one}, {side} {text}", d.residual(
                _left(side), side.gradients, clipped)


def _other_ways(side: View) -> list[tuple[str, Arrays]]:
    """Ways to clip that are not by the global norm: in words, and what they
    make of the gradients."""
    left, divisor = _left(side), side.step.divisor
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


# -- schedules ----------------------------------------------------------------

@cause("schedule", "rate")
def schedule(d: Difference) -> Found:
    number = d.evidence.before.optimizer.num_update + 1
    for right, side in d.both_ways():
        name = next(iter(right.gradients), None)
        if name is None or side is not d.b:
            continue

        def rate(view: View, update: int, name: str = name) -> float:
            try:
                return view.run.updates.last_rate(view.names[name], update)
            except (KeyError, IndexError):
                return 0.0
        own, wanted = rate(side, number), rate(right, number)
        text = (f"the rate of update {number} is {own:.6g} on {side} and "
                f"{wanted:.6g} on {right}")
        if own and np.isclose(rate(right, number + 1), own, rtol=1e-9):
            text += (f": the schedule of {side} is one step ahead; call "
                     "scheduler.step() after optimizer.step(), once per step")
        elif own and np.isclose(rate(right, number - 1), own, rtol=1e-9):
            text += (f": the schedule of {side} is one step behind, or does "
                     "not move")
        elif own and number > 1 and np.isclose(
                own, rate(side, number - 1), rtol=1e-9):
            text += (f": the schedule of {side} does not move in this step; "
                     "call scheduler.step() as often as the other one")
        else:
            text += ": give both the same schedule, by step or by epoch"
        yield text, 0.0
