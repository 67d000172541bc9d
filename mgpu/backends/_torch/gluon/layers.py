"""Layers with Gluon's arithmetic, where torch's own compute otherwise."""
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class _LastWindow:
    """Pooling with ``ceil_mode`` that keeps a last window which lies wholly
    in the padding, as Gluon does and torch does not. Source: MXNet 1.9.1,
    ``src/operator/nn/pooling.cc``, the convention "full"."""

    kernel_size: Any
    stride: Any
    padding: Any

    def _overhang(self, x: torch.Tensor) -> list[int]:
        """The zeros to add to each side, as `F.pad` takes them; empty where
        torch has as many windows."""
        pads: list[int] = []
        differs = False
        for n, k, s, p in zip(x.shape[-2:], *map(_pair, (
                self.kernel_size, self.stride, self.padding))):
            last = -((k - n - 2 * p) // s) * s      # where the last begins
            differs |= last >= n + p
            pads = [p, max(last + k - n - p, 0), *pads]
        return pads if differs else []


def _pair(x: Any) -> Any:
    return x if isinstance(x, tuple) else (x, x)


class GluonMaxPool2d(_LastWindow, nn.MaxPool2d):
    """Max pooling with Gluon's number of windows. One that lies wholly in
    the padding gives the smallest number of the dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) in, (N, C, ceil((H + 2p - k) / s) + 1, ...) out."""
        pads = self._overhang(input)
        if not pads:
            return super().forward(input)
        padded = F.pad(input, pads, value=torch.finfo(input.dtype).min)
        return F.max_pool2d(padded, self.kernel_size, self.stride)


class GluonAvgPool2d(_LastWindow, nn.AvgPool2d):
    """Average pooling with Gluon's number of windows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) in, (N, C, ceil((H + 2p - k) / s) + 1, ...) out."""
        pads = self._overhang(input)
        if not pads:
            return super().forward(input)
        raise ValueError(
            "average pooling where the last window lies wholly in the padding "
            f"has no PyTorch form here; received {tuple(input.shape)} for "
            f"{self!r}. Use another input size.")
