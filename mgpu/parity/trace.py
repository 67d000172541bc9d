"""Golden traces: one side of a comparison in a file.

`record` trains a network, for example under MXNet, and keeps what its steps
showed. `compare_trace` takes the same steps with another network, for
example on a machine where MXNet cannot be installed, and compares. A file is
safetensors: arrays and JSON text, nothing that runs when it is read.
"""
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mgpu import files, losses, optimizers, trainer_states
from mgpu.backends import base, messages
from mgpu.losses import SoftmaxCrossEntropyLoss
from mgpu.parity import matching
from mgpu.parity.comparison import (TOLERANCE, Batches, Comparison, Evidence,
                                    Result, _check, _rows_of,
                                    check_deterministic, endless)
from mgpu.parity.diagnosis import ROWS, diagnose
from mgpu.parity.matching import Entry
from mgpu.parity.measure import Gap
from mgpu.parity.sides import (Call, CannotRun, Masks, Record, Runner, Side,
                               State, translate)
from mgpu.trainer_states import TrainerStates

FORMAT = "mgpu trace 1"
#: steps that are kept at most where the rate or the rows change all the time
MOST = 8
#: an array's summary: values at so many places, and means of so many parts
PLACES, PARTS = 64, 61


class Recording(NamedTuple):
    """What `record` wrote: the file, all steps taken, those that are kept,
    its bytes, and the digest."""

    file: str
    steps: int
    kept: list[int]
    size: int
    sha256: str


# -- the file -----------------------------------------------------------------

def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("traces need safetensors; run pip install "
                          "'mgpu[trace]'.") from error
    return safetensors


class _Writer:
    """Arrays under numbers, and JSON that names them."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._known: dict[bytes, str] = {}

    def put(self, x: Any) -> dict[str, Any]:
        """Nothing is lost: an array of one value is kept as that value, and
        float64 as float32 where all its values are of float32."""
        x = np.asarray(x)
        if x.dtype.name not in messages.DTYPES:
            raise TypeError(f"a trace holds {', '.join(messages.DTYPES)}; "
                            f"received an array of {x.dtype}. Give numbers.")
        node = {"shape": list(x.shape), "dtype": x.dtype.name}
        flat = np.ascontiguousarray(x).reshape(-1)
        bits = flat.view(f"u{flat.itemsize}")
        if flat.size and (bits == bits[0]).all():
            flat = flat[:1]
        elif flat.dtype == np.float64:
            with np.errstate(over="ignore", invalid="ignore"):
                small = flat.astype(np.float32)
            if np.array_equal(small.astype(np.float64), flat, equal_nan=True):
                flat = small
        key = hashlib.sha256(flat.dtype.str.encode() + flat.tobytes()).digest()
        if key not in self._known:
            self._known[key] = str(len(self.arrays))
            self.arrays[self._known[key]] = flat
        return {**node, "array": self._known[key]}

    def put_all(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        return {name: self.put(x) for name, x in values.items()}

    def tree(self, data: Any) -> Any:
        """A batch: arrays in tuples, lists and dicts."""
        if isinstance(data, dict):
            return {"dict": {str(k): self.tree(v) for k, v in data.items()}}
        if isinstance(data, tuple) or isinstance(data, list) and any(
                hasattr(v, "shape") for v in data):
            kind = "list" if isinstance(data, list) else "tuple"
            return {kind: [self.tree(v) for v in data]}
        return self.put(messages.host_array(data) if isinstance(data, list)
                        else data)

    def state(self, state: State) -> dict[str, Any]:
        memory = state.optimizer
        return {"values": self.put_all(state.values), "optimizer": {
            **memory._asdict(), "slots": [
                [name, slot, self.put(x)]
                for (name, slot), x in memory.slots.items()]}}

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [[call.path, *([self.put(x) for x in xs] for xs in call[1:])]
                for call in calls]

    def write(self, file: str, header: dict[str, Any]) -> str:
        """Whole or not at all; the digest."""
        text = json.dumps(header, default=repr)
        digest = _digest(text, sorted(self.arrays), self.arrays.__getitem__)
        with files.part_of(file) as part:
            _safetensors().numpy.save_file(self.arrays, part, {
                "format": FORMAT, "trace": text, "sha256": digest})
        return digest


def _digest(text: str, names: Sequence[str],
            read: Callable[[str], np.ndarray]) -> str:
    """SHA-256 of the text and of all arrays."""
    total = hashlib.sha256(text.encode())
    for name in names:
        x = read(name)
        total.update(f"|{name} {x.dtype.str} {x.shape}|".encode())
        total.update(x.tobytes())
    return total.hexdigest()


class _Reader:
    """A checked file. Arrays are read when they are asked for.

    Raises
    ------
    ValueError
        No trace, a damaged one, or one of another version.
    OSError
        The file cannot be opened.
    """

    def __init__(self, file: str):
        library = _safetensors()
        with open(file, "rb"):      # its own error for what is not there
            pass
        try:
            self._open = library.safe_open(file, "numpy")
            about = self._open.metadata() or {}
        except library.SafetensorError as error:
            raise self._refused(file, error) from error
        found = about.get("format")
        if found != FORMAT:
            raise ValueError(
                f"expected a trace of the format {FORMAT!r}; {file!r} has "
                f"{found!r}. Record it again with this version of mgpu, or "
                "read it with the one that wrote it.")
        text, self.sha256 = about.get("trace", ""), about.get("sha256")
        if _digest(text, sorted(self._open.keys()),
                   self._open.get_tensor) != self.sha256:
            raise self._refused(file, "its contents do not have the SHA-256 "
                                      "that it names")
        self.header = json.loads(text)

    @staticmethod
    def _refused(file: str, why: Any) -> ValueError:
        return ValueError(f"expected a whole file of mgpu.parity.record; "
                          f"{file!r} is not one, or is damaged ({why}). Copy "
                          "or record it again.")

    def get(self, node: Mapping[str, Any]) -> np.ndarray:
        flat, shape = self._open.get_tensor(node["array"]), node["shape"]
        flat = flat.astype(node["dtype"])
        if flat.size == 1:
            return np.full(shape, flat[0])
        return flat.reshape(shape)

    def get_all(self, nodes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.get(node) for name, node in nodes.items()}

    def tree(self, node: Mapping[str, Any]) -> Any:
        if "dict" in node:
            return {k: self.tree(v) for k, v in node["dict"].items()}
        for kind in (list, tuple):
            if kind.__name__ in node:
                return kind(map(self.tree, node[kind.__name__]))
        return self.get(node)

    def state(self, node: Mapping[str, Any]) -> State:
        memory = node["optimizer"]
        return State(self.get_all(node["values"]), TrainerStates(**{
            **memory, "slots": {(name, slot): self.get(x)
                                for name, slot, x in memory["slots"]}}))

    def calls(self, nodes: Sequence[Any]) -> list[Call]:
        return [Call(path, *([self.get(x) for x in xs] for xs in rest))
                for path, *rest in nodes]


# -- what is kept -------------------------------------------------------------

def _summary(x: np.ndarray) -> np.ndarray:
    """Some values of `x`, and means of interleaved parts of it, so that any
    change of one value shows: two arrays with equal summaries are taken for
    equal. Short arrays stand for themselves."""
    x = np.asarray(x, np.float64).reshape(-1)
    if x.size <= PLACES + PARTS:
        return x
    places = np.linspace(0, x.size - 1, PLACES).astype(int)
    return np.concatenate([x[places], [x[i::PARTS].mean()
                                       for i in range(PARTS)]])


def _summaries(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """And their sizes, so that others are other arrays."""
    return [*map(_summary, arrays), np.array([float(x.size) for x in arrays])]


def _summarised(calls: Sequence[Call]) -> list[Call]:
    return [Call(c.path, _summaries(c.inputs), _summaries(c.outputs))
            for c in calls]


def _draws(seed: int) -> list[float]:
    """What NumPy draws for dropout masks: its streams may change between
    versions (NEP 19), and a trace would then compare other masks."""
    return np.random.default_rng([seed, 1, 0]).random(4).tolist()


def _text_of(loss: Any) -> Any:
    """A loss of mgpu by name and options; of any other the name alone."""
    name = type(loss).__name__
    if getattr(losses, name, None) is type(loss):
        return {"name": name, "options": {
            k.lstrip("_"): v for k, v in vars(loss).items()}}
    return {"name": getattr(loss, "__name__", repr(loss))}


def record(a: Any, *, batches: Batches, file: Any,
           steps: int | None = None, keep: Sequence[int] | None = None,
           loss: Callable | None = None, optimizer: Any = "sgd",
           optimizer_params: Mapping[str, Any] | None = None,
           semantics: str = "gluon", devices: Any = 1,
           batch_norm: str = "per_device", native: bool = False,
           dtype: str = "float64", dropout: str = "masks", seed: int = 0,
           progress: Callable[[int, int], None] | None = None
           ) -> Recording:
    """Train one side of a comparison and keep its steps in a file.

    Parameters
    ----------
    a : network, function that makes one, or Side
    batches, steps, loss, optimizer, optimizer_params, semantics, devices, \
batch_norm, native, dtype, dropout, seed, progress
        As for `compare`.
    file : path
        Of safetensors; written whole or not at all.
    keep : sequence of int, optional
        Numbers of the steps to keep, from 1. Default: the first, the last,
        and those whose learning rate or number of rows is not that of the
        step before (8 in all at most).

    Returns
    -------
    Recording

    Raises
    ------
    ImportError
        Without safetensors (extra ``trace``).
    ValueError, TypeError
        As `compare` does; a step to keep that is not taken.

    Notes
    -----
    A kept step holds the batch, the state before and after (values and the
    optimiser's memory), gradients, outputs, losses and summaries of each
    layer's calls, in the dtype of the comparison. An array that is there
    twice is kept once. The network gets its values and dtype back.
    """
    _safetensors()
    _check(dropout=(dropout, ("masks", "off")),
           dtype=(dtype, tuple(TOLERANCE)))
    file = os.fspath(file)
    files.check_folder(file, "file=")
    batches, steps = endless(batches, steps)
    wanted = None if keep is None else sorted(set(keep))
    if wanted is not None and (not wanted or not set(wanted) <= set(
            range(1, steps + 1))):
        raise ValueError(f"steps to keep are numbers from 1 to {steps}; "
                         f"received keep={list(keep)!r}. Name one or more "
                         "of these.")
    side = (a if isinstance(a, Side) else Side(a)).over(Side(
        None, devices, loss or SoftmaxCrossEntropyLoss(), optimizer,
        optimizer_params, semantics, batch_norm=batch_norm, native=native,
        seed=seed))
    writer, kept, rates = _Writer(), [], []
    runner: Runner | None = None
    try:
        for number, (X, y) in enumerate(batches, 1):
            if runner is None:
                runner = Runner(side, X, dtype, Masks(seed, dropout == "off"))
                check_deterministic(runner, X, y)
                before, last = runner.state(), None
                moved = _rates(runner)
            one = runner.step(X, y, number)
            before_it, moved = moved, _rates(runner)
            changed = last is not None and number != steps \
                and (one.rate, sum(one.rows)) != last \
                and len(kept) < MOST - 1
            if number in wanted if wanted is not None else (
                    number in (1, steps) or changed):
                runner.load(before)
                calls = runner.trace(X, y, number)
                runner.load(one.after)
                if not kept:
                    first = before, X
                kept.append(_step_node(writer, number, X, y, before, one,
                                       calls, full=not kept))
                kept[-1]["before"]["rates"] = before_it
                kept[-1]["after"]["rates"] = moved
            rates.append(one.rate)
            last, before = (one.rate, sum(one.rows)), one.after
            if progress is not None:
                progress(number, steps)
        header = {
            "side": _side_node(runner), "dtype": dtype, "seed": seed,
            "dropout": dropout, "draws": _draws(seed), "steps": steps,
            "rates": rates, "kept": kept,
            "probe": _probe_node(writer, runner, *first)}
    finally:
        if runner is not None:
            runner.restore()
    digest = writer.write(file, header)
    return Recording(file, steps, [node["step"] for node in kept],
                     os.path.getsize(file), digest)


def _rates(runner: Runner) -> dict[str, float]:
    """What the last update moved each parameter with. Read at once: a
    schedule may not go back."""
    return {e.name: float(runner.last_rate(e.name,
                                           runner.trainer.num_update))
            for e in runner.entries if e.trained}


def _step_node(writer: _Writer, number: int, X: Any, y: Any, before: State,
               one: Record, calls: list[Call], full: bool) -> dict[str, Any]:
    node = {
        "step": number, "X": writer.tree(X), "y": writer.tree(y),
        "before": writer.state(before), "after": writer.state(one.after),
        "outputs": [writer.put(x) for x in one.outputs],
        "losses": writer.put(one.losses),
        "gradients": writer.put_all(one.gradients), "apart": one.apart,
        "rate": one.rate, "rows": one.rows, "divisor": one.divisor,
        "calls": writer.calls(_summarised(calls))}
    if full:    # what the diagnosis of a layer reads
        node["rows_of_calls"] = writer.calls([
            Call(c.path, [], [x[:ROWS] for x in c.outputs]) for c in calls])
    return node


def _side_node(runner: Runner) -> dict[str, Any]:
    trainer, side = runner.trainer, runner.side
    return {
        "name": runner.name, "options": runner.options(),
        "entries": [e._asdict() for e in runner.entries],
        "layers": [layer._asdict() for layer in runner.layers],
        "slots": runner.slots(), "loss": _text_of(side.loss),
        "optimizer": {"name": runner.rule,
                      "options": asdict(trainer.optimizer)},
        "scheduled": trainer.lr_scheduler is not None,
        "semantics": side.semantics, "batch_norm": side.batch_norm,
        "native": bool(side.native), "prepare": side.prepare is not None,
        "devices": len(runner.devices),
        "lr_mult": trainer.lr_mult, "wd_mult": trainer.wd_mult,
        "params": [[p.name, p.kind, p.lr_mult, p.wd_mult, p.grad_req]
                   for p in runner.replicas.params()]}


def _probe_node(writer: _Writer, runner: Runner, before: State, X: Any
                ) -> dict[str, Any]:
    run = runner.probe(_rows_of(X, 2))
    outputs, _ = run(_of_one_device(before, runner.entries), False)
    _, calls = run(matching.drawn(runner.entries), True)
    return {"outputs": [writer.put(x) for x in outputs],
            "calls": [[list(names), writer.put(_summary(x))]
                      for names, x in calls]}


def _of_one_device(state: State, entries: Sequence[Entry]
                   ) -> dict[str, np.ndarray]:
    return {e.name: state.values[e.name][0] if e.kind.startswith("running")
            else state.values[e.name] for e in entries}


# -- a side that is read from a file ------------------------------------------

class Recorded:
    """Stands for the `Runner` of side `a`: it answers for the kept steps."""

    def __init__(self, file: str):
        reader = _Reader(file)
        header = reader.header
        side = header["side"]
        self._reader, self._steps = reader, {
            node["step"]: node for node in header["kept"]}
        self.header, self.file, self.sha256 = header, file, reader.sha256
        self.name, self.dtype = side["name"], header["dtype"]
        self.entries = [Entry(**{**e, "shape": tuple(e["shape"]),
                                 "aliases": tuple(e["aliases"])})
                        for e in side["entries"]]
        self.layers = [base.Layer(x["path"], x["kind"], _tuples(x["options"]),
                                  tuple(x["parameters"]))
                       for x in side["layers"]]
        self.devices = side["options"]["devices"]
        self.rule = side["optimizer"]["name"]
        self.optimizer = _optimizer(side["optimizer"])
        self.side = Side(None, semantics=side["semantics"],
                         batch_norm=side["batch_norm"],
                         native=side["native"], loss=_loss(side["loss"]),
                         prepare=_no_data_path if side["prepare"] else None)
        params = [SimpleNamespace(name=n, kind=k, lr_mult=lr, wd_mult=wd,
                                  grad_req=request)
                  for n, k, lr, wd, request in side["params"]]
        self.replicas = SimpleNamespace(params=lambda: params)
        self.trainer = SimpleNamespace(
            optimizer=self.optimizer,
            multipliers=lambda p: (
                side["lr_mult"].get(p.name, p.lr_mult),
                side["wd_mult"].get(p.name, p.wd_mult)),
            gluon_order=lambda: trainer_states.by_layer(
                [p.name for p in params]))
        self._rates: dict[int, dict[str, float]] = {}
        for node in header["kept"]:
            for at in (node["before"], node["after"]):
                self._rates[at["optimizer"]["num_update"]] = at["rates"]
        self._now = self.before(min(self._steps))

    def __getattr__(self, name: str) -> Any:
        raise CannotRun(f"side a is a trace, which has no {name!r}")

    def options(self) -> dict[str, Any]:
        return {**self._reader.header["side"]["options"],
                "trace": os.path.basename(self.file), "sha256": self.sha256}

    def kept(self) -> list[int]:
        return sorted(self._steps)

    def batch(self, step: int) -> tuple[Any, Any]:
        node = self._steps[step]
        return self._reader.tree(node["X"]), self._reader.tree(node["y"])

    def before(self, step: int) -> State:
        return self._state(self._steps[step]["before"])

    def _state(self, node: dict[str, Any]) -> State:
        return self._reader.state(node)

    def state(self) -> State:
        return self._now

    def load(self, state: State, memory: bool = True) -> None:
        """A trace is what it is."""

    def restore(self) -> None:
        """Nothing was changed."""

    def slots(self) -> list[str]:
        return self._reader.header["side"]["slots"]

    def last_rate(self, name: str, num_update: int) -> float:
        return self._rates[num_update][name]

    def step(self, X: Any, y: Any, step: int) -> Record:
        node, get = self._steps[step], self._reader
        return Record(
            [get.get(x) for x in node["outputs"]], get.get(node["losses"]),
            get.get_all(node["gradients"]), self._state(node["after"]),
            node["apart"], node["rate"], node["rows"], node["divisor"])

    def summaries(self, step: int) -> list[Call]:
        return self._reader.calls(self._steps[step]["calls"])

    def rows_of_calls(self, step: int) -> list[Call]:
        """Outputs of the first rows; none but in the first step kept."""
        return self._reader.calls(self._steps[step].get("rows_of_calls", ()))

    def probe(self, X: Any) -> Callable:
        """Two passes were recorded: with the values before the first kept
        step, and with those of `matching.drawn`."""
        node, get = self._reader.header["probe"], self._reader.get
        own = _of_one_device(self._now, self.entries)

        def run(values: Mapping[str, np.ndarray], traced: bool
                ) -> tuple[Any, Any]:
            expected = matching.drawn(self.entries) if traced else own
            if any(not np.array_equal(x, values[n], equal_nan=True)
                   for n, x in expected.items()):
                raise ValueError("a trace holds no pass with these values.")
            if traced:
                return [], [(tuple(names), get(x))
                            for names, x in node["calls"]]
            return [get(x) for x in node["outputs"]], []
        return run


def _no_data_path(X: Any, y: Any) -> Any:
    raise CannotRun("side a is a trace, which has no 'prepare'")


def _tuples(x: Any) -> Any:
    """Options of layers hold tuples, of which JSON makes lists."""
    if isinstance(x, dict):
        return {k: _tuples(v) for k, v in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _optimizer(node: Mapping[str, Any]) -> optimizers.Optimizer | None:
    """A file may name the optimisers that mgpu has, and nothing else."""
    known = {c.__name__: c for c in vars(optimizers).values()
             if isinstance(c, type) and issubclass(c, optimizers.Optimizer)}
    cls = known.get(node["name"])
    return None if cls is None else cls(**node["options"])


def _loss(node: Mapping[str, Any]) -> losses.Loss | None:
    cls = getattr(losses, node["name"], None)
    if "options" not in node or not isinstance(cls, type) \
            or not issubclass(cls, losses.Loss):
        return None
    return cls(**node["options"])


# -- the comparison -----------------------------------------------------------

class _Replay(Comparison):
    """Lock-step where `a` is a trace: what must be run again is run on `b`
    instead."""

    def __init__(self, a: Recorded, b: Side, **options: Any):
        #: states before steps in which equal things arrived at the layers
        self._equal: dict[int, State] = {}
        super().__init__(a, b, **options)

    def _runner(self, side: Any) -> Any:
        return side if isinstance(side, Recorded) else super()._runner(side)

    def _probes(self, X: Any) -> Sequence[Callable]:
        run_b = self.b.probe(X)

        def summarised(values: Mapping[str, np.ndarray], traced: bool
                       ) -> tuple[Any, Any]:
            outputs, calls = run_b(values, traced)
            return outputs, [(names, _summary(x)) for names, x in calls]
        return self.a.probe(X), summarised

    def _check_deterministic(self) -> None:
        check_deterministic(self.b, *self.first_batch)
        if any(layer.kind == "dropout" for layer in
               (*self.a.layers, *self.b.layers)):
            self.notes.append("dropout: " + self.settings["dropout"])

    def _walk(self) -> Any:
        for number in self.a.kept():
            yield (number, *self.a.batch(number), self.a.before(number))

    def _again(self, start: State, X: Any, y: Any, one: Record, two: Record,
               number: int) -> list[Gap]:
        self.b.load(translate(start, self.plan, self.a, self.b), self._memory)
        return self.compare_records(number, two, self._in_terms_of_a(
            self.b.step(X, y, number)))

    def _calls(self, X: Any, y: Any, number: int
               ) -> tuple[list[Call], list[Call]]:
        self._live = self.b.trace(X, y, number)
        self._seen = self.a.summaries(number), _summarised(self._live)
        return self._seen

    def _evidence(self, number: int, *rest: Any) -> tuple[Evidence, list[Gap]]:
        evidence, gaps = super()._evidence(number, *rest)
        place = evidence.location
        if place is not None:
            # Of a summary, the place of the largest difference means nothing.
            gaps = [g._replace(index=()) for g in gaps]
            evidence.location = place._replace(**self._whole(place, number))
        if place is None or place.inputs_agree:
            # As far as the diagnosis looks, the layers of both get the same.
            self._equal[number] = evidence.before
        self.a.traces = self._calls_of_b
        return evidence, gaps

    def _calls_of_b(self, X: Any, y: Any, step: int) -> list[list[Call]]:
        """By the paths of `a`, where parameters tell which layer is which."""
        if step not in self._equal:
            raise CannotRun("side a is a trace, which has no 'traces'")
        owner = {n: layer.path for layer in self.a.layers
                 for n in layer.parameters}
        paths = {layer.path: owner[pair.a] for pair in self.plan.pairs
                 for layer in self.b.layers if pair.b in layer.parameters
                 and pair.a in owner}
        self.b.load(translate(self._equal[step], self.plan, self.a, self.b),
                    self._memory)
        return [[call._replace(path=paths.get(call.path, call.path))
                 for call in calls] for calls in self.b.traces(X, y, step)]

    def _diagnose(self, result: Result) -> list[Any]:
        try:
            return diagnose(result)
        except CannotRun as error:
            result.notes.append(f"no cause is named: {error}")
            return []

    def _whole(self, place: Any, number: int) -> dict[str, Call]:
        """The calls for the diagnosis. Where the inputs agree those of `b`
        stand for both; of outputs the trace has the first rows."""
        rows = self.a.rows_of_calls(number)
        # the same call of the same layer, of those that have several
        at, other = (next(i for i, c in enumerate(calls) if c is call)
                     for calls, call in zip(self._seen, (place.call_a,
                                                         place.call_b)))
        live = self._live[other]
        if not rows or not place.inputs_agree:
            return {"call_a": Call(place.call_a.path, [], []), "call_b": live}
        return {"call_a": Call(place.call_a.path, live.inputs,
                               rows[at].outputs),
                "call_b": live._replace(outputs=[
                    x[:ROWS] for x in live.outputs])}


def compare_trace(file: Any, b: Any, *, loss: Callable | None = None,
                  optimizer: Any = None,
                  optimizer_params: Mapping[str, Any] | None = None,
                  semantics: str | None = None, devices: Any = None,
                  batch_norm: str | None = None, native: bool = False,
                  map: Mapping[str, matching.Target] | None = None,
                  rules: matching.Rules = (),
                  tolerance: float | None = None,
                  progress: Callable[[int, int], None] | None = None
                  ) -> Result:
    """Compare how a network trains with a run that `record` kept.

    The lock-step of `compare` for the steps in the file. Neither the
    framework of the recorded side nor its network is needed.

    Parameters
    ----------
    file : path
        Of `record`. Nothing in it is executed: it names losses and
        optimisers of mgpu, or none.
    b : network, function that makes one, or Side
    loss, optimizer, optimizer_params, semantics, devices, batch_norm
        Of `b`, where they are not to be those of the file. Where the
        recorded side had a schedule, `b` without one takes the rates of the
        file.
    native, map, rules, tolerance, progress
        As for `compare`.

    Returns
    -------
    Result
        As of `compare`. A difference is judged against what a change of the
        last bits does to `b`. Layers are compared by summaries: 64 of the
        values, and means of 61 parts.

    Raises
    ------
    ImportError
        Without safetensors (extra ``trace``).
    ValueError
        A file that is damaged, no trace or of another version; another
        number of devices; a loss that a file cannot hold. Nothing has run
        then. And what `compare` refuses.
    """
    a = Recorded(os.fspath(file))
    header = a.header
    side = b if isinstance(b, Side) else Side(b)
    side = side.over(Side(
        None, devices or len(a.devices), loss or a.side.loss,
        optimizer or a.optimizer, optimizer_params,
        semantics or a.side.semantics, batch_norm=batch_norm or
        a.side.batch_norm, native=native, seed=header["seed"]))
    for what, value in (("loss", side.loss), ("optimizer", side.optimizer)):
        if value is None:
            raise ValueError(
                f"a file holds losses and optimisers of mgpu alone; "
                f"received a trace of {header['side'][what]['name']}. Pass "
                f"{what}=.")
    count = side.devices if isinstance(side.devices, int) \
        else len(side.devices)
    if count != len(a.devices):
        raise ValueError(
            f"the trace was recorded on {len(a.devices)} devices, and rows "
            f"and statistics are divided among them; received {count}. Use "
            "as many, or record another trace.")
    if _draws(header["seed"]) != header["draws"] \
            and header["dropout"] == "masks" \
            and any(layer.kind == "dropout" for layer in a.layers):
        raise ValueError(
            "dropout masks are drawn in NumPy; received a trace recorded "
            "with a NumPy whose generator draws other numbers. Use the "
            "NumPy that recorded it, or record with dropout='off'.")
    notes = [f"a is a trace of {header['steps']} steps recorded with "
             f"{header['side']['options']['engine']}; compared are steps "
             f"{', '.join(str(n) for n in a.kept())}"]
    if header["side"]["scheduled"] and side.lr_scheduler is None:
        rates = header["rates"]
        side.lr_scheduler = lambda n: rates[min(n, len(rates)) - 1]
        notes.append("b follows the learning rates of the trace")
    work = _Replay(
        a, side, batches=[a.batch(a.kept()[0])], steps=len(a.kept()),
        dtype=a.dtype, weights="a", given=map, rules=rules,
        masks=Masks(header["seed"], header["dropout"] == "off"),
        tolerance=tolerance or TOLERANCE[a.dtype], seed=header["seed"],
        progress=progress or (lambda done, steps: None))
    try:
        result = work.lockstep()
    finally:
        work.restore()
    result.settings["kept"] = a.kept()
    result.notes[:0] = notes
    return result
