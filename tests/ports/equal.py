"""Pairs of equal networks, written differently.

A *rewriting* gives one side another description that computes the same. The
style of each side (`judge.Style`) decides the rest: layers or functions,
activations inside a layer or behind it, containers, the order in which layers
are registered, hybridized or not.
"""
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from . import judge, mistakes, nets
from .judge import Row
from .mistakes import Pair, Steps
from .nets import Net, Node

#: name -> (engines, function of (net, random.Random) that gives the new
#: net, or None where it does not apply)
REWRITINGS: dict[str, tuple[tuple[str, ...], Callable]] = {}


def rewriting(*engines: str) -> Callable:
    def register(change: Callable) -> Callable:
        REWRITINGS[change.__name__] = engines or ("mxnet", "torch"), change
        return change
    return register


def _one(net: Net, rng: random.Random, *kinds: str,
         where: Callable[[Node], Any] = lambda n: True) -> Node | None:
    found = [n for n in net if n.kind in kinds and where(n)]
    return rng.choice(found) if found else None


def rewritten(name: str, *kinds: str, engines: tuple = ("mxnet", "torch"),
              where: Callable = lambda net, n: True, **options: Any) -> None:
    """One node gets other options, or is of another `kind`."""
    def change(net, rng):
        n = _one(net, rng, *kinds, where=lambda n: where(net, n))
        return n and net.change(n.name, **options)
    REWRITINGS[name] = engines, change


@rewriting()
def summands(net, rng):
    n = _one(net, rng, "add")
    return n and net.rewire(n.name, *n.inputs[::-1])


rewritten("added_in_place", "add", engines=("torch",), kind="add_in_place",
          where=lambda net, n: n.inputs[0] != "x" and net[
              n.inputs[0]].kind in ("conv", "dense", "batch_norm")
          and len(net.readers(n.inputs[0])) == 1)


@rewriting("torch")
def identity(net, rng):
    n = rng.choice(net.nodes[:-1])
    return net.after(n.name, "identity", f"identity{rng.randrange(1000)}")


@rewriting()
def scaled_query(net, rng):
    """Before the product, not after it."""
    n = _one(net, rng, "scale", where=lambda n: net[n.inputs[0]].kind
             == "scores")
    if n is None:
        return None
    scores = net[n.inputs[0]]
    moved = Node("query", "scale", (scores.inputs[0],), n.options)
    less = net.without(n.name).rewire(scores.name, "query", scores.inputs[1])
    at = next(i for i, m in enumerate(less) if m.name == scores.name)
    return Net((*less.nodes[:at], moved, *less.nodes[at:]))


@rewriting("torch")
def fused_attention(net, rng):
    n = _one(net, rng, "matmul")
    if n is None or any(m.kind in ("mask", "scaled") for m in net):
        return None
    softmax = net[n.inputs[0]]
    scale = net[softmax.inputs[0]]
    scores = net[scale.inputs[0]] if scale.kind == "scale" else scale
    if softmax.kind != "softmax" or scores.kind != "scores" \
            or scale is scores:
        return None
    gone = {softmax.name, scale.name, scores.name}
    return Net(tuple(Node(n.name, "sdpa", (*scores.inputs, n.inputs[1]),
                          {"factor": scale.factor}) if m is n else m
                     for m in net if m.name not in gone))


rewritten("mean_by_sum", "mean", where=lambda net, n: n.axis == 1,
          kind="mean_by_sum")


@rewriting()
def padded_before(net, rng):
    n = _one(net, rng, "conv", where=lambda n: n.pad and n.dims == 2
             and n.inputs[0] != "x")
    if n is None:
        return None
    name = f"pad{rng.randrange(1000)}"
    at = next(i for i, m in enumerate(net) if m.name == n.name)
    changed = net.change(n.name, pad=0).rewire(n.name, name)
    return Net((*changed.nodes[:at], Node(name, "pad", n.inputs, {
        "by": n.pad}), *changed.nodes[at:]))


rewritten("relu_by_maximum", "act", where=lambda net, n: n.act == "relu",
          act="maximum")
rewritten("softmax_by_exp", "softmax", kind="exp_share")
rewritten("recurrence_by_hand", "lstm", "gru", engines=("torch",), how="plain")
rewritten("stored_transposed", "dense", engines=("torch",), stored=True,
          where=lambda net, n: not any(
              m.kind == "again" and m.of == n.name for m in net))
rewritten("packed_norm", "layer_norm", engines=("torch",), by_hand=True)


# -- pairs --------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}), ("sgd", {"momentum": 0.5}), ("nag", {"momentum": 0.5}),
    ("adam", {}), ("adamw", {}), ("rmsprop", {}), ("adagrad", {}),
    ("ftrl", {})]


def pair(family: str, seed: int) -> tuple[Pair, bool, list[str]]:
    """A pair, whether MXNet has np arrays, and how it is written."""
    rng = random.Random(f"equal {family} {seed}")
    task = nets.draw(family, seed)
    engines = rng.choice([("mxnet", "torch")] * 3 + [
        ("torch", "mxnet"), ("torch", "torch"), ("mxnet", "mxnet")])
    optimizer, params = rng.choice(OPTIMIZERS)
    params = {"learning_rate": rng.choice([0.125, 0.0625]), **params}
    if rng.random() < 0.4:
        params["wd"] = 0.125
    p = Pair(task, rng, task.net, task.net, {"a": {}, "b": {}}, {
        "devices": rng.choice([1, 1, 2, 3]), "optimizer": optimizer,
        "optimizer_params": params, "weights": rng.choice("aaab"),
        "batch_norm": rng.choice(["per_device", "average", "sync"])},
        engines, [])
    rows = rng.choice([6, 7, 8])
    p.batches = task.batches(np.random.default_rng(seed), rows, 3)
    if rng.random() < 0.3:
        p.batches[1] = tuple(x[:rows - 2] for x in p.batches[1])
    if rng.random() < 0.3:
        for side in "ab":
            p.sides[side]["lr_scheduler"] = Steps(0.125, warm=1)
    if rng.random() < 0.5:
        for side in "ab":
            p.sides[side]["loss"] = "cross-entropy" \
                if task.targets == "classes" else "l2"
    done = []
    for side, engine in zip("ab", engines):
        for name, (where, change) in REWRITINGS.items():
            if engine in where and rng.random() < 0.35:
                new = change(getattr(p, side), rng)
                # What Ftrl cuts off is 0, where maximum has another
                # derivative than ReLU: no equal pair.
                if new is not None and not (name == "relu_by_maximum"
                                            and optimizer == "ftrl"):
                    setattr(p, side, new)
                    done.append(f"{side}: {name}")
    np_arrays = "mxnet" in engines and rng.random() < 0.25
    return p, np_arrays, done


@contextlib.contextmanager
def arrays(np_arrays: bool) -> Any:
    if not np_arrays:
        yield
        return
    mx = judge.gluon_side.mx
    with mx.util.np_shape(True), mx.util.np_array(True):
        yield


def judged(family: str, seed: int) -> Row:
    p, np_arrays, done = pair(family, seed)
    written = judge.styles(p.rng, reorder=True)
    if np_arrays:       # functions of arrays have other names there
        np_arrays = p.a.chain and p.b.chain and all(
            n.kind in nets.LAYERS and n.kind not in (
                "instance_norm", "group_norm") and n.options.get("act") not in
            ("maximum", "relu6", "gelu") for n in (*p.a, *p.b))
        for style in written if np_arrays else ():
            style.modules, style.container = True, "sequential"
    row = Row("equal", family, seed, "", engines="/".join(p.engines))
    how = (f"{'np arrays; ' * np_arrays}{'; '.join(done)}; {p.options}; "
           f"{written}")
    try:
        for net in (p.a, p.b):
            x = p.batches[0][0]
            one, two = (judge.results(net, x, 1) for net in (p.task.net, net))
            assert np.allclose(one[1], two[1], 1e-6, 1e-8), done
        with arrays(np_arrays):
            result, *_ = judge.compare(p, written, seed)
    except judge.REFUSALS as error:
        row = judge.refused(row, error, False)
        row.cause = ""
    else:
        row.verdict, row.text = result.verdict, str(result)
        row.causes = [c.name for c in result.causes]
        row.cause = "" if result.verdict in judge.SAME else "wrong"
        if result.first is not None:
            row.stage, row.found = result.first.stage, result.first.name
    row.text += f"\n{how}"
    return row


def run(seeds: range, families: list[str]) -> list[Row]:
    """One pair for each seed; the families take turns."""
    return [judged(families[seed % len(families)], seed) for seed in seeds]


def table(rows: list[Row]) -> None:
    for verdict, count in Counter(row.verdict for row in rows).items():
        print(f"{count:5d} {verdict}")
    for row in rows:
        if row.verdict == "refused":
            print(f"\nrefused: {row.family} / {row.seed}: {row.text[:400]}")


__all__ = ["judged", "mistakes", "pair", "run", "table"]
