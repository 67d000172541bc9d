"""Cutting a batch into shards, one per device."""
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from mgpu.backends import get_backend
from mgpu.device import Device, as_devices


def shard_bounds(n: int, k: int, weights: Optional[Sequence[float]] = None
                 ) -> List[Tuple[int, int]]:
    """Where `k` shards of `n` rows begin and end: pure integers.

    Without weights the first ``n % k`` shards get one row more (Gluon 1.9.1,
    ``gluon/utils.py``, ``split_data``). With `weights`, shard i gets its
    share ``n * w[i] / sum(w)`` rounded down; rows left over go one each to
    the largest remainders, the earlier shard first.

    Examples
    --------
    >>> shard_bounds(9, 4)
    [(0, 3), (3, 5), (5, 7), (7, 9)]
    >>> shard_bounds(9, 2, weights=[2, 1])
    [(0, 6), (6, 9)]
    """
    if weights is None:
        sizes = [n // k + (i < n % k) for i in range(k)]
    else:
        w = [float(weight) for weight in weights]
        if len(w) != k or not all(0 < x < float("inf") for x in w):
            raise ValueError(
                f"weights must be {k} positive numbers, one per device; "
                f"received {list(weights)!r}.")
        exact = [n * x / sum(w) for x in w]
        sizes = [int(x) for x in exact]
        order = sorted(range(k), key=lambda i: (sizes[i] - exact[i], i))
        for i in order[:n - sum(sizes)]:
            sizes[i] += 1
    ends = [sum(sizes[:i + 1]) for i in range(k)]
    return [(end - size, end) for end, size in zip(ends, sizes)]


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or get_backend().is_native(x) \
        or hasattr(x, "__dlpack__") or type(x).__module__.startswith("mxnet")


def map_leaves(function: Callable[[Any], List[Any]], data: Any, k: int
               ) -> List[Any]:
    """Apply `function`, array -> list of `k`, to each array in `data`; the
    result is a list of `k` structures like `data` (tuples, lists, dicts and
    named tuples; what is no array goes to each of them as it is)."""
    if _is_array(data):
        return function(data)
    if isinstance(data, dict):
        parts = {key: map_leaves(function, v, k) for key, v in data.items()}
        return [type(data)((key, part[i]) for key, part in parts.items())
                for i in range(k)]
    if isinstance(data, (list, tuple)):
        if isinstance(data, list) and data and all(
                isinstance(v, (int, float)) for v in _deepest(data)):
            return function(np.asarray(data))   # numbers: Gluon takes them
        columns = [map_leaves(function, v, k) for v in data]
        rows = [[column[i] for column in columns] for i in range(k)]
        if hasattr(data, "_fields"):
            return [type(data)(*row) for row in rows]
        return [type(data)(row) for row in rows]
    return [data] * k


def _deepest(data: Any) -> List[Any]:
    return [x for v in data for x in _deepest(v)] \
        if isinstance(data, list) else [data]


def split_and_load(data: Any, devices: Any, batch_axis: int = 0,
                   even_split: bool = True,
                   weights: Optional[Sequence[float]] = None) -> List[Any]:
    """Cut `data` along `batch_axis` and copy shard i to ``devices[i]``.

    Gluon 1.9.1's function, on both backends.

    Parameters
    ----------
    data : native array, NumPy array, numbers, or a tuple, list, dict or
        named tuple of them
        Nested data are split leaf by leaf. NumPy data are sliced on the
        host, so that a device receives its own slice alone.
    devices : sequence of devices
    batch_axis : int
    even_split : bool
        Refuse a batch that does not divide evenly. If False, see
        `shard_bounds`.
    weights : sequence of float, optional
        Shard sizes in proportion, for devices of unequal power; implies
        ``even_split=False``.

    Returns
    -------
    list
        One shard per device, always a fresh copy, dtype kept. Shards may be
        empty when there are fewer rows than devices.

    Raises
    ------
    ValueError
        An uneven batch with ``even_split=True``; wrong weights.
    TypeError
        An array of the other framework.
    """
    devices = as_devices(devices)
    k, backend = len(devices), get_backend()

    def split(x: Any) -> List[Any]:
        shape = tuple(x.shape)
        if not -len(shape) <= batch_axis < len(shape):
            raise ValueError(
                f"data with shape {shape} has no axis {batch_axis} to split "
                "along; use a batch_axis that it has.")
        size = shape[batch_axis]
        if even_split and weights is None and size % k != 0:
            raise ValueError(
                f"data with shape {shape} cannot be evenly split into {k} "
                f"slices along axis {batch_axis}. Use a batch size that's "
                f"multiple of {k} or set even_split=False to allow uneven "
                "partitioning of data.")
        return [backend.put(_rows(x, batch_axis, begin, end), device)
                for (begin, end), device
                in zip(shard_bounds(size, k, weights), devices)]
    return map_leaves(split, data, k)


def _rows(x: Any, axis: int, begin: int, end: int) -> Any:
    if isinstance(x, np.ndarray):
        index = (slice(None),) * (axis % x.ndim) + (slice(begin, end),)
        return x[index]
    if get_backend().is_native(x) and (axis != 0 or begin == end):
        return get_backend().ops.slice_axis(x, axis, begin, end)
    return x[begin:end]     # put refuses the other framework's arrays


def rows_of(data: Any) -> Optional[int]:
    """The number of rows of the first array in `data`."""
    found: List[int] = []
    map_leaves(lambda x: found.append(len(x)) or [None], data, 1)
    return found[0] if found else None


def split_batch(X: Any, y: Any, devices: Any, even_split: bool = False,
                weights: Optional[Sequence[float]] = None
                ) -> Tuple[List[Any], List[Any]]:
    """Split features and labels (the text's function, uneven by default).

    Returns
    -------
    (list, list)
        One shard of each per device; with fewer rows than devices the last
        shards are empty.

    Raises
    ------
    ValueError
        `X` and `y` of different lengths, or an empty batch.
    """
    n, m = rows_of(X), rows_of(y)
    if n != m:
        raise ValueError(f"X and y must have equally many rows; received {n} "
                         f"and {m}.")
    if not n:
        raise ValueError("a batch needs at least one row; received an empty "
                         "one.")
    return (split_and_load(X, devices, 0, even_split, weights),
            split_and_load(y, devices, 0, even_split, weights))
