"""Reductions and updates in the host's memory, block by block.

CPU devices are parts of one host and have its memory in common. There a
thread per core goes through all arrays of its share in blocks that stay in
the core's cache: each array is read from memory once and written once. The
formulas are those of the backends, in NumPy, once for both backends.

A function here returns False, and does nothing, where the backend gives no
views of the arrays (`Backend.host_views`): on GPUs, for example, and inside
`mgpu.strict_devices`, which is to see every copy.
"""
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends.base import Array, Backend
from mgpu.data.split import shard_bounds
from mgpu.utils import probes
from mgpu.utils.environment import cpu_cores

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


def _run_on_blocks(backend: Backend, columns: Sequence[list[Array]],
                   written: Sequence[Array], threads: int, size: int,
                   work: Callable[[int, list[np.ndarray]], None]) -> bool:
    """Call ``work(number of the column, a block of each of its arrays)`` for
    all blocks of `size` bytes of all columns, on up to `threads` threads."""
    views = []
    for column in columns:
        found = backend.host_views(column)
        if found is None:
            return False
        views.append(found)
    total = sum(column[0].nbytes for column in views)
    backend.run_on_host_views(
        [partial(work_on, views, begin, end, size, work)
         for begin, end in shard_bounds(total, threads_for(total, threads))],
        written)
    return True


def work_on(columns: Sequence[list[np.ndarray]], begin: int, end: int,
             size: int, work: Callable[[int, list[np.ndarray]], None]) -> None:
    """The bytes from `begin` to `end`, counted over all columns."""
    probes.at_once()
    with np.errstate(all="ignore"):     # as the backends: NaN says enough
        for j, column in enumerate(columns):
            itemsize, n = column[0].itemsize, len(column[0])
            low, high = [min(max(x, 0) // itemsize, n) for x in (begin, end)]
            begin, end = begin - n * itemsize, end - n * itemsize
            step = max(1, size // itemsize)
            for at in range(low, high, step):
                work(j, [x[at:min(at + step, high)] for x in column])


# -- reductions ---------------------------------------------------------------

_IN_PLACE: dict[str, np.ufunc] = {
    "sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def allreduce(backend: Backend, columns: Sequence[list[Array]], op: str
              ) -> bool:
    """Reduce each list of arrays and leave the result in all of its
    elements. The order of additions is ``x[0] + x[1] + ...``."""
    def reduce(_: int, block: list[np.ndarray]) -> None:
        first, *others = block
        for x in others:
            _IN_PLACE[op](first, x, first)
        if op == "mean":
            first /= len(block)
        for x in others:
            x[...] = first
    k = len(columns[0])
    return _run_on_blocks(backend, columns, [x for c in columns for x in c],
                          k, REDUCE_BLOCK // k, reduce)


# -- updates ------------------------------------------------------------------

class Update(NamedTuple):
    """What an optimizer is to do to one parameter."""

    name: str
    weight: Array
    gradient: Array
    lr: float
    wd: float
    t: int                      # this parameter's updates, with this one


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
        The optimizer's state by the name of the parameter; updated.
    """
    slots = [[s for s, x in states[one.name].items() if backend.is_native(x)]
             for one in work]
    #: numbers that the rule has replaced, the same for every block
    numbers: list[dict[str, Any]] = [{} for _ in work]

    def apply(j: int, block: list[np.ndarray]) -> None:
        one, (weight, gradient, *arrays) = work[j], block
        state = {**states[one.name], **dict(zip(slots[j], arrays))}
        optimizer.update(
            weight, _unscaled(gradient, loss_scale) * scale, state, lr=one.lr,
            wd=one.wd, t=one.t, ops=HOST_OPS)
        if len(state) > len(arrays):
            numbers[j].update((s, x) for s, x in state.items()
                              if s not in slots[j])
    done = _run_on_blocks(
        backend, [[one.weight, one.gradient, *(states[one.name][s]
                                               for s in slots[j])]
                  for j, one in enumerate(work)],
        [one.weight for one in work], cpu_cores(), UPDATE_BLOCK, apply)
    for one, new in zip(work, numbers):
        states[one.name].update(new)
    return done


def _unscaled(gradient: np.ndarray, loss_scale: float) -> np.ndarray:
    # A division of its own, not joined with that by the batch size: NumPy
    # brings a number to the array's dtype first, and in float16 the two
    # together are a few bits, or zero. The scale may be beyond float16.
    if loss_scale == 1.0:
        return gradient
    wide = np.promote_types(gradient.dtype, np.float32)
    return np.divide(gradient, loss_scale, dtype=wide).astype(
        gradient.dtype, copy=False)
