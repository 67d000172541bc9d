"""Reductions and updates in the host's memory, block by block.

CPU devices are parts of one host and have its memory in common. There a
thread per core goes through all arrays of its share in blocks that stay in
the core's cache: each array is read from memory once and written once. The
formulas are those of the engines, in NumPy, once for both engines.

A function here returns False, and does nothing, where the engine gives no
views of the arrays (`Backend.host_views`): on GPUs, for example, and inside
`mgpu.strict_devices`, which is to see every copy.
"""
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mgpu import probes
from mgpu.backends.base import Array, Backend
from mgpu.environment import cpu_cores
from mgpu.split import shard_bounds

#: a share smaller than this (bytes of one array) is not worth a thread
SHARE = 1 << 20
#: bytes of one block of all arrays of a reduction together: they stay in a
#: core's own cache, and are large enough that calling NumPy costs little
REDUCE_BLOCK = 1 << 20
#: bytes of a block of each array of an update
UPDATE_BLOCK = 1 << 17


def threads_for(size: int, k: int) -> int:
    """How many of `k` devices' threads should share work on `size` bytes."""
    return max(1, min(k, cpu_cores(), size // SHARE))


# -- reductions ---------------------------------------------------------------

def allreduce(backend: Backend, columns: Sequence[list[Array]], op: str
              ) -> bool:
    """Reduce each list of arrays and leave the result in all of its
    elements. The order of additions is ``x[0] + x[1] + ...``."""
    views = []
    for column in columns:
        found = backend.host_views(column)
        if found is None:
            return False
        views.append(found)
    total = sum(column[0].nbytes for column in views)
    threads = threads_for(total, len(columns[0]))
    backend.run_on_host_views(
        [partial(reduce_blocks, views, begin, end, op)
         for begin, end in shard_bounds(total, threads)],
        [x for column in columns for x in column])
    return True


_IN_PLACE: dict[str, np.ufunc] = {
    "sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def reduce_blocks(columns: Sequence[list[np.ndarray]], begin: int,
                  end: int, op: str) -> None:
    """Reduce the bytes from `begin` to `end`, counted over all columns."""
    probes.at_once()
    function = _IN_PLACE[op]
    with np.errstate(all="ignore"):     # as the engines: NaN says enough
        for _, (first, *others) in _blocks(columns, begin, end):
            for x in others:
                function(first, x, first)
            if op == "mean":
                first /= 1 + len(others)
            for x in others:
                x[...] = first


def _blocks(columns: Sequence[list[np.ndarray]], begin: int, end: int
            ) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield (number of the column, the same block of each of its arrays) for
    the bytes from `begin` to `end`, counted over all columns."""
    offset = 0
    for j, column in enumerate(columns):
        size, n = column[0].itemsize, len(column[0])
        low, high = (min(max(x - offset, 0) // size, n) for x in (begin, end))
        offset += n * size
        step = max(1, REDUCE_BLOCK // (len(column) * size))
        for at in range(low, high, step):
            yield j, [x[at:min(at + step, high)] for x in column]


# -- updates ------------------------------------------------------------------

class Update(NamedTuple):
    """What an optimiser is to do to one parameter."""

    name: str
    weight: Array
    gradient: Array
    lr: float
    wd: float
    t: int                      # this parameter's updates, with this one


class _Views(NamedTuple):
    """The memory of one parameter, its gradient and its slots."""

    weight: np.ndarray
    gradient: np.ndarray
    slots: dict[str, np.ndarray]


#: what update rules need of `Ops`, on NumPy arrays
HOST_OPS: Any = SimpleNamespace(
    abs=np.abs, sign=np.sign, sqrt=np.sqrt, exp=np.exp, log=np.log,
    maximum=np.maximum, minimum=np.minimum, zeros_like=np.zeros_like,
    sum=np.sum, astype=np.ndarray.astype,
    mean=lambda x, axis, keepdims: np.mean(x, axis, keepdims=keepdims),
    from_host=lambda values, like: values.astype(like.dtype))


def update(backend: Backend, optimizer: Any, work: Sequence[Update],
           states: dict[str, dict[str, Any]], scale: float,
           loss_scale: float) -> bool:
    """Do `work` by the rule of an elementwise `optimizer`, for gradients
    times `scale` and divided by `loss_scale`, on all cores.

    Parameters
    ----------
    states : dict
        The optimiser's state by the name of the parameter; updated.
    """
    views = []
    for one in work:
        found = _views(backend, one, states[one.name])
        if found is None:
            return False
        views.append(found)
    total = sum(v.weight.nbytes for v in views)
    numbers = [dict(states[one.name]) for one in work]
    backend.run_on_host_views(
        [partial(update_blocks, optimizer, work, views, states, numbers,
                 begin, end, scale, loss_scale)
         for begin, end in shard_bounds(total, threads_for(
             total, cpu_cores()))],
        [one.weight for one in work])
    for one, new in zip(work, numbers, strict=True):
        # Numbers that the rule has replaced, the same for every block.
        if new:
            states[one.name].update(
                (s, x) for s, x in new.items() if not backend.is_native(x))
    return True


def _views(backend: Backend, one: Update, state: dict[str, Any]
           ) -> _Views | None:
    """None where an array has no view."""
    names = [s for s, x in state.items() if backend.is_native(x)]
    # In one order of memory.
    found = backend.host_views([one.gradient, one.weight,
                                *(state[s] for s in names)])
    if found is None:
        return None
    gradient, weight, *slots = found
    return _Views(weight, gradient, dict(zip(names, slots, strict=True)))


def update_blocks(optimizer: Any, work: Sequence[Update],
                  views: Sequence[_Views],
                  states: dict[str, dict[str, Any]],
                  numbers: Sequence[dict[str, Any]], begin: int, end: int,
                  scale: float, loss_scale: float) -> None:
    """Do `work` on the bytes from `begin` to `end`, counted over all weights.
    `numbers` gets what the rule has replaced in `states`."""
    probes.at_once()
    with np.errstate(all="ignore"):     # as the engines
        for one, (weight, gradient, slots), new in zip(
                work, views, numbers, strict=True):
            low = max(begin, 0) // weight.itemsize
            high = min(end, weight.nbytes) // weight.itemsize
            begin, end = begin - weight.nbytes, end - weight.nbytes
            step = max(1, UPDATE_BLOCK // weight.itemsize)
            for at in range(low, high, step):
                part = slice(at, min(at + step, high))
                block = {**states[one.name],
                         **{s: x[part] for s, x in slots.items()}}
                optimizer.update(
                    weight[part],
                    _unscaled(gradient[part], loss_scale) * scale, block,
                    lr=one.lr, wd=one.wd, t=one.t, ops=HOST_OPS)
                if len(block) > len(slots):
                    new.update((s, x) for s, x in block.items()
                               if s not in slots)


def _unscaled(gradient: np.ndarray, loss_scale: float) -> np.ndarray:
    # A division of its own, not joined with that by the batch size: NumPy
    # brings a number to the array's dtype first, and in float16 the two
    # together are a few bits, or zero. The scale may be beyond float16.
    if loss_scale == 1.0:
        return gradient
    wide = np.promote_types(gradient.dtype, np.float32)
    return np.divide(gradient, loss_scale, dtype=wide).astype(
        gradient.dtype, copy=False)
