"""MXNet's operators in PyTorch, each by a small function."""
import math
from collections.abc import Sequence
from typing import Any

from mgpu.gluon_io.graph import Node
from mgpu.gluon_io.parts import (Call, Layer, MissingOperator, Part, Slot,
                                 Source, number, only, operator)

_HELPERS = "mgpu.backends._torch.gluon.layers"
_X = Slot(0)


def _short(sizes: tuple[int, ...]) -> Any:
    """One number for sizes that are the same."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _weights(inputs: Sequence[Source], *names: str) -> dict[str, str]:
    """The inputs from the second on by these names of the layer."""
    return {key: x.name for key, x in zip(names, inputs[1:])}


def _given(sizes: tuple[int, ...], default: int, count: int
           ) -> tuple[int, ...]:
    return sizes or (default,) * count


# -- layers with parameters ---------------------------------------------------

@operator("Convolution")
def _convolution(node: Node, inputs: Sequence[Source]) -> Part:
    """``Convolution``: kernel, stride, dilate, pad, num_filter, num_group,
    no_bias."""
    a = node.attributes
    options = _convolution_options(node)
    if a["num_group"] != 1:
        options["groups"] = a["num_group"]
    n = len(a["kernel"])
    if _computes_weights(inputs):
        return Call(f"torch.nn.functional.conv{n}d",
                    tuple(map(Slot, range(len(inputs)))), options)
    options = {"in_channels": inputs[1].sizes()[1] * a["num_group"],
               "out_channels": a["num_filter"],
               "kernel_size": _short(a["kernel"]), **options}
    if a["no_bias"]:
        options["bias"] = False
    return Layer(f"torch.nn.Conv{n}d", options, _weights(inputs, "weight",
                                                         "bias"))


@operator("Deconvolution")
def _deconvolution(node: Node, inputs: Sequence[Source]) -> Part:
    """``Deconvolution``: kernel, stride, dilate, pad, adj, num_filter,
    num_group, no_bias."""
    only(node, target_shape=((), (0, 0)))
    a, weight = node.attributes, inputs[1].sizes()
    n = len(a["kernel"])
    options = {"in_channels": weight[0], "out_channels": a["num_filter"],
               "kernel_size": _short(a["kernel"]),
               **_convolution_options(node)}
    if any(a["adj"]):
        options["output_padding"] = _short(a["adj"])
    if a["num_group"] != 1:
        options["groups"] = a["num_group"]
    if a["no_bias"]:
        options["bias"] = False
    return Layer(f"torch.nn.ConvTranspose{n}d", options,
                 _weights(inputs, "weight", "bias"))


def _convolution_options(node: Node) -> dict[str, Any]:
    """Those that are not torch's defaults."""
    a = node.attributes
    only(node, layout=(None, "NCW", "NCHW", "NCDHW"))
    options = {}
    for ours, theirs, default in (("stride", "stride", 1),
                                  ("padding", "pad", 0),
                                  ("dilation", "dilate", 1)):
        value = _short(_given(a[theirs], default, len(a["kernel"])))
        if value != default:
            options[ours] = value
    return options


def _computes_weights(inputs: Sequence[Source]) -> bool:
    """Whether the network makes them from other arrays."""
    return any(x.node.op != "null" for x in inputs[1:])


@operator("FullyConnected")
def _dense(node: Node, inputs: Sequence[Source]) -> Part:
    """``FullyConnected``: num_hidden, no_bias, flatten."""
    a = node.attributes
    x: Any = Call("torch.flatten", (_X, 1)) if a["flatten"] else _X
    if _computes_weights(inputs):
        return Call("torch.nn.functional.linear",
                    (x, *map(Slot, range(1, len(inputs)))))
    weight = inputs[1].sizes()
    options = {"in_features": weight[1], "out_features": a["num_hidden"]}
    if a["no_bias"]:
        options["bias"] = False
    return Layer("torch.nn.Linear", options,
                 _weights(inputs, "weight", "bias"), (x,))


@operator("BatchNorm", "_contrib_SyncBatchNorm")
def _batch_norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``BatchNorm``: eps, momentum, fix_gamma, use_global_stats, axis. With
    ``fix_gamma`` gamma is 1, whatever the file has."""
    if node.op == "_contrib_SyncBatchNorm":
        only(node, ndev=1)      # of more devices it joins the statistics
        node = node._replace(attributes={**node.attributes, "axis": 1})
    only(node, output_mean_var=False)
    a, gamma = node.attributes, inputs[1].sizes()
    # 1 - momentum is rounded by torch's user, so that what mgpu computes
    # from it is MXNet's momentum in float32 again.
    options = {"num_features": gamma[0], "eps": a["eps"],
               "momentum": round(1 - a["momentum"], 7)}
    kind = "mgpu.backends._torch.gluonize.GluonBatchNorm"
    if a["axis"] != 1 or a["use_global_stats"]:
        kind = "mgpu.backends._torch.gluonize.GluonBatchNormOf"
        options |= {"axis": a["axis"], "moves": not a["use_global_stats"]}
    return Layer(kind, options,
                 _weights(inputs, "weight", "bias", "running_mean",
                          "running_var"),
                 frozen=("weight",) if a["fix_gamma"] else (),
                 values={"weight": 1.0} if a["fix_gamma"] else {})


# -- layers without -----------------------------------------------------------

@operator("Dropout")
def _dropout(node: Node, inputs: Sequence[Source]) -> Part:
    """``Dropout``: p, axes (which share a mask), mode ("always": predictions
    drop out too)."""
    a = node.attributes
    options: dict[str, Any] = {"p": round(a["p"], 7)}
    if a["mode"] == "training" and not a["axes"]:
        return Layer("torch.nn.Dropout", options)
    return Layer(f"{_HELPERS}.GluonDropout", {
        **options, "axes": a["axes"], "always": a["mode"] == "always"})


@operator("Pooling")
def _pooling(node: Node, inputs: Sequence[Source]) -> Part:
    """``Pooling``: kernel, stride, pad, pool_type, global_pool,
    pooling_convention, count_include_pad."""
    a = node.attributes
    only(node, pool_type=("max", "avg", "sum"),
         layout=(None, "NCW", "NCHW", "NCDHW"))
    if a["pool_type"] == "sum" and (
            a["global_pool"] or len(a["kernel"]) == 1):
        raise MissingOperator("pool_type='sum', global or of one axis")
    if a["global_pool"]:
        if len(a["kernel"]) not in (1, 2, 3):
            raise MissingOperator("global pooling without a kernel")
        pools = {"max": "AdaptiveMaxPool", "avg": "AdaptiveAvgPool"}
        return Layer(f"torch.nn.{pools[a['pool_type']]}{len(a['kernel'])}d",
                     {"output_size": 1})
    only(node, pooling_convention=("valid", "full"))
    n = len(a["kernel"])
    if any(2 * p > k for p, k in zip(a["pad"], a["kernel"])):
        raise MissingOperator(f"pad={a['pad']} of windows of {a['kernel']}: "
                              "PyTorch pads by half a window at most")
    options: dict[str, Any] = {"kernel_size": _short(a["kernel"])}
    # torch's stride is the kernel's size where none is given, MXNet's 1.
    stride = _short(_given(a["stride"], 1, n))
    if stride != options["kernel_size"]:
        options["stride"] = stride
    if any(a["pad"]):
        options["padding"] = _short(a["pad"])
    if a["pooling_convention"] == "full":
        options["ceil_mode"] = True
    if a["pool_type"] == "avg" and a["count_include_pad"] is False:
        options["count_include_pad"] = False
    if a["pool_type"] == "sum":
        options["divisor_override"] = 1
    kind = "MaxPool" if a["pool_type"] == "max" else "AvgPool"
    hangs_over = a["pooling_convention"] == "full" and (any(a["pad"]) or any(
        s > k for s, k in zip(_given(a["stride"], 1, n), a["kernel"])))
    if hangs_over and n != 2:
        raise MissingOperator(f"full pooling of {n} axes with padding")
    where = f"{_HELPERS}.Gluon" if hangs_over else "torch.nn."
    return Layer(f"{where}{kind}{n}d", options)


@operator("Activation")
def _activation(node: Node, inputs: Sequence[Source]) -> Part:
    """``Activation``: act_type."""
    return Layer("torch.nn." + {
        "relu": "ReLU", "sigmoid": "Sigmoid", "tanh": "Tanh",
        "softrelu": "Softplus", "softsign": "Softsign"}[
            node.attributes["act_type"]], {})


@operator("Flatten", "flatten")
def _flatten(node: Node, inputs: Sequence[Source]) -> Part:
    """``Flatten``: all axes but the first become one."""
    return Layer("torch.nn.Flatten", {})


# -- functions ----------------------------------------------------------------

@operator("Concat", "concat")
def _concat(node: Node, inputs: Sequence[Source]) -> Part:
    """``Concat``: dim."""
    return Call("torch.cat", (tuple(map(Slot, range(len(node.inputs)))),
                              node.attributes["dim"]))


@operator("clip")
def _clip(node: Node, inputs: Sequence[Source]) -> Part:
    """``clip``: a_min, a_max, which MXNet keeps in float32. A gradient
    passes at the bounds, in ``torch.clamp`` too (in ``ReLU6`` it does not)."""
    return Call("torch.clamp", (_X, *(
        None if math.isinf(node.attributes[key])
        else number(node.attributes[key])
        for key in ("a_min", "a_max"))))


@operator("_copy", "identity")
def _identity(node: Node, inputs: Sequence[Source]) -> Part:
    """``identity``, which Gluon's Dropout of 0 is."""
    return Layer("torch.nn.Identity", {})
