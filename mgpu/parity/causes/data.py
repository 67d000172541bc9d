"""Causes in the data: the batch that each side gets."""
from collections.abc import Iterator

import numpy as np

from mgpu.parity.causes.difference import (Difference, View, distance, nearest,
                                           once, reordered, same_lists,
                                           unexplained)
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
        if np.array_equal(u, v):
            continue
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
    classes, log_p = logits.shape[1], _log_softmax(logits)

    def entropy(labels: np.ndarray) -> np.ndarray:
        picked = np.clip(labels, 0, classes - 1).astype(int)
        return -log_p[np.arange(len(y)), picked]
    return {
        "takes the nearest class": entropy(np.trunc(y)),
        "counts from the last class": entropy(np.trunc(y) % classes),
        "leaves such examples out": np.where(odd, 0, entropy(np.trunc(y))),
        "rounds to the next class": entropy(np.round(y))}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    log_p = logits - logits.max(1, keepdims=True)
    return log_p - np.log(np.exp(log_p).sum(1, keepdims=True))


# -- cross-entropies ----------------------------------------------------------

def _entropies(d: Difference) -> Iterator[tuple[
        View, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """For each side that another one's loss is the plain cross-entropy of:
    that side, its losses, the plain ones, log-probabilities and labels."""
    for right, side in d.both_ways():
        (_, labels), outputs = right.prepared(), right.step.outputs
        own, other = right.step.losses, side.step.losses
        if len(labels) != 1 or len(outputs) != 1 or outputs[0].ndim != 2 \
                or not labels[0].size == own.size == other.size:
            continue
        log_p, y = _log_softmax(outputs[0]), labels[0].reshape(-1)
        if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(log_p.T):
            continue
        plain = -log_p[np.arange(len(y)), y]
        if np.allclose(plain, own.reshape(-1), max(1e-6, 10 * d.tolerance),
                       max(1e-9, d.tolerance)):
            yield side, other.reshape(-1), plain, log_p, y


@cause("label smoothing", "loss")
def smoothing(d: Difference) -> Found:
    for side, losses, plain, log_p, _ in _entropies(d):
        apart = -log_p.mean(1) - plain
        share = float((losses - plain) @ apart / (apart @ apart or 1))
        if 0 < share < 1:
            yield (f"{side} smooths labels by {share:.4g}, the other side "
                   "does not: give both the same label_smoothing"
                   ), unexplained(plain, losses, plain + share * apart)


@cause("softmax in the loss", "loss")
def softmax_twice(d: Difference) -> Found:
    for side, losses, plain, log_p, y in _entropies(d):
        twice = -_log_softmax(np.exp(log_p))[np.arange(len(y)), y]
        yield (f"the loss of {side} takes the softmax of what is a softmax "
               "already: give cross-entropy the outputs themselves, or "
               "from_logits=True in Gluon and nll_loss on torch their "
               "log_softmax"), unexplained(plain, losses, twice)


@cause("ignore_index", "loss")
def ignored(d: Difference) -> Found:
    for side, losses, plain, _, y in _entropies(d):
        for c in np.unique(y[losses == 0]):
            yield (f"{side} leaves the examples of class {c} out of the loss, "
                   "as with ignore_index; Gluon's loss has none: use "
                   "sample_weight, or drop ignore_index"), unexplained(
                       plain, losses, np.where(y == c, 0.0, plain))


@cause("loss formula", "loss", resort=1)
def regression(d: Difference) -> Found:
    """Losses of each output against each label, averaged over a row."""
    known = []
    for side in (d.a, d.b):
        (_, labels), outputs = side.prepared(), side.step.outputs
        losses = side.step.losses
        if len(labels) != 1 or len(outputs) != 1 or losses.shape != (
                len(outputs[0]),) or labels[0].size != outputs[0].size:
            return
        apart = (outputs[0] - labels[0].reshape(outputs[0].shape)
                 ).reshape(len(losses), -1)
        formulas = {"|x - y|": np.abs(apart), "(x - y)^2 / 2": apart ** 2 / 2}
        known.append(nearest(
            {how: f.mean(1) for how, f in formulas.items()}, losses,
            distance(d.a.step.losses, d.b.step.losses) or 1))
    (e, one), (f, two) = known
    if one != two:
        yield (f"the loss of {d.a} is the mean of {one}, that of {d.b} of "
               f"{two}: use L1Loss on both, or L2Loss on both"), max(e, f)


@cause("class weights", "loss")
def class_weights(d: Difference) -> Found:
    for side, losses, plain, _, y in _entropies(d):
        classes, counts = np.unique(y, return_counts=True)
        weights = {c: float(np.median(losses[y == c] / plain[y == c]))
                   for c in classes}
        if counts.max() > 1 and np.ptp(list(weights.values())) > 1e-6:
            words = ", ".join(f"{c}: {w:.4g}" for c, w in weights.items())
            yield (f"{side} weighs the examples by class ({words}): give "
                   "both the same weights"), unexplained(
                       plain, losses, plain * [weights[c] for c in y])


@cause("shifted labels", "loss")
def shifted(d: Difference) -> Found:
    for side, losses, plain, log_p, y in _entropies(d):
        for text, other in (
                ("one more than the other side's", y + 1),
                ("one less than the other side's", y - 1),
                ("those of the next row", np.roll(y, -1)),
                ("those of the row before", np.roll(y, 1))):
            if 0 <= other.min() and other.max() < len(log_p.T):
                yield (f"the labels of {side} are {text}: count classes "
                       "from 0, and shift targets on both or on neither"
                       ), unexplained(
                           plain, losses, -log_p[np.arange(len(y)), other])
