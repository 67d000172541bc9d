"""The ends of a network of MXNet's symbols: its losses, as predictions.

Such an operator takes a label and predicts; its gradient is that of a loss.
Here it predicts: the label is no input, and the loss is the user's.
"""
from collections.abc import Sequence

from mgpu.gluon_io.graph import Node
from mgpu.gluon_io.parts import Call, Layer, Part, Slot, Source, only, operator

_X = Slot(0)


@operator("SoftmaxOutput", "Softmax")
def _softmax_output(node: Node, inputs: Sequence[Source]) -> Part:
    """``SoftmaxOutput``: multi_output, preserve_shape. The options of its
    loss are dropped with the label; a training that goes on refuses them."""
    a = node.attributes
    if a["multi_output"]:
        return Layer("torch.nn.Softmax", {"dim": 1})
    source = inputs[0].node
    if a["preserve_shape"] or source.op == "FullyConnected" \
            and source.attributes["flatten"]:
        return Layer("torch.nn.Softmax", {"dim": -1})
    # over all axes but the first
    return Call("torch.Tensor.view_as", (
        Call("torch.softmax", (Call("torch.flatten", (_X, 1)), 1)), _X))


@operator("LinearRegressionOutput", "MAERegressionOutput")
def _identity_output(node: Node, inputs: Sequence[Source]) -> Part:
    """``LinearRegressionOutput``, ``MAERegressionOutput``."""
    return Layer("torch.nn.Identity", {})


@operator("LogisticRegressionOutput")
def _logistic_output(node: Node, inputs: Sequence[Source]) -> Part:
    """``LogisticRegressionOutput``."""
    return Layer("torch.nn.Sigmoid", {})


@operator("MakeLoss", "make_loss")
def _make_loss(node: Node, inputs: Sequence[Source]) -> Part:
    """``MakeLoss``: its gradient is 1 for each element, whatever follows; as
    that of the sum, which the user's loop takes. In the graph nothing may
    follow it."""
    if node.op == "MakeLoss":
        only(node, grad_scale=1.0, normalization="null")
    return Layer("torch.nn.Identity", {})


@operator("BlockGrad", "stop_gradient")
def _block_grad(node: Node, inputs: Sequence[Source]) -> Part:
    """``BlockGrad``: no gradient passes."""
    return Call("torch.Tensor.detach", (_X,))
