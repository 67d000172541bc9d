"""Programs, as values whose text makes them again, and their strategies."""
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from hypothesis import strategies as st

#: columns of each layer's input and output, so that each can be taken out
WIDTH = 4
WORDS = 5                       # of an embedding

#: the name of a kind, or a container: (kind, layers inside, ...)
Layer = str | tuple[Any, ...]


class _Short:
    """The text has what differs from the defaults, a tuple on lines."""

    def __repr__(self) -> str:
        given = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            text = repr(value)
            if f.name in ("networks", "actions"):
                lines = "".join(f"\n        {x!r}," for x in value)
                text = f"({lines})"
            if value != f.default:
                given.append(f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(given)})"

    def _repr_pretty_(self, printer, cycle) -> None:
        """For hypothesis."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Network(_Short):
    """A network, and how it is trained."""

    layers: tuple[Layer, ...] = ("dense",)
    batch_norm: str = "per_device"
    hybridize: bool = False
    #: whose parameters the trainers get: of the "replicas", the framework's
    #: own "parameters" or a "part" of them, "two" trainers with every other
    #: one, an "object" of the framework's own optimizer
    trainer: str = "replicas"
    optimizer: str = "sgd"
    options: dict[str, Any] = field(
        default_factory=lambda: {"learning_rate": 0.125})
    schedule: tuple[int, float] | None = None       # updates, factor
    allreduce: str = "auto"
    adds: bool = False              # gradients accumulate
    skips: bool = False             # ignore_stale_grad, in custom steps

    @property
    def kinds(self) -> set[str]:
        return {kind.removeprefix("shared ") for kind in _kinds(self.layers)}

    def split(self, parameters: list) -> list[list]:
        """The parameters of each trainer."""
        return {"part": [parameters[2:]],
                "two": [parameters[::2], parameters[1::2]]}.get(
            self.trainer, [parameters])


class Action:
    """A call of `runner.Run`'s method of this name; falsy arguments are the
    defaults."""

    def __init__(self, name: str, **arguments: Any):
        self.name = name
        self.arguments = {k: x for k, x in arguments.items() if x}

    def __repr__(self) -> str:
        given = [f"{key}={x!r}" for key, x in self.arguments.items()]
        return f"Action({', '.join([repr(self.name), *given])})"


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """Networks, and what a user does to them."""

    backend: str
    networks: tuple[Network, ...] = (Network(),)
    actions: tuple[Action, ...] = (Action("train_batch"),)
    k: int = 1                      # devices
    seed: int = 0                   # of values and data
    dtype: str = "float64"
    words: bool = False             # a second input, of integers
    loss: str = "L2Loss"

    @property
    def kinds(self) -> set[str]:
        return set().union(*(network.kinds for network in self.networks))

    @property
    def refused(self) -> str | None:
        """Why `mgpu.initialize` must raise for a network."""
        if "sparse" in self.kinds:
            return "sparse"
        return "rnn" if self.backend == "mxnet" and self.dtype == "float64" \
            and self.kinds & set(RECURRENT) else None


def _kinds(layers: tuple[Layer, ...]) -> Iterator[str]:
    for layer in layers:
        if isinstance(layer, str):
            yield layer
        else:
            yield layer[0]
            for some in layer[1:]:
                yield from _kinds(some)


# -- what is drawn ------------------------------------------------------------

RECURRENT, EMBEDDINGS = ("rnn", "gru", "lstm"), {"embedding", "sparse"}
STATEFUL = {"counter", "carry"}
LEAVES = ("dense", "shared dense", "frozen", "layer_norm", "conv", "dropout",
          "embedding", "frozen_norm", *("batch_norm", "counter", "carry") * 2)
CONTAINERS = ("block", "experts", "switch")
TORCH_LEAVES = ("mask_hook", "shared mask_hook", "grad_hook", "output_hook",
                "weight_norm", "shared weight_norm", "tied")
TORCH_CONTAINERS = ("checkpoint", "reentrant")
#: what a container cannot have inside: branches may get one row or none on a
#: device, and what is recomputed counts twice
EXCLUDED = {"experts": {"batch_norm"} | STATEFUL, "checkpoint": STATEFUL,
            "reentrant": STATEFUL}
EDITS = {"torch": ("in place", "data", "copy", "numpy", "assign", "set_data"),
         "mxnet": ("in place", "copy", "part", "gluon", "set_data")}
SGD: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}), ("sgd", {"momentum": 0.5}), ("nag", {"momentum": 0.5})]
EPS = {"eps": 2.0 ** -10}
#: dyadic options, which MXNet's float32 scalars hold exactly, and an epsilon
#: that keeps a rule from dividing noise by noise
OTHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "mxnet": [("adam", {"beta1": 0.75, "beta2": 0.9375,
                        "epsilon": 2.0 ** -10})],
    "torch": [("adam", {**EPS, "amsgrad": True}),
              ("rmsprop", {**EPS, "momentum": 0.5}),
              *((name, EPS) for name in ("adam", "adamw", "adagrad",
                                         "adadelta", "adamax"))]}


def one_in(n: int):
    """True once in `n`; shrinks to False."""
    return st.integers(0, n - 1).map(lambda i: i == n - 1)


def layers(leaves, containers, depth: int = 2, most: int = 3):
    def some(kind):
        if kind not in containers:
            return st.just(kind)
        inside = layers(
            [leaf for leaf in leaves if leaf not in EXCLUDED.get(kind, ())],
            containers, depth - 1, 2)
        return st.tuples(st.just(kind),
                         *[inside] * (2 if kind == "experts" else 1))
    return st.lists(st.sampled_from([*leaves, *containers * (depth > 0)])
                    .flatmap(some), min_size=1, max_size=most).map(tuple)


@st.composite
def networks(draw, backend: str, k: int, leaves, containers):
    found = Network(("dense", *draw(layers(leaves, containers))))
    normed = "batch_norm" in found.kinds
    optimizer, options = draw(st.sampled_from(
        SGD if normed else SGD + OTHERS[backend]))
    options = {"learning_rate": draw(st.sampled_from([0.125, 0.0625])),
               **options}
    if draw(one_in(3)):
        options["wd"] = 0.125
    if backend == "mxnet" and draw(one_in(5)):
        options["clip_gradient"] = 0.25
    return Network(
        found.layers,
        "per_device" if not normed else "sync" if k > 1 else draw(
            st.sampled_from(["per_device", "sync", "average"])),
        backend == "mxnet" and not normed and draw(one_in(4)),
        draw(st.sampled_from(["replicas", "parameters", "part", "two",
                              "object", "object"])), optimizer, options,
        draw(st.sampled_from([None, None, (1, 0.5), (2, 0.5), (3, 0.5)])),
        draw(st.sampled_from(["auto", "naive", "tree", "ring", "sharded"])),
        draw(one_in(6)), draw(st.booleans()))


@st.composite
def programs(draw, backend: str, several: bool = False):
    """Programs of one network, or of `several` (two)."""
    torch, recurrent = backend == "torch", not several and draw(one_in(6))
    leaves = [*RECURRENT * 3 * recurrent, *LEAVES, *TORCH_LEAVES * torch,
              *["sparse"] * (not several and draw(one_in(12)))]
    # A switch reads a column that all rows of the data have in common.
    containers = [x for x in (*CONTAINERS, *TORCH_CONTAINERS * torch)
                  if not several or x != "switch"]
    k = draw(st.integers(1, 4))
    dtype = "float32" if recurrent and (torch or not draw(one_in(5))) \
        else "float64"
    loss = draw(st.sampled_from(["L2Loss", "SoftmaxCrossEntropyLoss"]))
    others = ["", *["critic"] * several,
              *["teacher"] * (several and loss == "L2Loss")]
    may_freeze = torch or dtype == "float64"
    if not may_freeze:
        leaves.remove("frozen")
    nets = tuple(draw(networks(backend, k, leaves, containers))
                 for _ in range(1 + several))
    kinds = set().union(*(net.kinds for net in nets))
    some = actions(backend, nets, may_freeze, others)
    # Ten slots, of which most have an action; when shrunk, few.
    slots = [draw(some) for _ in range(10) if draw(st.integers(0, 9))]
    return Program(backend, nets, tuple(slots), k, draw(st.integers(0, 9)),
                   dtype, draw(one_in(5)) or bool(kinds & EMBEDDINGS), loss)


@st.composite
def actions(draw, backend: str, nets: tuple[Network, ...], may_freeze: bool,
            others):
    number = draw(st.integers(0, len(nets) - 1))
    net, kinds = nets[number], set().union(*(net.kinds for net in nets))
    torch = backend == "torch"
    if draw(st.booleans()):
        return draw(_steps(number, net, kinds, others))
    name = draw(st.sampled_from([
        *["edit"] * 4, "load", "save", "restore", "resume", "resume",
        "predict", "fail", "fail", *["freeze"] * 2 * may_freeze,
        *["reset"] * 3 * bool(kinds & STATEFUL),
        *["rate"] * 2 * (not net.schedule), *["multiply"] * (not torch),
        *["own_states"] * 3 * (torch and net.trainer == "object")]))
    index = st.integers(0, 7)
    options = {
        "edit": {"parameter": index, "way": st.sampled_from(EDITS[backend])},
        "load": {"by_mgpu": st.booleans()},
        "freeze": {"parameter": index, "by_mgpu": st.booleans(),
                   "unfreeze": st.booleans()},
        "resume": {"k": st.integers(1, 4 if all(
            "batch_norm" not in net.kinds or net.batch_norm == "sync"
            for net in nets) else 1), "checkpoint": st.booleans()},
        "rate": {"rate": st.sampled_from([0.25, 0.03125])},
        "fail": {"rows": _rows(kinds), "by_hand": st.booleans()},
        "multiply": {"parameter": index,
                     "factor": st.sampled_from(["lr_mult", "wd_mult"])}}
    return Action(name, net=number, **{
        key: draw(x) for key, x in options.get(name, {}).items()})


def _rows(kinds: set[str]):
    """The size of a batch. Carried rows need batches of one size."""
    return st.integers(2 if "batch_norm" in kinds else 1, 7).map(
        lambda rows: 5 if "carry" in kinds else rows)


@st.composite
def _steps(draw, number: int, net: Network, kinds: set[str], others):
    rows = _rows(kinds)
    if not (net.adds or net.trainer == "two" or draw(st.booleans())):
        return Action("train_batch", net=number, rows=draw(rows))
    # Where a parameter may be left out, its gradient holds what it held.
    whole = not kinds & {"experts", "switch"}
    other = draw(st.sampled_from(others))
    end = draw(st.sampled_from(["", "", "", "skip", "look", "error",
                                *["own step"] * whole]))
    clips = whole and net.trainer != "two" and end not in ("skip", "own step")
    return Action(
        "by_hand", net=number, rows=tuple(draw(st.lists(
            rows, min_size=1, max_size=3 if net.adds else 1))),
        other=other,
        clip=draw(st.sampled_from(["", "", "before", "trainer", "0"]))
        if clips else "", end=end)
