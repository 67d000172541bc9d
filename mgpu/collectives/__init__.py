"""Collectives over a list with one array per device, for both backends.

They run in place and return None, as in the book, unless they say that they
return something. Each takes its sums in a fixed order, which its strategy
names (`mgpu.collectives.strategies`), so that a run can be repeated bit for
bit. Differentiable forms that return new arrays are in `mgpu.functional`.
"""
import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.base import Array
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
    """`lists` in the form that can be written to in the block, where nothing
    is recorded."""
    backend = get_backend()
    with backend.scope(recording=False):
        # There is nothing to do for empty arrays, and mx.nd refuses to do it.
        # ``x[:]`` needs an axis.
        yield [[x if x.shape else backend.ops.flat_view(x) for x in data]
               for data in lists if 0 not in data[0].shape]


def allreduce(data: list[Array], *, op: str = "sum",
              algorithm: str | AllReduce = "auto", root: int = 0) -> None:
    """Reduce over all elements of `data` and leave the result in each.

    It works in place on every element and rebinds nothing, so arrays that
    the caller holds elsewhere see the result. It is not recorded: no gradient
    passes (use `mgpu.functional.allreduce` for that).

    Parameters
    ----------
    data : list of native arrays
        One per device, of one shape and dtype.
    op : {"sum", "mean", "max", "min"}
    algorithm : {"auto", "naive", "tree", "ring", "sharded", "native"} or \
AllReduce
        Who adds what, and so the order of additions: see
        `mgpu.collectives.strategies`. All give the same bits where the sums
        are exact. "auto" works directly in the memory of CPU devices, once
        all queued work is done; on CUDA cards it is NCCL.
    root : int
        The device on which "naive" and "tree" collect. The gradients of many
        parameters are best collected on different devices: see
        `mgpu.assign_roots`.

    Raises
    ------
    TypeError, ValueError
        No list, different shapes or dtypes, an array of the other
        framework, arrays that share memory or interleave there, an expanded
        or sparse array, an unknown op or algorithm, an impossible root, a
        mean of integers, any reduction of booleans; with "ring" and
        "sharded" a tensor that is not contiguous; with "native" what the
        framework has no collective for. Nothing has changed then.
    """
    arrays = check_list(data)
    check_root(root, len(arrays))
    _allreduce([arrays], op, algorithm, root)


def allreduce_many(lists: Sequence[list[Array]], *, op: str = "sum",
                   algorithm: str | AllReduce = "auto") -> None:
    """`allreduce` of many lists, as of all gradients of a network.

    CPU devices share the work evenly. Elsewhere different lists are collected
    on different devices (`assign_roots`), so that no device's link carries
    all of it. `Trainer` sums its gradients by this function.

    Parameters
    ----------
    lists : sequence of lists of native arrays
        ``lists[j][i]``: array j on device i; as many devices in each.
    op : {"sum", "mean", "max", "min"}
    algorithm
        As for `allreduce`.

    Raises
    ------
    TypeError, ValueError
        As `allreduce`, and for lists of different lengths. Nothing has
        changed then.
    """
    _allreduce(lists, op, algorithm)


def _allreduce(lists: Sequence[Any], op: str, algorithm: str | AllReduce,
               root: int | None = None) -> None:
    """`root`: the device that all lists are collected on."""
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
            "a strategy writes its result into the arrays that it is given; "
            f"received other arrays in the lists of {strategy!r}. Write "
            "x[:] = result.")


def broadcast(data: list[Array], *, root: int = 0) -> None:
    """Copy element `root` into every other element, in place. Raises as
    `allreduce` does."""
    arrays = check_list(data)
    check_root(root, len(arrays))
    with _written([arrays]) as lists:
        for one in lists:
            broadcast_from(check_apart(one), root)


def reduce(data: list[Array], *, op: str = "sum", root: int = 0) -> None:
    """Leave the reduction in element `root`, in place; the others stay as
    they are. Raises as `allreduce` does."""
    arrays = check_reducible(data, op)
    check_root(root, len(arrays))
    with _written([arrays]) as lists:
        for one in lists:
            reduce_to(check_apart(one), op, root)


def allgather(data: list[Array], *, axis: int = 0) -> list[Array]:
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


def gathered(data: list[Array], axis: int) -> list[Array]:
    """`allgather` of checked arrays, recorded where the caller records."""
    backend = get_backend()
    return [backend.ops.concat([backend.put(x, here) for x in data], axis)
            for here in data]


def reducescatter(data: list[Array], *, op: str = "sum") -> list[Array]:
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
    arrays = check_reducible(data, op)
    if not arrays[0].shape:
        raise ValueError("reducescatter cuts along axis 0; received "
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
    """On which of `k` devices to aggregate each array.

    Parameter i goes to device ``i % k`` when all are equally large (an
    exercise of the book). In general the largest array comes first, and each
    goes to the device with the fewest bytes so far, so that no device's link
    carries much more than its share.

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
