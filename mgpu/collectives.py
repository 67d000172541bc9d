"""Collectives over a list with one array per device, for both engines.

All run in place and return None (the text's form) unless they say that they
return something. Sums are taken in a fixed order, which each algorithm
names, so that a run can be repeated bit for bit. Differentiable forms that
return new arrays are in `mgpu.functional`.
"""
from functools import partial
from math import prod
from typing import Any, Callable, Dict, List, Sequence

import numpy as np

from mgpu import profiling
from mgpu.arguments import is_integer
from mgpu.backends import get_backend
from mgpu.backends.base import refuse_foreign
from mgpu.device import cpu_cores
from mgpu.split import shard_bounds

Array = Any
OPS = ("sum", "mean", "max", "min")


def _native_list(data: Any) -> List[Array]:
    backend = get_backend()
    if backend.is_native(data) or not isinstance(data, (list, tuple)):
        raise TypeError(
            "data must be a list with one array per device; received "
            f"{type(data).__name__}. Make one with mgpu.split_and_load, or "
            "with mgpu.put(x, device) for each device.")
    if not data:
        raise ValueError("data must hold at least one array; received an "
                         "empty list. Pass one array per device.")
    for x in data:
        if not backend.is_native(x):
            refuse_foreign(x, backend.name)
            raise TypeError(f"data must hold arrays of the {backend.name} "
                            f"backend; received {type(x).__name__}. Use "
                            "mgpu.put(x, device).")
    return list(data)


def _dtype_name(x: Array) -> str:
    """``"float32"``, however the array spells its dtype."""
    name = getattr(x.dtype, "__name__", None) or str(x.dtype)
    return name.split(".")[-1].rstrip("_")


def _forms(arrays: List[Array]) -> str:
    return ", ".join(f"{tuple(x.shape)} {_dtype_name(x)}" for x in arrays)


def check_list(data: Any) -> List[Array]:
    """`data` as a list of native arrays of one shape and dtype."""
    arrays = _native_list(data)
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if any(x.shape != shape or x.dtype != dtype for x in arrays[1:]):
        raise ValueError("data must hold arrays of one shape and dtype; "
                         f"received {_forms(arrays)}. Bring them to one.")
    return arrays


def check_op(arrays: List[Array], op: str, ops: Sequence[str] = OPS) -> None:
    if op not in ops:
        raise ValueError(f"unknown op; received {op!r}. Use one of "
                         f"{', '.join(map(repr, ops))}.")
    dtype = _dtype_name(arrays[0])
    if dtype == "bool" or (op == "mean" and "int" in dtype):
        raise ValueError(
            f"the {op} of {dtype} arrays is not of that dtype; received "
            f"{_forms(arrays)}. Convert them first, for example with "
            "mgpu.functional.astype(x, 'float32').")


def _check(data: Any, op: str) -> List[Array]:
    arrays = check_list(data)
    check_op(arrays, op)
    return arrays


def _check_root(root: int, k: int) -> None:
    if not is_integer(root, 0) or root >= k:
        raise ValueError(f"root must be the number of a device, 0 to "
                         f"{k - 1}; received {root!r}.")


def check_joinable(data: Any, axis: int) -> List[Array]:
    """`data` as a list of native arrays that differ in `axis` alone."""
    arrays = _native_list(data)
    for x in arrays:
        if not -len(x.shape) <= axis < len(x.shape):
            raise ValueError(
                f"an array of shape {tuple(x.shape)} has no axis {axis} to "
                f"join along; received {_forms(arrays)}. Use an axis that "
                "all have.")
    if len({(axis % len(x.shape), _dtype_name(x), *_without(x.shape, axis))
            for x in arrays}) > 1:
        raise ValueError(
            f"data must hold arrays of one dtype that differ in axis {axis} "
            f"alone; received {_forms(arrays)}. Bring them to one.")
    return arrays


def _without(shape: Sequence[int], axis: int) -> List[int]:
    rest = list(shape)
    del rest[axis]
    return rest


def _combine(op: str, into: Array, other: Array) -> None:
    """``into <- into op other``; `other` is brought to the device first."""
    backend = get_backend()
    other = backend.put(other, into)
    if op == "max":
        into[:] = backend.ops.maximum(into, other)
    elif op == "min":
        into[:] = backend.ops.minimum(into, other)
    else:
        into += other


# -- algorithms: each leaves the reduction in every element -------------------

def _naive(data: List[Array], op: str, root: int) -> None:
    """The text's: all to `root`, then back. ``x[root] + x[0] + x[1] ...``"""
    _reduce(data, op, root)
    _broadcast(data, op, root)


def _tree(data: List[Array], op: str, root: int) -> None:
    """Pairs, then pairs of pairs; log2(K) rounds up and down. The order is
    ``(x[0] + x[1]) + (x[2] + x[3])``, counted from `root`."""
    k = len(data)
    order = data[root:] + data[:root]
    gap = 1
    while gap < k:
        for i in range(0, k - gap, 2 * gap):
            _combine(op, order[i], order[i + gap])
        gap *= 2
    while gap > 1:
        gap //= 2
        for i in range(0, k - gap, 2 * gap):
            order[i + gap][:] = order[i]


def _chunks(data: List[Array]) -> List[List[Array]]:
    """``chunks[i][c]``: chunk c of element i, a view."""
    flat = [get_backend().ops.flat_view(x) for x in data]
    bounds = shard_bounds(len(flat[0]), len(data))
    return [[x[begin:end] for begin, end in bounds] for x in flat]


def _ring(data: List[Array], op: str, root: int) -> None:
    """K - 1 steps to reduce chunk c around the ring, ending on device
    ``c - 1``, and K - 1 to pass the results on (Patarasu and Yuan, 2009).
    Chunk c is summed as ``x[c] + x[c+1] + ... + x[c-1]``."""
    k = len(data)
    chunks = _chunks(data)
    for step in range(k - 1):
        for i in range(k):
            c = (i - step) % k
            if len(chunks[i][c]):
                _combine(op, chunks[(i + 1) % k][c], chunks[i][c])
    for step in range(k - 1):
        for i in range(k):
            c = (i + 1 - step) % k
            if len(chunks[i][c]):
                chunks[(i + 1) % k][c][:] = chunks[i][c]


def _sharded(data: List[Array], op: str, root: int) -> None:
    """Device c reduces slice c of all, ``x[c] + x[0] + x[1] ...``, and every
    device fetches it: reduce-scatter, then all-gather."""
    chunks = _chunks(data)
    for c in range(len(data)):
        column = [row[c] for row in chunks]
        if len(column[c]):
            _naive(column, op, c)


def _auto(data: List[Array], op: str, root: int) -> None:
    """Devices that are parts of one host have their memory in common: there
    a thread per core reduces its share of the arrays, block by block. A
    block of each array is read once from memory and written once, while it
    is in the cache. The order is ``x[0] + x[1] + ...``. Elsewhere, and
    inside `mgpu.strict_devices`, which is to see every copy: as "naive"."""
    # `_in_place` divides for a mean.
    if not _on_host([data], "sum" if op == "mean" else op):
        _naive(data, op, root)


def _native(data: List[Array], op: str, root: int) -> None:
    """The framework's own: NCCL through torch, where each array is on a CUDA
    card of its own; MXNet's kvstore, which takes sums. Their order of
    additions is their own."""
    get_backend().native_allreduce(data, "sum" if op == "mean" else op)


#: bytes of one block of all arrays together: they stay in a core's own
#: cache, and are large enough that calling NumPy costs little
_BLOCK = 1 << 20
#: a share smaller than this (bytes of one array) is not worth a thread
_SHARE = 1 << 20


def threads_for(size: int, k: int) -> int:
    """How many of `k` devices' threads should share work on `size` bytes of
    the host's memory."""
    return max(1, min(k, cpu_cores(), size // _SHARE))


def _on_host(columns: Sequence[List[Array]], op: str) -> bool:
    """Reduce each column of arrays; False, and nothing done, where they are
    not all in the host's memory."""
    backend = get_backend()
    views = []
    for column in columns:
        found = backend.host_views(column)
        if found is None:
            return False
        views.append(found)
    total = sum(column[0].nbytes for column in views)
    threads = threads_for(total, len(columns[0]))
    backend.on_host(
        [partial(_reduce_blocks, views, total * i // threads,
                 total * (i + 1) // threads, op) for i in range(threads)],
        [x for column in columns for x in column])
    return True


_IN_PLACE = {"sum": np.add, "mean": np.add, "max": np.maximum,
             "min": np.minimum}


def _reduce_blocks(columns: Sequence[List[np.ndarray]], begin: int,
                   end: int, op: str) -> None:
    """Reduce the bytes from `begin` to `end` of all columns on end."""
    profiling.at_once()
    function, offset = _IN_PLACE[op], 0
    with np.errstate(all="ignore"):     # as the engines: NaN says enough
        for column in columns:
            size, n = column[0].itemsize, len(column[0])
            low, high = (min(max(x - offset, 0) // size, n)
                         for x in (begin, end))
            offset += n * size
            step = max(1, _BLOCK // (len(column) * size))
            for at in range(low, high, step):
                first, *others = [x[at:min(at + step, high)] for x in column]
                for x in others:
                    function(first, x, first)
                if op == "mean":
                    first /= len(column)
                for x in others:
                    x[...] = first


ALGORITHMS: Dict[str, Callable[[List[Array], str, int], None]] = {
    "naive": _naive, "tree": _tree, "ring": _ring, "sharded": _sharded,
    "native": _native, "auto": _auto}


def _reduce(data: List[Array], op: str, root: int) -> None:
    for i, x in enumerate(data):
        if i != root:
            _combine(op, data[root], x)


def _broadcast(data: List[Array], op: str, root: int) -> None:
    for i, x in enumerate(data):
        if i != root:
            x[:] = data[root]


def _check_distinct(data: List[Array]) -> None:
    if len({id(x) for x in data}) < len(data):
        raise ValueError(
            "data must hold an array of its own for each device; received "
            "one array more than once. Copy it with mgpu.put(x, device).")


def _in_place(algorithm: Callable[[List[Array], str, int], None],
              data: List[Array], op: str, root: int,
              everywhere: bool = True) -> None:
    """Run `algorithm`, which leaves the result everywhere or at `root`."""
    _check_root(root, len(data))
    _check_distinct(data)
    if 0 in data[0].shape:
        return      # nothing to do, and mx.nd refuses to do it
    backend = get_backend()
    with backend.scope(recording=False):
        # ``x[:]`` needs an axis
        data = [x if x.shape else backend.ops.flat_view(x) for x in data]
        algorithm(data, op, root)
        if op == "mean":
            for x in data if everywhere else [data[root]]:
                x /= len(data)


# -- public -------------------------------------------------------------------

def allreduce(data: List[Array], *, op: str = "sum", algorithm: str = "auto",
              root: int = 0) -> None:
    """Reduce over all elements of `data` and leave the result in each.

    In place on every element; nothing is rebound, so arrays that the caller
    holds elsewhere see the result. Outside of recording: no gradient passes
    (use `mgpu.functional.allreduce` for that).

    Parameters
    ----------
    data : list of native arrays
        One per device, of one shape and dtype.
    op : {"sum", "mean", "max", "min"}
    algorithm : {"auto", "naive", "tree", "ring", "sharded", "native"}
        The order of additions and who moves what; see their docstrings. All
        give the same bits where the sums are exact. "auto" reads and writes
        the memory of CPU devices directly, once all queued work is done; on
        GPUs it is "naive".
    root : int
        Where "naive" and "tree" collect. Gradients of many parameters are
        best collected on different devices: see `mgpu.assign_roots`.

    Raises
    ------
    TypeError, ValueError
        No list, different shapes or dtypes, an array of the other
        framework, one array for two devices, an unknown op or algorithm, an
        impossible root, a mean of integers, any reduction of booleans; with
        "ring" and "sharded" a tensor that is not contiguous; with "native"
        what the framework has no collective for. Nothing has changed then.
    """
    arrays = _check(data, op)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm; received {algorithm!r}. Use "
                         f"one of {', '.join(map(repr, ALGORITHMS))}.")
    _in_place(ALGORITHMS[algorithm], arrays, op, root)


def allreduce_many(lists: Sequence[List[Array]], *, op: str = "sum") -> None:
    """`allreduce` of many lists, as of all gradients of a network.

    CPU devices share the work evenly, as "auto" of `allreduce` does.
    Elsewhere different lists are collected on different devices
    (`assign_roots`), which work at the same time: no device's link carries
    all of it.

    Parameters
    ----------
    lists : sequence of lists of native arrays
        ``lists[j][i]``: array j on device i; as many devices in each.
    op : {"sum", "mean", "max", "min"}

    Raises
    ------
    TypeError, ValueError
        As `allreduce`, and for lists of different lengths. Nothing has
        changed then.
    """
    columns = [_check(data, op) for data in lists]
    for column in columns:
        _check_distinct(column)
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1:
        raise ValueError(f"every list must hold one array per device; "
                         f"received lists of {lengths} arrays.")
    k = lengths[0] if lengths else 1
    columns = [c for c in columns if 0 not in c[0].shape]
    if k == 1 or not columns or _on_host(columns, op):
        return
    roots = assign_roots([prod(column[0].shape) for column in columns], k)

    def collect(root: int) -> None:
        for column, at in zip(columns, roots):
            if at == root:
                _collect(column, op, root)
    get_backend().parallel([partial(collect, i) for i in range(k)])


def _collect(data: List[Array], op: str, root: int) -> None:
    """`allreduce` on device `root`, in the order ``x[0] + x[1] + ...`` all
    the same."""
    backend = get_backend()
    with backend.scope(recording=False):
        x = [x if x.shape else backend.ops.flat_view(x) for x in data]
        total = backend.put(x[0], x[root])
        for other in x[1:]:
            _combine(op, total, other)
        if op == "mean":
            total /= len(x)
        for one in x:
            one[:] = total


def broadcast(data: List[Array], *, root: int = 0) -> None:
    """Copy element `root` into every other element, in place. Raises as
    `allreduce` does."""
    _in_place(_broadcast, check_list(data), "sum", root)


def reduce(data: List[Array], *, op: str = "sum", root: int = 0) -> None:
    """Leave the reduction in element `root`, in place; the others stay.
    Raises as `allreduce` does."""
    _in_place(_reduce, _check(data, op), op, root, everywhere=False)


def allgather(data: List[Array], *, axis: int = 0) -> List[Array]:
    """Join all elements along `axis`, nothing added, on every device.

    Returns
    -------
    list of native arrays
        K fresh arrays, element i on the device of ``data[i]``. Lengths along
        `axis` may differ.

    Raises
    ------
    TypeError, ValueError
        No list, an array of the other framework, an axis that is not there,
        or arrays that differ in another axis or in their dtype.
    """
    arrays = check_joinable(data, axis)
    with get_backend().scope(recording=False):
        return gathered(arrays, axis)


def gathered(data: List[Array], axis: int) -> List[Array]:
    backend = get_backend()
    return [backend.ops.concat([backend.put(x, here) for x in data], axis)
            for here in data]


def reducescatter(data: List[Array], *, op: str = "sum") -> List[Array]:
    """Reduce over all elements; device i keeps slice i along axis 0.

    Returns
    -------
    list of native arrays
        K fresh arrays; slice bounds as in `mgpu.shard_bounds`, so slices
        are empty where axis 0 is shorter than K. `data` stays unchanged.
        Slice i is summed as ``x[i] + x[0] + x[1] ...``.

    Raises
    ------
    TypeError, ValueError
        As `allreduce` does, and for arrays without an axis.
    """
    arrays = _check(data, op)
    if not arrays[0].shape:
        raise ValueError("reducescatter cuts along axis 0; received "
                         f"{_forms(arrays)}. Use mgpu.allreduce.")
    backend, k = get_backend(), len(arrays)
    bounds = shard_bounds(arrays[0].shape[0], k)
    with backend.scope(recording=False):
        parts = []
        for i, (begin, end) in enumerate(bounds):
            slices = [backend.ops.slice_axis(x, 0, begin, end)
                      for x in arrays]
            part = slices[i] = backend.put(slices[i], arrays[i])
            if 0 not in part.shape:
                _reduce(slices, op, i)
                if op == "mean":
                    part /= k
            parts.append(part)
        return parts


def assign_roots(sizes: Sequence[int], k: int) -> List[int]:
    """On which of `k` devices to aggregate each array.

    Parameter i goes to device ``i % k`` when all are equally large (the
    text's exercise); in general the largest first, each to the device with
    the fewest bytes so far, so that no device's link carries much more than
    its share.

    Parameters
    ----------
    sizes : sequence of int
        Bytes, or elements, of each array.

    Returns
    -------
    list of int
        A number of a device for each array, in the order of `sizes`.
    """
    if not is_integer(k, 1):
        raise ValueError("the number of devices must be a whole number, 1 or "
                         f"more; received {k!r}.")
    load = [0] * k
    roots = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        roots[i] = min(range(k), key=lambda d: (load[d], d))
        load[roots[i]] += sizes[i]
    return roots
