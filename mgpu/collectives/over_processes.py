"""Reduction over the devices of all processes."""
from collections.abc import Sequence
from functools import partial

import numpy as np

from mgpu.backends import get_backend
from mgpu.backends.types import Array
from mgpu.collectives.strategies import (AllReduce, allreduce_by, pack,
                                         unpack)
from mgpu.distributed.world import Span

#: bytes from which an array is exchanged alone and in place; smaller arrays
#: share a message, because each message costs a tenth of a millisecond
LARGE = 1 << 20
#: maximum bytes of the small arrays in a message
BUCKET = 32 << 20


class OverProcesses(AllReduce):
    """Allreduce over the devices of all processes.

    `local` reduces over the devices of each process, then the results are
    reduced over the processes. Large arrays are reduced in place, small ones
    in flat buckets of one dtype, in the order of the lists. The processes
    have synchronized before the call.
    """

    divides = reaches_further = True

    def __init__(self, local: AllReduce, span: Span) -> None:
        self._local, self._span = local, span

    def __repr__(self) -> str:
        return f"{self._local!r} over {self._span.world.size} processes"

    def check(self, data: list[Array]) -> None:
        self._local.check(data)

    def allreduce(self, lists: Sequence[list[Array]], op: str,
                  roots: Sequence[int]) -> None:
        inner = "sum" if op == "mean" else op
        count = self._span.total if op == "mean" else 1
        backend = get_backend()
        with self._span.world.together():
            if len(lists[0]) > 1:
                allreduce_by(self._local, lists, inner, roots)
            views, seen = [], []
            for data in lists:
                view = backend.host_views(data)
                if view is None:
                    self._natively(data, inner, count)
                else:
                    views.append(view)
                    seen += data
            if views:
                backend.run_on_host_views([partial(
                    self._exchange, views, inner, count)], seen)

    def _exchange(self, columns: Sequence[list[np.ndarray]], op: str,
                  count: int) -> None:
        large = [column for column in columns if column[0].nbytes >= LARGE]
        buckets = pack([column for column in columns
                        if column[0].nbytes < LARGE], BUCKET)
        flat = [np.concatenate([column[0] for column in bucket])
                for bucket in buckets]
        self._span.world.reduce_all(
            [*(column[0] for column in large), *flat], op)
        for bucket, whole in zip(buckets, flat):
            unpack(whole, [first for first, *_ in bucket])
        for first, *others in columns:
            if count > 1:
                first /= count
            for x in others:
                x[...] = first

    def _natively(self, data: list[Array], op: str, count: int) -> None:
        """Reduce an array without a host view, as on a GPU: with the
        framework's collective if it supports it, or through a host copy."""
        backend, world = get_backend(), self._span.world
        if not world.reduce_native(data[0], op):
            host = backend.to_numpy(data[0])
            world.reduce(host.reshape(-1), op)
            data[0][...] = backend.put(host, data[0])
        if count > 1:
            data[0] /= count
        for x in data[1:]:
            x[...] = backend.put(data[0], x)


def over_processes(local: AllReduce, span: Span) -> AllReduce:
    """`local`, extended to the devices of all processes of the job."""
    return OverProcesses(local, span) if span.wide else local


def share_values(columns: Sequence[list[Array]], span: Span, root: int = 0,
                 source: int = 0, into: Sequence[int] | None = None) -> None:
    """Copy the arrays on device `source` of rank `root` to the devices `into`
    of this rank (default: all). The processes have synchronized before the
    call. Each list holds one array per device of this rank."""
    backend = get_backend()
    with span.world.together(), backend.scope(recording=False):
        for arrays in columns:
            host = np.ascontiguousarray(backend.to_numpy(arrays[source]))
            if not host.size:
                continue
            own = host.reshape(-1).copy()
            # As bytes: for all dtypes, without rounding.
            span.world.broadcast(own.view(np.uint8), root)
            for x in arrays if into is None else [arrays[i] for i in into]:
                x[...] = backend.put(own.reshape(host.shape), x)
