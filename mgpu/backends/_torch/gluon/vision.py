"""MXNet's operators on images and arrays, beyond those of Gluon's zoo: what
occurs in networks of the `nd` and `sym` family."""
import builtins
from collections.abc import Sequence
from typing import Any

import torch

from mgpu.gluon_io.graph import Node
from mgpu.gluon_io.parts import (Call, Layer, MissingOperator, Part, Rule,
                                 Slot, Source, number, only, operator)
from mgpu.gluon_io.whole import FLOATING, KEPT, STILL

_FUNCTIONS = "mgpu.backends._torch.gluon.functions"
_HELPERS = "mgpu.backends._torch.gluon.layers"
_X, _Y = Slot(0), Slot(1)
_ALL = builtins.slice(None)


def _size(axis: int) -> Call:
    return Call("torch.Tensor.size", (_X, axis))


def _calls(function: str, *arguments: Any) -> Rule:
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        return Call(function, arguments)
    return rule


def _guard(what: str) -> Rule:
    """What stands around an operator of whole numbers."""
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        return Call(f"{_FUNCTIONS}.{what}", (_X, node.op))
    return rule


for _name in (FLOATING, KEPT, STILL):
    operator(f"mgpu.{_name}")(_guard(_name))


# -- arithmetic ---------------------------------------------------------------

for _name, _functions in {
        "torch.exp": "exp", "torch.log": "log", "torch.log2": "log2",
        "torch.log10": "log10", "torch.log1p": "log1p",
        "torch.expm1": "expm1", "torch.sqrt": "sqrt", "torch.rsqrt": "rsqrt",
        "torch.square": "square", "torch.reciprocal": "reciprocal",
        "torch.neg": "negative", "torch.abs": "abs", "torch.sign": "sign",
        "torch.floor": "floor", "torch.ceil": "ceil", "torch.trunc":
        "trunc fix", f"{_FUNCTIONS}.round_half_away": "round",
        f"{_FUNCTIONS}.round_half_down": "rint",
        "torch.sin": "sin", "torch.cos": "cos", "torch.tan": "tan",
        "torch.arcsin": "arcsin", "torch.arccos": "arccos",
        "torch.arctan": "arctan", "torch.sinh": "sinh", "torch.cosh": "cosh",
        "torch.tanh": "tanh", "torch.arcsinh": "arcsinh", "torch.arccosh":
        "arccosh", "torch.arctanh": "arctanh", "torch.erf": "erf",
        "torch.relu": "relu", "torch.sigmoid": "sigmoid",
        "torch.nn.functional.softsign": "softsign",
        "torch.zeros_like": "zeros_like", "torch.ones_like": "ones_like",
        }.items():
    operator(*_functions.split())(_calls(_name, _X))

for _name, _functions in {
        "operator.add": "elemwise_add _add _plus _Plus _grad_add "
        "broadcast_add broadcast_plus",
        "operator.sub": "elemwise_sub _sub _minus _Minus broadcast_sub "
        "broadcast_minus",
        "operator.mul": "elemwise_mul _mul _Mul broadcast_mul",
        "operator.truediv": "elemwise_div _div _Div broadcast_div",
        "operator.pow": "_power _Power broadcast_power",
        f"{_HELPERS}.maximum": "_maximum _Maximum broadcast_maximum",
        f"{_HELPERS}.minimum": "_minimum _Minimum broadcast_minimum",
        f"{_FUNCTIONS}.mod": "_mod _Mod broadcast_mod",
        "torch.hypot": "_hypot broadcast_hypot"}.items():
    operator(*_functions.split())(_calls(_name, _X, _Y))

_COMPARISONS = {"equal": "eq", "not_equal": "ne", "greater": "gt",
                "greater_equal": "ge", "lesser": "lt", "lesser_equal": "le"}
# MXNet's answer is a number.
for _name, _function in _COMPARISONS.items():
    operator(f"_{_name}", f"broadcast_{_name}")(_calls(
        "torch.Tensor.to", Call(f"operator.{_function}", (_X, _Y)), _X))


def _with_scalar(function: str, from_the_right: bool = False,
                 answers: bool = False) -> Rule:
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        scalar = number(node.attributes["scalar"])
        call = Call(function, (scalar, _X) if from_the_right
                    else (_X, scalar))
        return Call("torch.Tensor.to", (call, _X)) if answers else call
    return rule


for _name, _function in (("plus", "add"), ("minus", "sub"), ("mul", "mul"),
                         ("div", "truediv"), ("power", "pow")):
    operator(f"_{_name}_scalar", f"_{_name.capitalize()}Scalar")(
        _with_scalar(f"operator.{_function}"))
for _name, _function in (("rminus", "sub"), ("rdiv", "truediv"),
                         ("rpower", "pow")):
    operator(f"_{_name}_scalar", f"_R{_name[1:].capitalize()}Scalar")(
        _with_scalar(f"operator.{_function}", from_the_right=True))
for _name, _function in _COMPARISONS.items():
    operator(f"_{_name}_scalar")(
        _with_scalar(f"operator.{_function}", answers=True))


@operator("_mod_scalar", "_ModScalar", "_rmod_scalar", "_RModScalar")
def _mod_scalar(node: Node, inputs: Sequence[Source]) -> Part:
    """``_mod_scalar``, ``_rmod_scalar``: scalar."""
    scalar = number(node.attributes["scalar"])
    if "rmod" in node.op.lower():
        return Call(f"{_FUNCTIONS}.mod", (scalar, _X))
    if not scalar:
        raise MissingOperator("scalar=0")
    return Call("torch.remainder", (_X, scalar))


# MXNet's answer is a number.
for _name in ("and", "or", "xor"):
    operator(f"_logical_{_name}", f"broadcast_logical_{_name}")(_calls(
        "torch.Tensor.to", Call(f"torch.logical_{_name}", (_X, _Y)), _X))
operator("logical_not")(_calls(
    "torch.Tensor.to", Call("torch.logical_not", (_X,)), _X))


@operator("_logical_and_scalar", "_logical_or_scalar", "_logical_xor_scalar")
def _logical_scalar(node: Node, inputs: Sequence[Source]) -> Part:
    """``_logical_and_scalar``, ...: scalar. The answer is a number."""
    name, scalar = node.op.split("_")[2], bool(node.attributes["scalar"])
    if name == ("and", "or")[scalar]:
        return Call(f"torch.{('zeros', 'ones')[scalar]}_like", (_X,))
    test = "eq" if name == "xor" and scalar else "ne"
    return Call("torch.Tensor.to", (Call(f"operator.{test}", (_X, 0)), _X))


@operator("smooth_l1", "_npx_smooth_l1")
def _smooth_l1(node: Node, inputs: Sequence[Source]) -> Part:
    """``smooth_l1``: scalar, one over the root of torch's beta."""
    scalar = node.attributes["scalar"]
    if not scalar:
        raise MissingOperator("scalar=0")
    return Call("torch.nn.functional.smooth_l1_loss", (
        _X, Call("torch.zeros_like", (_X,))),
        {"reduction": "none", "beta": number(1 / scalar ** 2)})


@operator("_maximum_scalar", "_MaximumScalar")
def _maximum_scalar(node: Node, inputs: Sequence[Source]) -> Part:
    """``_maximum_scalar``: scalar. A gradient passes at the bound."""
    return Call("torch.clamp", (_X, number(node.attributes["scalar"])))


@operator("_minimum_scalar", "_MinimumScalar")
def _minimum_scalar(node: Node, inputs: Sequence[Source]) -> Part:
    """``_minimum_scalar``: scalar. A gradient passes at the bound."""
    return Call("torch.clamp", (_X, None, number(node.attributes["scalar"])))


@operator("add_n", "ElementWiseSum")
def _add_n(node: Node, inputs: Sequence[Source]) -> Part:
    """``add_n``: the sum of all inputs."""
    total: Any = _X
    for i in range(1, len(inputs)):
        total = Call("operator.add", (total, Slot(i)))
    return total if len(inputs) > 1 else Layer("torch.nn.Identity", {})


@operator("where")
def _where(node: Node, inputs: Sequence[Source]) -> Part:
    """``where``: the condition is a number, of the shape of the others, or
    one for each row of theirs."""
    condition: Any = Call("operator.ne", (_X, 0))
    if inputs[0].rank in (None, 1):
        condition = Call(f"{_FUNCTIONS}.by_row", (condition, _Y))
    return Call("torch.where", (condition, _Y, Slot(2)))


@operator("Cast", "cast")
def _cast(node: Node, inputs: Sequence[Source]) -> Part:
    """``Cast``: dtype."""
    methods = {"float32": "float", "float64": "double", "float16": "half",
               "int32": "int", "int64": "long", "int8": "char",
               "uint8": "byte"}
    only(node, dtype=tuple(methods))
    return Call(f"torch.Tensor.{methods[node.attributes['dtype']]}", (_X,))


# -- activations --------------------------------------------------------------

@operator("LeakyReLU")
def _leaky_relu(node: Node, inputs: Sequence[Source]) -> Part:
    """``LeakyReLU``: act_type, slope, which MXNet keeps in float32."""
    kind, slope = node.attributes["act_type"], node.attributes["slope"]
    if kind == "prelu":
        count, = inputs[1].sizes()
        return Layer(f"{_HELPERS}.GluonPReLU", {"num_parameters": count},
                     {"weight": inputs[1].name})
    only(node, act_type=("leaky", "elu", "selu", "gelu"))
    return {"leaky": Layer(f"{_HELPERS}.GluonLeakyReLU",
                           {"negative_slope": slope}),
            "elu": Layer("torch.nn.ELU", {"alpha": slope}),
            "selu": Layer(f"{_HELPERS}.GluonSELU", {}),
            "gelu": Layer("torch.nn.GELU", {})}[kind]


@operator("hard_sigmoid")
def _hard_sigmoid(node: Node, inputs: Sequence[Source]) -> Part:
    """``hard_sigmoid``: alpha, beta, which MXNet keeps in float32."""
    a = node.attributes
    line = Call("operator.add", (Call("operator.mul", (_X, a["alpha"])),
                                 a["beta"]))
    # no gradient at the bounds, which torch.clamp lets pass
    return Call("torch.nn.functional.hardtanh", (line, 0, 1))


def _softmax(function: str) -> Rule:
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        a = node.attributes
        only(node, dtype=(None, "float32", "float64"))
        x: Any = _X
        named = {} if a["dtype"] is None else {
            "dtype": getattr(torch, a["dtype"])}
        if a["temperature"] not in (None, 1.0):
            x = Call("operator.truediv", (x, a["temperature"]))
        if function == "torch.nn.functional.softmin":
            x, by = Call("torch.neg", (x,)), "torch.softmax"
        else:
            by = function
        if a["use_length"]:
            if by != "torch.softmax" or named:
                raise MissingOperator(f"use_length=True, dtype={a['dtype']}")
            return Call(f"{_FUNCTIONS}.softmax_of_lengths",
                        (x, _Y, a["axis"]))
        return Call(by, (x, a["axis"]), named)
    return rule


operator("softmax")(_softmax("torch.softmax"))
operator("log_softmax")(_softmax("torch.log_softmax"))
operator("softmin")(_softmax("torch.nn.functional.softmin"))


@operator("SoftmaxActivation")
def _softmax_activation(node: Node, inputs: Sequence[Source]) -> Part:
    """``SoftmaxActivation``: mode."""
    only(node, mode="channel")
    return Call("torch.softmax", (_X, 1))


# -- normalization ------------------------------------------------------------

@operator("L2Normalization")
def _l2_normalization(node: Node, inputs: Sequence[Source]) -> Part:
    """``L2Normalization``: eps, mode."""
    a = node.attributes
    return Call(f"{_HELPERS}.l2_normalize", (_X, a["mode"], a["eps"]))


@operator("LRN")
def _lrn(node: Node, inputs: Sequence[Source]) -> Part:
    """``LRN``: nsize, alpha, beta, knorm."""
    a = node.attributes
    if a["nsize"] % 2 == 0:
        raise MissingOperator(f"nsize={a['nsize']}")
    return Layer("torch.nn.LocalResponseNorm", {
        "size": a["nsize"], "alpha": a["alpha"], "beta": a["beta"],
        "k": a["knorm"]})


@operator("InstanceNorm")
def _instance_norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``InstanceNorm``: eps."""
    return Layer(f"{_HELPERS}.GluonInstanceNorm", {
        "num_features": inputs[1].sizes()[0], "eps": node.attributes["eps"],
        "affine": True}, {"weight": inputs[1].name, "bias": inputs[2].name})


# -- size of images -----------------------------------------------------------

@operator("_contrib_AdaptiveAvgPooling2D")
def _adaptive_pooling(node: Node, inputs: Sequence[Source]) -> Part:
    """``_contrib_AdaptiveAvgPooling2D``: output_size, by default 1."""
    size = node.attributes["output_size"] or (1,)
    return Layer("torch.nn.AdaptiveAvgPool2d", {
        "output_size": size[0] if len(set(size)) == 1 else size})


@operator("_contrib_BilinearResize2D")
def _bilinear_resize(node: Node, inputs: Sequence[Source]) -> Part:
    """``_contrib_BilinearResize2D``: height, width, align_corners."""
    a = node.attributes
    only(node, mode="size", scale_height=None, scale_width=None)
    return Layer(f"{_HELPERS}.GluonBilinear", {
        "size": (a["height"], a["width"]),
        "align_corners": a["align_corners"]})


@operator("UpSampling")
def _up_sampling(node: Node, inputs: Sequence[Source]) -> Part:
    """``UpSampling``: scale, of the nearest or by the weights of a
    convolution (bilinear, which Gluon makes them)."""
    if node.attributes["sample_type"] == "bilinear":
        return _by_weights(node.attributes["scale"], inputs[1])
    only(node, num_args=1)
    return Layer("torch.nn.UpsamplingNearest2d",
                 {"scale_factor": node.attributes["scale"]})


def _by_weights(scale: int, weight: Source) -> Part:
    count, _, kernel, _ = weight.sizes()
    return Layer("torch.nn.ConvTranspose2d", {
        "in_channels": count, "out_channels": count, "kernel_size": kernel,
        "stride": scale, "padding": scale // 2, "groups": count,
        "bias": False}, {"weight": weight.name})


@operator("Pad", "pad")
def _pad(node: Node, inputs: Sequence[Source]) -> Part:
    """``Pad``: pad_width (two for each axis, the first axis first), mode,
    constant_value."""
    a, widths = node.attributes, node.attributes["pad_width"]
    if any(widths[:4]):
        raise MissingOperator(f"pad_width={widths}")
    pairs = [*zip(widths[::2], widths[1::2])][:1:-1]
    flat = tuple(n for pair in pairs for n in pair)
    names = {"constant": "Constant", "edge": "Replication",
             "reflect": "Reflection"}
    options: dict[str, Any] = {
        "padding": flat[0] if len(set(flat)) == 1 else flat}
    if a["mode"] == "constant":
        if not a["constant_value"]:
            return Layer(f"torch.nn.ZeroPad{len(pairs)}d", options)
        options["value"] = number(a["constant_value"])
    return Layer(f"torch.nn.{names[a['mode']]}Pad{len(pairs)}d", options)


# -- shapes -------------------------------------------------------------------

@operator("Reshape", "reshape")
def _reshape(node: Node, inputs: Sequence[Source]) -> Part:
    """``Reshape``: shape, with its codes (0: keep an axis, -1: the rest,
    -2: keep all others, -3: join two axes, -4: split one in two), reverse."""
    a = node.attributes
    only(node, target_shape=((), (0, 0)), keep_highest=False)
    shape = a["shape"]
    if not shape:
        raise MissingOperator("no shape")
    plain = None if a["reverse"] else _moves(shape)
    return plain or _sizes_for(shape, a["reverse"])


def _moves(shape: tuple[int, ...]) -> Call | None:
    """The reshape as one ``flatten`` or ``unflatten``, if it is one."""
    for i, code in enumerate(shape):
        if any(shape[:i]) or code not in (-3, -4):
            continue
        if code == -3 and shape[i + 1:] == (-2,):
            return Call("torch.flatten", (_X, i, i + 1))
        if code == -4 and shape[i + 3:] == (-2,):
            return Call("torch.Tensor.unflatten", (_X, i, shape[i + 1:i + 3]))
    return None


def _sizes_for(shape: tuple[int, ...], reverse: bool) -> Call:
    """A reshape to sizes of the input; `reverse` counts axes from behind."""
    codes = [*shape[::-1]] if reverse else [*shape]
    found: list[Any] = []
    rest = None
    taken = 0       # axes of the input before this code

    def axis(i: int) -> int:
        return -1 - i if reverse else i
    while codes:
        code = codes.pop(0)
        if rest is not None:
            raise MissingOperator(f"shape={shape}")
        if code == -2:
            rest = taken
            continue
        if code == -3:
            found.append(Call("operator.mul", (_size(axis(taken)),
                                               _size(axis(taken + 1)))))
            taken += 1
        elif code == -4:
            # MXNet confuses the place of another -1 behind this.
            if reverse or -1 in codes[2:] or -1 in found:
                raise MissingOperator(f"shape={shape}, reverse={reverse}")
            found += [codes.pop(0), codes.pop(0)]
        else:
            found.append(_size(axis(taken)) if code == 0 else code)
        taken += 1
    if rest is None:
        return Call("torch.Tensor.reshape", (_X, *found[::-1 if reverse
                                                        else 1]))
    part = Call("operator.getitem", (
        Call("builtins.getattr", (_X, "shape")),
        builtins.slice(None, -rest or None) if reverse
        else builtins.slice(rest, None)))
    sizes = Call("operator.add", (part, tuple(found[::-1])) if reverse
                 else (tuple(found), part))
    return Call("torch.Tensor.reshape", (_X, sizes))


@operator("reshape_like")
def _reshape_like(node: Node, inputs: Sequence[Source]) -> Part:
    """``reshape_like``: the whole shape of the other."""
    only(node, lhs_begin=None, lhs_end=None, rhs_begin=None, rhs_end=None)
    return Call("torch.Tensor.reshape", (_X, Call("builtins.getattr",
                                                  (_Y, "shape"))))


@operator("transpose")
def _transpose(node: Node, inputs: Sequence[Source]) -> Part:
    """``transpose``: axes."""
    axes = node.attributes["axes"]
    if not axes:
        return Call(f"{_HELPERS}.reverse_axes", (_X,))
    axes = tuple(k % len(axes) for k in axes)
    moved = [i for i, k in enumerate(axes) if i != k]
    if len(moved) == 2:
        return Call("torch.transpose", (_X, *moved))
    return Call("torch.permute", (_X, axes))


@operator("SwapAxis", "swapaxes")
def _swap_axes(node: Node, inputs: Sequence[Source]) -> Part:
    """``SwapAxis``: dim1, dim2."""
    return Call("torch.transpose", (_X, node.attributes["dim1"],
                                    node.attributes["dim2"]))


@operator("expand_dims")
def _expand_dims(node: Node, inputs: Sequence[Source]) -> Part:
    """``expand_dims``: axis."""
    return Call("torch.unsqueeze", (_X, node.attributes["axis"]))


@operator("squeeze")
def _squeeze(node: Node, inputs: Sequence[Source]) -> Part:
    """``squeeze``: axis."""
    axis = node.attributes["axis"]
    if not axis:
        raise MissingOperator(f"axis={axis}")
    return at_least_one(Call("torch.squeeze", (
        _X, axis[0] if len(axis) == 1 else axis)), node, inputs)


@operator("broadcast_like")
def _broadcast_like(node: Node, inputs: Sequence[Source]) -> Part:
    """``broadcast_like``: to the whole shape of the other."""
    only(node, lhs_axes=None, rhs_axes=None)
    return Call("torch.Tensor.expand_as", (_X, _Y))


@operator("broadcast_to")
def _broadcast_to(node: Node, inputs: Sequence[Source]) -> Part:
    """``broadcast_to``: shape; 0 keeps an axis."""
    return Call("torch.Tensor.expand", (_X, *(
        n or -1 for n in node.attributes["shape"])))


@operator("broadcast_axis", "broadcast_axes")
def _broadcast_axis(node: Node, inputs: Sequence[Source]) -> Part:
    """``broadcast_axis``: axis, size; the axes have size 1."""
    x: Any = _X
    a = node.attributes
    for axis, size in zip(a["axis"], a["size"]):
        x = Call("torch.repeat_interleave", (x, size, axis))
    return x if a["axis"] else Layer("torch.nn.Identity", {})


@operator("tile")
def _tile(node: Node, inputs: Sequence[Source]) -> Part:
    """``tile``: reps."""
    return Call("torch.tile", (_X, node.attributes["reps"]))


@operator("repeat")
def _repeat(node: Node, inputs: Sequence[Source]) -> Part:
    """``repeat``: repeats, axis."""
    a = node.attributes
    return Call("torch.repeat_interleave", (_X, a["repeats"], a["axis"]))


@operator("stack")
def _stack(node: Node, inputs: Sequence[Source]) -> Part:
    """``stack``: axis."""
    return Call("torch.stack", (tuple(map(Slot, range(len(inputs)))),
                                node.attributes["axis"]))


@operator("reverse", "flip")
def _flip(node: Node, inputs: Sequence[Source]) -> Part:
    """``reverse``: axis."""
    if node.attributes["axis"] is None:
        raise MissingOperator("axis=None")
    return Call("torch.flip", (_X, node.attributes["axis"]))


@operator("depth_to_space")
def _depth_to_space(node: Node, inputs: Sequence[Source]) -> Part:
    """``depth_to_space``: block_size. MXNet takes the block's axes first,
    which torch's ``pixel_shuffle`` takes last."""
    n = node.attributes["block_size"]
    return Call(f"{_HELPERS}.depth_to_space", (_X, n))


# -- parts --------------------------------------------------------------------

def _along(axis: int, part: builtins.slice) -> tuple[Any, ...]:
    return (_ALL,) * axis + (part,) if axis >= 0 \
        else (Ellipsis, part) + (_ALL,) * (-1 - axis)


@operator("slice_axis")
def _slice_axis(node: Node, inputs: Sequence[Source]) -> Part:
    """``slice_axis``: axis, begin, end."""
    a = node.attributes
    return Call("operator.getitem", (_X, _along(a["axis"], builtins.slice(
        a["begin"] or None, a["end"]))))


@operator("slice", "crop")
def _slice(node: Node, inputs: Sequence[Source]) -> Part:
    """``slice``: begin, end, step."""
    a = node.attributes
    steps = a["step"] or (None,) * len(a["begin"])
    parts, turned = [], []
    for i, (begin, end, step) in enumerate(zip(a["begin"], a["end"], steps)):
        if step == -1 and end != -1:
            # torch has no steps backwards: the same part, turned round
            if begin is None or end is None or begin - end != 1:
                turned.append(i)
            begin, end = None if end is None else end + 1, \
                None if begin in (None, -1) else begin + 1
        elif step is not None and step < 1:
            raise MissingOperator(f"step={steps}")
        parts.append(builtins.slice(begin or None, end,
                                    None if step in (1, -1) else step))
    part = Call("operator.getitem", (_X, tuple(parts)))
    return Call("torch.flip", (part, tuple(turned))) if turned else part


@operator("slice_like")
def _slice_like(node: Node, inputs: Sequence[Source]) -> Part:
    """``slice_like``: axes, by default all."""
    axes = node.attributes["axes"]
    if not axes:
        return Call(f"{_HELPERS}.crop_like", (_X, _Y))
    x: Any = _X
    for axis in axes:
        x = Call("torch.narrow", (x, axis, 0, Call("torch.Tensor.size",
                                                   (_Y, axis))))
    return x


@operator("SliceChannel", "split")
def _split(node: Node, inputs: Sequence[Source]) -> Part:
    """``SliceChannel``: num_outputs, axis, squeeze_axis. Each form refuses
    sizes that MXNet does."""
    a = node.attributes
    n, axis = a["num_outputs"], a["axis"]
    if n == 1:
        return Call("torch.squeeze", (_X, axis)) if a["squeeze_axis"] \
            else Layer("torch.nn.Identity", {})
    if axis in (1, 2) and not a["squeeze_axis"]:
        return Call(f"torch.{' hd'[axis]}split", (_X, n), outputs=n)
    sizes = (n,) if a["squeeze_axis"] else (n, -1)
    # one axis more; counted from behind, the pieces stand before it
    place = axis - len(sizes) + 1 if axis < 0 else axis
    return Call("torch.unbind", (Call("torch.Tensor.unflatten", (
        _X, axis, sizes)), place), outputs=n)


@operator("take")
def _take(node: Node, inputs: Sequence[Source]) -> Part:
    """``take``: axis, mode. An index is cut to a whole number, and
    brought into range."""
    a = node.attributes
    return Call(f"{_HELPERS}.take", (_X, _Y, a["axis"], a["mode"]))


@operator("gather_nd", "_npi_gather_nd", "_npx_gather_nd")
def _gather_nd(node: Node, inputs: Sequence[Source]) -> Part:
    """``gather_nd``: an index is cut to a whole number."""
    return Call(f"{_FUNCTIONS}.gather_nd", (_X, _Y))


# -- reductions ---------------------------------------------------------------

def _reduction(function: str) -> Rule:
    def rule(node: Node, inputs: Sequence[Source]) -> Part:
        a, axes, x = node.attributes, node.attributes["axis"], _X
        named = {"keepdim": True} if a["keepdims"] else {}
        if a.get("exclude") and axes:
            rank = inputs[0].rank
            if rank is not None:
                axes = tuple(i for i in range(rank)
                             if i not in [k % rank for k in axes])
                if not axes:
                    return Layer("torch.nn.Identity", {})
            elif axes != (0,) or a["keepdims"]:
                raise MissingOperator(f"exclude=True, axis={axes}, keepdims="
                                      f"{a['keepdims']}")
            else:
                return Call(function, (Call("torch.flatten", (_X, 1)), 1))
        if not axes:
            if a["keepdims"]:
                if function == "torch.prod":
                    raise MissingOperator("keepdims=True without an axis")
                return Call(function, (x, ()), named)
            # a number is an array of one in MXNet
            return Call(function, (Call("torch.flatten", (x,)), 0),
                        {"keepdim": True})
        if function == "torch.prod" and len(axes) > 1:
            raise MissingOperator(f"axis={axes}")
        return at_least_one(Call(function, (
            x, axes[0] if len(axes) == 1 else axes), named), node, inputs)
    return rule


def at_least_one(part: Call, node: Node, inputs: Sequence[Source]) -> Call:
    """What leaves no axis is an array of one number in MXNet."""
    axes, rank = node.attributes["axis"], inputs[0].rank
    count = len(axes) if isinstance(axes, tuple) else 1
    if node.attributes.get("keepdims") or rank is not None and rank > count:
        return part
    return Call("torch.atleast_1d", (part,))


operator("sum", "sum_axis")(_reduction("torch.sum"))
operator("mean")(_reduction("torch.mean"))
operator("prod")(_reduction("torch.prod"))
operator("nansum")(_reduction("torch.nansum"))
operator("max", "max_axis")(_reduction(f"{_HELPERS}.amax"))
operator("min", "min_axis")(_reduction(f"{_HELPERS}.amin"))


@operator("norm")
def _norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``norm``: ord, axis, keepdims."""
    order = node.attributes["ord"]
    only(node, ord=(1, 2), out_dtype=None)
    part = _reduction("torch.linalg.vector_norm")(node, inputs)
    assert isinstance(part, Call)
    if part.function == "torch.atleast_1d":
        part, = part.arguments
    x, axes = part.arguments
    part = Call(part.function, (x, order, axes), part.named)
    return at_least_one(part, node, inputs) if node.attributes["axis"] \
        else part


@operator("argmax", "argmin")
def _argmax(node: Node, inputs: Sequence[Source]) -> Part:
    """``argmax``, ``argmin``: axis, keepdims. The answer is a number."""
    a, function = node.attributes, f"torch.{node.op}"
    if a["axis"] is None and a["keepdims"]:
        raise MissingOperator("keepdims=True, axis=None")
    found = Call(function, (Call("torch.flatten", (_X,)), 0, True)) \
        if a["axis"] is None else at_least_one(Call(function, (
            _X, a["axis"], *((True,) if a["keepdims"] else ()))), node,
            inputs)
    return Call("torch.Tensor.to", (found, _X))


@operator("sort", "_npi_sort")
def _sort(node: Node, inputs: Sequence[Source]) -> Part:
    """``sort``: axis, is_ascend."""
    return Call("operator.getitem", (_sorted(node, "torch.sort"), 0))


@operator("argsort", "_npi_argsort")
def _argsort(node: Node, inputs: Sequence[Source]) -> Part:
    """``argsort``: axis, is_ascend, dtype. Of equal ones the first comes
    first; MXNet has them in any order where there are more than 16."""
    only(node, dtype=("float32", "float64", "int32", "int64"))
    return Call("torch.Tensor.to", (_sorted(node, "torch.argsort"),
                                    getattr(torch, node.attributes["dtype"])))


def _sorted(node: Node, function: str) -> Call:
    a = node.attributes
    if a["axis"] is None:
        raise MissingOperator("axis=None")
    named: dict[str, Any] = {"dim": a["axis"], "stable": True}
    if not a["is_ascend"]:
        named["descending"] = True
    return Call(function, (_X,), named)
