"""A case, drawn from one seed, and the smaller ones that may fail too."""
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

#: columns of every layer's input and output, so that each can be taken out
WIDTH = 4
CLASSES, WORDS = 3, 5

Layer = tuple[Any, ...]     # (kind, number, layers inside...)


class _Short:
    """Prints what differs from the defaults: text that makes it again."""

    def __repr__(self) -> str:
        given = ", ".join(f"{f.name}={getattr(self, f.name)!r}"
                          for f in fields(self)  # type: ignore[arg-type]
                          if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """One step, and what the user does before it.

    Attributes
    ----------
    seed : int
        Of the data, and of the values that actions write.
    rows : tuple of int
        Of each micro-batch; more than one only where gradients accumulate.
    before : tuple of tuples
        ("load",), ("edit", number of the parameter, way), ("freeze" or
        "unfreeze", number, "net" or "mgpu"), ("save",), ("restore",),
        ("resume", devices, "states" or "checkpoint"), ("rate", learning
        rate), ("predict",), ("multiply", number, "lr_mult" or "wd_mult").
    how : str
        "train_batch", "replicas" (all at once, by hand) or "one by one".
    clip : str
        "before" the all-reduce on the user's own gradients, by the "trainer"
        after it, on replica "0" after it; "" does not.
    fate : str
        "step", "skip" (after the backward pass), "retry" (after an error in
        the loss), "look" (a forward pass before the step), "refused" (a wrong
        batch size first).
    """

    seed: int
    rows: tuple[int, ...] = (3,)
    before: tuple[tuple[Any, ...], ...] = ()
    how: str = "train_batch"
    clip: str = ""
    fate: str = "step"


@dataclass(frozen=True, repr=False)
class Case(_Short):
    """A network, how it is trained, and its steps."""

    engine: str
    seed: int = 0                   # of the first values
    k: int = 1
    dtype: str = "float64"
    init: str | None = None         # or "keep", which means the same here
    layers: tuple[Layer, ...] = (("dense", 0),)
    words: bool = False             # a second input, of integers
    batch_norm: str = "per_device"
    loss: str = "SoftmaxCrossEntropyLoss"
    optimizer: str = "sgd"
    options: dict[str, Any] = field(
        default_factory=lambda: {"learning_rate": 0.125})
    schedule: tuple[int, float] | None = None       # updates, factor
    allreduce: str = "auto"
    adds: bool = False              # gradients accumulate
    skips: bool = False             # ignore_stale_grad, where steps are taken
    #                                 by hand
    steps: tuple[Step, ...] = (Step(0),)

    def kinds(self) -> set[str]:
        return set(kinds(self.layers))

    def refused(self) -> str | None:
        """Why `mgpu.initialize` must refuse the network."""
        found = self.kinds()
        if "sparse" in found:
            return "sparse"
        return "rnn" if self.engine == "mxnet" and self.dtype == "float64" \
            and found & set(RECURRENT) else None


def kinds(layers: tuple[Layer, ...]) -> Iterator[str]:
    for kind, _, *inner in layers:
        yield kind
        for some in inner:
            yield from kinds(some)


# -- drawing ------------------------------------------------------------------

RECURRENT, EMBEDDINGS = ("rnn", "gru", "lstm"), {"embedding", "sparse"}
LEAVES = ("dense", "dense", "frozen", "layer_norm", "conv", "dropout",
          "embedding", "batch_norm", "frozen_norm")
CONTAINERS = ("block", "experts", "switch")
#: layers whose weights two places may share
SHARED = ("dense", "hook", "weight_norm")
EDITS = {"torch": ("in place", "data", "copy", "numpy", "assign", "set_data"),
         "mxnet": ("in place", "copy", "part", "gluon", "set_data")}
SGD: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}), ("sgd", {"momentum": 0.5}), ("nag", {"momentum": 0.5})]
#: dyadic options, which MXNet's float32 scalars hold exactly, and an epsilon
#: that keeps a rule from dividing noise by noise
OTHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "mxnet": [("adam", {"beta1": 0.75, "beta2": 0.9375,
                        "epsilon": 2.0 ** -10})],
    "torch": [("adam", {"eps": 2.0 ** -10}), ("adamw", {"eps": 2.0 ** -10}),
              ("adam", {"eps": 2.0 ** -10, "amsgrad": True}),
              ("adagrad", {"eps": 2.0 ** -10}),
              ("adadelta", {"eps": 2.0 ** -10}),
              ("adamax", {"eps": 2.0 ** -10}),
              ("rmsprop", {"eps": 2.0 ** -10, "momentum": 0.5})]}


#: Gluon keeps their states in float32
NARROW: list[tuple[str, dict[str, Any]]] = [
    ("rmsprop", {"gamma1": 0.75, "epsilon": 2.0 ** -10}),
    ("adagrad", {"eps": 2.0 ** -10}), ("adadelta", {"epsilon": 2.0 ** -10})]


class _Drawing:
    """Draws the layers of one network."""

    def __init__(self, rng: random.Random, engine: str, recurrent: bool):
        self.rng, self.number = rng, 0
        self.leaves = LEAVES + RECURRENT * recurrent
        self.containers = CONTAINERS
        if engine == "torch":
            self.leaves += ("hook", "weight_norm", "tied")
            self.containers += ("checkpoint", "reentrant")

    def layers(self, count: int, depth: int = 2, inside: str = ""
               ) -> tuple[Layer, ...]:
        return tuple(self.layer(depth, inside) for _ in range(count))

    def layer(self, depth: int, inside: str) -> Layer:
        rng = self.rng
        self.number += 1
        if depth and rng.random() < 0.3:
            kind = rng.choice(self.containers)
            count = 2 if kind == "experts" else 1
            return (kind, self.number, *(self.layers(
                rng.randint(1, 2), depth - 1,
                "experts" if "experts" in (kind, inside) else kind)
                for _ in range(count)))
        kind = rng.choice(self.leaves)
        if kind == "embedding" and rng.random() < 0.1:
            kind = "sparse"
        if kind == "batch_norm" and inside == "experts":
            kind = "dense"      # one may get a single row
        shared = kind in SHARED and rng.random() < 0.25
        return kind, rng.randrange(self.number) if shared else self.number


def draw(engine: str, seed: int) -> Case:
    """The case of a seed: always the same."""
    rng = random.Random(f"{engine} {seed}")
    recurrent = rng.random() < 0.15
    layers = (("dense", 0), *_Drawing(rng, engine, recurrent).layers(
        rng.randint(1, 3)))
    found = set(kinds(layers))
    recurrent = bool(found & set(RECURRENT))
    k = rng.randint(1, 4)
    narrow = recurrent and (engine == "torch" or rng.random() < 0.8)
    normed = "batch_norm" in found
    policies = ("sync",) if k > 1 else ("sync", "per_device", "average")
    family = SGD if normed or rng.random() < 0.5 else OTHERS[engine] \
        + NARROW * (engine == "mxnet" and narrow)
    optimizer, options = rng.choice(family)
    options = {"learning_rate": rng.choice([0.125, 0.0625]), **options}
    if rng.random() < 0.4:
        options["wd"] = 0.125
    if rng.random() < 0.2 and engine == "mxnet":
        options["clip_gradient"] = 0.25
    case = Case(
        engine, rng.randrange(10 ** 6), k,
        "float32" if narrow else "float64", layers=layers,
        words=bool(found & EMBEDDINGS) or rng.random() < 0.2,
        batch_norm=rng.choice(policies) if normed else "per_device",
        init=rng.choice([None, "keep"]),
        loss=rng.choice(["SoftmaxCrossEntropyLoss", "L2Loss"]),
        optimizer=optimizer, options=options,
        schedule=(rng.randint(1, 3), 0.5) if rng.random() < 0.3 else None,
        allreduce=rng.choice(["auto", "auto", "naive", "tree", "ring",
                              "sharded"]),
        adds=rng.random() < 0.15, skips=rng.random() < 0.5)
    return replace(case, steps=tuple(_step(rng, case)
                                     for _ in range(rng.randint(3, 5))))


def _step(rng: random.Random, case: Case) -> Step:
    fewest = 2 if "batch_norm" in case.kinds() else 1
    rows = tuple(rng.randint(fewest, rng.choice((3, 7))) for _ in range(
        rng.randint(1, 3) if case.adds else 1))
    hows = ["replicas"] * (1 + case.adds) + ["train_batch"] * (not case.adds)
    if case.batch_norm != "sync":
        hows.append("one by one")
    how, clip, fate = rng.choice(hows), "", "step"
    # Where a parameter may be left out, its gradient holds what it held.
    if how != "train_batch" and rng.random() < 0.4 and not \
            case.kinds() & {"experts", "switch"}:
        clip = rng.choice(["before", "trainer", "0"])
    if rng.random() < 0.4:
        fate = rng.choice(["retry"] if how == "train_batch" else [
            "skip", "retry", "look", "refused"])
    return Step(rng.randrange(10 ** 6), rows, tuple(
        _action(rng, case) for _ in range(rng.choice([0, 0, 1, 1, 2]))),
        how, clip, fate)


def _action(rng: random.Random, case: Case) -> tuple[Any, ...]:
    kind = rng.choice(["edit", "edit", "edit", "load", "freeze", "unfreeze",
                       "save", "restore", "resume", "rate", "predict"]
                      + ["multiply"] * (case.engine == "mxnet"))
    if kind == "edit":
        return kind, rng.randrange(20), rng.choice(EDITS[case.engine])
    if kind in ("freeze", "unfreeze"):
        return kind, rng.randrange(20), rng.choice(["net", "mgpu"])
    if kind == "resume":
        k = rng.randint(1, 4) if case.batch_norm == "sync" or \
            "batch_norm" not in case.kinds() else 1
        return kind, k, rng.choice(["states", "checkpoint"])
    if kind == "multiply":
        return kind, rng.randrange(20), rng.choice(["lr_mult", "wd_mult"])
    if kind == "rate":
        return ("predict",) if case.schedule else (
            kind, rng.choice([0.25, 0.03125]))
    return (kind,)


# -- making smaller -----------------------------------------------------------

def smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, the largest cuts first."""
    for i in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:i] + case.steps[i + 1:])
    for layers in _less(case.layers):
        yield replace(case, layers=layers)
    for k in range(1, case.k):
        yield replace(case, k=k)
    rate = {"learning_rate": case.options["learning_rate"]}
    for changed in ({"optimizer": "sgd", "options": rate}, {"schedule": None},
                    {"words": False}, {"batch_norm": "per_device"},
                    {"adds": False}, {"skips": False}, {"init": None},
                    {"allreduce": "auto"}, {"loss": "L2Loss"}):
        if any(getattr(case, name) != x for name, x in changed.items()):
            yield replace(case, **changed)
    for i, step in enumerate(case.steps):
        for less in _less_step(step, case.adds):
            yield replace(case, steps=(*case.steps[:i], less,
                                       *case.steps[i + 1:]))


def _less(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for i, (kind, number, *inner) in enumerate(layers):
        before, after = layers[:i], layers[i + 1:]
        if len(layers) > 1:
            yield before + after
        for j, some in enumerate(inner):
            yield before + some + after
            for fewer in _less(some):
                yield (*before, (kind, number, *inner[:j], fewer,
                                 *inner[j + 1:]), *after)


def _less_step(step: Step, adds: bool) -> Iterator[Step]:
    for i in range(len(step.before)):
        yield replace(step, before=step.before[:i] + step.before[i + 1:])
    for changed in ({"clip": ""}, {"fate": "step"},
                    {"how": "replicas" if adds else "train_batch",
                     "clip": "", "fate": "step"},
                    {"rows": step.rows[:1]}, {"rows": (2,)}):
        if any(getattr(step, name) != x for name, x in changed.items()):
            yield replace(step, **changed)


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case that `fails`, as far as single cuts lead."""
    again = True
    while again:
        again = False
        for less in smaller(case):
            if fails(less):
                case, again = less, True
                break
    return case


def legal(case: Case) -> bool:
    """Whether `draw` could have made it: nothing that the plain loop, or the
    meaning of K devices, has no answer for."""
    found = case.kinds()
    normed = "batch_norm" in found
    several = max([case.k] + [action[1] for step in case.steps
                              for action in step.before
                              if action[0] == "resume"]) > 1
    return case.layers[0][0] == "dense" and (
        case.words or not found & EMBEDDINGS) and (
        case.adds or all(len(step.rows) == 1 for step in case.steps)) and (
        not normed or (case.batch_norm == "sync" or not several) and all(
            min(step.rows) > 1 and (step.how != "one by one" or not several)
            for step in case.steps))
