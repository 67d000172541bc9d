"""Causes of other losses from equal outputs."""
import math
from typing import Any

import numpy as np

from mgpu.parity.causes.case import Case, Cause, Found, distance, unexplained
from mgpu.parity.causes.forward import reordered, same_lists


def causes(case: Case) -> Found:
    one, two = case.evidence.a.losses, case.evidence.b.losses
    found: Found = []
    shards = [n for n in case.evidence.a.rows if n]
    for own, other, side in ((one, two, "b"), (two, one, "a")):
        if len(own) != case.rows:
            continue
        cuts = np.split(own, np.cumsum([
            n for n in case.records[side].rows if n])[:-1])
        spread = len(other) == case.rows
        for how, reduce in (("mean", np.mean), ("sum", np.sum)):
            values = [float(reduce(cut)) for cut in cuts]
            if spread:
                values = [v for v, cut in zip(values, cuts) for _ in cut]
            for factor in (1.0, 2.0, 0.5):
                predicted = factor * np.asarray(values)
                if predicted.shape != other.shape or (
                        spread and np.allclose(own, predicted)):
                    continue
                residual = unexplained(own, other, predicted)
                if residual > case.limit:
                    continue
                found.append(Cause("loss reduction", (
                    f"the loss of {case.engine(side)} is one {how} over the "
                    f"batch (rows per device: {shards}), the other one value "
                    "per example. Gluon's losses do not reduce, torch's do: "
                    "reduction='none' on torch, or "
                    "mgpu.losses.per_example(loss); the division by the "
                    "batch happens once, in Trainer.step"), residual))
                if factor != 1.0:
                    found.append(_half(case, factor, side, residual))
    if one.shape != two.shape:
        return found
    found += _labels(case)
    if found:
        return found
    nonzero = one != 0
    factor = float(np.median(two[nonzero] / one[nonzero])) \
        if nonzero.any() else 1.0
    residual = unexplained(one, two, factor * one)
    if residual > case.limit:
        return found
    outputs = case.evidence.a.outputs
    axes = math.prod(outputs[0].shape[1:]) if outputs else 1
    for names, text in (
            ((case.rows, *shards), "divides by the rows of the batch"),
            ((axes,), "averages over the other axes of the output, and "
                      "other sums over them")):
        for n in names:
            if n > 1 and _near(factor, n, 1 / n):
                side = "b" if factor < 1 else "a"
                found.append(Cause("loss reduction", (
                    f"the losses of {case.engine('b')} are {factor:.6g} "
                    f"times those of {case.engine('a')}: "
                    f"{case.engine(side)} {text}. Compare the values of "
                    "single examples: reduction='none' on torch, "
                    "mgpu.losses on both"), residual))
    if _near(factor, 2, 0.5):
        found.append(_half(case, factor, "b", residual))
    if not found:
        found.append(Cause("loss weight", (
            f"the losses of {case.engine('b')} are {factor:.6g} times those "
            f"of {case.engine('a')}: a weight= in Gluon, a factor on torch, "
            "or Huber's rho (torch's huber_loss is rho times Gluon's)"),
            residual))
    return found


def _half(case: Case, factor: float, side: str, residual: float) -> Cause:
    twice = side if factor > 1 else ("a" if side == "b" else "b")
    return Cause("L2 loss", (
        f"the loss of {case.engine(twice)} is twice the other's: Gluon's "
        "L2Loss is half the mean square, torch's MSELoss the mean square. "
        "Use mgpu.losses.L2Loss on both, or halve torch's"), residual)


def _near(factor: float, *values: float) -> bool:
    return any(abs(factor / v - 1) < 1e-6 for v in values)


def _labels(case: Case) -> Found:
    """Cross-entropy with labels that are out of range, not whole, or in
    another order."""
    ev = case.evidence
    (_, ya), (_, yb) = case.prepared("a"), case.prepared("b")
    found: Found = []
    if len(ya) == 1 and len(yb) == 1 and not same_lists(ya, yb):
        residual = reordered(*(y.reshape(len(y), -1) for y in (ya[0], yb[0])))
        if residual < case.limit:
            return [Cause("data order", (
                "the labels come in another order on "
                f"{case.engine('b')}, the inputs do not: shuffle them "
                "together"), residual)]
    outputs = ev.a.outputs
    if len(ya) != 1 or len(outputs) != 1 or outputs[0].ndim != 2 \
            or ya[0].reshape(-1).shape != ev.a.losses.shape:
        return found
    y, logits = ya[0].reshape(-1).astype(float), outputs[0]
    classes = logits.shape[1]
    odd = (np.trunc(y) < 0) | (np.trunc(y) >= classes) | (y != np.trunc(y))
    if not odd.any():
        return found
    log_p = logits - logits.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))

    def entropy(labels: np.ndarray) -> np.ndarray:
        picked = np.clip(labels, 0, classes - 1).astype(int)
        return -log_p[np.arange(len(y)), picked]
    known = {
        "takes the nearest class": entropy(np.trunc(y)),
        "counts from the last class": entropy(np.trunc(y) % classes),
        "leaves such examples out": np.where(odd, 0, entropy(np.trunc(y))),
        "rounds to the next class": entropy(np.round(y))}
    fits: dict[str, list[Any]] = {}
    for side in ("a", "b"):
        values = case.records[side].losses
        fits[side] = [(distance(p, values) / (distance(
            ev.a.losses, ev.b.losses) or 1), how)
            for how, p in known.items()]
        if not min(fits[side])[0] < case.limit:
            return found
    (e, one), (f, two) = min(fits["a"]), min(fits["b"])
    if one == two:
        return found
    row = int(np.argmax(odd))
    return [Cause("labels out of range", (
        f"{int(odd.sum())} labels are no class (row {row}: {y[row]:g}, "
        f"classes 0 to {classes - 1}); the loss of {case.engine('a')} {one}, "
        f"that of {case.engine('b')} {two}. Gluon's loss clips in silence, "
        "torch's refuses or ignores (ignore_index): clean the labels, or "
        "clip them for both"), max(e, f))]
