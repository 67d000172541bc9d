"""Split a batch into shards, one per device."""
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from mgpu import distributed
from mgpu.backends import get_backend, messages
from mgpu.backends.device import Device, as_devices
from mgpu.data import nested
from mgpu.data.nested import (axis_in, is_listed, is_whole, leaves, lists_in,
                              row_counts, rows_inside, rows_of, shapes_of,
                              split_leaves)
from mgpu.utils import probes
from mgpu.utils.arguments import integer, is_integer, one_given

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = ["map_leaves", "rows_of", "shard_bounds", "split_and_load",
           "split_batch", "split_data"]

map_leaves = split_leaves       # the name in version 0.1


def shard_bounds(n: int, k: int, weights: Sequence[float] | None = None
                 ) -> list[tuple[int, int]]:
    """Bounds (start, stop) of `k` shards of `n` examples.

    Without weights, the first ``n % k`` shards have one more example (Gluon
    1.9.1, ``gluon/utils.py``, ``split_data``). With `weights`, shard i has
    ``n * w[i] / sum(w)`` examples, rounded down; the remaining examples go to
    the shards with the largest remainders, in case of ties to the first.

    Raises
    ------
    ValueError
        `n` or `k` is not an integer, or too small; `weights` are not `k`
        positive numbers.

    Examples
    --------
    >>> shard_bounds(9, 4)
    [(0, 3), (3, 5), (5, 7), (7, 9)]
    >>> shard_bounds(9, 2, weights=[2, 1])
    [(0, 6), (6, 9)]
    """
    if not (is_integer(n, 0) and is_integer(k, 1)):
        raise ValueError(f"n and k must be integers, n >= 0 and k >= 1; "
                         f"received n={n!r}, k={k!r}.")
    if weights is None:
        sizes = [n // k + (i < n % k) for i in range(k)]
    else:
        shares = _shares(weights, k)
        exact = [n * share for share in shares]
        sizes = [int(x) for x in exact]
        order = sorted(range(k), key=lambda i: (sizes[i] - exact[i], i))
        for i in order[:n - sum(sizes)]:
            sizes[i] += 1
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends))


def _shares(weights: Sequence[float], k: int) -> "list[Fraction]":
    from fractions import Fraction      # 4 ms of `import mgpu`
    try:    # Fraction raises for infinity and NaN
        exact = [Fraction(float(w)) for w in weights]
    except (TypeError, ValueError, OverflowError):
        exact = []
    if len(exact) != k or min(exact) <= 0:
        raise ValueError(f"weights must be {k} positive numbers, one per "
                         f"device; received {weights!r}.")
    return [w / sum(exact) for w in exact]


def split_data(data: Any, num_slice: int, batch_axis: int = 0,
               even_split: bool = True) -> list[Any]:
    """Split an array into `num_slice` slices along `batch_axis`, on its
    device, as ``gluon.utils.split_data``.

    Parameters
    ----------
    data : native or NumPy array
    num_slice : int
    batch_axis : int
    even_split : bool
        Whether to raise if the size is not divisible by `num_slice`. If
        False, see `shard_bounds` for the sizes.

    Returns
    -------
    list of arrays
        They may be views of `data`, and may be empty. Differentiable.

    Raises
    ------
    ValueError
        The size is not divisible, with ``even_split=True``.
    IndexError
        `data` has no axis `batch_axis`.
    TypeError
        `data` is an array of the other framework.
    """
    k = integer("num_slice", num_slice, 1)
    _check_dense(data)
    if not get_backend().is_native(data):
        messages.refuse_foreign(data, get_backend().name)
    return [_slice(data, batch_axis, begin, end) for begin, end in _bounds(
        k, even_split, None, tuple(data.shape), batch_axis)]


def _bounds(k: int, even: bool, weights: Sequence[float] | None,
            shape: tuple[int, ...], axis: int) -> list[tuple[int, int]]:
    """`shard_bounds` along `axis`. `even`: raise ValueError if the size is
    not divisible."""
    if even and shape[axis] % k != 0:
        raise ValueError(
            f"data with shape {shape} cannot be evenly split into {k} "
            f"slices along axis {axis}. Use a batch size that's "
            f"multiple of {k} or set even_split=False to allow uneven "
            "partitioning of data.")
    return shard_bounds(shape[axis], k, weights)


def split_and_load(data: Any, devices: Any = None, batch_axis: int = 0,
                   even_split: bool = True,
                   weights: Sequence[float] | None = None, *,
                   ctx_list: Any = None) -> list[Any]:
    """Split `data` along `batch_axis` and copy shard i to ``devices[i]``.

    As ``gluon.utils.split_and_load`` of Gluon 1.9.1, on both backends. NumPy
    data are sliced on the host, so a device receives only its own slice.

    Parameters
    ----------
    data : native array, NumPy array, list of numbers, or a tuple, list,
        dict, deque or named tuple of them
        Arrays in containers are split, and so are lists without arrays, such
        as strings, which have an entry for each example. Other objects,
        including tuples of strings or numbers, are passed to every device.
    devices, ctx_list : sequence of devices
        Pass one of them; `ctx_list` is Gluon's name.
    batch_axis : int
    even_split : bool
        Whether to raise if the batch size is not divisible by the number of
        devices. If False, see `shard_bounds` for the sizes.
    weights : sequence of float, optional
        Relative shard sizes, for devices of different speed. Implies
        ``even_split=False``.

    Returns
    -------
    list
        One shard per device, a copy of the same dtype (Gluon's function
        converts NumPy data to float32). Shards may be empty if there are
        fewer examples than devices. Differentiable.

    Raises
    ------
    ValueError
        The batch size is not divisible, with ``even_split=True``; invalid
        weights; a tuple without arrays, or another object, that holds as many
        entries or examples as the batch and would be passed to every device.
    TypeError
        `data` holds an array of the other framework, or no array.
    """
    devices = as_devices(one_given(devices=devices, ctx_list=ctx_list))
    _check_dense(data)
    if not row_counts(data):
        raise TypeError("data must hold an array to split; received "
                        f"{type(data).__name__}. Pass a native or NumPy "
                        "array, or a list of numbers.")
    return _split_and_load(data, devices, batch_axis, lambda _: batch_axis,
                           even_split, weights)


def _split_and_load(data: Any, devices: Sequence[Device], batch_axis: int,
                    axis_of: Callable[[tuple[int, ...]], int],
                    even_split: bool, weights: Sequence[float] | None
                    ) -> list[Any]:
    """`split_and_load` along ``axis_of(shape)`` of each array."""
    backend, k = get_backend(), len(devices)

    def load(x: Any, axis: int, begin: int, end: int, i: int) -> Any:
        with probes.mark(devices[i]):
            return backend.put(_slice(x, axis, begin, end), devices[i])
    with probes.stage("copy", "split", devices, lambda: shards):
        shards = _cut(data, k, axis_of, partial(
            _bounds, k, even_split and weights is None, weights), load,
            data, batch_axis)
    return shards


def _cut(data: Any, k: int, axis_of: Callable[[tuple[int, ...]], int],
         bounds_of: Callable[[tuple[int, ...], int],
                             Sequence[tuple[int, int]]],
         part: Callable[..., Any], batch: Any, batch_axis: int) -> list[Any]:
    """Split `data` into `k` parts: arrays along ``axis_of(shape)``, and lists
    without arrays. ``part(x, axis, begin, end, i)`` returns part i of an
    array. Raises ValueError for an object that may hold the examples of
    `batch` and would be in every part."""
    backend = get_backend()

    def cut(x: Any) -> list[Any]:
        if not backend.is_native(x):
            messages.refuse_foreign(x, backend.name)
            x = np.asarray(x)
        shape = tuple(x.shape)
        axis = axis_of(shape)
        return [part(x, axis, *bound, i)
                for i, bound in enumerate(bounds_of(shape, axis))]

    def entries(x: list[Any]) -> list[Any]:
        return [x[begin:end] for begin, end in bounds_of((len(x),), 0)]
    return split_leaves(cut, data, k, entries,
                        partial(_check_whole, batch, batch_axis))


def _check_dense(data: Any) -> None:
    backend = get_backend()
    for x in leaves(data):
        if backend.is_native(x) and not backend.is_dense(x):
            raise ValueError(
                "a batch must hold dense arrays; received a sparse or nested "
                f"{type(x).__name__}. Make it dense first: x.to_dense() on "
                "torch, x.tostype('default') on MXNet.")


def _check_whole(data: Any, axis: int, x: Any) -> None:
    """Raise ValueError if `x` in `data`, which would be passed to all
    devices, may hold the examples."""
    rows = rows_inside(x)
    if not rows:
        return
    n = next((shape[axis] for shape in shapes_of(data)
              if -len(shape) <= axis < len(shape)), 0)
    if n > 1 and n in rows:
        raise ValueError(
            f"a {type(x).__name__} is passed to every device; received one "
            f"that holds {n} entries or examples, as many as the batch. Pass "
            "values of the examples as an array or a list, list(x), and "
            "values of the whole batch in a dict.")


def check_lists(X: Any, y: Any, n: int) -> None:
    """Raise ValueError for lists whose entries are ambiguous."""
    # If X is a list, it holds the network's inputs.
    for one in lists_in((tuple(X) if type(X) is list else X, y)):
        if is_listed(one):
            if len(one) != n:
                raise ValueError(
                    "a list without arrays must have an entry for each "
                    f"example; received {len(one)} entries, {one[0]!r} first,"
                    f" for {n} examples. Pass values of the whole batch as a "
                    "tuple.")
        elif len(one) == n > 1:
            first, *others = map(shapes_of, one)
            if first and all(shapes == first for shapes in others):
                raise ValueError(
                    "a list in a batch holds arrays of all examples, or one "
                    f"array for each example; received {n} of shape "
                    f"{first[0]} for {n} examples, which could be both. Pass "
                    "several arrays as a tuple, or stack the arrays of the "
                    "examples.")


def cut_rows(data: Any, bounds: Sequence[tuple[int, int]], batch: Any = None,
             batch_axis: int = 0) -> list[Any]:
    """Split `data` along `batch_axis` without copying it to devices. Lists
    without arrays are split too. Raises ValueError as `split_and_load`, with
    the examples of `batch` (default: `data`)."""
    return _cut(data, len(bounds), partial(axis_in, batch_axis=batch_axis),
                lambda *_: bounds, lambda x, axis, begin, end, _: _slice(
                    x, axis, begin, end),
                data if batch is None else batch, batch_axis)


def _to(device: Device, x: Any) -> Any:
    backend = get_backend()
    return backend.put(x, device) if backend.is_native(x) else x


def join_shards(shards: Sequence[Any], sizes: Sequence[int], device: Device,
                batch_axis: int = 0) -> Any:
    """Concatenate shards of `sizes` examples on `device`: arrays along
    `batch_axis`, and lists with an entry for each example. Other values are
    taken from the first shard."""
    backend, first = get_backend(), shards[0]
    if nested.is_array(first):
        if not first.shape or not shards[1:]:
            return first
        axis = axis_in(first.shape, batch_axis)
        return backend.ops.concat([first, *(
            backend.put(x, device) for x in shards[1:])], axis) \
            if backend.is_native(first) else np.concatenate(shards, axis)
    if isinstance(first, list) and [len(x) for x in shards] == list(sizes) \
            and (is_listed(first) or any(
                set(row_counts(x, batch_axis)) != {n}
                for x, n in zip(shards, sizes))):
        return [nested.map_leaves(partial(_to, device), one)
                for x in shards for one in x]
    if nested.entries_of(first) is None or not leaves(first):
        return first
    columns = zip(*map(nested.entries_of, shards), strict=True)
    return nested.rebuild(first, [
        join_shards(column, sizes, device, batch_axis) for column in columns])


def _slice(x: Any, axis: int, begin: int, end: int) -> Any:
    if end - begin == x.shape[axis]:
        return x
    if get_backend().is_native(x):
        return get_backend().ops.slice_axis(x, axis, begin, end)
    return x[(slice(None),) * (axis % len(x.shape)) + (slice(begin, end),)]


def split_batch(X: Any, y: Any, devices: Any, even_split: bool = False,
                weights: Sequence[float] | None = None, batch_axis: int = 0
                ) -> tuple[list[Any], list[Any]]:
    """Split features and labels over devices, unevenly by default.

    The function of the same name in the book.

    Parameters
    ----------
    X, y : native or NumPy arrays, or nested
    devices : sequence of devices
    even_split, weights
        As for `split_and_load`.
    batch_axis : int
        Axis of the examples in each array of `X` and `y`, 0 or more: 1 for
        inputs (time, batch, features) and labels (time, batch). Arrays with
        fewer axes, such as labels (batch,), are split along their last axis.
        The layout cannot be determined from a shape: with the default, an
        array (time, batch) is split along the time.

    Returns
    -------
    (list, list)
        Shards of `X` and `y`, one per device. The last shards are empty if
        there are fewer examples than devices. For a dict `X` and ``y=None``,
        its shards, twice. In distributed training, None for each device if
        this process has no examples of the batch.

    Raises
    ------
    ValueError
        `X` and `y`, or arrays in them, differ in length (as a list with a
        dict of arrays for each example does, see `train_batch`); an empty
        batch; a list, other than `X` itself, of as many arrays of one shape
        as there are examples, which is ambiguous.
    TypeError, ValueError
        As `split_and_load`.
    """
    whole = is_whole(X, y)
    if whole:
        y = X
    devices = as_devices(devices)
    batch_axis = integer("batch_axis", batch_axis, 0)
    _check_dense((X, y))

    def load(data: Any) -> list[Any]:
        return _split_and_load(data, devices, batch_axis, partial(
            axis_in, batch_axis=batch_axis), even_split, weights)
    n, m = (sorted(set(row_counts(data, batch_axis))) for data in (X, y))
    if n != m and len(n) == 1 and isinstance(y, list) and n == [len(y)]:
        return load(X), [[nested.map_leaves(partial(_to, device), one)
                          for one in y[begin:end]] for device, (begin, end)
                         in zip(devices, shard_bounds(len(y), len(devices),
                                                      weights), strict=True)]
    if n != m or len(n) > 1:
        raise ValueError(
            "X and y must have the same number of examples; received "
            f"{' or '.join(map(str, n)) or 'none'} and "
            f"{' or '.join(map(str, m)) or 'none'}. Cut them to one length. "
            "Pass numbers as an array or a list, and labels with an entry "
            "for each example (the boxes of each image) as a list.")
    if n == [0] and distributed.current().size > 1:
        # The examples of this batch are on other processes.
        return [None] * len(devices), [None] * len(devices)
    if n in ([], [0]):
        raise ValueError("a batch must hold at least one example, in a pair "
                         "(X, y) or a dict; received none. Skip it.")
    check_lists(X, y, n[0])
    shards = load(X)
    return shards, shards if whole else load(y)
