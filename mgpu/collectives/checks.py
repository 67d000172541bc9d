"""Argument checks of the collectives."""
from collections.abc import Sequence
from typing import Any

from mgpu.backends import get_backend, messages
from mgpu.backends.types import Array
from mgpu.utils.arguments import is_integer

OPS = ("sum", "mean", "max", "min")
#: bytes of one element, by `dtype_name`
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
            "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
            "bool": 1}


def _native_list(data: Any) -> list[Array]:
    backend = get_backend()
    if backend.is_native(data) or not isinstance(data, (list, tuple)):
        raise TypeError(
            "data must be a list with one array per device; received "
            f"{type(data).__name__}. Create one with mgpu.split_and_load, or "
            "with mgpu.put(x, device) for each device.")
    if not data:
        raise ValueError("data must hold at least one array; received an "
                         "empty list. Pass one array per device.")
    messages.check_native(data, backend, "data must hold")
    return list(data)


def dtype_name(x: Array) -> str:
    """Name of the dtype, such as "float32"."""
    name = getattr(x.dtype, "__name__", None) or str(x.dtype)
    return name.split(".")[-1].rstrip("_")


def forms(arrays: list[Array]) -> str:
    """Shapes and dtypes as text, for a message."""
    return ", ".join(f"{tuple(x.shape)} {dtype_name(x)}" for x in arrays)


def check_list(data: Any) -> list[Array]:
    """`data` as a list of native arrays of the same shape and dtype. Raises
    TypeError or ValueError."""
    arrays = _native_list(data)
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if any(x.shape != shape or x.dtype != dtype for x in arrays[1:]):
        raise ValueError("data must hold arrays of one shape and dtype; "
                         f"received {forms(arrays)}. Convert them.")
    return arrays


def check_op(arrays: list[Array], op: str, ops: Sequence[str] = OPS) -> None:
    """Raise ValueError if `op` is unknown or does not support the dtype of
    `arrays`."""
    if op not in ops:
        raise ValueError(f"unknown op; received {op!r}. Use one of "
                         f"{', '.join(map(repr, ops))}.")
    dtype = dtype_name(arrays[0])
    if "complex" in dtype and op in ("max", "min"):
        raise ValueError(
            f"{op} is not defined for complex numbers; received "
            f"{forms(arrays)}. Reduce their absolute values, or real and "
            "imaginary parts.")
    if dtype == "bool" or (op == "mean" and "int" in dtype):
        raise ValueError(
            f"{op} does not support {dtype} arrays; received "
            f"{forms(arrays)}. Convert them first, for example with "
            "mgpu.functional.astype(x, 'float32').")


def check_reducible(data: Any, op: str) -> list[Array]:
    """`data` as a list of native arrays that `op` can reduce."""
    arrays = check_list(data)
    check_op(arrays, op)
    return arrays


def check_root(root: int, k: int) -> None:
    """Raise ValueError unless `root` is the index of one of `k` devices."""
    if not is_integer(root, 0) or root >= k:
        raise ValueError(f"root must be a device index, 0 to "
                         f"{k - 1}; received {root!r}.")


def check_apart(arrays: list[Array]) -> list[Array]:
    """`arrays`, the output of a collective. Raises ValueError if elements
    share memory."""
    backend = get_backend()
    for x in arrays:
        backend.check_writable(x)
    messages.check_apart([backend.memory(x) for x in arrays])
    return arrays


def check_joinable(data: Any, axis: int) -> list[Array]:
    """`data` as a list of native arrays that differ only in `axis`."""
    arrays = _native_list(data)
    for x in arrays:
        if not -len(x.shape) <= axis < len(x.shape):
            raise ValueError(
                f"an array of shape {tuple(x.shape)} has no axis {axis} to "
                f"concatenate along; received {forms(arrays)}. Use an axis "
                "of all arrays.")
    def form(x: Array) -> tuple[Any, ...]:
        along = axis % len(x.shape)
        return (dtype_name(x), tuple(x.shape[:along]),
                tuple(x.shape[along + 1:]), along)
    if len(set(map(form, arrays))) > 1:
        raise ValueError(
            f"data must hold arrays of one dtype that differ only in axis "
            f"{axis}; received {forms(arrays)}. Convert them.")
    return arrays
