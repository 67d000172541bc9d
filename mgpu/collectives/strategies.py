"""How a reduction is done: the strategies of `mgpu.allreduce` and `Trainer`.

=========  ==============  ==================================================
name       strategy        who adds what
=========  ==============  ==================================================
"auto"     `Auto`          the fastest of those below for the arrays at hand
"naive"    `Naive`         the book's: all to one device, then back
"tree"     `Tree`          pairs, then pairs of pairs
"ring"     `Ring`          each device adds a chunk at a time and passes it on
"sharded"  `Sharded`       device i adds slice i of all; all fetch it
"native"   `Native`        the framework's own collective: NCCL, or kvstore
(none)     `HostMemory`    cores share the work in the memory of CPU devices
(none)     `Balanced`      each array on one device; they share the arrays
(none)     `Buckets`       NCCL over flat buckets, for CUDA cards
=========  ==============  ==================================================

A strategy of your own is a class with one method, `allreduce_list` or, if it
treats many arrays together, `allreduce`. Pass an object of it as
``algorithm=`` of `mgpu.allreduce` or as ``allreduce=`` of `Trainer`.
"""
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.base import Array
from mgpu.collectives import host_memory
from mgpu.collectives.checks import ITEMSIZE, check_apart, dtype_name
from mgpu.data.split import shard_bounds


class AllReduce:
    """A way to reduce arrays over devices and leave the result on each.

    What the methods receive has been checked: each list holds one native
    array per device, of one shape and dtype, with one element or more, and
    at least one axis. Nothing is recorded. `op` is "sum", "max" or "min",
    and the caller divides for a mean, unless the class sets `divides`. A
    strategy writes one of the two methods.
    """

    #: whether it takes `op` "mean" too, because it can divide at less cost
    divides = False
    #: whether it adds what is not in the lists, so that it has work to do
    #: for one device too
    reaches_further = False

    def check(self, data: list[Array]) -> None:
        """Refuse a list that this strategy cannot reduce (ValueError). It is
        asked about every list before the first one is changed."""

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        """Reduce each of `lists`, in place. ``roots[j]`` is the device that
        list j is best collected on, if the strategy collects at all."""
        for data, root in zip(lists, roots, strict=True):
            self.allreduce_list(data, op, root)

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        """Reduce one list, in place."""
        raise NotImplementedError("a strategy has a method allreduce_list("
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
    """Leave the reduction in element `root`: ``x[root] + x[0] + x[1] ...``."""
    for i, x in enumerate(data):
        if i != root:
            combine(op, data[root], x)
    if op == "mean":
        data[root] /= len(data)


def broadcast_from(data: list[Array], root: int) -> None:
    """Copy element `root` into every other element."""
    for i, x in enumerate(data):
        if i != root:
            x[:] = data[root]


def allreduce_by(strategy: AllReduce, lists: Sequence[list[Array]], op: str,
                 roots: Sequence[int]) -> None:
    """`strategy.allreduce`, after all checks, and the division that it
    leaves to its caller."""
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
    """All to `root`, then back. The sum is ``x[root] + x[0] + x[1] ...``.
    This is how the book does it."""

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        reduce_to(data, op, root)
        broadcast_from(data, root)


class Tree(AllReduce):
    """Pairs, then pairs of pairs: log2(K) rounds up and as many down. The
    sum is ``(x[0] + x[1]) + (x[2] + x[3])``, counted from `root`."""

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
    """``chunks[i][c]``: chunk c of element i, a view; K chunks of each."""
    flat = [get_backend().ops.flat_view(x) for x in data]
    bounds = shard_bounds(len(flat[0]), len(data))
    return [[x[begin:end] for begin, end in bounds] for x in flat]


class Sharded(AllReduce):
    """Device c reduces slice c of all, ``x[c] + x[0] + x[1] ...``, and every
    device fetches it: reduce-scatter, then all-gather."""

    def check(self, data: list[Array]) -> None:
        chunks_of(data)

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        for c, column in enumerate(zip(*chunks_of(data))):
            if len(column[c]):
                self.allreduce_chunk(list(column), op, c)

    def allreduce_chunk(self, column: list[Array], op: str, c: int) -> None:
        """Reduce chunk `c` of all devices, in place."""
        reduce_to(column, op, c)
        broadcast_from(column, c)


class Ring(Sharded):
    """K - 1 steps reduce chunk c around the ring, ending on device
    ``c - 1``, and K - 1 steps pass the result on (Patarasu and Yuan, 2009).
    The sum of chunk c is ``x[c] + x[c+1] + ... + x[c-1]``."""

    def allreduce_chunk(self, column: list[Array], op: str, c: int) -> None:
        ring = column[c:] + column[:c]
        for x, after in zip(ring, ring[1:]):
            combine(op, after, x)
        for x, after in zip(ring[-1:] + ring, ring[:-1]):
            after[:] = x


class Native(AllReduce):
    """The framework's own collective, list by list: NCCL through torch,
    where each array is on a CUDA card of its own; MXNet's kvstore, which
    takes sums only. Their order of additions is their own."""

    def allreduce_list(self, data: list[Array], op: str, root: int) -> None:
        get_backend().library_allreduce(data, op)


class Buckets(AllReduce):
    """The framework's own collective over flat buckets: arrays of one dtype
    are copied into one array per device, of up to `bucket_bytes`, reduced
    together and copied back, so that many small arrays cost few calls."""

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
    """Lists of one dtype, in their order, in buckets of up to `limit` bytes
    of each device."""
    buckets: list[list[list[Array]]] = []
    open_: dict[str, tuple[list[list[Array]], int]] = {}
    for data in lists:
        dtype = dtype_name(data[0])
        size = prod(data[0].shape) * ITEMSIZE[dtype]
        bucket, room = open_.get(dtype, ([], 0))
        if size > room:
            bucket, room = [], limit
            buckets.append(bucket)
        bucket.append(data)
        open_[dtype] = bucket, room - size
    return buckets


def unpack(whole: Any, parts: Iterable[Any]) -> None:
    """Copy a flat array into the flat arrays that it was joined from."""
    begin = 0
    for x in parts:
        end = begin + len(x)
        x[...] = whole[begin:end]
        begin = end


class HostMemory(AllReduce):
    """A thread per core reduces its share of all arrays, block by block, in
    the memory that CPU devices have in common. The sum is
    ``x[0] + x[1] + ...``. Elsewhere: `Balanced`, with the same order."""

    divides = True      # while a block is in the cache

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        if not host_memory.allreduce(get_backend(), lists, op):
            allreduce_by(Balanced(), lists, op, roots)


class Balanced(AllReduce):
    """Each list is collected on its root, and the devices work at the same
    time, so that no device's link carries all of it. The sum is
    ``x[0] + x[1] + ...``, whatever the root."""

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
    connects, `HostMemory` for all others."""

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


#: by the name that ``algorithm=`` and ``allreduce=`` take
STRATEGIES: dict[str, type[AllReduce]] = {
    "naive": Naive, "tree": Tree, "ring": Ring, "sharded": Sharded,
    "native": Native, "auto": Auto}


def strategy_of(algorithm: Any, argument: str = "algorithm") -> AllReduce:
    """The strategy that a name or an object stands for.

    Raises
    ------
    ValueError
        An unknown name, or another object.
    """
    if isinstance(algorithm, AllReduce) and type(algorithm) is not AllReduce:
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in STRATEGIES:
        raise ValueError(f"unknown {argument}; received {algorithm!r}. Use "
                         f"one of {', '.join(map(repr, STRATEGIES))}, or an "
                         "object of a subclass of AllReduce.")
    return STRATEGIES[algorithm]()
