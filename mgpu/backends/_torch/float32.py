"""Functions with the float32 steps of MXNet's in a float64 network.

Sources: MXNet 1.9.1, ``src/operator/mshadow_op.h`` (xelu, elu, selu, gelu and
their gradients; erf_grad, hard_sigmoid), ``src/operator/leaky_relu-inl.h``
(slope), ``src/operator/tensor/matrix_op-inl.h`` (bounds of clip),
``src/operator/nn/layer_norm-inl.h`` and ``group_norm-inl.h`` (eps),
``src/operator/contrib/bilinear_resize.cc`` (positions). Torch itself has one:
1/6 in ``hardsigmoid_backward`` (``ActivationKernel.cpp``).
"""
import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mgpu.backends.probing import Float32Functions


_SELU = tuple(float(np.float32(x)) for x in (
    1.6732632423543772848170429916717, 1.0507009873554804934193349852946))
#: 2 / sqrt(pi), the root being one of floats
_ERF = 2.0 / float(np.sqrt(np.float32(np.pi)))


def _single(value: float) -> float:
    return float(np.float32(value))


def _written(inplace: bool, x: Any, compute: Callable[[Any], Any]) -> Any:
    """``compute(x)``, written to `x` if `inplace`."""
    return x.copy_(compute(x.clone())) if inplace else compute(x)


class _Leaky(torch.autograd.Function):
    """The negative half is a float32 product; its gradient is float64."""

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
    """Computed in float32, with the C library's erff and expf."""

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
        slope = (_ERF * _of_libm("expf", -(z * z)).double()).float()
        return gradient * (0.5 * (1 + erf + x * slope / root)).to(
            gradient.dtype)


class _SELUGradient(torch.autograd.Function):
    """MXNet's gradient for x <= 0: lambda (alpha + y), with output y."""

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


class _Erf(torch.autograd.Function):
    """The factor of the gradient is computed from a float32 number."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.erf(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, = ctx.saved_tensors
        return gradient * _ERF * torch.exp(-(x * x))


class _HardSigmoid(torch.autograd.Function):
    """Torch's function, with a gradient of 1/6 in float64."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return F.hardsigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, = ctx.saved_tensors
        return torch.where(x.abs() < 3, gradient / 6, 0.0)


def _of_libm(name: str, x: Any) -> Any:
    """Apply a C function to each element. The vectorized functions of torch
    and NumPy differ in the last bit of some values."""
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


def _clamp(function: Any, x: Any, *bounds: Any, **named: Any) -> Any:
    def single(bound: Any) -> Any:
        return _single(bound) if isinstance(bound, float) else bound
    return function(x, *map(single, bounds),
                    **{n: single(v) for n, v in named.items()})


def _erf(function: Any, x: Any, approximate: str = "none") -> Any:
    if function is not F.gelu:
        return _written(function in _IN_PLACE, x, _Erf.apply)
    return x / 2 * (1 + _Erf.apply(x / math.sqrt(2))) \
        if approximate == "none" else function(x, approximate=approximate)


def _hardsigmoid(_: Any, x: Any, inplace: bool = False) -> Any:
    return _written(inplace, x, _HardSigmoid.apply)


def _hard_sigmoid(function: Any, x: Any, *bounds: Any, **named: Any) -> Any:
    """Includes the explicit form ``(a * x + b).clamp(0, 1)``, with numbers a
    and b."""
    if function in (F.hardsigmoid, F.hardswish):
        inplace = bool(bounds and bounds[0] or named.get("inplace"))
        return _written(inplace, x, lambda x: (
            _single(1 / 6) * x + 0.5).clamp(0, 1) * (
                x if function is F.hardswish else 1))
    line, limits = _line_of(x), [*bounds, *named.values()]
    if line.x is x or any(isinstance(v, torch.Tensor) for v in limits) \
            or limits != [0, 1]:
        return NotImplemented
    result = (_single(line.a) * line.x + _single(line.b)).clamp(0, 1)
    return x.copy_(result) if function in _IN_PLACE else result


class _Line(NamedTuple):
    """A tensor equal to ``a * x + b``."""

    x: Any
    a: float = 1.0
    b: float = 0.0


def _line_of(x: Any) -> _Line:
    line, version = getattr(x, "_mgpu_line", (None, None))
    return line if line is not None and version == x._version else _Line(x)


#: result of an operation of a line and a number, by name
_LINES: dict[str, Callable[[_Line, float], _Line]] = {
    "mul": lambda t, c: _Line(t.x, c * t.a, c * t.b),
    "div": lambda t, c: _Line(t.x, t.a / c, t.b / c),
    "add": lambda t, c: _Line(t.x, t.a, t.b + c),
    "sub": lambda t, c: _Line(t.x, t.a, t.b - c)}


def _noting(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a function of torch. A result ``a * x + b`` is marked as such."""
    result = function(*args, **kwargs)
    rule = _LINES.get(getattr(function, "__name__", ""))
    if rule and len(args) == 2 and not kwargs \
            and isinstance(args[0], torch.Tensor) \
            and isinstance(args[1], (int, float)) and args[1]:
        result._mgpu_line = rule(_line_of(args[0]), args[1]), result._version
    return result


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
    """Interpolation weights, (after, before)."""
    single = np.float32
    rate = single(before - 1) / single(after - 1) if after > 1 else single(0)
    at = (rate * np.arange(after, dtype=single)).astype(single)
    low = at.astype(int)
    upper = (at - low.astype(single)).astype("float64")
    found, rows = np.zeros((after, before)), np.arange(after)
    np.add.at(found, (rows, low), 1 - upper)
    np.add.at(found, (rows, np.minimum(low + 1, before - 1)), upper)
    return torch.from_numpy(found).to(like)


def _called(name: str, *where: Any) -> list[Any]:
    """The functions and methods of a name, including in-place versions."""
    return list(dict.fromkeys(
        function for owner in (*where, torch, torch.Tensor)
        for own in (name, f"{name}_")
        if (function := getattr(owner, own, None)) is not None))


_CLAMPS = _called("clamp") + _called("clip")
_IN_PLACE = {function for name in ("clamp", "clip", "erf")
             for function in _called(name)
             if function.__name__.endswith("_")}
#: by name: functions of torch, and their implementation as in MXNet
KNOWN: dict[str, tuple[Sequence[Any], Callable[..., Any]]] = {
    "leaky_relu": ((F.leaky_relu, torch._C._nn.leaky_relu), _leaky_relu),
    "prelu": ((F.prelu, torch.prelu), _prelu),
    "elu": ((F.elu,), _elu), "selu": ((F.selu, torch.selu), _selu),
    "gelu": ((F.gelu,), _gelu),
    "erf": ((F.gelu, *_called("erf", torch, torch.special)), _erf),
    "hard_sigmoid": ((F.hardsigmoid, F.hardswish, *_CLAMPS), _hard_sigmoid),
    "clip": ((*_CLAMPS, *_called("clamp_min"), *_called("clamp_max"),
              F.hardtanh, F.hardtanh_), _clamp),
    "hardsigmoid": ((F.hardsigmoid,), _hardsigmoid),
    "layer_norm": ((F.layer_norm, torch.layer_norm), _norm),
    "group_norm": ((F.group_norm, torch.group_norm), _norm),
    "interpolate": ((F.interpolate,), _interpolate)}
#: names of a function; the first selected one computes it
_NAMES: dict[Any, list[str]] = {
    function: [name for name in KNOWN if function in KNOWN[name][0]]
    for functions, _ in KNOWN.values() for function in functions}


class AsMXNet(TorchFunctionMode):
    """Mode in which functions of torch compute as selected by `chosen`, in
    the thread that enters it."""

    def __init__(self, chosen: Float32Functions):
        self._chosen = chosen

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        names, kwargs = _NAMES.get(function, ()), kwargs or {}
        for name in names:
            self._chosen.met.setdefault(name)
        for name in names if "input" not in kwargs else ():
            if name in self._chosen.names:
                compute = _selu_gradient if name == "selu" \
                    and self._chosen.gradients else KNOWN[name][1]
                result = compute(function, *args, **kwargs)
                if result is not NotImplemented:
                    return result
        return _noting(function, args, kwargs) \
            if "hard_sigmoid" in self._chosen.names \
            else function(*args, **kwargs)
