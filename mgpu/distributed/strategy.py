"""A reduction over the devices of all processes: the seam of `Trainer`."""
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mgpu.backends import get_backend
from mgpu.backends.base import Array
from mgpu.collectives.strategies import AllReduce, allreduce_by
from mgpu.distributed.world import Span

#: bytes from which an array is exchanged by itself, where it lies; smaller
#: ones share a message, because each message costs a tenth of a millisecond
LARGE = 1 << 20
#: bytes of small arrays in a message, at most
BUCKET = 32 << 20


class OverProcesses(AllReduce):
    """`local` sums over this process's devices; the sums are added up over
    the processes, and every device gets the result. Large arrays are added up
    where they lie, small ones in flat buckets of one dtype, all in the order
    of the arrays. A meeting has come before it."""

    divides = checks_memory = reaches_further = True

    def __init__(self, local: AllReduce, span: Span) -> None:
        self._local, self._span = local, span
        self._room: dict[np.dtype, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"{self._local!r} over {self._span.world.size} processes"

    def check(self, data: list[Array]) -> None:
        self._local.check(data)

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        with self._span.world.together():
            self._allreduce(lists, op, roots)

    def _allreduce(self, lists: Sequence[list[Array]], op: str,
                   roots: Sequence[int]) -> None:
        inner = "sum" if op == "mean" else op
        if len(lists[0]) > 1:
            allreduce_by(self._local, lists, inner, roots)
        count = self._span.total if op == "mean" else 1
        backend = get_backend()
        columns = [backend.host_views(data) for data in lists]
        seen = [j for j, views in enumerate(columns) if views is not None]
        if seen:
            backend.run_on_host_views(
                [partial(self._exchange, [columns[j] for j in seen], inner,
                         count)],
                [x for j in seen for x in lists[j]])
        for j, views in enumerate(columns):
            if views is None:
                self._natively(lists[j], inner, count)

    def _exchange(self, columns: Sequence[Any], op: str, count: int) -> None:
        large = [column for column in columns if column[0].nbytes >= LARGE]
        small: dict[np.dtype, list[list[np.ndarray]]] = {}
        for column in columns:
            if column[0].nbytes < LARGE:
                small.setdefault(column[0].dtype, []).append(column)
        buckets = [bucket for every in small.values()
                   for bucket in _buckets(every)]
        for bucket in buckets or [[]]:
            flat = self._packed(bucket)
            self._span.world.reduce_all(
                [column[0] for column in large] + flat, op)
            for column in large:
                _hand_out(column[0], column, count)
            if flat:
                _unpack(flat[0], bucket, count)
            large = []

    def _packed(self, bucket: Sequence[list[np.ndarray]]
                ) -> list[np.ndarray]:
        """The first arrays of the columns of `bucket` in one; none for
        none."""
        if not bucket:
            return []
        dtype = bucket[0][0].dtype
        size = sum(len(column[0]) for column in bucket)
        room = self._room.get(dtype)
        if room is None or len(room) < size:
            room = self._room[dtype] = np.empty(size, dtype)
        return [np.concatenate([column[0] for column in bucket],
                               out=room[:size])]

    def _natively(self, data: list[Array], op: str, count: int) -> None:
        """An array that the host has no view of, as on a GPU: in the
        framework's own collective, else through a copy on the host."""
        backend, world = get_backend(), self._span.world
        if not world.reduce_native(data[0], op):
            host = backend.to_numpy(data[0])
            world.reduce(host.reshape(-1), op)
            data[0][...] = backend.put(host, data[0])
        if count > 1:
            data[0] /= count
        for x in data[1:]:
            x[...] = backend.put(data[0], x)


def _hand_out(result: np.ndarray, column: Sequence[np.ndarray], count: int
              ) -> None:
    """Copy `result`, divided by `count`, to all of `column`, of which it may
    be one."""
    if count > 1:
        result /= count
    for x in column:
        if x is not result:
            x[...] = result


def _unpack(flat: np.ndarray, bucket: Sequence[list[np.ndarray]],
            count: int) -> None:
    end = 0
    for column in bucket:
        begin, end = end, end + len(column[0])
        _hand_out(flat[begin:end], column, count)


def _buckets(columns: Sequence[list[np.ndarray]]
             ) -> list[list[list[np.ndarray]]]:
    """Columns of one dtype, in their order, cut where a bucket is full."""
    found: list[list[list[np.ndarray]]] = []
    room = 0
    for column in columns:
        size = column[0].nbytes
        if not found or size > room:
            found.append([])
            room = BUCKET
        found[-1].append(column)
        room -= size
    return found


def over_processes(local: AllReduce, span: Span) -> AllReduce:
    """`local`, over the devices of all processes where there are several."""
    return OverProcesses(local, span) if span.wide else local


def share_values(columns: Sequence[list[Array]], span: Span, root: int = 0,
                 source: int = 0, into: Sequence[int] | None = None) -> None:
    """After a meeting: copy rank `root`'s arrays on its device `source` to
    the devices `into` of this rank, all by default. Each list holds one array
    for each device of this rank."""
    with span.world.together():
        _share(columns, span, root, source, into)


def _share(columns: Sequence[list[Array]], span: Span, root: int,
           source: int, into: Sequence[int] | None) -> None:
    backend = get_backend()
    for arrays in columns:
        host = np.ascontiguousarray(backend.to_numpy(arrays[source]))
        if not prod(host.shape):
            continue
        own = host.reshape(-1).copy()
        # As bytes: every dtype goes, and no bit changes.
        span.world.broadcast(own.view(np.uint8), root)
        with backend.scope(recording=False):
            for x in arrays if into is None else [arrays[i] for i in into]:
                x[...] = backend.put(own.reshape(host.shape), x)
