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
_library: dict[str, Any] = {}
_around: dict[str, list[Around]] = {}


def stand_around(name: str, around: Around) -> None:
    """Let each call of the library's function `name` go through `around`."""
    with _changing:
        _library.setdefault(name, getattr(_LIB, name))
        _set(name, [*_around.get(name, ()), around])


def step_aside(name: str, around: Around) -> None:
    """End what `stand_around` has begun."""
    with _changing:
        left = list(_around[name])
        left.remove(around)
        _set(name, left)


def _set(name: str, around: list[Around]) -> None:
    call = _library[name]
    for one in around:
        call = partial(one, call)
    setattr(_LIB, name, call)
    _around[name] = around


def handles(arrays: Any, count: int) -> list[Any]:
    """The addresses of `count` array objects of the library."""
    return [getattr(arrays[i], "value", arrays[i]) for i in range(count)]


def outputs(count: Any, arrays: Any) -> list[Any]:
    """Those that a caller passed by reference, to be written to."""
    return handles(arrays._obj, count._obj.value) if count._obj.value else []


def data_of(handle: Any) -> int:
    """Where the data of an array begin; 0 for none."""
    pointer = ctypes.c_void_p()
    _LIB.MXNDArrayGetData(ctypes.c_void_p(handle), ctypes.byref(pointer))
    return pointer.value or 0
