"""Compares a pair, and judges what `parity.compare` says of it."""
import contextlib
import random
import signal
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import mgpu
from mgpu import losses, parity
from mgpu.parity.result import FLOAT32

from . import gluon_side, torch_side
from .mistakes import Mistake, NotHere, Pair, plant
from .nets import PARAMETRIC, Net

SIDES = {"mxnet": gluon_side, "torch": torch_side}
#: tries to find a place where a mistake changes something
TRIES = 6


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
    plain, modules : bool
        Always the first of several ways, which is a layer where there is
        one; and without a choice at all.
    """

    seed: str
    container: str = "attributes"
    reorder: bool = False
    hybrid: int = 0
    plain: bool = False
    modules: bool = False

    def _rng(self, text: str) -> random.Random:
        return random.Random(f"{self.seed} {text}")

    def choose(self, node: Any, ways: tuple) -> Any:
        if self.plain or self.modules:
            return ways[0]
        return self._rng(node.name).choice(ways)

    def fuses(self, node: Any) -> bool:
        return not self.plain and self._rng(
            f"{node.name} fused").random() < 0.5

    def order(self, names: list[str]) -> None:
        if self.reorder:
            names.reverse()


PLAIN = Style("", plain=True)


@dataclass
class Row:
    """What was said of one pair.

    Attributes
    ----------
    kind, family, seed
        Which one.
    verdict : str
    stage, found : str
        Of the first difference, and what it names.
    layer : bool or None
        Whether that is right. None: not on trial.
    causes : list of str
    cause : str
        "right", "missing", "wrong".
    text : str
        What a reader needs to understand the row.
    """

    kind: str
    family: str
    seed: int
    verdict: str
    stage: str = ""
    found: str = ""
    layer: bool | None = None
    causes: list[str] = field(default_factory=list)
    cause: str = ""
    text: str = ""
    engines: str = ""
    further: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# -- losses -------------------------------------------------------------------

def _focal(out, y):
    p = functional.cross_entropy(out, y.long(), reduction="none")
    return (1 - (-p).exp()) ** 2 * p


def _entropy(change=None, **options):
    def loss(out, y):
        out, y = change(out, y) if change else (out, y)
        return functional.cross_entropy(out, y.long(), **{
            "reduction": "none", **options})
    return loss


def _weighted(out, y):
    weight = out.new_tensor([0.5, 1.0, 2.0, 1.5][:out.shape[1]])
    return functional.cross_entropy(out, y.long(), weight, reduction="none")


LOSSES = {
    "cross-entropy": _entropy(), "mean": _entropy(reduction="mean"),
    "sum": _entropy(reduction="sum"),
    "smoothed": _entropy(label_smoothing=0.1), "weighted": _weighted,
    "ignoring": _entropy(ignore_index=0),
    "twice": lambda out, y: 2 * _entropy()(out, y),
    "rolled": lambda out, y: _entropy()(out, y.roll(1)),
    "focal": _focal,
    "softmax first": _entropy(lambda out, y: (out.softmax(1), y)),
    "l2": lambda out, y: ((out - y) ** 2).mean(1) / 2,
    "squares": lambda out, y: ((out - y) ** 2).mean(1),
    "mean squares": functional.mse_loss,
    "l1": lambda out, y: (out - y).abs().mean(1),
    "huber": lambda out, y: functional.smooth_l1_loss(
        out, y, reduction="none", beta=0.5).mean(1),
}


def loss_of(name: str | None, engine: str, targets: str) -> Any:
    if name is None:
        return losses.SoftmaxCrossEntropyLoss() if targets == "classes" \
            else losses.L2Loss()
    if engine == "torch":
        return LOSSES[name]
    own = gluon_side.mx.gluon.loss
    if name == "huber":
        return own.HuberLoss(rho=0.5)
    return own.SoftmaxCrossEntropyLoss() if name == "cross-entropy" \
        else own.L2Loss()


# -- whether a mistake changes anything ---------------------------------------

def results(net: Net, x: np.ndarray, seed: int) -> list[Any] | None:
    """Outputs, gradients and buffers of a description in plain torch; None
    where it does not fit together."""
    try:
        made = torch_side.build(net, PLAIN, x.ndim, seed).double()
        torch.manual_seed(0)
        out = made(torch.from_numpy(x))
        (out * torch.linspace(1, 2, out.numel()).reshape(out.shape)
         ).sum().backward()
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return [out.shape, out.detach(), *(p.grad for p in made.parameters()),
            *(b.clone() for b in made.buffers())]


def differ(one: list[Any], two: list[Any]) -> bool:
    if len(one) != len(two) or one[0] != two[0]:
        return True
    return any((x is None) is not (y is None) or x is not None and (
        x.shape != y.shape or not torch.allclose(
            x.double(), y.double(), 1e-6, 1e-9))
        for x, y in zip(one[1:], two[1:]))


def find(kind: Mistake, family: str, seed: int) -> Pair:
    """A pair in which the mistake changes something; raises `NotHere`."""
    for salt in range(TRIES):
        p = plant(kind, family, seed, salt)
        rng = np.random.default_rng([seed, salt])
        rows = p.rng.choice([6, 7, 8])
        if p.sides["b"].get("divisor") not in (None, 1):
            p.sides["b"]["divisor"] = rows
        p.batches = p.task.batches(rng, rows, 3, p.scale)
        if p.options.pop("short", False):
            p.batches[1] = tuple(x[:rows - 2] for x in p.batches[1])
        if p.a == p.b:
            return p
        x = p.batches[0][0]
        one, two = (results(net, x, seed + 1) for net in (p.a, p.b))
        # a port whose outputs have another shape would be seen at once
        if one and two and one[0] == two[0] and differ(one, two):
            return p
    raise NotHere


# -- comparing ----------------------------------------------------------------

def side(p: Pair, which: str, style: Style, seed: int | None) -> Any:
    """The `Side` of a pair, and the paths of its nodes."""
    net, engine = getattr(p, which), p.engines["ab".index(which)]
    with mgpu.using_backend(engine):
        made = SIDES[engine].build(net, style, p.batches[0][0].ndim, seed)
    options = dict(p.sides[which])
    options["loss"] = loss_of(options.get("loss"), engine, p.task.targets)
    for name in ("wd_mult", "lr_mult"):
        if isinstance(options.get(name), str):
            options[name] = _multipliers(net, made.paths, options[name])
    return parity.Side(made, **options), made.paths


def _multipliers(net: Net, paths: dict[str, str], which: str
                 ) -> dict[str, float]:
    """0 for the biases and what norms have, or for a layer's weight."""
    if which != "biases":
        return {f"{paths[which]}.weight": 0.0}
    found = {}
    for n in net:
        if n.kind.endswith("norm"):
            names = ["gamma", "beta"]
        else:
            names = ["bias"] if n.options.get("bias") else []
        found.update({f"{paths[n.name]}.{name}": 0.0 for name in names})
    return found


class TookTooLong(Exception):
    """A comparison that hangs."""


@contextlib.contextmanager
def limited(seconds: int) -> Any:
    def stop(*_):
        raise TookTooLong
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def compare(p: Pair, styles: tuple[Style, Style], seed: int
            ) -> tuple[Any, dict[str, str], dict[str, str]]:
    """The result, and the paths of both sides' nodes."""
    own = p.options.get("weights") == "own"
    sides, paths = zip(*(side(p, which, style, None if own else number)
                         for which, style, number in zip(
                             "ab", styles, (seed + 1, seed + 2))))
    options = dict(p.options)
    if p.task.single(p.engines):
        options["dtype"] = "float32"
    if transposed := {
            n.name for net in (p.a, p.b) for n in net
            if n.options.get("stored")}:
        options["map"] = _map(p, transposed, *paths)
    with warnings.catch_warnings(), limited(120):
        warnings.simplefilter("ignore")
        result = parity.compare(*sides, batches=p.batches, **options)
    return result, *paths


def _map(p: Pair, names: set[str], paths_a: dict[str, str],
         paths_b: dict[str, str]) -> dict[str, Any]:
    """The map of weights that are stored transposed on a side."""
    found: dict[str, Any] = {}
    for n in names:
        one, two = (bool(net[n].options.get("stored")) for net in (p.a, p.b))
        to = f"{paths_b[n]}.weight"
        found[f"{paths_a[n]}.weight"] = to if one == two else {
            "to": to, "transpose": [1, 0]}
    return found


def styles(rng: random.Random, reorder: bool = False) -> tuple[Style, Style]:
    """Two ways to write a network, of `a` and of `b`."""
    made = [Style(str(rng.random()), rng.choice(
        ["attributes", "sequential", "nested"]), reorder
        and rng.random() < 0.3, rng.choice([0, 0, 1, 2]))
        for _ in "ab"]
    return made[0], made[1]


def written(p: Pair) -> tuple[Style, Style]:
    one, two = styles(p.rng)
    if p.reorder:
        one.container = two.container = "attributes"
        two.reorder = True
    return one, two


REFUSALS = (ValueError, TypeError, NotImplementedError,
            mgpu.ReplicaMismatchError)


def judge(kind: Mistake, family: str, seed: int) -> Row | None:
    """The row of a mistake; None where the network has no place for it."""
    row = Row(kind.name, family, seed, "")
    try:
        p = find(kind, family, seed)
    except NotHere:
        return None
    try:
        try:
            result, *paths = compare(p, written(p), seed)
        except NotImplementedError:     # Gluon has no such thing
            p.engines = ("mxnet", "torch")
            result, *paths = compare(p, written(p), seed)
    except Exception as error:
        row.engines = "/".join(p.engines)
        return refused(row, error, p.refusal)
    row.engines = "/".join(p.engines)
    return said(row, kind, p, result, *paths)


def refused(row: Row, error: Exception, right: bool) -> Row:
    named = isinstance(error, REFUSALS)
    row.verdict = "refused" if named else "error"
    row.text = f"{type(error).__name__}: {error}"
    row.cause = "right" if named and right else "missing"
    row.layer = True if named and right else None
    return row


def said(row: Row, kind: Mistake, p: Pair, result: Any,
         paths_a: dict[str, str], paths_b: dict[str, str]) -> Row:
    row.verdict = result.verdict
    row.causes = [c.name for c in result.causes]
    row.text = str(result)
    row.further = [found["place"] for found in result.further]
    if result.verdict != "different":
        row.cause, row.layer = "missing", False
        return row
    first = result.first
    row.stage, row.found = first.stage, first.name
    row.layer = _right_layer(p, result, paths_a, paths_b)
    top = row.causes[:1]
    if top:
        row.cause = "right" if top[0] in kind.causes else "wrong"
    else:
        row.cause = "missing" if kind.causes else "right"
    return row


def _right_layer(p: Pair, result: Any, paths_a: dict[str, str],
                 paths_b: dict[str, str]) -> bool:
    first = result.first
    if p.stages and first.stage not in p.stages:
        return False
    if not p.places:
        return True
    right: set[str] = set()
    for name in p.places:
        for net in (p.a, p.b):
            if any(n.name == name for n in net):
                right |= _placed(net, name, (paths_a, paths_b))
    if first.stage == "output":
        return "output" in right
    named = {paths[n] for paths in (paths_a, paths_b) for n in right
             if n in paths}
    if first.stage == "layer":
        if first.name.startswith("F."):
            return any(n.kind == "act" for net in (p.a, p.b) for n in net
                       if n.name in right) or any(
                _behind(net, paths, first.name) & {*p.places, *right}
                for net, paths in ((p.a, paths_a), (p.b, paths_b)))
        location = result.location or {}
        found = {first.name} | {location[which]["path"] for which in "ab"
                                if location.get(which)}
    elif first.stage in ("gradient", "statistic"):
        path = first.name.rpartition(".")[0]
        found = {path, path.rpartition(".")[0]}
    else:
        return True
    return bool(found & named)


def _behind(net: Net, paths: dict[str, str], function: str) -> set[str]:
    """The nodes behind the layer that `function` is called after, up to the
    next layer."""
    names = [n.name for n in net]
    after = next((i for i, name in enumerate(names) if paths.get(name)
                  == function.partition(" after ")[2].split(" (")[0]), -1)
    end = next((i for i in range(after + 1, len(names))
                if names[i] in paths), len(names))
    return set(names[after + 1:end + 1])


def _placed(net: Net, name: str, paths: tuple) -> set[str]:
    """The nodes at which a fault in a node may be seen: the node itself; if
    it is a function on a side, also the layers that it reaches, and for an
    activation the layer before it, which it may be a part of. "output" if
    it reaches the end."""
    found, node = {name}, net[name]
    added = sum(name in names for names in paths) == 1  # or on one side

    def is_layer(n: str) -> bool:
        return all(n in names for names in paths) and not (
            added and net[n].kind not in PARAMETRIC)
    if is_layer(name):
        return found
    if node.kind == "act" and node.inputs[0] != "x":
        found.add(node.inputs[0])
    waiting = [name]
    while waiting:
        at = waiting.pop()
        if at == net.nodes[-1].name:
            found.add("output")
        for n in net.readers(at):
            found.add(n.name if n.kind != "again" else n.of)
            if not is_layer(n.name) and n.kind != "again":
                waiting.append(n.name)
    return found


SAME = ("same", FLOAT32)
