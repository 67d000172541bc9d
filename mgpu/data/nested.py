"""Nested data: arrays in lists, tuples, deques and mappings.

An array is whatever has a ``shape`` (but for NumPy's scalars), and a list of
numbers, or of such lists, which becomes one as `Backend.put` makes it.
"""
from collections import UserDict, UserString, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from types import ModuleType
from typing import Any

import numpy as np

from mgpu.backends import containers, messages


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


def is_array(data: Any) -> bool:
    """Whether `data` has a shape."""
    # Of the type: MXNet computes the shape of an array each time.
    return (hasattr(type(data), "shape") or hasattr(data, "shape")) \
        and not isinstance(data, np.generic)


def _is_numbers(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(
        isinstance(v, (Number, np.bool_)) or _is_numbers(v) for v in data)


def entries_of(data: Any) -> list[Any] | None:
    """What a container holds; None for arrays and for all else."""
    if is_array(data) or _is_numbers(data) \
            or not isinstance(data, (list, tuple, deque, Mapping)):
        return None
    _, values = containers.parts(_known(data)) or ((), [])
    return values


def _known(data: Any) -> Any:
    """`data`; a dict of a mapping that cannot be written to."""
    return dict(data) if not isinstance(data, (list, tuple, dict, UserDict)) \
        and isinstance(data, Mapping) else data


def rebuild(data: Any, entries: Sequence[Any]) -> Any:
    """A container like `data` of other entries. A mapping that is neither a
    dict nor a UserDict becomes a dict."""
    keys, _ = containers.parts(_known(data)) or ((), ())
    return containers.rebuild(_known(data), keys, entries)


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
    """`data` with ``function(array)`` in the place of each array."""
    mapped, = split_leaves(lambda x: [function(x)], data, 1)
    return mapped


def leaves(data: Any) -> list[Any]:
    """Everything in `data` that holds no other data, in order; without
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
    """Whether `data` is a list that holds no array: of text, or objects, an
    entry for each row."""
    return isinstance(data, list) and not _is_numbers(data) \
        and bool(leaves(data)) and not arrays_in(data)


def lists_in(data: Any) -> Iterator[list[Any]]:
    """The lists in `data`, but for those that are arrays and for what is in
    those that are `is_listed`."""
    inside = entries_of(data)
    if inside is not None and isinstance(data, list):
        yield data
    if inside is not None and not is_listed(data):
        for entry in inside:
            yield from lists_in(entry)


def axis_in(shape: Sequence[int], batch_axis: int) -> int:
    """The axis of the examples in an array of `shape`, which has one axis or
    more: `batch_axis`, or the last axis of an array that has fewer."""
    return min(batch_axis, len(shape) - 1)


def row_counts(data: Any, batch_axis: int = 0) -> list[int]:
    """The number of rows of each array in `data`."""
    return [shape[axis_in(shape, batch_axis)] if shape else 1
            for shape in (x.shape for x in arrays_in(data))]


def rows_inside(x: Any) -> list[int]:
    """The numbers of rows that an object which is no nested data may hold:
    its length and those of the arrays in it, if it is a sequence, or those
    of the arrays in its attributes."""
    if isinstance(x, (str, UserString, bytes, bytearray, ModuleType)) \
            or callable(x):
        return []
    if isinstance(x, Sequence):
        return [len(x), *row_counts(tuple(x))]
    return row_counts(getattr(x, "__dict__", {}))


class NoRows(list[None]):
    """What devices return for a batch of which this process has no rows, and
    other processes have: None for each."""


def is_empty(data: Any) -> bool:
    """Whether `data` holds no rows: the first array in it has no elements,
    or the first of several inputs holds nothing (None, an empty list)."""
    first = data[0] if isinstance(data, tuple) and data else data
    if is_array(first):
        return 0 in first.shape
    return not leaves(first) or 0 in next(iter(shapes_of(data)), ())


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


def as_pair(batch: Any, filled: bool = True) -> tuple[Any, Any]:
    """A batch of a data iterator, (X, y); (batch, None) for a dict, of which
    the network and the loss take what they name; of a DataBatch of MXNet's
    kind the inputs and labels, `unpadded` if it is `filled`.

    Raises
    ------
    TypeError
        Any other batch.
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
                "a data iterator gives inputs and labels; received a "
                f"{type(batch).__name__} without labels. Make the iterator "
                "with label=, the inputs again where they are what is learnt.")
        pad = batch.pad if filled else 0
        return unpadded(batch.data, pad), unpadded(batch.label, pad)
    raise TypeError(
        "a data iterator gives batches that are pairs, (X, y), or dicts; "
        f"received a {type(batch).__name__}. Make pairs of them: ((b['x'], "
        "b['y']) for b in batches), or ((X, X) for X in batches).")


def is_whole(X: Any, y: Any) -> bool:
    """Whether `X` is a whole batch, a dict, of which the network and the loss
    take what they name."""
    return y is None and isinstance(X, Mapping)


def unpadded(arrays: Any, pad: int | None) -> Any:
    """`arrays` of a DataBatch of MXNet's kind without their last `pad` rows;
    a tuple where there are several."""
    cut = [x[:x.shape[0] - pad] if pad else x for x in arrays]
    return cut[0] if len(cut) == 1 else tuple(cut)


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
