"""`Ops` of MXNet, for both array families.

`mx.np` arrays use functions of `mx.np` and `mx.npx`, legacy `mx.nd` arrays of
`mx.nd`. The array determines the family, so both work in any mode.
"""
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends._mxnet.framework import mx
from mgpu.backends.ops import Ops


def is_np(x) -> bool:
    """Whether `x` is of the family `mx.np`."""
    return isinstance(x, mx.np.ndarray)


def dtype_of(dtype):
    """Convert ``"float64"`` or ``np.float64`` to a NumPy dtype. Raises
    ValueError if MXNet does not support it."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in messages.DTYPES:
        raise messages.unknown_dtype(dtype)
    return found


def _empty_like(x, shape):
    return mx.nd.empty(tuple(shape), ctx=x.ctx, dtype=x.dtype)


def _elementwise(name: str, module: str = "np") -> Any:
    """The function `name` of ``mx.np`` (or ``mx.npx``) and of ``mx.nd``."""
    own = getattr(mx, module)

    def function(self, x):
        return getattr(own if is_np(x) else mx.nd, name)(x)
    return function


def _binary(name: str) -> Any:
    def function(self, x, y):
        return getattr(mx.np if is_np(x) else mx.nd, name)(x, y)
    return function


class MXNetOps(Ops):
    """MXNet's functions under the names of `Ops`."""

    abs = _elementwise("abs")
    sign = _elementwise("sign")
    sqrt = _elementwise("sqrt")
    exp = _elementwise("exp")
    log = _elementwise("log")
    _log1p = _elementwise("log1p")
    zeros_like = _elementwise("zeros_like")

    relu = _elementwise("relu", "npx")
    sigmoid = _elementwise("sigmoid", "npx")
    maximum = _binary("maximum")
    minimum = _binary("minimum")
    dot = _binary("dot")

    def softplus(self, x):
        return self.relu(x) + self._log1p(self.exp(-self.abs(x)))

    def log_softmax(self, x, axis=-1):
        return (mx.npx if is_np(x) else mx.nd).log_softmax(x, axis=axis)

    def pick(self, x, index, axis=-1):
        return (mx.npx if is_np(x) else mx.nd).pick(x, index, axis=axis)

    def sum(self, x, axis=None, keepdims=False):
        return x.sum(axis=axis, keepdims=keepdims)

    def mean(self, x, axis=None, keepdims=False):
        return x.mean(axis=axis, keepdims=keepdims)

    def conv2d(self, x, weight, bias=None, stride=1, padding=0):
        convolution = mx.npx.convolution if is_np(x) else mx.nd.Convolution
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return convolution(
            *inputs, no_bias=bias is None, kernel=weight.shape[2:],
            num_filter=weight.shape[0], stride=(stride,) * 2,
            pad=(padding,) * 2)

    def _pool(self, kind, x, size, stride):
        pooling = mx.npx.pooling if is_np(x) else mx.nd.Pooling
        stride = size if stride is None else stride
        return pooling(x, kernel=(size,) * 2, pool_type=kind,
                       stride=(stride,) * 2)

    def avg_pool2d(self, x, size, stride=None):
        return self._pool("avg", x, size, stride)

    def max_pool2d(self, x, size, stride=None):
        return self._pool("max", x, size, stride)

    def concat(self, xs, axis=0):
        if is_np(xs[0]):
            return mx.np.concatenate(list(xs), axis=axis)
        # Legacy operators reject arrays without elements.
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        if 0 in shape:
            return _empty_like(xs[0], shape)
        return mx.nd.concat(*[x for x in xs if x.shape[axis]], dim=axis)

    def slice_axis(self, x, axis, begin, end):
        if (begin == end or 0 in x.shape) and not is_np(x):
            shape = list(x.shape)
            shape[axis] = end - begin
            return _empty_like(x, shape)
        before = (slice(None),) * (axis % x.ndim)
        # MXNet takes ten times as long for tuples as for slices.
        return x[(*before, slice(begin, end))] if before \
            else x[begin:end]

    def flat_view(self, x):
        return x.reshape_view(-1) if is_np(x) else x.reshape((-1,))

    def astype(self, x, dtype):
        return x.astype(dtype_of(dtype))

    def stop_gradient(self, x):
        return x.detach()
