"""Arrays of a Gluon script: batches on their contexts, and on the host."""
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import mgpu
from mgpu.backends.device import as_devices
from mgpu.data.nested import OnDevices
from mgpu.utils.arguments import Hints

NUMBERS = int, float, np.number


#: by NumPy's function: the operator of native arrays
_OPERATORS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add, np.subtract: operator.sub,
    np.multiply: operator.mul, np.divide: operator.truediv,
    np.power: operator.pow, np.negative: operator.neg}


class Rows(Hints, OnDevices, NDArrayOperatorsMixin):
    """A batch on its contexts, as one array is in a Gluon script.

    ``len`` and `shape` are those of the whole batch. Numbers and other `Rows`
    are added, multiplied and so on element by element, on each device.

    Attributes
    ----------
    shards : list of native arrays
        One for each context; None where there are no rows.
    context : list of Device
    """

    _hints = dict.fromkeys(("asscalar", "item"), "mean().asscalar()")

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

    def asnumpy(self) -> np.ndarray:
        """All rows, a copy on the host; waits for them."""
        return np.concatenate(list(map(mgpu.to_numpy, self._own)))

    def mean(self) -> "HostArray":
        """The mean of all elements, a number on the host; waits for them."""
        return np.asarray(self.asnumpy().mean()).view(HostArray)

    def sum(self) -> "HostArray":
        """The sum of all elements, a number on the host; waits for them."""
        return np.asarray(self.asnumpy().sum()).view(HostArray)

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
            if not isinstance(x, (Rows, *NUMBERS)):
                raise TypeError(
                    "a batch on its contexts is joined with numbers and other "
                    f"batches; received {type(x).__name__}. Put an array on "
                    "the contexts first: x.as_in_context(ctx).")
            if isinstance(x, NUMBERS):
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


class HostArray(np.ndarray):
    """A NumPy array with the methods by which a script leaves the host."""

    def as_in_context(self, ctx: Any) -> Rows:
        """Cut the rows over the contexts, which may be one: see
        `mgpu.split_batch`. The shards are copies."""
        devices = as_devices(ctx)
        return Rows(mgpu.split_and_load(self, devices, even_split=False),
                    devices)

    as_in_ctx = as_in_context

    def asnumpy(self) -> np.ndarray:
        """A copy, as an array of NumPy's own class."""
        return np.array(self)

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        # A sum of all is a number, as NumPy's: `+=` makes a new one.
        return array[()] if not array.ndim else array.view(HostArray)

    def backward(self) -> NoReturn:
        """RuntimeError: it has no graph."""
        raise RuntimeError(
            "an array on the host has no graph; got backward() of one, such "
            "as the mean of losses. Call backward() of the losses of all "
            "examples, and trainer.step(batch_size), which divides.")

    def asscalar(self) -> Any:
        """Its only element. ValueError where it has others."""
        return self.item()
