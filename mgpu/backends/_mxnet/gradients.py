"""Which batch the gradients of a network belong to, and who wrote them.

MXNet marks an array whose gradient a backward pass has written, and counts no
writes. So mgpu stands around the library's functions: backward passes, also
those that a user starts, and operations that write to memory which is there.

Whether an operation writes to a gradient is told by the address of its
result. The library allots that memory when the operation before it runs, in
another thread, and to ask for the address sooner allots it a second time: the
result is lost. So the result is waited for, and only while it matters what
writes to a gradient: between a backward pass and the step.
"""
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from mgpu.backends._mxnet import calls, places
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.base import Watch


class Watched(Watch):
    """The gradients of one network. Watched as long as it lives.

    Parameters
    ----------
    leaves : sequence of sequences of arrays
        ``leaves[i]``: the trained arrays of device i.
    requests : sequence of str
        The grad_req of each.
    """

    def __init__(self, leaves: Sequence[Sequence[Any]],
                 requests: Sequence[str]) -> None:
        super().__init__()
        self.leaves = [list(zip(own, requests, strict=True))
                       for own in leaves]
        #: by identity: arrays whose gradient the user has written to
        self.edited: set[int] = set()
        #: whether it matters who writes to a gradient
        self.noting = False
        self._places: list[tuple[int, int, int]] | None = None
        #: by identity: the devices of what is written, and not added to
        self._devices = {id(x): i for i, own in enumerate(self.leaves)
                         for x, request in own if request == "write"}
        _watch(self)

    def fresh(self) -> list[list[bool]]:
        return [[bool(x._fresh_grad) for x, _ in own] for own in self.leaves]

    def begin_pass(self) -> list[list[bool]]:
        """Returns what `end_pass` takes."""
        fresh = self.fresh()
        for own, flags in zip(self.leaves, fresh):
            for (x, _), flag in zip(own, flags):
                if flag:
                    x._fresh_grad = False
        return fresh

    def end_pass(self, before: list[list[bool]]) -> None:
        self._places = None     # memory may have moved
        if any(map(any, self.fresh())):
            self.note(True)
        if self.edited:
            # A pass that adds to a part of this batch's leaves the edit in.
            self.edited -= {id(x) for own, flags in zip(self.leaves, before)
                            for (x, request), flag in zip(own, flags)
                            if x._fresh_grad
                            and not (flag and request == "add")}
        reached = [any(now) for now in self.fresh()]
        if any(reached):
            self.passes.reached(
                next(_numbers), (i for i, now in enumerate(reached) if now),
                lambda: {self._devices[id(x)]
                         for own, flags in zip(self.leaves, before)
                         for (x, request), flag in zip(own, flags)
                         if flag and request == "write"})
        for own, flags, now in zip(self.leaves, before, reached):
            for (x, request), flag in zip(own, flags):
                if flag and (request == "add" or not now):
                    x._fresh_grad = True

    def voids(self, x: Any) -> bool:
        """Whether the gradient of `x` is of an earlier batch."""
        return self._devices.get(id(x)) in self.passes.void

    def note(self, on: bool) -> None:
        """Begin or end noting. One device's gradients are nobody's parts."""
        self.noting = on and self.observed and len(self.leaves) > 1

    def written(self, address: int) -> None:
        """An operation of the user's has written there."""
        places = self._places
        if places is None:
            places = self._places = [
                _extent(x) for own in self.leaves for x, _ in own
                if x.grad is not None]      # taken away since
        self.edited.update(key for begin, end, key in places
                           if begin <= address < end)


def _extent(x: Any) -> tuple[int, int, int]:
    gradient = x.grad
    gradient.wait_to_read()
    begin = calls.data_of(gradient.handle.value)
    return (begin, begin + gradient.size * np.dtype(gradient.dtype).itemsize,
            id(x))


def is_fresh(x: Any) -> bool:
    """See `mgpu.backends.base.Backend.is_fresh`."""
    with _passing:
        return bool(x._fresh_grad) and not any(
            one.passes.void and one.voids(x) for one in _alive())


def mark_used(x: Any) -> None:
    """See `mgpu.backends.base.Backend.mark_used`."""
    with _passing:
        x._fresh_grad = False


def edited(x: Any) -> bool:
    """See `mgpu.backends.base.Backend.edited`."""
    return any(id(x) in one.edited for one in _alive())


def settle(x: Any) -> None:
    """See `mgpu.backends.base.Backend.settle`."""
    for one in _alive():
        one.edited.discard(id(x))


#: replaced and never changed: any thread goes through it at any moment
_watched: "tuple[weakref.ref[Watched], ...]" = ()
_adding = threading.Lock()


def _watch(one: Watched) -> None:
    global _watched
    with _adding:
        _watched = (*map(weakref.ref, _alive()), weakref.ref(one))


def _alive() -> list[Watched]:
    return [one for ref in _watched if (one := ref()) is not None]


_numbers = itertools.count(1)       # of passes
#: held during a pass, since freshness is cleared for that time
_passing = threading.RLock()
_inside: ContextVar[bool] = ContextVar("mgpu_inside_pass", default=False)


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Backward passes inside the block, also in threads that it starts, are
    one."""
    with _passing:
        for one in _alive():
            renew = one.renew()
            if renew is not None:
                renew()
        watched = _alive()
        before = [one.begin_pass() for one in watched]
        token = _inside.set(True)
        try:
            yield
        finally:
            _inside.reset(token)
            for one, flags in zip(watched, before):
                one.end_pass(flags)
                moved = one.moved()
                if moved is not None:
                    moved()


def _backward(call: Any, *args: Any) -> int:
    if _inside.get() or not _alive():
        return call(*args)
    with one_pass():
        return call(*args)


def _wrote(handles: Sequence[Any]) -> int:
    """Note that an operation writes to these arrays. The status is that of
    the library: not 0 if an earlier operation on one of them failed."""
    places.wrote(handles)
    watched = [one for one in _alive() if one.noting]
    # The library runs custom operators in threads of its own. What they write
    # is part of a pass, which would not end if they waited for it.
    if not watched or isinstance(threading.current_thread(),
                                 threading._DummyThread):
        return 0
    for handle in handles:
        status = calls.wait_for(handle)
        if status:
            return status
        address = calls.data_of(handle)
        for one in watched:
            one.written(address)
    return 0


#: operators of batch normalisation, which write to two of their inputs
_NORMS = {calls.operator(name) for name in (
    "BatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU")}


def _operator(call: Any, operator: Any, count: Any, inputs: Any,
              output_count: Any, outputs: Any, *rest: Any) -> int:
    if operator.value in _NORMS and places.in_pass() \
            and mx.autograd.is_training() \
            and not calls.option("use_global_stats", *rest):
        places.wrote(calls.handles(inputs, count.value)[3:])
    # Those that are new arrays are not known before the call.
    return _wrote(calls.outputs(output_count, outputs)) or call(
        operator, count, inputs, output_count, outputs, *rest)


def _function(call: Any, function: Any, values: Any, codes: Any, count: Any,
              *rest: Any) -> int:
    # Its last argument, if it is an array, is where the result goes.
    last = count.value - 1
    written = [values[last].v_handle] \
        if last >= 0 and codes[last] == calls.ARRAY else []
    return _wrote(written) or call(function, values, codes, count, *rest)


def _filled(call: Any, array: Any, *rest: Any) -> int:
    return _wrote([array.value]) or call(array, *rest)


for _name, _stand in (("MXAutogradBackwardEx", _backward),
                      ("MXImperativeInvokeEx", _operator),
                      ("MXNetFuncCall", _function),
                      ("MXNDArraySyncCopyFromCPU", _filled)):
    calls.stand_around(_name, _stand)
