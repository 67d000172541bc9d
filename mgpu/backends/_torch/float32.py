"""Functions that compute as MXNet does where it uses float32 in a float64
network.

Sources: MXNet 1.9.1, ``src/operator/mshadow_op.h`` (xelu, elu, selu, gelu and
their gradients), ``src/operator/leaky_relu-inl.h`` (slope),
``src/operator/nn/layer_norm-inl.h`` and ``group_norm-inl.h`` (eps),
``src/operator/contrib/bilinear_resize.cc`` (positions).
"""
import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mgpu.backends.base import Float32Functions

_SELU = tuple(float(np.float32(x)) for x in (
    1.6732632423543772848170429916717, 1.0507009873554804934193349852946))


def _single(value: float) -> float:
    return float(np.float32(value))


def _written(inplace: bool, x: Any, compute: Callable[[Any], Any]) -> Any:
    """``compute(x)``, put in the place of `x` if the user asks for that."""
    return x.copy_(compute(x.clone())) if inplace else compute(x)


class _Leaky(torch.autograd.Function):
    """The negative half is a product of floats; its gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Any, slope: Any) -> Any:
        ctx.save_for_backward(x, slope)
        return torch.where(x > 0, x, (x.float() * slope.float()).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, slope = ctx.saved_tensors
        own = torch.where(x > 0, 0.0, x) * gradient
        axes = [i for i, n in enumerate(slope.shape) if n == 1]
        return (torch.where(x > 0, gradient, gradient * slope),
                own.sum(axes, keepdim=True) if axes else own)


class _GELU(torch.autograd.Function):
    """All of it is in floats, with the C library's erff and expf."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        one = x.float()
        root = one.new_tensor(math.sqrt(2))
        erf = _of_libm("erff", one / root)
        ctx.save_for_backward(one, erf, root)
        return (0.5 * one * (1 + erf)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, erf, root = ctx.saved_tensors
        z = x / root
        scale = 2.0 / float(np.sqrt(np.float32(np.pi)))
        slope = (scale * _of_libm("expf", -(z * z)).double()).float()
        return gradient * (0.5 * (1 + erf + x * slope / root)).to(
            gradient.dtype)


class _SELUGradient(torch.autograd.Function):
    """MXNet's gradient for x <= 0: lambda (alpha + y), with the output y."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        alpha, scale = _SELU
        y = scale * torch.where(x > 0, x, alpha * torch.expm1(x))
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, y = ctx.saved_tensors
        alpha, scale = _SELU
        return gradient * scale * torch.where(x > 0, 1.0, alpha + y)


def _of_libm(name: str, x: Any) -> Any:
    """A function of C of each element. Torch's own vectorised ones differ
    from it in the last bit of some values, and so do NumPy's."""
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    values = x.detach().cpu().numpy()
    return torch.from_numpy(np.frompyfunc(function, 1, 1)(values).astype(
        "float32")).to(x)


# -- functions of torch -------------------------------------------------------

def _leaky_relu(_: Any, x: Any, negative_slope: float = 0.01,
                inplace: bool = False) -> Any:
    slope = x.new_tensor(_single(negative_slope)).reshape([1] * x.dim())
    return _written(inplace, x, lambda x: _Leaky.apply(x, slope))


def _prelu(_: Any, x: Any, weight: Any) -> Any:
    return _Leaky.apply(x, weight.reshape(
        [1, -1] + [1] * (x.dim() - 2)) if x.dim() > 1 else weight)


def _elu(function: Any, x: Any, alpha: float = 1.0, inplace: bool = False
         ) -> Any:
    return function(x, _single(alpha), inplace)


def _selu(_: Any, x: Any, inplace: bool = False) -> Any:
    alpha, scale = _SELU
    return _written(inplace, x, lambda x: scale * F.elu(x, alpha))


def _selu_gradient(_: Any, x: Any, inplace: bool = False) -> Any:
    return _written(inplace, x, _SELUGradient.apply)


def _gelu(function: Any, x: Any, approximate: str = "none") -> Any:
    return _GELU.apply(x) if approximate == "none" \
        else function(x, approximate=approximate)


def _norm(function: Any, x: Any, of: Any, weight: Any = None,
          bias: Any = None, eps: float = 1e-5, *rest: Any) -> Any:
    return function(x, of, weight, bias, _single(eps), *rest)


def _interpolate(function: Any, x: Any, size: Any = None,
                 scale_factor: Any = None, mode: str = "nearest",
                 align_corners: bool | None = None, *rest: Any,
                 **options: Any) -> Any:
    if mode != "bilinear" or not align_corners:
        return function(x, size, scale_factor, mode, align_corners, *rest,
                        **options)

    def pair(value: Any) -> Sequence[Any]:
        return value if isinstance(value, (tuple, list)) else [value] * 2
    sizes = pair(size) if size is not None else [
        int(n * s) for n, s in zip(x.shape[2:], pair(scale_factor))]
    rows, columns = (_weights(n, int(m), x)
                     for n, m in zip(x.shape[2:], sizes))
    return rows @ x @ columns.T


def _weights(before: int, after: int, like: Any) -> Any:
    """What each of `after` points is made of, of `before` points."""
    single = np.float32
    rate = single(before - 1) / single(after - 1) if after > 1 else single(0)
    at = (rate * np.arange(after, dtype=single)).astype(single)
    low = at.astype(int)
    upper = (at - low.astype(single)).astype("float64")
    found, rows = np.zeros((after, before)), np.arange(after)
    np.add.at(found, (rows, low), 1 - upper)
    np.add.at(found, (rows, np.minimum(low + 1, before - 1)), upper)
    return torch.from_numpy(found).to(like)


#: by name: functions of torch, and what computes them as MXNet does
KNOWN: dict[str, tuple[Sequence[Any], Callable[..., Any]]] = {
    "leaky_relu": ((F.leaky_relu, torch._C._nn.leaky_relu), _leaky_relu),
    "prelu": ((F.prelu, torch.prelu), _prelu),
    "elu": ((F.elu,), _elu), "selu": ((F.selu, torch.selu), _selu),
    "gelu": ((F.gelu,), _gelu),
    "layer_norm": ((F.layer_norm, torch.layer_norm), _norm),
    "group_norm": ((F.group_norm, torch.group_norm), _norm),
    "interpolate": ((F.interpolate,), _interpolate)}
_NAMES = {function: name for name, (functions, _) in KNOWN.items()
          for function in functions}


class AsMXNet(TorchFunctionMode):
    """Inside, functions of torch compute as `chosen` says. It is entered in
    the thread that calls them."""

    def __init__(self, chosen: Float32Functions):
        self._chosen = chosen

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        name, kwargs = _NAMES.get(function), kwargs or {}
        if name is None:
            return function(*args, **kwargs)
        self._chosen.met.setdefault(name)
        if name not in self._chosen.names or "input" in kwargs:
            return function(*args, **kwargs)
        compute = _selu_gradient if name == "selu" \
            and self._chosen.gradients else KNOWN[name][1]
        return compute(function, *args, **kwargs)
