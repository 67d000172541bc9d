"""Nested data: arrays in tuples, lists, dicts and named tuples.

An array is whatever has a ``shape`` (but for NumPy's scalars), and a list of
numbers, or of such lists, which becomes one as `Backend.put` makes it.
"""
import copy
from collections import UserDict, UserString
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Number
from types import MemberDescriptorType, ModuleType
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends.base import Kwargs


class OnDevices:
    """The parts of a batch, one for each device, as one object. What takes a
    list of parts takes it, and gives such an object for it.

    Attributes
    ----------
    shards : list
        A native array for each device, or None.
    """

    shards: list[Any]

    def like(self, results: list[Any]) -> Any:
        """One such object of `results`, which has an entry for each device;
        a tuple of them where the entries are tuples or lists."""
        raise NotImplementedError


def shards_of(x: Any) -> Any:
    """The list of parts that `x` has, or is."""
    return x.shards if isinstance(x, OnDevices) else x


def split_leaves(function: Callable[[Any], list[Any]], data: Any, k: int,
                 entries: Callable[[Any], list[Any]] | None = None,
                 whole: Callable[[Any], None] | None = None
                 ) -> list[Any]:
    """Apply `function`, array -> list of `k`, to each array in `data`, and
    `entries` to each list that `is_listed`; `whole` sees each tuple without
    arrays, and whatever else goes to all.

    Returns
    -------
    list
        `k` structures like `data`; number i holds entry i of each result.
        Anything else goes to each of them as it is.
    """
    if _is_array(data):
        return function(data)
    if isinstance(data, Mapping):
        own = isinstance(data, (dict, UserDict))    # what can be written to
        copies: list[Any] = [copy.copy(data) if own else dict(data)
                             for _ in range(k)]
        for key, value in data.items():
            for one, part in zip(copies, split_leaves(function, value, k,
                                                    entries, whole),
                                 strict=True):
                one[key] = part
        return copies
    if isinstance(data, (list, tuple)):
        if _is_numbers(data):
            return function(messages.host_array(data))
        if entries is not None and is_listed(data):
            return entries(data)
        if whole is not None and type(data) is tuple and leaves(data) \
                and not row_counts(data):
            whole(data)
        columns = [split_leaves(function, v, k, entries, whole)
                   for v in data]
        rows = [[column[i] for column in columns] for i in range(k)]
        if hasattr(data, "_fields"):
            return [_made_anew(data, row) for row in rows]
        return [type(data)(row) for row in rows]
    if whole is not None:
        whole(data)
    return [data] * k


def _is_array(data: Any) -> bool:
    # Of the type: MXNet computes the shape of an array each time.
    return (hasattr(type(data), "shape") or hasattr(data, "shape")) \
        and not isinstance(data, np.generic)


def _made_anew(data: Any, row: list[Any]) -> Any:
    """A named tuple like `data` of the parts in `row`."""
    try:
        return type(data)(*row)
    except Exception as error:
        raise TypeError(
            "a named tuple is cut part by part, and made of its parts anew; "
            f"received a {type(data).__name__}, which is not made so. Pass "
            "its parts in a plain tuple or dict, each with a row for each "
            "example, and make it in the network's forward: of padded "
            "sequences and their lengths, for example.") from error


def _is_numbers(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(
        isinstance(v, (Number, np.bool_)) or _is_numbers(v) for v in data)


def is_listed(data: Any) -> bool:
    """Whether `data` is a list that holds no array: of text, or objects, an
    entry for each row."""
    return isinstance(data, list) and not _is_numbers(data) \
        and bool(leaves(data)) and not row_counts(data)


def lists_in(data: Any) -> Iterator[list[Any]]:
    """The lists in `data`, but for those that are arrays and for what is in
    those that are `is_listed`."""
    if isinstance(data, list) and not _is_numbers(data):
        yield data
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple) or isinstance(data, list) \
            and not _is_numbers(data) and not is_listed(data):
        for entry in data:
            yield from lists_in(entry)


def shapes_of(data: Any) -> list[tuple[int, ...]]:
    """The shape of each array in `data`."""
    found: list[tuple[int, ...]] = []
    map_leaves(lambda x: found.append(tuple(x.shape)), data)
    return found


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """`data` with ``function(array)`` in the place of each array."""
    mapped, = split_leaves(lambda x: [function(x)], data, 1)
    return mapped


def leaves(data: Any) -> list[Any]:
    """Everything in `data` that holds no other data, in order; without
    None."""
    if _is_array(data):
        return [data]
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (list, tuple)) and not _is_numbers(data):
        return [leaf for entry in data for leaf in leaves(entry)]
    return [] if data is None else [data]


def axis_in(shape: Sequence[int], batch_axis: int) -> int:
    """The axis of the examples in an array of `shape`, which has one axis or
    more: `batch_axis`, or the last axis of an array that has fewer."""
    return min(batch_axis, len(shape) - 1)


def row_counts(data: Any, batch_axis: int = 0) -> list[int]:
    """The number of rows of each array in `data`."""
    found: list[int] = []

    def count(x: Any) -> None:
        shape = x.shape
        found.append(shape[axis_in(shape, batch_axis)] if shape else 1)
    if _is_array(data):
        count(data)
    else:
        map_leaves(count, data)
    return found


def rows_inside(x: Any, depth: int = 3) -> list[int]:
    """The numbers of rows that an object which is no nested data may hold:
    its length, if it is a sequence, those of the arrays in its attributes,
    or of those in a sequence or set."""
    if isinstance(x, (str, UserString, bytes, bytearray, Number, type(None),
                      ModuleType)) or callable(x) or depth == 0:
        return []
    found: list[int] = []
    if isinstance(x, (Set, Sequence)):
        inside: Any = tuple(x)
        found = [len(x)] if isinstance(x, Sequence) else []
    else:
        inside = {**{name: getattr(x, name, None)
                     for one in type(x).__mro__
                     for name, slot in vars(one).items()
                     if isinstance(slot, MemberDescriptorType)},
                  **getattr(x, "__dict__", {})}
    return found + row_counts(inside) + [
        n for leaf in leaves(inside) if not hasattr(leaf, "shape")
        and not isinstance(leaf, list)
        for n in rows_inside(leaf, depth - 1)]


class NoRows(list[None]):
    """What devices return for a batch of which this process has no rows, and
    other processes have: None for each."""


def is_empty(data: Any) -> bool:
    """Whether `data` holds no rows: the first array in it has no elements,
    or the first of several inputs is None or an empty list, or all of those
    by name are None."""
    first = data[0] if isinstance(data, tuple) and data else data
    if _is_array(first):
        return 0 in first.shape
    if isinstance(first, Kwargs) and all(x is None for x in first.values()):
        first = None
    if first is None or isinstance(first, (list, tuple)) and not first:
        return True
    shapes: list[Any] = []
    map_leaves(lambda x: shapes.append(x.shape), data)
    return bool(shapes) and 0 in shapes[0]


def rows_of(data: Any, batch_axis: int = 0) -> int | None:
    """The number of rows of the first array in `data`."""
    return next(iter(row_counts(data, batch_axis)), None)


def examples_of(labels: Any, batch_axis: int = 0) -> list[int]:
    """How many examples `labels` may be of: `rows_of` them, or one for each
    entry of a list of dicts, of lists, or of arrays of different lengths."""
    found = [rows_of(labels, batch_axis) or 0]
    if isinstance(labels, list) and (
            any(isinstance(x, (dict, list, tuple)) for x in labels)
            or len(set(row_counts(labels, batch_axis))) > 1):
        found.append(len(labels))
    return found


def as_pair(batch: Any) -> tuple[Any, Any]:
    """A batch of a data iterator, (X, y); (batch, None) for a dict, of which
    the network and the loss take what they name; `pair_of` a DataBatch of
    MXNet's kind. TypeError for any other."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        return batch, None
    if all(hasattr(batch, name) for name in ("data", "label", "pad")) \
            and isinstance(batch.data, (list, tuple)):
        return pair_of(batch, batch.pad)
    pair = "(b.data[0], b.label[0])" if hasattr(batch, "label") \
        and hasattr(batch, "data") else "(b['x'], b['y'])"
    raise TypeError(
        "a data iterator gives batches that are pairs, (X, y), or dicts; "
        "received "
        + (f"{len(batch)} things" if isinstance(batch, (tuple, list))
           else f"a {type(batch).__name__}")
        + f". Make pairs of them: ({pair} for b in batches), or "
        "((X, X) for X in batches).")


def is_whole(X: Any, y: Any) -> bool:
    """Whether `X` is a whole batch, a dict, of which the network and the loss
    take what they name."""
    return y is None and isinstance(X, Mapping)


def unpadded(arrays: Any, pad: int | None) -> Any:
    """`arrays` of a DataBatch of MXNet's kind without their last `pad` rows;
    a tuple where there are several."""
    cut = [x[:x.shape[0] - pad] if pad else x for x in arrays]
    return cut[0] if len(cut) == 1 else tuple(cut)


def pair_of(batch: Any, pad: int | None) -> tuple[Any, Any]:
    """`unpadded` inputs and labels of a DataBatch of MXNet's kind.

    Raises
    ------
    ValueError
        No labels.
    """
    if not batch.label:
        raise ValueError(
            "a data iterator gives inputs and labels; received a "
            f"{type(batch).__name__} without labels. Make the iterator with "
            "label=, the inputs again where they are what is learnt.")
    return unpadded(batch.data, pad), unpadded(batch.label, pad)


def as_inputs(shard: Any) -> tuple[Any, ...]:
    """What a network is called with. A tuple or list of arrays (a batch of a
    torch or Gluon DataLoader is a list) stands for several inputs."""
    return tuple(shard) if type(shard) in (tuple, list) else (shard,)


def cast_floats(data: Any, dtype: str) -> Any:
    """NumPy copies of all arrays, floats in `dtype`; others as they are."""
    def cast(x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.astype(dtype) if x.dtype.kind == "f" else x
    return map_leaves(cast, data)
