"""Functions for networks without a framework's layers, on both backends.

`allreduce` and `allgather` here return new arrays and pass gradients, which
neither framework's own collectives do. The other functions are those of the
backend's `Ops` (`mgpu.backends.ops.Ops` says what each takes): `relu`,
`conv2d`, `avg_pool2d`, `max_pool2d`, `dot`, `log_softmax`, `sum`, `mean`,
`exp`, `log`, `sqrt`, `abs`, `sign`, `maximum`, `minimum`, `sigmoid`,
`softplus`, `concat`, `pick`, `nll`, `stop_gradient`, `zeros_like`, `astype`.
"""
from collections.abc import Callable
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.ops import Ops
from mgpu.collectives import check_joinable, check_list, check_op, gathered

_OPS = tuple(name for name in vars(Ops)
             if name[0] != "_" and name != "from_host")
__all__ = ["allgather", "allreduce", *_OPS]


def allreduce(data: list[Any], *, op: str = "sum") -> list[Any]:
    """The sum (or mean) over devices, as new arrays, with gradients.

    Parameters
    ----------
    data : list of native arrays
        One per device, of one shape and dtype.
    op : {"sum", "mean"}

    Returns
    -------
    list of native arrays
        ``y[i] = x[0] + x[1] + ...`` on the device of ``x[i]``. Backward: the
        gradient of ``x[j]`` is the sum of the gradients of all ``y[i]``
        (divided by K for "mean"): the all-reduce of the gradients.

    Raises
    ------
    TypeError, ValueError
        As `mgpu.allreduce` does.
    """
    arrays = check_list(data)
    check_op(arrays, op, ("sum", "mean"))
    backend = get_backend()
    total = arrays[0]
    for x in arrays[1:]:
        total = total + backend.put(x, arrays[0])
    if op == "mean":
        total = total / len(arrays)
    return [backend.put(total, x) for x in arrays]


def allgather(data: list[Any], *, axis: int = 0) -> list[Any]:
    """All elements joined along `axis`, on every device, with gradients.

    Parameters and errors are those of `mgpu.allgather`. Backward: the
    gradient of ``x[j]`` is the sum over devices of its slice of the
    gradients of the results, a reduce-scatter.
    """
    return gathered(check_joinable(data, axis), axis)


def __getattr__(name: str) -> Callable[..., Any]:
    """``Ops.name`` of the backend in use at the time of the call."""
    if name not in _OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(get_backend().ops, name)(*args, **kwargs)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = getattr(Ops, name).__doc__
    globals()[name] = function
    return function
