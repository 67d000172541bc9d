"""Batch normalization over all devices of all ranks.

The replicas run their forward passes in separate threads and synchronize at
each batch-norm layer, where the sums over the devices of one process are
summed over ranks. The exchange is differentiable, so the gradient of the
joint statistics is exact.
"""
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mgpu.backends import Backend, messages
from mgpu.backends.network import BatchNormCall
from mgpu.collectives.checks import ITEMSIZE, dtype_name
from mgpu.distributed.sums import Sums
from mgpu.utils.environment import cpu_cores

Array = Any
#: turn(n): a block around the work of thread n
Turn = Callable[[int], AbstractContextManager[Any]]


#: the position of a thread after all layers
_END = "the end"


class DeviceThreads:
    """Synchronizes threads, one per active device, that reduce arrays."""

    def __init__(self, active: Sequence[int]) -> None:
        self._members = list(active)
        # Twice a round: after all values, and after their reduction.
        self._barrier = threading.Barrier(len(self._members))
        self._given: dict[int, tuple[str, Any]] = {}
        self._result: Any = None
        # Hundreds of threads that run at once ask each other for Python's
        # lock, in time that grows with the square of their number.
        self._cores = threading.Semaphore(cpu_cores())
        self._turn: Turn | None = None
        self._changing = threading.Condition()
        self._arrived = 0       # of those in turn, in this round
        self._at_work: dict[int, ExitStack] = {}
        self._errors: dict[int, BaseException] = {}

    def position(self, index: int) -> int:
        """The index of a device among the active ones."""
        return self._members.index(index)

    def exchange(self, index: int, place: str, value: Any,
                 join: Callable[[list[Any]], Any]) -> Any:
        """Pass `value`, and return ``join(values)`` of the values of all
        active devices in order.

        The first device's thread reduces for all devices: the work grows with
        the number of devices, not with its square, and the thread records
        operations in the same order in every run.
        """
        self._given[index] = place, value
        self._at_work[index].close()
        self._barrier.wait()
        if index == self._members[0]:
            self._arrived = 0
            self._result = join(self._values())
        self._barrier.wait()
        result = self._result       # stays until all have given again
        self._take_turn(index)
        return result

    def _take_turn(self, index: int) -> None:
        """The thread of a device runs from here on, to the next round."""
        stack = self._at_work[index]
        if self._turn is None:
            stack.enter_context(self._cores)
            return
        number = self.position(index)
        with self._changing:
            self._changing.wait_for(lambda: self._arrived == number
                                    or self._barrier.broken)
        stack.callback(self._arrive)
        stack.enter_context(self._turn(number))

    def _arrive(self) -> None:
        with self._changing:
            self._arrived += 1
            self._changing.notify_all()

    def _values(self) -> list[Any]:
        places = {i: self._given[i][0] for i in self._members}
        if len(set(places.values())) > 1:
            raise RuntimeError(
                "synchronized batch normalization needs the same layers in "
                f"the same order on every device; received {places}. Use "
                "batch_norm='per_device' for such a network.")
        return [self._given[i][1] for i in self._members]

    def run(self, backend: Backend, thunks: Sequence[Callable[[], Any]],
            turn: Turn | None = None) -> list[Any]:
        """Call each thunk, one per active device, in a separate thread; the
        threads of a step synchronize. With `turn` one thread at a time runs,
        from one exchange to the next: number n inside ``turn(n)``."""
        self._turn = turn

        def guarded(i: int, thunk: Callable[[], Any]) -> Any:
            try:
                with ExitStack() as self._at_work[i]:
                    self._take_turn(i)
                    result = thunk()
                    self.exchange(i, _END, None, lambda values: None)
                    return result
            except threading.BrokenBarrierError:
                return None     # another device has raised
            except BaseException as error:
                self._errors[i] = error
                with self._changing:
                    self._barrier.abort()
                    self._changing.notify_all()
                return None
        results = backend.parallel(
            [partial(guarded, i, thunk) for i, thunk in zip(
                self._members, thunks, strict=True)], rendezvous=True)
        self._barrier.abort()   # for a pass that is not repeated
        if self._errors:    # always that of the first device
            raise self._errors[min(self._errors)]
        return results


class Joint:
    """Sums over all ranks in a forward pass and its backward passes. The
    gradient of a sum is the sum of the gradients."""

    def __init__(self, backend: Backend, sums: Sums) -> None:
        self._backend, self._sums = backend, sums
        self._pass, self._count, self._after = sums.passes, 0, None

    def __call__(self, layer: str, count: int, part: Array
                 ) -> tuple[int, Array]:
        """The sums of `count` and `part` over all ranks."""
        self._count += 1
        name = f"sum {self._count} of pass {self._pass}, of layer {layer!r}"
        counts: list[int] = []
        form: list[Any] = []

        def forth(x: np.ndarray) -> np.ndarray:
            found, result = self._sums.add(name, x, count)
            counts.append(found)
            form[:] = x.shape, x.dtype
            return result

        def back(x: np.ndarray | None) -> np.ndarray | None:
            return self._sums.add_gradient(
                f"gradient of {name}", np.zeros(*form) if x is None else x,
                x is not None)

        part, self._after = self._backend.through(part, forth, back,
                                                  self._after)
        return counts[0], part


class SyncBatchNorm:
    """The batch-norm rule of ``batch_norm="sync"``.

    Mean and biased variance of the whole batch, each device weighted by its
    number of examples (Ioffe and Szegedy, 2015, algorithm 1, over the union
    of the shards); the variance in a second pass about the joint mean.
    Running statistics are updated alike on all devices, whenever the
    backend's own layer would update them.
    """

    def __init__(self, backend: Backend, threads: DeviceThreads,
                 joint: Joint | None = None):
        self._backend, self._threads = backend, threads
        self._joint = joint
        self._known: dict[Any, Any] = {}

    def _joined(self, layer: str, given: list[tuple[int, Array]]
                ) -> tuple[int, list[Array]]:
        """The number of values, and a copy of their sum for each device that
        has passed some."""
        count, total = given[0]
        for n, x in given[1:]:      # x[0] + x[1] + ...
            count, total = count + n, total + self._backend.put(x, total)
        if self._joint is not None:
            count, total = self._joint(layer, count, total)
        return count, self._backend.fan_out(total, len(given))

    def mean(self, index: int, layer: str, moment: int, count: int,
             part: Array, like: Array) -> tuple[Array, int]:
        """The sum of `part` over all devices, divided by the sum of `count`:
        bit-identical everywhere. Also returns that count. `moment`: 1 for the
        mean, 2 for the variance."""
        def joined() -> tuple[int, Array]:
            found, totals = self._threads.exchange(
                index, layer, (count, part), partial(self._joined, layer))
            return found, self._backend.put(
                totals[self._threads.position(index)], like)
        found, total = self._backend.once(self._known, (
            index, layer, moment), part, joined)
        return total / found, found

    def __call__(self, call: BatchNormCall, index: int) -> Array:
        x, ops = call.x, self._backend.ops
        _check_dtype(call)
        axis = call.axis % len(x.shape)
        axes = tuple(i for i in range(len(x.shape)) if i != axis)
        shape = tuple(n if i == axis else 1 for i, n in enumerate(x.shape))
        count = prod(x.shape) // x.shape[axis]
        mean, _ = self.mean(index, call.layer, 1, count,
                            ops.sum(x, axes, keepdims=True), x)
        centred = x - mean
        var, _ = self.mean(index, call.layer, 2, count, ops.sum(
            centred * centred, axes, keepdims=True), x)
        inverse = (var + call.epsilon) ** -0.5
        if self._backend.is_recording() and call.running_mean is not None:
            inverse = self._backend.move_statistics(call, mean, var, inverse)
        y = centred * inverse
        if call.gamma is not None:
            y = y * call.gamma.reshape(shape)
        if call.beta is not None:
            y = y + call.beta.reshape(shape)
        return y


def _check_dtype(call: BatchNormCall) -> None:
    """Raise TypeError for inputs that the layer does not support on one
    device: integers, whose sums would overflow, and wider floats."""
    own = [dtype_name(x) for x in (call.running_mean, call.gamma, call.x)
           if x is not None][0]
    given = dtype_name(call.x)
    if "float" not in given or ITEMSIZE[given] > ITEMSIZE[own]:
        raise messages.wrong_dtype(own, [given])
