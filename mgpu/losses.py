"""Losses with Gluon's meaning on both engines: one value per example.

Each is called as ``loss(pred, label, sample_weight=None)`` on native arrays
of one device and returns shape (n,). Nothing is averaged over the batch: the
sum is what `mgpu.backward` differentiates and the division by the number of
rows happens once, in `Trainer.step`, whatever the number of devices.

Formulas: MXNet 1.9.1, ``gluon/loss.py``. `weight` scales the loss;
`sample_weight` must broadcast to the shape of the loss before it is averaged,
for example (n, 1). Labels (but class numbers) and sample weights are brought
to the dtype of `pred`.
"""
import copy
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mgpu.backends import base, get_backend, messages
from mgpu.errors import LabelError
from mgpu.loss_state import is_pure

Array = Any


def _check(pred: Array, label: Array, sample_weight: Array | None
           ) -> base.Backend:
    backend = get_backend()
    for x in (pred, label) if sample_weight is None \
            else (pred, label, sample_weight):
        if not backend.is_native(x):
            messages.refuse_foreign(x, backend.name)
            raise TypeError(f"a loss takes arrays of the {backend.name} "
                            f"backend; received {type(x).__name__}. Use "
                            "mgpu.put(x, device).")
    shapes = [tuple(x.shape) for x in (pred, label)]
    if shapes[0][:1] != shapes[1][:1] or () in shapes:
        raise ValueError(
            "pred and label must have a row for each example; received "
            f"shapes {shapes[0]} and {shapes[1]}. Give each row of pred its "
            "label.")
    return backend


class Loss:
    """Base of the losses; `weight` is a global factor."""

    def __init__(self, weight: float | None = None):
        self.weight = weight

    def __call__(self, pred: Array, label: Array,
                 sample_weight: Array | None = None) -> Array:
        backend = _check(pred, label, sample_weight)
        loss = self._values(backend, pred, label)
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
                 from_logits: bool = False, weight: float | None = None):
        super().__init__(weight)
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

    def __init__(self, weight: float = 1.0):
        super().__init__(weight)

    def _values(self, backend, pred, label):
        difference = _like(backend.ops, label, pred) - pred
        return difference * difference * 0.5


class L1Loss(Loss):
    """``mean(|label - pred|)``."""

    def _values(self, backend, pred, label):
        return backend.ops.abs(_like(backend.ops, label, pred) - pred)


class SigmoidBinaryCrossEntropyLoss(Loss):
    """Binary cross-entropy, of logits by default.

    At a logit of exactly 0 the gradient is ``-label``, as Gluon's own is
    (the slope of its ReLU there), where the formula has ``1/2 - label``.

    Parameters
    ----------
    from_sigmoid : bool
        `pred` holds probabilities; Gluon adds 1e-12 inside each logarithm.
    pos_weight : float, optional
        Factor of the term of the positive examples.
    """

    def __init__(self, from_sigmoid: bool = False,
                 weight: float | None = None,
                 pos_weight: float | None = None):
        super().__init__(weight)
        self.from_sigmoid, self.pos_weight = from_sigmoid, pos_weight

    def _values(self, backend, pred, label):
        ops = backend.ops
        label = _like(ops, label, pred)
        if self.from_sigmoid:
            positive = ops.log(pred + 1e-12) * label
            if self.pos_weight is not None:
                positive = positive * self.pos_weight
            return -(positive + ops.log(1.0 - pred + 1e-12) * (1.0 - label))
        tail = ops.softplus(-ops.abs(pred))     # log(1 + exp(-|x|))
        if self.pos_weight is None:
            return ops.relu(pred) - pred * label + tail
        factor = 1.0 + label * (self.pos_weight - 1.0)
        return pred - pred * label + factor * (tail + ops.relu(-pred))


SigmoidBCELoss = SigmoidBinaryCrossEntropyLoss


class HuberLoss(Loss):
    """``|d| - rho/2`` where ``|d| > rho``, else ``d^2 / (2 rho)``; torch's
    `smooth_l1_loss` with ``beta=rho``."""

    def __init__(self, rho: float = 1.0, weight: float | None = None):
        super().__init__(weight)
        self.rho = rho

    def _values(self, backend, pred, label):
        ops = backend.ops
        size = ops.abs(_like(ops, label, pred) - pred)
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
                 weight: float | None = None):
        super().__init__(weight)
        self.from_logits, self.axis = from_logits, axis

    def _values(self, backend, pred, label):
        ops = backend.ops
        label = _like(ops, label, pred)
        if not self.from_logits:
            pred = ops.log_softmax(pred, self.axis)
        return label * (ops.log(label + 1e-12) - pred)

    def _per_example(self, ops, loss):
        return _joined(ops.sum, loss)


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
    TypeError
        When it is called: `pred`, for such a function, is no array of rows,
        but a dict or tuple, or itself a mean, of which nothing tells that it
        is one over rows.
    """
    if hasattr(loss, "reduction"):
        adds = loss.reduction in ("sum", "batchmean")
        loss = copy.copy(loss)
        loss.reduction = "none"

        def unreduced(pred: Array, label: Array) -> Array:
            ops = get_backend().ops
            return _joined(ops.sum if adds else ops.mean, loss(pred, label))
        return _paired(unreduced)

    def spread(pred: Array, label: Array) -> Array:
        ops = get_backend().ops
        mean = loss(pred, label)
        shape = tuple(getattr(mean, "shape", (0,)))
        if math.prod(shape) != 1:
            raise ValueError(
                "per_example adapts a loss that returns the mean over the "
                f"batch, an array of one number; received "
                f"{type(mean).__name__} of shape {shape}. Use a loss with a "
                "value for each example as it is.")
        rows = ops.mean(ops.zeros_like(pred).reshape((len(pred), -1)), 1)
        return rows + mean.reshape((1,))
    adapted = _averages(loss, _paired(spread))

    def of_rows(pred: Array, label: Array) -> Array:
        if not getattr(pred, "shape", ()):
            kind = "an array of shape ()" if hasattr(pred, "shape") \
                else f"a {type(pred).__name__}"
            raise TypeError(
                "per_example adapts a loss of an output that is an array "
                f"with a row for each example; received {kind}. Write a loss "
                "with a value for each example, of what the mean in the "
                "output is made of: lambda out, label: "
                "mgpu.losses.SoftmaxCrossEntropyLoss()(out['logits'], "
                "label), for example.")
        return adapted(pred, label)
    return of_rows


#: by function: how often it was called
_called: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_FIRST = 8      # calls that are looked at, before every one that doubles them


def _averages(loss: Callable[[Array, Array], Array],
              adapted: Callable[[Array, Array], Array]
              ) -> Callable[[Array, Array], Array]:
    """`adapted`, refused where `loss` that it calls is no mean over rows."""
    code = getattr(loss, "__code__", None)
    # A lambda in a loop is a new function in each turn.
    key = loss if code is None or loss.__closure__ or loss.__defaults__ \
        else code
    try:
        _called.setdefault(key, 0)
    except TypeError:       # no weak references, or no hash
        return adapted

    def checked(pred: Array, label: Array) -> Array:
        count = _called[key] = _called.get(key, 0) + 1
        if count > _FIRST and count & (count - 1):
            return adapted(pred, label)
        value, pure = is_pure(loss, get_backend(),
                              lambda: adapted(pred, label))
        if pure:
            _check_mean(loss, pred, label)
        return value
    return checked


def _check_mean(loss: Callable[[Array, Array], Array], pred: Array,
                label: Array) -> None:
    """Refuse `loss` if its value for some rows is not the mean of those for
    two parts of these rows, weighted by their number."""
    backend = get_backend()
    if not all(map(backend.is_native, (pred, label))) \
            or len(label.shape) == 0 or len(pred) != len(label) \
            or "float16" in str(pred.dtype):    # too rough
        return

    def value(begin: int, end: int) -> Any:
        rows = [x[begin:end] for x in (pred, label)]
        if end - begin == 1:    # squeeze() would take the axis of the rows
            rows = [backend.ops.concat([x, x, x]) for x in rows]
        return backend.to_numpy(loss(*rows))
    n, some = len(pred), backend.to_numpy(pred[:5])
    # A few rows differ more than many, and all have more labels.
    for begin, end in {(0, min(n, 5)), (max(0, n - 5), n), (0, n)}:
        middle = begin + (end - begin) // 2
        if middle == begin:
            continue
        try:
            with backend.scope(recording=False):
                found = [value(begin, end), value(begin, middle),
                         value(middle, end)]
                whole, first, second = (float(x.item()) for x in found)
                mean = (first * (middle - begin) + second * (end - middle)) \
                    / (end - begin)
                eps = max(np.finfo(x.dtype).eps for x in (some, found[0]))
                # NaN and infinity tell nothing, nor does what is drawn.
                differ = abs(whole - mean) > 100 * eps * np.abs(some).max() \
                    + 4 * eps ** (2 / 3) * max(map(abs, (
                        whole, first, second))) \
                    and math.isfinite(mean) \
                    and whole == value(begin, end).item()
        except Exception:       # it takes no other number of rows
            continue
        if differ:
            raise ValueError(
                "per_example adapts a loss that returns the mean over the "
                f"batch of a value for each row; received "
                f"{getattr(loss, '__qualname__', type(loss).__qualname__)}, "
                f"which gives {whole:.6g} for {end - begin} rows, and "
                f"{mean:.6g} as the mean of two parts of them: weights of "
                "classes, ignored labels, a root or a ratio of means do so, "
                "and rows would count otherwise on each number of devices. "
                "Return a value for each example instead: "
                "reduction='none', times its weight. To divide by the sum of "
                "weights, or by tokens, use trainer.step(that sum) in a loop "
                "of your own.")


def _paired(loss: Callable[[Array, Array], Array]
            ) -> Callable[[Array, Array], Array]:
    """`loss`, which is refused where it compares a row with the labels of
    others: those of its shard, so that numbers depend on the devices."""
    known: set[Any] = set()     # shapes of one example

    def checked(pred: Array, label: Array) -> Array:
        one, other = (tuple(getattr(x, "shape", ()))[1:]
                      for x in (pred, label))
        if len(one) != len(other) and (one, other) not in known:
            _check_paired(loss, pred, label)
            known.add((one, other))
        return loss(pred, label)
    return checked


def _check_paired(loss: Callable[[Array, Array], Array], pred: Array,
                  label: Array) -> None:
    shapes = [tuple(getattr(x, "shape", ())) for x in (pred, label)]
    one, other = (shape[1:] for shape in shapes)
    rows = next(n for n in itertools.count(2) if n not in one + other)
    try:
        np.broadcast_shapes((rows, *one), (rows, *other))
    except ValueError:
        return
    backend = get_backend()

    def marked(x: Array, shape: tuple[int, ...], row: int, *values: float
               ) -> Array:
        host = np.full((rows, *shape), values[0])
        host[row] = values[1]
        return _as(backend.ops, backend.put(host, x), x)
    with backend.scope(recording=False):
        # Only a loss of pairs changes with the order of the labels.
        own, turned = (backend.to_numpy(loss(
            marked(pred, one, 0, 0.25, 0.75), marked(label, other, i, 0, 1)
        )).sum() for i in (0, 1))
    if np.isclose(own, turned, rtol=1e-3):
        raise ValueError(
            "a loss compares each row of pred with its own label; received "
            f"one that broadcasts the shapes {shapes[0]} and {shapes[1]}, so "
            "that each row meets the labels of all. Give both one shape: "
            "label.reshape(pred.shape).")


def check_per_example(values: Any, rows: int, *others: int) -> Any:
    """`values` in the shape (rows,) that `train_batch` demands of a loss;
    they may have more axes, of length 1."""
    shape = tuple(getattr(values, "shape", ()))
    if shape[:1] not in [(n,) for n in (rows, *others)] \
            or math.prod(shape) != shape[0]:
        raise ValueError(
            f"the loss must return one value per example, shape ({rows},); "
            f"received shape {shape}. Use a loss of mgpu.losses, or wrap one "
            "that averages: mgpu.losses.per_example(loss); on torch also "
            "reduction='none'.")
    return values if len(shape) == 1 else values.reshape(shape[:1])
