"""`mgpu.strict_devices` on MXNet: checks every call into its library.

Arrays have contexts, but MXNet does not compare CPU contexts. All calls from
Python into the library (the generated functions of `mx.nd`, `mx.np` and
`mx.npx`, its function interface, compiled networks) are a few C functions,
which Python looks up by name in every call. While a mode is on, checking
functions are in their place.
"""
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from mgpu.backends._mxnet.framework import mx
from mgpu.backends.base import Device
from mgpu.backends.ledger import Ledgers

_LIB, _check_call = mx.base._LIB, mx.base.check_call

_ledgers = Ledgers()

#: operators that copy an array from one context to another
_COPIES = {"_copyto", "_npi_copyto"}
_CONTEXTS = {1: "cpu", 2: "gpu"}    # others (pinned, shared) are the host's
_ARRAY = 14     # type code of an array in the function interface


def on() -> bool:
    """Whether this thread is inside `mgpu.strict_devices`."""
    return bool(_ledgers.active())


# -- what a handle stands for -------------------------------------------------

def _device(handle: Any) -> Any:
    kind, index = ctypes.c_int(), ctypes.c_int()
    _check_call(_LIB.MXNDArrayGetContext(
        ctypes.c_void_p(handle), ctypes.byref(kind), ctypes.byref(index)))
    return None if kind.value not in _CONTEXTS else \
        Device(_CONTEXTS[kind.value], index.value)


def _shape(handle: Any) -> tuple[int, ...]:
    dimensions, sizes = ctypes.c_int(), ctypes.POINTER(ctypes.c_int)()
    _check_call(_LIB.MXNDArrayGetShapeEx(
        ctypes.c_void_p(handle), ctypes.byref(dimensions),
        ctypes.byref(sizes)))
    return tuple(sizes[:max(dimensions.value, 0)])


def _itemsize(handle: Any) -> int:
    dtype = ctypes.c_int()
    _check_call(_LIB.MXNDArrayGetDType(
        ctypes.c_void_p(handle), ctypes.byref(dtype)))
    return np.dtype(mx.ndarray.ndarray._DTYPE_MX_TO_NP[dtype.value]).itemsize


def _handles(arrays: Any, count: int) -> list[Any]:
    """The addresses of `count` array objects of the library."""
    return [getattr(arrays[i], "value", arrays[i]) for i in range(count)]


def _outputs(count: Any, arrays: Any) -> list[Any]:
    """Those that a caller passed by reference, to be written to."""
    return _handles(arrays._obj, count._obj.value) if count._obj.value else []


@functools.cache
def _names() -> dict[int, str]:
    """The library's operators by handle."""
    size, plist = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    _check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(plist)))
    found: dict[Any, str] = {}
    for text in plist[:size.value]:
        handle = ctypes.c_void_p()
        _check_call(_LIB.NNGetOpHandle(text, ctypes.byref(handle)))
        # Where an operator has several names, that of a copy is kept.
        if found.get(handle.value, "") not in _COPIES:
            found[handle.value] = str(text, "ascii")
    return found


# -- checks -------------------------------------------------------------------

def _one_device(ledgers: tuple[Any, ...], operation: str,
                handles: list[Any]) -> None:
    devices = [_device(handle) for handle in handles]
    if any(device != devices[0] for device in devices):
        ledgers[-1].refuse(operation, [
            (device, _shape(handle))
            for device, handle in zip(devices, handles)])


def _operator(ledgers, operator, count, inputs, output_count, outputs, *_):
    name = _names().get(operator.value, "an operator")
    handles = _handles(inputs, count.value)
    written = _outputs(output_count, outputs)
    if name in _COPIES:
        if handles and written:
            for ledger in ledgers:
                ledger.copy(_device(handles[0]), _device(written[0]), prod(
                    _shape(handles[0])) * _itemsize(handles[0]))
    else:
        _one_device(ledgers, name, handles + written)


def _compiled(ledgers, operator, count, inputs, output_count, outputs, *_):
    _one_device(ledgers, "a hybridized network",
                _handles(inputs, count.value)
                + _outputs(output_count, outputs))


def _function(ledgers, function, values, codes, count, *_):
    _one_device(ledgers, "a function of mx.np", [
        values[i].v_handle for i in range(count.value)
        if codes[i] == _ARRAY])


def _transfer(to_host, ledgers, array, data, size):
    ends = None, _device(array.value)
    for ledger in ledgers:
        ledger.copy(*(ends[::-1] if to_host else ends),
                    size.value * _itemsize(array.value))


def filled(array: Any) -> None:
    """Count that the new `array` was written from the host, without a call of
    the library."""
    for ledger in _ledgers.active():
        ledger.copy(None, Device(array.ctx.device_type, array.ctx.device_id),
                    array.size * np.dtype(array.dtype).itemsize)


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


_changing = threading.Lock()
_blocks = 0
_plain: dict[str, Any] = {}     # the library's functions, by name


def _watch(step: int) -> None:
    """Put the checking functions in place with the first block, and remove
    them with the end of the last one."""
    global _blocks
    with _changing:
        _blocks += step
        for name, check in _CHECKS.items():
            if step > 0 and _blocks == 1:
                call = _plain[name] = getattr(_LIB, name)
                setattr(_LIB, name, functools.partial(_checked, check, call))
            elif not _blocks:
                setattr(_LIB, name, _plain[name])


def always(ledger: Any) -> None:
    """Turn the mode on for good, in all threads."""
    _watch(+1)
    _ledgers.add(ledger)


@contextlib.contextmanager
def strict(ledger: Any) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.strict`."""
    with _ledgers.using(ledger):
        _watch(+1)
        try:
            yield
        finally:
            _watch(-1)
