"""Builds a description in Gluon, written in one of several ways."""
import mgpu

with mgpu.using_backend("mxnet"):
    import mxnet as mx
    from mxnet.gluon import HybridBlock, nn, rnn

from .nets import Net, Node
from .torch_side import value

FUSED = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
         "softplus": "softrelu"}


def _act(name):
    return (lambda n: nn.Activation(FUSED[name]),
            lambda n: lambda F, x: F.Activation(x, act_type=FUSED[name]))


ACTS = {
    **{name: _act(name) for name in FUSED},
    "leaky": (lambda n: nn.LeakyReLU(n.slope), lambda n: lambda F, x:
              F.LeakyReLU(x, act_type="leaky", slope=n.slope)),
    "elu": (lambda n: nn.ELU(n.alpha), lambda n: lambda F, x: F.LeakyReLU(
        x, act_type="elu", slope=n.alpha)),
    "gelu": (lambda n: nn.GELU(), lambda n: lambda F, x: F.LeakyReLU(
        x, act_type="gelu")),
    "maximum": (lambda n: lambda F, x: F.maximum(x, 0),),
}


def conv(n, act=None):
    kind = {1: nn.Conv1D, 2: nn.Conv2D}[n.dims]
    return kind(n.channels, n.kernel, n.stride, n.pad, n.dilation, n.groups,
                use_bias=n.bias, in_channels=n.inputs_, activation=act)


def dense(n, act=None):
    return nn.Dense(n.units, act, n.bias, n.flatten, in_units=n.inputs_)


def recurrent(kind):
    return (lambda n: kind(n.hidden, layout="NTC", input_size=n.inputs_),)


LAYERS = {
    "dense": (dense,), "conv": (conv,),
    "conv_t": (lambda n: nn.Conv2DTranspose(
        n.channels, n.kernel, n.stride, n.pad, use_bias=n.bias,
        in_channels=n.inputs_),),
    "batch_norm": (lambda n: nn.BatchNorm(
        momentum=n.momentum, epsilon=n.eps, in_channels=n.channels),),
    "layer_norm": (lambda n: nn.LayerNorm(
        epsilon=n.eps, in_channels=n.channels),),
    "group_norm": (lambda n: nn.GroupNorm(
        n.groups, epsilon=n.eps),),
    "instance_norm": (lambda n: nn.InstanceNorm(
        epsilon=n.eps, scale=True, in_channels=n.channels),),
    "embedding": (lambda n: nn.Embedding(n.rows, n.units),),
    "lstm": recurrent(rnn.LSTM),
    "gru": recurrent(rnn.GRU),
    "max_pool": (lambda n: nn.MaxPool2D(n.kernel, n.stride, n.pad,
                                        ceil_mode=n.ceil),),
    "avg_pool": (lambda n: nn.AvgPool2D(
        n.kernel, n.stride, n.pad, ceil_mode=n.ceil,
        count_include_pad=n.count),),
    "gap": (lambda n: nn.GlobalAvgPool2D(),
            lambda n: lambda F, x: F.mean(x, axis=(2, 3), keepdims=True)),
    "gmp": (lambda n: nn.GlobalMaxPool2D(),
            lambda n: lambda F, x: F.max(x, axis=(2, 3), keepdims=True)),
    "flatten": (lambda n: nn.Flatten(), lambda n: lambda F, x: F.flatten(x),
                lambda n: lambda F, x: F.reshape(x, shape=(0, -1))),
    "dropout": (lambda n: nn.Dropout(n.rate),),
}


FUNCTIONS = {
    "add": (lambda F, n, x, y: x + y,
            lambda F, n, x, y: F.elemwise_add(x, y)),
    "concat": (lambda F, n, *xs: F.concat(*xs, dim=n.axis),),
    "softmax": (lambda F, n, x: F.softmax(x, axis=n.axis),),
    "scale": (lambda F, n, x: x * n.factor,),
    "scores": (lambda F, n, q, k: F.batch_dot(q, k, transpose_b=True),
               lambda F, n, q, k: F.batch_dot(
                   q, F.transpose(k, axes=(0, 2, 1)))),
    "mask": (lambda F, n, s, x: F.broadcast_sub(s, 8.0 * F.expand_dims(
        F.cast(x == 0, dtype="float64"), axis=1)),),
    "matmul": (lambda F, n, w, v: F.batch_dot(w, v),),
    "mean": (lambda F, n, x: F.mean(x, axis=n.axis),),
    "max": (lambda F, n, x: F.max(x, axis=n.axis),),
    "last": (lambda F, n, x: F.squeeze(F.slice_axis(
        x, axis=1, begin=n.index,
        end=None if n.index == -1 else n.index + 1), axis=1),),
    "transpose": (lambda F, n, x: F.transpose(x, axes=n.axes),),
    "mean_by_sum": (lambda F, n, x: F.broadcast_div(
        F.sum(x, axis=n.axis), F.sum(F.slice_axis(F.slice_axis(
            F.ones_like(x), axis=0, begin=0, end=1), axis=2, begin=0, end=1),
            axis=n.axis)),),
    "pad": (lambda F, n, x: F.pad(
        x, mode="constant", pad_width=(0, 0, 0, 0, *[n.by] * 4)),),
    "exp_share": (lambda F, n, x: F.broadcast_div(F.exp(x), F.sum(
        F.exp(x), axis=n.axis, keepdims=True)),),
}


class Graph(HybridBlock):
    """Calls its children and functions as the description says."""

    def __init__(self, net, style, layers):
        super().__init__()
        order = list(layers)
        style.order(order)
        self.net = net
        self.functions = {}
        for name in order:
            if isinstance(layers[name], HybridBlock):
                self.register_child(layers[name], name)
            else:
                self.functions[name] = layers[name]

    def hybrid_forward(self, F, x):
        values = {"x": x}
        for n in self.net:
            inputs = [values[i] for i in n.inputs]
            if n.name in self.functions:
                values[n.name] = self.functions[n.name](F, *inputs)
            else:
                values[n.name] = self._children[n.name](*inputs)
        return values[self.net.nodes[-1].name]


def fused(net: Net, style) -> dict[str, str]:
    """Activations that are written inside the layer before them: that
    layer, by the name of the activation."""
    found = {}
    for n in net:
        if n.kind == "act" and n.act in FUSED and n.inputs[0] != "x":
            one = net[n.inputs[0]]
            if one.kind in ("dense", "conv") and len(
                    net.readers(one.name)) == 1 and style.fuses(n):
                found[n.name] = one.name
    return found


def part(n: Node, style, act):
    if n.kind in ("dense", "conv"):
        return LAYERS[n.kind][0](n, act)
    if n.kind == "act":
        ways = ACTS[n.act]
    elif n.kind in LAYERS:
        ways = LAYERS[n.kind]
    else:
        way = style.choose(n, FUNCTIONS[n.kind])
        return lambda F, *xs: way(F, n, *xs)
    return style.choose(n, ways)(n)


def build(net: Net, style, dims: int, seed: int):
    """The network."""
    inside = fused(net, style)
    acts = {layer: FUSED[net[act].act] for act, layer in inside.items()}
    names = {n.name: n for n in net}
    layers = {}
    for n in net:
        layers[n.name] = part(n, style, acts.get(n.name)) \
            if n.name not in inside else lambda F, x: x
    whole = all(isinstance(x, HybridBlock) for n, x in layers.items()
                if n not in inside)
    if style.container != "attributes" and net.chain and whole:
        made = nn.HybridSequential()
        stack = [x for n, x in layers.items() if n not in inside]
        if style.container == "nested" and len(stack) > 2:
            inner = nn.HybridSequential()
            inner.add(*stack[:len(stack) // 2])
            made.add(inner, *stack[len(stack) // 2:])
        else:
            made.add(*stack)
    else:
        made = Graph(net, style, layers)
    made.initialize()
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    for n, layer in layers.items():
        found = layer._collect_params_with_prefix() if isinstance(
            layer, HybridBlock) else {}
        for i, (name, p) in enumerate(found.items()):
            p.set_data(array(value(names[n], i, name, p.shape, seed)))
    if style.hybrid:
        made.hybridize(static_alloc=style.hybrid > 1)

    def walk(block, path):
        for name, child in block._children.items():
            yield f"{path}{name}", child
            yield from walk(child, f"{path}{name}.")
    found = dict(walk(made, ""))
    made.paths = {n: p for p, b in found.items()
                  for n, x in layers.items() if x is b}
    return made
