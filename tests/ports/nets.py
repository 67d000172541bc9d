"""Networks as descriptions, and the families that draw them from a seed."""
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: kinds that are a layer in both frameworks; the others are functions
PARAMETRIC = ("dense", "conv", "conv_t", "batch_norm", "layer_norm",
              "group_norm", "instance_norm", "embedding", "lstm", "gru")
LAYERS = (*PARAMETRIC, "act", "max_pool", "avg_pool", "gap", "gmp", "flatten",
          "dropout")


@dataclass(frozen=True)
class Node:
    """One operation: its inputs are names of nodes, or "x"."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    options: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.options[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Net:
    """Nodes in the order of their calls; the last one is the output."""

    nodes: tuple[Node, ...]

    def __getitem__(self, name: str) -> Node:
        return next(n for n in self.nodes if n.name == name)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @property
    def chain(self) -> bool:
        """Whether each node has the one before it as its only input."""
        before = ["x", *(n.name for n in self.nodes)]
        return all(n.inputs == (b,) for n, b in zip(self.nodes, before))

    def readers(self, name: str) -> list[Node]:
        return [n for n in self.nodes if name in n.inputs]

    # -- changes ------------------------------------------------------------

    def change(self, name: str, kind: str | None = None, **options: Any
               ) -> "Net":
        return Net(tuple(replace(
            n, kind=kind or n.kind, options={**n.options, **options})
            if n.name == name else n for n in self.nodes))

    def rewire(self, name: str, *inputs: str) -> "Net":
        return Net(tuple(replace(n, inputs=inputs) if n.name == name else n
                         for n in self.nodes))

    def after(self, name: str, kind: str, new: str, **options: Any) -> "Net":
        """With another node between a node and all that read it."""
        return Net(tuple(m for n in self.nodes for m in (
            replace(n, inputs=tuple(
                new if i == name else i for i in n.inputs)),
            *([Node(new, kind, (name,), options)] if n.name == name
              else []))))

    def without(self, name: str) -> "Net":
        """Without a node; what read it reads its first input."""
        gone = self[name].inputs[0]
        return Net(tuple(replace(n, inputs=tuple(
            gone if i == name else i for i in n.inputs))
            for n in self.nodes if n.name != name))

    def before(self, name: str, kind: str, new: str, **options: Any) -> "Net":
        """With another node between a node and what it reads."""
        return Net(tuple(m for n in self.nodes for m in (
            (Node(new, kind, n.inputs, options), replace(n, inputs=(new,)))
            if n.name == name else (n,))))


@dataclass(frozen=True)
class Task:
    """A network and what it is trained on.

    Attributes
    ----------
    inputs : tuple
        ("images", channels, size), ("rows", n), ("words", length,
        vocabulary) or ("series", length, n).
    outputs : int
    targets : str
        "classes" or "numbers".
    """

    net: Net
    inputs: tuple[Any, ...]
    outputs: int
    targets: str = "classes"

    def single(self, backends: tuple[str, ...]) -> bool:
        """Whether a layer of MXNet's knows float32 only."""
        return "mxnet" in backends and any(
            n.kind in ("lstm", "gru", "instance_norm") for n in self.net)

    def batches(self, rng: np.random.Generator, rows: int
                ) -> list[tuple[np.ndarray, np.ndarray]]:
        made = []
        for _ in range(3):
            kind, *size = self.inputs
            if kind == "words":
                X = rng.integers(1, size[1], (rows, size[0])).astype("int32")
                X[:, -2:] *= rng.integers(0, 2, (rows, 2), "int32")  # padding
                if any(n.kind == "max" for n in self.net):  # without ties,
                    # whose gradient the backends share in other ways
                    X = rng.permuted(np.tile(np.arange(
                        size[1], dtype="int32"), (rows, 1)), axis=1)[
                            :, :size[0]]
            else:
                shape = (size[0], size[1], size[1]) if kind == "images" \
                    else tuple(size)
                X = rng.normal(0.1, 1.0, (rows, *shape))
            # each class at least once, if rows are enough
            y = rng.permutation(np.arange(rows) % self.outputs).astype(
                "int32") if self.targets == "classes" \
                else rng.normal(size=(rows, self.outputs))
            made.append((X, y))
        return made


class Builder:
    """Adds nodes one after the other, and keeps count of sizes."""

    def __init__(self, rng: random.Random, channels: int, size: int = 0):
        self.rng, self.nodes, self.counts = rng, [], {}
        self.at, self.channels, self.size = "x", channels, size

    def add(self, kind: str, *inputs: str, **options: Any) -> str:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        name = f"{kind}{self.counts[kind]}"
        self.nodes.append(Node(name, kind, inputs or (self.at,), options))
        self.at = name
        return name

    def conv(self, channels: int, kernel: int = 3, stride: int = 1,
             pad: int = 0, dilation: int = 1, groups: int = 1,
             bias: bool = True, dims: int = 2, **then: Any) -> str:
        name = self.add("conv", channels=channels, kernel=kernel,
                        stride=stride, pad=pad, dilation=dilation,
                        groups=groups, bias=bias, inputs_=self.channels,
                        dims=dims)
        self.channels = channels
        self.size = (self.size + 2 * pad - dilation * (kernel - 1) - 1
                     ) // stride + 1
        self.then(**then)
        return name

    def then(self, norm: bool = False, act: str | None = None) -> None:
        """Batch norm and an activation, of these or of "any" name."""
        if norm:
            self.norm()
        if act:
            self.act(None if act == "any" else act)

    def dense(self, units: int, bias: bool = True, flatten: bool = True,
              **then: Any) -> str:
        name = self.add("dense", units=units, inputs_=self.channels,
                        bias=bias, flatten=flatten)
        self.channels = units
        self.then(**then)
        return name

    def norm(self, kind: str = "batch_norm") -> str:
        base = {"eps": self.rng.choice([1e-5, 1e-3]),
                "channels": self.channels}
        if kind == "batch_norm":
            base["momentum"] = self.rng.choice([0.9, 0.75, 0.99])
        elif kind == "layer_norm":
            base["eps"] = 2.0 ** -17    # what MXNet's float32 holds
        elif kind == "group_norm":
            base["groups"] = self.channels     # as many gammas on both
        return self.add(kind, **base)

    def act(self, name: str | None = None, **options: Any) -> str:
        name = name or self.rng.choice(["relu", "relu", "relu", "tanh",
                                        "sigmoid", "softplus"])
        return self.add("act", act=name, **options)

    def pool(self, kind: str | None = None, kernel: int = 2, stride: int = 2,
             pad: int = 0, ceil: bool = False, count: bool = True) -> str:
        kind = kind or self.rng.choice(["max_pool", "avg_pool"])
        name = self.add(kind, kernel=kernel, stride=stride, pad=pad,
                        ceil=ceil, count=count)
        rest = self.size + 2 * pad - kernel
        self.size = (-(-rest // stride) if ceil else rest // stride) + 1
        return name

    def flat(self) -> str:
        name = self.add("flatten")
        self.channels *= self.size ** 2
        return name

    def gap(self, kind: str = "gap") -> str:
        self.add(kind)
        self.size = 1
        return self.add("flatten")

    def net(self) -> Net:
        return Net(tuple(self.nodes))


# -- families -----------------------------------------------------------------

FAMILIES: dict[str, Callable[[random.Random], Task]] = {}


def family(draw: Callable[[random.Random], Task]) -> Callable:
    FAMILIES[draw.__name__] = draw
    return draw


def draw(name: str, seed: int) -> Task:
    return FAMILIES[name](random.Random(f"{name} {seed}"))


@family
def mlp(rng: random.Random) -> Task:
    inputs, classes = rng.randint(4, 7), rng.randint(3, 4)
    b = Builder(rng, inputs)
    width = rng.randint(4, 7)
    for i in range(rng.randint(2, 3)):
        b.dense(width, act="any")
        if i == 0 and rng.random() < 0.5:
            b.add("dropout", rate=0.5)
    b.dense(classes)
    return Task(b.net(), ("rows", inputs), classes)


@family
def convnet(rng: random.Random) -> Task:
    channels, size = rng.randint(2, 3), rng.choice([8, 9])
    b = Builder(rng, channels, size)
    b.conv(rng.randint(3, 5), pad=rng.randint(0, 1), norm=True, act="relu")
    b.pool()
    b.conv(rng.randint(3, 5), pad=1, act="any")
    if rng.random() < 0.5:
        b.gap()
    else:
        b.flat()
    if rng.random() < 0.5:
        b.add("dropout", rate=0.25)
    b.dense(3)
    return Task(b.net(), ("images", channels, size), 3)


@family
def residual(rng: random.Random) -> Task:
    width = rng.randint(3, 5)
    b = Builder(rng, 3, 6)
    b.conv(width, pad=1, bias=False, norm=True, act="relu")
    for _ in range(rng.randint(1, 2)):
        skip = b.at
        b.conv(width, pad=1, bias=False, norm=True, act="relu")
        b.conv(width, pad=1, bias=False, norm=True)
        b.add("add", b.at, skip)
        b.act("relu")
    b.gap()
    b.dense(3)
    return Task(b.net(), ("images", 3, 6), 3)


@family
def lstm(rng: random.Random) -> Task:
    length, width = rng.randint(4, 5), rng.randint(3, 4)
    b = Builder(rng, width)
    b.add("embedding", rows=9, units=width)
    b.add("lstm", hidden=width + 1, inputs_=width)
    b.add("last", index=-1)
    b.channels = width + 1
    b.dense(5, act="relu")
    b.dense(3)
    return Task(b.net(), ("words", length, 9), 3)


@family
def attention(rng: random.Random) -> Task:
    length, width = rng.randint(4, 5), 4
    b = Builder(rng, width)
    b.add("embedding", rows=9, units=width)
    _attend(b, b.at, mask=rng.random() < 0.5)
    b.norm("layer_norm")
    b.add("mean", axis=1)
    b.dense(3)
    return Task(b.net(), ("words", length, 9), 3)


def _attend(b: Builder, skip: str, mask: bool = False, drops: bool = False
            ) -> None:
    """Self-attention, and the sum with `skip`."""
    start, width = b.at, b.channels
    q, k, v = ((setattr(b, "at", start), setattr(b, "channels", width),
                b.dense(width, flatten=False))[-1] for _ in range(3))
    b.add("scores", q, k)
    b.add("scale", factor=width ** -0.5)
    if mask:
        b.add("mask", b.at, "x")
    weights = b.add("softmax", axis=-1)
    b.add("matmul", weights, v)
    b.dense(width, flatten=False)
    if drops:
        b.add("dropout", rate=0.25)
    b.add("add", b.at, skip)


@family
def norms(rng: random.Random) -> Task:
    b = Builder(rng, 2, 7)
    b.conv(4, pad=1)
    b.norm(rng.choice(["group_norm", "instance_norm"]))
    b.act("relu")
    b.pool("avg_pool", 3, 2, 1, count=rng.random() < 0.5)
    b.conv(4, act="relu")
    b.flat()
    b.dense(5)
    b.norm("layer_norm")
    b.act("relu")
    b.dense(3)
    return Task(b.net(), ("images", 2, 7), 3)


@family
def gru(rng: random.Random) -> Task:
    length, width = rng.randint(4, 6), rng.randint(3, 5)
    b = Builder(rng, width)
    b.dense(4, flatten=False, act="tanh")
    b.add("gru", hidden=5, inputs_=4)
    b.add(rng.choice(["mean", "max"]), axis=1)
    b.channels = 5
    b.dense(4)
    return Task(b.net(), ("series", length, width), 4)


@family
def inception(rng: random.Random) -> Task:
    """Branches side by side."""
    b = Builder(rng, 3, 8)
    b.conv(4, act="relu")
    start, ends = (b.at, b.channels, b.size), []
    for kernel in (1, 3, 5)[:rng.randint(2, 3)]:
        b.at, b.channels, b.size = start
        b.conv(rng.randint(2, 3), kernel, pad=kernel // 2, bias=False)
        b.norm()
        b.act("relu")
        ends.append((b.at, b.channels))
    b.at, b.channels, b.size = start
    b.pool("max_pool", 3, 1, 1)
    b.conv(2, 1)
    ends.append((b.at, b.channels))
    b.add("concat", *(name for name, _ in ends), axis=1)
    b.channels = sum(n for _, n in ends)
    b.pool(None, 3, 2, 1)
    b.conv(4, act="relu")
    b.flat()
    b.dense(3)
    return Task(b.net(), ("images", 3, 8), 3)


@family
def transformer(rng: random.Random) -> Task:
    """A block that normalizes first."""
    length, width = rng.randint(3, 5), 6
    b = Builder(rng, width)
    start = b.dense(width, flatten=False)
    b.norm("layer_norm")
    _attend(b, start, drops=rng.random() < 0.5)
    start = b.at
    b.norm("layer_norm")
    b.dense(8, flatten=False, act=rng.choice(["relu", "gelu"]))
    b.dense(width, flatten=False)
    b.add("add", b.at, start)
    b.norm("layer_norm")
    b.add("last", index=0)
    b.dense(3)
    return Task(b.net(), ("series", length, width), 3)


@family
def textcnn(rng: random.Random) -> Task:
    length, width, ends = 7, 4, []
    b = Builder(rng, width)
    b.add("embedding", rows=11, units=width)
    b.add("transpose", axes=(0, 2, 1))
    start = b.at
    for kernel in (2, 3):
        b.at, b.channels, b.size = start, width, length
        b.conv(3, kernel, dims=1, act="relu")
        ends.append(b.add("max", axis=2))
    b.add("concat", *ends, axis=1)
    b.channels = 6
    b.add("dropout", rate=0.5)
    b.dense(3)
    return Task(b.net(), ("words", length, 11), 3)


@family
def autoencoder(rng: random.Random) -> Task:
    """Down, up again, and a number for each image and class."""
    b = Builder(rng, 2, 6)
    b.conv(4, 3, 2, 1, norm=True)
    b.act(rng.choice(["relu", "tanh"]))
    b.add("conv_t", channels=3, kernel=3, stride=2, pad=1, inputs_=4,
          bias=True)
    b.channels, b.size = 3, 5
    b.act("relu")
    b.conv(2, 3, act="tanh")
    b.flat()
    b.dense(3)
    return Task(b.net(), ("images", 2, 6), 3, "numbers")


@family
def vgg(rng: random.Random) -> Task:
    b = Builder(rng, 3, 9)
    act = rng.choice(["leaky", "relu", "elu"])
    extra = {"leaky": {"slope": 0.25}, "elu": {"alpha": 1.0}}.get(act, {})
    for n in (3, 4):
        b.conv(n, pad=1)
        b.act(act, **extra)
        b.conv(n, pad=1)
        b.act(act, **extra)
        b.pool(None, ceil=rng.random() < 0.5)
    b.flat()
    b.dense(6)
    b.act(act, **extra)
    b.add("dropout", rate=0.5)
    b.dense(4)
    return Task(b.net(), ("images", 3, 9), 4)
