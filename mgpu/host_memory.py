"""Reductions and updates in the host's memory, block by block.

CPU devices are parts of one host and have its memory in common. There a
thread per core goes through all arrays of its share in blocks that stay in
the core's cache: each array is read from memory once and written once. The
formulas are those of the engines, in NumPy, once for both engines.

A function here returns False, and does nothing, where the engine gives no
views of the arrays (`Backend.host_views`): on GPUs, for example, and inside
`mgpu.strict_devices`, which is to see every copy.
"""
from collections.abc import Iterable, Iterator, Sequence
from ctypes import addressof, c_char
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mgpu import probes
from mgpu.backends import messages
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
    elements. The order of additions is ``x[0] + x[1] + ...``.
    ValueError for arrays that share memory (`messages.check_apart`)."""
    views = []
    for column in columns:
        found = backend.host_views(column)
        if found is None:
            return False
        views.append(found)
    messages.check_apart([      # the quickest way to an address
        (0, begin := addressof(c_char.from_buffer(x.data)),
         begin + x.nbytes)
        for column in views for x in column])
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


# -- comparisons --------------------------------------------------------------

def differing(backend: Backend, columns: Sequence[list[Array]]
              ) -> list[list[int] | None]:
    """For each list of arrays, the numbers of those whose bits are not those
    of its first one; None where the engine gives no views of them."""
    views = [backend.host_views(column, to_read=True) for column in columns]
    seen = [j for j, found in enumerate(views) if found is not None]
    bits = [[x.view(_WORDS[x.nbytes % 8]) for x in views[j]
             or ()] for j in seen]
    total = sum(column[0].nbytes for column in bits)
    threads = threads_for(total, len(bits[0])) if bits else 1
    pairs: set[tuple[int, int]] = set()

    def compare(blocks: Iterable[tuple[int, list[np.ndarray]]]) -> None:
        for j, (first, *others) in blocks:
            pairs.update((seen[j], i) for i, x in enumerate(others, 1)
                         if (first != x).any())
    if threads == 1:
        compare(enumerate(bits))
    else:
        backend.run_on_host_views(
            [partial(compare, _blocks(bits, *bounds))
             for bounds in shard_bounds(total, threads)], [])
    return [None if found is None else
            [i for i in range(len(found)) if (j, i) in pairs]
            for j, found in enumerate(views)]


#: Unsigned integers, since NaN differs from itself as a float; as wide as the
#: number of bytes allows: how many are left over after words of 8.
_WORDS = ("u8", "u1", "u2", "u1", "u4", "u1", "u2", "u1")


# -- updates ------------------------------------------------------------------

class Update(NamedTuple):
    """What an optimiser is to do to one parameter."""

    name: str
    weights: list[Array]        # one per device
    gradients: list[Array]
    lr: float
    wd: float
    t: int                      # this parameter's updates, with this one


class _Views(NamedTuple):
    """The memory of one parameter on one device."""

    weight: np.ndarray
    gradient: np.ndarray
    slots: dict[str, np.ndarray]
    state: dict[str, Any]       # the state itself, which also holds numbers


class HostOps:
    """What update rules need of `Ops`, on NumPy arrays."""

    abs = staticmethod(np.abs)
    sign = staticmethod(np.sign)
    sqrt = staticmethod(np.sqrt)
    exp = staticmethod(np.exp)
    log = staticmethod(np.log)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    zeros_like = staticmethod(np.zeros_like)

    @staticmethod
    def sum(x: Any) -> Any:
        return np.sum(x)

    @staticmethod
    def mean(x: Any, axis: Any, keepdims: bool) -> np.ndarray:
        return np.mean(x, axis, keepdims=keepdims)

    @staticmethod
    def from_host(values: np.ndarray, like: np.ndarray) -> np.ndarray:
        return values.astype(like.dtype)

    @staticmethod
    def astype(x: Any, dtype: Any) -> np.ndarray:
        return x.astype(dtype)


HOST_OPS: Any = HostOps()


def update(backend: Backend, optimizer: Any, work: Sequence[Update],
           states: Sequence[dict[str, dict[str, Any]]], scale: float,
           loss_scale: float) -> bool:
    """Do `work` on all devices by the rule of an elementwise `optimizer`,
    for gradients times `scale` and divided by `loss_scale`.

    Parameters
    ----------
    states : sequence of dict
        For each device, the optimiser's state by the name of the parameter;
        updated.
    """
    views = _views(backend, work, states)
    if views is None:
        return False
    k = len(states)
    threads = threads_for(k * sum(v.weight.nbytes for v in views[0]), k)
    backend.run_on_host_views(
        [partial(update_blocks, optimizer, work, views[i::threads], scale,
                 loss_scale) for i in range(threads)],
        [x for one in work for x in one.weights])
    return True


def _views(backend: Backend, work: Sequence[Update],
           states: Sequence[dict[str, dict[str, Any]]]
           ) -> list[list[_Views]] | None:
    """For each device and update; None where an array has no view."""
    found: list[list[_Views]] = [[] for _ in states]
    for one in work:
        every = [by_name[one.name] for by_name in states]
        slots = [[s for s, x in state.items() if backend.is_native(x)]
                 for state in every]
        # In one order of memory. All devices hold one sum, and what the user
        # has written to replica 0's counts.
        views = backend.host_views([one.gradients[0], *one.weights, *(
            state[s] for state, names in zip(every, slots) for s in names)])
        if views is None:
            return None
        gradient, *rest = views
        weights, rest = rest[:len(every)], rest[len(every):]
        for here, weight, state, names in zip(found, weights, every, slots):
            here.append(_Views(weight, gradient, dict(zip(names, rest)),
                               state))
            rest = rest[len(names):]
    return found


def update_blocks(optimizer: Any, work: Sequence[Update],
                  devices: Sequence[list[_Views]], scale: float,
                  loss_scale: float) -> None:
    """Do `work` on some devices."""
    probes.at_once()
    each = [pair for views in devices for pair in zip(work, views,
                                                      strict=True)]
    with np.errstate(all="ignore"):     # as the engines
        for one, (weight, gradient, slots, state) in each:
            step, block = max(1, UPDATE_BLOCK // weight.itemsize), state
            for begin in range(0, len(weight), step):
                part = slice(begin, begin + step)
                block = {**state, **{s: x[part] for s, x in slots.items()}}
                optimizer.update(
                    weight[part],
                    _unscaled(gradient[part], loss_scale) * scale, block,
                    lr=one.lr, wd=one.wd, t=one.t, ops=HOST_OPS)
            # Numbers that the rule has replaced, the same for every block.
            state.update((s, x) for s, x in block.items() if s not in slots)


def _unscaled(gradient: np.ndarray, loss_scale: float) -> np.ndarray:
    # A division of its own, not joined with that by the batch size: NumPy
    # brings a number to the array's dtype first, and in float16 the two
    # together are a few bits, or zero. The scale may be beyond float16.
    if loss_scale == 1.0:
        return gradient
    wide = np.promote_types(gradient.dtype, np.float32)
    return np.divide(gradient, loss_scale, dtype=wide).astype(
        gradient.dtype, copy=False)
