"""Measures of predictions, with the interface of ``mxnet.metric``.

``update(labels, preds)`` takes arrays, or lists with one for each device
(None where a device had no rows). Counts are whole numbers, and sums are
exact until they are rounded once, so a value depends neither on the devices
nor on how batches were cut, nor on the processes: `EvalMetric.get` is over
all of them. The values are those of MXNet 1.9.1, but for what it rounds to
float32 and what it counts in silence: labels that are no classes.
"""
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.arguments import integer, one_of
from mgpu.backends import get_backend, messages
from mgpu.nested import shards_of

__all__ = ["Accuracy", "CompositeEvalMetric", "EvalMetric", "F1", "Loss",
           "Perplexity", "TopK", "TopKAccuracy", "create"]


def _exact(values: Iterable[float]) -> list[float]:
    """Few numbers whose exact sum is that of `values`, which are finite."""
    left, parts = list(values), []
    while (part := math.fsum(left)) != 0:
        parts.append(part)
        left.append(-part)
    return parts


class EvalMetric:
    """A measure that goes on over batches.

    Attributes
    ----------
    name : str
    """

    #: of an output of the network; else of losses, or (None) of both
    of_outputs: bool | None = True
    #: the value after batches that had nothing to count
    _of_nothing = float("nan")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def reset(self) -> None:
        """Forget all batches."""
        self._batches = self._count = 0
        self._sums: list[float] = []
        self._odd = 0.0             # of what is not finite

    def update(self, labels: Any, preds: Any) -> None:
        """Count a batch. Waits for it.

        Parameters
        ----------
        labels, preds : arrays, or lists of them
            Native or NumPy; lists have one for each device, or None. They
            may be in a list: ``update([y_shards], [outputs])``.

        Raises
        ------
        ValueError
            Other shapes, lists of other lengths, labels that are no classes.
            Nothing was counted then.
        TypeError
            An array of the other framework.
        """
        self.read(labels, preds)()

    def read(self, labels: Any, preds: Any) -> Callable[[], None]:
        """Raises as `update`; returns what counts the batch."""
        pairs = [(on_host(y), on_host(x)) for y, x in _pairs(labels, preds)]
        return partial(self._add,
                       [self._of(y, x) for y, x in pairs if x.size or y.size])

    def _of(self, labels: np.ndarray, preds: np.ndarray) -> tuple[
            int, Sequence[float]]:
        """How many values, and numbers whose sum is theirs."""
        raise NotImplementedError

    def _add(self, found: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._batches += len(found)
        for count, values in found:
            every = np.asarray(values, np.float64)
            finite = np.isfinite(every)
            self._odd += float(every[~finite].sum())
            self._sums = _exact([*self._sums, *every[finite].tolist()])
            self._count += count

    def get(self) -> tuple[Any, Any]:
        """The name and the value so far; NaN before a batch. With several
        processes: of all, each of which calls it."""
        told = distributed.current().gather(f"the metric {self.name}", [
            self._batches, self._count, self._sums, repr(self._odd)])
        batches, count = (sum(own[i] for own in told) for i in range(2))
        total = math.fsum(x for *_, sums, _ in told for x in sums) \
            + sum(float(odd) for *_, odd in told)
        if count:
            return self.name, total / count
        return self.name, self._of_nothing if batches else float("nan")

    def get_name_value(self) -> list[tuple[str, float]]:
        """``[(name, value)]``, as `get`."""
        name, value = self.get()
        return list(zip(name, value)) if isinstance(name, list) \
            else [(name, value)]


def on_host(x: Any) -> np.ndarray:
    """A native array's copy on the host, or `x` as NumPy has it. TypeError for
    an array of the other framework, and for what is no array."""
    backend = get_backend()
    if backend.is_native(x):
        return backend.to_numpy(x)
    messages.refuse_foreign(x, backend.name)
    found = np.asarray(x)
    if found.dtype.kind not in "biuf":
        raise TypeError("a measure is of arrays of numbers; received "
                        f"{type(x).__name__}"
                        + (f" of {found.dtype}" if found.shape else "")
                        + ". Take the arrays out of it.")
    return found


def _listed(x: Any) -> list[Any]:
    x = shards_of(x)
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _flat(x: Any) -> list[Any]:
    return [one for entry in _listed(x) for one in _listed(entry)]


def _pairs(labels: Any, preds: Any) -> list[tuple[Any, Any]]:
    """Labels and predictions of each device that had rows."""
    labels, preds = _flat(labels), _flat(preds)
    if len(labels) != len(preds):
        raise ValueError(
            "labels and preds are arrays, or lists with one for each device; "
            f"received {len(labels)} and {len(preds)}. Pass what the network "
            "and split_batch gave.")
    for y, x in zip(labels, preds):
        alone = y if x is None else x if y is None else None
        if alone is not None and 0 not in np.shape(alone):
            raise ValueError(
                "a device has labels where it has predictions; received one "
                f"of them alone, of shape {tuple(np.shape(alone))}. Pass "
                "what the network and split_batch gave.")
    return [(y, x) for y, x in zip(labels, preds)
            if x is not None and y is not None]


def _classes(labels: np.ndarray, count: int, ignore: float | None = None
             ) -> np.ndarray:
    """Labels as class numbers below `count`, in one axis."""
    flat = labels.reshape(-1)
    wrong = flat[((flat < 0) | (flat >= count) | (flat != np.trunc(flat)))
                 & (True if ignore is None else flat != ignore)]
    if wrong.size:
        raise ValueError(
            f"labels are class numbers, whole, from 0 to {count - 1}; "
            f"received {wrong[0]}. Check the data.")
    return flat.astype(np.int64)


def _check_rows(labels: np.ndarray, preds: np.ndarray, rows: int) -> None:
    if labels.size != rows:
        raise ValueError(
            "there is a label for each row of scores; received labels of "
            f"shape {labels.shape} and scores of shape {preds.shape}. Cut or "
            "reshape them.")


def count_equal(preds: np.ndarray, labels: np.ndarray) -> int:
    """How many class numbers are equal. ValueError where one of them is not
    whole."""
    for x in (preds, labels):
        odd = x[(x != np.trunc(x)) | ~np.isfinite(x)] \
            if x.dtype.kind == "f" else x[:0]
        if odd.size:
            raise ValueError(
                f"class numbers are whole; received {odd[0]}. Check the data,"
                " and of single scores make class numbers: pred > 0.")
    return int((preds.reshape(-1) == labels.reshape(-1)).sum())


class Accuracy(EvalMetric):
    """The share of predictions that are right. Of equal scores the first
    class wins.

    Parameters
    ----------
    axis : int
        The axis of classes in scores; `preds` of the shape of labels are
        class numbers.
    name : str
    """

    def __init__(self, axis: int = 1, name: str = "accuracy") -> None:
        self._axis = integer("axis", axis, -32)
        super().__init__(name)

    def _of(self, labels: np.ndarray, preds: np.ndarray
            ) -> tuple[int, Sequence[float]]:
        if preds.shape != labels.shape:
            if not -preds.ndim <= self._axis < preds.ndim \
                    or preds.shape[self._axis] < 2:
                raise ValueError(
                    f"an accuracy is that of scores with classes on axis "
                    f"{self._axis}, two or more, or of class numbers of the "
                    f"labels' shape; received shapes {preds.shape} and "
                    f"{labels.shape}. Of a single score make class numbers: "
                    "pred > 0.")
            classes = preds.shape[self._axis]
            preds = preds.argmax(axis=self._axis)
            _check_rows(labels, preds, preds.size)
            _classes(labels, classes)
        return preds.size, [count_equal(preds, labels)]


class TopKAccuracy(EvalMetric):
    """The share of rows whose label is among the `top_k` largest scores, in
    the dtype of the scores. Of equal scores the first classes win; NaN counts
    as the largest, as in `Accuracy`.

    Parameters
    ----------
    top_k : int
    name : str
        Gets ``_k`` at its end, as MXNet's.
    """

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy") -> None:
        self._k = integer("top_k", top_k, 1)
        super().__init__(f"{name}_{self._k}")

    def _of(self, labels: np.ndarray, preds: np.ndarray
            ) -> tuple[int, Sequence[float]]:
        if preds.ndim != 2 or preds.shape[1] < self._k:
            raise ValueError(
                f"{self.name} is that of scores (n, classes) with {self._k} "
                f"classes or more; received shape {preds.shape}. Reshape "
                "them.")
        _check_rows(labels, preds, len(preds))
        y = _classes(labels, preds.shape[1])[:, None]
        own = np.take_along_axis(preds, y, 1)
        odd, own_odd = preds != preds, own != own   # NaN: as the largest
        before = (preds > own) & ~own_odd | odd & ~own_odd | (
            (preds == own) | odd & own_odd) & (np.arange(preds.shape[1]) < y)
        return len(preds), [float((before.sum(axis=1) < self._k).sum())]


TopK = TopKAccuracy


class F1(EvalMetric):
    """The F1 score of two classes, of all rows together; 0 without a
    positive one.

    Parameters
    ----------
    name : str
    average : {"micro"}
        MXNet's default, "macro", is a mean over batches of another score: it
        depends on how data are cut into batches, and is refused.
    """

    _of_nothing = 0.0

    def __init__(self, name: str = "f1", average: str = "macro") -> None:
        if average != "micro":
            raise ValueError(
                "an F1 score here is that of all rows; received average="
                f"{average!r} (MXNet's default, 'macro', is a mean over "
                "batches, which depends on how they are cut). Pass "
                "average='micro'.")
        super().__init__(name)

    def _of(self, labels: np.ndarray, preds: np.ndarray
            ) -> tuple[int, Sequence[float]]:
        if preds.ndim != 2 or preds.shape[1] != 2:
            raise ValueError("an F1 score is that of scores (n, 2); received "
                             f"shape {preds.shape}. Give two classes.")
        _check_rows(labels, preds, len(preds))
        y, x = _classes(labels, 2) == 1, preds.argmax(axis=1) == 1
        # 2 p r / (p + r) of precision and recall, in whole numbers
        return int(y.sum() + x.sum()), [2 * int((x & y).sum())]


class Perplexity(EvalMetric):
    """``exp`` of the mean of ``-log(max(p, 1e-10))`` over all labels, where p
    is the probability of the label.

    Parameters
    ----------
    ignore_label : int or None
        Labels that do not count, whatever their probability is. (In MXNet a
        NaN there makes the value NaN.)
    axis : int
        Of the probabilities: the last one, -1.
    name : str
    """

    def __init__(self, ignore_label: int | None, axis: int = -1,
                 name: str = "perplexity") -> None:
        if axis != -1:
            raise ValueError("the last axis has the probabilities; received "
                             f"axis={axis!r}. Transpose them.")
        self._ignored = None if ignore_label is None \
            else integer("ignore_label", ignore_label, -2 ** 63)
        super().__init__(name)

    def _of(self, labels: np.ndarray, preds: np.ndarray
            ) -> tuple[int, Sequence[float]]:
        _check_rows(labels, preds, preds.size // preds.shape[-1])
        y = _classes(labels, preds.shape[-1], self._ignored)
        counted = np.ones(len(y), bool) if self._ignored is None \
            else y != self._ignored
        p = preds.reshape(len(y), -1)[counted, y[counted]].astype(np.float64)
        return int(counted.sum()), (-np.log(np.maximum(1e-10, p))).tolist()

    def get(self) -> tuple[Any, Any]:
        name, mean = super().get()
        return name, float(np.exp(mean))


class Loss(EvalMetric):
    """The mean of what `preds` hold: losses, one for each row. Labels are
    not read (None is fine)."""

    of_outputs = False

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    def read(self, labels: Any, preds: Any) -> Callable[[], None]:
        losses = [on_host(x) for x in _flat(preds) if x is not None]
        return partial(self._add, [
            (x.size, x.reshape(-1).astype(np.float64).tolist())
            for x in losses])


class CompositeEvalMetric(EvalMetric):
    """Several metrics of the same batches; `get` gives lists.

    Parameters
    ----------
    metrics : list of metrics, or names for `create`
    name : str
    """

    def __init__(self, metrics: Sequence[Any] = (), name: str = "composite"
                 ) -> None:
        self.metrics = [create(one) for one in metrics]
        self.name = name        # what they have counted stays

    @property
    def of_outputs(self) -> bool | None:    # type: ignore[override]
        kinds = {one.of_outputs for one in self.metrics} or {True}
        return kinds.pop() if len(kinds) == 1 else None

    def add(self, metric: Any) -> None:
        """Have one more."""
        self.metrics.append(create(metric))

    def reset(self) -> None:
        for one in self.metrics:
            one.reset()

    def read(self, labels: Any, preds: Any) -> Callable[[], None]:
        # One of the user's that has an `update` of its own comes after all
        # have read.
        counts = [one.read(labels, preds)
                  if type(one).update is EvalMetric.update
                  else partial(one.update, labels, preds)
                  for one in self.metrics]

        def count() -> None:
            for own in counts:
                own()
        return count

    def get(self) -> tuple[Any, Any]:
        found = [pair for one in self.metrics for pair in one.get_name_value()]
        return [name for name, _ in found], [value for _, value in found]


_NAMES = {"acc": Accuracy, "accuracy": Accuracy, "f1": F1, "loss": Loss,
          "perplexity": Perplexity, "top_k_acc": TopKAccuracy,
          "top_k_accuracy": TopKAccuracy, "topkaccuracy": TopKAccuracy}


def create(metric: Any, **options: Any) -> EvalMetric:
    """A metric by its name, in small or capital letters; of a list, a
    `CompositeEvalMetric`; a metric is given back.

    Raises
    ------
    ValueError
        Another name.
    TypeError
        A function, or what else names none; options that it does not have,
        or for a metric that has its own.
    """
    if isinstance(metric, (list, tuple)):
        return CompositeEvalMetric([create(one, **options) for one in metric])
    if isinstance(metric, str):
        return _NAMES[one_of("metric", metric.lower(), sorted(_NAMES))](
            **options)
    if isinstance(metric, EvalMetric) and not options:
        return metric
    raise TypeError(
        "a metric is one of mgpu.metrics (with its options), a name, or a "
        f"list of them; received {type(metric).__name__}. Compute others "
        "from Replicas.predict.")
