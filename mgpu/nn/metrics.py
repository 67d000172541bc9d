"""Measures of predictions, with the interface of ``mxnet.metric``.

``update(labels, preds)`` takes arrays, or lists with one for each device
(None where a device had no rows). Counts are whole numbers, and sums are
exact until they are rounded once, so a value depends neither on the devices
nor on how batches were cut, nor on the processes: `EvalMetric.get` is over
all of them. The values are those of MXNet 1.9.1, but for what it rounds to
float32 and what it counts in silence: labels that are no classes.
"""
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import get_backend, messages
from mgpu.data.nested import shards_of
from mgpu.nn.losses import check_classes
from mgpu.utils.arguments import integer, one_of

__all__ = ["Accuracy", "CompositeEvalMetric", "EvalMetric", "F1", "Loss",
           "Perplexity", "TopK", "TopKAccuracy", "create"]


def _exact(values: Iterable[float]) -> list[float]:
    """A few numbers whose exact sum is that of the finite `values`."""
    left, parts = list(values), []
    while (part := math.fsum(left)) != 0:
        parts.append(part)
        left.append(-part)
    return parts


class EvalMetric:
    """A metric that accumulates over batches. A subclass defines `measure`.

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

    def measure(self, labels: np.ndarray, preds: np.ndarray
                ) -> tuple[int, Sequence[float]]:
        """Return the number of values in the arrays of one device, and
        numbers whose sum is that of the values."""
        raise NotImplementedError

    def read(self, labels: Any, preds: Any) -> Callable[[], None]:
        """Read a batch, and return a function that counts it. Raises as
        `update` does."""
        pairs = _pairs(labels, preds)
        # All devices, even if one fails: MXNet raises the error of an array
        # that was not read in a later call.
        scores = get_backend().parallel([partial(on_host, x)
                                         for _, x in pairs])
        return partial(self._add, [self.measure(on_host(y), x)
                                   for (y, _), x in zip(pairs, scores)])

    def _add(self, found: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._batches += len(found)
        for count, values in found:
            every = np.asarray(values, np.float64)
            finite = np.isfinite(every)
            self._odd += float(every[~finite].sum())
            self._sums = _exact([*self._sums, *every[finite].tolist()])
            self._count += count

    def get(self) -> tuple[Any, Any]:
        """Return the name and the current value; NaN before a batch. In
        distributed training over all ranks: call it on every rank."""
        reports = distributed.current().gather(f"the metric {self.name}", [
            self._batches, self._count, self._sums, repr(self._odd)])
        batches, count = (sum(own[i] for own in reports) for i in range(2))
        total = math.fsum(x for *_, sums, _ in reports for x in sums) \
            + sum(float(odd) for *_, odd in reports)
        if count:
            return self.name, total / count
        return self.name, self._of_nothing if batches else float("nan")

    def get_name_value(self) -> list[tuple[str, float]]:
        """``[(name, value)]``, as `get`."""
        return [self.get()]


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
                        f"{type(x).__name__}. Take the arrays out of it.")
    return found


def _flat(x: Any) -> list[Any]:
    """The arrays in lists, of devices or of lists of them."""
    x = shards_of(x)
    return [one for entry in x for one in _flat(entry)] \
        if isinstance(x, (list, tuple)) else [x]


def _pairs(labels: Any, preds: Any) -> list[tuple[Any, Any]]:
    """Labels and predictions of each device that had rows."""
    pairs = list(itertools.zip_longest(_flat(labels), _flat(preds)))
    shapes = [[None if x is None or 0 in np.shape(x) else tuple(np.shape(x))
               for x in pair] for pair in pairs]
    if any((y is None) != (x is None) for y, x in shapes):
        raise ValueError(
            "labels and preds are arrays, or lists with one of each for every "
            f"device; received pairs of shapes {shapes}.")
    return [pair for pair, (y, _) in zip(pairs, shapes) if y is not None]


def _classes(labels: np.ndarray, scores: np.ndarray, axis: int = -1,
             ignore: float | None = None) -> np.ndarray:
    """Labels as numbers of the classes that `scores` have on `axis`, in one
    axis."""
    flat, count = labels.reshape(-1), scores.shape[axis]
    if len(flat) * count != scores.size:
        raise ValueError(
            "there is a label for each row of scores; received labels of "
            f"shape {labels.shape} and scores of shape {scores.shape}.")
    check_classes(flat if ignore is None else
                  np.where(flat == ignore, 0, flat), count)
    return flat.astype(np.int64)


def count_equal(preds: np.ndarray, labels: np.ndarray) -> int:
    """How many class numbers are equal. ValueError where one of them is not
    whole."""
    for x in (preds, labels):
        with np.errstate(invalid="ignore"):
            odd = x[x % 1 != 0]     # NaN and infinity too
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

    def measure(self, labels, preds):
        if preds.shape != labels.shape:
            if not preds.shape[self._axis:][:1] > (1,):
                raise ValueError(
                    f"axis {self._axis} of scores has the classes, two or "
                    f"more; received scores of shape {preds.shape} for labels "
                    f"of shape {labels.shape}. Of a single score make class "
                    "numbers: pred > 0.")
            _classes(labels, preds, self._axis)
            preds = preds.argmax(axis=self._axis)
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

    def measure(self, labels, preds):
        if preds.ndim != 2 or preds.shape[1] < self._k:
            raise ValueError(
                f"{self.name} is that of scores (n, classes) with {self._k} "
                f"classes or more; received shape {preds.shape}.")
        y, last = _classes(labels, preds), preds.shape[1] - 1
        # Stable from the right: of equal scores the first class comes last.
        order = last - np.argsort(preds[:, ::-1], axis=1, kind="stable")
        return len(y), [int((order[:, -self._k:] == y[:, None]).sum())]


TopK = TopKAccuracy


class F1(EvalMetric):
    """The F1 score of two classes, of all rows together; 0 without a
    positive one.

    Parameters
    ----------
    name : str
    average : {"micro"}
        MXNet's default, "macro", is not supported: a mean over batches of
        another score, which depends on how the data are split into batches.
    """

    _of_nothing = 0.0

    def __init__(self, name: str = "f1", average: str = "macro") -> None:
        one_of("average", average, ("micro",))
        super().__init__(name)

    def measure(self, labels, preds):
        if preds.ndim != 2 or preds.shape[1] != 2:
            raise ValueError("an F1 score is that of scores (n, 2); received "
                             f"shape {preds.shape}.")
        y, x = _classes(labels, preds) == 1, preds.argmax(axis=1) == 1
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
        one_of("axis", axis, (-1,))
        self._ignored = None if ignore_label is None \
            else integer("ignore_label", ignore_label, -2 ** 63)
        super().__init__(name)

    def measure(self, labels, preds):
        y = _classes(labels, preds, -1, self._ignored)
        counted = y == y if self._ignored is None else y != self._ignored
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
        """Append a metric."""
        self.metrics.append(create(metric))

    def reset(self) -> None:
        for one in self.metrics:
            one.reset()

    def read(self, labels: Any, preds: Any) -> Callable[[], None]:
        # A user-defined metric that overrides `update` comes after all have
        # read.
        counts = [one.read(labels, preds)
                  if type(one).update is EvalMetric.update
                  else partial(one.update, labels, preds)
                  for one in self.metrics]

        def count() -> None:
            for own in counts:
                own()
        return count

    def get(self) -> tuple[Any, Any]:
        found = self.get_name_value()
        return [name for name, _ in found], [value for _, value in found]

    def get_name_value(self) -> list[tuple[str, float]]:
        return [pair for one in self.metrics for pair in one.get_name_value()]


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
    raise TypeError("a metric is one of mgpu.metrics, a name (with options), "
                    f"or a list of them; received {type(metric).__name__}.")
