"""Descriptions of Gluon's layers, as `mgpu.backends.probing.Layer`."""
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from mgpu.backends._mxnet.framework import mx
from mgpu.backends.probing import (Layer, clipping, may_look_inside, named,
                                   own_kind)

_LIB, c_str = mx.base._LIB, mx.base.c_str
register = mx.ndarray.register
nn = mx.gluon.nn
_NORMS = {nn.InstanceNorm: "instance_norm", nn.LayerNorm: "layer_norm",
          nn.GroupNorm: "group_norm"}


def stored(parameter: Any, context: Any = None) -> Any:
    """The array of a parameter on a context. ``data`` of a subclass may
    return a derived array: masked, or with dropout."""
    return mx.gluon.Parameter.data(parameter, context)


def all_stored(parameter: Any) -> list[Any]:
    """The arrays of a parameter on all contexts."""
    return mx.gluon.Parameter.list_data(parameter)


def is_layer(block: Any) -> bool:
    """Whether `block` counts as one layer. A dense or convolution layer with
    an activation has a child."""
    return not block._children or isinstance(block, (nn.Dense, _Conv))


def is_open(block: Any) -> bool:
    """Whether the functions called by an innermost block are observed."""
    return not block._reg_params and (
        isinstance(block, (nn.Lambda, nn.HybridLambda))
        or may_look_inside(type(block), "mxnet"))


_Conv = nn.Conv2D.__mro__[1]
_Pooling = nn.MaxPool2D.__mro__[1]
BATCH_NORM = nn.BatchNorm.__mro__[1]
_WITH_GAMMA: Any = (BATCH_NORM, *_NORMS)


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
            return name, {"epsilon": block._kwargs["eps"], **(
                {"groups": block._kwargs["num_groups"]}
                if name == "group_norm" else {})}
    if isinstance(block, _Pooling):
        return _pool(block._kwargs)
    if type(block) is nn.Dropout:
        return "dropout", {"rate": block._rate, "axes": tuple(block._axes)}
    if isinstance(block, nn.Embedding):
        return "embedding", {"rows": block._kwargs["input_dim"],
                             "units": block._kwargs["output_dim"]}
    if isinstance(block, nn.LeakyReLU):
        return "leaky_relu", {"slope": block._alpha}
    if isinstance(block, nn.ELU):
        return "elu", {"alpha": block._alpha}
    if isinstance(block, nn.Activation):
        return block._act_type, {}
    return own_kind(type(block)) if is_open(block) else kind, {}


def constants(block: Any) -> Iterator[tuple[Any, float]]:
    """The gamma and beta of a norm layer that are not trainable, with their
    initial values."""
    if isinstance(block, _WITH_GAMMA):
        for p, option, start in ((block.gamma, "scale", 1.0),
                                 (block.beta, "center", 0.0)):
            if not block._kwargs.get(option, p._differentiable):
                yield p, start


def _activation(block: Any) -> Any:
    return getattr(block.act, "_act_type", "other") if block.act else None


def _pool(own: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    name = f"{own.get('pool_type', 'max')}_pool"
    if own.get("global_pool"):
        return f"global_{name}", {}
    kernel = tuple(own["kernel"])
    options = {"kernel": kernel,
               "stride": tuple(own.get("stride") or (1,) * len(kernel)),
               "padding": tuple(own.get("pad") or (0,) * len(kernel)),
               "ceil": own.get("pooling_convention") == "full"}
    if name == "avg_pool":
        options["count_include_pad"] = own.get("count_include_pad", True)
    return name, options


# -- operators between layers -------------------------------------------------

_Same = tuple[str, dict[str, Any]]      # what `describe` returns


def _leaky(own: Mapping[str, Any]) -> _Same | None:
    name, slope = own.get("act_type", "leaky"), own.get("slope", 0.25)
    found: dict[str, _Same] = {
        "leaky": ("leaky_relu", {"slope": slope}),
        "elu": ("elu", {"alpha": slope}), "gelu": ("gelu", {}),
        "selu": ("selu", {})}
    return found.get(name)


def _upsample(own: Mapping[str, Any]) -> _Same | None:
    """None for an upsampling by a convolution, whose weight is arbitrary."""
    return ("upsample", {"mode": "nearest", "align_corners": False}) \
        if own.get("sample_type") == "nearest" else None


def _axis(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"axis": own.get("axis", -1)}


#: by operator: keyword arguments -> (kind, options) of the equivalent layer,
#: as in `describe`
_OPERATORS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "Activation": lambda own: (own["act_type"], {}),
    **dict.fromkeys(("clip", "_npi_clip"), lambda own: clipping(
        own.get("a_min"), own.get("a_max"))),
    "LeakyReLU": _leaky, "Pooling": _pool,
    "softmax": lambda own: ("softmax", _axis(own)),
    "log_softmax": lambda own: ("log_softmax", _axis(own)),
    **dict.fromkeys(("relu", "_npx_relu"), lambda own: ("relu", {})),
    **dict.fromkeys(("sigmoid", "_npx_sigmoid"), lambda own: ("sigmoid", {})),
    **dict.fromkeys(("tanh", "_npi_tanh"), lambda own: ("tanh", {})),
    "softsign": lambda own: ("softsign", {}), "UpSampling": _upsample,
    "_contrib_BilinearResize2D": lambda own: ("upsample", {
        "mode": "bilinear", "align_corners": own.get("align_corners", True)})}


class Between:
    """Reports operators that have an equivalent layer, called between
    innermost blocks, or in open ones, in a pass of `net`. See the class of
    this name for torch.

    Parameters
    ----------
    net : gluon.Block
    seen : callable
        ``seen(path, x, output)``.
    known : dict
        Receives the equivalent layers, by path.
    """

    def __init__(self, net: Any, seen: Callable[[str, Any, Any], Any],
                 known: dict[str, Layer]):
        self._net, self._seen, self._known = net, seen, known
        self._handles: dict[int, str] = {}
        for name in _OPERATORS:
            handle = ctypes.c_void_p()
            if not _LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)):
                self._handles[handle.value or 0] = name
        #: by thread in a pass: nesting depth in innermost blocks, and path of
        #: the last one
        self._depths: dict[int, int] = {}
        self._after: dict[int, str] = {}

    @contextmanager
    def watching(self, blocks: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Context manager that reports. `blocks`: paths and innermost
        blocks."""
        def enter(by: int) -> None:
            thread = get_ident()
            self._depths[thread] = self._depths.get(thread, 0) + by

        def begin(*_: Any) -> None:
            self._after.pop(get_ident(), None)
            enter(1)

        def leave(path: str, by: int) -> None:
            enter(-by)
            self._after[get_ident()] = path
        # A pass of the network adds 1 to the depth, so that operators outside
        # of it are ignored, and an innermost block 2 unless it is open.
        handles = [
            self._net.register_forward_pre_hook(begin),
            self._net.register_forward_hook(lambda *_: enter(-1))]
        for path, block in blocks:
            by = 0 if is_open(block) else 2
            handles += [
                block.register_forward_pre_hook(lambda *_, by=by: enter(by)),
                block.register_forward_hook(
                    lambda *_, path=path, by=by: leave(path, by))]
        invoke = register._imperative_invoke

        def report(handle: int, arrays: Any, keys: Any, values: Any,
                 *others: Any) -> Any:
            output = invoke(handle, arrays, keys, values, *others)
            name = self._handles.get(handle)
            if name and self._depths.get(get_ident()) == 1:
                same: _Same | None = _OPERATORS[name](dict(zip(keys, values)))
                if same is not None:
                    kind, options = same
                    if options.get("axis") is not None:     # from the end
                        options["axis"] = \
                            options["axis"] % arrays[0].ndim - arrays[0].ndim
                    self._seen(named(self._known, kind, options,
                                     self._after.get(get_ident())),
                               arrays[0], output)
            return output
        register._imperative_invoke = report
        try:
            yield
        finally:
            register._imperative_invoke = invoke
            for handle in handles:
                handle.detach()
