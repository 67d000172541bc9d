"""Losses with Gluon's meaning on both engines: one value per example.

Each is called as ``loss(pred, label, sample_weight=None)`` on native arrays
of one device and returns shape (n,). Losses of more arrays take them in
Gluon's order, or in tuples in the places of `pred` and `label`. Nothing is
averaged over the batch: the sum is what `mgpu.backward` differentiates and
the division by the number of rows happens once, in `Trainer.step`, whatever
the number of devices. Options are in Gluon's order; `batch_axis` is 0
(ValueError for another).

Formulas: MXNet 1.9.1, ``gluon/loss.py``. `weight` scales the loss;
`sample_weight` must broadcast to the shape of the loss before it is averaged,
for example (n, 1). Labels (but class numbers) and sample weights are brought
to the dtype of `pred`.
"""
import copy
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.arguments import one_of
from mgpu.backends import base, get_backend, messages
from mgpu.errors import LabelError
from mgpu.nested import axis_in, leaves

Array = Any


def _native(*arrays: Array) -> base.Backend:
    """The backend, whose arrays these are."""
    backend = get_backend()
    messages.check_native(arrays, backend, "a loss takes")
    return backend


def _check(pred: Array, label: Array, sample_weight: Array | None
           ) -> base.Backend:
    backend = _native(*(x for x in (pred, label, sample_weight)
                        if x is not None))
    shapes = [tuple(x.shape) for x in (pred, label)]
    if shapes[0][:1] != shapes[1][:1] or () in shapes:
        raise ValueError(
            "pred and label must have a row for each example; received "
            f"shapes {shapes[0]} and {shapes[1]}. Give each row of pred its "
            "label.")
    return backend


class Loss:
    """Base of the losses; `weight` is a global factor."""

    def __init__(self, weight: float | None = None, batch_axis: int = 0):
        if type(batch_axis) is not int or batch_axis != 0:
            raise ValueError(
                "axis 0 has the examples, on all devices; received "
                f"batch_axis={batch_axis!r}. Transpose the data.")
        self.weight = weight

    def __call__(self, pred: Array, label: Array,
                 sample_weight: Array | None = None) -> Array:
        backend = _check(pred, label, sample_weight)
        return self._weighed(backend, self._values(backend, pred, label),
                             pred, sample_weight)

    def _weighed(self, backend: base.Backend, loss: Array, pred: Array,
                 sample_weight: Array | None) -> Array:
        """Of the values `loss`, one per example."""
        if sample_weight is not None:
            loss = self._to_weigh(loss, pred)
            given, shape = tuple(sample_weight.shape), tuple(loss.shape)
            if not _broadcasts(given, shape):
                raise ValueError(
                    f"sample_weight must broadcast to the shape {shape} of "
                    f"the loss; received shape {given}. For one weight per "
                    f"example use {shape[:1] + (1,) * (len(shape) - 1)}.")
            loss = loss * _as(backend.ops, sample_weight, pred)
        if self.weight is not None:
            loss = loss * self.weight
        return self._per_example(backend.ops, loss)

    def _values(self, backend: base.Backend, pred: Array, label: Array
                ) -> Array:
        return self._formula(backend.ops, pred,
                             _like(backend.ops, label, pred))

    def _formula(self, ops: base.Ops, pred: Array, label: Array) -> Array:
        """The values, of a label in the shape and dtype of `pred`."""
        raise NotImplementedError

    def _to_weigh(self, loss: Array, pred: Array) -> Array:
        """`_values` in the shape that sample weights broadcast to."""
        return loss

    def _per_example(self, ops: base.Ops, loss: Array) -> Array:
        return _joined(ops.mean, loss)

    def __repr__(self) -> str:
        options = ", ".join(f"{k.lstrip('_')}={v!r}"
                            for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({options})"


def _joined(join: Callable[..., Array], values: Array) -> Array:
    """`values` with one number per example: all axes but the first joined."""
    rest = tuple(range(1, len(values.shape)))
    return join(values, rest) if rest else values


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        n in (1, m) for n, m in zip(shape[::-1], to[::-1]))


def _as(ops: base.Ops, x: Array, pred: Array) -> Array:
    return x if x.dtype == pred.dtype else ops.astype(x, pred.dtype)


def _like(ops: base.Ops, label: Array, pred: Array) -> Array:
    """`label` in the shape and dtype of `pred`."""
    shapes = [tuple(x.shape) for x in (pred, label)]
    if math.prod(shapes[0]) != math.prod(shapes[1]):
        raise ValueError(
            "pred and label must have equally many elements; received shapes "
            f"{shapes[0]} and {shapes[1]}. Give each output its label.")
    label = _as(ops, label, pred)
    return label if shapes[0] == shapes[1] else label.reshape(shapes[0])


class SoftmaxCrossEntropyLoss(Loss):
    """Cross-entropy of a softmax.

    Parameters
    ----------
    axis : int
        The classes.
    sparse_label : bool
        True: `label` holds class numbers, shape of `pred` without `axis`
        (floats if they are whole: 1.5 is no class). False:
        probabilities, shape of `pred`.
    from_logits : bool
        `pred` holds log-probabilities already.

    Raises
    ------
    LabelError
        A class number outside 0 .. classes - 1, or not whole (Gluon's own
        loss takes the nearest class, and truncates, in silence). Checking
        reads the labels, which waits for them.
    """

    def __init__(self, axis: int = -1, sparse_label: bool = True,
                 from_logits: bool = False, weight: float | None = None,
                 batch_axis: int = 0):
        super().__init__(weight, batch_axis)
        self.axis, self.sparse_label = axis, sparse_label
        self.from_logits = from_logits

    def _values(self, backend, pred, label):
        ops, dims = backend.ops, len(pred.shape)
        axis = self.axis + dims if self.axis < 0 else self.axis
        if not 0 < axis < dims:
            raise ValueError(
                f"pred of shape {tuple(pred.shape)} has no axis of classes "
                f"{self.axis} behind its axis of examples, 0. Use an axis "
                "that it has.")
        if self.sparse_label:
            wanted = tuple(pred.shape[:axis]) + tuple(pred.shape[axis + 1:])
            kept = wanted[:axis] + (1,) + wanted[axis:]
            if tuple(label.shape) == kept:
                label = label.reshape(wanted)
            if tuple(label.shape) != wanted:
                raise ValueError(
                    f"expected class numbers of shape {wanted} for pred of "
                    f"shape {tuple(pred.shape)}; received "
                    f"{tuple(label.shape)}. Use sparse_label=False for "
                    "probabilities.")
            numbers = backend.to_numpy(label)
            check_classes(numbers, pred.shape[axis])
            if numbers.dtype == bool:   # MXNet picks by numbers only
                label = ops.astype(label, "int32")
        if not self.from_logits:
            pred = ops.log_softmax(pred, axis)
        if self.sparse_label:
            return ops.nll(pred, label, axis)
        return -ops.sum(pred * _like(ops, label, pred), axis)

    def _to_weigh(self, loss, pred):
        shape = list(pred.shape)
        shape[self.axis] = 1
        return loss.reshape(tuple(shape))


SoftmaxCELoss = SoftmaxCrossEntropyLoss


def check_classes(labels: np.ndarray, classes: int) -> None:
    """Refuse what is not a class number, 0 .. classes - 1 (LabelError)."""
    whole = labels.dtype.kind != "f" or (labels == np.trunc(labels)).all()
    # Nearly always so, and in a third of the time of looking for the wrong
    # one.
    if not labels.size or (
            whole and labels.min() >= 0 and labels.max() < classes):
        return
    right = (labels >= 0) & (labels < classes) \
        & (labels == np.trunc(labels))      # NaN is wrong too
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    raise LabelError(labels[at], at[0], classes)


class L2Loss(Loss):
    """``weight / 2 * mean((label - pred)^2)``: half of torch's MSELoss."""

    def __init__(self, weight: float = 1.0, batch_axis: int = 0):
        super().__init__(weight, batch_axis)

    def _formula(self, ops, pred, label):
        difference = label - pred
        return difference * difference * 0.5


class L1Loss(Loss):
    """``mean(|label - pred|)``."""

    def _formula(self, ops, pred, label):
        return ops.abs(label - pred)


class SigmoidBinaryCrossEntropyLoss(Loss):
    """Binary cross-entropy, of logits by default.

    At a logit of exactly 0 the gradient is ``-label``, as Gluon's own is
    (the slope of its ReLU there), where the formula has ``1/2 - label``.

    Parameters
    ----------
    from_sigmoid : bool
        `pred` holds probabilities; Gluon adds 1e-12 inside each logarithm.
    pos_weight : float, optional
        Factor of the term of the positive examples. A call takes it too, as
        Gluon's: ``loss(pred, label, sample_weight, pos_weight)``; there it
        may be an array that broadcasts to the shape of `pred`, native or of
        NumPy, for example a factor for each class, shape (1, classes).

    Raises
    ------
    ValueError
        When it is called: `pos_weight` is given both times, or does not
        broadcast.
    """

    def __init__(self, from_sigmoid: bool = False,
                 weight: float | None = None, batch_axis: int = 0, *,
                 pos_weight: float | None = None):
        super().__init__(weight, batch_axis)
        self.from_sigmoid, self.pos_weight = from_sigmoid, pos_weight

    def __call__(self, pred, label, sample_weight=None, pos_weight=None):
        backend = _check(pred, label, sample_weight)
        return self._weighed(
            backend, self._values(backend, pred, label,
                                  self._factor(backend, pred, pos_weight)),
            pred, sample_weight)

    def _factor(self, backend, pred, given):
        if given is None:
            return self.pos_weight
        if self.pos_weight is not None:
            raise ValueError(
                "pos_weight is given to the loss or to its call; received "
                f"{self.pos_weight!r} and another one. Leave out one.")
        if isinstance(given, (int, float, np.number)):
            return float(given)
        if isinstance(given, np.ndarray):
            given = backend.put(given, pred)
        _native(given)
        if not _broadcasts(tuple(given.shape), tuple(pred.shape)):
            raise ValueError(
                f"pos_weight must broadcast to the shape {tuple(pred.shape)} "
                f"of pred; received shape {tuple(given.shape)}. For one "
                "factor per class use (1, classes).")
        return _as(backend.ops, given, pred)

    def _values(self, backend, pred, label, pos_weight=None):
        ops = backend.ops
        label = _like(ops, label, pred)
        if self.from_sigmoid:
            positive = ops.log(pred + 1e-12) * label
            if pos_weight is not None:
                positive = positive * pos_weight
            return -(positive + ops.log(1.0 - pred + 1e-12) * (1.0 - label))
        tail = ops.softplus(-ops.abs(pred))     # log(1 + exp(-|x|))
        if pos_weight is None:
            return ops.relu(pred) - pred * label + tail
        factor = 1.0 + label * (pos_weight - 1.0)
        return pred - pred * label + factor * (tail + ops.relu(-pred))


SigmoidBCELoss = SigmoidBinaryCrossEntropyLoss


class HuberLoss(Loss):
    """``|d| - rho/2`` where ``|d| > rho``, else ``d^2 / (2 rho)``; torch's
    `smooth_l1_loss` with ``beta=rho``."""

    def __init__(self, rho: float = 1.0, weight: float | None = None,
                 batch_axis: int = 0):
        super().__init__(weight, batch_axis)
        self.rho = rho

    def _formula(self, ops, pred, label):
        size = ops.abs(label - pred)
        inner = ops.minimum(size, self.rho)
        # inner^2 / (2 rho) + (|d| - inner): both branches without a branch
        return inner * inner / (2.0 * self.rho) + (size - inner)


class KLDivLoss(Loss):
    """``sum(label * (log(label + 1e-12) - pred))`` over all but the batch
    axis: MXNet 1.9.1 sums here where its other losses average.

    Parameters
    ----------
    from_logits : bool
        `pred` holds log-probabilities (Gluon's name and default); False:
        a log-softmax over `axis` is taken first.
    """

    def __init__(self, from_logits: bool = True, axis: int = -1,
                 weight: float | None = None, batch_axis: int = 0):
        super().__init__(weight, batch_axis)
        self.from_logits, self.axis = from_logits, axis

    def _formula(self, ops, pred, label):
        if not self.from_logits:
            pred = ops.log_softmax(pred, self.axis)
        return label * (ops.log(label + 1e-12) - pred)

    def _per_example(self, ops, loss):
        return _joined(ops.sum, loss)


class HingeLoss(Loss):
    """``mean(max(0, margin - pred * label))``, for labels -1 and 1."""

    def __init__(self, margin: float = 1.0, weight: float | None = None,
                 batch_axis: int = 0):
        super().__init__(weight, batch_axis)
        self.margin = margin

    def _formula(self, ops, pred, label):
        return ops.relu(self.margin - pred * label)


class SquaredHingeLoss(HingeLoss):
    """``mean(max(0, margin - pred * label)^2)``, for labels -1 and 1."""

    def _formula(self, ops, pred, label):
        short = super()._formula(ops, pred, label)
        return short * short


class LogisticLoss(Loss):
    """``mean(log(1 + exp(-pred * label)))``, for labels -1 and 1.

    At a `pred` of exactly 0 the gradient is that of
    `SigmoidBinaryCrossEntropyLoss`.

    Parameters
    ----------
    label_format : {"signed", "binary"}
        Labels are -1 and 1, or 0 and 1.
    """

    def __init__(self, weight: float | None = None, batch_axis: int = 0,
                 label_format: str = "signed"):
        super().__init__(weight, batch_axis)
        self.label_format = one_of("label_format", label_format,
                                   ("signed", "binary"))

    def _formula(self, ops, pred, label):
        if self.label_format == "signed":
            label = (label + 1.0) / 2.0
        return ops.relu(pred) - pred * label + ops.softplus(-ops.abs(pred))


class PoissonNLLLoss(Loss):
    """Negative log-likelihood of counts under a Poisson distribution, without
    the terms that do not depend on `pred`.

    One value per example, the mean over its other axes. Gluon returns one
    number for the batch, which is the mean of these values.

    Parameters
    ----------
    from_logits : bool
        `pred` holds logarithms of rates: ``exp(pred) - label * pred``. False:
        it holds rates: ``pred - label * log(pred + 1e-8)``.
    compute_full : bool
        Add Stirling's approximation of ``log(label!)`` where the label is
        above 1. Gluon's own value is NaN where a label is 0; here the term
        is 0 there, as in torch.
    """

    def __init__(self, weight: float | None = None, from_logits: bool = True,
                 batch_axis: int = 0, compute_full: bool = False):
        super().__init__(weight, batch_axis)
        self.from_logits, self.compute_full = from_logits, compute_full

    def _formula(self, ops, pred, label):
        values = ops.exp(pred) - label * pred if self.from_logits \
            else pred - label * ops.log(pred + 1e-8)
        if self.compute_full:
            count = ops.maximum(label, 1.0)     # no logarithm of 0
            stirling = count * ops.log(count) - count \
                + ops.log(count * (2 * math.pi)) * 0.5
            values = values + stirling * ops.sign(ops.relu(label - 1.0))
        return values


def _parts(loss: Loss, names: tuple[str, ...], given: tuple[Any, ...],
           optional: int = 0) -> list[Any]:
    """The arrays `given` to a call, one by one or in tuples, for `names`.
    What follows a first tuple of all that is needed is a label of no use."""
    if isinstance(given[0], (tuple, list)) and len(given[0]) == len(names):
        given = given[:1]
    parts: list[Any] = []
    for x in given:
        parts += x if isinstance(x, (tuple, list)) else [x]
    while parts and parts[-1] is None:
        parts.pop()
    if not len(names) - optional <= len(parts) <= len(names):
        raise TypeError(
            f"{type(loss).__name__} takes {', '.join(names)}; received "
            f"{len(parts)} arrays. Pass them one by one, or the outputs of "
            "the network as a tuple in the place of the first.")
    return parts + [None] * (len(names) - len(parts))


def _same_shapes(names: tuple[str, ...], *arrays: Array) -> None:
    shapes = [tuple(x.shape) for x in arrays]
    if len({shape[:1] for shape in shapes}) > 1 or () in shapes \
            or len({math.prod(shape) for shape in shapes}) > 1:
        raise ValueError(
            f"{', '.join(names)} must have equally many rows and elements; "
            f"received shapes {', '.join(map(str, shapes))}. Give each row "
            "its counterparts.")


class TripletLoss(Loss):
    """``max(0, sum((positive - pred)^2 - (negative - pred)^2) + margin)``,
    summed over all axes but the first.

    Called as ``loss(pred, positive, negative)``, or for a network that
    returns all three ``loss((pred, positive, negative), label)``, which
    `train_batch` does; `label` is not used.
    """

    def __init__(self, margin: float = 1.0, weight: float | None = None,
                 batch_axis: int = 0):
        super().__init__(weight, batch_axis)
        self.margin = margin

    def __call__(self, pred, positive, negative=None):
        names = ("pred", "positive", "negative")
        parts = _parts(self, names, (pred, positive, negative))
        backend = _native(*parts)
        _same_shapes(names, *parts)
        pred, ops = parts[0], backend.ops
        near, far = (_like(ops, x, pred) - pred for x in parts[1:])
        distance = _joined(ops.sum, near * near - far * far)
        return self._weighed(backend, ops.relu(distance + self.margin), pred,
                             None)


class CosineEmbeddingLoss(Loss):
    """``1 - cos`` of the angle between two vectors where the label is 1, and
    ``max(0, cos - margin)`` where it is -1.

    Called as ``loss(input1, input2, label, sample_weight=None)``, or for a
    network that returns both ``loss((input1, input2), label)``, which
    `train_batch` does. Vectors lie along the last axis; `label` has a number
    for each. A row with several vectors has the mean of their values. The
    gradient of a vector of zeros is finite; Gluon's own is NaN.

    Raises
    ------
    ValueError
        When it is called: a label that is not 1 or -1 (Gluon and torch take
        its loss as 0 in silence). Checking reads the labels, which waits for
        them.
    """

    def __init__(self, weight: float | None = None, batch_axis: int = 0,
                 margin: float = 0.0):
        super().__init__(weight, batch_axis)
        self.margin = margin

    def __call__(       # type: ignore[override]
            self, input1, input2, label=None, sample_weight=None):
        input1, input2, label, sample_weight = _parts(
            self, ("input1", "input2", "label", "sample_weight"),
            (input1, input2, label, sample_weight), optional=1)
        backend = _check(input1, label, sample_weight)
        _native(input2)
        _same_shapes(("input1", "input2"), input1, input2)
        shape, ops = tuple(input2.shape), backend.ops
        vectors = shape[:-1]
        if not vectors or math.prod(label.shape) != math.prod(vectors):
            raise ValueError(
                "CosineEmbeddingLoss takes a label for each vector along the "
                f"last axis; received inputs of shape {shape} and labels of "
                f"shape {tuple(label.shape)}. Use inputs of shape (n, d) and "
                "labels of shape (n,).")
        signs = backend.to_numpy(label)
        if not (np.abs(signs) == 1).all():
            wrong = signs[np.abs(signs) != 1].flat[0]
            raise ValueError("labels of pairs are 1 or -1; received "
                             f"{wrong}. Use 2 * label - 1 for 0 and 1.")
        input1 = input1 if tuple(input1.shape) == shape \
            else input1.reshape(shape)
        input2 = _as(ops, input2, input1)
        norm1, norm2 = (    # of a vector of zeros: no infinite slope
            ops.sqrt(ops.maximum(ops.sum(x * x, -1), 1e-30))
            for x in (input1, input2))
        norms = norm1 * norm2
        cosine = ops.sum(input1 * input2, -1) / ops.maximum(norms, 1e-12)
        like = _as(ops, label, input1).reshape(vectors) * 0.5 + 0.5
        values = (1.0 - cosine) * like \
            + ops.relu(cosine - self.margin) * (1.0 - like)
        if len(vectors) == 1 and sample_weight is not None:
            values = values.reshape((*vectors, 1))
        return self._weighed(backend, values, input1, sample_weight)


class SDMLLoss(Loss):
    """Smoothed deep metric learning: each row of `x1` should be nearer to
    the same row of `x2` than to all others of the batch.

    Called as ``loss(x1, x2)``, arrays of one shape (n, d), n at least 2; or
    for a network that returns both ``loss((x1, x2), label)``, which
    `train_batch` does; `label` is not used.

    The value of a row depends on the others: `train_batch` calls it with the
    rows of all devices. Parts of a batch (`mgpu.parallel`) and several
    processes raise.

    Raises
    ------
    ValueError
        A `weight` other than 1: Gluon's loss takes one and does not use it.
        When it is called: `train_batch` or `parallel` calls it for the rows
        of several devices, or there are several processes.
    """

    def __init__(self, smoothing_parameter: float = 0.3,
                 weight: float | None = 1.0, batch_axis: int = 0):
        if weight not in (None, 1.0):
            raise ValueError(
                "SDMLLoss has no weight: Gluon's takes one and does not use "
                f"it; received {weight!r}. Multiply its values.")
        super().__init__(None, batch_axis)
        self.smoothing_parameter = smoothing_parameter

    def __call__(self, x1, x2):     # type: ignore[override]
        x1, x2 = _parts(self, ("x1", "x2"), (x1, x2))
        backend = _native(x1, x2)
        shapes = [tuple(x.shape) for x in (x1, x2)]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or len(x1) < 2:
            raise ValueError(
                "SDMLLoss takes two arrays of one shape (n, d), with n at "
                f"least 2; received shapes {shapes[0]} and {shapes[1]}. Give "
                "each row its counterpart.")
        many = max(parts_of_batch.get(), distributed.current().size)
        if many > 1:
            raise ValueError(
                "SDMLLoss needs all rows of the batch at once, as each is "
                f"compared with all others; received its rows in {many} "
                "parts. Use one device and one process, or TripletLoss.")
        ops, (n, d) = backend.ops, shapes[0]
        p = self.smoothing_parameter
        labels = np.full((n, n), p / (n - 1))
        np.fill_diagonal(labels, 1 - p)
        labels = _as(ops, backend.put(labels, x1), x1)
        gap = x1.reshape((n, 1, d)) - _as(ops, x2, x1).reshape((1, n, d))
        logs = ops.log_softmax(-ops.sum(gap * gap, 2), 1)
        return ops.sum(labels * (ops.log(labels + 1e-12) - logs), 1)


#: in how many parts `mgpu.parallel` has cut the batch of a call
parts_of_batch: ContextVar[int] = ContextVar("mgpu_parts_of_batch", default=1)
_NEVER = -1e30      # the logarithm of 0, finite: no NaN in gradients


class CTCLoss(Loss):
    """Connectionist temporal classification: the negative log-likelihood of
    a sequence of class numbers, summed over all its alignments with `pred`.
    The dtype of the values is that of `pred`, and float32 for one of 16 bits.

    Called as ``loss(pred, label, pred_lengths=None, label_lengths=None,
    sample_weight=None)``, or with a tuple ``loss(pred, (label, pred_lengths,
    label_lengths))``, the last of which may be left out; `train_batch` does
    so where `y` is such a tuple.

    Parameters
    ----------
    layout : {"NTC", "TNC"}
        Axes of `pred`, not normalised: rows, steps, classes. The last class
        is the blank.
    label_layout : {"NT", "TN"}
        Axes of `label`. Where no `label_lengths` are given, -1 ends a
        sequence. `train_batch` needs "NTC" and "NT", or "TNC" and "TN" with
        ``batch_axis=1``.

    Raises
    ------
    LabelError
        When it is called: a class number outside 0 .. classes - 2.
    ValueError
        When it is called: lengths that do not fit, class numbers behind a
        -1, or a sequence that is too long for its steps, of which no
        alignment exists (Gluon's own value is 0 there). Checking reads
        labels and lengths, which waits for them.
    """

    def __init__(self, layout: str = "NTC", label_layout: str = "NT",
                 weight: float | None = None):
        super().__init__(weight)
        self.layout = one_of("layout", layout, ("NTC", "TNC"))
        self.label_layout = one_of("label_layout", label_layout,
                                   ("NT", "TN"))

    def __call__(       # type: ignore[override]
            self, pred, label, pred_lengths=None, label_lengths=None,
            sample_weight=None):
        if isinstance(label, (tuple, list)) and 1 <= len(label) <= 3:
            label, *lengths = label
            given = [pred_lengths, label_lengths]
            if lengths and given != [None, None]:
                raise TypeError(
                    "CTCLoss takes lengths in a tuple with the labels or as "
                    "arguments; received both. Leave out one.")
            pred_lengths, label_lengths = (lengths + given)[:2]
        backend = _native(pred, label, *(
            x for x in (pred_lengths, label_lengths, sample_weight)
            if x is not None))
        time = self.layout.index("T")
        shape, labels = tuple(pred.shape), backend.to_numpy(label)
        if self.label_layout == "TN" and labels.ndim == 2:
            labels = labels.T
        if len(shape) != 3 or labels.ndim != 2 \
                or len(labels) != shape[1 - time]:
            raise ValueError(
                f"CTCLoss takes pred of layout {self.layout} and labels of "
                f"layout {self.label_layout}, with equally many rows; "
                f"received shapes {shape} and {tuple(label.shape)}. Give "
                "each row of pred its label.")
        steps, longest, blank = shape[time], labels.shape[1], shape[2] - 1
        if label_lengths is None:
            valid = np.cumprod(labels != -1, 1).astype(bool)
            if (labels[~valid] != -1).any():
                raise ValueError(
                    "-1 ends a label; received class numbers behind it. Put "
                    "them in front, or give label_lengths.")
            lengths = valid.sum(1)
        else:
            lengths = self._lengths(backend, "label_lengths", label_lengths,
                                    0, longest, len(labels))
            valid = np.arange(longest) < lengths[:, None]
        check_classes(np.where(valid, labels, 0), blank)
        labels = np.where(valid, labels, blank).astype(np.int32)
        last = np.full(len(labels), steps) if pred_lengths is None \
            else self._lengths(backend, "pred_lengths", pred_lengths, 1,
                               steps, len(labels))
        again = (labels[:, 1:] == labels[:, :-1]) & valid[:, 1:]
        needed = lengths + again.sum(1)
        if (needed > last).any():
            i = int(np.argmax(needed > last))
            raise ValueError(
                "a sequence of class numbers needs a step for each, and one "
                f"more between equal ones; received {last[i]} steps for one "
                f"that needs {needed[i]}. Leave out such rows, or give pred "
                "more steps.")
        if "16" in str(pred.dtype):     # which do not hold such small numbers
            pred = backend.ops.astype(pred, "float32")
        values = self._likelihood(backend, pred, labels, lengths, last, again)
        return self._weighed(backend, -values, pred, sample_weight)

    @staticmethod
    def _lengths(backend, name, given, least, most, rows):
        lengths = backend.to_numpy(given)
        if lengths.shape != (rows,) or (lengths != np.trunc(lengths)).any() \
                or (lengths < least).any() or (lengths > most).any():
            raise ValueError(
                f"{name} has a whole number from {least} to {most} for each "
                f"of the {rows} rows; received {lengths.tolist()}. Count the "
                "entries of each row.")
        return lengths.astype(np.int64)

    def _likelihood(self, backend, pred, labels, lengths, last, again):
        """The logarithm, (n,), by the forward algorithm over the labels with
        a blank before, between and after them."""
        ops, time = backend.ops, self.layout.index("T")
        (n, longest), steps = labels.shape, pred.shape[time]
        states, blank = 2 * longest + 1, pred.shape[2] - 1

        def constant(values):
            return _as(ops, backend.put(np.asarray(values, "float64"), pred),
                       pred)

        def log_sum(*terms):
            top = terms[0]
            for x in terms[1:]:
                top = ops.maximum(top, x)
            top = ops.stop_gradient(top)
            total = ops.exp(terms[0] - top)
            for x in terms[1:]:
                total = total + ops.exp(x - top)
            return top + ops.log(total)

        logs = ops.log_softmax(pred, 2)
        column = (*logs.shape[:2], 1)
        blanks = ops.slice_axis(logs, 2, blank, blank + 1)
        emitted = [blanks]
        for j in range(longest):
            index = np.repeat(labels[:, j:j + 1], steps, 1)
            index = backend.put(index if time == 1 else
                                np.ascontiguousarray(index.T), pred)
            emitted += [ops.pick(logs, index, 2).reshape(column), blanks]
        emitted = ops.concat(emitted, 2) if longest else blanks

        def at(t):
            return ops.slice_axis(emitted, time, t, t + 1).reshape(
                (n, states))
        start = np.full((n, states), _NEVER)
        start[:, :2] = 0
        skip = np.full((n, states), _NEVER)     # over a blank
        skip[:, 3::2][~again] = 0
        never = constant(np.full((n, 2), _NEVER))
        skip, goes = constant(skip), np.arange(steps) < last[:, None]
        alpha = at(0) + constant(start)
        for t in range(1, steps):
            terms = [alpha]
            if longest:
                wide = ops.concat([never, alpha], 1)
                terms += [ops.slice_axis(wide, 1, 1, states + 1),
                          ops.slice_axis(wide, 1, 0, states) + skip]
            new = log_sum(*terms) + at(t)
            if not goes[:, t].all():
                on = constant(goes[:, t:t + 1])
                new = new * on + alpha * (1.0 - on)
            alpha = new
        ends = [ops.pick(alpha, backend.put(
            np.maximum(2 * lengths - i, 0).astype(np.int32), pred), 1)
            for i in (0, 1)]
        if not lengths.all():
            ends[1] = ends[1] + constant(np.where(lengths, 0, _NEVER))
        return log_sum(*ends)


def per_example(loss: Callable[[Array, Array], Array]
                ) -> Callable[[Array, Array], Array]:
    """Adapt a loss that averages over the batch, as torch's do.

    A loss object with a `reduction` attribute ("mean", "sum", "batchmean",
    "none") is copied with ``reduction="none"``; what belongs to one example
    is averaged, or added up for "sum" and "batchmean". Class weights and
    `ignore_index` then weigh and leave out examples, but the sum is still
    divided by the number of rows, where torch divides by the sum of the
    weights.

    Any other function is taken to return the mean over the batch, one
    number, which every row of the result then holds: the sum over rows, and
    so the gradient, is the same. A function whose number is no such mean
    would give rows other weights on each number of devices, and is refused:
    its first calls, and then fewer and fewer, are compared with calls for
    parts of their rows. (Not where the function draws or keeps something.)

    Raises
    ------
    ValueError
        When it is called: such a function returned more than one number, or
        one that is no mean over rows (weights of classes, ignored labels, a
        root or a ratio of means); or
        `pred` and `label` have shapes, (n, 1) and (n,), that the loss
        broadcasts, so that each row meets the labels of all.
    """
    if hasattr(loss, "reduction"):
        adds = loss.reduction in ("sum", "batchmean")
        loss = copy.copy(loss)
        loss.reduction = "none"

        def unreduced(pred: Array, label: Array) -> Array:
            ops, values = get_backend().ops, loss(pred, label)
            _check_values(values, [len(pred)], 0, [pred, label])
            return _joined(ops.sum if adds else ops.mean, values)
        return unreduced
    calls = 0

    def spread(pred: Array, label: Array) -> Array:
        nonlocal calls
        ops, mean = get_backend().ops, loss(pred, label)
        shape = tuple(getattr(mean, "shape", (0,)))
        if math.prod(shape) != 1:
            raise ValueError(
                "per_example adapts a loss that returns the mean over the "
                "batch, an array of one number; received "
                f"{type(mean).__name__} of shape {shape}. Use a loss with a "
                "value for each example as it is.")
        rows = ops.mean(ops.zeros_like(pred).reshape((len(pred), -1)), 1)
        if calls < _FIRST or not calls & (calls - 1):
            _check_mean(loss, pred, label, mean)
        calls += 1
        return rows + mean.reshape((1,))
    return spread


_FIRST = 8      # calls that are compared, before every one that doubles them


def _check_mean(loss: Callable[[Array, Array], Array], pred: Array,
                label: Array, mean: Array) -> None:
    """Raise ValueError if `mean`, the loss of all rows, is not the mean of
    the losses of two parts of them, weighted by their number."""
    backend, n, middle = get_backend(), len(pred), len(pred) // 2
    if not middle or "float16" in str(pred.dtype):      # too rough
        return

    def value(begin: int, end: int) -> float:
        return float(backend.to_numpy(loss(
            *(x[begin:end] for x in (pred, label)))).item())
    try:
        with backend.scope(recording=False):
            own, (again, first, second) = float(backend.to_numpy(
                mean).item()), (value(*part) for part in (
                    (0, n), (0, middle), (middle, n)))
        eps = max(np.finfo(x.dtype).eps for x in map(backend.to_numpy,
                                                     (pred[:1], mean)))
    except Exception:       # it takes no other number of rows
        return
    joined = (first * middle + second * (n - middle)) / n
    bound = 100 * eps * np.abs(backend.to_numpy(pred)).max() \
        + 4 * eps ** (2 / 3) * max(map(abs, (own, first, second)))
    # NaN and infinity tell nothing, nor does what is drawn.
    if own == again and math.isfinite(joined) and abs(own - joined) > bound:
        raise ValueError(
            "per_example adapts a loss that returns the mean over the "
            "batch of a value for each row; received "
            f"{getattr(loss, '__qualname__', type(loss).__qualname__)}, "
            f"which gives {own:.6g} for {n} rows, and {joined:.6g} as the "
            "mean of two parts of them: weights of classes, ignored labels, "
            "a root or a ratio of means do so, and a pred that broadcasts "
            "with its label. Return a value for each example instead: "
            "reduction='none', times its weight. To divide by the sum of "
            "weights, or by tokens, use trainer.step(that sum) in a loop "
            "of your own.")


def check_per_example(values: Any, rows: int, *others: int,
                      batch_axis: int = 0, arrays: Sequence[Any] = ()) -> Any:
    """The values of a loss in the shape (rows,) that `train_batch` demands,
    or another number of `others`: means over all axes but `batch_axis`.

    Raises
    ------
    ValueError
        No array with an entry for each example, or one where several axes
        have as many, unless an array in `arrays` has its shape, or begins
        with it: a loss that compares each example with the labels of all.
    """
    axis = _check_values(values, [rows, *others], batch_axis, arrays)
    ops = get_backend().ops
    for other in reversed(range(len(values.shape))):
        if other != axis:
            values = ops.mean(values, other)
    return values


def _check_values(values: Any, rows: Sequence[int], batch_axis: int,
                  arrays: Sequence[Any]) -> int:
    """The axis of the examples in the values of a loss."""
    shape = tuple(getattr(values, "shape", ()))
    axis = axis_in(shape, batch_axis)
    if not shape or shape[axis] not in rows or 0 in shape \
            or shape.count(shape[axis]) > 1 < shape[axis] and not any(
                tuple(getattr(x, "shape", ())[:len(shape)]) == shape
                for x in leaves(list(arrays))):
        received = f"shape {shape}" if hasattr(values, "shape") \
            else type(values).__name__
        raise ValueError(
            f"the loss must return one value per example, shape ({rows[0]},)"
            ", or several, whose mean counts, or one number in an array; "
            f"received {received}. Use a "
            "loss of mgpu.losses, or wrap one that averages: "
            "mgpu.losses.per_example(loss); on torch also "
            "reduction='none'.")
    return axis
