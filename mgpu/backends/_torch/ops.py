"""`Ops` of PyTorch."""
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from mgpu.backends import messages
from mgpu.backends.ops import Ops


def _elementwise(compute: Callable[[Any], Any]) -> Any:
    def function(self, x):
        return compute(x)
    return function


class TorchOps(Ops):
    """Torch's functions under the names of `Ops`."""

    abs = _elementwise(torch.abs)
    sign = _elementwise(torch.sign)
    sqrt = _elementwise(torch.sqrt)
    exp = _elementwise(torch.exp)
    log = _elementwise(torch.log)
    relu = _elementwise(torch.relu)
    sigmoid = _elementwise(torch.sigmoid)
    zeros_like = _elementwise(torch.zeros_like)
    stop_gradient = _elementwise(torch.Tensor.detach)

    def from_host(self, values, like):
        return torch.from_numpy(values).to(like.device, like.dtype, copy=True)

    def maximum(self, x, y):
        return torch.maximum(x, y) if torch.is_tensor(y) else x.clamp(min=y)

    def minimum(self, x, y):
        return torch.minimum(x, y) if torch.is_tensor(y) else x.clamp(max=y)

    def softplus(self, x):
        # F.softplus is linear above 20; this form, as on MXNet, is exact to
        # rounding everywhere.
        return torch.relu(x) + torch.log1p(torch.exp(-torch.abs(x)))

    def log_softmax(self, x, axis=-1):
        return torch.log_softmax(x, axis)

    def pick(self, x, index, axis=-1):
        index = index.to(torch.int64).unsqueeze(axis)
        return torch.gather(x, axis, index).squeeze(axis)

    def nll(self, x, index, axis=-1):
        if axis % x.dim() != 1:
            return -self.pick(x, index, axis)
        # One operation each way instead of four.
        return F.nll_loss(x, index.to(torch.int64), reduction="none")

    def sum(self, x, axis=None, keepdims=False):
        axis = tuple(range(x.dim())) if axis is None else axis
        return torch.sum(x, axis, keepdim=keepdims)

    def mean(self, x, axis=None, keepdims=False):
        axis = tuple(range(x.dim())) if axis is None else axis
        return torch.mean(x, axis, keepdim=keepdims)

    def dot(self, x, y):
        return torch.mm(x, y)

    def conv2d(self, x, weight, bias=None, stride=1, padding=0):
        return F.conv2d(x, weight, bias, stride, padding)

    def avg_pool2d(self, x, size, stride=None):
        return F.avg_pool2d(x, size, stride)

    def max_pool2d(self, x, size, stride=None):
        return F.max_pool2d(x, size, stride)

    def concat(self, xs, axis=0):
        return torch.cat(list(xs), axis)

    def slice_axis(self, x, axis, begin, end):
        return x.narrow(axis, begin, end - begin)

    def flat_view(self, x):
        if not x.is_contiguous():
            raise ValueError(
                "a flat view needs a contiguous array; "
                f"received one of shape {tuple(x.shape)} with strides "
                f"{x.stride()}. Use x.contiguous(), or in mgpu.allreduce "
                "algorithm='naive' or 'tree'.")
        return x.view(-1)

    def astype(self, x, dtype):
        return x.to(dtype_of(dtype), copy=True)


def name_of_dtype(x: torch.Tensor) -> str:
    """NumPy's name of the dtype of `x`."""
    return str(x.dtype).removeprefix("torch.")


def dtype_of(dtype) -> torch.dtype:
    """The torch dtype of ``"float64"``, ``np.float64``, ``torch.float64``."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = getattr(dtype, "__name__", None) or str(dtype)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise messages.unknown_dtype(dtype)
    return found
