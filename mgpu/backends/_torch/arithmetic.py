"""Batch-norm and dropout layers in training.

In training passes, functions of this module replace the ``forward`` of layers
in the copies of a network (`GluonMeaning`).
"""
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mgpu.backends import messages
from mgpu.backends.network import BatchNormCall, Normalize
from mgpu.backends.probing import DrawMask

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
INSTANCE_NORMS = (nn.modules.instancenorm._InstanceNorm,)
#: the framework's forward methods of batch-norm layers
FORWARDS = {layer.forward for layer in (*BATCH_NORMS, nn.SyncBatchNorm)}
#: number of leading axes of a dropout mask; 0: all axes
DROPOUTS = {nn.Dropout: 0, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}
#: an input with fewer axes is a single example, whose mask has one axis
_ROWS = {nn.Dropout1d: 3, nn.Dropout3d: 5}

Forward = Callable[[Any], Any]


def check_joined(net: nn.Module) -> None:
    """Raise ValueError for layers with running statistics that
    ``batch_norm="sync"`` does not support."""
    found = [path for path, m in net.named_modules()
             if isinstance(m, INSTANCE_NORMS) and m.running_mean is not None]
    if found:
        raise messages.not_joined(found)


class NoFunctionalBatchNorm(TorchFunctionMode):
    """Mode that raises for functional batch norm in training, which would use
    the examples of one device."""

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        kwargs = kwargs or {}
        if function in (F.batch_norm, torch.batch_norm) and kwargs.get(
                "training", len(args) > 5 and args[5]):
            raise messages.not_joined(["F.batch_norm"])
        return function(*args, **kwargs)


#: `.now`: whether this thread is inside `take_number`
TAKING = threading.local()


def is_gluons_dropout(layer: nn.Module) -> bool:
    """Whether `layer` is a GluonDropout, with masks along axes. Includes
    copies of the class in generated source."""
    return isinstance(layer, nn.Dropout) \
        and type(layer).__name__ == "GluonDropout"


def takes_masks(layer: nn.Module) -> bool:
    """Whether the training masks of `layer` can be set."""
    return type(layer) in DROPOUTS \
        or is_gluons_dropout(layer) and not layer.always


def computes_itself(layer: nn.Module) -> bool:
    """Whether a batch-norm layer has a user-defined forward."""
    return type(layer).forward not in FORWARDS


def _in_training(layer: nn.Module, forward: Forward) -> Forward:
    """`forward`, unless user code has set `layer` to eval mode."""
    def either(x: Any) -> Any:
        return forward(x) if layer.training \
            else type(layer).forward(layer, x)
    return either


def gluon_batch_norm(call: BatchNormCall, index: int = 0) -> Any:
    """Batch norm in training with Gluon's arithmetic on CPUs.

    Normalizes with the biased variance of the batch, and updates the running
    variance with it (torch uses the unbiased one). Source: MXNet 1.9.1,
    ``src/operator/nn/batch_norm.cc``.
    """
    x, count = call.x, call.x.numel() // call.x.shape[1]
    # With one value per channel, x - mean is 0 and the result is beta.
    # x * scale + shift would be rounding noise instead.
    given = x if count > 1 else x - x
    if call.running_mean is None:
        return torch.batch_norm(given, call.gamma, call.beta, None, None, True,
                                0.0, call.epsilon,
                                torch.backends.cudnn.enabled)
    running_mean: Any = call.running_mean
    running_var: Any = call.running_var
    # With a momentum of 1, the statistics do not change.
    keep = call.momentum != 1
    # torch adds (1 - momentum) times the unbiased variance, which is `factor`
    # times the biased one; so pass a running variance times `factor`. Few
    # operations, because each costs host time in every layer.
    factor = count / (count - 1) if count > 1 else 1.0
    by_torch = keep and count > 1   # torch would divide by 0
    scaled = running_var * factor if by_torch else None
    y = torch.batch_norm(given, call.gamma, call.beta,
                         running_mean if by_torch else None, scaled, True,
                         1 - call.momentum, call.epsilon,
                         torch.backends.cudnn.enabled)
    if keep:
        with torch.no_grad():
            if by_torch:
                torch.mul(scaled, 1 / factor, out=running_var)
            else:       # one value in each channel: the mean; variance 0
                running_mean.mul_(call.momentum).add_(
                    x.reshape(-1).to(running_mean.dtype),
                    alpha=1 - call.momentum)
                running_var.mul_(call.momentum)
    return y


def moves_statistics(layer: nn.Module) -> bool:
    """Whether a training pass updates running statistics of a batch-norm
    layer. As in torch, its flag may be set at any time."""
    return layer.running_mean is not None and bool(layer.track_running_stats)


def batch_norm_call(layer: nn.Module, x: Any, path: str, keep: bool
                    ) -> BatchNormCall:
    """The `BatchNormCall` of a training pass of `layer`. `keep`: whether to
    count it and update the running statistics."""
    # float32, as MXNet stores the momentum of a layer
    momentum = float(np.float32(1 - layer.momentum)) \
        if layer.momentum is not None \
        else 1 - 1 / (int(layer.num_batches_tracked or 0) + 1)
    mean = var = None
    if keep and layer.track_running_stats \
            and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if moves_statistics(layer):
        mean, var = layer.running_mean, layer.running_var
        if not keep:   # with the same strides, as a graph may save them
            mean, var = mean.clone(), var.clone()
    return BatchNormCall(x, layer.weight, layer.bias, mean, var,
                         layer.eps, momentum, 1, path)


def batch_norm_forward(layer: nn.Module, path: str,
                       normalize: Normalize, index: int,
                       keeps: Callable[[], bool]) -> Forward:
    """A ``forward`` for `layer` that calls `normalize`, and updates the
    running statistics if ``keeps()``."""
    def forward(x: Any) -> Any:
        keep = torch.is_grad_enabled() \
            if torch.compiler.is_dynamo_compiling() else keeps()
        return normalize(batch_norm_call(layer, x, path, keep), index)
    return _in_training(layer, forward)


def take_number(device: torch.device) -> int:
    """Draw a number from torch's default stream. A checkpoint restores the
    stream, so recomputed layers draw the same number."""
    TAKING.now = True
    try:
        return int(torch.randint(1 << 62, (), device=device))
    finally:
        TAKING.now = False


def _leading(layer: nn.Module, x: Any) -> int:
    return 1 if x.dim() < _ROWS.get(type(layer), 0) else DROPOUTS[type(layer)]


def mask_shape(x: Any, leading: int) -> Any:
    """Shape of a dropout mask for `x`."""
    return x.shape if not leading else \
        x.shape[:leading] + (1,) * (x.dim() - leading)


def draw_mask(x: Any, leading: int, keep: float,
              generator: torch.Generator | None) -> Any:
    """Draw a mask of ones, with probability `keep`, and zeros. Unscaled."""
    mask = torch.empty(mask_shape(x, leading), dtype=x.dtype, device=x.device)
    return mask.bernoulli_(keep, generator=generator)


def dropout_forward(layer: nn.Module,
                    generator: Callable[[], torch.Generator | None],
                    ticket: Callable[[], torch.Tensor]) -> Forward:
    """A ``forward`` for `layer` with masks from `generator`; in compiled
    code, from the stream of the device of `ticket`."""
    def forward(x: Any) -> Any:
        leading = _leading(layer, x)
        keep = 1 - layer.p
        if torch.compiler.is_dynamo_compiling():
            mask = torch.ops.mgpu.dropout_mask(x.detach(), leading, keep,
                                               ticket())
        else:
            mask = draw_mask(x, leading, keep, generator())
        return x * mask.div_(keep) if keep else x * mask
    return _in_training(layer, forward)


def masked_forward(layer: nn.Module, draw: DrawMask, index: int,
                   generator: Callable[[], torch.Generator | None],
                   again: dict[int, Any]) -> Forward:
    """A ``forward`` for the dropout layer `layer` with masks from `draw`.

    Masks that a backward pass may recompute (no `generator`) are stored in
    `again`, under a number that is then drawn again.
    """
    gluons = is_gluons_dropout(layer)

    def without(x: Any) -> Any:
        if not gluons:
            return x
        rate, layer.p = layer.p, 0.0    # generated source may differ
        try:
            return type(layer).forward(layer, x)
        finally:
            layer.p = rate

    def forward(x: Any) -> Any:
        leading = 0 if gluons else _leading(layer, x)
        axes = tuple(layer.axes) if gluons \
            else tuple(range(leading, x.dim())) if leading else ()
        if generator() is not None:
            return without(x) * draw(x, layer.p, axes, index)
        number = take_number(x.device)
        if number not in again:
            again[number] = draw(x, layer.p, axes, index)
        return without(x) * again[number]
    return _in_training(layer, forward)
