"""Gluon's layers, described as `mgpu.backends.base.Layer`."""
from typing import Any

from mgpu.backends._mxnet.framework import mx

nn = mx.gluon.nn
_NORMS = {nn.InstanceNorm: "instance_norm", nn.LayerNorm: "layer_norm",
          nn.GroupNorm: "group_norm"}


def is_layer(block: Any) -> bool:
    """Whether `block` counts as one layer.

    A dense or convolution layer has a child where its activation was given by
    name.
    """
    return not block._children or isinstance(block, (nn.Dense, _Conv))


_Conv = nn.Conv2D.__mro__[1]
_Pooling = nn.MaxPool2D.__mro__[1]
BATCH_NORM = nn.BatchNorm.__mro__[1]


def describe(block: Any) -> tuple[str, dict[str, Any]]:
    """(kind, options) of an innermost block."""
    kind = type(block).__name__.lower()
    if isinstance(block, nn.Dense):
        return "dense", {"units": block._units, "flatten": block._flatten,
                         "bias": block.bias is not None,
                         "activation": _activation(block)}
    if isinstance(block, _Conv):
        own = block._kwargs
        return "conv_transpose" if "adj" in own else "conv", {
            "kernel": tuple(own["kernel"]), "stride": tuple(own["stride"]),
            "padding": tuple(own["pad"]), "dilation": tuple(own["dilate"]),
            "groups": own["num_group"], "bias": block.bias is not None,
            "activation": _activation(block)}
    if isinstance(block, BATCH_NORM):
        own = block._kwargs
        return "batch_norm", {
            "epsilon": own["eps"], "momentum": own["momentum"],
            "scale": not own["fix_gamma"], "center":
            block.beta._differentiable, "axis": own["axis"],
            "use_global_stats": own["use_global_stats"],
            "relu": isinstance(block, nn.BatchNormReLU)}
    for norm, name in _NORMS.items():
        if isinstance(block, norm):
            return name, {"epsilon": block._kwargs["eps"]}
    if isinstance(block, _Pooling):
        own = block._kwargs
        name = f"{own['pool_type']}_pool"
        if own["global_pool"]:
            return f"global_{name}", {}
        options = {"kernel": tuple(own["kernel"]),
                   "stride": tuple(own["stride"]),
                   "padding": tuple(own["pad"]),
                   "ceil": own["pooling_convention"] == "full"}
        if own["pool_type"] == "avg":
            options["count_include_pad"] = own.get("count_include_pad", True)
        return name, options
    if type(block) is nn.Dropout:
        return "dropout", {"rate": block._rate, "axes": tuple(block._axes)}
    if isinstance(block, nn.Embedding):
        return "embedding", {"rows": block._kwargs["input_dim"],
                             "units": block._kwargs["output_dim"]}
    if isinstance(block, nn.LeakyReLU):
        return "leaky_relu", {"slope": block._alpha}
    if isinstance(block, nn.Activation):
        return block._act_type, {}
    return kind, {}


def _activation(block: Any) -> Any:
    return getattr(block.act, "_act_type", "other") if block.act else None
