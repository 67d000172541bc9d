"""MXNet's names for scripts that run on either backend.

A Gluon script keeps its lines and changes what it imports::

    import mgpu.compat.mxnet as mx
    from mgpu.compat.mxnet import autograd, gluon

The names mean what they mean in mgpu, on one device or several; those that
have no meaning here are refused with the word that is right. A network stays
what it is, a Gluon Block or a torch Module, and is put on devices by
``net = mx.initialize(net, init, ctx)``, in the place of
``net.initialize(init, ctx)``.

Where a script has one array for one context, it has `Rows` here: a batch, cut
over its contexts. `gluon.data.DataLoader` gives arrays on the host, whose
``as_in_context(contexts)`` gives `Rows`; networks and losses take and return
`Rows`, and metrics take them. What `gluon.utils.split_and_load` gives is a
list of arrays, one for each context, as in Gluon.
"""
import operator
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as _np
from numpy.lib.mixins import NDArrayOperatorsMixin

import mgpu
from mgpu.backends.device import as_devices
from mgpu.data.nested import OnDevices, shards_of
from mgpu.nn import initializers, losses, metrics
from mgpu.optim import lr_scheduler
from mgpu.utils import arguments
from mgpu.utils.arguments import one_of

__all__ = ["Context", "HostArray", "Rows", "autograd", "cpu", "gluon", "gpu",
           "init", "initialize", "initializer", "lr_scheduler", "metric",
           "nd", "num_gpus", "random"]

Context, cpu, gpu = mgpu.Device, mgpu.cpu, mgpu.gpu
num_gpus = mgpu.num_gpus


# -- arrays -------------------------------------------------------------------

_NUMBERS = int, float, _np.number


#: by NumPy's function: the operator of native arrays
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _np.add: operator.add, _np.subtract: operator.sub,
    _np.multiply: operator.mul, _np.divide: operator.truediv,
    _np.power: operator.pow, _np.negative: operator.neg}


class Rows(OnDevices, NDArrayOperatorsMixin):
    """A batch on its contexts, as one array is in a Gluon script.

    ``len`` and `shape` are those of the whole batch. Numbers and other `Rows`
    are added, multiplied and so on element by element, on each device.

    Attributes
    ----------
    shards : list of native arrays
        One for each context; None where there are no rows.
    context : list of Device
    """

    def __init__(self, shards: list[Any], context: Sequence[Any]):
        if any(x is not None and not len(x) for x in shards):
            shards = [x if x is not None and len(x) else None for x in shards]
        self.shards, self.context = shards, list(context)

    @property
    def _own(self) -> list[Any]:
        return [x for x in self.shards if x is not None]

    def __repr__(self) -> str:
        return f"Rows of shape {self.shape} on {self.context}"

    @property
    def ctx(self) -> list[Any]:
        """`context`."""
        return self.context

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole batch."""
        return (len(self), *(self._own[0].shape[1:] if self._own else ()))

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """That of the arrays; None without any."""
        return self._own[0].dtype if self._own else None

    def __len__(self) -> int:
        return sum(map(len, self._own))

    def like(self, results: list[Any]) -> Any:
        """`results` as `Rows` on the same contexts: see `OnDevices`."""
        first = next((x for x in results if x is not None), None)
        if first is None or hasattr(first, "shape"):
            for x, rows in zip(results, self.shards):
                if x is not None and tuple(x.shape[:1]) != (len(rows),):
                    raise TypeError(
                        "an output has a row for each row of the batch; "
                        f"received shape {tuple(x.shape)} for {len(rows)} "
                        "rows. Give the network data.shards, a list, and use "
                        "the list that it returns.")
            return Rows(results, self.context)
        return tuple(self.like([None if x is None else x[i] for x in results])
                     for i in range(len(first)))

    def asnumpy(self) -> _np.ndarray:
        """All rows, a copy on the host; waits for them."""
        return _np.concatenate(list(map(mgpu.to_numpy, self._own)))

    def backward(self) -> None:
        """`mgpu.backward` of these losses."""
        mgpu.backward(self.shards)

    def as_in_context(self, ctx: Any) -> "Rows":
        """Itself, where it is on `ctx` already; else ValueError."""
        if as_devices(ctx) != self.context:
            raise ValueError(
                f"rows stay on the devices that they are on; received {ctx!r}"
                f" for {self!r}. Cut the batch once, with all contexts.")
        return self

    as_in_ctx = as_in_context

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any,
                        **kwargs: Any) -> "Rows":
        """An operator of these rows with numbers or other `Rows`, on each
        device; of floats, since backends divide whole numbers otherwise."""
        of = _OPERATORS.get(ufunc)
        if of is None or method != "__call__" or kwargs:
            raise TypeError(
                f"batches on their contexts have + - * / and **; received "
                f"{ufunc.__name__} of {self!r}. Use asnumpy().")
        columns = []
        for x in inputs:
            if not isinstance(x, (Rows, *_NUMBERS)):
                raise TypeError(
                    "a batch on its contexts is joined with numbers and other "
                    f"batches; received {type(x).__name__}. Put an array on "
                    "the contexts first: x.as_in_context(ctx).")
            if isinstance(x, _NUMBERS):
                columns.append([x] * len(self.shards))
            elif "float" not in str(x.dtype):
                raise TypeError(
                    "batches on their contexts compute in floats; received "
                    f"{x!r} of {x.dtype}. Convert it on the host: "
                    "x.astype('float32').as_in_context(ctx).")
            elif (x.shape[:1], x.ndim, x.context) != (
                    self.shape[:1], self.ndim, self.context):
                raise ValueError(
                    "two batches have the same rows on the same contexts, "
                    f"and as many axes; received {self!r} and {x!r}. "
                    "Reshape them on the host.")
            else:
                columns.append(x.shards)
        return Rows([None if one is None else of(*row) for one, row in zip(
            self.shards, zip(*columns))], self.context)


class HostArray(_np.ndarray):
    """A NumPy array with the methods by which a script leaves the host."""

    def as_in_context(self, ctx: Any) -> Rows:
        """Cut the rows over the contexts, which may be one: see
        `mgpu.split_batch`. The shards are copies."""
        devices = as_devices(ctx)
        return Rows(mgpu.split_and_load(self, devices, even_split=False),
                    devices)

    as_in_ctx = as_in_context

    def asnumpy(self) -> _np.ndarray:
        """A copy, as an array of NumPy's own class."""
        return _np.array(self)

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        # A sum of all is a number, as NumPy's: `+=` makes a new one.
        return array[()] if not array.ndim else array.view(HostArray)

    def asscalar(self) -> Any:
        """Its only element. ValueError where it has others."""
        return self.item()


# -- names --------------------------------------------------------------------

def _missing(name: str) -> NoReturn:
    raise AttributeError(
        f"mgpu.compat.mxnet has no {name!r}. Networks are those of "
        "mxnet.gluon or torch.nn, arrays are NumPy's on the host or "
        "mgpu.put(x, device); docs/guide/habits.md has the other names.")


class Names(SimpleNamespace):
    """A module of MXNet's with the names that have a meaning here."""

    if not TYPE_CHECKING:
        def __getattr__(self, name):
            _missing(name)


def initialize(net: Any, init: Any = None, ctx: Any = None,
               **options: Any) -> mgpu.Replicas:
    """`mgpu.initialize` with the order of arguments of Gluon's method.

    Parameters
    ----------
    net : gluon.Block or torch.nn.Module
    init : see `mgpu.initialize`
    ctx : a context, or a list of them
        Default: ``cpu(0)``.
    **options
        Of `mgpu.initialize`.
    """
    return mgpu.initialize(net, cpu(0) if ctx is None else ctx, init,
                           **options)


def _over_devices(loss: type[losses.Loss]) -> type[losses.Loss]:
    """`loss`, which takes `Rows` too, and returns `Rows` for them."""
    class OverDevices(loss):        # type: ignore[valid-type, misc]
        def __call__(self, *arrays: Any, **named: Any) -> Any:
            given = [*arrays, *named.values()]
            one = next((x for x in given if isinstance(x, Rows)), None)
            of_one = super().__call__
            if one is None:
                return of_one(*arrays, **named)

            def on_one(*row: Any) -> Any:
                return of_one(*row[:len(arrays)],
                              **dict(zip(named, row[len(arrays):])))
            return one.like(mgpu.parallel(on_one, *(
                _column(x, len(one.shards)) for x in given)))

    OverDevices.__name__ = OverDevices.__qualname__ = loss.__name__
    OverDevices.__doc__ = loss.__doc__
    return OverDevices


def _column(x: Any, count: int) -> list[Any]:
    """An entry for each of `count` devices, of an argument beside `Rows`."""
    if isinstance(x, Rows) or isinstance(x, list) and all(
            one is None or hasattr(one, "shape") for one in x):
        return shards_of(x)
    if x is None or isinstance(x, _NUMBERS) \
            or isinstance(x, _np.ndarray) and x.shape[:1] == (1,):
        return [x] * count      # the same for all rows
    raise TypeError(
        "beside a batch on its contexts a loss takes other batches, numbers, "
        "and NumPy arrays of one row; received "
        f"{type(x).__name__} of shape {tuple(_np.shape(x))}. Put what has a "
        "value for each row on the contexts: x.as_in_context(ctx); give the "
        "rest a first axis of 1.")


def backward(heads: Any) -> None:
    """`mgpu.backward` of losses: `Rows`, a list of them, whose sum counts, or
    a list of native arrays."""
    every = heads if isinstance(heads, (list, tuple)) else [heads]
    mgpu.backward([x for one in every for x in (
        one.shards if isinstance(one, Rows) else [one])])


# -- data ---------------------------------------------------------------------

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
            row = tuple(_np.asarray(x[i]) for x in host)
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
        drawn = _np.arange(len(self._dataset))
        if self._shuffle:
            _np.random.shuffle(drawn)
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
    return _np.stack([metrics.on_host(x) for x in entries]).view(HostArray)


# -- the modules --------------------------------------------------------------

init = initializer = initializers
metric = Names(**{name: getattr(metrics, name) for name in metrics.__all__})
autograd = Names(record=mgpu.record, pause=mgpu.no_grad, backward=backward)
nd = Names(waitall=mgpu.waitall)
random = Names(seed=mgpu.seed)
gluon = Names(
    Trainer=mgpu.Trainer, Parameter=mgpu.Parameter, metric=metric,
    loss=Names(**{
        name: _over_devices(cls) for name, cls in vars(losses).items()
        if isinstance(cls, type) and issubclass(cls, losses.Loss)
        and cls is not losses.Loss}),
    utils=Names(split_and_load=mgpu.split_and_load, split_data=mgpu.split_data,
                clip_global_norm=mgpu.clip_global_norm),
    data=Names(ArrayDataset=ArrayDataset, DataLoader=DataLoader))


def __getattr__(name: str) -> Any:
    _missing(name)
