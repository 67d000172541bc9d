"""`Ops` on MXNet, for both of its array families.

`mx.np` arrays go to `mx.np` and `mx.npx`, legacy `mx.nd` arrays to `mx.nd`:
by the array at hand, so that either works whatever mode the process is in.
"""
import numpy as np

from mgpu.backends import base, messages
from mgpu.backends._mxnet.framework import mx


def is_np(x) -> bool:
    return isinstance(x, mx.np.ndarray)


def dtype_of(dtype):
    """``"float64"`` or ``np.float64``: the NumPy dtype, if MXNet has it."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in messages.DTYPES:
        raise messages.unknown_dtype(dtype)
    return found


def _pair(n):
    return (n, n)


def _empty_like(x, shape):
    return mx.nd.empty(tuple(shape), ctx=x.ctx, dtype=x.dtype)


class MXNetOps(base.Ops):
    def _elementwise(name):
        def function(self, x):
            return getattr(mx.np if is_np(x) else mx.nd, name)(x)
        return function

    abs = _elementwise("abs")
    sign = _elementwise("sign")
    sqrt = _elementwise("sqrt")
    exp = _elementwise("exp")
    log = _elementwise("log")
    _log1p = _elementwise("log1p")
    zeros_like = _elementwise("zeros_like")
    del _elementwise

    def relu(self, x):
        return (mx.npx if is_np(x) else mx.nd).relu(x)

    def sigmoid(self, x):
        return (mx.npx if is_np(x) else mx.nd).sigmoid(x)

    def maximum(self, x, y):
        return (mx.np if is_np(x) else mx.nd).maximum(x, y)

    def minimum(self, x, y):
        return (mx.np if is_np(x) else mx.nd).minimum(x, y)

    def softplus(self, x):
        return self.relu(x) + self._log1p(self.exp(-self.abs(x)))

    def log_softmax(self, x, axis=-1):
        return (mx.npx if is_np(x) else mx.nd).log_softmax(x, axis=axis)

    def pick(self, x, index, axis=-1):
        return (mx.npx if is_np(x) else mx.nd).pick(x, index, axis=axis)

    def nll(self, x, index, axis=-1):
        return -self.pick(x, index, axis)

    def sum(self, x, axis=None, keepdims=False):
        return x.sum(axis=axis, keepdims=keepdims)

    def mean(self, x, axis=None, keepdims=False):
        return x.mean(axis=axis, keepdims=keepdims)

    def dot(self, x, y):
        return (mx.np if is_np(x) else mx.nd).dot(x, y)

    def conv2d(self, x, weight, bias=None, stride=1, padding=0):
        convolution = mx.npx.convolution if is_np(x) else mx.nd.Convolution
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return convolution(
            *inputs, no_bias=bias is None, kernel=weight.shape[2:],
            num_filter=weight.shape[0], stride=_pair(stride),
            pad=_pair(padding))

    def _pool(self, kind, x, size, stride):
        pooling = mx.npx.pooling if is_np(x) else mx.nd.Pooling
        return pooling(x, kernel=_pair(size), pool_type=kind,
                       stride=_pair(size if stride is None else stride))

    def avg_pool2d(self, x, size, stride=None):
        return self._pool("avg", x, size, stride)

    def max_pool2d(self, x, size, stride=None):
        return self._pool("max", x, size, stride)

    def concat(self, xs, axis=0):
        if is_np(xs[0]):
            return mx.np.concatenate(list(xs), axis=axis)
        # Legacy operators refuse arrays without elements.
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        if 0 in shape:
            return _empty_like(xs[0], shape)
        return mx.nd.concat(*[x for x in xs if x.shape[axis]], dim=axis)

    def slice_axis(self, x, axis, begin, end):
        if begin == end and not is_np(x):
            shape = list(x.shape)
            shape[axis] = 0
            return _empty_like(x, shape)
        index = (slice(None),) * (axis % x.ndim) + (slice(begin, end),)
        return x[index]

    def flat_view(self, x):
        return x.reshape_view(-1) if is_np(x) else x.reshape((-1,))

    def astype(self, x, dtype):
        return x.astype(dtype_of(dtype))

    def stop_gradient(self, x):
        return x.detach()
