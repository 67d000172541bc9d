"""Functions of native arrays: `Ops`, a part of the contract in `base`."""
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mgpu.backends.types import Array


class Ops(Protocol):
    """Differentiable functions of native arrays.

    The arguments are arrays on one device; the result is a new array there.
    `axis` is counted as in NumPy. Required functions first, then the optional
    ones.
    """

    def abs(self, x: Array) -> Array:
        """Absolute value, elementwise."""

    def sign(self, x: Array) -> Array:
        """-1, 0 or 1, elementwise."""

    def sqrt(self, x: Array) -> Array:
        """Square root, elementwise."""

    def exp(self, x: Array) -> Array:
        """``e**x``, elementwise."""

    def log(self, x: Array) -> Array:
        """Natural logarithm, elementwise."""

    def maximum(self, x: Array, y: Array | float) -> Array:
        """Maximum of `x` and `y`, elementwise."""

    def minimum(self, x: Array, y: Array | float) -> Array:
        """Minimum of `x` and `y`, elementwise."""

    def relu(self, x: Array) -> Array:
        """``max(x, 0)``, elementwise."""

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        """Logarithm of the softmax of `x` along `axis`."""

    def pick(self, x: Array, index: Array, axis: int = -1) -> Array:
        """Pick ``x[..., index[...], ...]`` along `axis`, which is removed.
        `index` has the shape of `x` without `axis`, and any numeric dtype."""

    def sum(self, x: Array, axis: None | int | tuple[int, ...] = None,
            keepdims: bool = False) -> Array:
        """Sum along `axis`. None: over all elements."""

    def mean(self, x: Array, axis: None | int | tuple[int, ...] = None,
             keepdims: bool = False) -> Array:
        """Mean along `axis`. None: over all elements."""

    def dot(self, x: Array, y: Array) -> Array:
        """Matrix product of `x` (n, k) and `y` (k, m)."""

    def conv2d(self, x: Array, weight: Array, bias: Array | None = None,
               stride: int = 1, padding: int = 0) -> Array:
        """Cross-correlate `x` (n, c, h, w) with `weight` (o, c, kh, kw), and
        add `bias` (o)."""

    def avg_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Mean of `size` x `size` windows. `stride` defaults to `size`."""

    def max_pool2d(self, x: Array, size: int,
                   stride: int | None = None) -> Array:
        """Maximum of `size` x `size` windows. `stride` defaults to `size`."""

    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array:
        """Concatenate arrays along an existing axis."""

    def slice_axis(self, x: Array, axis: int, begin: int, end: int) -> Array:
        """Slice the elements [`begin`, `end`) along `axis`."""

    def flat_view(self, x: Array) -> Array:
        """One-dimensional view of `x`."""

    def zeros_like(self, x: Array) -> Array:
        """Zeros on the device of `x`, without a gradient."""

    def astype(self, x: Array, dtype: str | np.dtype) -> Array:
        """Copy `x` to another dtype."""

    def stop_gradient(self, x: Array) -> Array:
        """`x`, detached from the graph. Shares memory if the backend supports
        it."""

    def sigmoid(self, x: Array) -> Array:
        """``1 / (1 + exp(-x))``."""

    def softplus(self, x: Array) -> Array:
        """``log(1 + exp(x))``, without overflow."""

    # -- optional: a backend's function may be faster -------------------------

    def from_host(self, values: np.ndarray, like: Array) -> Array:
        """Copy `values` to the device of `like`, in its dtype. The shapes are
        equal."""
        x = self.zeros_like(like)
        x[...] = values
        return x

    def nll(self, x: Array, index: Array, axis: int = -1) -> Array:
        """``-pick(x, index, axis)``: negative log-likelihood of class numbers
        `index`, which are in range, for log-probabilities `x`."""
        return -self.pick(x, index, axis)
