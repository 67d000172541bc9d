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
    """

    name: str
    plant: Callable[[Pair], None]
    causes: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, *causes: str) -> Callable:
    def register(plant: Callable[[Pair], None]) -> Callable:
        MISTAKES[name] = Mistake(name, plant, causes)
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


# -- normalisation ------------------------------------------------------------

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


@mistake("synchronised batch norm", "batch-norm policy")
def policy(p):
    p.pick("batch_norm")
    p.options["devices"] = 2
    p.port(batch_norm="sync")
    p.at(next(m.name for m in p.a if m.kind == "batch_norm"))


def _sequences(net: Net, n: Node) -> bool:
    """Whether the rows of a node's input have two axes."""
    while n.inputs[0] != "x":
        n = net[n.inputs[0]]
        if n.kind in ("flatten", "last", "mean", "max", "sum"):
            return False
        if n.kind == "dense":
            return not n.flatten
    return True


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


@mistake("scale of attention after the softmax", "attention scale")
def late_scale(p):
    n = p.pick("scale")
    s = p.pick("softmax")
    p.b = p.a.without(n.name).after(s.name, "scale", "moved",
                                    factor=n.factor)
    p.at(n.name, s.name, "moved")


@mistake("skip connection missing", "residual connection")
def no_skip(p):
    n = p.pick("add")
    p.b = p.a.change(n.name, "nothing").rewire(n.name, n.inputs[0])
    p.at(n.name)


@mistake("weights not shared", "shared weights")
def not_shared(p):
    n = p.pick("again")
    p.b = p.a.change(n.name, "dense", **p.a[n.of].options)
    p.refusal = True
    p.at(n.name)


@mistake("skip connection from another place", "residual connection")
def other_skip(p):
    n = p.pick("add")
    before = p.a[n.inputs[1]] if n.inputs[1] != "x" else None
    if before is None or before.inputs[0] == "x":
        raise NotHere
    p.b = p.a.rewire(n.name, n.inputs[0], before.inputs[0])
    p.at(n.name)


# -- without a cause ----------------------------------------------------------

@mistake("reshape without transpose")
def reshaped(p):
    p.torch()
    n = p.pick("lstm", "gru", "dense", "layer_norm", where=lambda n:
               n.kind in ("lstm", "gru") or _sequences(p.a, n)
               and p.task.inputs[0] in ("words", "series"))
    p.b = p.a.after(n.name, "heads", "extra")
    p.at("extra", n.name)


@mistake("Huber for squares")
def huber(p):
    if p.task.targets != "numbers":
        raise NotHere
    p.port(loss="huber")
    p.sides["a"]["loss"] = "l2"
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


@mistake("gradient scaled in a branch")
def scaled_branch(p):
    p.torch()
    n = p.pick("act", "add", "flatten")
    p.b = p.a.after(n.name, "gradient", "extra", factor=0.5)
    p.places = upstream(p.a, n.name)
    p.stages = ("gradient",)


# -- losses -------------------------------------------------------------------

def _loss(p, loss, plain="cross-entropy", **options):
    if (p.task.targets == "classes") is not (plain == "cross-entropy"):
        raise NotHere
    p.sides["a"]["loss"] = plain
    p.torch()
    p.port(loss=loss)
    p.options.update(options)
    p.stages = ("loss",)


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


# -- updates ------------------------------------------------------------------

UPDATE = ("weight", "memory")


def _update(p, *, optimizer="sgd", params=None, own=None, port=None,
            **options):
    """`own`: the schedule of the original; `port`: the port's optimiser."""
    p.options["optimizer"] = optimizer
    if params is not None:
        p.options["optimizer_params"] = params
    if own:
        p.sides["a"]["lr_scheduler"] = own
    p.port(**options, **({"optimizer": port} if port else {}))
    p.stages = UPDATE


class Steps:
    """A rate that falls after some updates, with a warm-up or without."""

    def __init__(self, base, late=0, warm=0):
        self.base, self.late, self.warm = base, late, warm

    def __call__(self, n):
        n = n - self.late
        if n < self.warm:
            return self.base * (n + 1) / (self.warm + 1)
        return self.base * (1.0 if n < 2 else 0.5)


@mistake("short batch divided by a full one", "batch divisor")
def short_batch(p):
    rows = len(p.batches[0][0]) if p.batches else 8
    _update(p, divisor=rows)
    p.options["short"] = True


@mistake("layers registered in another order", "order of parameters")
def registered(p):
    """Gluon's Nadam gives the weights that it gets later other rates."""
    _update(p, optimizer="nadam", params={"learning_rate": 0.125})
    p.reorder = True


@mistake("no decay of biases", "weight decay on biases")
def bare_biases(p):
    params = {"learning_rate": 0.125, "wd": 0.125}
    if not any(n.options.get("bias") or n.kind.endswith("norm")
               for n in p.a) or any(n.kind in ("lstm", "gru") for n in p.a):
        raise NotHere
    _update(p, params=params, wd_mult="biases")


@mistake("rate rounded to float32", "float32 hyper-parameters")
def float32_rate(p):
    _update(p, params={"learning_rate": 0.1}, optimizer_params={
        "learning_rate": float(np.float32(0.1))})
    if p.task.single(("mxnet",)):
        raise NotHere


# -- data ---------------------------------------------------------------------

def _prepared(p, prepare, stages=("layer", "output", "loss"), of=None):
    """`of`: the kinds of inputs for which it is a mistake."""
    if of and p.task.inputs[0] not in of:
        raise NotHere
    p.port(prepare=prepare)
    p.stages = stages


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


# -- mistakes of one node, or of one expression -------------------------------

def node(*kinds, where=lambda p, n: True, torch=False, both=None, stages=(),
         refusal=False, scale=1.0, **options):
    """One of the nodes of these kinds gets other `options` (or functions of
    the pair and the node). `both`: what the node is on both sides before."""
    def plant(p):
        n = p.pick(*kinds, where=lambda n: where(p, n))
        if torch:
            p.torch()
        if both:
            p.both(n.name, **both)
        p.wrong(n.name, **{name: value(p, n) if callable(value) else value
                           for name, value in options.items()})
        p.stages = stages or p.stages
        p.refusal, p.scale = refusal, scale
    return plant


def behind(*kinds, new, where=lambda n: True, torch=False, **options):
    """A new node stands behind one of these kinds."""
    def plant(p):
        n = p.pick(*kinds, where=where)
        if torch:
            p.torch()
        p.b = p.a.after(n.name, new, "extra", **{
            name: value(n) if callable(value) else value
            for name, value in options.items()})
        p.at("extra", n.name)
    return plant


def turned_round(*kinds, axis, where=lambda n: True):
    """The input of one of these kinds is turned round along an axis."""
    def plant(p):
        n = p.pick(*kinds, where=where)
        p.b = p.a.after(n.inputs[0], "flip", "extra", axis=axis)
        p.at("extra")
    return plant


def inputs_exchanged(kind):
    def plant(p):
        n = p.pick(kind)
        p.b = p.a.rewire(n.name, *n.inputs[::-1])
        p.at(n.name)
    return plant


def one_of(*values):
    return lambda p, n: p.rng.choice(values)


def other(one, two):
    """A node of one kind is of the other."""
    return node(one, two, kind=lambda p, n: two if n.kind == one else one)


def _drawn(p, init="xavier", seed=1):
    p.pick("dense", "conv")
    p.options["weights"] = "own"
    p.sides["a"].update(init="xavier", seed=1)
    p.sides["b"].update(init=init, seed=seed)
    p.stages = ("initial",)


def large(p, n):
    return n.kernel > 1


def plane(p, n):
    return n.dims == 2


def large_plane(p, n):
    return large(p, n) and plane(p, n)


FLOATS = ("images", "rows", "series")
WEIGHTS = ("dense", "conv", "embedding")
STATISTIC = ("statistic",)
MOMENTUM = {"learning_rate": 0.125, "momentum": 0.5}
DECAY = {"learning_rate": 0.125, "wd": 0.125}
ADAM = {"learning_rate": 0.0625}
#: name: (cause, or causes, and what it does to a pair)
ONE = {
    # activations
    "GELU by tanh": ("activation", node(
        "act", torch=True, both={"act": "gelu"}, scale=3.0,
        approximate="tanh")),
    "alpha of ELU": ("activation", node(
        "act", both={"act": "elu", "alpha": 1.0}, alpha=0.5)),
    "ReLU6 for ReLU": ("activation", node(
        "act", both={"act": "relu"}, scale=20.0, act="relu6")),
    "activation missing": ("activation", node("act", kind="nothing")),
    "dropout missing": ("dropout rate", node("dropout", kind="nothing")),
    "dropout rate": (
        "dropout rate", node("dropout", rate=one_of(0.1, 0.2, 0.75))),
    "dropout added": ("dropout rate", behind("act", new="dropout", rate=0.5)),
    # convolutions and pooling
    "padding": ("layer options", node(
        "conv", where=large, pad=lambda p, n: 1 - min(n.pad, 1))),
    "stride": ("layer options", node(
        "conv", where=plane, stride=lambda p, n: 3 - n.stride)),
    "dilation": ("layer options", node(
        "conv", where=large, dilation=2, pad=lambda p, n: 2 if n.pad else 0)),
    "padding mode": ("layer options", node(
        "conv", where=large_plane, torch=True, both={"pad": 1},
        mode=one_of("reflect", "replicate", "circular"))),
    "padding of a transposed convolution": (
        "layer options", node("conv_t", pad=0)),
    "mean for maximum": ("kind of pooling", other("max_pool", "avg_pool")),
    "window of a pooling": ("layer options", node(
        "max_pool", "avg_pool", kernel=lambda p, n: n.kernel + 1, pad=1)),
    "stride of a pooling": ("layer options", node(
        "max_pool", "avg_pool", stride=lambda p, n: n.stride % 2 + 1)),
    "ceil_mode": ("pooling ceil_mode", node(
        "max_pool", "avg_pool", ceil=lambda p, n: not n.ceil)),
    "count_include_pad": ("count_include_pad", node(
        "avg_pool", "max_pool", both={
            "kind": "avg_pool", "kernel": 3, "pad": 1},
        count=lambda p, n: not n.count)),
    "global mean for maximum": ("kind of pooling", other("gap", "gmp")),
    "mean for maximum by a function": (
        "kind of pooling", other("mean", "max")),
    "sum for mean": ("constant factor", node("mean", kind="sum")),
    # normalisation
    "epsilon of batch norm": ("normalisation epsilon", node(
        "batch_norm", eps=lambda p, n: 1e-5 if n.eps == 1e-3 else 1e-3)),
    "epsilon of another norm": ("normalisation epsilon", node(
        "layer_norm", "group_norm", "instance_norm",
        eps=lambda p, n: 1e-3 if n.eps != 1e-3 else 1e-5)),
    "momentum for 1 - momentum": ("statistics momentum", node(
        "batch_norm", both={"momentum": 0.75}, momentum=0.25,
        stages=STATISTIC)),
    "another momentum of statistics": ("statistics momentum", node(
        "batch_norm", momentum=0.5, stages=STATISTIC)),
    "cumulative statistics": ("cumulative statistics", node(
        "batch_norm", torch=True, momentum=None, stages=STATISTIC)),
    "statistics that stay": (
        ("statistics updates", "statistics momentum"), node(
            "batch_norm", torch=True, momentum=1.0, stages=STATISTIC)),
    "batch norm in eval mode": (
        "batch-norm mode", node("batch_norm", frozen=True)),
    "layer norm over all axes": ("normalisation axis", node(
        "layer_norm", where=lambda p, n: _sequences(p.a, n), torch=True,
        wide=True)),
    "groups of group norm": (
        "layer options", node("group_norm", torch=True, groups=2)),
    # dense layers, attention, sequences
    "transposed weight": ("transposed weight", node(
        "dense", where=lambda p, n: n.units == n.inputs_, torch=True,
        transposed=True)),
    "channels last before flatten": ("dense flatten", node(
        "flatten", where=lambda p, n: n.inputs[0] != "x" and p.a[
            n.inputs[0]].kind not in ("gap", "gmp", "embedding"),
        kind="channels_last")),
    "axis of the softmax": ("softmax axis", node("softmax", axis=1)),
    "scale of attention missing": (
        "attention scale", node("scale", kind="nothing")),
    "scale of attention by another width": ("attention scale", node(
        "scale", factor=lambda p, n: p.rng.choice(
            [0.25, n.factor ** 2 * 1.5]))),
    "embedding scaled": ("constant factor", behind(
        "embedding", new="scale", factor=lambda n: n.units ** 0.5)),
    "padding_idx": ("padding_idx", node(
        "embedding", torch=True, padding=one_of(1, 2, 3),
        stages=("gradient",))),
    "gates in another order": (
        "permuted gates", node("lstm", "gru", torch=True, how="gates")),
    "reset gate before the product": (
        "GRU variant", node("gru", torch=True, how="before")),
    "order of a concatenation": (
        "order of columns", inputs_exchanged("concat")),
    "query and key exchanged": (
        "order of parameters", inputs_exchanged("scores")),
    "bias missing": ("missing bias", node(
        "dense", "conv", where=lambda p, n: n.bias, bias=False,
        refusal=True)),
    "channels shuffled": ("order of columns", behind(
        "conv", new="shuffle", where=lambda n: n.dims == 2, torch=True)),
    # without a cause
    "gate added, not multiplied": ((), node("mul", kind="gate_add")),
    "max_norm of the embedding": ((), node(
        "embedding", torch=True, max_norm=1.0,
        stages=("layer", "output", "weight", "gradient"))),
    "last state for the mean": ((), node(
        "mean", "max", where=lambda p, n: n.axis == 1, kind="last",
        index=-1)),
    "time backwards": ((), turned_round("lstm", "gru", axis=1)),
    "maps upside down": ((), turned_round(
        "conv", axis=2, where=lambda n: n.dims == 2 and n.kernel > 1)),
    "the state before the last one": ((), node(
        "last", index=lambda p, n: n.index + (1 if n.index == 0 else -1))),
    "kernel flipped": ((), node(
        "conv", where=large_plane, torch=True, how="flipped")),
    "kernel turned": ((), node(
        "conv", where=large_plane, torch=True, how="turned")),
    "weight standardised": ((), node(
        "conv", where=plane, torch=True, how="standardised")),
    "values clipped": ((), behind(
        "batch_norm", "layer_norm", "add", "concat", new="clip", limit=0.5)),
    # losses
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
    "labels of the next row": (
        "shifted labels", lambda p: _loss(p, "rolled", devices=1)),
    "mean of squares over the batch": (
        ("L2 loss", "loss reduction"),
        lambda p: _loss(p, "mean squares", "l2")),
    "focal loss": ((), lambda p: _loss(p, "focal")),
    # updates
    "learning rate": ("learning rate", lambda p: _update(
        p, optimizer_params={
            **p.options["optimizer_params"], "learning_rate":
            p.options["optimizer_params"]["learning_rate"]
            * p.rng.choice([0.1, 10, 2])})),
    "schedule one step late": ("learning rate", lambda p: _update(
        p, own=Steps(0.125), lr_scheduler=Steps(0.125, late=1))),
    "warm-up missing": ("learning rate", lambda p: _update(
        p, own=Steps(0.125, warm=3), lr_scheduler=Steps(0.125))),
    "not divided by the batch": (
        "batch divisor", lambda p: _update(p, divisor=1)),
    "momentum missing": ("optimizer options", lambda p: _update(
        p, params=MOMENTUM, optimizer_params={**MOMENTUM, "momentum": 0.0})),
    "another momentum": ("optimizer options", lambda p: _update(
        p, params=MOMENTUM, optimizer_params={**MOMENTUM, "momentum": 0.75})),
    "Nesterov's momentum": ("optimizer formula", lambda p: _update(
        p, params=MOMENTUM, port="nag")),
    "rate outside the velocity": (
        "rate inside the velocity", lambda p: _update(
            p, params={"momentum": 0.5}, own=Steps(0.125),
            lr_scheduler=Steps(0.125), semantics="torch")),
    "beta of Adam": ("optimizer options", lambda p: _update(
        p, optimizer="adam", params=ADAM, optimizer_params={
            **ADAM, p.rng.choice(["beta1", "beta2"]): 0.5})),
    "epsilon of Adam's option": ("optimizer options", lambda p: _update(
        p, optimizer="adam", params=ADAM, optimizer_params={
            **ADAM, "epsilon": 1e-3})),
    "Adam's epsilon, torch's formula": ("Adam epsilon", lambda p: _update(
        p, optimizer="adam", params=ADAM, semantics="torch")),
    "decoupled decay": ("coupled weight decay", lambda p: _update(
        p, optimizer="adam", params={**ADAM, "wd": 0.125}, port="adamw")),
    "weight decay missing": ("optimizer options", lambda p: _update(
        p, params=DECAY, optimizer_params={**DECAY, "wd": 0.0})),
    "another weight decay": ("optimizer options", lambda p: _update(
        p, params=DECAY, optimizer_params={**DECAY, "wd": 0.25})),
    "decay of one layer left out": ("multipliers", lambda p: _update(
        p, params=DECAY, wd_mult=p.pick(*WEIGHTS).name)),
    "rate of one layer": ("multipliers", lambda p: _update(
        p, lr_mult=p.pick(*WEIGHTS).name)),
    "RMSProp's formula": ("optimizer formula", lambda p: _update(
        p, optimizer="rmsprop", params={}, semantics="torch",
        optimizer_params={"alpha": 0.9, "lr": 0.001})),
    "AdaGrad's formula": (
        ("optimizer formula", "optimizer options"), lambda p: _update(
            p, optimizer="adagrad", params=DECAY, semantics="torch")),
    "another optimiser": ("optimizer formula", lambda p: _update(
        p, params={"learning_rate": 0.125}, port="adam")),
    # data
    "pixels not divided by 255": ("input preparation", lambda p: _prepared(
        p, lambda X, y: (255 * X, y), of=FLOATS)),
    "inputs not normalised": ("input preparation", lambda p: _prepared(
        p, lambda X, y: ((X - 0.125) / 0.5, y), of=FLOATS)),
    "BGR for RGB": ("input preparation", lambda p: _prepared(
        p, lambda X, y: (X[:, ::-1].copy(), y), of=("images",))),
    "height for width": ("input preparation", lambda p: _prepared(
        p, lambda X, y: (X.swapaxes(2, 3).copy(), y), of=("images",))),
    "words numbered from 1": ("input preparation", lambda p: _prepared(
        p, lambda X, y: (np.minimum(X + 1, X.max()), y), of=("words",))),
    "another order of the examples": (
        "data order", lambda p: _prepared(p, shuffled)),
    "labels shuffled alone": ("data order", lambda p: _prepared(
        p, lambda X, y: (X, np.roll(y, 1, 0)), ("loss",))),
    "last row dropped": ("input preparation", lambda p: _prepared(
        p, lambda X, y: (X[:-1], y[:-1]))),
    # initial values
    "initialiser": ("initialiser", lambda p: _drawn(p, init="uniform")),
    "another draw": ("initial draw", lambda p: _drawn(p, seed=2)),
}
for _name, (_causes, _plant) in ONE.items():
    mistake(_name, *([_causes] if isinstance(_causes, str) else _causes))(
        _plant)


def kinds(names: Sequence[str] = ()) -> list[Mistake]:
    return [m for m in MISTAKES.values() if not names or m.name in names]


def plant(kind: Mistake, family: str, seed: int, salt: int = 0) -> Pair:
    """A pair with the mistake; raises `NotHere`."""
    p = pair(family, seed, f"{kind.name} {salt}")
    kind.plant(p)
    p.options = copy.copy(p.options)
    return p
