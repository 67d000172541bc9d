"""MXNet's operators of the NumPy interface (np, npx) in PyTorch, and those on
indices, which both interfaces share."""
from collections.abc import Sequence
from typing import Any

import torch

from mgpu.backends._torch.gluon.vision import at_least_one
from mgpu.gluon_io.graph import Node
from mgpu.gluon_io.parts import (Call, Layer, MissingOperator, Part, Rule,
                                 Slot, Source, number, only, operator,
                                 rule_of)

_FUNCTIONS = "mgpu.backends._torch.gluon.functions"
_LAYERS = "mgpu.backends._torch.gluon.layers"
_X, _Y = Slot(0), Slot(1)
_IDENTITY = Layer("torch.nn.Identity", {})


# -- the same under another name ----------------------------------------------

def _as(name: str) -> Rule:
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        return rule_of(name)(node, inputs)
    return rule


for _name, _other in {
        "_npi_add": "elemwise_add", "_npi_subtract": "elemwise_sub",
        "_npi_multiply": "elemwise_mul", "_npi_true_divide": "elemwise_div",
        "_npi_power": "_power", "_npi_maximum": "_maximum",
        "_npi_mod": "_mod", "_npi_mod_scalar": "_mod_scalar",
        "_npi_rmod_scalar": "_rmod_scalar", "_npi_rint": "rint",
        "_npi_minimum": "_minimum", "_npi_hypot": "_hypot",
        "_npi_add_scalar": "_plus_scalar",
        "_npi_subtract_scalar": "_minus_scalar",
        "_npi_rsubtract_scalar": "_rminus_scalar",
        "_npi_multiply_scalar": "_mul_scalar",
        "_npi_true_divide_scalar": "_div_scalar",
        "_npi_rtrue_divide_scalar": "_rdiv_scalar",
        "_npi_power_scalar": "_power_scalar",
        "_npi_rpower_scalar": "_rpower_scalar",
        "_npi_maximum_scalar": "_maximum_scalar",
        "_npi_minimum_scalar": "_minimum_scalar",
        "_npi_absolute": "abs", "_npi_cast": "Cast", "_npx_cast": "Cast",
        "_npi_clip": "clip", "_npi_slice": "slice", "_npx_slice": "slice",
        "_np_transpose": "transpose", "_npi_swapaxes": "SwapAxis",
        "_npi_expand_dims": "expand_dims", "_npi_stack": "stack",
        "_npi_tile": "tile", "_np_repeat": "repeat", "_npi_flip": "reverse",
        "_npi_take": "take", "_np_copy": "_copy",
        "_npx_reshape_like": "reshape_like",
        "_npx_activation": "Activation", "_npx_convolution": "Convolution",
        "_npx_deconvolution": "Deconvolution", "_npx_pooling": "Pooling",
        "_npx_fully_connected": "FullyConnected",
        "_npx_batch_norm": "BatchNorm", "_npx_batch_flatten": "Flatten",
        "_npx_dropout": "Dropout", "_npx_leaky_relu": "LeakyReLU",
        "_npx_softmax": "softmax", "_npx_log_softmax": "log_softmax",
        **{f"_npi_{name}": name for name in (
            "abs", "exp", "log", "log2", "log10", "log1p", "expm1", "sqrt",
            "square", "reciprocal", "negative", "sign", "floor", "ceil",
            "trunc", "fix", "sin", "cos", "tan", "arcsin", "arccos",
            "arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh",
            "arctanh")},
        **{f"_npx_{name}": name for name in (
            "relu", "sigmoid", "erf")}}.items():
    operator(_name)(_as(_other))


# -- arithmetic ---------------------------------------------------------------

_COMPARISONS = {"equal": "eq", "not_equal": "ne", "greater": "gt",
                "greater_equal": "ge", "less": "lt", "less_equal": "le"}


@operator(*(f"_npi_{name}" for name in _COMPARISONS))
def _compare(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_equal``, ...: the answer is a boolean."""
    return Call(f"operator.{_COMPARISONS[node.op.removeprefix('_npi_')]}",
                (_X, _Y))


@operator(*(f"_npi_{name}_scalar" for name in _COMPARISONS))
def _compare_scalar(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_equal_scalar``, ...: scalar. The answer is a boolean."""
    name = node.op.removeprefix("_npi_").removesuffix("_scalar")
    return Call(f"operator.{_COMPARISONS[name]}",
                (_X, number(node.attributes["scalar"])))


@operator("_npi_logical_not", "_npi_isnan", "_npi_isinf", "_npi_isfinite")
def _logical(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_logical_not``, ``_npi_isnan``, ...: the answer is a boolean."""
    return Call(f"torch.{node.op.removeprefix('_npi_')}", (_X,))


def _is_boolean(x: Source) -> bool:
    name = x.node.op.removeprefix("_npi_")
    return name.removesuffix("_scalar") in _COMPARISONS \
        or name.startswith(("logical_", "isnan", "isinf", "isfinite"))


@operator("_npi_where", "_npi_where_lscalar", "_npi_where_rscalar",
          "_npi_where_scalar2")
def _where(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_where`` and those with numbers: scalar, x, y."""
    a = node.attributes
    x, y = {"_npi_where": lambda: (_Y, Slot(2)),
            "_npi_where_lscalar": lambda: (number(a["scalar"]), _Y),
            "_npi_where_rscalar": lambda: (_Y, number(a["scalar"])),
            "_npi_where_scalar2": lambda: (a["x"], a["y"])}[node.op]()
    condition = _X if _is_boolean(inputs[0]) else Call("operator.ne", (_X, 0))
    return Call("torch.where", (condition, x, y))


@operator("_npi_around")
def _around(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_around``: decimals. Halves become even."""
    n = node.attributes["decimals"]
    return Call("torch.round", (_X,), {"decimals": n} if n else {})


@operator("_npi_diff")
def _diff(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_diff``: n, axis."""
    a = node.attributes
    return Call("torch.diff", (_X, a["n"], a["axis"]))


# -- products -----------------------------------------------------------------

@operator("_npi_matmul")
def _matmul(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_matmul``."""
    return Call("torch.matmul", (_X, _Y))


@operator("_np_dot")
def _dot(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_dot``: of matrices and vectors ``matmul``; other axes and
    numbers are NumPy's."""
    if inputs[1].shape is not None and len(inputs[1].shape) in (1, 2):
        return Call("torch.matmul", (_X, _Y))
    return Call(f"{_FUNCTIONS}.dot", (_X, _Y))


@operator("_npi_tensordot", "_npi_tensordot_int_axes")
def _tensordot(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_tensordot``: axes."""
    a = node.attributes
    return Call("torch.tensordot", (_X, _Y, a["axes"] if "axes" in a else (
        a["a_axes_summed"], a["b_axes_summed"])))


@operator("_npi_einsum")
def _einsum(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_einsum``: subscripts."""
    return Call("torch.einsum", (node.attributes["subscripts"],
                                 *map(Slot, range(len(inputs)))))


# -- reductions ---------------------------------------------------------------

@operator("_np_sum", "_npi_mean", "_np_prod", "_np_product", "_npi_std",
          "_npi_var", "_np_max", "_np_amax", "_np_min", "_np_amin",
          "_np_all", "_np_any")
def _reduce(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_sum``, ``_npi_mean``, ...: axis, keepdims, ddof."""
    a = node.attributes
    name = node.op.rpartition("_")[2]
    only(node, **{key: None for key in ("dtype", "initial") if key in a
                  and (key, name) not in (("dtype", "sum"),
                                          ("dtype", "mean"))})
    axes = a["axis"]
    if axes == ():
        raise MissingOperator("axis=()")
    named: dict[str, Any] = {"keepdim": True} if a["keepdims"] else {}
    if a.get("dtype") is not None:
        only(node, dtype=("float32", "float64"))
        named["dtype"] = getattr(torch, a["dtype"])
    x: Any = _X
    if axes is None and a["keepdims"] and name in ("sum", "mean"):
        axes = ((),)    # torch's word for all of them
    if name in ("std", "var"):
        named["correction"] = a["ddof"]
        x = Call("torch.Tensor.detach", (_X,))  # MXNet has no gradient there
    if axes is None and a["keepdims"]:
        raise MissingOperator("keepdims=True, axis=None")
    if name in ("prod", "product"):
        if axes is not None and len(axes) > 1:
            raise MissingOperator(f"axis={axes}")
        return Call("torch.prod", (_X, *(axes or ())), named)
    if name in ("max", "amax", "min", "amin"):
        # all that are largest get the gradient
        function = f"{_LAYERS}.a{name.removeprefix('a')}"
        if axes is None:
            return Call(function, (Call("torch.flatten", (_X,)), 0))
        return Call(function, (_X, _one(axes)), named)
    return Call(f"torch.{name}", (x, *(() if axes is None
                                       else (_one(axes),))), named)


def _one(axes: tuple[int, ...]) -> Any:
    """An axis by itself as a number."""
    return axes[0] if len(axes) == 1 else axes


@operator("_npi_argmax", "_npi_argmin")
def _arg(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_argmax``, ``_npi_argmin``: axis, keepdims. Whole numbers."""
    a = node.attributes
    if a["axis"] is None and a["keepdims"]:
        raise MissingOperator("keepdims=True, axis=None")
    axis = () if a["axis"] is None else (a["axis"],)
    return Call(f"torch.{node.op.removeprefix('_npi_')}", (_X, *axis),
                {"keepdim": True} if a["keepdims"] else {})


@operator("_np_cumsum")
def _cumsum(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_cumsum``: axis."""
    only(node, dtype=None)
    axis = node.attributes["axis"]
    return Call("torch.cumsum", (Call("torch.flatten", (_X,)), 0)
                if axis is None else (_X, axis))


@operator("_npi_norm")
def _norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_norm``: ord, axis, keepdims, of vectors."""
    a = node.attributes
    # the norm of all without an order, and of one axis
    only(node, flag=(0, 1), ord=2.0)
    if a["axis"] is None or len(a["axis"]) != 1:
        raise MissingOperator(f"axis={a['axis']}")
    return Call("torch.linalg.vector_norm", (_X, 2, a["axis"][0]),
                {"keepdim": True} if a["keepdims"] else {})


# -- shapes -------------------------------------------------------------------

@operator("_np_reshape")
def _reshape(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_reshape``: newshape, which knows -1 alone."""
    only(node, order="C")
    shape = node.attributes["newshape"]
    if min(shape, default=1) < -1 or 0 in shape:
        raise MissingOperator(f"newshape={shape}")
    return Call("torch.Tensor.reshape", (_X, shape if shape == ()
                                         else _one(shape)))


@operator("_npx_reshape", "_npi_reshape")
def _reshape_codes(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npx_reshape``: newshape, with its codes (-1: what is left, -2: keep
    an axis, -3: leave out an axis of 1, -4: keep all others, -5: join two
    axes, -6: split one into two), reverse."""
    only(node, order="C")
    a, shape = node.attributes, node.attributes["newshape"]
    said = f"newshape={shape}, reverse={a['reverse']}"
    if 0 in shape or min(shape, default=-7) < -6:
        raise MissingOperator(said)
    if -3 in shape:
        if a["reverse"] or -4 not in shape[-1:] \
                or {*shape[:-1]} - {-2, -3}:
            raise MissingOperator(said)
        return Call("torch.squeeze", (_X, _one(tuple(
            i for i, code in enumerate(shape) if code == -3))))
    codes = {-2: 0, -4: -2, -5: -3, -6: -4}
    return rule_of("Reshape")(node._replace(op="Reshape", attributes={
        "shape": tuple(codes.get(n, n) for n in shape),
        "reverse": a["reverse"], "target_shape": (), "keep_highest": False,
        }), inputs)


@operator("_np_squeeze")
def _squeeze(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_squeeze``: axis."""
    axis = node.attributes["axis"]
    return Call("torch.squeeze", (_X,) if axis is None else (_X, _one(axis)))


@operator("_np_moveaxis")
def _moveaxis(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_moveaxis``: source, destination."""
    a = node.attributes
    return Call("torch.movedim", (_X, _one(a["source"]),
                                  _one(a["destination"])))


@operator("_np_roll")
def _roll(node: Node, inputs: Sequence[Source]) -> Part:
    """``_np_roll``: shift, axis."""
    a = node.attributes
    shift = a["shift"]
    if a["axis"] is not None and len(shift) == 1:
        shift *= len(a["axis"])     # which all move so
    return Call("torch.roll", (_X, _one(shift),
                               *(() if a["axis"] is None
                                 else (_one(a["axis"]),))))


@operator("_npi_broadcast_to")
def _broadcast_to(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_broadcast_to``: shape."""
    shape = node.attributes["shape"]
    if min(shape, default=0) < 1:
        raise MissingOperator(f"shape={shape}")
    return Call("torch.broadcast_to", (_X, shape))


@operator("_npi_pad")
def _pad(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_pad``: pad_width (a pair for each axis), constant_value."""
    only(node, mode="constant")
    a = node.attributes
    # torch's begin with the last axis
    flat = tuple(n for pair in a["pad_width"][::-1] for n in pair)
    value = number(a["constant_value"])
    return Call("torch.nn.functional.pad", (_X, flat, *(
        ("constant", value) if value else ())))


@operator("_npi_tril")
def _tril(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_tril``: k."""
    return Call("torch.tril", (_X, *((node.attributes["k"],) if
                                     node.attributes["k"] else ())))


@operator("_npi_full_like")
def _full_like(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_full_like``: fill_value."""
    only(node, dtype=None)
    return Call("torch.full_like", (_X, node.attributes["fill_value"]))


@operator("_npi_concatenate")
def _concatenate(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_concatenate``: axis."""
    axis, every = node.attributes["axis"], map(Slot, range(len(inputs)))
    if axis is None:
        return Call("torch.cat", (tuple(Call("torch.flatten", (x,))
                                        for x in every), 0))
    return Call("torch.cat", (tuple(every), axis))


@operator("_npi_vstack", "_npi_hstack", "_npi_dstack", "_npi_column_stack")
def _stack(node: Node, inputs: Sequence[Source]) -> Part:
    """``_npi_vstack``, ``_npi_hstack``, ..."""
    return Call(f"torch.{node.op.removeprefix('_npi_')}",
                (tuple(map(Slot, range(len(inputs)))),))


@operator("_split_v2", "_npi_split")
def _split(node: Node, inputs: Sequence[Source]) -> Part:
    """``_split_v2``: indices (the first is 0), axis, sections."""
    only(node, squeeze_axis=False)
    a = node.attributes
    n = a["sections"] or len(a["indices"])
    if n == 1:
        return _IDENTITY
    if a["sections"]:
        # the first parts are one longer where n does not divide it
        return Call("torch.tensor_split", (_X, n, a["axis"]), outputs=n)
    begins = a["indices"]
    if begins[0] != 0 or min(begins) < 0:
        raise MissingOperator(f"indices={begins}")
    return Call("torch.tensor_split", (_X, begins[1:], a["axis"]), outputs=n)


# -- indices ------------------------------------------------------------------

@operator("pick", "_npx_pick")
def _pick(node: Node, inputs: Sequence[Source]) -> Part:
    """``pick``: axis, keepdims, mode. An index out of range is brought
    into it."""
    a = node.attributes
    if a["axis"] is None:
        raise MissingOperator("axis=None")
    part = Call(f"{_FUNCTIONS}.pick", (_X, _Y, a["axis"], a["keepdims"],
                                       a["mode"]))
    return part if node.op == "_npx_pick" else at_least_one(part, node,
                                                            inputs)


@operator("one_hot", "_npx_one_hot")
def _one_hot(node: Node, inputs: Sequence[Source]) -> Part:
    """``one_hot``: depth, on_value, off_value, dtype. An index out of range
    is off everywhere."""
    a = node.attributes
    only(node, dtype=("float32", "float64", "float16", "int32", "int64"))
    return Call(f"{_FUNCTIONS}.one_hot", (
        _X, a["depth"], number(a["on_value"]), number(a["off_value"]),
        a["dtype"]))


@operator("topk", "_npx_topk")
def _topk(node: Node, inputs: Sequence[Source]) -> Part:
    """``topk``: axis, k, ret_typ, is_ascend, dtype (of indices)."""
    a = node.attributes
    only(node, ret_typ=("value", "indices", "both"),
         dtype=("float32", "float64", "int32", "int64"))
    if a["axis"] is None or a["k"] < 1:
        raise MissingOperator(f"axis={a['axis']}, k={a['k']}")
    outputs = 2 if a["ret_typ"] == "both" else 1
    return Call(f"{_FUNCTIONS}.topk", (_X, a["k"], a["axis"], a["is_ascend"],
                                       a["ret_typ"], a["dtype"]),
                outputs=outputs)


@operator("_contrib_arange_like", "_npx_arange_like")
def _arange_like(node: Node, inputs: Sequence[Source]) -> Part:
    """``arange_like``: start, step, axis; the dtype is that of the input."""
    only(node, repeat=1)
    a = node.attributes
    return Call(f"{_FUNCTIONS}.arange_like", (_X, a["start"], a["step"],
                                              a["axis"]))


# -- constants ----------------------------------------------------------------

_DTYPES = ("float32", "float64", "float16", "int32", "int64")


@operator("_zeros", "_ones", "_full", "_npi_zeros", "_npi_ones", "_npi_full",
          "_npi_identity", "_eye", "_npi_eye")
def _filled(node: Node, inputs: Sequence[Source]) -> Part:
    """``_zeros``, ``_ones``, ``_full``, ``_eye``: shape, dtype, value, N, M,
    k. They are where an input of the network is. A size of 0 is the one of
    that input's axis `tied`."""
    a, named = node.attributes, _dtype(node, inputs)
    kind = node.op.removeprefix("_npi").lstrip("_")
    diagonal = kind in ("eye", "identity")
    shape = (a["N"], int(a["M"] or 0) or a["N"]) if kind == "eye" \
        else a["shape"]
    is_numpy = node.op.startswith("_np")
    if shape is None or not is_numpy and (
            not shape or shape.count(0) > 1 or 0 in shape
            and a["tied"] is None):
        raise MissingOperator(f"shape={shape}, and nothing says the others")
    sizes = shape if is_numpy else tuple(
        n or Call("torch.Tensor.size", (_X, a["tied"])) for n in shape)
    if kind == "full":
        return Call("torch.Tensor.new_full", (_X, sizes, number(a["value"])),
                    named)
    if not diagonal:
        return Call(f"torch.Tensor.new_{kind}", (_X, sizes), named)
    k = a.get("k", 0)
    return Call("torch.triu", (Call("torch.tril", (
        Call("torch.Tensor.new_ones", (_X, sizes), named), k)), k))


@operator("_arange", "_npi_arange", "_linspace", "_npi_linspace")
def _range(node: Node, inputs: Sequence[Source]) -> Part:
    """``_arange``: start, stop, step, repeat, dtype. ``_linspace``: start,
    stop, num, endpoint, dtype."""
    a, named = node.attributes, _dtype(node, inputs)
    named["device"] = Call("builtins.getattr", (_X, "device"))
    start, stop = a["start"], a["stop"]
    if "num" in a:
        if not a["endpoint"]:
            stop -= (stop - start) / max(a["num"], 1)
        return Call("torch.linspace", (number(start), number(stop),
                                       a["num"]), named)
    only(node, infer_range=False)
    if stop is None:
        start, stop = 0, start
    x = Call("torch.arange", (number(start), number(stop),
                              number(a["step"])), named)
    return x if a["repeat"] == 1 else Call("torch.repeat_interleave",
                                           (x, a["repeat"]))


def _dtype(node: Node, inputs: Sequence[Source]) -> dict[str, Any]:
    only(node, dtype=_DTYPES)
    if not inputs:
        raise MissingOperator("in a network without inputs")
    return {"dtype": getattr(torch, node.attributes["dtype"])}
