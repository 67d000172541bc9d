"""Torch's layers, described as `mgpu.backends.base.Layer`."""
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mgpu.backends._torch.arithmetic import BATCH_NORMS
from mgpu.backends.base import LayerCallback

_Conv = nn.modules.conv._ConvNd
_ConvTranspose = nn.modules.conv._ConvTransposeNd
#: by class: the kind, the number of spatial axes
_POOLS = {getattr(nn, f"{kind.title()}Pool{n}d"): (kind, n)
          for kind in ("avg", "max") for n in (1, 2, 3)}
_ADAPTIVE = {getattr(nn, f"Adaptive{kind.title()}Pool{n}d"): kind
             for kind, n in _POOLS.values()}
_NORMS = {nn.modules.instancenorm._InstanceNorm: "instance_norm",
          nn.LayerNorm: "layer_norm", nn.GroupNorm: "group_norm"}
_DROPOUTS = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


#: by function: the kind of the layer that does the same
_FUNCTIONS = {function: name for name in (
    "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "softplus",
    "softsign", "sigmoid", "tanh", "hardtanh", "hardsigmoid", "hardswish")
    for where in (F, torch, torch.Tensor) for called in (name, f"{name}_")
    if callable(function := getattr(where, called, None))}


class Between(TorchFunctionMode):
    """Inside, ``seen(path, inputs, outputs, index)`` is called after each
    activation function that is called outside of innermost layers."""

    def __init__(self, seen: LayerCallback, index: int):
        super().__init__()
        self._seen, self._index = seen, index
        self.inside = False     # an innermost layer

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        name = None if self.inside else _FUNCTIONS.get(function)
        if name is None:
            return function(*args, **(kwargs or {}))
        x = args[0].detach().clone()    # it may be overwritten
        result = function(*args, **(kwargs or {}))
        self._seen(f"F.{name}", (x,), result, self._index)
        return result


def _each(value: Any, n: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * n


def describe(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """(kind, options) of an innermost module."""
    if isinstance(module, nn.Linear):
        return "dense", {"units": module.out_features, "flatten": False,
                         "bias": module.bias is not None, "activation": None}
    if isinstance(module, _Conv):
        return "conv_transpose" if isinstance(module, _ConvTranspose) \
            else "conv", {
                "kernel": tuple(module.kernel_size),
                "stride": tuple(module.stride),
                "padding": module.padding if isinstance(module.padding, str)
                else tuple(module.padding),
                "dilation": tuple(module.dilation), "groups": module.groups,
                "padding_mode": module.padding_mode,
                "bias": module.bias is not None, "activation": None}
    if isinstance(module, BATCH_NORMS):
        return "batch_norm", {
            "epsilon": module.eps,
            "momentum": None if module.momentum is None
            else 1 - module.momentum,
            "scale": module.weight is not None,
            "center": module.bias is not None, "axis": 1,
            "use_global_stats": False, "relu": False}
    for norm, kind in _NORMS.items():
        if isinstance(module, norm):
            return kind, {"epsilon": module.eps}
    if type(module) in _ADAPTIVE:
        kind, size = _ADAPTIVE[type(module)], module.output_size
        if set(_each(size, 1)) == {1}:
            return f"global_{kind}_pool", {}
        return f"adaptive_{kind}_pool", {"size": size}
    if type(module) in _POOLS:
        kind, n = _POOLS[type(module)]
        # torch puts the kernel size in the place of a stride of None
        options = {"kernel": _each(module.kernel_size, n),
                   "stride": _each(module.stride, n),
                   "padding": _each(module.padding, n),
                   "ceil": module.ceil_mode}
        if kind == "avg":
            options["count_include_pad"] = module.count_include_pad
        return f"{kind}_pool", options
    if type(module) in _DROPOUTS:
        return "dropout", {"rate": module.p, "axes": tuple(
            range(2, 2 + _DROPOUTS[type(module)]))}
    if isinstance(module, nn.Embedding):
        return "embedding", {"rows": module.num_embeddings,
                             "units": module.embedding_dim}
    if isinstance(module, nn.LeakyReLU):
        return "leaky_relu", {"slope": module.negative_slope}
    return type(module).__name__.lower(), {}
