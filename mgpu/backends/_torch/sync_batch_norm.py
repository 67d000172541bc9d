"""Synchronized batch norm with torch's arithmetic."""
import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from mgpu.backends._torch.arithmetic import (BATCH_NORMS,
                                             NoFunctionalBatchNorm,
                                             check_joined, computes_itself,
                                             moves_statistics)
from mgpu.backends._torch.boundary import Runner
from mgpu.backends._torch.meaning import Meaning, Plan
from mgpu.backends._torch.tree import Tree

#: mean(index, layer, moment, count, sums, like) returns the sums of all
#: devices divided by the total count, on the device of `like`, and that count
Mean = Callable[[int, str, int, int, torch.Tensor, torch.Tensor],
                tuple[torch.Tensor, int]]


class Synchronized(Meaning):
    """Batch-norm layers in training use joint statistics.

    Parameters
    ----------
    net : nn.Module
    begin : callable
        ``begin(active)`` returns, for one pass, a `SyncBatchNorm` and a
        Runner whose thunks may wait for each other.
    """

    def __init__(self, net: nn.Module, begin: Callable[
            [Sequence[int]], tuple[Any, Runner]]) -> None:
        self._net, self._begin = net, begin
        self._mean: Mean | None = None

    def begin(self, active: Sequence[int], tree: Tree) -> Plan:
        self._mean, run = None, None
        if self._net.training:
            rule, run = self._begin(active)
            self._mean = rule.mean
        return Plan(None, run, run is not None)

    @contextlib.contextmanager
    def probing(self, i: int) -> Iterator[None]:
        # A single device does not synchronize.
        before, self._mean = self._mean, None
        try:
            yield
        finally:
            self._mean = before

    def call(self, i: int, net: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._mean is None:
            return net(*args, **kwargs)
        with NoFunctionalBatchNorm():
            return net(*args, **kwargs)

    def dress(self, i: int, net: nn.Module, layers: Sequence[nn.Module]
              ) -> None:
        if self._mean is not None:
            synchronize(net, i, self._mean)


def synchronize(net: nn.Module, index: int, mean: Mean) -> None:
    """Synchronize the batch-norm layers of `net`, the copy of device `index`.

    Raises
    ------
    TypeError
        A batch-norm layer has a user-defined forward.
    ValueError
        An instance norm has running statistics.
    """
    check_joined(net)
    for name, layer in net.named_modules():
        if isinstance(layer, BATCH_NORMS) and layer.training:
            if computes_itself(layer):
                raise TypeError(
                    f"batch_norm='sync' needs torch's batch norm; {name} is "
                    f"a {type(layer).__name__} with a user-defined forward. "
                    "Use batch_norm='per_device'.")
            layer.__dict__["forward"] = _forward(layer, index, name, mean)


def _forward(layer: Any, index: int, name: str, mean: Mean
             ) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return type(layer).forward(layer, x)
        methodcaller("_check_input_dim", x)(layer)      # torch's own
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
        size = x.numel() // x.shape[1]
        centre, count = mean(index, name, 1, size,
                             x.sum(axes, keepdim=True), x)
        if count == 1:
            raise ValueError("Expected more than 1 value per channel when "
                             f"training, got input size {x.shape}")
        centred = x - centre
        variance, _ = mean(index, name, 2, size,
                           (centred * centred).sum(axes, keepdim=True), x)
        with torch.no_grad():       # as torch does; the variance is unbiased
            if layer.num_batches_tracked is not None \
                    and layer.track_running_stats:
                layer.num_batches_tracked.add_(1)
            if moves_statistics(layer):
                share = layer.momentum if layer.momentum is not None \
                    else 1 / float(layer.num_batches_tracked)
                layer.running_mean.lerp_(centre.reshape(-1), share)
                layer.running_var.lerp_(
                    (variance * (count / (count - 1))).reshape(-1), share)
        y = centred * (variance + layer.eps).rsqrt()
        if layer.weight is not None:
            y = y * layer.weight.reshape(shape)
        if layer.bias is not None:
            y = y + layer.bias.reshape(shape)
        return y
    return forward
