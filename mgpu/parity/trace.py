"""Traces: one side of a comparison, recorded in a file.

`record` trains a network, for example with MXNet, and keeps what its steps
computed. `compare_trace` takes the same steps with another network, for
example on a machine where MXNet cannot be installed, and compares.
"""
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity import matching
from mgpu.parity.batches import Batches, endless
from mgpu.parity.comparison import Comparison, check_deterministic
from mgpu.parity.live import LiveRun
from mgpu.parity.location import Location, together
from mgpu.parity.masks import Masks
from mgpu.parity.measure import PARTS, PLACES, TOLERANCE, Gap
from mgpu.parity.recorded import (ROWS, RecordedRun, describe, describe_probe,
                                  summarised)
from mgpu.parity.result import Evidence, Result
from mgpu.parity.run import Calls, LayerCall, State, StepResult
from mgpu.parity.side import Side, check_common, complete
from mgpu.parity.trace_file import FORMAT, Writer, safetensors
from mgpu.utils import files
from mgpu.utils.arguments import one_of

__all__ = ["FORMAT", "MOST", "PARTS", "PLACES", "ROWS", "Recorded",
           "Recording", "TOLERANCE", "compare_trace", "record"]

Recorded = RecordedRun      # its older name
#: the largest number of steps that are kept where none are chosen
MOST = 8


class Recording(NamedTuple):
    """What `record` wrote.

    Attributes
    ----------
    file : str
    steps : int
        All steps that were taken.
    kept : list of int
        The numbers of those in the file.
    size : int
        Of the file, in bytes.
    sha256 : str
    """

    file: str
    steps: int
    kept: list[int]
    size: int
    sha256: str


def _draws(seed: int) -> list[float]:
    """What NumPy draws for dropout masks. Its streams may change between
    versions (NEP 19), and a trace would then compare other masks."""
    return np.random.default_rng([seed, 1, 0]).random(4).tolist()


# -- recording ----------------------------------------------------------------

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
        and each step whose learning rate or number of rows is not that of
        the step before; at most 8 in all.

    Returns
    -------
    Recording

    Raises
    ------
    ImportError
        The package safetensors is not installed.
    ValueError, TypeError
        As `compare` does; a step to keep that is not taken.

    Notes
    -----
    A kept step holds the batch, the state before and after (values and the
    optimizer's memory), gradients, outputs, losses and summaries of each
    layer's calls, in the dtype of the comparison. Equal arrays are kept
    once. The network gets its values and dtype back.
    """
    safetensors()
    check_common(dropout, dtype)
    file = os.fspath(file)
    files.check_folder(file, "file=")
    first, batches, steps = endless(batches, steps)
    chosen = None if keep is None else sorted(set(keep))
    if chosen is not None and (not chosen or not set(chosen) <= set(
            range(1, steps + 1))):
        raise ValueError(f"steps to keep are numbers from 1 to {steps}; "
                         f"received keep={list(keep or ())!r}. Name one or "
                         "more of these.")
    side = complete(a, devices=devices, loss=loss, optimizer=optimizer,
                    optimizer_params=optimizer_params, semantics=semantics,
                    batch_norm=batch_norm, native=native, seed=seed)
    writer = Writer()
    kept: list[dict[str, Any]] = []
    rates: list[float] = []
    run = LiveRun(side, first[0], dtype, Masks(seed, dropout == "off"))
    try:
        check_deterministic(run, *first)
        before, rates_after = run.state(), _rates(run)
        now: tuple[float, int] | None = None
        for number, (X, y) in enumerate(batches, 1):
            one = run.step(X, y, number)
            rates_before, rates_after = rates_after, _rates(run)
            last, now = now, (one.rate, sum(one.rows))
            if number in chosen if chosen is not None else (
                    number in (1, steps)
                    or now != last and len(kept) < MOST - 1):
                if not kept:
                    start = before, X
                node = _step_node(writer, run, number, X, y, before, one,
                                  first=not kept)
                node["before"]["rates"] = rates_before
                node["after"]["rates"] = rates_after
                kept.append(node)
            rates.append(one.rate)
            before = one.after
            if progress is not None:
                progress(number, steps)
        header = {
            "side": describe(run), "dtype": dtype, "seed": seed,
            "dropout": dropout, "draws": _draws(seed), "steps": steps,
            "rates": rates, "kept": kept,
            "probe": describe_probe(writer, run, *start)}
    finally:
        run.restore()
    digest = writer.write(file, header)
    return Recording(file, steps, [node["step"] for node in kept],
                     os.path.getsize(file), digest)


def _rates(run: LiveRun) -> dict[str, float]:
    """The rate of each parameter in the last update. It is read at once:
    some schedules cannot go back."""
    return {e.name: float(run.updates.last_rate(e.name,
                                                run.trainer.num_update))
            for e in run.entries if e.trained}


def _step_node(writer: Writer, run: LiveRun, number: int, X: Any, y: Any,
               before: State, one: StepResult, first: bool) -> dict[str, Any]:
    """A kept step. Runs it again for the calls of the layers."""
    run.load(before)
    calls, = run.calls(X, y, number, first=True)
    run.load(one.after)
    node = {
        "step": number, "X": writer.batch(X), "y": writer.batch(y),
        "before": writer.state(before), "after": writer.state(one.after),
        "outputs": [writer.put(x) for x in one.outputs],
        "evaluated": [writer.put(x) for x in one.predictions or ()],
        "losses": writer.put(one.losses),
        "gradients": writer.put_all(one.gradients), "apart": one.apart,
        "rate": one.rate, "rows": one.rows, "divisor": one.divisor,
        "calls": writer.calls(summarised(calls))}
    if first:       # what the diagnosis of a layer reads
        node["rows_of_calls"] = writer.calls([
            LayerCall(c.path, [], [x[:ROWS] for x in c.outputs])
            for c in calls])
    return node


# -- comparing ----------------------------------------------------------------

class _Replay(Comparison):
    """The lock-step of a recorded run `a` with a live run `b`. What must be
    computed again is computed on `b`."""

    a: RecordedRun
    summarised = True

    def __init__(self, a: RecordedRun, b: Side, **options: Any):
        #: before these steps equal values arrived at the layers of both
        self._equal: dict[int, State] = {}
        super().__init__(a, b, **options)
        a.lent_calls = self._calls_of_b

    def _walk(self) -> Iterator[tuple[int, Any, Any, State]]:
        for number in self.a.kept():
            yield (number, *self.a.batch(number), self.a.before(number))

    def _again(self, start: State, X: Any, y: Any, one: StepResult,
               two: StepResult, number: int) -> list[Gap]:
        self.load_b(start)
        return self.compare_results(number, two, self.in_terms_of_a(
            self.b.step(X, y, number)))

    def _calls(self, X: Any, y: Any, number: int, predict: bool
               ) -> tuple[Calls, Calls]:
        if predict:     # of predictions a trace has the outputs only
            return [], []
        self._live, = self.b.calls(X, y, number, first=True)
        self._seen = self.a.kept_calls(number, "calls"), summarised(
            self._live)
        return self._seen

    def _evidence(self, number: int, *rest: Any) -> tuple[Evidence, list[Gap]]:
        evidence, gaps = super()._evidence(number, *rest)
        place = evidence.location
        if place is not None:
            # Of a summary, the place of the largest difference means nothing.
            gaps = [g._replace(index=()) for g in gaps]
            evidence.location = self._whole(place, number)
        if place is None or place.inputs_agree:
            # As far as the diagnosis looks, the layers of both get the same.
            self._equal[number] = evidence.before
        return evidence, gaps

    def _calls_of_b(self, X: Any, y: Any, step: int) -> list[Calls]:
        """The calls of `b`, by the paths of `a` where parameters say which
        layer is which."""
        if step not in self._equal:
            self.a.refuse("calls of layers")
        owner = {n: layer.path for layer in self.a.layers
                 for n in layer.parameters}
        not_alone = {path for _, paths in together(
            self.a.layers, self.b.layers, self.plan) for path in paths}
        paths = {layer.path: owner[pair.a[0]] for pair in self.plan.pairs
                 for layer in self.b.layers if pair.b[0] in layer.parameters
                 and pair.a[0] in owner and layer.path not in not_alone}
        self.load_b(self._equal[step])
        taken = set(paths.values())
        return [[call._replace(path=paths.get(
            call.path, call.path if call.path not in taken
            else f"{call.path} of b"))
            for call in calls] for calls in self.b.calls(X, y, step)]

    def _whole(self, place: Location, number: int) -> Location:
        """The place with calls for the diagnosis. Where the inputs agree,
        those of `b` stand for both; of outputs the trace has the first
        rows."""
        rows = self.a.kept_calls(number, "rows_of_calls")
        at, other = place.at
        live, inner = self._live[other], []
        if place.call_a.outputs is not self._seen[0][at].outputs:
            inner = [x[:ROWS] for x in rows[at].outputs] if rows else []
            at += 1     # the activation that follows
        if place.call_b.outputs is not self._seen[1][other].outputs:
            inner = [live.outputs[0][:ROWS]]
            live = live._replace(outputs=self._live[other + 1].outputs)
        place = place._replace(inner=inner)
        if not rows or not place.inputs_agree:
            return place._replace(
                call_a=LayerCall(place.call_a.path, [], []), call_b=live)
        return place._replace(
            call_a=LayerCall(place.call_a.path, live.inputs,
                             rows[at].outputs),
            call_b=live._replace(outputs=[x[:ROWS] for x in live.outputs]))


def compare_trace(file: Any, b: Any, *, loss: Callable | None = None,
                  optimizer: Any = None,
                  optimizer_params: Mapping[str, Any] | None = None,
                  semantics: str | None = None, devices: Any = None,
                  batch_norm: str | None = None, native: bool = False,
                  weights: str = "a",
                  map: Mapping[str, matching.Target] | None = None,
                  rules: matching.Rules = (),
                  tolerance: float | None = None, strict: bool = False,
                  progress: Callable[[int, int], None] | None = None
                  ) -> Result:
    """Compare how a network trains with a run that `record` kept.

    This is the lock-step of `compare` for the steps in the file. Neither the
    framework of the recorded side nor its network is needed.

    Parameters
    ----------
    file : path
        Of `record`. Nothing in it is executed: it names losses and
        optimizers of mgpu, or none.
    b : network, function that makes one, or Side
    loss, optimizer, optimizer_params, semantics, devices, batch_norm
        Of `b`, if they are not to be those of the file. If the recorded side
        had a schedule, `b` without one follows the rates of the file.
    weights : {"a", "own"}
        With "own", the values that `b` has at first are compared with those
        that the recorded run began with, as stage "initial".
    native, map, rules, tolerance, strict, progress
        As for `compare`.

    Returns
    -------
    Result
        As of `compare`. A difference is judged against what a change of the
        last bits does to `b`. Layers are compared by summaries: 64 of the
        values, and means of 61 subsets.

    Raises
    ------
    ImportError
        The package safetensors is not installed.
    ValueError
        The file is damaged, is not a trace or has another version; another
        number of devices; a loss that a file cannot hold. Nothing has run
        then. Also what `compare` refuses.
    """
    one_of("weights", weights, ("a", "own"))
    a = RecordedRun(os.fspath(file))
    header = a.header
    if weights == "own" and a.kept()[0] != 1:
        raise ValueError(
            "the values that a run began with are those of its first step; "
            f"received a trace of the steps {a.kept()}. Record it with step "
            "1 kept.")
    side = b if isinstance(b, Side) else Side(b)
    side = side.over(Side(
        None, devices or len(a.devices), loss or a.loss,
        optimizer or a.optimizer, optimizer_params,
        semantics or header["side"]["semantics"],
        batch_norm=batch_norm or a.batch_norm, native=native,
        seed=header["seed"]))
    _check_trace(a, side)
    notes = [f"a is a trace of {header['steps']} steps recorded with "
             f"{header['side']['options']['engine']}; compared are steps "
             f"{', '.join(str(n) for n in a.kept())}"]
    if header["side"]["scheduled"] and side.lr_scheduler is None:
        rates = header["rates"]
        side.lr_scheduler = lambda n: rates[min(n, len(rates)) - 1]
        notes.append("b follows the learning rates of the trace")
    with closing(_Replay(
            a, side, batches=[a.batch(a.kept()[0])], steps=len(a.kept()),
            dtype=a.dtype, seed=header["seed"], dropout=header["dropout"],
            tolerance=tolerance, strict=strict, weights=weights, given=map,
            rules=rules, progress=progress)) as work:
        result = work.lockstep()
    result.settings["kept"] = a.kept()
    result.notes[:0] = notes
    return result


def _check_trace(a: RecordedRun, side: Side) -> None:
    """Refuse what cannot be compared with this trace (ValueError)."""
    header = a.header
    for what in ("loss", "optimizer"):
        if getattr(side, what) is None:
            raise ValueError(
                "a file holds only losses and optimizers of mgpu; received "
                f"a trace of {header['side'][what]['name']}. Pass {what}=.")
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
