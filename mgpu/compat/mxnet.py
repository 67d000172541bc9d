"""MXNet's names for scripts that run on either engine.

A Gluon script keeps its lines and changes what it imports::

    import mgpu.compat.mxnet as mx
    from mgpu.compat.mxnet import autograd, gluon

The names mean what they mean in mgpu, on one device or several; those that
have no meaning here are refused with the word that is right. A network stays
what it is, a Gluon Block or a torch Module, and is put on devices by
``net = mx.initialize(net, init, ctx)``, in the place of
``net.initialize(init, ctx)``.

Where a script has one array for one context, it has `Rows` here: the shards
of a batch, on all of its contexts. `gluon.data.DataLoader` gives arrays on the
host, whose ``as_in_context(contexts)`` cuts them into `Rows`; networks and
losses take and return `Rows`.
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import mgpu
from mgpu import arguments, initializers, losses, lr_scheduler, metrics
from mgpu.arguments import Hints, one_of

__all__ = ["Context", "HostArray", "Rows", "autograd", "cpu", "gluon", "gpu",
           "init", "initialize", "lr_scheduler", "metric", "nd", "random"]

Context, cpu, gpu = mgpu.Device, mgpu.cpu, mgpu.gpu


# -- arrays -------------------------------------------------------------------

_TO_NUMPY = "asnumpy(), and NumPy's functions"


class Rows(Hints, list[Any]):
    """The rows of a batch on several devices: a list with a native array, or
    None, for each."""

    _hints = {
        "context": "the contexts that it was made for", "ctx": "the contexts",
        "asscalar": "asnumpy()",
        **dict.fromkeys(("argmax", "argmin", "max", "min", "reshape",
                         "astype"), _TO_NUMPY),
        **dict.fromkeys(("mean", "sum"), "asnumpy().mean(), and backward of "
                        "the losses themselves: a step divides by the rows"),
        "attach_grad": "initialize, which gives parameters gradients"}

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole batch."""
        arrays = [x for x in self if x is not None]
        return (sum(len(x) for x in arrays), *arrays[0].shape[1:])

    def asnumpy(self) -> np.ndarray:
        """All rows, a copy on the host; waits for them."""
        return np.concatenate([mgpu.to_numpy(x) for x in self
                               if x is not None]).view(HostArray)

    def backward(self) -> None:
        """`mgpu.backward` of these losses."""
        mgpu.backward(self)

    def as_in_context(self, ctx: Any) -> "Rows":
        """Itself, where it is on `ctx` already; else ValueError."""
        if len(_contexts(ctx)) != len(self):
            raise ValueError(
                f"rows stay on the devices that they are on; received {ctx!r}"
                f" for rows on {len(self)} devices. Cut the batch once, with "
                "all contexts.")
        return self

    as_in_ctx = as_in_context


class HostArray(np.ndarray):
    """A NumPy array with the methods by which a script leaves the host."""

    def as_in_context(self, ctx: Any) -> Rows:
        """Cut the rows over the contexts, which may be one: see
        `mgpu.split_batch`. The shards are copies."""
        return split_and_load(self, ctx, even_split=False)

    as_in_ctx = as_in_context

    def asnumpy(self) -> np.ndarray:
        """The array itself."""
        return self

    def asscalar(self) -> Any:
        """Its only element. ValueError where it has others."""
        return self.item()


def _contexts(ctx: Any) -> list[Any]:
    return list(ctx) if isinstance(ctx, (list, tuple)) else [ctx]


def split_and_load(data: Any, ctx_list: Any, batch_axis: int = 0,
                   even_split: bool = True) -> Rows:
    """`mgpu.split_and_load`, as `Rows`; `ctx_list` may be one context."""
    return Rows(mgpu.split_and_load(data, _contexts(ctx_list), batch_axis,
                                    even_split))


# -- names --------------------------------------------------------------------

class Names(Hints):
    """A module of MXNet's with the names that have a meaning here."""

    def __init__(self, module: str, hints: Mapping[str, str], **names: Any):
        self.__name__ = module
        self.__dict__.update(names, _hints=hints)

    def __dir__(self) -> list[str]:
        return sorted(set(vars(self)) - {"_hints", "__name__"})

    def __repr__(self) -> str:
        return f"<{self.__name__} of MXNet in mgpu: {', '.join(dir(self))}>"


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
    return mgpu.initialize(net, _contexts(cpu(0) if ctx is None else ctx),
                           init, **options)


def _over_devices(loss: type[losses.Loss]) -> type[losses.Loss]:
    """`loss`, which takes `Rows` too, and returns `Rows` for them."""
    class OverDevices(loss):        # type: ignore[valid-type, misc]
        def __call__(self, pred: Any, label: Any, *more: Any,
                     **named: Any) -> Any:
            if not isinstance(label, Rows):
                return super().__call__(pred, label, *more, **named)
            cut = {name: x for name, x in named.items()
                   if isinstance(x, Rows)}
            whole = {name: x for name, x in named.items() if name not in cut}
            of_one = super().__call__

            def one(*columns: Any) -> Any:
                places = len(columns) - len(cut)
                return of_one(*columns[:places], **whole, **dict(zip(
                    cut, columns[places:])))
            return Rows(mgpu.parallel(one, pred, label, *more,
                                      *cut.values()))

    OverDevices.__name__ = OverDevices.__qualname__ = loss.__name__
    OverDevices.__doc__ = loss.__doc__
    return OverDevices


# -- data ---------------------------------------------------------------------

class ArrayDataset:
    """Rows of arrays of equal lengths, as Gluon's: an entry is a tuple of a
    row of each; of one array, its row."""

    def __init__(self, *arrays: Any):
        if not arrays or len({len(x) for x in arrays}) != 1:
            raise ValueError(
                "a data set has arrays of one length; received lengths "
                f"{[len(x) for x in arrays]}. Give each row its label.")
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, i: Any) -> Any:
        row = tuple(np.asarray(x[i]) for x in self._arrays)
        return row if len(row) > 1 else row[0]

    def transform(self, fn: Callable[..., Any], lazy: bool = True) -> Any:
        """``fn(*row)`` in the place of each row; where it is read, or now."""
        changed = _Transformed(self, fn)
        return changed if lazy else _Entries(
            [changed[i] for i in range(len(self))])

    def transform_first(self, fn: Callable[[Any], Any], lazy: bool = True
                        ) -> Any:
        """``fn`` of the first array of each row; the others stay."""
        return self.transform(lambda x, *more: (fn(x), *more) if more
                              else fn(x), lazy)


class _Transformed(ArrayDataset):
    def __init__(self, source: Any, fn: Callable[..., Any]):
        self._source, self._fn = source, fn

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: Any) -> Any:
        row = self._source[i]
        return self._fn(*row) if isinstance(row, tuple) else self._fn(row)


class _Entries(ArrayDataset):
    def __init__(self, entries: Sequence[Any]):
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: Any) -> Any:
        return self._entries[i]


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
        What becomes of the rows that are left at the end of an epoch.
    batchify_fn : callable, optional
        Makes a batch of a list of entries. Default: stacks the arrays.
    num_workers, pin_memory, thread_pool, timeout
        Taken and not used: `mgpu.prefetch` draws batches ahead.

    Yields
    ------
    list of HostArray, or one of them
    """

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool = False,
                 last_batch: str = "keep",
                 batchify_fn: Callable[[list[Any]], Any] | None = None,
                 num_workers: int = 0, pin_memory: bool = False,
                 thread_pool: bool = False, timeout: int = 120):
        self._dataset, self._shuffle = dataset, bool(shuffle)
        self._size = arguments.batch_size(batch_size)
        self._last = one_of("last_batch", last_batch,
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
    return np.stack([np.asarray(x) for x in entries]).view(HostArray)


# -- the modules --------------------------------------------------------------

_NETWORKS = "mxnet.gluon or torch.nn: a network is that of one framework"
_ARRAYS = "NumPy arrays, or mgpu.put(x, device)"

init = initializers
metric = metrics
autograd = Names("autograd", {
    "grad": "mgpu.backward and mgpu.grad",
    "train_mode": "autograd.record(), inside which layers train",
    "predict_mode": "autograd.pause(), inside which layers predict"},
    record=mgpu.record, pause=mgpu.no_grad, backward=mgpu.backward)
nd = Names("nd", {
    "array": _ARRAYS, "zeros": _ARRAYS, "ones": _ARRAYS,
    "save": "Replicas.save", "load": "Replicas.load"},
    waitall=mgpu.waitall)
random = Names("random", {}, seed=mgpu.seed)
gluon = Names(
    "gluon", {"nn": _NETWORKS, "rnn": _NETWORKS, "Block": _NETWORKS,
              "HybridBlock": _NETWORKS, "model_zoo": _NETWORKS,
              "SymbolBlock": "mgpu.from_gluon"},
    Trainer=mgpu.Trainer, Parameter=mgpu.Parameter, metric=metrics,
    loss=Names("gluon.loss", {}, Loss=losses.Loss, **{
        name: _over_devices(cls) for name, cls in vars(losses).items()
        if isinstance(cls, type) and issubclass(cls, losses.Loss)
        and cls is not losses.Loss}),
    utils=Names("gluon.utils", {"download": "mgpu.datasets"},
                split_and_load=split_and_load, split_data=mgpu.split_data,
                clip_global_norm=mgpu.clip_global_norm),
    data=Names("gluon.data", {"vision": "mgpu.datasets"},
               ArrayDataset=ArrayDataset, DataLoader=DataLoader))
