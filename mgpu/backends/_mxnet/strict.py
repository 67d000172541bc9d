"""`mgpu.strict_devices` on MXNet: check every call into its library.

Arrays have contexts, but MXNet does not compare CPU contexts. All calls from
Python into the library (the generated functions of `mx.nd`, `mx.np` and
`mx.npx`, its function interface, compiled networks) use a few C functions,
which Python looks up by name in every call. The first use of the mode replaces
them by checking functions.
"""
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mgpu.backends._mxnet.framework import mx
from mgpu.backends.ledger import Ledgers
from mgpu.backends.types import Device

_LIB = mx.base._LIB
_ledgers = Ledgers()
_KINDS = {"cpu", "gpu"}     # others (pinned, shared) count as host
_ARRAY = 14     # type code of an array in the function interface


def on() -> bool:
    """Whether this thread is inside `mgpu.strict_devices`."""
    return bool(_ledgers.active())


class _Borrowed(mx.nd.NDArray):
    """An array of the library that it does not own."""

    __slots__ = ()

    def __init__(self, handle: Any) -> None:
        super().__init__(ctypes.c_void_p(handle))

    def __del__(self) -> None:
        pass


def _device(x: Any) -> Any:
    return Device(x.ctx.device_type, x.ctx.device_id) \
        if x.ctx.device_type in _KINDS else None


def _bytes(x: Any) -> int:
    return int(x.size) * np.dtype(x.dtype).itemsize


def _arrays(arrays: Any, count: int) -> list[Any]:
    return [_Borrowed(getattr(arrays[i], "value", arrays[i]))
            for i in range(count)]


def _outputs(count: Any, arrays: Any) -> list[Any]:
    """The output arrays passed by the caller."""
    return _arrays(arrays._obj, count._obj.value) if count._obj.value else []


@functools.cache
def _name(operator: int) -> str:
    name = ctypes.c_char_p()
    mx.base.check_call(_LIB.MXSymbolGetAtomicSymbolName(
        ctypes.c_void_p(operator), ctypes.byref(name)))
    return str(name.value or b"", "ascii")


# -- checks -------------------------------------------------------------------

def _one_device(ledgers: tuple[Any, ...], operation: str, arrays: list[Any]
                ) -> None:
    devices = list(map(_device, arrays))
    if len(set(devices)) > 1:
        ledgers[-1].reject(operation, [
            (device, x.shape) for device, x in zip(devices, arrays)])


def _operator(ledgers, operator, count, inputs, output_count, outputs, *_):
    name, read = _name(operator.value), _arrays(inputs, count.value)
    written = _outputs(output_count, outputs)
    if name != "_copyto":
        _one_device(ledgers, name, read + written)
    elif read and written:
        for ledger in ledgers:
            ledger.copy(_device(read[0]), _device(written[0]), _bytes(read[0]))


def _compiled(ledgers, operator, count, inputs, output_count, outputs, *_):
    _one_device(ledgers, "a hybridized network",
                _arrays(inputs, count.value) + _outputs(output_count, outputs))


def _function(ledgers, function, values, codes, count, *_):
    _one_device(ledgers, "a function of mx.np", [
        _Borrowed(values[i].v_handle) for i in range(count.value)
        if codes[i] == _ARRAY])


def _transfer(to_host, ledgers, array, data, size):
    x = _Borrowed(array.value)
    ends = None, _device(x)
    for ledger in ledgers:
        ledger.copy(*(ends[::-1] if to_host else ends),
                    size.value * np.dtype(x.dtype).itemsize)


def filled(array: Any) -> None:
    """Count the host copy of the new `array`, which did not use the
    library."""
    for ledger in _ledgers.active():
        ledger.copy(None, _device(array), _bytes(array))


_CHECKS: dict[str, Callable[..., None]] = {
    "MXImperativeInvokeEx": _operator, "MXInvokeCachedOpEx": _compiled,
    "MXNetFuncCall": _function,
    "MXNDArraySyncCopyFromCPU": functools.partial(_transfer, False),
    "MXNDArraySyncCopyToCPU": functools.partial(_transfer, True)}


# -- the mode -----------------------------------------------------------------

def _checked(check: Callable[..., None], call: Callable[..., int], *args: Any
             ) -> int:
    ledgers = _ledgers.active()
    if ledgers:     # another thread may have none
        check(ledgers, *args)
    return call(*args)


_watched = threading.Lock()     # acquired once


def _watch() -> None:
    if _watched.acquire(blocking=False):
        for name, check in _CHECKS.items():
            setattr(_LIB, name, functools.partial(
                _checked, check, getattr(_LIB, name)))


def always(ledger: Any) -> None:
    """Enable the mode permanently, in all threads."""
    _watch()
    _ledgers.add(ledger)


@contextlib.contextmanager
def strict(ledger: Any) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.strict`."""
    _watch()
    with _ledgers.using(ledger):
        yield
