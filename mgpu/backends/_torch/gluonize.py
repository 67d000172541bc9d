"""Torch's batch-norm layers with Gluon's arithmetic, by changing classes."""
from typing import Any

import torch
from torch import nn

from mgpu.backends._torch.arithmetic import (BATCH_NORMS, FORWARDS,
                                             batch_norm_call,
                                             gluon_batch_norm,
                                             moves_statistics)
from mgpu.backends._torch.graph import recomputing


class _GluonArithmetic(nn.modules.batchnorm._BatchNorm):
    """Training passes use `gluon_batch_norm`; the rest is torch's."""

    def forward(self, x: Any) -> Any:
        """The layer's output; updates running statistics as Gluon does."""
        if not self.training or not moves_statistics(self):
            return super().forward(x)
        self._check_input_dim(x)
        keep = torch.compiler.is_dynamo_compiling() or not recomputing()
        return gluon_batch_norm(batch_norm_call(self, x, "", keep))


FORWARDS.add(_GluonArithmetic.forward)


class GluonBatchNorm1d(_GluonArithmetic, nn.BatchNorm1d):
    """See `mgpu.parity.gluonize`."""


class GluonBatchNorm2d(_GluonArithmetic, nn.BatchNorm2d):
    """See `mgpu.parity.gluonize`."""


class GluonBatchNorm3d(_GluonArithmetic, nn.BatchNorm3d):
    """See `mgpu.parity.gluonize`."""


class GluonBatchNorm(_GluonArithmetic, nn.BatchNorm2d):
    """Batch norm for any number of axes, because an exported graph does not
    contain their number."""

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError("batch normalization needs 2 axes or more; "
                             f"received an input of shape "
                             f"{tuple(input.shape)}.")


class GluonBatchNormOf(GluonBatchNorm):
    """Batch norm over any axis, optionally with fixed statistics that
    training passes use (Gluon's ``use_global_stats``)."""

    def __init__(self, num_features: int, eps: float = 1e-3,
                 momentum: float = 0.1, axis: int = 1, moves: bool = True
                 ) -> None:
        super().__init__(num_features, eps, momentum)
        self.axis, self.moves = axis, moves

    def forward(self, x: Any) -> Any:
        """The output has the shape of `x`."""
        x = x.movedim(self.axis, 1)
        y = super().forward(x) if self.moves else nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias,
            eps=self.eps)
        return y.movedim(1, self.axis)


def has_fixed_statistics(layer: nn.Module) -> bool:
    """Whether the layer normalizes with running statistics in training."""
    return isinstance(layer, GluonBatchNormOf) and not layer.moves


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GluonBatchNorm1d, nn.BatchNorm2d: GluonBatchNorm2d,
    nn.BatchNorm3d: GluonBatchNorm3d}
_BACK = {ours: theirs for theirs, ours in _CLASSES.items()}


def gluonize(net: nn.Module, on: bool) -> nn.Module:
    """See `mgpu.parity.gluonize`.

    Classes can be swapped because those of mgpu add no attributes; saved
    states, copies and hooks of the layer are unaffected.
    """
    change = _CLASSES if on else _BACK
    norms = [m for m in net.modules() if isinstance(m, BATCH_NORMS)]
    strange = [type(m).__name__ for m in norms
               if type(m) not in {**_CLASSES, **_BACK}]
    if on and strange:
        raise TypeError(
            "gluonize supports torch's BatchNorm1d, BatchNorm2d and "
            "BatchNorm3d; received a network with "
            f"{sorted(set(strange))}. Complete lazy "
            "layers by a forward pass first; replace others by one of these.")
    for module in norms:
        module.__class__ = change.get(type(module), type(module))
    return net
