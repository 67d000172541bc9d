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
from mgpu.cli.errors import CommandError
from mgpu.data.nested import leaves
from mgpu.gluon_io import Graph, load_graph
from mgpu.gluon_io.graph import dense_arrays, entries

#: rows, and steps, of what is compared
ROWS, STEPS = 4, 3
#: how often each batch passes what was written, to see that its dropout stays
PASSES = 3
#: the inputs of the last step are so many times as large, that more of what
#: a function does beyond its middle is seen
LARGER = 10.0
#: operators whose outputs have the dtype that the graph says
_TYPED = ("Cast", "one_hot", "amp_cast", "_npx_one_hot")
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


def with_trace(trace: str, symbol: str, read: Callable[[], Any]) -> Any:
    """What `mgpu.parity` says of a recorded run and of what was written."""
    from mgpu import parity
    drops = any(node.op in ("Dropout", "_npx_dropout")
                for node in load_graph(symbol).nodes)

    def written() -> Any:
        with mgpu.using_backend("torch"):
            return read()
    result = parity.compare_trace(trace, written, native=True, weights="own")
    if drops:
        result.notes.insert(0, "dropout is compared where the run was "
                            "recorded with its masks; where it was off, "
                            "neither its places nor its rates are")
    return result


def with_mxnet(symbol: str, params: str, read: Callable[[], Any],
               inputs: Inputs) -> Any:
    """What it says of MXNet's network and of what was written, whose layers
    compute as they do without mgpu."""
    from mgpu import parity
    graph, arrays = load_graph(symbol), dense_arrays(params)
    # MXNet's gradients of lower layers are wrong in float64; a cast stays
    dtype = "float32" if any(
        node.op in _RNNS and node.attributes["num_layers"] > 1
        or node.op in _TYPED and node.attributes["dtype"] == "float32"
        for node in graph.nodes) else "float64"

    def live(path: str) -> Any:
        with mgpu.using_backend("mxnet"), warnings.catch_warnings():
            # that it does not know the types of inputs
            warnings.simplefilter("ignore", UserWarning)
            return mgpu.from_gluon(path, params)

    def written() -> Any:
        with mgpu.using_backend("torch"):
            return read()
    with find.engines(), tempfile.TemporaryDirectory() as folder:
        quiet, watched, bent = (
            os.path.join(folder, f"{name}-symbol.json")
            for name in ("quiet", "watched", "bent"))
        _without_dropout(symbol, quiet, dtype)
        kinds = _without_dropout(symbol, watched, dtype, watch=True)
        with mgpu.using_backend("torch"):
            net = read()
        batches, torch_net = _batches(net, inputs, embedded(graph, arrays),
                                      dtype, _fixed(graph, dtype))
        X = batches[0][0]
        places = torch_net.places
        unsteady = torch_net.unsteady([X for X, _ in batches])
        found = _outputs(live(watched), X, dtype)
        torch_net.check(found[len(kinds):])
        graphs = [Place(*kind, x) for kind, x in zip(kinds, found)]
        wrong = _apart(graphs, places, dtype) or unsteady
        if places and wrong is None:
            bends = _bends(graphs, dtype)
            _without_dropout(symbol, bent, dtype, bends)
            wrong = _used(
                _outputs(live(bent), X, dtype), torch_net.run(
                    [bends[k] for k in _paired(graphs, places, dtype)]),
                dtype)
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
    if wrong and (result.agrees or unsteady):
        result.verdict, result.reason = "different", wrong
    elif places and result.agrees:
        result.notes.insert(1, "dropout is off; its rates agree, what enters "
                            "it, and where its outputs go (places: "
                            f"{len(places)})")
    return result


# -- places of dropout --------------------------------------------------------

class Place(NamedTuple):
    """Where something is dropped: the rate, the axes along which a mask is
    one, what else is particular, and the values that enter."""

    rate: float
    axes: tuple[int, ...]
    kind: str
    values: np.ndarray

    def like(self, other: "Place", tolerance: float) -> bool:
        """In whichever order of axes: each value, or sum of those that go
        together, is dropped by itself."""
        return not round(self.rate - other.rate, 6) \
            and self.kind == other.kind and all(
                _close(np.sort(x, None), np.sort(y, None), tolerance)
                for x, y in ((self.values, other.values),
                             (self._sums(), other._sums())))

    def _sums(self) -> np.ndarray:
        return np.asarray(self.values.sum(self.axes))


def _tolerance(dtype: str) -> float:
    # MXNet computes GELU, SELU and others in float32 for float64 too.
    return 1e-4 if dtype == "float32" else 1e-5


def _close(x: np.ndarray, y: np.ndarray, tolerance: float) -> bool:
    largest = np.abs(x[np.isfinite(x)]).max(initial=1e-30)
    return x.shape == y.shape and bool(np.allclose(
        x, y, rtol=0, atol=tolerance * largest, equal_nan=True))


def _without_dropout(symbol: str, path: str, dtype: str,
                     bends: Sequence[float] = (), watch: bool = False
                     ) -> list[tuple[float, tuple[int, ...], str]]:
    """Write the graph without dropout, for MXNet draws masks inside it that
    no one else knows. Returns what a `Place` begins with, of each; with
    `watch` the values that enter them are the first outputs. With `bends`
    dropout is `_bent` instead. Arrays that the graph makes are of `dtype`."""
    with open(symbol, encoding="utf-8") as file:
        graph = json.load(file)
    kinds: list[tuple[float, tuple[int, ...], str]] = []
    heads = []
    for node, read in zip(graph["nodes"], load_graph(symbol).nodes):
        texts = {**node.pop("param", {}), **node.pop("attr", {}),
                 **node.pop("attrs", {})}
        a = read.attributes
        rate, drops = a.get("p", 0.0), read.op in _DROPOUTS
        if drops or read.op in _RNNS:
            texts["p"] = "0"
            if rate and (drops or a["num_layers"] > 1):
                if drops and bends:
                    node["op"] = "smooth_l1"
                    texts = {"scalar": repr(bends[len(kinds)])}
                kinds.append((rate, tuple(a.get("axes") or ()),
                              a["mode"] if drops else "recurrent"))
                heads.append(node["inputs"][0])
        if not node["inputs"] and "float" in str(a.get("dtype", "")):
            texts["dtype"] = dtype
        node["attrs"] = texts
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**graph, "heads": heads * watch + graph["heads"]}, file)
    return kinds


def _outputs(net: Any, X: Any, dtype: str) -> list[np.ndarray]:
    """Of a training pass in MXNet."""
    with mgpu.using_backend("mxnet"):
        replicas = mgpu.initialize(net, [mgpu.cpu(0)], dtype=dtype)
        with mgpu.record():
            outputs = replicas(mgpu.split_and_load(X, replicas.devices))[0]
        return [mgpu.to_numpy(x) for x in leaves(outputs)]


def _bends(places: Sequence[Place], dtype: str) -> list[float]:
    """A number for `_bent` at each place; the same for places that are
    alike."""
    alike = [next(j for j, x in enumerate(places)
                  if place.like(x, _tolerance(dtype))) for place in places]
    return [1 + j / len(places) for j in alike]


def _bent(x: np.ndarray, bend: float) -> np.ndarray:
    """MXNet's ``smooth_l1``, of each value by itself: unlike a factor, no
    layer behind it takes it back."""
    square = bend * bend
    return np.where(np.abs(x) < 1 / square, 0.5 * square * x * x,
                    np.abs(x) - 0.5 / square)


def _paired(graphs: Sequence[Place], written: Sequence[Place], dtype: str
            ) -> list[int]:
    """Which place of the graph each one of `written` is; -1 for none."""
    left = list(range(len(graphs)))
    found = []
    for place in written:
        k = next((k for k in left
                  if graphs[k].like(place, _tolerance(dtype))), -1)
        found.append(k)
        if k >= 0:
            left.remove(k)
    return found


def _apart(graphs: list[Place], written: list[Place], dtype: str
           ) -> str | None:
    """What to say unless both drop out with the same rates at the same
    places."""
    if len(graphs) == len(written) and -1 not in _paired(graphs, written,
                                                         dtype):
        return None
    one, two = (", ".join(f"{p.rate:g}" for p in places) or "no rates"
                for places in (graphs, written))
    return (f"the graph drops out with {one}, what was written with {two}"
            + ", at other places or along other axes" * (one == two))


def _used(graphs: list[np.ndarray], written: list[np.ndarray], dtype: str
          ) -> str | None:
    """What to say unless what comes out of dropout goes the same ways: both
    networks have bent the values there."""
    if len(graphs) == len(written) and all(
            _close(x, y, _tolerance(dtype)) for x, y in zip(graphs, written)):
        return None
    return ("what comes out of a dropout is not used as in the graph: with "
            "other values there the outputs differ")


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


class _Written:
    """A torch network, its first training pass, and the places of dropout
    that it passes."""

    def __init__(self, net: Any, X: Any, dtype: str):
        try:
            mgpu.get_backend().network(net).check_visible()
        except ValueError as error:
            raise CommandError(str(error)) from error
        self._replicas = mgpu.initialize(net, [mgpu.cpu(0)], dtype=dtype)
        self._inner = {path: (layer, getattr(layer, rate)) for path, layer,
                       rate in self._replicas.network.inner_dropout()}
        requests = self._replicas.grad_reqs().values()
        if requests and {*requests} == {"null"}:
            raise CommandError(
                "a check trains what was written; received a network whose "
                "parameters are all frozen. Freeze them where the network is "
                "used.")
        self._shards = mgpu.split_and_load(X, self._replicas.devices)
        self.places: list[Place] = []
        self.outputs: list[np.ndarray] = []

    def check(self, expected: Sequence[np.ndarray]) -> None:
        """Raise CommandError unless the outputs are those of the graph."""
        one, two = ([x.shape for x in outputs]
                    for outputs in (expected, self.outputs))
        if one != two or self.several != (len(one) > 1):
            raise CommandError(
                "what was written returns the outputs of the graph; received "
                f"{_counted(two, self.several)} against {_counted(one)}. "
                "Correct what its forward returns.")

    def unsteady(self, inputs: Sequence[Any]) -> str | None:
        """What to say where other passes, of `inputs`, drop out otherwise
        than the first."""
        first = self._kinds()
        kept = self._shards, self.places, self.outputs
        try:
            for X in [*inputs] * PASSES:
                self._shards = mgpu.split_and_load(X, self._replicas.devices)
                self.run(backward=True)
                if self._kinds() != first:
                    return ("what was written drops out with "
                            f"{first} in one pass, and with {self._kinds()} "
                            "in another")
        finally:
            self._shards, self.places, self.outputs = kept
        return None

    def _kinds(self) -> str:
        """The rate of each place, and what else is particular of it, in
        their order."""
        return ", ".join(
            " ".join(map(str, (f"{p.rate:g}", p.kind, *p.axes)))
            for p in self.places) or "no rates"

    def run(self, bends: Sequence[float] = (), backward: bool = False
            ) -> list[np.ndarray]:
        """The outputs; with `bends` dropout is `_bent`, place by place. With
        `backward` there is a backward pass too, of their sum."""
        places: list[Place] = []

        def mask(x: Any, rate: float, axes: tuple[int, ...], kind: str
                 ) -> Any:
            values = mgpu.to_numpy(x)
            factor = np.ones_like(values)
            if rate:
                if bends and kind != "recurrent":
                    factor = _bent(values, bends[len(places)]) / np.where(
                        values == 0, 1, values)
                places.append(Place(rate, axes, kind, values))
            engine = mgpu.get_backend()
            with engine.scope(recording=False):
                return engine.put(factor, x)

        def seen(path: str, given: Any, outputs: Any, index: int) -> Any:
            if path not in self._inner:
                return None
            layer, rate = self._inner[path]
            if not hasattr(layer, "axes"):
                mask(given[0], rate, (), "recurrent")
                return None
            return [outputs * mask(given[0], rate, layer.axes, "always")]
        network = self._replicas.network
        with mgpu.using_backend("torch"), network.watch_layers(seen), \
                network.without_inner_dropout(), \
                network.use_masks(lambda x, rate, axes, index: mask(
                    x, rate, axes, "training")), mgpu.record():
            out = self._replicas(self._shards)[0]
            self.several = isinstance(out, (tuple, list))
            self.places = places
            if backward and self._replicas.params():
                mgpu.backward(sum(x.sum() for x in leaves(out)))
        arrays = out if self.several else [out]
        if not all(mgpu.get_backend().is_native(y) for y in arrays):
            kinds = ", ".join(type(y).__name__ for y in arrays)
            raise CommandError(
                "what was written returns an array, or a tuple of arrays; "
                f"received {type(out).__name__}" + f" of {kinds}"
                * self.several + ". Correct what its forward returns.")
        self.outputs = [mgpu.to_numpy(y) for y in arrays]
        return self.outputs


def _counted(shapes: Sequence[tuple[int, ...]], several: bool = False) -> str:
    count = len(shapes)
    return (f"{count} output{'s' * (count != 1)}"
            + " in a tuple" * (several and count == 1)
            + f" ({', '.join(map(str, shapes))})")


def _fixed(graph: Graph, dtype: str) -> str:
    """What to say of another floating dtype than that of a check."""
    return next((
        f"The graph fixes {node.attributes['dtype']} at the node "
        f"{node.name!r}, and a check is in {dtype}: record a run with mgpu "
        "trace record, and pass that as --trace" for node in graph.nodes
        if node.op in _TYPED and "float" in node.attributes["dtype"]
        and node.attributes["dtype"] != dtype),
        "Correct --input, or the source")


def _batches(net: Any, inputs: Inputs, rows: Mapping[int, int], dtype: str,
             advice: str) -> tuple[list[Any], _Written]:
    """Random inputs, and targets of the shapes of the outputs; and the torch
    network `net`, after a pass of the first of them. `advice`: the fix if
    that pass raises."""
    rng = np.random.default_rng(0)
    drawn = [draw(inputs, dtype, rng, rows) for _ in range(STEPS)]
    drawn[-1] = [x * x.dtype.type(LARGER) if k not in rows
                 and x.dtype.kind == "f" else x
                 for k, x in enumerate(drawn[-1])]
    X = [tuple(arrays) if len(arrays) > 1 else arrays[0] for arrays in drawn]
    with mgpu.using_backend("torch"):
        try:
            written = _Written(net, X[0], dtype)
            shapes = [y.shape for y in written.run()]
        except CommandError:
            raise
        except Exception as error:      # of a backend, or of a source
            line = str(error).strip().partition("\n")[0]
            raise CommandError(
                "--input gives the shapes of one example of each input; "
                "the network raises with "
                f"{', '.join(str(x.shape) for x in drawn[0])} "
                f"({type(error).__name__}: {line[:200]}). {advice}."
            ) from error
    made = []
    for x in X:
        targets = tuple(rng.standard_normal(shape) for shape in shapes)
        made.append((x, targets if written.several else targets[0]))
    return made, written


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
