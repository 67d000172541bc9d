"""Devices of both backends.

A `Device` has a kind (``"cpu"`` or ``"gpu"``) and an index. CPU devices are
*logical*: `cpu(0)`, `cpu(1)`, ... share the processor and its memory, but not
arrays, which are copied between them as between GPUs. So code for several
GPUs can be tested on a machine without GPUs. GPU devices are those visible to
the current backend.
"""
import re
from collections.abc import Sequence
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.types import Device
from mgpu.utils.arguments import is_integer
from mgpu.utils.environment import cpu_cores

__all__ = ["Device", "as_device", "as_devices", "check_device", "cpu",
           "cpu_cores", "gpu", "list_devices", "num_gpus", "try_all_gpus",
           "try_gpu"]

_TEXT = re.compile(r"(cpu|gpu|cuda)(?::(\d+)|\((\d+)\))?\Z")


def cpu(i: int = 0) -> Device:
    """Logical CPU device `i`, for any `i` >= 0."""
    return as_device(Device("cpu", i))


def gpu(i: int = 0) -> Device:
    """GPU `i`. Its existence is checked when it is used."""
    return as_device(Device("gpu", i))


def as_device(device: Any) -> Device:
    """Convert a device name or a native device to a `Device`.

    Parameters
    ----------
    device : Device, str, or native handle
        ``cpu(1)``, ``"cpu:1"``, ``"gpu:0"``, ``"cuda:0"``, ``"cpu"``,
        ``mx.cpu(1)``, ``torch.device("cuda:0")``.

    Raises
    ------
    ValueError
        An unknown name, or a negative index.
    TypeError
        `device` has another type.
    """
    if isinstance(device, Device):
        kind, index = device
    elif isinstance(device, str):
        match = _TEXT.match(device.strip())
        if match is None:
            raise ValueError(
                f"unknown device; received {device!r}. Use cpu(i), gpu(i), "
                "or a string such as 'cpu:1', 'gpu:0', 'cuda:0'.")
        kind, index = match[1], int(match[2] or match[3] or 0)
    elif hasattr(device, "device_type") and hasattr(device, "device_id"):
        kind, index = device.device_type, device.device_id    # mx.Context
    elif hasattr(device, "type") and hasattr(device, "index"):
        kind, index = device.type, device.index or 0          # torch.device
    else:
        raise TypeError(
            f"expected a device; received {device!r} of type "
            f"{type(device).__name__}. Use mgpu.list_devices(2) for the first "
            "two, or cpu(i), gpu(i), 'cpu:1', 'gpu:0', 'cuda:0'.")
    kind = "gpu" if kind == "cuda" else kind
    if kind not in ("cpu", "gpu") or not is_integer(index, 0):
        raise ValueError(
            f"unknown device; received {kind}({index!r}). Use cpu(i) or "
            "gpu(i) with an index of 0 or more.")
    return Device(kind, int(index))


def as_devices(devices: Any) -> list[Device]:
    """Convert device names to a list of distinct, existing devices.

    Parameters
    ----------
    devices : one device, or a sequence of devices
        As for `as_device`.

    Returns
    -------
    list of Device

    Raises
    ------
    ValueError
        No device, a device twice (the second copy would overwrite the
        gradients of the first), or a GPU that is not available.
    """
    if isinstance(devices, (str, Device)) or not isinstance(devices, Sequence):
        devices = [devices]
    found = [as_device(d) for d in devices]
    if not found:
        raise ValueError("at least one device is needed; received an empty "
                         "list. Use for example [cpu(0)] or try_all_gpus().")
    if len(set(found)) != len(found):
        twice = sorted({str(d) for d in found if found.count(d) > 1})
        raise ValueError(
            f"devices must be distinct; received {found}, with "
            f"{', '.join(twice)} more than once. CPU devices are unlimited: "
            f"for {len(found)} of them use list_devices({len(found)}).")
    for device in found:
        check_device(device)
    return found


def check_device(device: Device) -> None:
    """Raise ValueError if `device` is a GPU that the current backend does not
    see."""
    if device.kind == "gpu":
        backend = get_backend()
        count = backend.num_gpus()
        if device.index >= count:
            raise ValueError(
                f"{device} is not available: the {backend.name} backend sees "
                f"{count} GPU{'s' * (count != 1)}. Use try_gpu("
                f"{device.index}), or a logical device such as "
                f"cpu({device.index}).")


def num_gpus() -> int:
    """Number of GPUs visible to the current backend.

    On torch, ``MGPU_LOGICAL_GPUS=k`` creates `k` logical GPUs that share the
    physical ones, if any.
    """
    return get_backend().num_gpus()


def try_gpu(i: int = 0) -> Device:
    """``gpu(i)`` if available, else ``cpu(i)``. The index is the same, so
    distinct devices remain distinct."""
    return gpu(i) if num_gpus() > i else cpu(i)


def try_all_gpus() -> list[Device]:
    """All available GPUs, or ``[cpu(0)]``."""
    return [gpu(i) for i in range(num_gpus())] or [cpu(0)]


def list_devices(k: int) -> list[Device]:
    """The first `k` GPUs if there are so many, else `k` logical CPUs."""
    if not is_integer(k, 1):
        raise ValueError("the number of devices must be a whole number, 1 or "
                         f"more; received {k!r}. Use for example "
                         "list_devices(2).")
    kind = gpu if num_gpus() >= k else cpu
    return [kind(i) for i in range(k)]
