"""Pairs of networks that compute the same, written differently.

A *rewriting* gives one side another description that computes the same. The
style of each side decides the rest: layers or functions, activations inside a
layer or behind it, containers, the order in which layers are registered,
hybridized or not.
"""
import contextlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import mgpu
from mgpu import parity
from mgpu.nn import losses

from . import gluon_side, nets, torch_side
from .nets import Net, Node, Task

SIDES = {"mxnet": gluon_side, "torch": torch_side}


@dataclass
class Style:
    """How a description is written, drawn from a seed.

    Attributes
    ----------
    container : str
        "attributes", "sequential" or "nested"; the last two for chains.
    reorder : bool
        Layers are registered in another order than they are called.
    hybrid : int
        0, 1, or 2 with static memory.
    plain : bool
        Always the first of several ways, which is a layer where there is one.
    """

    seed: str = ""
    container: str = "attributes"
    reorder: bool = False
    hybrid: int = 0
    plain: bool = False

    def _rng(self, text: str) -> random.Random:
        return random.Random(f"{self.seed} {text}")

    def choose(self, node: Any, ways: tuple) -> Any:
        return ways[0] if self.plain else self._rng(node.name).choice(ways)

    def fuses(self, node: Any) -> bool:
        return not self.plain and self._rng(
            f"{node.name} fused").random() < 0.5

    def order(self, names: list[str]) -> None:
        if self.reorder:
            names.reverse()


PLAIN = Style(plain=True)


@dataclass
class Pair:
    """Two sides, and how `parity.compare` compares them.

    Attributes
    ----------
    task : Task
    a, b : Net
    batches : list of (X, y)
    sides : dict
        For "a" and "b": options of `Side`.
    options : dict
        Of `compare`.
    backends : tuple of str
    styles : tuple of Style
    np_arrays : bool
        Whether MXNet has np arrays.
    """

    task: Task
    a: Net
    b: Net
    batches: list[tuple[np.ndarray, np.ndarray]]
    sides: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"a": {}, "b": {}})
    options: dict[str, Any] = field(default_factory=lambda: {
        "optimizer": "sgd", "optimizer_params": {"learning_rate": 0.125}})
    backends: tuple[str, str] = "mxnet", "torch"
    styles: tuple[Style, Style] = PLAIN, PLAIN
    np_arrays: bool = False

    def compare(self) -> tuple[Any, tuple[dict[str, str], ...]]:
        """The result, and the paths of both sides' nodes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for mode in ("np_shape", "np_array") if self.np_arrays else ():
                stack.enter_context(getattr(gluon_side.mx.util, mode)(True))
            sides, paths = zip(*map(self._side, "ab", self.backends,
                                    self.styles, (1, 2)))
            options = {**self.options, "map": {
                f"{paths[0][n.name]}.weight": {
                    "to": f"{paths[1][n.name]}.weight", "transpose": [1, 0]}
                for n in self.a if n.kind == "dense" and bool(
                    n.options.get("stored")) != bool(
                    self.b[n.name].options.get("stored"))} or None}
            if self.task.single(self.backends):
                options["dtype"] = "float32"
            return parity.compare(*sides, batches=self.batches, **options
                                  ), paths

    def _side(self, which: str, backend: str, style: Style, seed: int) -> Any:
        with mgpu.using_backend(backend):
            made = SIDES[backend].build(
                getattr(self, which), style, self.batches[0][0].ndim, seed)
        options = dict(self.sides[which])
        own = options.pop("loss", "mgpu")
        return parity.Side(made, loss=self._loss(
            backend if own == "own" else own), **options), made.paths

    def _loss(self, kind: str) -> Any:
        """mgpu's, or the framework's own."""
        classes = self.task.targets == "classes"
        if kind == "torch":
            return (lambda out, y: torch.nn.functional.cross_entropy(
                out, y.long(), reduction="none")) if classes \
                else lambda out, y: ((out - y) ** 2).mean(1) / 2
        own = losses if kind == "mgpu" else gluon_side.mx.gluon.loss
        return own.SoftmaxCrossEntropyLoss() if classes else own.L2Loss()


# -- rewritings ---------------------------------------------------------------

#: name -> (backends, function of (net, random.Random) that gives the new
#: net, or None where it does not apply)
REWRITINGS: dict[str, tuple[tuple[str, ...], Callable]] = {}


def rewriting(*backends: str) -> Callable:
    def register(change: Callable) -> Callable:
        REWRITINGS[change.__name__] = backends or ("mxnet", "torch"), change
        return change
    return register


def _one(net: Net, rng: random.Random, *kinds: str,
         where: Callable[[Node], Any] = lambda n: True) -> Node | None:
    found = [n for n in net if n.kind in kinds and where(n)]
    return rng.choice(found) if found else None


def rewritten(name: str, *kinds: str, backends: tuple = ("mxnet", "torch"),
              where: Callable = lambda net, n: True, **options: Any) -> None:
    """One node gets other options, or is of another `kind`."""
    def change(net, rng):
        n = _one(net, rng, *kinds, where=lambda n: where(net, n))
        return n and net.change(n.name, **options)
    REWRITINGS[name] = backends, change


@rewriting()
def summands(net, rng):
    n = _one(net, rng, "add")
    return n and net.rewire(n.name, *n.inputs[::-1])


@rewriting("torch")
def identity(net, rng):
    n = rng.choice(net.nodes[:-1])
    return net.after(n.name, "identity", f"identity{rng.randrange(1000)}")


@rewriting()
def scaled_query(net, rng):
    """Before the product, not after it."""
    n = _one(net, rng, "scale")
    return n and net.without(n.name).after(
        net[n.inputs[0]].inputs[0], "scale", "query", **n.options)


@rewriting("torch")
def fused_attention(net, rng):
    n = _one(net, rng, "matmul")
    softmax = n and net[n.inputs[0]]
    scale = n and net[softmax.inputs[0]]
    if n is None or scale.kind != "scale":
        return None
    scores = net[scale.inputs[0]]
    gone = {softmax.name, scale.name, scores.name}
    return Net(tuple(Node(n.name, "sdpa", (*scores.inputs, n.inputs[1]),
                          {"factor": scale.factor}) if m is n else m
                     for m in net if m.name not in gone))


@rewriting()
def padded_before(net, rng):
    n = _one(net, rng, "conv", where=lambda n: n.pad and n.dims == 2
             and n.inputs[0] != "x")
    return n and net.change(n.name, pad=0).before(
        n.name, "pad", f"pad{rng.randrange(1000)}", by=n.pad)


rewritten("added_in_place", "add", backends=("torch",), kind="add_in_place",
          where=lambda net, n: n.inputs[0] != "x" and net[
              n.inputs[0]].kind in ("conv", "dense", "batch_norm")
          and len(net.readers(n.inputs[0])) == 1)
rewritten("mean_by_sum", "mean", where=lambda net, n: n.axis == 1,
          kind="mean_by_sum")
rewritten("relu_by_maximum", "act", where=lambda net, n: n.act == "relu",
          act="maximum")
rewritten("softmax_by_exp", "softmax", kind="exp_share")
rewritten("recurrence_loop", "lstm", "gru", backends=("torch",), how="plain")
rewritten("stored_transposed", "dense", backends=("torch",), stored=True)
rewritten("norm_by_hand", "layer_norm", backends=("torch",), by_hand=True)


# -- drawn pairs --------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}), ("sgd", {"momentum": 0.5}), ("nag", {"momentum": 0.5}),
    ("adam", {}), ("adamw", {}), ("rmsprop", {}), ("adagrad", {}),
    ("ftrl", {})]


def draw(family: str, seed: int) -> tuple[Pair, list[str]]:
    """A pair of equal networks, and how it is written."""
    rng = random.Random(f"equal {family} {seed}")
    task, rows = nets.draw(family, seed), rng.choice([6, 7, 8])
    optimizer, params = rng.choice(OPTIMIZERS)
    params = {"learning_rate": rng.choice([0.125, 0.0625]), **params}
    if rng.random() < 0.4:
        params["wd"] = 0.125
    p = Pair(task, task.net, task.net,
             task.batches(np.random.default_rng(seed), rows), options={
                 "devices": rng.choice([1, 1, 2, 3]), "optimizer": optimizer,
                 "optimizer_params": params, "weights": rng.choice("aaab"),
                 "batch_norm": rng.choice(["per_device", "average", "sync"])},
             backends=rng.choice([("mxnet", "torch")] * 3 + [
                 ("torch", "mxnet"), ("torch", "torch"), ("mxnet", "mxnet")]),
             styles=tuple(Style(str(rng.random()), rng.choice(
                 ["attributes", "sequential", "nested"]), rng.random() < 0.3,
                 rng.choice([0, 0, 1, 2])) for _ in "ab"))
    if rng.random() < 0.3:
        p.batches[1] = tuple(x[:rows - 2] for x in p.batches[1])
    for options in ({"lr_scheduler": lambda n: 0.125 if n < 2 else 0.0625},
                    {"loss": "own"}):
        if rng.random() < 0.4:
            for side in p.sides.values():
                side.update(options)
    done = []
    for side, backend in zip("ab", p.backends):
        for name, (where, change) in REWRITINGS.items():
            # What Ftrl cuts off is 0, where maximum has another derivative
            # than ReLU: no equal pair.
            if backend in where and rng.random() < 0.35 and not (
                    name == "relu_by_maximum" and optimizer == "ftrl"):
                new = change(getattr(p, side), rng)
                if new is not None:
                    setattr(p, side, new)
                    done.append(f"{side}: {name}")
    # Functions of arrays have other names there.
    p.np_arrays = "mxnet" in p.backends and rng.random() < 0.25 \
        and p.a.chain and p.b.chain and all(
            n.kind in nets.LAYERS and n.kind not in (
                "instance_norm", "group_norm") and n.options.get("act") not in
            ("maximum", "gelu") for n in (*p.a, *p.b))
    if p.np_arrays:
        p.styles = Style(container="sequential", plain=True), PLAIN
    return p, done


def outputs(net: Net, x: np.ndarray) -> np.ndarray:
    """Of a description in plain torch."""
    made = torch_side.build(net, PLAIN, x.ndim, 1).double()
    torch.manual_seed(0)
    return made(torch.from_numpy(x)).detach().numpy()
