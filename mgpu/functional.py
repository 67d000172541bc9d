"""Functions for networks written by hand, the same on both engines.

`allreduce` and `allgather` here return new arrays and pass gradients, which
neither framework's own collectives do. The other functions are those of the
engine's `Ops` (`mgpu.backends.base.Ops` says what each takes): `relu`,
`conv2d`, `avg_pool2d`, `max_pool2d`, `dot`, `log_softmax`, `sum`, `mean`,
`exp`, `log`, `sqrt`, `abs`, `sign`, `maximum`, `minimum`, `sigmoid`,
`softplus`, `concat`, `pick`, `nll`, `stop_gradient`, `zeros_like`, `astype`.
"""
from typing import Any, List

from mgpu.backends import base, get_backend
from mgpu.collectives import (check_joinable, check_list, check_op,
                              gathered)


def allreduce(data: List[Any], *, op: str = "sum") -> List[Any]:
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


def allgather(data: List[Any], *, axis: int = 0) -> List[Any]:
    """All elements joined along `axis`, on every device, with gradients.

    Parameters and errors are those of `mgpu.allgather`. Backward: the
    gradient of ``x[j]`` is the sum over devices of its slice of the
    gradients of the results, a reduce-scatter.
    """
    return gathered(check_joinable(data, axis), axis)


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in vars(base.Ops):
        raise AttributeError(f"module 'mgpu.functional' has no {name!r}")

    def function(*args: Any, **kwargs: Any) -> Any:
        backend = get_backend()
        try:
            return getattr(backend.ops, name)(*args, **kwargs)
        except (AssertionError, AttributeError, TypeError):
            for x in args:      # the likely cause, in our words
                base.refuse_foreign(x, backend.name)
            raise
    function.__name__ = name
    function.__doc__ = getattr(base.Ops, name).__doc__
    return function


def __dir__() -> List[str]:
    return sorted(["allreduce", "allgather"] + [
        n for n in vars(base.Ops) if not n.startswith("_")])
