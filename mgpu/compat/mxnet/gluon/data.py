"""``gluon.data``: data sets, and batches of them on the host."""
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mgpu
from mgpu.compat.mxnet.arrays import HostArray
from mgpu.compat.mxnet.modules import missing
from mgpu.nn import metrics
from mgpu.utils import arguments
from mgpu.utils.arguments import one_of

__getattr__ = missing(__name__)


class _Entries:
    """`length` entries of a data set, each made when it is read."""

    def __init__(self, length: int, entry: Callable[[Any], Any]):
        self._length, self._entry = length, entry

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: Any) -> Any:
        return self._entry(i)

    def transform(self, fn: Callable[..., Any], lazy: bool = True
                  ) -> "_Entries":
        """``fn(*row)`` in the place of each row; where it is read, or now."""
        def entry(i: Any) -> Any:
            row = self[i]
            return fn(*row) if isinstance(row, tuple) else fn(row)
        return _Entries(len(self), entry if lazy else list(
            map(entry, range(len(self)))).__getitem__)

    def transform_first(self, fn: Callable[[Any], Any], lazy: bool = True
                        ) -> "_Entries":
        """``fn`` of the first array of each row; the others stay."""
        return self.transform(lambda x, *more: (fn(x), *more) if more
                              else fn(x), lazy)


class ArrayDataset(_Entries):
    """Rows of arrays of equal lengths, as Gluon's: an entry is a tuple of a
    row of each; of one array, its row."""

    def __init__(self, *arrays: Any):
        if len({len(x) for x in arrays}) != 1:
            raise ValueError(
                "a data set has arrays of one length; received lengths "
                f"{[len(x) for x in arrays]}. Give each row its label.")
        backend = mgpu.backends.get_backend()
        host = [backend.to_numpy(x) if backend.is_native(x) else x
                for x in arrays]

        def entry(i: Any) -> Any:
            row = tuple(np.asarray(x[i]) for x in host)
            return row if len(row) > 1 else row[0]
        super().__init__(len(arrays[0]), entry)


class DataLoader:
    """Batches of a data set, on the host, in Gluon's order.

    A shuffled order is drawn from NumPy's global stream, as Gluon draws it:
    after ``np.random.seed(n)`` both give the same batches. It is neither
    written to a checkpoint nor divided over processes: use
    `mgpu.datasets.IndexedIterator` there.

    Parameters
    ----------
    dataset : anything with a length and an index
        Entries are arrays or numbers, or tuples of them.
    batch_size : int
    shuffle : bool
    last_batch : {"keep", "discard", "rollover"}
        What becomes of the rows that are left at the end of an epoch. None:
        they are kept.
    batchify_fn : callable, optional
        Makes a batch of a list of entries. Default: stacks the arrays.
    num_workers, pin_memory, thread_pool, timeout
        Taken and not used: `mgpu.prefetch` draws batches ahead.

    Yields
    ------
    list of HostArray, or one of them
    """

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool = False,
                 last_batch: str | None = None,
                 batchify_fn: Callable[[list[Any]], Any] | None = None,
                 num_workers: int = 0, pin_memory: bool = False,
                 thread_pool: bool = False, timeout: int = 120):
        self._dataset, self._shuffle = dataset, bool(shuffle)
        self._size = arguments.batch_size(batch_size)
        self._last = one_of("last_batch", last_batch or "keep",
                            ("keep", "discard", "rollover"))
        self._batchify = batchify_fn or stacked
        self._left: list[int] = []

    def __len__(self) -> int:
        n = len(self._dataset) + len(self._left)
        return -(-n // self._size) if self._last == "keep" \
            else n // self._size

    def __iter__(self) -> Iterator[Any]:
        drawn = np.arange(len(self._dataset))
        if self._shuffle:
            np.random.shuffle(drawn)
        order, self._left = [*self._left, *drawn.tolist()], []
        whole = len(order) - len(order) % self._size
        for at in range(0, whole, self._size):
            yield self._batch(order[at:at + self._size])
        if self._last == "rollover":
            self._left = order[whole:]
        elif self._last == "keep" and whole < len(order):
            yield self._batch(order[whole:])

    def _batch(self, numbers: list[int]) -> Any:
        return self._batchify([self._dataset[i] for i in numbers])


def stacked(entries: list[Any]) -> Any:
    """Gluon's default: arrays stacked, in a list where entries are tuples.
    Numbers become arrays of their own dtype."""
    if isinstance(entries[0], tuple):
        return [stacked(list(column)) for column in zip(*entries)]
    return np.stack([metrics.on_host(x) for x in entries]).view(HostArray)
