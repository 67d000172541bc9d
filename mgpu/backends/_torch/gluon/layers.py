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


class GluonLayerNorm(nn.LayerNorm):
    """Layer normalization over one axis, which need not be the last."""

    def __init__(self, normalized_shape: int, eps: float, axis: int) -> None:
        super().__init__(normalized_shape, eps)
        self.axis = axis

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The shape stays."""
        return super().forward(input.movedim(self.axis, -1)).movedim(
            -1, self.axis)


class GluonInstanceNorm(nn.InstanceNorm2d):
    """The same for any number of axes behind the second: an exported graph
    does not say how many there are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) in and out."""
        if input.dim() < 3:
            raise ValueError("instance normalization needs 3 axes or more; "
                             f"received {tuple(input.shape)}.")
        return self._apply_instance_norm(input)


class GluonBilinear(nn.Upsample):
    """Bilinear interpolation with MXNet's weights, which it makes in float32
    also for float64. To a single row or column it takes the first one where
    corners are not aligned."""

    def __init__(self, size: tuple[int, int], align_corners: bool = True
                 ) -> None:
        super().__init__(size=size, mode="bilinear",
                         align_corners=align_corners)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) in, (N, C, *size) out."""
        size: Any = self.size
        if input.dtype != torch.float64 and (self.align_corners
                                             or 1 not in size):
            return super().forward(input)
        x = input
        for axis, n in zip((2, 3), size):
            low, high, part = self._ends(x, axis, n)
            shape = [1] * x.dim()
            shape[axis] = n
            part = part.to(x).view(shape)
            x = x.index_select(axis, low) * (1 - part) \
                + x.index_select(axis, high) * part
        return x

    def _ends(self, x: torch.Tensor, axis: int, size: int
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The two places that a value is from, and the weight of the
        second."""
        n = x.shape[axis]
        i = torch.arange(size, dtype=torch.float64, device=x.device)
        scale = (n - 1) / max(size - 1, 1) if self.align_corners \
            else n / size if size > 1 else 0.0
        scale = torch.tensor(scale, dtype=torch.float32).item()
        at = (i * scale if self.align_corners
              else ((i + 0.5) * scale - 0.5).clamp(min=0)).float()
        low = at.long()
        return low, (low + 1).clamp(max=n - 1), at - low


def _rounded(x: torch.Tensor, slope: Any, y: torch.Tensor) -> torch.Tensor:
    """`y`, whose negative part MXNet computes in float32 for float64 too."""
    if x.dtype != torch.float64:
        return y
    z = (x.float() * torch.as_tensor(slope, dtype=torch.float32)).double()
    return torch.where(x > 0, y, y + (z - y).detach())


class GluonLeakyReLU(nn.LeakyReLU):
    """Differs from torch's in float64 alone, by the rounding of float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        return _rounded(input, self.negative_slope, super().forward(input))


class GluonPReLU(nn.PReLU):
    """Differs from torch's in float64 alone, by the rounding of float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) in and out."""
        slope = self.weight.detach().view(-1, *[1] * (input.dim() - 2))
        return _rounded(input, slope, super().forward(input))


class GluonSELU(nn.SELU):
    """Below 0 MXNet's gradient is scale * (alpha + y), and not that of its
    function, scale * alpha + y."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        y = super().forward(input)
        scale = 1.0507009873554805
        more = (scale - 1) * y.detach().clamp(max=0)
        return y + more * (input - input.detach())


class GluonDropout(nn.Dropout):
    """With one mask along `axes`; `always` drops out in predictions too."""

    def __init__(self, p: float, axes: tuple[int, ...] = (),
                 always: bool = False) -> None:
        super().__init__(p)
        self.axes, self.always = axes, always

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The shape stays."""
        sizes = [1 if i in self.axes else n
                 for i, n in enumerate(input.shape)]
        return input * F.dropout(input.new_ones(sizes), self.p,
                                 self.training or self.always)


class GluonGroupNorm(nn.GroupNorm):
    """Scale and shift have a number for each group, not for each channel."""

    def __init__(self, num_groups: int, eps: float) -> None:
        super().__init__(num_groups, num_groups, eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) in and out."""
        count = input.shape[1] // self.num_groups
        return F.group_norm(
            input, self.num_groups, self.weight.repeat_interleave(count),
            self.bias.repeat_interleave(count), self.eps)


# -- functions ----------------------------------------------------------------

def maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of two that are equal the first gets the gradient; torch's halves
    it."""
    return torch.where((x >= y) | x.isnan(), x, y)


def minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of two that are equal the first gets the gradient; torch's halves
    it."""
    return torch.where((x <= y) | x.isnan(), x, y)


def amax(x: torch.Tensor, dim: int | tuple[int, ...], keepdim: bool = False
         ) -> torch.Tensor:
    """All that are the largest get the whole gradient; torch's divides
    it."""
    if not x.is_floating_point():
        return x.amax(dim, keepdim)
    y = x.amax(dim, keepdim=True)
    ties = (x == y).sum(dim, keepdim=True)
    # 0, and the gradient once more for each other one
    more = (y - y.detach()).nan_to_num() * (ties - 1)
    y = y + more
    return y if keepdim else y.squeeze(dim)


def amin(x: torch.Tensor, dim: int | tuple[int, ...], keepdim: bool = False
         ) -> torch.Tensor:
    """See `amax`."""
    if not x.is_floating_point():
        return x.amin(dim, keepdim)
    return -amax(-x, dim, keepdim)


def l2_normalize(x: torch.Tensor, mode: str, eps: float) -> torch.Tensor:
    """Divided by the root of the sum of squares and `eps`: of each row
    ("instance"), over axis 1 ("channel"), or over those behind it
    ("spatial")."""
    axes = {"instance": range(1, x.dim()), "channel": [1],
            "spatial": range(2, x.dim())}[mode]
    return x / (x.square().sum(tuple(axes), keepdim=True) + eps).sqrt()


def reverse_axes(x: torch.Tensor) -> torch.Tensor:
    """The last axis becomes the first."""
    return x.permute(*range(x.dim() - 1, -1, -1))


def crop_like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The beginning of each axis, as long as in `y`."""
    return x[tuple(map(slice, y.shape))]


def take(x: torch.Tensor, index: torch.Tensor, axis: int, mode: str
         ) -> torch.Tensor:
    """Parts of `x` along an axis. An index out of range is the nearest
    ("clip"), counts on from the other end ("wrap") or is an error
    ("raise")."""
    n, axis = x.shape[axis], axis % x.dim()
    index = index.long()
    if mode != "raise":
        index = index.remainder(n) if mode == "wrap" \
            else index.clamp(0, n - 1)
    found = x.index_select(axis, index.flatten())
    return found.reshape(x.shape[:axis] + index.shape + x.shape[axis + 1:])


def depth_to_space(x: torch.Tensor, n: int) -> torch.Tensor:
    """(N, n * n * C, H, W) in, (N, C, n * H, n * W) out; `pixel_shuffle`
    with the channels in another order."""
    x = x.unflatten(1, (n * n, -1)).transpose(1, 2).flatten(1, 2)
    return nn.functional.pixel_shuffle(x, n)
