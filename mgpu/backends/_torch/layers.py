"""Torch's layers in the words of `mgpu.backends.base.Layer`."""
from typing import Any

from torch import nn

_Conv = nn.modules.conv._ConvNd
_ConvTranspose = nn.modules.conv._ConvTransposeNd
_BatchNorm = nn.modules.batchnorm._BatchNorm
_ADAPTIVE = {nn.AdaptiveAvgPool1d: "avg", nn.AdaptiveAvgPool2d: "avg",
             nn.AdaptiveAvgPool3d: "avg", nn.AdaptiveMaxPool1d: "max",
             nn.AdaptiveMaxPool2d: "max", nn.AdaptiveMaxPool3d: "max"}
_POOLS = {nn.MaxPool1d: ("max", 1), nn.MaxPool2d: ("max", 2),
          nn.MaxPool3d: ("max", 3), nn.AvgPool1d: ("avg", 1),
          nn.AvgPool2d: ("avg", 2), nn.AvgPool3d: ("avg", 3)}
_DROPOUTS = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


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
                "bias": module.bias is not None, "activation": None}
    if isinstance(module, _BatchNorm):
        return "batch_norm", {
            "epsilon": module.eps,
            "momentum": None if module.momentum is None
            else 1 - module.momentum,
            "scale": module.weight is not None,
            "center": module.bias is not None, "axis": 1,
            "use_global_stats": False, "relu": False}
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return "instance_norm", {"epsilon": module.eps}
    if isinstance(module, nn.LayerNorm):
        return "layer_norm", {"epsilon": module.eps}
    if isinstance(module, nn.GroupNorm):
        return "group_norm", {"epsilon": module.eps}
    if type(module) in _ADAPTIVE:
        name = _ADAPTIVE[type(module)]
        size = module.output_size
        if set(_each(size, 1)) == {1}:
            return f"global_{name}_pool", {}
        return f"adaptive_{name}_pool", {"size": size}
    if type(module) in _POOLS:
        name, n = _POOLS[type(module)]
        stride = module.stride if module.stride is not None \
            else module.kernel_size
        options = {"kernel": _each(module.kernel_size, n),
                   "stride": _each(stride, n),
                   "padding": _each(module.padding, n),
                   "ceil": module.ceil_mode}
        if name == "avg":
            options["count_include_pad"] = module.count_include_pad
        return f"{name}_pool", options
    if type(module) in _DROPOUTS:
        return "dropout", {"rate": module.p, "axes": tuple(
            range(2, 2 + _DROPOUTS[type(module)]))}
    if isinstance(module, nn.Embedding):
        return "embedding", {"rows": module.num_embeddings,
                             "units": module.embedding_dim}
    if isinstance(module, nn.LeakyReLU):
        return "leaky_relu", {"slope": module.negative_slope}
    return type(module).__name__.lower(), {}
