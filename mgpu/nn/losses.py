"""Losses with Gluon's meaning on both backends: one value per example.

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
import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import Backend, get_backend, messages
from mgpu.backends.ops import Ops
from mgpu.data.nested import arrays_in, axis_in
from mgpu.errors import LabelError
from mgpu.utils.arguments import one_of

Array = Any


def _native(*arrays: Array | None) -> Backend:
    """The backend, whose arrays these are."""
    backend = get_backend()
    messages.check_native([x for x in arrays if x is not None], backend,
                          "a loss takes")
    return backend


def _as(ops: Ops, x: Array, pred: Array) -> Array:
    return x if x.dtype == pred.dtype else ops.astype(x, pred.dtype)


def _like(ops: Ops, x: Array, pred: Array,
          shape: tuple[int, ...] | None = None) -> Array:
    """`x` in the dtype of `pred`, and in its shape (or `shape`), which has as
    many examples and elements."""
    own = tuple(x.shape)
    shape = tuple(pred.shape) if shape is None else shape
    if own[:1] != shape[:1] or math.prod(own) != math.prod(shape) \
            or () in (own, shape):
        raise ValueError(
            "arrays of a loss must have equally many examples and elements; "
            f"received shape {own} where {shape} is needed.")
    x = _as(ops, x, pred)
    return x if own == shape else x.reshape(shape)


def _factor(ops: Ops, name: str, x: Array, pred: Array,
            shape: tuple[int, ...]) -> Array:
    """`x` in the dtype of `pred`, if it broadcasts to `shape`."""
    own = tuple(x.shape)
    if len(own) > len(shape) or any(
            n not in (1, m) for n, m in zip(own[::-1], shape[::-1])):
        raise ValueError(
            f"{name} must broadcast to the shape {shape}; received shape "
            f"{own}. For one number per example use "
            f"{shape[:1] + (1,) * (len(shape) - 1)}.")
    return _as(ops, x, pred)


def _joined(join: Callable[..., Array], values: Array, axis: int = 0
            ) -> Array:
    """`values` with one number per example: all axes but `axis` joined."""
    others = tuple(i for i in range(len(values.shape)) if i != axis)
    if all(values.shape[i] == 1 for i in others):
        return values.reshape((-1,)) if others else values
    return join(values, others)


class Loss:
    """Base of the losses; `weight` is a global factor."""

    def __init__(self, weight: float | None = None, batch_axis: int = 0):
        one_of("batch_axis", batch_axis, (0,))
        self.weight = weight

    def __call__(self, pred: Array, label: Array,
                 sample_weight: Array | None = None) -> Array:
        backend = _native(pred, label, sample_weight)
        return self._weighed(backend.ops, self._values(backend, pred, label),
                             pred, sample_weight)

    def _weighed(self, ops: Ops, values: Array, pred: Array,
                 sample_weight: Array | None = None) -> Array:
        """Of `values`, one per example."""
        if sample_weight is not None:
            values = values * _factor(ops, "sample_weight", sample_weight,
                                      pred, tuple(values.shape))
        if self.weight is not None:
            values = values * self.weight
        return self._per_example(ops, values)

    def _values(self, backend: Backend, pred: Array, label: Array
                ) -> Array:
        """In the shape that sample weights broadcast to."""
        return self._formula(backend.ops, pred,
                             _like(backend.ops, label, pred))

    def _formula(self, ops: Ops, pred: Array, label: Array) -> Array:
        """The values, of a label in the shape and dtype of `pred`."""
        raise NotImplementedError

    def _per_example(self, ops: Ops, values: Array) -> Array:
        return _joined(ops.mean, values)

    def __repr__(self) -> str:
        options = ", ".join(f"{k.lstrip('_')}={v!r}"
                            for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({options})"


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
        ops, shape = backend.ops, tuple(pred.shape)
        axis = one_of("axis behind that of the examples",
                      self.axis + len(shape) * (self.axis < 0),
                      range(1, len(shape)))
        if not self.from_logits:
            pred = ops.log_softmax(pred, axis)
        one = (*shape[:axis], 1, *shape[axis + 1:])
        if not self.sparse_label:
            return -ops.sum(pred * _like(ops, label, pred), axis, True)
        plain = shape[:axis] + shape[axis + 1:]
        if tuple(label.shape) not in (plain, one):
            raise ValueError(
                f"expected class numbers of shape {plain} for pred of shape "
                f"{shape}; received {tuple(label.shape)}. Use "
                "sparse_label=False for probabilities.")
        numbers = backend.to_numpy(label)
        check_classes(numbers, shape[axis])
        if numbers.dtype == bool:       # MXNet picks by numbers only
            label = ops.astype(label, "int32")
        return ops.nll(pred, label.reshape(plain), axis).reshape(one)


SoftmaxCELoss = SoftmaxCrossEntropyLoss


def check_classes(labels: np.ndarray, classes: int) -> None:
    """Raise LabelError unless labels are class indices 0 .. classes - 1."""
    right = (labels >= 0) & (labels < classes) \
        & (labels == np.trunc(labels))      # NaN is wrong too
    if not right.all():
        at = tuple(np.argwhere(~right)[0].tolist())
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
        Factor of the term of the positive examples. A call takes another
        one, as Gluon's: ``loss(pred, label, sample_weight, pos_weight)``; it
        may be an array that broadcasts to the shape of `pred`, native or of
        NumPy, for example a factor for each class, shape (1, classes).

    Raises
    ------
    ValueError
        When it is called: `pos_weight` does not broadcast.
    """

    def __init__(self, from_sigmoid: bool = False,
                 weight: float | None = None, batch_axis: int = 0, *,
                 pos_weight: float | None = None):
        super().__init__(weight, batch_axis)
        self.from_sigmoid, self.pos_weight = from_sigmoid, pos_weight

    def __call__(self, pred, label, sample_weight=None, pos_weight=None):
        backend = _native(pred, label, sample_weight)
        if pos_weight is None:
            pos_weight = self.pos_weight
        if isinstance(pos_weight, np.ndarray):
            pos_weight = backend.put(pos_weight, pred)
        if not (pos_weight is None or isinstance(pos_weight, Real)):
            pos_weight = _factor(_native(pos_weight).ops, "pos_weight",
                                 pos_weight, pred, tuple(pred.shape))
        values = self._formula(
            backend.ops, pred, _like(backend.ops, label, pred), pos_weight)
        return self._weighed(backend.ops, values, pred, sample_weight)

    def _formula(self, ops, pred, label, pos_weight=None):
        if self.from_sigmoid:
            positive = ops.log(pred + 1e-12) * label
            if pos_weight is not None:
                positive = positive * pos_weight
            return -(positive + ops.log(1.0 - pred + 1e-12) * (1.0 - label))
        if pos_weight is None:
            return _logistic(ops, pred, label)
        factor = 1.0 + label * (pos_weight - 1.0)
        return pred - pred * label + factor * (
            ops.softplus(-ops.abs(pred)) + ops.relu(-pred))


def _logistic(ops: Ops, x: Array, label: Array) -> Array:
    """``log(1 + exp(x)) - x * label``, without overflow."""
    return ops.relu(x) - x * label + ops.softplus(-ops.abs(x))


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

    def _per_example(self, ops, values):
        return _joined(ops.sum, values)


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
        return _logistic(ops, pred, label)


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


def _parts(names: tuple[str, ...], *given: Any, optional: int = 0
           ) -> list[Any]:
    """The arrays `given` to a call, one by one or in tuples, for `names`.
    What follows a first tuple of all that is needed is a label of no use."""
    if isinstance(given[0], (tuple, list)) and len(given[0]) == len(names):
        given = given[:1]
    parts = [x for one in given for x in (
        one if isinstance(one, (tuple, list)) else [one])]
    while parts and parts[-1] is None:
        parts.pop()
    if not len(names) - optional <= len(parts) <= len(names):
        raise TypeError(
            f"the loss takes {', '.join(names)}; received {len(parts)} "
            "arrays. Pass them one by one, or the outputs of the network as "
            "a tuple in the place of the first.")
    return parts + [None] * (len(names) - len(parts))


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
        pred, *others = _parts(("pred", "positive", "negative"), pred,
                               positive, negative)
        ops = _native(pred, *others).ops
        near, far = (_like(ops, x, pred) - pred for x in others)
        distance = _joined(ops.sum, near * near - far * far)
        return self._weighed(ops, ops.relu(distance + self.margin), pred)


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
            ("input1", "input2", "label", "sample_weight"), input1, input2,
            label, sample_weight, optional=1)
        backend = _native(input1, input2, label, sample_weight)
        ops, shape = backend.ops, tuple(input2.shape)
        signs = backend.to_numpy(label)
        wrong = signs[np.abs(signs) != 1]
        if wrong.size:
            raise ValueError("labels of pairs are 1 or -1; received "
                             f"{wrong[0]}. Use 2 * label - 1 for 0 and 1.")
        input1 = _like(ops, input1, input1, shape)
        input2 = _as(ops, input2, input1)
        like = _like(ops, label, input1, shape[:-1]) * 0.5 + 0.5
        norm1, norm2 = (    # of a vector of zeros: no infinite slope
            ops.sqrt(ops.maximum(ops.sum(x * x, -1), 1e-30))
            for x in (input1, input2))
        cosine = ops.sum(input1 * input2, -1) / ops.maximum(norm1 * norm2,
                                                            1e-12)
        values = (1.0 - cosine) * like \
            + ops.relu(cosine - self.margin) * (1.0 - like)
        if len(shape) == 2:
            values = values.reshape((len(values), 1))
        return self._weighed(ops, values, input1, sample_weight)


class SDMLLoss(Loss):
    """Smoothed deep metric learning: each row of `x1` should be nearer to
    the same row of `x2` than to all others of the batch.

    Called as ``loss(x1, x2)``, arrays of shape (n, d), n at least 2; or
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
        super().__init__(one_of("weight", weight, (None, 1.0)), batch_axis)
        self.smoothing_parameter = smoothing_parameter

    def __call__(self, x1, x2):     # type: ignore[override]
        x1, x2 = _parts(("x1", "x2"), x1, x2)
        backend, (n, d) = _native(x1, x2), x1.shape
        many = max(parts_of_batch.get(), distributed.current().size)
        if many > 1 or n < 2:
            raise ValueError(
                "SDMLLoss compares each example with all others of the batch;"
                f" received {n} examples in one of {many} parts. Use one "
                "device and one process, or TripletLoss.")
        ops, p = backend.ops, self.smoothing_parameter
        labels = np.full((n, n), p / (n - 1))
        np.fill_diagonal(labels, 1 - p)
        labels = _as(ops, backend.put(labels, x1), x1)
        gap = x1.reshape((n, 1, d)) - _like(ops, x2, x1, (n, d)).reshape(
            (1, n, d))
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
        Axes of `pred`, not normalized: rows, steps, classes. The last class
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
        if isinstance(label, (tuple, list)):
            given = {"pred_lengths": pred_lengths, "sample_weight":
                     sample_weight, "label_lengths": label_lengths}
            return self(pred, *label, **{
                k: x for k, x in given.items() if x is not None})
        backend = _native(pred, label, pred_lengths, label_lengths,
                          sample_weight)
        time = self.layout.index("T")
        shape, labels = tuple(pred.shape), backend.to_numpy(label)
        if self.label_layout == "TN":
            labels = labels.T
        if shape[1 - time] != len(labels):
            raise ValueError(
                f"CTCLoss takes pred of layout {self.layout} and labels of "
                f"layout {self.label_layout}; received shapes {shape} and "
                f"{tuple(label.shape)}.")
        (n, longest), steps, blank = labels.shape, shape[time], shape[2] - 1
        lengths = np.cumprod(labels != -1, 1).sum(1) \
            if label_lengths is None else self._lengths(
                backend, "label_lengths", label_lengths, 0, longest, n)
        last = np.full(n, steps) if pred_lengths is None else self._lengths(
            backend, "pred_lengths", pred_lengths, 1, steps, n)
        valid = np.arange(longest) < lengths[:, None]
        if label_lengths is None and (labels[~valid] != -1).any():
            raise ValueError(
                "-1 ends a label; received class numbers behind it. Put them "
                "in front, or give label_lengths.")
        check_classes(np.where(valid, labels, 0), blank)
        labels = np.where(valid, labels, blank).astype(np.int32)
        again = (labels[:, 1:] == labels[:, :-1]) & valid[:, 1:]
        missing = lengths + again.sum(1) - last
        if (missing > 0).any():
            raise ValueError(
                "a label needs a step for each class number, and one more "
                f"between equal ones; received {missing.max()} steps too few "
                f"in row {missing.argmax()}. Leave it out.")
        if "16" in str(pred.dtype):     # which do not hold such small numbers
            pred = backend.ops.astype(pred, "float32")
        values = self._likelihood(backend, pred, labels, lengths, last, again)
        return self._weighed(backend.ops, -values, pred, sample_weight)

    @staticmethod
    def _lengths(backend, name, given, least, most, count):
        lengths = backend.to_numpy(given)
        if lengths.shape != (count,) or not np.isin(
                lengths, np.arange(least, most + 1)).all():
            raise ValueError(
                f"{name} has a whole number from {least} to {most} for each "
                f"of {count} examples; received {lengths.tolist()}.")
        return lengths.astype(np.int64)

    def _likelihood(self, backend, pred, labels, lengths, last, again):
        """The logarithm, (n,), by the forward algorithm over the labels with
        a blank before, between and after them."""
        ops, time = backend.ops, self.layout.index("T")
        (n, longest), blank = labels.shape, pred.shape[2] - 1
        states = 2 * longest + 1

        def constant(values):
            return _as(ops, backend.put(np.asarray(values, "float64"), pred),
                       pred)

        def log_sum(*terms):
            top = ops.stop_gradient(functools.reduce(ops.maximum, terms))
            return top + ops.log(functools.reduce(
                operator.add, (ops.exp(x - top) for x in terms)))

        def at(t):
            return ops.slice_axis(emitted, time, t, t + 1).reshape(
                (n, states))
        logs = ops.log_softmax(pred, 2)
        emitted = [ops.slice_axis(logs, 2, blank, blank + 1)]
        for column in labels.T:
            index = backend.put(np.broadcast_to(
                np.expand_dims(column, time), logs.shape[:2]), pred)
            emitted += [ops.pick(logs, index, 2).reshape(
                (*logs.shape[:2], 1)), emitted[0]]
        emitted = ops.concat(emitted, 2)
        start, skip = np.full((2, n, states), _NEVER)
        start[:, :2] = 0
        skip[:, 3::2][~again] = 0       # over a blank
        never, skip = constant(np.full((n, 2), _NEVER)), constant(skip)
        alpha = at(0) + constant(start)
        for t in range(1, pred.shape[time]):
            wide = ops.concat([never, alpha], 1)
            new = at(t) + log_sum(
                alpha, ops.slice_axis(wide, 1, 1, states + 1),
                ops.slice_axis(wide, 1, 0, states) + skip)
            goes = (t < last)[:, None]
            if not goes.all():
                on = constant(goes)
                new = new * on + alpha * (1.0 - on)
            alpha = new
        end, before = (ops.pick(alpha, backend.put(
            np.maximum(2 * lengths - i, 0).astype(np.int32), pred), 1)
            for i in (0, 1))
        return log_sum(end, before + constant(np.where(lengths, 0, _NEVER)))


def per_example(loss: Callable[[Array, Array], Array]
                ) -> Callable[[Array, Array], Array]:
    """Adapt a loss that averages over the batch, as torch's do.

    A loss object with a `reduction` attribute ("mean", "sum", "batchmean",
    "none") is copied with ``reduction="none"``; what belongs to one example
    is averaged, or added up for "sum" and "batchmean". Class weights and
    `ignore_index` then weigh and leave out examples, but the sum is still
    divided by the number of rows, where torch divides by the sum of the
    weights.

    Any other function must return the mean over the batch, one number, which
    each entry of the result then holds: the sum over examples, and so the
    gradient, is unchanged. A function that does not return such a mean would
    weight examples differently on each number of devices, and raises: the
    first calls, then fewer and fewer, are compared with calls on parts of
    the batch. (Not if the function is random or stateful.)

    Raises
    ------
    ValueError
        In a call: the function returned a number that is not the mean over
        examples (class weights, ignored labels, a root or a ratio of means);
        or `pred` and `label` have shapes, (n, 1) and (n,), that the loss
        broadcasts, so that each example is combined with all labels.
    """
    if hasattr(loss, "reduction"):
        join = "sum" if loss.reduction in ("sum", "batchmean") else "mean"
        loss = copy.copy(loss)
        loss.reduction = "none"
        return lambda pred, label: check_per_example(
            loss(pred, label), len(pred), arrays=[pred, label], join=join)
    calls = 0

    def spread(pred: Array, label: Array) -> Array:
        nonlocal calls
        ops, mean = get_backend().ops, loss(pred, label)
        rows = ops.mean(ops.zeros_like(pred).reshape((len(pred), -1)), 1)
        values = rows + mean.reshape((1,))
        if calls < _FIRST or not calls & (calls - 1):
            _check_mean(loss, pred, label, mean)
        calls += 1
        return values
    return spread


_FIRST = 8      # calls that are compared, before every one that doubles them


def _check_mean(loss: Callable[[Array, Array], Array], pred: Array,
                label: Array, mean: Array) -> None:
    """Raise ValueError if `mean`, the loss of all rows, is not the mean of
    the losses of two parts of them, weighted by their number."""
    backend, n, middle = get_backend(), len(pred), len(pred) // 2

    def value(begin: int, end: int) -> float:
        return float(backend.to_numpy(loss(pred[begin:end], label[begin:end])
                                      ).item())
    try:
        host, own = backend.to_numpy(pred), backend.to_numpy(mean)
        eps = max(np.finfo(x.dtype).eps for x in (host, own))
        with backend.scope(recording=False):
            again, first, second = (value(0, n), value(0, middle),
                                    value(middle, n))
    except Exception:       # it takes no other number of rows
        return
    joined = (first * middle + second * (n - middle)) / n
    bound = 100 * eps * np.abs(host).max() \
        + 4 * eps ** (2 / 3) * max(map(abs, (again, first, second)))
    # NaN and infinity tell nothing, nor does what is drawn.
    if own.item() == again and abs(again - joined) > bound \
            and math.isfinite(joined):
        raise ValueError(
            "per_example adapts a loss that returns the mean over the batch "
            "of a value for each row; received "
            f"{getattr(loss, '__qualname__', type(loss).__qualname__)}, "
            f"which gives {again:.6g} for {n} rows, and {joined:.6g} as the "
            "mean of two parts of them, as weights, ignored labels and a pred "
            "that broadcasts with its label do. Return a value for each "
            "example instead: reduction='none', times its weight.")


def check_per_example(values: Any, rows: int, *others: int,
                      batch_axis: int = 0, arrays: Sequence[Any] = (),
                      join: str = "mean") -> Any:
    """The values of a loss in the shape (rows,) that `train_batch` demands,
    or another number of `others`: means (or "sum") over all axes but
    `batch_axis`.

    Raises
    ------
    ValueError
        No array with an entry for each example, or one where several axes
        have as many, unless an array in `arrays` has its shape, or begins
        with it: a loss that compares each example with the labels of all.
    """
    shape = tuple(getattr(values, "shape", ()))
    axis = axis_in(shape, batch_axis)
    if not shape or shape[axis] not in (rows, *others) or 0 in shape \
            or shape.count(shape[axis]) > 1 < shape[axis] and not any(
                tuple(x.shape[:len(shape)]) == shape
                for x in arrays_in(list(arrays))):
        received = f"shape {shape}" if hasattr(values, "shape") \
            else type(values).__name__
        raise ValueError(
            "the loss must return one value per example, shape "
            f"({rows},), or several, whose mean counts, or one number in an "
            f"array; received {received}. Use a loss of mgpu.losses, or wrap "
            "one that averages: mgpu.losses.per_example(loss); on torch also "
            "reduction='none'.")
    return _joined(getattr(get_backend().ops, join), values, axis)
