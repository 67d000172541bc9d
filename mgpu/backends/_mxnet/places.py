"""Arrays that passes of device 0 have left, and those that devices share, for
as long as anyone holds them.

MXNet counts no writes. So mgpu stands around the library's functions: those
that write to an array which is there, and those that make another array of
the same memory.
"""
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mgpu.backends import messages
from mgpu.backends._kept import Untold
from mgpu.backends._mxnet import calls
from mgpu.backends._mxnet.framework import mx

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


class Unknown:
    """Stands on another device for an array that nobody knows there: whoever
    reads it gets an error. All that the library does with an array it does
    with its `handle`."""

    def __init__(self, untold: Untold, error: Callable[[], Exception]
                 ) -> None:
        self._untold, self._error = untold, error

    @property
    def handle(self) -> Any:
        raise self._untold.read(self._error())

    def __getattr__(self, name: str) -> Any:
        # Perhaps it stands for an object that an array is in.
        if name.startswith("__"):
            raise AttributeError(name)
        return self.handle

    def __del__(self) -> None:
        pass

    def detach(self) -> "Unknown":
        return self


class _UnknownND(Unknown, mx.nd.NDArray):
    """Of the one family of arrays."""


class _UnknownNP(Unknown, mx.np.ndarray):
    """Of the other one."""


def unknown_of(x: Any) -> type[Unknown]:
    """The class of what may stand for `x`."""
    return _UnknownNP if isinstance(x, mx.np.ndarray) else _UnknownND


#: by the address of an array object of the library
_known: dict[int, tuple["weakref.ref[Any]", Place, int]] = {}
#: likewise, of arrays that several devices have: what `share` was told
_shared: dict[int, tuple["weakref.ref[Any]", tuple[str, type]]] = {}
_thread = threading.local()


def keep(x: Any) -> None:
    """Watch an array from now on."""
    if find(x)[1] != ITSELF:
        _add(_known, x.handle, Place(), ITSELF)


def find(x: Any) -> tuple[Place | None, int]:
    """The place of `x`, and what it is there: ITSELF, DETACHED (all of it,
    without a history) or OTHER."""
    _, place, kind = _known.get(x.handle.value, (None, None, OTHER))
    return place, kind


def share(x: Any, name: str, kind: type) -> None:
    """Several devices have `x` in attribute `name` of a block of type `kind`:
    no pass may write to it."""
    if x.handle.value not in _shared:
        _add(_shared, x.handle, (name, kind))


def wrote(handles: Iterable[int]) -> None:
    """An operation is about to write to these arrays. ValueError if it is a
    pass's, and several devices have one of them."""
    refuses = getattr(_thread, "refuses", None)
    if refuses:
        for handle in handles if _shared else ():
            if handle in _shared:
                raise messages.shared_array(*_shared[handle][1])
    elif _known and refuses is None:
        for handle in handles:
            if handle in _known:
                _known[handle][1].written = True


@contextmanager
def passing(refuses: bool = True) -> Iterator[None]:
    """What this thread writes inside the block is no user's edit. `refuses`:
    whether what several devices have stays as it is."""
    before = getattr(_thread, "refuses", None)
    _thread.refuses = refuses
    try:
        yield
    finally:
        _thread.refuses = before


def in_pass() -> bool:
    """Whether this thread runs a pass that may write to nothing shared."""
    return bool(_shared) and bool(getattr(_thread, "refuses", None))


def _add(table: dict[int, Any], handle: Any, *what: Any) -> None:
    key = handle.value

    # Arrays outlive this module when a program ends.
    def gone(ref: Any, table: dict[int, Any] = table) -> None:
        if table.get(key, (None,))[0] is ref:
            table.pop(key, None)
    table[key] = weakref.ref(handle, gone), *what


def _viewed(kind: int, call: Any, handle: Any, *rest: Any) -> int:
    status = call(handle, *rest)
    if (_known or _shared) and not status:
        key = getattr(handle, "value", handle)
        _, place, own = _known.get(key, (None, None, OTHER))
        if place is not None:
            _add(_known, rest[-1]._obj, place, max(own, kind))
        if key in _shared:
            _add(_shared, rest[-1]._obj, _shared[key][1])
    return int(status)


for _name, _kind in (("MXNDArrayDetach", DETACHED),
                     ("MXNDArraySlice", OTHER), ("MXNDArraySlice64", OTHER),
                     ("MXNDArrayAt", OTHER),
                     ("MXNDArrayReshape64", OTHER),
                     ("MXShallowCopyNDArray", OTHER)):
    calls.stand_around(_name, partial(_viewed, _kind))
