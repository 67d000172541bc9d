"""Functions that stand around calls of MXNet's library.

All ways from Python into the library (the generated functions of `mx.nd`,
`mx.np` and `mx.npx`, its function interface, compiled networks, backward
passes) are a few C functions, which Python looks up by name in every call.
"""
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from mgpu.backends._mxnet.framework import mx

_LIB = mx.base._LIB

#: ``around(call, *args)`` returns ``call(*args)``
Around = Callable[..., int]

ARRAY = 14      # type code of an array in the function interface

_changing = threading.Lock()
#: by name: (what stands around, the function with it), the outermost last
_around: dict[str, list[tuple[Any, Any]]] = {}


def stand_around(name: str, around: Around) -> None:
    """Let each call of the library's function `name` go through `around`."""
    with _changing:
        chain = _around.setdefault(name, [(None, getattr(_LIB, name))])
        _add(name, chain, around)


def step_aside(name: str, around: Around) -> None:
    """End what `stand_around` has begun."""
    with _changing:
        chain = _around[name]
        place = [one for one, _ in chain].index(around)
        outer, chain[place:] = chain[place + 1:], []
        setattr(_LIB, name, chain[-1][1])
        for one, _ in outer:
            _add(name, chain, one)


def _add(name: str, chain: list[tuple[Any, Any]], around: Around) -> None:
    chain.append((around, partial(around, chain[-1][1])))
    setattr(_LIB, name, chain[-1][1])


def handles(arrays: Any, count: int) -> list[Any]:
    """The addresses of `count` array objects of the library."""
    return [getattr(arrays[i], "value", arrays[i]) for i in range(count)]


def outputs(count: Any, arrays: Any) -> list[Any]:
    """Those that a caller passed by reference, to be written to."""
    return handles(arrays._obj, count._obj.value) if count._obj.value else []


def operator(name: str) -> int | None:
    """The address of an operator; None if this MXNet has none of the name."""
    found = ctypes.c_void_p()
    _LIB.NNGetOpHandle(name.encode(), ctypes.byref(found))
    return found.value


def option(name: str, count: Any, names: Any, values: Any, *_: Any) -> bool:
    """Whether an operator is called with option `name` set."""
    return any(names[i] == name.encode() and values[i] in (b"True", b"1")
               for i in range(count.value))


def wait_for(handle: Any) -> int:
    """Wait until nothing that is queued writes to an array. Returns the
    library's status: not 0 if one of the operations failed."""
    return _LIB.MXNDArrayWaitToRead(ctypes.c_void_p(handle))


def data_of(handle: Any) -> int:
    """Where the data of an array begin; 0 for none. Nothing that is queued
    may write to it: its memory may not be there yet."""
    pointer = ctypes.c_void_p()
    _LIB.MXNDArrayGetData(ctypes.c_void_p(handle), ctypes.byref(pointer))
    return pointer.value or 0
