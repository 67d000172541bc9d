"""Batch normalisation over all devices of one process.

The replicas run their forward passes in threads of their own and meet at
each batch-norm layer. What they exchange there is differentiable, so the
gradient of the joint statistics is exact.
"""
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from mgpu.backends import base

Array = Any


class _OthersStopped(Exception):
    """Another replica failed or finished: the error is its own."""


class Meeting:
    """Threads, one per active device, that exchange arrays in rounds."""

    def __init__(self, active: Sequence[int]):
        self._members = list(active)
        self._changed = threading.Condition()
        self._rounds: list[dict[int, tuple[str, Any]]] = []
        self._at = {i: 0 for i in self._members}
        self._stopped: list[int] = []
        self._errors: dict[int, BaseException] = {}

    def exchange(self, index: int, place: str, value: Any) -> list[Any]:
        """Give `value`, return all active devices' values in order."""
        with self._changed:
            number = self._at[index]
            self._at[index] += 1
            if number == len(self._rounds):
                self._rounds.append({})
            here = self._rounds[number]
            here[index] = (place, value)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(here) == len(self._members)
                or any(i not in here for i in self._stopped))
            if len(here) < len(self._members):
                raise _OthersStopped
            places = {i: here[i][0] for i in self._members}
        if len(set(places.values())) > 1:
            raise RuntimeError(
                "synchronised batch normalisation needs the same layers in "
                f"the same order on every device; received {places}. Use "
                "batch_norm='per_device' for such a network.")
        return [here[i][1] for i in self._members]

    def run(self, backend: base.Backend,
            thunks: Sequence[Callable[[], Any] | None]) -> list[Any]:
        """Call each thunk in a thread of its own; those of one step meet."""
        def guarded(i: int, thunk: Callable[[], Any]) -> Any:
            try:
                return thunk()
            except _OthersStopped:
                return None
            except BaseException as error:
                self._errors[i] = error
                return None
            finally:
                with self._changed:
                    self._stopped.append(i)
                    self._changed.notify_all()

        results = backend.parallel(
            [(lambda: None) if thunk is None
             else partial(guarded, i, thunk)
             for i, thunk in enumerate(thunks)], rendezvous=True)
        if self._errors:    # of several, the same one in every run
            raise self._errors[min(self._errors)]
        if any(len(r) < len(self._members) for r in self._rounds):
            raise RuntimeError(
                "synchronised batch normalisation needs the same layers in "
                "the same order on every device; received different numbers "
                "of them. Use batch_norm='per_device' for such a network.")
        return results


class SyncBatchNorm:
    """The batch-norm rule of ``batch_norm="sync"``.

    Mean and biased variance of the whole batch, each device's share weighted
    by its rows (Ioffe and Szegedy, 2015, algorithm 1, over the union of the
    shards), variance in a second pass about the joint mean. Running
    statistics are updated in the forward pass, alike on all devices.
    """

    def __init__(self, backend: base.Backend, meeting: Meeting):
        self._backend, self._meeting = backend, meeting

    def _total(self, index: int, layer: str, part: Array, like: Array
               ) -> Array:
        parts = self._meeting.exchange(index, layer, part)
        total = None
        for x in parts:     # the same order, so the same bits, everywhere
            x = self._backend.put(x, like)
            total = x if total is None else total + x
        return total

    def __call__(self, call: base.BatchNormCall, index: int) -> Array:
        x, ops = call.x, self._backend.ops
        axis = call.axis % len(x.shape)
        axes = tuple(i for i in range(len(x.shape)) if i != axis)
        shape = tuple(n if i == axis else 1 for i, n in enumerate(x.shape))
        count = sum(self._meeting.exchange(
            index, call.layer, prod(x.shape) // x.shape[axis]))
        mean = self._total(index, call.layer,
                           ops.sum(x, axes, keepdims=True), x) / count
        centred = x - mean
        var = self._total(index, call.layer, ops.sum(
            centred * centred, axes, keepdims=True), x) / count
        y = centred * (var + call.epsilon) ** -0.5
        if call.gamma is not None:
            y = y * call.gamma.reshape(shape)
        if call.beta is not None:
            y = y + call.beta.reshape(shape)
        if self._backend.is_recording() and call.running_mean is not None:
            with self._backend.scope(recording=False):
                for running, value in ((call.running_mean, mean),
                                       (call.running_var, var)):
                    running *= call.momentum
                    running += (1 - call.momentum) * ops.stop_gradient(
                        value).reshape(running.shape)
        return y
