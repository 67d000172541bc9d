"""Blockwise reductions and updates in host memory.

CPU devices share the memory of the host. One thread per core processes its
share of the arrays in blocks that fit into the core's cache, so each array is
read and written once. The formulas use NumPy, for both backends.

The functions return False, and have no effect, if the backend has no views of
the arrays (`Backend.host_views`): on GPUs, and inside `mgpu.strict_devices`,
which must see every copy.
"""
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import Backend
from mgpu.backends.types import Array
from mgpu.data.split import shard_bounds
from mgpu.utils import probes
from mgpu.utils.environment import cpu_cores

#: minimum bytes of one array for each thread
SHARE = 1 << 20
#: bytes of a block, summed over the arrays of a reduction: small enough for a
#: core's cache, large enough that the overhead of NumPy calls is small
REDUCE_BLOCK = 1 << 20
#: bytes of a block of each array in an update
UPDATE_BLOCK = 1 << 17


def threads_for(size: int, k: int) -> int:
    """Number of threads, at most `k`, for work on `size` bytes."""
    return max(1, min(k, cpu_cores(), size // SHARE))


def _run_on_blocks(backend: Backend, columns: Sequence[list[Array]],
                   written: Sequence[Array], threads: int, size: int,
                   work: Callable[[int, list[np.ndarray]], None]) -> bool:
    """Call ``work(j, blocks)`` with a block of each array in column j, for
    all blocks of `size` bytes, on up to `threads` threads."""
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
    """Call `work` for the bytes from `begin` to `end`, counted over all
    columns."""
    probes.at_once()
    with np.errstate(all="ignore"):     # as the backends, which do not warn
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
    """Reduce each list of arrays so that all its arrays hold the result. The
    sum is ``x[0] + x[1] + ...``."""
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
    """Update of one parameter by an optimizer."""

    name: str
    weight: Array
    gradient: Array
    lr: float
    wd: float
    t: int                      # number of this update, from 1


#: the `Ops` of the update rules, for NumPy arrays
HOST_OPS: Any = SimpleNamespace(
    abs=np.abs, sign=np.sign, sqrt=np.sqrt, exp=np.exp, log=np.log,
    maximum=np.maximum, minimum=np.minimum, zeros_like=np.zeros_like,
    sum=np.sum, astype=np.ndarray.astype,
    mean=lambda x, axis, keepdims: np.mean(x, axis, keepdims=keepdims),
    from_host=lambda values, like: values.astype(like.dtype))


def update(backend: Backend, optimizer: Any, work: Sequence[Update],
           states: dict[str, dict[str, Any]], scale: float,
           loss_scale: float) -> bool:
    """Apply an elementwise `optimizer` on all cores, in place.

    Parameters
    ----------
    work : sequence of Update
    states : dict
        Optimizer state by parameter name. Modified in place.
    scale, loss_scale : float
        Gradients are divided by `loss_scale`, then multiplied by `scale`.
    """
    slots = [[s for s, x in states[one.name].items() if backend.is_native(x)]
             for one in work]
    #: numbers in the state that the rule replaces, equal in all blocks
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
    # Not combined with the division by the batch size: NumPy casts a scalar
    # to the array's dtype first, and in float16 the product has few bits, or
    # is zero. The scale may exceed the range of float16.
    if loss_scale == 1.0:
        return gradient
    wide = np.promote_types(gradient.dtype, np.float32)
    return np.divide(gradient, loss_scale, dtype=wide).astype(
        gradient.dtype, copy=False)
