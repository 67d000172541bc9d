"""Builds a description in torch, written in one of several ways."""
import zlib
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .nets import Net, Node

ACTS = {
    "relu": (lambda n: nn.ReLU(), lambda n: F.relu, lambda n: torch.relu,
             lambda n: nn.ReLU(inplace=True)),
    "tanh": (lambda n: nn.Tanh(), lambda n: torch.tanh),
    "sigmoid": (lambda n: nn.Sigmoid(), lambda n: torch.sigmoid),
    "softplus": (lambda n: nn.Softplus(threshold=1e9),
                 lambda n: partial(F.softplus, threshold=1e9)),
    "leaky": (lambda n: nn.LeakyReLU(n.slope),
              lambda n: partial(F.leaky_relu, negative_slope=n.slope)),
    "elu": (lambda n: nn.ELU(n.alpha), lambda n: partial(F.elu,
                                                         alpha=n.alpha)),
    "gelu": (lambda n: nn.GELU(), lambda n: F.gelu),
    "maximum": (lambda n: lambda x: x.clamp(min=0), lambda n: lambda x:
                torch.maximum(x, torch.zeros_like(x))),
}


class Stored(nn.Module):
    """A dense layer with an (in, out) weight."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n.inputs_, n.units))
        self.bias = nn.Parameter(torch.zeros(n.units)) if n.bias else None

    def forward(self, x):
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def dense(n):
    if n.options.get("stored"):
        return Stored(n)
    return nn.Linear(n.inputs_, n.units, bias=n.bias)


class Flipped(nn.Conv2d):
    """A convolution as mathematics has it."""

    def forward(self, x):
        return F.conv2d(x, self.weight.flip(-1, -2), self.bias, self.stride,
                        self.padding, self.dilation, self.groups)


def conv(n):
    kind = Flipped if n.options.get("flipped") \
        else {1: nn.Conv1d, 2: nn.Conv2d}[n.dims]
    return kind(n.inputs_, n.channels, n.kernel, n.stride, n.pad, n.dilation,
                n.groups, n.bias)


def batch_norm(n, dims):
    kind = nn.BatchNorm1d if dims < 3 else nn.BatchNorm2d
    return kind(n.channels, n.eps, 1 - n.momentum)


class ByHand(nn.Module):
    """Recurrence written out, or with the reset gate before the product."""

    def __init__(self, gates, n):
        super().__init__()
        self.hidden, self.how, h = n.hidden, n.options.get("how"), n.hidden
        self.weight_ih_l0 = nn.Parameter(torch.zeros(gates * h, n.inputs_))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(gates * h, h))
        self.bias_ih_l0 = nn.Parameter(torch.zeros(gates * h))
        self.bias_hh_l0 = nn.Parameter(torch.zeros(gates * h))

    def forward(self, x):
        h = c = x.new_zeros(len(x), self.hidden)
        out = []
        for t in range(x.shape[1]):
            a = F.linear(x[:, t], self.weight_ih_l0, self.bias_ih_l0)
            b = F.linear(h, self.weight_hh_l0, self.bias_hh_l0)
            h, c = self.step(a, b, h, c)
            out.append(h)
        return torch.stack(out, 1)


class HandLSTM(ByHand):
    def step(self, a, b, h, c):
        i, f, g, o = (a + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class HandGRU(ByHand):
    def step(self, a, b, h, c):
        (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
        r, z = torch.sigmoid(ar + br), torch.sigmoid(az + bz)
        if self.how == "before":
            k = 2 * self.hidden
            bn = F.linear(r * h, self.weight_hh_l0[k:], self.bias_hh_l0[k:])
            new = torch.tanh(an + bn)
        else:
            new = torch.tanh(an + r * bn)
        return (1 - z) * new + z * h, c


def recurrent(native, hand, gates):
    return (lambda n: native(n.inputs_, n.hidden, batch_first=True)
            if n.options.get("how") is None else hand(gates, n),)


class HandNorm(nn.LayerNorm):
    """Layer norm, written out."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * self.weight + self.bias


def layer_norm(n):
    return (HandNorm if n.options.get("by_hand") else nn.LayerNorm)(
        n.channels, n.eps)


LAYERS = {
    "identity": (lambda n: nn.Identity(),), "dense": (dense,), "conv": (conv,),
    "conv_t": (lambda n: nn.ConvTranspose2d(
        n.inputs_, n.channels, n.kernel, n.stride, n.pad, bias=n.bias),),
    "layer_norm": (layer_norm,),
    "group_norm": (lambda n: nn.GroupNorm(n.groups, n.channels, n.eps),),
    "instance_norm": (lambda n: nn.InstanceNorm2d(
        n.channels, n.eps, affine=True),),
    "embedding": (lambda n: nn.Embedding(n.rows, n.units),),
    "lstm": recurrent(nn.LSTM, HandLSTM, 4),
    "gru": recurrent(nn.GRU, HandGRU, 3),
    "max_pool": (lambda n: nn.MaxPool2d(n.kernel, n.stride, n.pad,
                                        ceil_mode=n.ceil),
                 lambda n: lambda x: F.max_pool2d(
                     x, n.kernel, n.stride, n.pad, ceil_mode=n.ceil)),
    "avg_pool": (lambda n: nn.AvgPool2d(n.kernel, n.stride, n.pad, n.ceil,
                                        n.count),
                 lambda n: lambda x: F.avg_pool2d(
                     x, n.kernel, n.stride, n.pad, n.ceil, n.count)),
    "gap": (lambda n: nn.AdaptiveAvgPool2d(1),
            lambda n: lambda x: x.mean((2, 3), keepdim=True)),
    "gmp": (lambda n: nn.AdaptiveMaxPool2d(1),
            lambda n: lambda x: x.amax((2, 3), keepdim=True)),
    "flatten": (lambda n: nn.Flatten(), lambda n: lambda x: x.flatten(1),
                lambda n: lambda x: x.reshape(len(x), -1)),
    "dropout": (lambda n: nn.Dropout(n.rate),),
}


FUNCTIONS = {
    "add": (lambda n, x, y: x + y, lambda n, x, y: torch.add(x, y)),
    "concat": (lambda n, *xs: torch.cat(xs, n.axis),),
    "softmax": (lambda n, x: x.softmax(n.axis),
                lambda n, x: F.softmax(x, n.axis)),
    "scale": (lambda n, x: x * n.factor, lambda n, x: n.factor * x),
    "scores": (lambda n, q, k: torch.bmm(q, k.transpose(1, 2)),
               lambda n, q, k: q @ k.mT),
    "mask": (lambda n, s, x: s - 8.0 * (x == 0).to(s.dtype)[:, None],),
    "matmul": (lambda n, w, v: torch.bmm(w, v), lambda n, w, v: w @ v),
    "mean": (lambda n, x: x.mean(n.axis),),
    "max": (lambda n, x: x.amax(n.axis),),
    "last": (lambda n, x: x[:, n.index],),
    "transpose": (lambda n, x: x.permute(n.axes),),
    "channels_last": (lambda n, x: x.permute(0, 2, 3, 1).flatten(1),),
    "nothing": (lambda n, x: x,),
    "add_in_place": (lambda n, x, y: x.add_(y),),
    "sdpa": (lambda n, q, k, v: F.scaled_dot_product_attention(
        q, k, v, scale=n.factor),),
    "mean_by_sum": (lambda n, x: x.sum(n.axis) / x.shape[n.axis],),
    "pad": (lambda n, x: F.pad(x, (n.by,) * 4),),
    "exp_share": (lambda n, x: x.exp() / x.exp().sum(n.axis, keepdim=True),),
}


class Graph(nn.Module):
    """Calls its children and functions as the description says."""

    def __init__(self, net, style, layers):
        super().__init__()
        self.net, self.calls = net, {}
        order = list(layers)
        style.order(order)
        for name in order:
            if isinstance(layers[name], nn.Module):
                self.add_module(name, layers[name])
        self.functions = {n: f for n, f in layers.items()
                          if not isinstance(f, nn.Module)}

    def forward(self, x):
        values = {"x": x}
        for n in self.net:
            inputs = [values[i] for i in n.inputs]
            if n.name in self.functions:
                values[n.name] = self.functions[n.name](*inputs)
            else:
                out = getattr(self, n.name)(*inputs)
                values[n.name] = out[0] if isinstance(out, tuple) else out
        return values[self.net.nodes[-1].name]


def part(n: Node, style, dims: int):
    """The layer or the function of a node."""
    if n.kind == "act":
        ways = ACTS[n.act]
    elif n.kind == "batch_norm":
        ways = (partial(batch_norm, dims=dims),)
    elif n.kind in LAYERS:
        ways = LAYERS[n.kind]
    else:
        return partial(style.choose(n, FUNCTIONS[n.kind]), n)
    return style.choose(n, ways)(n)


def build(net: Net, style, dims: int, seed: int):
    """The network. `dims`: the axes of its inputs."""
    layers = {n.name: part(n, style, _dims(net, n, dims)) for n in net}
    for n in net:       # in place would overwrite what another node reads
        if isinstance(layers.get(n.name), nn.ReLU) and (
                len(net.readers(n.inputs[0])) > 1 or n.inputs[0] == "x"):
            layers[n.name] = nn.ReLU()
    if style.container != "attributes" and net.chain and all(
            isinstance(x, nn.Module) and not isinstance(
                x, (nn.LSTM, nn.GRU)) for x in layers.values()):
        stack = list(layers.values())
        if style.container == "nested" and len(stack) > 2:
            cut = len(stack) // 2
            made = nn.Sequential(nn.Sequential(*stack[:cut]),
                                 *stack[cut:])
        else:
            made = nn.Sequential(*stack)
    else:
        made = Graph(net, style, layers)
    for n in net:
        layer = layers.get(n.name)
        if n.options.get("frozen_weight"):
            layer.weight.requires_grad_(False)
    fill(net, layers, seed)
    made.paths = {n: p for p, m in made.named_modules()
                  for n, x in layers.items() if x is m}
    return made


def _dims(net: Net, n: Node, dims: int) -> int:
    """The axes of what a batch norm gets."""
    name = n.inputs[0]
    while name != "x":
        node = net[name]
        if node.kind == "dense":
            return 2
        if node.kind == "conv":
            return node.dims + 2
        name = node.inputs[0]
    return dims


def value(node: Node, place: int, name: str, shape, seed: int) -> np.ndarray:
    """The values of a node's parameter: the same for both backends."""
    rng = np.random.default_rng(zlib.crc32(
        f"{seed} {node.name} {place}".encode()))
    if "var" in name or node.kind.endswith("norm") and not place:
        return rng.uniform(0.5, 1.5, shape)
    if len(shape) > 1:
        return rng.normal(0, 1.2 / np.prod(shape[1:]) ** 0.5, shape)
    return rng.normal(0, 0.3, shape)


def fill(net: Net, layers, seed: int) -> None:
    with torch.no_grad():
        for n in net:
            layer = layers.get(n.name)
            if isinstance(layer, nn.Module):
                for i, (name, p) in enumerate(
                        (*layer.named_parameters(), *layer.named_buffers())):
                    if p.is_floating_point():
                        shape = tuple(p.shape)
                        turned = isinstance(layer, Stored) and p.ndim > 1
                        new = value(n, i, name, shape[::-1] if turned
                                    else shape, seed)
                        p.copy_(torch.from_numpy(new.T if turned else new))
