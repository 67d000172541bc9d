"""What `mgpu convert --check` and `--trace` compare."""
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import mgpu
from mgpu.cli import find
from mgpu.cli.errors import Refused
from mgpu.gluon_io import Graph, load_graph
from mgpu.gluon_io.graph import dense_arrays, entries
from mgpu.parity.masks import Masks

#: rows, and steps, of what is compared
ROWS, STEPS = 4, 3
#: the inputs of the last step are so many times as large, that more of what
#: a function does beyond its middle is seen
LARGER = 10.0
_DROPOUTS, _RNNS = ("Dropout", "_npx_dropout"), ("RNN", "_npx_rnn")

Inputs = Sequence[tuple[tuple[int, ...], str | None]]


def inputs_of(graph: Graph, arrays: Collection[str]) -> list[str]:
    """The inputs of a network that predicts: without labels."""
    labels = {graph.nodes[node.inputs[1][0]].name for node in graph.nodes
              if node.op == "Softmax" or node.op.endswith("Output")
              and len(node.inputs) > 1}
    return [name for name in entries(graph, arrays) if name not in labels]


def draw(inputs: Inputs, dtype: str, rng: np.random.Generator,
         rows: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """An array of `ROWS` rows for each input: normal, or whole numbers below
    `rows` of it, 0 and 1 where that has none."""
    drawn = []
    for k, (shape, own) in enumerate(inputs):
        size, kind = (ROWS, *shape), own or dtype
        if "float" in kind and k not in (rows or {}):
            drawn.append(rng.standard_normal(size).astype(kind))
        else:
            drawn.append(rng.integers(0, (rows or {}).get(k, 2), size
                                      ).astype(kind))
    return drawn


def embedded(graph: Graph, arrays: Collection[str]) -> dict[int, int]:
    """How many rows the smallest embedding has that an input enters, by the
    number of the input: its indices are all of these."""
    names = entries(graph, arrays)
    found: dict[int, int] = {}
    for node in graph.nodes:
        if "Embedding" not in node.op and node.op != "_npx_embedding":
            continue
        i = node.inputs[0][0]
        while len(graph.nodes[i].inputs) == 1:      # a cast, a reshape
            i = graph.nodes[i].inputs[0][0]
        if graph.nodes[i].name in names:
            k = names.index(graph.nodes[i].name)
            size = node.attributes["input_dim"]
            found[k] = min(size, found.get(k, size))
    return found


def with_trace(trace: str, read: Callable[[], Any]) -> Any:
    """What `mgpu.parity` says of a recorded run and of what was written."""
    from mgpu import parity

    def written() -> Any:
        with mgpu.using_backend("torch"):
            return read()
    return parity.compare_trace(trace, written, native=True, weights="own")


def with_mxnet(symbol: str, params: str, read: Callable[[], Any],
               inputs: Inputs) -> Any:
    """What it says of MXNet's network and of what was written, whose layers
    compute as they do without mgpu."""
    from mgpu import parity
    graph, arrays = load_graph(symbol), dense_arrays(params)
    # MXNet's gradients of lower layers are wrong in float64
    dtype = "float32" if any(
        node.op in _RNNS and node.attributes["num_layers"] > 1
        for node in graph.nodes) else "float64"

    def live(path: str) -> Any:
        with mgpu.using_backend("mxnet"), warnings.catch_warnings():
            # that it does not know the types of inputs
            warnings.simplefilter("ignore", UserWarning)
            return mgpu.from_gluon(path, params)

    def written() -> Any:
        with mgpu.using_backend("torch"):
            net = read()
        for layer, rate in _droppers(net).values():
            setattr(layer, rate, 0.0)
        return net
    with find.engines(), tempfile.TemporaryDirectory() as folder:
        quiet, watched = (os.path.join(folder, f"{name}-symbol.json")
                          for name in ("quiet", "watched"))
        rates = _without_dropout(symbol, quiet, watched, dtype)
        with mgpu.using_backend("torch"):
            net = read()
        batches, places = _batches(net, inputs, embedded(graph, arrays),
                                   dtype)
        graphs = _graphs_places(live(watched), rates, batches[0][0], dtype)
        with mgpu.using_backend("mxnet") as engine:
            a = [x.name for x in engine.network(live(quiet)).specs()]
        with mgpu.using_backend("torch") as engine:
            b = {x.name for x in engine.network(net).specs()}
        result = parity.compare(
            lambda: live(quiet), written, loss=_loss, weights="own",
            dtype=dtype, dropout="off", native=True, batches=batches,
            optimizer_params={"learning_rate": 0.125, "momentum": 0.5},
            map=_matched(a, b, getattr(net, "gluon_names", {})))
    result.notes.insert(0, f"inputs are random, and {LARGER:g} times as large "
                        "in the last step; what only larger numbers reach "
                        "was not compared")
    wrong = _apart(graphs, places, dtype)
    if wrong and result.agrees:
        result.verdict, result.reason = "different", wrong
    elif places and result.agrees:
        result.notes.insert(1, "dropout is off; its rates agree, and what "
                            f"enters it (places: {len(places)})")
    return result


# -- places of dropout --------------------------------------------------------

class Place(NamedTuple):
    """Where something is dropped: the rate, and the values that enter."""

    rate: float
    values: np.ndarray

    def like(self, other: "Place", tolerance: float) -> bool:
        """In whichever order of axes: each value is dropped by itself."""
        if round(self.rate - other.rate, 6) \
                or self.values.size != other.values.size:
            return False
        x, y = (np.sort(p.values, None) for p in (self, other))
        return bool(np.allclose(x, y, rtol=0, atol=tolerance * max(
            1e-30, np.abs(x).max(initial=0))))


def _droppers(net: Any) -> dict[str, tuple[Any, str]]:
    """Layers of a torch network that drop out in their own ways, and where
    their rates are: recurrent ones between layers, and Gluon's dropout with
    axes or in predictions."""
    return {path: (m, "dropout" if hasattr(m, "batch_first") else "p")
            for path, m in net.named_modules()
            if getattr(m, "num_layers", 1) != 1 and getattr(m, "dropout", 0)
            and hasattr(m, "batch_first")
            or type(m).__name__ == "GluonDropout"}


def _without_dropout(symbol: str, quiet: str, watched: str, dtype: str
                     ) -> list[float]:
    """Write the graph without dropout, for MXNet draws masks inside it that
    no one else knows, and the same with what enters the places of dropout as
    its first outputs. Returns the rates, in that order. Arrays that the graph
    makes are of `dtype`."""
    with open(symbol, encoding="utf-8") as file:
        graph = json.load(file)
    rates, heads = [], []
    for node, read in zip(graph["nodes"], load_graph(symbol).nodes):
        texts = {**node.pop("param", {}), **node.pop("attr", {}),
                 **node.pop("attrs", {})}
        rate = read.attributes.get("p", 0.0)
        drops = read.op in _DROPOUTS
        if drops or read.op in _RNNS:
            texts["p"] = "0"
            if rate and (drops or read.attributes["num_layers"] > 1):
                rates.append(rate)
                heads.append(node["inputs"][0])
        if not node["inputs"] and "float" in str(read.attributes.get(
                "dtype", "")):
            texts["dtype"] = dtype
        node["attrs"] = texts
    for path, more in ((quiet, []), (watched, heads)):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**graph, "heads": more + graph["heads"]}, file)
    return rates


def _graphs_places(net: Any, rates: Sequence[float], X: Any, dtype: str
                   ) -> list[Place]:
    if not rates:
        return []
    with mgpu.using_backend("mxnet"):
        replicas = mgpu.initialize(net, [mgpu.cpu(0)], dtype=dtype)
        with mgpu.record():
            outputs = replicas(mgpu.split_and_load(X, replicas.devices))[0]
        return [Place(rate, mgpu.to_numpy(x))
                for rate, x in zip(rates, outputs)]


def _apart(graphs: list[Place], written: list[Place], dtype: str
           ) -> str | None:
    """What to say unless both drop out with the same rates at the same
    places."""
    left, tolerance = list(written), 1e-4 if dtype == "float32" else 1e-8
    for place in graphs:
        found = next((i for i, x in enumerate(left)
                      if place.like(x, tolerance)), None)
        if found is None:
            break
        del left[found]
    else:
        if not left:
            return None
    one, two = (", ".join(f"{p.rate:g}" for p in places) or "no rates"
                for places in (graphs, written))
    return (f"the graph drops out with {one}, what was written with {two}"
            + ", at other places" * (one == two))


# -- what both train on -------------------------------------------------------

def _loss(outputs: Any, targets: Any) -> Any:
    """`L2Loss` of each output, each with another weight, so that outputs
    that are exchanged do not go unseen in their sum."""
    if not isinstance(outputs, (tuple, list)):
        return mgpu.losses.L2Loss()(outputs, targets)
    losses = [mgpu.losses.L2Loss(2.0 ** -i)(y, target) for i, (y, target)
              in enumerate(zip(outputs, targets, strict=True))]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def _batches(net: Any, inputs: Inputs, rows: Mapping[int, int], dtype: str
             ) -> tuple[list[Any], list[Place]]:
    """Random inputs, and targets of the shapes of the outputs; and the places
    of dropout that the first of them pass in the torch network `net`."""
    rng = np.random.default_rng(0)
    drawn = [draw(inputs, dtype, rng, rows) for _ in range(STEPS)]
    drawn[-1] = [x * x.dtype.type(LARGER) if k not in rows
                 and x.dtype.kind == "f" else x
                 for k, x in enumerate(drawn[-1])]
    X = [tuple(arrays) if len(arrays) > 1 else arrays[0] for arrays in drawn]
    places: list[Place] = []
    with mgpu.using_backend("torch"):
        droppers = _droppers(net)
        rates = {path: getattr(layer, rate)
                 for path, (layer, rate) in droppers.items()}
        for layer, rate in droppers.values():
            setattr(layer, rate, 0.0)
        replicas = mgpu.initialize(net, [mgpu.cpu(0)], dtype=dtype)
        off = Masks(0, off=True)
        off.begin(1, [ROWS])

        def mask(x: Any, rate: float, axes: tuple[int, ...], index: int
                 ) -> Any:
            if rate:
                places.append(Place(rate, mgpu.to_numpy(x)))
            return off(x, rate, axes, index)

        def seen(path: str, given: Any, outputs: Any, index: int) -> None:
            if path in rates:
                places.append(Place(rates[path], mgpu.to_numpy(given[0])))
        shards = mgpu.split_and_load(X[0], replicas.devices)
        try:
            with replicas.network.use_masks(mask), \
                    replicas.network.watch_layers(seen), mgpu.record():
                out = replicas(shards)[0]
        except Exception as error:      # of an engine, or of a source
            line = str(error).strip().partition("\n")[0]
            raise Refused(
                "--input gives the shapes of one example of each input; "
                "received what the network refuses, with "
                f"{', '.join(str(x.shape) for x in drawn[0])} "
                f"({type(error).__name__}: {line[:200]}). Correct --input, or "
                "the source.") from error
        several = isinstance(out, (tuple, list))
        shapes = [mgpu.to_numpy(y).shape for y in (out if several else [out])]
    made = []
    for x in X:
        targets = tuple(rng.standard_normal(shape) for shape in shapes)
        made.append((x, targets if several else targets[0]))
    return made, places


def _matched(a: Sequence[str], b: set[str], gluon_names: Mapping[str, str]
             ) -> dict[str, str]:
    """Which parameter of a block is which of the torch network. The names of
    a block are those of the file without what all of them begin with."""
    found: dict[str, str] = {}
    for own, name in gluon_names.items():
        place, _, kind = own.rpartition(".")
        scale = {"weight": "gamma", "bias": "beta"}.get(kind, kind)
        for known in (own, f"{place}.{scale}"):
            if known in b:
                found.setdefault(name.partition(":")[2], known)
    for name in found:
        prefix = name.removesuffix(a[0]) if a else name
        if prefix != name and all(prefix + x in found for x in a):
            return {x: found[prefix + x] for x in a}
    return {x: found[x] for x in a if x in found}
