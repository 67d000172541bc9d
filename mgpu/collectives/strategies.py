"""Allreduce strategies of `mgpu.allreduce` and `Trainer`.

=========  ==============  ==================================================
name       strategy        algorithm
=========  ==============  ==================================================
"auto"     `Auto`          the fastest available one for the arrays
"naive"    `Naive`         collect on one device, then broadcast (the book's)
"tree"     `Tree`          pairs, then pairs of pairs
"ring"     `Ring`          chunks are added along a ring of devices
"sharded"  `Sharded`       device i adds slice i; then all-gather
"native"   `Native`        the framework's collective: NCCL, or kvstore
(none)     `HostMemory`    one thread per core, in the memory of CPU devices
(none)     `Balanced`      each array on one device, different ones for each
(none)     `Buckets`       NCCL over flat buckets, for CUDA cards
=========  ==============  ==================================================

A custom strategy is a subclass of `AllReduce` with one method: either
`allreduce_list`, or `allreduce` to reduce many arrays together. Pass an
instance as ``algorithm=`` of `mgpu.allreduce` or ``allreduce=`` of `Trainer`.
"""
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.types import Array
from mgpu.collectives import host_memory
from mgpu.collectives.checks import ITEMSIZE, check_apart, dtype_name
from mgpu.data.split import shard_bounds


class AllReduce:
    """Base class of allreduce strategies.

    A subclass implements `allreduce_list` or `allreduce`. Their arguments
    have been checked: each list holds one native array per device, all of one
    shape and dtype, not empty and with at least one axis. Gradients are not
    recorded. `op` is "sum", "max" or "min"; for a mean the caller divides,
    unless the class sets `divides`.
    """

    #: whether `op` "mean" is supported, because dividing here costs less
    divides = False
    #: whether arrays of other processes are added, which is work for a
    #: single device too
    reaches_further = False

    def check(self, data: list[Array]) -> None:
        """Raise ValueError if the strategy does not support the list. Called
        for all lists before the first one changes."""

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        """Reduce each of `lists`, in place. ``roots[j]`` is the index of the
        device to collect list j on, for strategies that collect."""
        for data, root in zip(lists, roots, strict=True):
            self.allreduce_list(data, op, root)

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        """Reduce one list, in place."""
        raise NotImplementedError("a strategy must implement allreduce_list("
                                  "data, op, root) or allreduce(lists, op, "
                                  f"roots); {self!r} has neither.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def combine(op: str, into: Array, other: Array) -> None:
    """``into <- into op other``; `other` is copied to the device first."""
    backend = get_backend()
    other = backend.put(other, into)
    if op == "max":
        into[:] = backend.ops.maximum(into, other)
    elif op == "min":
        into[:] = backend.ops.minimum(into, other)
    else:
        into += other


def reduce_to(data: list[Array], op: str, root: int) -> None:
    """Reduce into ``data[root]``, as ``x[root] + x[0] + x[1] ...``."""
    for i, x in enumerate(data):
        if i != root:
            combine(op, data[root], x)
    if op == "mean":
        data[root] /= len(data)


def broadcast_from(data: list[Array], root: int) -> None:
    """Copy ``data[root]`` into the other arrays."""
    for i, x in enumerate(data):
        if i != root:
            x[:] = data[root]


def allreduce_by(strategy: AllReduce, lists: Sequence[list[Array]], op: str,
                 roots: Sequence[int]) -> None:
    """Check the lists, call `strategy.allreduce`, and divide for a mean if
    the strategy does not."""
    check_apart([x for data in lists for x in data])
    for data in lists:
        strategy.check(data)
    if op != "mean" or strategy.divides:
        strategy.allreduce(lists, op, roots)
        return
    strategy.allreduce(lists, "sum", roots)
    for data in lists:
        for x in data:
            x /= len(data)


class Naive(AllReduce):
    """Collect on `root`, then broadcast; the book's algorithm. The sum is
    ``x[root] + x[0] + x[1] ...``."""

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        reduce_to(data, op, root)
        broadcast_from(data, root)


class Tree(AllReduce):
    """Reduce pairs, then pairs of pairs: log2(K) rounds to reduce and as many
    to broadcast. The sum is ``(x[0] + x[1]) + (x[2] + x[3])``, with indices
    relative to `root`."""

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        k = len(data)
        order = data[root:] + data[:root]
        gap = 1
        while gap < k:
            for i in range(0, k - gap, 2 * gap):
                combine(op, order[i], order[i + gap])
            gap *= 2
        while gap > 1:
            gap //= 2
            for i in range(0, k - gap, 2 * gap):
                order[i + gap][:] = order[i]


def chunks_of(data: list[Array]) -> list[list[Array]]:
    """K chunks of each of the K arrays: ``chunks[i][c]`` is a view."""
    flat = [get_backend().ops.flat_view(x) for x in data]
    bounds = shard_bounds(len(flat[0]), len(data))
    return [[x[begin:end] for begin, end in bounds] for x in flat]


class Sharded(AllReduce):
    """Reduce-scatter, then all-gather. Device c reduces slice c, as
    ``x[c] + x[0] + x[1] ...``."""

    def check(self, data: list[Array]) -> None:
        chunks_of(data)

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        for c, column in enumerate(zip(*chunks_of(data))):
            if len(column[c]):
                self.allreduce_chunk(list(column), op, c)

    def allreduce_chunk(self, column: list[Array], op: str, c: int) -> None:
        """Reduce chunk `c` over the devices, in place."""
        reduce_to(column, op, c)
        broadcast_from(column, c)


class Ring(Sharded):
    """Ring allreduce (Patarasu and Yuan, 2009).

    K - 1 steps reduce chunk c along the ring, ending on device ``c - 1``, and
    K - 1 steps broadcast the result. The sum of chunk c is
    ``x[c] + x[c+1] + ... + x[c-1]``."""

    def allreduce_chunk(self, column: list[Array], op: str, c: int) -> None:
        ring = column[c:] + column[:c]
        for x, after in zip(ring, ring[1:]):
            combine(op, after, x)
        for x, after in zip(ring[-1:] + ring, ring[:-1]):
            after[:] = x


class Native(AllReduce):
    """The framework's collective, called for each list.

    PyTorch: NCCL, if each array is on a different CUDA card. MXNet: kvstore,
    which supports sums only. The framework determines the order of
    additions."""

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        get_backend().library_allreduce(data, op)


class Buckets(AllReduce):
    """The framework's collective over flat buckets.

    Arrays of one dtype are copied into one array per device, of up to
    `bucket_bytes`, reduced together and copied back. Many small arrays need
    few calls."""

    def __init__(self, bucket_bytes: int = 25 << 20):
        self.bucket_bytes = bucket_bytes

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        backend = get_backend()
        for bucket in pack(lists, self.bucket_bytes):
            if len(bucket) == 1:
                backend.library_allreduce(bucket[0], op)
                continue
            columns = [[backend.ops.flat_view(x) for x in own]
                       for own in zip(*bucket, strict=True)]
            joined = [backend.ops.concat(own) for own in columns]
            backend.library_allreduce(joined, op)
            for whole, own in zip(joined, columns):
                unpack(whole, own)


def pack(lists: Sequence[list[Array]], limit: int
         ) -> list[list[list[Array]]]:
    """Group lists of one dtype, in order, into buckets of up to `limit` bytes
    per device."""
    buckets: list[list[list[Array]]] = []
    open_: dict[str, tuple[list[list[Array]], int]] = {}
    for data in lists:
        dtype = dtype_name(data[0])
        size = prod(data[0].shape) * ITEMSIZE[dtype]
        bucket, left = open_.get(dtype, ([], 0))
        if size > left:
            bucket, left = [], limit
            buckets.append(bucket)
        bucket.append(data)
        open_[dtype] = bucket, left - size
    return buckets


def unpack(whole: Any, parts: Iterable[Any]) -> None:
    """Copy a flat array into the flat arrays that it was concatenated
    from."""
    begin = 0
    for x in parts:
        end = begin + len(x)
        x[...] = whole[begin:end]
        begin = end


class HostMemory(AllReduce):
    """Reduce in the memory of CPU devices, block by block, with one thread
    per core. The sum is ``x[0] + x[1] + ...``. Falls back to `Balanced`,
    which has the same order of additions, on other devices."""

    divides = True      # while a block is in the cache

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        if not host_memory.allreduce(get_backend(), lists, op):
            allreduce_by(Balanced(), lists, op, roots)


class Balanced(AllReduce):
    """Collect each list on its own root, with all devices in parallel, which
    balances the traffic. The sum is ``x[0] + x[1] + ...`` for any root."""

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        def collect(device: int) -> None:
            for data, root in zip(lists, roots, strict=True):
                if root == device:
                    self.allreduce_list(data, op, root)
        get_backend().parallel([partial(collect, i)
                                for i in range(len(lists[0]))])

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        backend = get_backend()
        with backend.scope(recording=False):    # a thread of its own
            total = backend.put(data[0], data[root])
            for other in data[1:]:
                combine(op, total, other)
            for x in data:
                x[:] = total


class Auto(AllReduce):
    """`Buckets` for arrays on CUDA cards that the framework's collective
    supports, `HostMemory` for others."""

    divides = True

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        parts: dict[bool, Any] = {}
        for data, root in zip(lists, roots, strict=True):
            parts.setdefault(get_backend().library_reduces(data), []).append(
                (data, root))
        for fast, part in parts.items():
            allreduce_by(Buckets() if fast else HostMemory(),
                         [data for data, _ in part], op,
                         [root for _, root in part])


#: strategies by name, for ``algorithm=`` and ``allreduce=``
STRATEGIES: dict[str, type[AllReduce]] = {
    "naive": Naive, "tree": Tree, "ring": Ring, "sharded": Sharded,
    "native": Native, "auto": Auto}


def strategy_of(algorithm: Any, argument: str = "algorithm") -> AllReduce:
    """The strategy of that name, or `algorithm` itself if it is a strategy.

    Raises
    ------
    ValueError
        `algorithm` is neither a known name nor a strategy.
    """
    if isinstance(algorithm, AllReduce) and type(algorithm) is not AllReduce:
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in STRATEGIES:
        raise ValueError(f"unknown {argument}; received {algorithm!r}. Use "
                         f"one of {', '.join(map(repr, STRATEGIES))}, or an "
                         "instance of a subclass of AllReduce.")
    return STRATEGIES[algorithm]()
