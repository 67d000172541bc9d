"""Arrays that passes of device 0 have left, for as long as anyone holds them.

MXNet counts no writes. So mgpu stands around the library's functions: those
that write to an array which is there, and those that make another array of
the same memory.
"""
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mgpu.backends._mxnet import calls

ITSELF, DETACHED, OTHER = range(3)


class Place:
    """The memory of such an array.

    Attributes
    ----------
    others : list
        What the devices behind device 0 have in its place.
    written : bool
        Whether the user has written to it.
    """

    def __init__(self) -> None:
        self.others: list[Any] = []
        self.written = False


#: by the address of an array object of the library
_known: dict[int, tuple["weakref.ref[Any]", Place, int]] = {}
_thread = threading.local()


def keep(x: Any) -> None:
    """Watch an array from now on."""
    if find(x)[1] != ITSELF:
        _add(x.handle, Place(), ITSELF)


def find(x: Any) -> tuple[Place | None, int]:
    """The place of `x`, and what it is there: ITSELF, DETACHED (all of it,
    without a history) or OTHER."""
    _, place, kind = _known.get(x.handle.value, (None, None, OTHER))
    return place, kind


def wrote(handles: Iterable[int]) -> None:
    """An operation writes to these arrays."""
    if _known and not getattr(_thread, "passing", 0):
        for handle in handles:
            if handle in _known:
                _known[handle][1].written = True


@contextmanager
def passing() -> Iterator[None]:
    """What this thread writes inside the block is no user's edit."""
    _thread.passing = getattr(_thread, "passing", 0) + 1
    try:
        yield
    finally:
        _thread.passing -= 1


def _add(handle: Any, place: Place, kind: int) -> None:
    key = handle.value

    # Arrays outlive this module when a program ends.
    def gone(ref: Any, known: dict[int, Any] = _known) -> None:
        if known.get(key, (None,))[0] is ref:
            known.pop(key, None)
    _known[key] = weakref.ref(handle, gone), place, kind


def _shared(kind: int, call: Any, handle: Any, *rest: Any) -> int:
    status = call(handle, *rest)
    if _known and not status:
        _, place, own = _known.get(getattr(handle, "value", handle),
                                   (None, None, OTHER))
        if place is not None:
            _add(rest[-1]._obj, place, max(own, kind))
    return int(status)


for _name, _kind in (("MXNDArrayDetach", DETACHED),
                     ("MXNDArraySlice", OTHER), ("MXNDArraySlice64", OTHER),
                     ("MXNDArrayAt", OTHER),
                     ("MXNDArrayReshape64", OTHER),
                     ("MXShallowCopyNDArray", OTHER)):
    calls.stand_around(_name, partial(_shared, _kind))
