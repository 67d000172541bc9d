"""MXNet's operators of recurrent networks and of attention in PyTorch."""
from collections.abc import Sequence
from typing import Any

from mgpu.gluon_io.graph import Node
from mgpu.gluon_io.parts import (Call, Layer, MissingOperator, Part, Slot,
                                 Source, only, operator)

_FUNCTIONS = "mgpu.backends._torch.gluon.functions"
_X, _Y = Slot(0), Slot(1)


# -- layers with parameters ---------------------------------------------------

@operator("RNN", "_npx_rnn")
def _rnn(node: Node, inputs: Sequence[Source]) -> Part:
    """``RNN``: state_size, num_layers, bidirectional, mode, p,
    state_outputs. Its parameters are the arrays of Gluon's layer, which the
    graph packs; a begin state of zeros is torch's own."""
    a = node.attributes
    only(node, projection_size=None, lstm_state_clip_min=None,
         lstm_state_clip_max=None, use_sequence_length=False)
    lstm = a["mode"] == "lstm"
    sources = _packed(inputs[1])
    names = [f"{kind}_{step}_l{i}{direction}" for kind in ("weight", "bias")
             for i in range(a["num_layers"])
             for direction in ("", "_reverse")[:1 + a["bidirectional"]]
             for step in ("ih", "hh")]
    if len(names) != len(sources):
        raise MissingOperator(f"{len(sources)} arrays of parameters; "
                              f"{len(names)} expected")
    options = {"input_size": sources[0].sizes()[-1],
               "hidden_size": a["state_size"]}
    if a["num_layers"] != 1:
        options["num_layers"] = a["num_layers"]
        if a["p"]:      # of one layer nothing is dropped
            options["dropout"] = round(a["p"], 7)
    if a["bidirectional"]:
        options["bidirectional"] = True
    if a["mode"] == "rnn_relu":
        options["nonlinearity"] = "relu"
    states: list[Any] = [None if _is_zeros(x) else Slot(2 + i)
                         for i, x in enumerate(inputs[2:3 + lstm])]
    enters: tuple[Any, ...] = (_X,)
    if any(x is not None for x in states):
        # a state of zeros has no batch in the graph: it is as the other one
        given = next(x for x in states if x is not None)
        states = [Call("torch.zeros_like", (given,)) if x is None else x
                  for x in states]
        enters = (_X, tuple(states) if lstm else states[0])
    outputs = 2 + lstm if a["state_outputs"] else 1
    numbers = iter(range(1, outputs))
    return Layer(
        "torch.nn." + {"lstm": "LSTM", "gru": "GRU"}.get(a["mode"], "RNN"),
        options, {key: x.name for key, x in zip(names, sources)}, enters,
        outputs=outputs, returns=(0, tuple(numbers) if lstm or outputs == 1
                                  else next(numbers)))


def _packed(x: Source) -> list[Source]:
    """The arrays that ``_rnn_param_concat`` makes one of."""
    if x.node.op == "null":
        raise MissingOperator(f"one array {x.node.name!r} for all parameters")
    if x.node.op not in ("_rnn_param_concat", "_npi_rnn_param_concat"):
        raise MissingOperator(f"parameters by {x.node.op}")
    return [_flattened(y) for y in x.inputs]


def _flattened(x: Source) -> Source:
    """The array that ``reshape(-1)`` flattens."""
    shapes = {"Reshape": "shape", "reshape": "shape",
              "_np_reshape": "newshape", "_npi_reshape": "newshape",
              "_npx_reshape": "newshape"}
    if x.node.op in shapes and x.node.attributes[shapes[x.node.op]] == (-1,):
        x = x.inputs[0]
    x.sizes()
    return x


def _is_zeros(x: Source) -> bool:
    return x.node.op in ("_zeros", "_npi_zeros")


@operator("Embedding", "_npx_embedding")
def _embedding(node: Node, inputs: Sequence[Source]) -> Part:
    """``Embedding``: input_dim, output_dim. An index that there is not is an
    error in torch; MXNet takes the nearest."""
    only(node, sparse_grad=False)
    a = node.attributes
    return Layer("torch.nn.Embedding", {"num_embeddings": a["input_dim"],
                                        "embedding_dim": a["output_dim"]},
                 {"weight": inputs[1].name},
                 (Call("torch.Tensor.long", (_X,)),))


@operator("LayerNorm", "_npx_layer_norm")
def _layer_norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``LayerNorm``: axis, eps, which MXNet keeps in float32."""
    a = node.attributes
    only(node, output_mean_var=False)
    options = {"normalized_shape": inputs[1].sizes()[0], "eps": a["eps"]}
    kind = "torch.nn.LayerNorm"
    if a["axis"] != -1:
        kind = "mgpu.backends._torch.gluon.layers.GluonLayerNorm"
        options["axis"] = a["axis"]
    return Layer(kind, options, {"weight": inputs[1].name,
                                 "bias": inputs[2].name})


@operator("GroupNorm")
def _group_norm(node: Node, inputs: Sequence[Source]) -> Part:
    """``GroupNorm``: num_groups, eps. gamma and beta are of groups."""
    a = node.attributes
    only(node, output_mean_var=False)
    return Layer("mgpu.backends._torch.gluon.layers.GluonGroupNorm", {
        "num_groups": a["num_groups"], "eps": a["eps"]},
        {"weight": inputs[1].name, "bias": inputs[2].name})


# -- products -----------------------------------------------------------------

@operator("batch_dot", "_npx_batch_dot")
def _batch_dot(node: Node, inputs: Sequence[Source]) -> Part:
    """``batch_dot``: transpose_a, transpose_b."""
    only(node, forward_stype=None)
    return Call("torch.matmul", tuple(
        Call("torch.Tensor.transpose", (x, -2, -1))
        if node.attributes[key] else x
        for x, key in ((_X, "transpose_a"), (_Y, "transpose_b"))))


@operator("dot")
def _dot(node: Node, inputs: Sequence[Source]) -> Part:
    """``dot``: transpose_a, transpose_b, of matrices. The last axis of the
    one with the first of the other; a number has the shape (1,)."""
    only(node, forward_stype=None)
    x, y = (Call("torch.t", (x,)) if node.attributes[key] else x
            for x, key in ((_X, "transpose_a"), (_Y, "transpose_b")))
    product = Call("torch.tensordot", (x, y, 1))
    if any(len(source.shape or ()) > 1 for source in inputs):
        return product
    return Call("torch.atleast_1d", (product,))


@operator("_contrib_div_sqrt_dim")
def _div_sqrt_dim(node: Node, inputs: Sequence[Source]) -> Part:
    """``div_sqrt_dim``: by the root of the size of the last axis."""
    return Call("operator.truediv", (_X, Call("operator.pow", (
        Call("torch.Tensor.size", (_X, -1)), 0.5))))


@operator("_contrib_interleaved_matmul_selfatt_qk",
          "_contrib_interleaved_matmul_selfatt_valatt",
          "_contrib_interleaved_matmul_encdec_qk",
          "_contrib_interleaved_matmul_encdec_valatt")
def _interleaved(node: Node, inputs: Sequence[Source]) -> Part:
    """``interleaved_matmul_selfatt_qk``, ...: heads."""
    name = node.op.removeprefix("_contrib_interleaved_matmul_")
    return Call(f"{_FUNCTIONS}.{name}", (*map(Slot, range(len(inputs))),
                                       node.attributes["heads"]))


# -- sequences of several lengths ---------------------------------------------

@operator("SequenceMask", "_npx_sequence_mask")
def _sequence_mask(node: Node, inputs: Sequence[Source]) -> Part:
    """``SequenceMask``: use_sequence_length, value, axis."""
    a = node.attributes
    if not a["use_sequence_length"]:
        return Layer("torch.nn.Identity", {})
    return Call(f"{_FUNCTIONS}.sequence_mask", (_X, _Y, a["value"], a["axis"]))


@operator("SequenceLast", "SequenceReverse")
def _sequence(node: Node, inputs: Sequence[Source]) -> Part:
    """``SequenceLast``, ``SequenceReverse``: use_sequence_length, axis."""
    a = node.attributes
    last = node.op == "SequenceLast"
    if not last:
        only(node, axis=0)
    if a["use_sequence_length"]:
        return Call(f"{_FUNCTIONS}.sequence_last", (_X, _Y, a["axis"])) \
            if last else Call(f"{_FUNCTIONS}.sequence_reverse", (_X, _Y))
    return Call("torch.select", (_X, a["axis"], -1)) if last \
        else Call("torch.flip", (_X, (0,)))
