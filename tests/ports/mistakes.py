"""Mistakes that people make when they move Gluon code to PyTorch.

Each one changes the port `b` of a `Pair`: its description, or how it trains.
It says which layer is right, and which cause.
"""
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import nets
from .nets import Net, Node, Task


class NotHere(Exception):
    """The network has no place for the mistake."""


@dataclass
class Pair:
    """Two sides, and what `parity.compare` is right to say of them.

    Attributes
    ----------
    task : Task
    rng : random.Random
    a, b : Net
    sides : dict
        For "a" and "b": options of `Side`.
    options : dict
        Of `compare`.
    engines : tuple of str
    places : set of str
        Nodes that are the right layer. Empty: the layer is not on trial.
    stages : tuple of str
        The right stages of the first difference.
    batches : list of (X, y)
    before : callable or None
        Makes the function by which torch's gradients are reduced.
    refusal : bool
        Right is a refusal.
    scale : float
        Of the inputs.
    reorder : bool
        The layers of `b` are registered in the opposite order.
    """

    task: Task
    rng: random.Random
    a: Net
    b: Net
    sides: dict[str, dict[str, Any]]
    options: dict[str, Any]
    engines: tuple[str, str]
    batches: list[tuple[np.ndarray, np.ndarray]]
    places: set[str] = field(default_factory=set)
    stages: tuple[str, ...] = ()
    before: Any = None
    refusal: bool = False
    scale: float = 1.0
    reorder: bool = False

    # -- what mistakes say --------------------------------------------------

    def pick(self, *kinds: str, where: Callable[[Node], Any] = lambda n: True
             ) -> Node:
        """One of the nodes of these kinds, at random."""
        found = [n for n in self.a if (not kinds or n.kind in kinds)
                 and where(n)]
        if not found:
            raise NotHere
        return self.rng.choice(found)

    def both(self, name: str, kind: str | None = None, **options: Any
             ) -> None:
        """A change that is no mistake."""
        self.a = self.a.change(name, kind, **options)
        self.b = self.a

    def wrong(self, name: str, kind: str | None = None, **options: Any
              ) -> None:
        """The mistake: other options of a node of `b`, or another kind."""
        self.b = self.b.change(name, kind, **options)
        self.at(name)

    def at(self, *names: str) -> None:
        """The nodes that are the right layers. What is a function on a side
        is placed at the layer that it reaches: see `judge`."""
        self.stages = self.stages or ("layer", "output")
        self.places.update(names)

    def torch(self) -> None:
        """The port is in torch."""
        self.engines = (self.engines[0], "torch")

    def port(self, **options: Any) -> None:
        """Options of the port's `Side`."""
        self.sides["b"].update(options)

    def train(self, **options: Any) -> None:
        """Options of the optimiser of both sides."""
        self.options["optimizer_params"] = {
            **self.options["optimizer_params"], **options}


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake.

    Attributes
    ----------
    name : str
    plant : callable
        ``plant(pair)``; raises `NotHere`.
    causes : tuple of str
        The right names, the best first. Empty: no cause has a function.
    later : bool
        The cause has no function yet: no cause is right too.
    """

    name: str
    plant: Callable[[Pair], None]
    causes: tuple[str, ...]
    later: bool = False


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, *causes: str, later: bool = False) -> Callable:
    def register(plant: Callable[[Pair], None]) -> Callable:
        MISTAKES[name] = Mistake(name, plant, causes, later)
        return plant
    return register


# -- a pair without a mistake -------------------------------------------------

def pair(family: str, seed: int, salt: str = "") -> Pair:
    """Both sides of a family's network, as `seed` draws it."""
    rng = random.Random(f"{family} {seed} {salt}")
    task = nets.draw(family, seed)
    engines = rng.choice([("mxnet", "torch")] * 4 + [
        ("torch", "mxnet"), ("torch", "torch")])
    params: dict[str, Any] = {"learning_rate": rng.choice([0.125, 0.0625])}
    if rng.random() < 0.4:
        params["momentum"] = 0.5
    if rng.random() < 0.3:
        params["wd"] = 0.125
    made = Pair(task, rng, task.net, task.net, {"a": {}, "b": {}}, {
        "devices": rng.choice([1, 1, 1, 2]), "optimizer": "sgd",
        "optimizer_params": params}, engines, [])
    return made


# -- activations --------------------------------------------------------------

ACTS = ("relu", "tanh", "sigmoid", "softplus", "silu", "elu", "softsign")


@mistake("slope of LeakyReLU", "activation")
def slope(p):
    n = p.pick("act")
    one, two = p.rng.sample([0.01, 0.125, 0.2, 0.25, 0.3], 2)
    p.both(n.name, act="leaky", slope=one)
    p.wrong(n.name, slope=two)


@mistake("GELU by tanh", "activation")
def gelu(p):
    p.torch()
    n = p.pick("act")
    p.both(n.name, act="gelu")
    p.scale = 3.0
    p.wrong(n.name, approximate="tanh")


@mistake("alpha of ELU", "activation")
def elu(p):
    n = p.pick("act")
    p.both(n.name, act="elu", alpha=1.0)
    p.wrong(n.name, alpha=0.5)


@mistake("activation added", "activation")
def extra_activation(p):
    n = p.pick("dense", "conv", where=lambda n: all(
        m.kind not in ("act", "batch_norm") for m in p.a.readers(n.name)))
    p.b = p.a.after(n.name, "act", "extra", act="relu")
    p.at("extra", n.name)


@mistake("another activation", "activation")
def other_activation(p):
    n = p.pick("act")
    one, two = p.rng.sample(ACTS, 2)
    p.both(n.name, act=one, alpha=1.0)
    p.wrong(n.name, act=two)


@mistake("ReLU6 for ReLU", "activation")
def relu6(p):
    n = p.pick("act")
    p.both(n.name, act="relu")
    p.scale = 20.0
    p.wrong(n.name, act="relu6")


@mistake("softmax before the loss", "activation")
def softmax_twice(p):
    if p.task.targets != "classes":
        raise NotHere
    last = p.a.nodes[-1].name
    p.b = p.a.after(last, "softmax", "extra", axis=-1)
    p.at("extra", last)


@mistake("activation before batch norm", "order of layers", "activation")
def activation_first(p):
    n = p.pick("batch_norm", "layer_norm", "group_norm", "instance_norm",
               where=lambda n: [m.kind for m in p.a.readers(n.name)]
               == ["act"])
    act = p.a.readers(n.name)[0]
    p.b = p.a.swap(n.name, act.name)
    p.at(n.name, act.name)


@mistake("activation before the sum", "order of layers", "activation")
def activation_before_sum(p):
    n = p.pick("add", where=lambda n: [m.kind for m in p.a.readers(n.name)]
               == ["act"])
    act = p.a.readers(n.name)[0]
    p.b = p.a.without(act.name).after(n.inputs[0], "act", "moved",
                                      act=act.act)
    p.at("moved", n.inputs[0], act.name, n.name)


@mistake("dropout rate", "dropout rate")
def dropout_rate(p):
    n = p.pick("dropout")
    p.wrong(n.name, rate=p.rng.choice([0.1, 0.2, 0.75]))


@mistake("dropout added", "dropout rate")
def more_dropout(p):
    n = p.pick("act")
    p.b = p.a.after(n.name, "dropout", "extra", rate=0.5)
    p.at("extra", n.name)


# -- convolutions and pooling -------------------------------------------------

def _conv(p, **options):
    n = p.pick("conv", where=lambda n: n.kernel > 1)
    p.wrong(n.name, **options)


@mistake("padding", "layer options")
def padding(p):
    n = p.pick("conv", where=lambda n: n.kernel > 1)
    p.wrong(n.name, pad=1 - min(n.pad, 1))


@mistake("stride", "layer options")
def stride(p):
    n = p.pick("conv", where=lambda n: n.dims == 2)
    p.wrong(n.name, stride=3 - n.stride)


@mistake("dilation", "layer options")
def dilation(p):
    n = p.pick("conv", where=lambda n: n.kernel > 1)
    p.wrong(n.name, dilation=2, **({"pad": 2} if n.pad else {}))


@mistake("padding mode", "layer options")
def padding_mode(p):
    p.torch()
    n = p.pick("conv", where=lambda n: n.kernel > 1 and n.dims == 2)
    p.both(n.name, pad=1)
    p.wrong(n.name, mode=p.rng.choice(["reflect", "replicate", "circular"]))


@mistake("mean for maximum", "kind of pooling")
def other_pooling(p):
    n = p.pick("max_pool", "avg_pool")
    p.wrong(n.name, "max_pool" if n.kind == "avg_pool" else "avg_pool")


@mistake("window of a pooling", "layer options")
def window(p):
    n = p.pick("max_pool", "avg_pool")
    p.wrong(n.name, kernel=n.kernel + 1, pad=1)


@mistake("stride of a pooling", "layer options")
def pooling_stride(p):
    n = p.pick("max_pool", "avg_pool")
    p.wrong(n.name, stride=n.stride % 2 + 1)


@mistake("ceil_mode", "pooling ceil_mode")
def ceil(p):
    n = p.pick("max_pool", "avg_pool")
    p.wrong(n.name, ceil=not n.ceil)


@mistake("count_include_pad", "count_include_pad")
def count_pad(p):
    n = p.pick("avg_pool", "max_pool")
    p.both(n.name, "avg_pool", kernel=3, pad=1)
    p.wrong(n.name, count=not n.count)


@mistake("global mean for maximum", "kind of pooling")
def global_pooling(p):
    n = p.pick("gap", "gmp")
    p.wrong(n.name, "gmp" if n.kind == "gap" else "gap")


@mistake("mean for maximum by a function", "kind of pooling")
def functional_pooling(p):
    n = p.pick("mean", "max")
    p.wrong(n.name, "max" if n.kind == "mean" else "mean")


# -- normalisation ------------------------------------------------------------

@mistake("epsilon of batch norm", "normalisation epsilon")
def epsilon(p):
    n = p.pick("batch_norm")
    p.wrong(n.name, eps=1e-5 if n.eps == 1e-3 else 1e-3)


@mistake("epsilon of another norm", "normalisation epsilon")
def other_epsilon(p):
    n = p.pick("layer_norm", "group_norm", "instance_norm")
    p.wrong(n.name, eps=1e-3 if n.eps != 1e-3 else 1e-5)


@mistake("momentum for 1 - momentum", "statistics momentum")
def momentum(p):
    n = p.pick("batch_norm")
    p.both(n.name, momentum=0.75)
    p.wrong(n.name, momentum=0.25)
    p.stages = ("statistic",)


@mistake("another momentum of statistics", "statistics momentum")
def other_momentum(p):
    n = p.pick("batch_norm")
    p.wrong(n.name, momentum=0.5)
    p.stages = ("statistic",)


@mistake("cumulative statistics", "cumulative statistics")
def cumulative(p):
    p.torch()
    n = p.pick("batch_norm")
    p.wrong(n.name, momentum=None)
    p.stages = ("statistic",)


@mistake("statistics that stay", "statistics updates", "statistics momentum")
def still(p):
    p.torch()
    n = p.pick("batch_norm")
    p.wrong(n.name, momentum=1.0)
    p.stages = ("statistic",)


@mistake("unbiased variance", "unbiased variance")
def unbiased(p):
    p.pick("batch_norm")
    p.torch()
    for m in p.a:
        if m.kind == "batch_norm":      # shares that float32 holds
            p.both(m.name, momentum=0.75)
    p.port(native=True)
    p.places |= {m.name for m in p.a if m.kind == "batch_norm"}
    p.stages = ("statistic",)


@mistake("gamma fixed", "fix_gamma")
def fixed_gamma(p):
    n = p.pick("batch_norm")
    p.a = p.a.change(n.name, scale=False)
    p.engines = ("mxnet", "torch")
    p.at(n.name)
    p.stages = ("layer", "output", "gradient")


@mistake("batch norm in eval mode", "batch-norm mode")
def eval_mode(p):
    n = p.pick("batch_norm")
    p.wrong(n.name, frozen=True)


@mistake("synchronised batch norm", "batch-norm policy")
def policy(p):
    p.pick("batch_norm")
    p.options["devices"] = 2
    p.port(batch_norm="sync")
    p.at(next(m.name for m in p.a if m.kind == "batch_norm"))


@mistake("layer norm over all axes", "normalisation axis")
def wide_norm(p):
    p.torch()
    n = p.pick("layer_norm", where=lambda n: _sequences(p.a, n))
    p.wrong(n.name, wide=True)


def _sequences(net: Net, n: Node) -> bool:
    """Whether the rows of a node's input have two axes."""
    while n.inputs[0] != "x":
        n = net[n.inputs[0]]
        if n.kind in ("flatten", "last", "mean", "max", "sum"):
            return False
        if n.kind == "dense":
            return not n.flatten
    return True


@mistake("groups of group norm", "layer options")
def groups(p):
    n = p.pick("group_norm")
    p.torch()
    p.wrong(n.name, groups=2)


@mistake("norm after the sum", "order of layers", "residual connection")
def post_norm(p):
    n = p.pick("layer_norm", where=lambda n: n.inputs[0] != "x"
               and p.a[n.inputs[0]].kind == "add")
    add = p.a[n.inputs[0]]
    if len(p.a.readers(add.name)) > 1:
        raise NotHere
    # the norm on the branch, not on the sum
    order = [m for m in p.a if m.name != n.name]
    i = order.index(add)
    branch, skip = add.inputs
    order[i:i + 1] = [Node(n.name, n.kind, (branch,), n.options),
                      Node(add.name, "add", (n.name, skip), {})]
    p.b = Net(tuple(Node(m.name, m.kind, tuple(
        add.name if x == n.name and m.name != add.name else x
        for x in m.inputs), m.options) for m in order))
    p.at(n.name, add.name)


# -- dense layers, attention, sequences ---------------------------------------

@mistake("transposed weight", "transposed weight")
def transposed(p):
    p.torch()
    n = p.pick("dense", where=lambda n: n.units == n.inputs_)
    p.wrong(n.name, transposed=True)


@mistake("channels last before flatten", "dense flatten")
def channels_last(p):
    n = p.pick("flatten", where=lambda n: n.inputs[0] != "x" and p.a[
        n.inputs[0]].kind not in ("gap", "gmp", "embedding"))
    p.wrong(n.name, "channels_last")


@mistake("mask missing", "attention mask")
def no_mask(p):
    n = p.pick("scale")
    p.a = p.b = p.a.after(n.name, "mask", "mask9").rewire(
        "mask9", n.name, "x") if not any(m.kind == "mask" for m in p.a) \
        else p.a
    if p.task.inputs[0] != "words":
        raise NotHere
    m = p.pick("mask")
    p.b = p.a.without(m.name)
    p.at(m.name)


@mistake("scale of attention by another width", "attention scale")
def other_scale(p):
    n = p.pick("scale")
    p.wrong(n.name, factor=p.rng.choice([0.25, n.factor ** 2 * 1.5]))


@mistake("scale of attention after the softmax", "attention scale")
def late_scale(p):
    n = p.pick("scale")
    s = p.pick("softmax")
    p.b = p.a.without(n.name).after(s.name, "scale", "moved",
                                    factor=n.factor)
    p.at(n.name, s.name, "moved")


@mistake("embedding scaled", "constant factor")
def scaled_embedding(p):
    n = p.pick("embedding")
    p.b = p.a.after(n.name, "scale", "extra", factor=n.units ** 0.5)
    p.at("extra", n.name)


@mistake("padding_idx", "padding_idx")
def padding_idx(p):
    p.torch()
    n = p.pick("embedding")
    p.wrong(n.name, padding=p.rng.choice([1, 2, 3]))
    p.stages = ("gradient",)


@mistake("gates in another order", "permuted gates")
def gates(p):
    p.torch()
    n = p.pick("lstm", "gru")
    p.wrong(n.name, how="gates")


@mistake("reset gate before the product", "GRU variant")
def reset_before(p):
    p.torch()
    p.wrong(p.pick("gru").name, how="before")


@mistake("order of a concatenation", "order of columns")
def concat_order(p):
    n = p.pick("concat")
    p.b = p.a.rewire(n.name, *n.inputs[::-1])
    p.at(n.name)


@mistake("skip connection missing", "residual connection")
def no_skip(p):
    n = p.pick("add")
    p.b = p.a.change(n.name, "nothing").rewire(n.name, n.inputs[0])
    p.at(n.name)


@mistake("bias missing", "missing bias")
def no_bias(p):
    n = p.pick("dense", "conv", where=lambda n: n.bias)
    p.wrong(n.name, bias=False)
    p.refusal = True


@mistake("weights not shared", "shared weights")
def not_shared(p):
    n = p.pick("again")
    p.b = p.a.change(n.name, "dense", **p.a[n.of].options)
    p.refusal = True
    p.at(n.name)


@mistake("query and key exchanged", "order of parameters")
def exchanged(p):
    n = p.pick("scores")
    p.b = p.a.rewire(n.name, *n.inputs[::-1])
    p.at(n.name)


@mistake("skip connection from another place", "residual connection")
def other_skip(p):
    n = p.pick("add")
    before = p.a[n.inputs[1]] if n.inputs[1] != "x" else None
    if before is None or before.inputs[0] == "x":
        raise NotHere
    p.b = p.a.rewire(n.name, n.inputs[0], before.inputs[0])
    p.at(n.name)


@mistake("channels shuffled", "order of columns")
def shuffled_channels(p):
    p.torch()
    n = p.pick("conv", where=lambda n: n.dims == 2)
    p.b = p.a.after(n.name, "shuffle", "extra")
    p.at("extra", n.name)


# -- without a cause ----------------------------------------------------------

@mistake("reshape without transpose")
def reshaped(p):
    p.torch()
    n = p.pick("lstm", "gru", "dense", "layer_norm", where=lambda n:
               n.kind in ("lstm", "gru") or _sequences(p.a, n)
               and p.task.inputs[0] in ("words", "series"))
    p.b = p.a.after(n.name, "heads", "extra")
    p.at("extra", n.name)


@mistake("gate added, not multiplied")
def gate_added(p):
    p.wrong(p.pick("mul").name, "gate_add")


@mistake("max_norm of the embedding")
def max_norm(p):
    p.torch()
    n = p.pick("embedding")
    p.wrong(n.name, max_norm=1.0)
    p.stages = ("layer", "output", "weight", "gradient")


@mistake("last state for the mean")
def last_for_mean(p):
    n = p.pick("mean", "max", where=lambda n: n.axis == 1)
    p.wrong(n.name, "last", index=-1)


@mistake("time backwards")
def backwards(p):
    n = p.pick("lstm", "gru")
    p.b = p.a.after(n.inputs[0], "flip", "extra", axis=1)
    p.at("extra")


@mistake("maps upside down")
def upside_down(p):
    n = p.pick("conv", where=lambda n: n.dims == 2 and n.kernel > 1)
    p.b = p.a.after(n.inputs[0], "flip", "extra", axis=2)
    p.at("extra")


@mistake("the state before the last one")
def step_before(p):
    n = p.pick("last")
    p.wrong(n.name, index=n.index + (1 if n.index == 0 else -1))


@mistake("Huber for squares")
def huber(p):
    if p.task.targets != "numbers":
        raise NotHere
    p.port(loss="huber")
    p.sides["a"]["loss"] = "l2"
    p.stages = ("loss",)


@mistake("focal loss")
def focal(p):
    _classes(p)
    p.torch()
    p.sides["a"]["loss"] = "cross-entropy"
    p.port(loss="focal")
    p.stages = ("loss",)


@mistake("branch detached")
def detached_branch(p):
    n = p.pick("add", "concat", "mul")
    before = n.inputs[0]
    inputs = list(n.inputs)
    inputs[0] = "extra"
    p.b = p.a.after(before, "detach", "extra")
    p.b = Net(tuple(m if m.name in (n.name, "extra") else Node(
        m.name, m.kind, tuple(before if i == "extra" else i
                              for i in m.inputs), m.options) for m in p.b))
    p.places = upstream(p.a, before)
    p.stages = ("gradient",)


def upstream(net: Net, name: str) -> set[str]:
    """A node, and all that it is computed from."""
    if name == "x":
        return set()
    return {name}.union(*(upstream(net, i) for i in net[name].inputs), *(
        [upstream(net, net[name].of)] if net[name].kind == "again" else []))


@mistake("kernel flipped")
def flipped(p):
    p.torch()
    n = p.pick("conv", where=lambda n: n.kernel > 1 and n.dims == 2)
    p.wrong(n.name, how="flipped")


@mistake("kernel turned")
def turned_kernel(p):
    p.torch()
    n = p.pick("conv", where=lambda n: n.kernel > 1 and n.dims == 2)
    p.wrong(n.name, how="turned")


@mistake("weight standardised")
def standardised(p):
    p.torch()
    n = p.pick("conv", where=lambda n: n.dims == 2)
    p.wrong(n.name, how="standardised")


@mistake("gradient scaled in a branch")
def scaled_branch(p):
    p.torch()
    n = p.pick("act", "add", "flatten")
    p.b = p.a.after(n.name, "gradient", "extra", factor=0.5)
    p.places = upstream(p.a, n.name)
    p.stages = ("gradient",)


@mistake("values clipped")
def clipped_values(p):
    n = p.pick("batch_norm", "layer_norm", "add", "concat")
    p.b = p.a.after(n.name, "clip", "extra", limit=0.5)
    p.at("extra", n.name)


# -- losses -------------------------------------------------------------------

def _classes(p):
    if p.task.targets != "classes":
        raise NotHere


def _loss(p, loss, plain="cross-entropy"):
    if (p.task.targets == "classes") is not (plain == "cross-entropy"):
        raise NotHere
    p.sides["a"]["loss"] = plain
    p.torch()
    p.port(loss=loss)
    p.stages = ("loss",)


@mistake("labels of the next row", "shifted labels")
def shifted(p):
    p.options["devices"] = 1
    _loss(p, "rolled")


@mistake("mean of squares over the batch", "L2 loss", "loss reduction")
def mean_of_squares(p):
    _loss(p, "mean squares", "l2")


# -- gradients ----------------------------------------------------------------

@mistake("layer frozen", "frozen parameter")
def frozen(p):
    n = p.pick("dense", "conv", "embedding")
    p.b = p.a.change(n.name, frozen_weight=True)
    p.places, p.stages = {n.name}, ("gradient",)


@mistake("detached in the middle", "frozen parameter")
def detached(p):
    if any(m.kind == "again" for m in p.a):
        raise NotHere       # the other call still has a gradient
    n = p.pick(where=lambda n: n.kind in ("act", "flatten", "add", "concat",
                                          "batch_norm"))
    p.b = p.a.after(n.name, "detach", "extra")
    p.places, p.stages = upstream(p.a, n.name), ("gradient",)


@mistake("loss scale left in", "gradient scale")
def loss_scale(p):
    p.torch()
    last = p.a.nodes[-1].name
    p.b = p.a.after(last, "gradient", "extra", factor=p.rng.choice(
        [16.0, 2.0 ** 16, 0.375]))
    p.stages = ("gradient",)


def patched(p, wrong):
    """Gradients of `b` are reduced by ``wrong(columns, right)``."""
    p.torch()
    if p.engines[0] == "torch":
        p.engines = ("mxnet", "torch")
    p.before = wrong
    p.stages = ("gradient",)


def _each(columns, change):
    for column in columns:
        for copy_ in column:
            change(copy_)


@mistake("gradients clipped by value", "gradient clipping")
def clip_value(p):
    def wrong():
        def reduce(columns, right):
            right(columns)
            _each(columns, lambda g: g.clamp_(-0.125, 0.125))
        return reduce
    patched(p, wrong)


@mistake("gradients clipped by norm", "gradient clipping", "gradient scale")
def clip_norm(p):
    def wrong():
        def reduce(columns, right):
            right(columns)
            norm = sum(float((c[0] ** 2).sum()) for c in columns) ** 0.5
            _each(columns, lambda g: g.mul_(min(1.0, 0.25 / (norm + 1e-6))))
        return reduce
    patched(p, wrong)


@mistake("gradients accumulated", "stale gradient")
def accumulated(p):
    def wrong():
        kept: dict[int, Any] = {}

        def reduce(columns, right):
            right(columns)
            for i, column in enumerate(columns):
                old = kept.get(i, 0.0 * column[0])
                for g in column:
                    g += old.to(g.device)
                kept[i] = column[0].clone()
        return reduce
    patched(p, wrong)


@mistake("gradient of the step before", "stale gradient")
def stale(p):
    def wrong():
        kept: dict[int, Any] = {}

        def reduce(columns, right):
            right(columns)
            for i, column in enumerate(columns):
                now = column[0].clone()
                if i in kept:
                    for g in column:
                        g[:] = kept[i]
                kept[i] = now
        return reduce
    patched(p, wrong)


@mistake("mean over devices", "sum or mean over devices")
def mean_over_devices(p):
    def wrong():
        return lambda columns, right: right(columns, op="mean")
    p.options["devices"] = p.rng.choice([2, 3])
    patched(p, wrong)


@mistake("device left out", "device left out")
def left_out(p):
    def wrong():
        def reduce(columns, right):
            for column in columns:
                column[-1].mul_(0.0)
            right(columns)
        return reduce
    p.options["devices"] = 3
    patched(p, wrong)


@mistake("sum only on the first device", "missing broadcast")
def no_broadcast(p):
    def wrong():
        def reduce(columns, right):
            kept = [[g.clone() for g in column[1:]] for column in columns]
            right(columns)
            for column, olds in zip(columns, kept):
                for g, old in zip(column[1:], olds):
                    g[:] = old
        return reduce
    p.options["devices"] = 3
    patched(p, wrong)
    p.stages = ("devices", "weight", "gradient")


# -- updates ------------------------------------------------------------------

UPDATE = ("weight", "memory")


def _update(p, *, optimizer="sgd", params=None, **port):
    p.options["optimizer"] = optimizer
    if params is not None:
        p.options["optimizer_params"] = params
    p.port(**port)
    p.stages = UPDATE


@mistake("learning rate", "learning rate")
def learning_rate(p):
    rate = p.options["optimizer_params"]["learning_rate"]
    _update(p, optimizer_params={
        **p.options["optimizer_params"],
        "learning_rate": rate * p.rng.choice([0.1, 10, 2])})


class Steps:
    """A rate that falls after some updates, with a warm-up or without."""

    def __init__(self, base, late=0, warm=0):
        self.base, self.late, self.warm = base, late, warm

    def __call__(self, n):
        n = n - self.late
        if n < self.warm:
            return self.base * (n + 1) / (self.warm + 1)
        return self.base * (1.0 if n < 2 else 0.5)


@mistake("schedule one step late", "learning rate")
def late(p):
    p.sides["a"]["lr_scheduler"] = Steps(0.125)
    _update(p, lr_scheduler=Steps(0.125, late=1))


@mistake("warm-up missing", "learning rate")
def warm_up(p):
    p.sides["a"]["lr_scheduler"] = Steps(0.125, warm=3)
    _update(p, lr_scheduler=Steps(0.125))


@mistake("short batch divided by a full one", "batch divisor")
def short_batch(p):
    rows = len(p.batches[0][0]) if p.batches else 8
    _update(p, divisor=rows)
    p.options["short"] = True


@mistake("momentum missing", "optimizer options")
def no_momentum(p):
    params = {"learning_rate": 0.125, "momentum": 0.5}
    _update(p, params=params, optimizer_params={
        "learning_rate": 0.125, "momentum": 0.0})


@mistake("another momentum", "optimizer options")
def momentum_value(p):
    _update(p, params={"learning_rate": 0.125, "momentum": 0.5},
            optimizer_params={"momentum": 0.75})
    p.sides["b"]["optimizer_params"]["learning_rate"] = 0.125


@mistake("Nesterov's momentum", "optimizer formula")
def nesterov(p):
    _update(p, params={"learning_rate": 0.125, "momentum": 0.5},
            optimizer="sgd")
    p.port(optimizer="nag")


@mistake("rate outside the velocity", "rate inside the velocity")
def velocity(p):
    p.options["optimizer_params"] = {"momentum": 0.5}
    p.sides["a"]["lr_scheduler"] = Steps(0.125)
    _update(p, lr_scheduler=Steps(0.125), semantics="torch")


ADAM = {"learning_rate": 0.0625}


@mistake("beta of Adam", "optimizer options")
def beta(p):
    _update(p, optimizer="adam", params=ADAM, optimizer_params={
        **ADAM, p.rng.choice(["beta1", "beta2"]): 0.5})


@mistake("epsilon of Adam's option", "optimizer options")
def adam_option(p):
    _update(p, optimizer="adam", params=ADAM, optimizer_params={
        **ADAM, "epsilon": 1e-3})


@mistake("Adam's epsilon, torch's formula", "Adam epsilon")
def adam_formula(p):
    _update(p, optimizer="adam", params=ADAM, semantics="torch")


@mistake("layers registered in another order", "order of parameters")
def registered(p):
    """Gluon's Nadam gives the weights that it gets later other rates."""
    _update(p, optimizer="nadam", params={"learning_rate": 0.125})
    p.reorder = True


@mistake("decoupled decay", "coupled weight decay")
def decoupled(p):
    params = {"learning_rate": 0.0625, "wd": 0.125}
    _update(p, optimizer="adam", params=params)
    p.port(optimizer="adamw")


@mistake("weight decay missing", "optimizer options")
def no_decay(p):
    params = {"learning_rate": 0.125, "wd": 0.125}
    _update(p, params=params, optimizer_params={**params, "wd": 0.0})


@mistake("another weight decay", "optimizer options")
def other_decay(p):
    params = {"learning_rate": 0.125, "wd": 0.125}
    _update(p, params=params, optimizer_params={**params, "wd": 0.25})


@mistake("no decay of biases", "weight decay on biases")
def bare_biases(p):
    params = {"learning_rate": 0.125, "wd": 0.125}
    if not any(n.options.get("bias") or n.kind.endswith("norm")
               for n in p.a) or any(n.kind in ("lstm", "gru") for n in p.a):
        raise NotHere
    _update(p, params=params, wd_mult="biases")


@mistake("decay of one layer left out", "multipliers")
def wd_of_a_layer(p):
    params = {"learning_rate": 0.125, "wd": 0.125}
    n = p.pick("dense", "conv", "embedding")
    _update(p, params=params, wd_mult=n.name)


@mistake("rate of one layer", "multipliers")
def rate_of_a_layer(p):
    n = p.pick("dense", "conv", "embedding")
    _update(p, lr_mult=n.name)


@mistake("RMSProp's formula", "optimizer formula")
def rmsprop(p):
    _update(p, optimizer="rmsprop", params={}, semantics="torch",
            optimizer_params={"alpha": 0.9, "lr": 0.001})


@mistake("AdaGrad's formula", "optimizer formula", "optimizer options")
def adagrad(p):
    _update(p, optimizer="adagrad", params={"learning_rate": 0.125,
                                            "wd": 0.125},
            semantics="torch")


@mistake("another optimiser", "optimizer formula")
def other_optimizer(p):
    _update(p, params={"learning_rate": 0.125})
    p.port(optimizer="adam")


@mistake("rate rounded to float32", "float32 hyper-parameters")
def float32_rate(p):
    _update(p, params={"learning_rate": 0.1}, optimizer_params={
        "learning_rate": float(np.float32(0.1))})
    if p.task.single(("mxnet",)):
        raise NotHere


# -- data ---------------------------------------------------------------------

def _prepared(p, prepare, stages=("layer", "output", "loss")):
    p.port(prepare=prepare)
    p.stages = stages


def _floats(p):
    if p.task.inputs[0] == "words":
        raise NotHere


@mistake("pixels not divided by 255", "input preparation")
def pixels(p):
    _floats(p)
    _prepared(p, lambda X, y: (255 * X, y))


@mistake("inputs not normalised", "input preparation")
def normalised(p):
    _floats(p)
    _prepared(p, lambda X, y: ((X - 0.125) / 0.5, y))


@mistake("BGR for RGB", "input preparation")
def bgr(p):
    if p.task.inputs[0] != "images":
        raise NotHere
    _prepared(p, lambda X, y: (X[:, ::-1].copy(), y))


@mistake("height for width", "input preparation")
def turned(p):
    if p.task.inputs[0] != "images":
        raise NotHere
    _prepared(p, lambda X, y: (X.swapaxes(2, 3).copy(), y))


@mistake("words numbered from 1", "input preparation")
def words(p):
    if p.task.inputs[0] != "words":
        raise NotHere
    _prepared(p, lambda X, y: (np.minimum(X + 1, X.max()), y))


@mistake("padding on the other side", "input preparation")
def padded(p):
    if any(n.kind == "scores" for n in p.a):
        raise NotHere       # attention has no order of its own
    if p.task.inputs[0] not in ("words", "series"):
        raise NotHere
    _prepared(p, lambda X, y: (np.roll(X, 1, 1), y))


def shuffled(X, y):
    order = np.random.default_rng(1).permutation(len(X))
    return X[order], y[order]


@mistake("labels shuffled alone", "data order")
def labels(p):
    _prepared(p, lambda X, y: (X, np.roll(y, 1, 0)), ("loss",))


@mistake("last row dropped", "input preparation")
def dropped(p):
    _prepared(p, lambda X, y: (X[:-1], y[:-1]))


# -- initial values -----------------------------------------------------------

@mistake("initialiser", "initialiser")
def initialiser(p):
    p.pick("dense", "conv")
    p.options["weights"] = "own"
    p.sides["a"].update(init="xavier", seed=1)
    p.sides["b"].update(init="uniform", seed=1)
    p.stages = ("initial",)


@mistake("another draw", "initial draw")
def draw(p):
    p.pick("dense", "conv")
    p.options["weights"] = "own"
    p.sides["a"].update(init="xavier", seed=1)
    p.sides["b"].update(init="xavier", seed=2)
    p.stages = ("initial",)


# -- mistakes of one expression -----------------------------------------------

#: name: (cause, what it does to a pair)
ONE = {
    "activation missing": (
        "activation", lambda p: p.wrong(p.pick("act").name, "nothing")),
    "dropout missing": (
        "dropout rate", lambda p: p.wrong(p.pick("dropout").name, "nothing")),
    "padding of a transposed convolution": (
        "layer options", lambda p: p.wrong(p.pick("conv_t").name, pad=0)),
    "sum for mean": (
        "constant factor", lambda p: p.wrong(p.pick("mean").name, "sum")),
    "axis of the softmax": (
        "softmax axis", lambda p: p.wrong(p.pick("softmax").name, axis=1)),
    "scale of attention missing": (
        "attention scale", lambda p: p.wrong(p.pick("scale").name, "nothing")),
    "mean over the batch": ("loss reduction", lambda p: _loss(p, "mean")),
    "sum over the batch": ("loss reduction", lambda p: _loss(p, "sum")),
    "label smoothing": ("label smoothing", lambda p: _loss(p, "smoothed")),
    "class weights": ("class weights", lambda p: _loss(p, "weighted")),
    "ignore_index": ("ignore_index", lambda p: _loss(p, "ignoring")),
    "weight of the loss": ("loss weight", lambda p: _loss(p, "twice")),
    "L2 loss without the half": (
        "L2 loss", lambda p: _loss(p, "squares", "l2")),
    "softmax in the loss": (
        "softmax in the loss", lambda p: _loss(p, "softmax first")),
    "absolute values for squares": (
        "loss formula", lambda p: _loss(p, "l1", "l2")),
    "not divided by the batch": (
        "batch divisor", lambda p: _update(p, divisor=1)),
    "another order of the examples": (
        "data order", lambda p: _prepared(p, shuffled)),
}
for _name, (_cause, _plant) in ONE.items():
    mistake(_name, _cause)(_plant)


def kinds(names: Sequence[str] = ()) -> list[Mistake]:
    return [m for m in MISTAKES.values() if not names or m.name in names]


def plant(kind: Mistake, family: str, seed: int, salt: int = 0) -> Pair:
    """A pair with the mistake; raises `NotHere`."""
    p = pair(family, seed, f"{kind.name} {salt}")
    kind.plant(p)
    p.options = copy.copy(p.options)
    return p
