"""Descriptions of torch's layers, as `mgpu.backends.probing.Layer`."""
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mgpu.backends._torch.arithmetic import BATCH_NORMS, takes_masks
from mgpu.backends.probing import (Layer, LayerCallback, clipping,
                                   may_look_inside, named, own_kind)

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


#: arguments after the input of functions between layers, as (name, default),
#: by kind
_ARGUMENTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "leaky_relu": (("negative_slope", 0.01),), "elu": (("alpha", 1.0),),
    "gelu": (("approximate", "none"),),
    **dict.fromkeys(("softmax", "log_softmax"), (("dim", None),)),
    **dict.fromkeys(("relu", "relu6", "selu", "silu", "softplus", "softsign",
                     "sigmoid", "tanh", "hardsigmoid", "hardswish"), ()),
    **dict.fromkeys(("clamp", "clip"), (("min", None), ("max", None))),
    "clamp_min": (("min", None),),
    "hardtanh": (("min_val", -1.0), ("max_val", 1.0)),
    **{f"max_pool{n}d": (("kernel_size", None), ("stride", None),
                         ("padding", 0), ("dilation", 1),
                         ("ceil_mode", False)) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": (("kernel_size", None), ("stride", None),
                         ("padding", 0), ("ceil_mode", False),
                         ("count_include_pad", True)) for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": (("output_size", None),)
       for kind in ("avg", "max") for n in (1, 2, 3)},
    **dict.fromkeys(("mean", "amax"), (("dim", None),)),
    "interpolate": (("size", None), ("scale_factor", None),
                    ("mode", "nearest"), ("align_corners", None))}
_CLIPS = {"clamp", "clip", "clamp_min", "hardtanh"}
#: by function, its name in `_ARGUMENTS`
_FUNCTIONS = {function: name for name in _ARGUMENTS
              for where in (F, torch, torch.Tensor)
              for called in (name, f"{name}_")
              if callable(function := getattr(where, called, None))}


class Between(TorchFunctionMode):
    """Mode that calls ``seen(path, inputs, outputs, index)`` after each
    function that has an equivalent layer and is called between innermost
    layers, or in open ones. `known` receives these layers, by path."""

    def __init__(self, seen: LayerCallback, index: int,
                 known: dict[str, Layer]):
        super().__init__()
        self._seen, self._index, self._known = seen, index, known
        self.inside = False     # whether in an innermost layer
        #: path of the innermost layer called last
        self.after: str | None = None

    def __torch_function__(self, function: Any, types: Any,
                           args: tuple[Any, ...] = (), kwargs: Any = None
                           ) -> Any:
        kwargs = kwargs or {}
        name = None if self.inside else _FUNCTIONS.get(function)
        same = _layer_of(name, args, kwargs) if name and args else None
        if same is None:
            return function(*args, **kwargs)
        x = args[0].detach().clone()    # may be overwritten in place
        result = function(*args, **kwargs)
        kind, options = same
        put = self._seen(named(self._known, kind, options, self.after), (x,),
                         result, self._index)
        return result if put is None else in_place_of(result, put)


def is_open(module: nn.Module) -> bool:
    """Whether the functions called by an innermost layer are observed."""
    return not module._parameters and may_look_inside(type(module), "torch")


def in_place_of(outputs: Any, values: Sequence[torch.Tensor]) -> Any:
    """`outputs`, with the first ones replaced by `values`; they keep their
    graph."""
    left = iter(values)

    def take(x: Any) -> Any:
        value = next(left, None) if isinstance(x, torch.Tensor) else None
        return x if value is None else torch.where(
            torch.ones_like(x, dtype=torch.bool), value.reshape(x.shape), x)
    return tree_map(take, outputs)


def _layer_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
              ) -> tuple[str, dict[str, Any]] | None:
    """(kind, options) of the equivalent layer, as in `describe`, or None."""
    given = dict(_ARGUMENTS[name]) | dict(zip(
        [n for n, _ in _ARGUMENTS[name]], args[1:])) | kwargs
    axes = args[0].dim() - 2
    kind, _, _ = name.partition("_pool")
    if name in _CLIPS:
        return clipping(*[*(given[n] for n, _ in _ARGUMENTS[name]), None][:2])
    if name in ("mean", "amax"):
        axis = given["dim"]
        kind = "avg" if name == "mean" else "max"
        every = axes > 0 and isinstance(axis, (tuple, list)) and sorted(
            n % (axes + 2) for n in axis) == list(range(2, axes + 2))
        return (f"global_{kind}_pool", {}) if every else None
    if name == "interpolate":
        return _upsample(given["mode"], given["align_corners"])
    if name.startswith("adaptive"):
        return _adaptive(kind.removeprefix("adaptive_"),
                         given["output_size"])
    if "_pool" in name:
        return _pool(kind, axes, given["kernel_size"], given["stride"],
                     given["padding"], given["ceil_mode"],
                     given.get("count_include_pad"))
    own = {_WORDS.get(n, n): given[n] for n, _ in _ARGUMENTS[name]}
    if own.get("axis") is not None:     # from the end
        own["axis"] = own["axis"] % (axes + 2) - (axes + 2)
    return name, own


#: torch's option names -> mgpu's
_WORDS = {"negative_slope": "slope", "dim": "axis"}


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
            return kind, {"epsilon": module.eps, **(
                {"groups": module.num_groups}
                if isinstance(module, nn.GroupNorm) else {})}
    if type(module) in _ADAPTIVE:
        return _adaptive(_ADAPTIVE[type(module)], module.output_size)
    if type(module) in _POOLS:
        kind, n = _POOLS[type(module)]
        return _pool(kind, n, module.kernel_size, module.stride,
                     module.padding, module.ceil_mode,
                     getattr(module, "count_include_pad", None))
    if isinstance(module, nn.Upsample):
        return _upsample(module.mode, module.align_corners)
    if type(module) in _DROPOUTS:
        return "dropout", {"rate": module.p, "axes": tuple(
            range(2, 2 + _DROPOUTS[type(module)]))}
    if takes_masks(module):
        return "dropout", {"rate": module.p, "axes": tuple(module.axes)}
    if isinstance(module, nn.Embedding):
        return "embedding", {"rows": module.num_embeddings,
                             "units": module.embedding_dim}
    clip = clipping(module.min_val, module.max_val) \
        if isinstance(module, nn.Hardtanh) else None
    if clip is not None:
        return clip
    for layer, kind, name in _WITH_OPTION:
        if isinstance(module, layer):
            return kind, {_WORDS.get(name, name): getattr(module, name)}
    return own_kind(type(module)) if is_open(module) \
        else type(module).__name__.lower(), {}


#: layers with one option: class, kind, torch's name of the option
_WITH_OPTION = ((nn.LeakyReLU, "leaky_relu", "negative_slope"),
                (nn.ELU, "elu", "alpha"), (nn.GELU, "gelu", "approximate"))


def _upsample(mode: str, align_corners: bool | None
              ) -> tuple[str, dict[str, Any]]:
    return "upsample", {"mode": mode, "align_corners": bool(align_corners)}


def _adaptive(kind: str, size: Any) -> tuple[str, dict[str, Any]]:
    if set(_each(size, 1)) == {1}:
        return f"global_{kind}_pool", {}
    return f"adaptive_{kind}_pool", {"size": size}


def _pool(kind: str, n: int, kernel: Any, stride: Any, padding: Any,
          ceil: bool, count_include_pad: bool | None
          ) -> tuple[str, dict[str, Any]]:
    options = {"kernel": _each(kernel, n), "padding": _each(padding, n),
               "stride": _each(kernel if stride in (None, [], ()) else stride,
                               n), "ceil": ceil}
    if kind == "avg":
        options["count_include_pad"] = count_include_pad
    return f"{kind}_pool", options
