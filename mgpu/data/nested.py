"""Nested data: arrays in lists, tuples, deques and mappings.

An array is an object with a ``shape`` other than a NumPy scalar, or a nested
list of numbers, which is converted as by `Backend.put`.
"""
from collections import UserDict, UserString, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np

from mgpu.backends import containers, messages


class OnDevices:
    """The shards of a batch as one object.

    Functions that take a list of shards accept it, and return an object of
    the same class.

    Attributes
    ----------
    shards : list
        A native array per device, or None.
    """

    shards: list[Any]

    def like(self, results: list[Any]) -> Any:
        """A new object with the shards `results`; a tuple of objects if the
        shards are tuples or lists."""
        raise NotImplementedError


def shards_of(x: Any) -> Any:
    """The list of shards of `x`; or `x`, if it is a list."""
    return x.shards if isinstance(x, OnDevices) else x


def is_array(data: Any) -> bool:
    """Whether `data` has a shape."""
    # Of the type: MXNet computes the shape of an array each time.
    return (hasattr(type(data), "shape") or hasattr(data, "shape")) \
        and not isinstance(data, np.generic)


def _is_numbers(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(
        isinstance(v, (Number, np.bool_)) or _is_numbers(v) for v in data)


def entries_of(data: Any) -> list[Any] | None:
    """The entries of a container; None for arrays and other objects."""
    if is_array(data) or _is_numbers(data) \
            or not isinstance(data, (list, tuple, deque, Mapping)):
        return None
    _, values = containers.parts(_known(data)) or ((), [])
    return values


def _known(data: Any) -> Any:
    """`data`, or a dict if it is a read-only mapping."""
    return dict(data) if not isinstance(data, (list, tuple, dict, UserDict)) \
        and isinstance(data, Mapping) else data


def rebuild(data: Any, entries: Sequence[Any]) -> Any:
    """A container of the type of `data` with other entries. Mappings other
    than dict and UserDict become a dict."""
    keys, _ = containers.parts(_known(data)) or ((), ())
    return containers.rebuild(_known(data), keys, entries)


def split_leaves(function: Callable[[Any], list[Any]], data: Any, k: int,
                 entries: Callable[[Any], list[Any]] | None = None,
                 whole: Callable[[Any], None] | None = None
                 ) -> list[Any]:
    """Split nested data into `k` structures.

    Parameters
    ----------
    function : callable
        Array -> list of `k` values.
    data : nested data
    k : int
    entries : callable, optional
        Applied instead of `function` to each list for which `is_listed`.
    whole : callable, optional
        Called with each object that is not split, and with each tuple without
        arrays.

    Returns
    -------
    list
        `k` structures like `data`. Structure i holds value i of each result,
        and the objects that are not split.
    """
    if is_array(data):
        return function(data)
    if _is_numbers(data):
        return function(messages.host_array(data))
    if entries is not None and is_listed(data):
        return entries(data)
    inside = entries_of(data)
    if whole is not None and (inside is None or type(data) in (tuple, deque)
                              and leaves(data) and not arrays_in(data)):
        whole(data)
    if inside is None:
        return [data] * k
    columns = [split_leaves(function, x, k, entries, whole) for x in inside]
    return [rebuild(data, [column[i] for column in columns])
            for i in range(k)]


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """`data` with each array replaced by ``function(array)``."""
    mapped, = split_leaves(lambda x: [function(x)], data, 1)
    return mapped


def leaves(data: Any) -> list[Any]:
    """The objects in `data` that are not containers, in order, except
    None."""
    inside = entries_of(data)
    if inside is None:
        return [] if data is None else [data]
    return [leaf for entry in inside for leaf in leaves(entry)]


def arrays_in(data: Any) -> list[Any]:
    """The arrays in `data`, in order."""
    return [x if is_array(x) else messages.host_array(x)
            for x in leaves(data) if is_array(x) or _is_numbers(x)]


def shapes_of(data: Any) -> list[tuple[int, ...]]:
    """The shape of each array in `data`."""
    return [tuple(x.shape) for x in arrays_in(data)]


def is_listed(data: Any) -> bool:
    """Whether `data` is a list without arrays: strings or other objects, one
    for each example."""
    return isinstance(data, list) and not _is_numbers(data) \
        and bool(leaves(data)) and not arrays_in(data)


def lists_in(data: Any) -> Iterator[list[Any]]:
    """The lists in `data`, except arrays and the contents of lists for which
    `is_listed`."""
    inside = entries_of(data)
    if inside is not None and isinstance(data, list):
        yield data
    if inside is not None and not is_listed(data):
        for entry in inside:
            yield from lists_in(entry)


def axis_in(shape: Sequence[int], batch_axis: int) -> int:
    """The axis of the examples in an array of `shape`, with at least one
    axis: `batch_axis`, or the last axis if there are fewer axes."""
    return min(batch_axis, len(shape) - 1)


def row_counts(data: Any, batch_axis: int = 0) -> list[int]:
    """Number of examples of each array in `data`."""
    return [shape[axis_in(shape, batch_axis)] if shape else 1
            for shape in (x.shape for x in arrays_in(data))]


def rows_inside(x: Any) -> list[int]:
    """Numbers of examples that an object may hold which is not split: its
    length and those of its arrays, if it is a sequence; or the lengths of the
    arrays in its attributes."""
    if isinstance(x, (str, UserString, bytes, bytearray, ModuleType)) \
            or callable(x):
        return []
    if isinstance(x, Sequence):
        return [len(x), *row_counts(tuple(x))]
    return row_counts(getattr(x, "__dict__", {}))


class NoRows(list[None]):
    """The results of the devices, None for each, if all examples of a batch
    are on other processes."""


def is_empty(data: Any) -> bool:
    """Whether `data` holds no examples: its first array has no elements, or
    the first of several inputs is empty (None, an empty list)."""
    first = data[0] if isinstance(data, tuple) and data else data
    if is_array(first):
        return 0 in first.shape
    return not leaves(first) or 0 in next(iter(shapes_of(data)), ())


def rows_of(data: Any, batch_axis: int = 0) -> int | None:
    """Number of examples of the first array in `data`, or None."""
    return next(iter(row_counts(data, batch_axis)), None)


def examples_of(labels: Any, batch_axis: int = 0) -> list[int]:
    """Possible numbers of examples of `labels`: `rows_of`, and the length of
    a list of dicts, of lists, or of arrays of different lengths."""
    found = [rows_of(labels, batch_axis) or 0]
    if isinstance(labels, list) and (
            any(isinstance(x, (dict, list, tuple)) for x in labels)
            or len(set(row_counts(labels, batch_axis))) > 1):
        found.append(len(labels))
    return found


def as_pair(batch: Any, filled: bool = True) -> tuple[Any, Any]:
    """A batch of a data iterator as a pair (X, y).

    A dict becomes (batch, None); the network and the loss read its entries by
    name. A DataBatch of MXNet becomes its inputs and labels, `unpadded` if
    `filled`.

    Raises
    ------
    TypeError
        Another type of batch.
    ValueError
        A DataBatch without labels.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        return batch, None
    if all(hasattr(batch, name) for name in ("data", "label", "pad")) \
            and isinstance(batch.data, (list, tuple)):
        if not batch.label:
            raise ValueError(
                "a data iterator must yield inputs and labels; received a "
                f"{type(batch).__name__} without labels. Create the iterator "
                "with label=; for an autoencoder, label the inputs.")
        pad = batch.pad if filled else 0
        return unpadded(batch.data, pad), unpadded(batch.label, pad)
    raise TypeError(
        "a data iterator must yield pairs (X, y) or dicts; "
        f"received a {type(batch).__name__}. Convert to pairs: ((b['x'], "
        "b['y']) for b in batches), or ((X, X) for X in batches).")


def is_whole(X: Any, y: Any) -> bool:
    """Whether `X` is a whole batch: a dict whose entries the network and the
    loss read by name."""
    return y is None and isinstance(X, Mapping)


def unpadded(arrays: Any, pad: int | None) -> Any:
    """The arrays of an MXNet DataBatch without the last `pad` examples; a
    tuple if there are several."""
    cut = [x[:x.shape[0] - pad] if pad else x for x in arrays]
    return cut[0] if len(cut) == 1 else tuple(cut)


def as_inputs(shard: Any) -> tuple[Any, ...]:
    """The positional arguments of a network. A tuple or list (a torch or
    Gluon DataLoader yields lists) holds several inputs."""
    return tuple(shard) if type(shard) in (tuple, list) else (shard,)


def cast_floats(data: Any, dtype: str) -> Any:
    """`data` as NumPy arrays, with floating-point arrays cast to `dtype`."""
    def cast(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.astype(dtype) if x.dtype.kind == "f" else x
    return map_leaves(cast, data)
