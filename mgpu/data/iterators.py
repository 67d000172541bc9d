"""Seeded iterators over batches, for both backends.

Batches are NumPy arrays. They are converted to arrays of a backend when they
are split over devices, so both backends receive the same bits in the same
order.
"""
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import get_backend
from mgpu.data.split import shard_bounds
from mgpu.utils import arguments
from mgpu.utils.arguments import integer

Arrays = tuple[np.ndarray, np.ndarray]

_steps = 0      # of all trainers


def note_step() -> None:
    """Count a completed step. `Trainer` calls it after a step, which has
    consumed the batches yielded before it."""
    global _steps
    _steps += 1


class BatchIterator:
    """Iterable over batches of two arrays, in a seeded order for each epoch.

    Each ``iter()``, and so each ``for`` loop, starts a new epoch. The order of
    epoch `e` is ``numpy.random.default_rng([seed, e]).permutation(n)``. It is
    the same on both backends and does not depend on earlier epochs or other
    random numbers, so setting `epoch` resumes training. In distributed
    training (`mgpu.distributed`), a process receives the examples of each
    batch that its devices would have in one process; possibly none.

    Parameters
    ----------
    X : array, (n, ...)
        Examples; not copied.
    y : array, (n, ...)
        Labels; not copied.
    batch_size : int
        Examples in a batch. The last batch may be smaller.
    seed : int
        0 or more.
    shuffle : bool
        False: keep the order of `X` in every epoch.
    drop_last : bool
        True: drop the last batch if it is incomplete.
    transform : callable, optional
        ``transform(X_batch)`` replaces ``X_batch``. Called for each batch; it
        must return the same number of examples. In distributed training it
        receives the examples of one process, so the result for an example
        must not depend on others.
    info : dict, optional
        Description for reports, see `info` below.

    Yields
    ------
    X : ndarray, (b, ...)
    y : ndarray, (b, ...)
        Copies.

    Attributes
    ----------
    y : ndarray, (n, ...)
    batch_size, num_examples, seed : int
    shuffle, drop_last : bool
    epoch : int
        Epoch that the next ``iter()`` starts, initially 0. Settable.
    position : (int, int)
        Epoch and index of the next batch: where training resumes after the
        batches yielded so far. Settable; the next ``iter()`` starts there.
        Only the latest ``iter()`` advances it; under `mgpu.prefetch`, when a
        batch is taken. After a ``break`` it remains in the epoch; set `epoch`
        to skip the rest. Reading it raises RuntimeError while another thread
        draws the batches.
    stepped : (int, int)
        Position after the last `Trainer` step, as `mgpu.save_checkpoint`
        writes it. Batches yielded since then are not counted before the end
        of the epoch, because Ctrl-C may have interrupted their step.
    info : dict or None
        For the data sets of this module ``{"name": str, "train": int,
        "test": int, "shape": [c, h, w], "source": str}``: the numbers of
        examples, the shape of an example, and the origin. Serializable as
        JSON.

    Raises
    ------
    ValueError
        `batch_size` is not an integer of 1 or more, or `seed` or `epoch` is
        not an integer of 0 or more; `X` and `y` differ in length; no
        examples, or less than one batch with `drop_last`.
    """

    #: checksums that run user code
    _label_sums: Any = ()

    def __init__(self, X: Any, y: Any, batch_size: int, seed: int = 0,
                 shuffle: bool = True, drop_last: bool = False, *,
                 transform: Callable[[np.ndarray], np.ndarray] | None = None,
                 info: dict[str, Any] | None = None) -> None:
        self._X, self.y = np.asarray(X), np.asarray(y)
        if len(self._X) != len(self.y):
            raise ValueError(
                "X and y must have the same length; received "
                f"{len(self._X)} examples and {len(self.y)} labels.")
        self._transform = transform
        # Whether batches are made without user code.
        self.fixed = transform is None
        self.info = None if info is None else dict(info)
        self._begin(len(self.y), batch_size, seed, shuffle, drop_last)

    def _begin(self, examples: int, batch_size: int, seed: int, shuffle: bool,
               drop_last: bool) -> None:
        self.batch_size = arguments.batch_size(batch_size)
        self.seed = integer("seed", seed, 0)
        self.num_examples = examples
        if not examples:
            raise ValueError("a data set needs at least one example; "
                             "received one of length 0.")
        if drop_last and examples < self.batch_size:
            raise ValueError(
                f"drop_last leaves no batch: received {examples} examples "
                f"and batch_size={self.batch_size}. Reduce batch_size.")
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.epoch = 0

    @property
    def X(self) -> np.ndarray:
        """All examples, unshuffled, after the transform. With a `transform`,
        each access computes a new array; without, it is not a copy."""
        return self._X if self._transform is None else self._transform(self._X)

    @property
    def epoch(self) -> int:
        """Epoch that the next ``iter()`` starts."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.position = value, 0

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and index of the next batch."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"the position of {self!r} is not available: another thread "
                "draws its batches and may be ahead. Read it in the thread "
                "that takes the batches, and prefetch with mgpu.prefetch of "
                "this object itself.")
        return self._position

    @position.setter
    def position(self, value: tuple[int, int]) -> None:
        epoch, number = value
        epoch, number = integer("epoch", epoch, 0), integer("batch", number, 0)
        if number >= len(self):
            raise ValueError(f"an epoch has {len(self)} batches; received "
                             f"the position before batch {number}, from 0.")
        self._epoch = epoch
        self._position = self._stepped = epoch, number
        self._noted = _steps    # steps when the last batch was yielded
        self._thread: int | None = None     # the one that took that batch

    @property
    def stepped(self) -> tuple[int, int]:
        """Position after the last step of a `Trainer`."""
        yielded = self.position
        return self._stepped if self._noted == _steps else yielded

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        rest = 0 if self.drop_last else self.batch_size - 1
        return (self.num_examples + rest) // self.batch_size

    def __iter__(self) -> "Epoch":
        # The epoch starts here, not with the first batch.
        if self._position[0] != self._epoch:    # not set
            self._position = self._epoch, 0
        self._stepped = self._position
        self._epoch += 1
        return Epoch(self, *self._position)

    def _drawn(self, epoch: int, first: int,
               share: Callable[[int], tuple[int, int]]) -> Iterator[Arrays]:
        order = np.random.default_rng([self.seed, epoch]).permutation(
            self.num_examples) if self.shuffle \
            else np.arange(self.num_examples)
        for i in range(first, len(self)):
            rows = order[i * self.batch_size:(i + 1) * self.batch_size]
            begin, end = share(len(rows))
            own = rows[begin:end]
            yield self._made(own, rows)

    def _made(self, own: np.ndarray, rows: np.ndarray) -> Any:
        """The batch of the examples `own`, those of this process in the
        global batch `rows`."""
        # A transform is called for at least one example.
        X = self._X[own if len(own) else rows[:1]]      # a copy
        if self._transform is not None:
            X = self._transform(X)
        return X if len(own) else X[:0], self.y[own]

    def place(self, epoch: int, number: int) -> list[Any]:
        """Identity of a batch, which processes compare."""
        return [[self.num_examples, self.batch_size], self.seed, self.shuffle,
                self.drop_last, epoch, number,
                [*self.contents, *self._label_sums]]

    @functools.cached_property
    def contents(self) -> list[int | None]:
        """Checksums of data that is available without user code. None: not
        available."""
        return [_checksum_of((self.y, self._X[_some(len(self.y), 64)]))]

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({self.num_examples} examples, "
                f"batch_size={self.batch_size}, seed={self.seed}, shuffle="
                f"{self.shuffle}, epoch={self.epoch})")


class IndexedIterator(BatchIterator):
    """Iterable over batches of a map-style data set, in the order of
    `BatchIterator`.

    The data set may be one of torch or Gluon, or a list of pairs. In
    distributed training, a process reads its own examples only. Positions and
    checkpoints work as for `BatchIterator`. The attributes ``X`` and ``y``
    are not available.

    Parameters
    ----------
    dataset : object with ``len()`` and ``[]``
        ``dataset[i]`` is the pair (x, y) of example `i`. Each is a NumPy
        array, a native array, a number, or a tuple, list or dict of them. All
        examples have the same shapes.
    batch_size, seed, shuffle, drop_last
        As for `BatchIterator`.

    Yields
    ------
    X, y
        NumPy arrays, stacked along a new first axis; in tuples or dicts if
        the examples are.

    Raises
    ------
    TypeError
        `dataset` has no length, or an example is not a pair.
    ValueError
        No examples, examples of different shapes, or an invalid argument.

    Examples
    --------
    >>> data = [(np.full(2, i), i % 2) for i in range(5)]
    >>> for X, y in IndexedIterator(data, 2, shuffle=False):
    ...     print(X.tolist(), y.tolist())
    [[0, 0], [1, 1]] [0, 1]
    [[2, 2], [3, 3]] [0, 1]
    [[4, 4]] [0]
    """

    def __init__(self, dataset: Any, batch_size: int, seed: int = 0,
                 shuffle: bool = True, drop_last: bool = False) -> None:
        self._dataset, self.fixed, self.info = dataset, False, None
        self._begin(len(dataset), batch_size, seed, shuffle, drop_last)

    @functools.cached_property
    def contents(self) -> list[int | None]:
        data, chosen = self._dataset, []
        while hasattr(data, "indices") and hasattr(data, "dataset"):
            chosen.append(data.indices)         # torch's Subset
            data = data.dataset
        return [_checksum_of(chosen)]

    @functools.cached_property
    def _label_sums(self) -> list[int | None]:
        """A checksum of some labels, which are rarely augmented. None if
        repeated reads of a label differ."""
        put_back = get_backend().kept_streams()
        try:
            labels = {_checksum_of([self._pair(i)[1] for i in _some(
                self.num_examples, 16)]) for _ in range(3)}
        finally:
            put_back()
        return [labels.pop() if len(labels) == 1 else None]

    def _pair(self, i: int) -> Sequence[Any]:
        pair = self._dataset[int(i)]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"an example must be a pair (x, y); example {i} "
                            f"is a {type(pair).__name__}. Put several inputs "
                            "into one tuple: ((x1, x2), y).")
        return pair

    def _made(self, own: np.ndarray, rows: np.ndarray) -> Any:
        read = own if len(own) else rows[:1]
        return tuple(_stacked(column, read, len(own))
                     for column in zip(*map(self._pair, read)))


def _some(examples: int, count: int) -> np.ndarray:
    """Indices of `count` evenly spaced examples."""
    return np.unique(np.linspace(0, examples - 1, count).astype(int))


def _on_host(x: Any) -> np.ndarray:
    # np.asarray does not convert MXNet's arrays.
    return x.asnumpy() if hasattr(x, "asnumpy") else np.asarray(x)


def _checksum_of(value: Any) -> int | None:
    """Checksum of arrays, numbers and strings in tuples, lists and dicts.
    None for other types."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (tuple, list)):
        parts = list(map(_checksum_of, value))
        return None if None in parts else zlib.crc32(repr(parts).encode())
    x = _on_host(value)
    if x.dtype == object:
        return None
    # Equal numbers of another dtype have the same checksum.
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.int64}
    x = x.astype(wide.get(x.dtype.kind, x.dtype))
    return zlib.crc32(np.ascontiguousarray(x).tobytes(),
                      zlib.crc32(repr(x.shape).encode()))


def _stacked(examples: Sequence[Any], numbers: np.ndarray, rows: int) -> Any:
    """Stack the arrays of several examples into one; tuples and dicts entry
    by entry. Returns the first `rows` examples."""
    first = examples[0]
    if isinstance(first, dict):
        return {key: _stacked([x[key] for x in examples], numbers, rows)
                for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(_stacked(column, numbers, rows)
                     for column in zip(*examples, strict=True))
    arrays = list(map(_on_host, examples))
    for i, x in zip(numbers, arrays):
        if x.shape != arrays[0].shape or x.dtype == object:
            raise ValueError(
                "the examples of a data set must have one shape; "
                f"received {arrays[0].shape} for example {numbers[0]} and "
                f"{x.shape} of dtype {x.dtype} for example {i}. Pad them, or "
                "make batches yourself.")
    return np.stack(arrays)[:rows]


class Epoch(Iterator[Arrays]):
    """Iterator over the batches of one epoch of a `BatchIterator`.

    Attributes
    ----------
    batches : iterator
        The batches. It does not advance the position of the `BatchIterator`:
        a prefetcher, which reads ahead, calls `taken` for each batch that it
        yields, and `ended` after the last one.
    """

    def __init__(self, data: BatchIterator, epoch: int, first: int) -> None:
        self._data, self._epoch, self._number = data, epoch, first
        # Here, not with the first batch: all ranks call iter().
        share = distributed.current().shares(shard_bounds)
        self.batches = data._drawn(epoch, first, share)

    def __next__(self) -> Arrays:
        for batch in self.batches:
            self.taken()
            return batch
        self.ended()
        raise StopIteration

    def taken(self) -> None:
        """Record that this thread has taken the next batch."""
        data = self._data
        world = distributed.current()
        if world.size > 1:
            world.note_batch(data.place(self._epoch, self._number))
        self._number += 1
        if data._epoch == self._epoch + 1:      # no later iter()
            if data._noted != _steps:
                data._stepped, data._noted = data._position, _steps
            data._thread = threading.get_ident()
            data._position = (self._epoch, self._number) \
                if self._number < len(data) else (self._epoch + 1, 0)

    def ended(self) -> None:
        """Record that the loop has requested a batch after the last one, and
        so has completed the last step."""
        distributed.current().note_batch(None)
        if self._data._epoch == self._epoch + 1:
            self._data._stepped = self._data._position
