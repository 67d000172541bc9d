"""Collectives over lists of arrays, one array per device.

They work in place and return None unless stated otherwise. Sums have a fixed
order, documented by the strategy (`mgpu.collectives.strategies`), so runs are
reproducible bit for bit. `mgpu.functional` has differentiable versions that
return new arrays.
"""
import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.types import Array
from mgpu.collectives.checks import (OPS, check_apart, check_joinable,
                                     check_list, check_op, check_reducible,
                                     check_root, forms)
from mgpu.collectives.host_memory import threads_for
from mgpu.collectives.strategies import (STRATEGIES, AllReduce, allreduce_by,
                                         broadcast_from, combine, reduce_to,
                                         strategy_of)
from mgpu.data.split import shard_bounds
from mgpu.utils.arguments import is_integer

__all__ = ["ALGORITHMS", "OPS", "AllReduce", "allgather", "allreduce",
           "allreduce_many", "assign_roots", "broadcast", "check_joinable",
           "check_list", "check_op", "combine", "gathered", "reduce",
           "reducescatter", "threads_for"]

ALGORITHMS = STRATEGIES


@contextlib.contextmanager
def _written(lists: Sequence[list[Array]]) -> Iterator[list[list[Array]]]:
    """Views of the arrays in `lists`, writable with ``x[:]``. Gradients are
    not recorded in the block."""
    backend = get_backend()
    with backend.scope(recording=False):
        # Empty arrays are left out: mx.nd raises for them.
        # ``x[:]`` needs an axis.
        yield [[x if x.shape else backend.ops.flat_view(x) for x in data]
               for data in lists if 0 not in data[0].shape]


def allreduce(data: list[Array], *, op: str = "sum",
              algorithm: str | AllReduce = "auto", root: int = 0) -> None:
    """Reduce the arrays in `data` so that each holds the result.

    The arrays are modified in place. The operation is not recorded for
    autograd; `mgpu.functional.allreduce` is.

    Parameters
    ----------
    data : list of native arrays
        One per device, all of the same shape and dtype.
    op : {"sum", "mean", "max", "min"}
    algorithm : {"auto", "naive", "tree", "ring", "sharded", "native"} or \
AllReduce
        Determines the order of additions, see `mgpu.collectives.strategies`.
        All algorithms return the same bits where the sums are exact. "auto"
        waits for queued work and then works in the memory of CPU devices; on
        CUDA cards it uses NCCL.
    root : int
        Index of the device that "naive" and "tree" collect on. For the
        gradients of many parameters choose different devices, see
        `mgpu.assign_roots`.

    Raises
    ------
    TypeError
        `data` is not a list, or holds an array of the other framework.
    ValueError
        Different shapes or dtypes; arrays that overlap in memory; an expanded
        or sparse array; an unknown op or algorithm; an invalid root; a mean
        of integers; booleans; with "ring" and "sharded" a tensor that is not
        contiguous; with "native" an operation that the framework does not
        support. No array has changed.
    """
    arrays = check_list(data)
    check_root(root, len(arrays))
    _allreduce([arrays], op, algorithm, root)


def allreduce_many(lists: Sequence[list[Array]], *, op: str = "sum",
                   algorithm: str | AllReduce = "auto") -> None:
    """`allreduce` of many lists, for example all gradients of a network.

    CPU devices share the work evenly. On other devices, the lists are
    collected on different devices (`assign_roots`), which balances the
    traffic. `Trainer` sums gradients with this function.

    Parameters
    ----------
    lists : sequence of lists of native arrays
        ``lists[j][i]`` is array j on device i. All lists have the same
        length.
    op : {"sum", "mean", "max", "min"}
    algorithm
        As for `allreduce`.

    Raises
    ------
    TypeError, ValueError
        As `allreduce`, and for lists of different lengths. No array has
        changed.
    """
    _allreduce(lists, op, algorithm)


def _allreduce(lists: Sequence[Any], op: str, algorithm: str | AllReduce,
               root: int | None = None) -> None:
    """`root`: index of the device that all lists are collected on."""
    columns = [check_reducible(data, op) for data in lists]
    strategy = strategy_of(algorithm)
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1:
        raise ValueError(f"every list must hold one array per device; "
                         f"received lists of {lengths} arrays.")
    with _written(columns) as views:
        if not views or lengths == [1] and not strategy.reaches_further:
            return
        given = [tuple(data) for data in views]
        allreduce_by(strategy, views, op, assign_roots(
            [prod(data[0].shape) for data in views], lengths[0])
            if root is None else [root] * len(views))
    if any(x is not y for data, own in zip(views, given)
           for x, y in zip(data, own)):
        raise RuntimeError(
            "a strategy must write its result into the arrays of its lists; "
            f"{strategy!r} has replaced some of them. Write x[:] = result.")


def broadcast(data: list[Array], *, root: int = 0) -> None:
    """Copy ``data[root]`` into the other arrays, in place. Raises the errors
    of `allreduce`."""
    arrays = check_list(data)
    check_root(root, len(arrays))
    with _written([arrays]) as lists:
        for one in lists:
            broadcast_from(check_apart(one), root)


def reduce(data: list[Array], *, op: str = "sum", root: int = 0) -> None:
    """Reduce the arrays into ``data[root]``, in place. The other arrays are
    unchanged. Raises the errors of `allreduce`."""
    arrays = check_reducible(data, op)
    check_root(root, len(arrays))
    with _written([arrays]) as lists:
        for one in lists:
            reduce_to(check_apart(one), op, root)


def allgather(data: list[Array], *, axis: int = 0) -> list[Array]:
    """Concatenate the arrays along `axis`, on every device.

    Parameters
    ----------
    data : list of native arrays
        One per device, of the same dtype. Shapes may differ in `axis`.
    axis : int

    Returns
    -------
    list of native arrays
        New arrays, element i on the device of ``data[i]``.

    Raises
    ------
    TypeError
        `data` is not a list, or holds an array of the other framework.
    ValueError
        Different dtypes, shapes that differ in another axis, or an invalid
        axis.
    """
    arrays = check_joinable(data, axis)
    with get_backend().scope(recording=False):
        return gathered(arrays, axis)


def gathered(data: list[Array], axis: int) -> list[Array]:
    """`allgather` without checks. Recorded for autograd if the caller
    records."""
    backend = get_backend()
    return [backend.ops.concat([backend.put(x, here) for x in data], axis)
            for here in data]


def reducescatter(data: list[Array], *, op: str = "sum") -> list[Array]:
    """Reduce the arrays and return slice i along axis 0 on device i.

    Returns
    -------
    list of native arrays
        New arrays, one per device. `mgpu.shard_bounds` gives the bounds of
        the slices; slices are empty if axis 0 is shorter than the number of
        devices. `data` is unchanged. Slice i is summed as
        ``x[i] + x[0] + x[1] ...``.

    Raises
    ------
    TypeError, ValueError
        As `allreduce`, and for arrays without axes.
    """
    arrays = check_reducible(data, op)
    if not arrays[0].shape:
        raise ValueError("reducescatter splits along axis 0; received "
                         f"{forms(arrays)}. Use mgpu.allreduce.")
    backend, k = get_backend(), len(arrays)
    bounds = shard_bounds(arrays[0].shape[0], k)
    with backend.scope(recording=False):
        parts = []
        for i, (begin, end) in enumerate(bounds):
            slices = [backend.ops.slice_axis(x, 0, begin, end) for x in arrays]
            part = slices[i] = backend.put(slices[i], arrays[i])
            if 0 not in part.shape:
                reduce_to(slices, op, i)
            parts.append(part)
        return parts


def assign_roots(sizes: Sequence[int], k: int) -> list[int]:
    """Choose the device, of `k`, to collect each array on.

    The arrays are assigned by decreasing size, each to the device with the
    fewest bytes so far, which balances the traffic. Arrays of equal size go
    to device ``i % k`` (an exercise of the book).

    Parameters
    ----------
    sizes : sequence of int
        Size of each array, in bytes or elements.
    k : int
        Number of devices.

    Returns
    -------
    list of int
        Device index for each array, in the order of `sizes`.

    Raises
    ------
    ValueError
        `k` is not an integer of 1 or more.
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
