"""Causes in the data: the batch that each side gets."""
import numpy as np

from mgpu.parity.causes.difference import (Difference, distance, nearest, once,
                                           reordered, same_lists, unexplained)
from mgpu.parity.causes.registry import Found, cause


@once
def _other_order(d: Difference) -> bool:
    """Whether both sides get the same examples in another order."""
    (Xa, _), (Xb, _) = d.a.prepared(), d.b.prepared()
    return len(Xa) == len(Xb) and not same_lists(Xa, Xb) and all(
        reordered(u, v) < d.limit for u, v in zip(Xa, Xb))


@cause("data order", "forward")
def order_of_examples(d: Difference) -> Found:
    if _other_order(d):
        yield (f"{d.b} gets the same examples as {d.a} in another order: "
               "give both one sampler, or DataLoader(shuffle=False)"), 0.0


@cause("data order", "forward", resort=3)
def order_of_rows(d: Difference) -> Found:
    for u, v, where, _ in d.tensors():
        yield (f"at {where} {d.b} has the rows of {d.a} in another order: "
               "give both one sampler and one split"), reordered(u, v)


@cause("data order", "loss")
def order_of_labels(d: Difference) -> Found:
    (_, ya), (_, yb) = d.a.prepared(), d.b.prepared()
    if d.a.step.losses.shape == d.b.step.losses.shape \
            and len(ya) == len(yb) == 1 and not same_lists(ya, yb):
        yield (f"the labels come in another order on {d.b}, the inputs do "
               "not: shuffle them together"), reordered(
                   *(y.reshape(len(y), -1) for y in (ya[0], yb[0])))


@cause("input preparation", "forward")
def preparation(d: Difference) -> Found:
    """Does the network of a, given the data of b, do what b does?"""
    (Xa, ya), (Xb, yb) = d.a.prepared(), d.b.prepared()
    if len(Xa) != len(Xb) or _other_order(d) \
            or same_lists(Xa, Xb) and same_lists(ya, yb):
        return
    ev, run = d.evidence, d.a.run
    run.load(d.a.before(), memory=False)
    try:
        outputs = run.forward(*d.b.run.prepared(ev.X, ev.y), ev.step)
    except Exception:       # the data of b need not fit the network of a
        return
    yield (f"{d.b} gets other numbers than {d.a} for the same batch"
           f"{_affine(Xa, Xb)}: make the transforms equal, or drop prepare="
           ), max(map(unexplained, ev.a.outputs, ev.b.outputs, outputs))


def _affine(xs: list[np.ndarray], zs: list[np.ndarray]) -> str:
    for x, z in zip(xs, zs):
        if x.shape == z.shape and x.dtype.kind == "f" and x.size > 2:
            scale, shift = np.polyfit(x.reshape(-1), z.reshape(-1), 1)
            if distance(scale * x + shift, z) < 1e-6 * np.abs(z).max():
                return f", {scale:.6g} times its input plus {shift:.6g}"
    return ""


@cause("labels out of range", "loss")
def labels_out_of_range(d: Difference) -> Found:
    """Cross-entropy with labels that are out of range or not whole."""
    losses, (_, ya) = [d.a.step.losses, d.b.step.losses], d.a.prepared()
    outputs = d.a.step.outputs
    if len(ya) != 1 or len(outputs) != 1 or outputs[0].ndim != 2 \
            or not ya[0].size == losses[0].size == losses[1].size:
        return
    y, classes = ya[0].reshape(-1).astype(float), outputs[0].shape[1]
    odd = (np.trunc(y) < 0) | (np.trunc(y) >= classes) | (y != np.trunc(y))
    known = _treatments(y, outputs[0], odd) if odd.any() else {}
    (e, one), (f, two) = (nearest(known, x, distance(*losses) or 1)
                          for x in losses)
    if one != two:
        row = int(np.argmax(odd))
        yield (f"{int(odd.sum())} labels are not a class (row {row}: "
               f"{y[row]:g}, classes 0 to {classes - 1}); the loss of {d.a} "
               f"{one}, that of {d.b} {two}. Gluon's loss clips them, torch's "
               "refuses or ignores them: clean the labels"), max(e, f)


def _treatments(y: np.ndarray, logits: np.ndarray, odd: np.ndarray
                ) -> dict[str, np.ndarray]:
    """The losses for each way to treat the labels that are `odd`."""
    classes = logits.shape[1]
    log_p = logits - logits.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))

    def entropy(labels: np.ndarray) -> np.ndarray:
        picked = np.clip(labels, 0, classes - 1).astype(int)
        return -log_p[np.arange(len(y)), picked]
    return {
        "takes the nearest class": entropy(np.trunc(y)),
        "counts from the last class": entropy(np.trunc(y) % classes),
        "leaves such examples out": np.where(odd, 0, entropy(np.trunc(y))),
        "rounds to the next class": entropy(np.round(y))}
