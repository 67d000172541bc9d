"""The run of a file: what `mgpu.parity.record` wrote, read again."""
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mgpu import optim
from mgpu.backends.probing import Layer
from mgpu.checkpoints.trainer_states import by_layer
from mgpu.nn import losses
from mgpu.optim import Optimizer
from mgpu.parity import matching
from mgpu.parity.batches import Batch, first_rows
from mgpu.parity.live import LiveRun
from mgpu.parity.matching import Entry, RunWith
from mgpu.parity.measure import summary
from mgpu.parity.run import (Arrays, Calls, LayerCall, Run, State, StepResult,
                             UpdateRule, at_one_device)
from mgpu.parity.trace_file import Reader, Writer

#: rows of each output that the diagnosis of a layer gets
ROWS = 4


# -- what a file says of a run ------------------------------------------------

def describe(run: LiveRun) -> dict[str, Any]:
    """The side of a run, for the header of a file."""
    trainer, side, rule = run.trainer, run.side, run.updates
    return {
        "name": run.name, "options": run.options(),
        "entries": [e._asdict() for e in run.entries],
        "layers": [layer._asdict() for layer in run.layers],
        "slots": rule.slots, "loss": _described_loss(side.loss),
        "optimizer": {"name": type(rule.optimizer).__name__,
                      "options": asdict(rule.optimizer)},
        "scheduled": trainer.lr_scheduler is not None,
        "semantics": side.semantics, "batch_norm": side.batch_norm,
        "native": bool(side.native), "prepare": side.prepare is not None,
        "devices": len(run.devices), "keys": run.keys,
        "lr_mult": trainer.lr_mult, "wd_mult": trainer.wd_mult,
        "params": [[p.name, p.kind, p.lr_mult, p.wd_mult, p.grad_req]
                   for p in run.replicas.params()]}


def _described_loss(loss: Any) -> dict[str, Any]:
    """A loss of mgpu by name and options; any other only by name."""
    name = type(loss).__name__
    if getattr(losses, name, None) is type(loss):
        return {"name": name, "options": {
            k.lstrip("_"): v for k, v in vars(loss).items()}}
    return {"name": getattr(loss, "__name__", repr(loss))}


def describe_probe(writer: Writer, run: LiveRun, before: State, X: Any
                   ) -> dict[str, Any]:
    """The passes that `matching.Probe` will ask the recorded run for: with
    its own values, with drawn ones, and with some of each name's own."""
    probe, own = (run.probe(first_rows(X, 2)),
                  at_one_device(before, run.entries))
    named = {**own, **matching.drawn(run.entries, named=True)}

    def passes(values: Arrays, drawn: Arrays) -> dict[str, Any]:
        return {"outputs": [writer.put(x) for x in probe(values, False)[0]],
                "calls": [[list(names), writer.put(x)]
                          for names, x in probe(drawn, True)[1]]}
    return {**passes(own, matching.drawn(run.entries)),
            "named": passes(named, named)}


def known_optimizer(node: Mapping[str, Any]) -> Optimizer | None:
    """The optimizer that a file names. Only those of mgpu are known."""
    known = {rule.__name__: rule for rules in optim.RULES.values()
             for rule in rules.values()}
    return known[node["name"]](**node["options"]) \
        if node["name"] in known else None


def known_loss(node: Mapping[str, Any]) -> losses.Loss | None:
    """The loss that a file names. Only those of mgpu are known."""
    loss = getattr(losses, node["name"], None)
    if "options" not in node or not isinstance(loss, type) \
            or not issubclass(loss, losses.Loss):
        return None
    return loss(**node["options"])


def summaries(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The `summary` of each array, and the sizes of all."""
    return [*map(summary, arrays), np.array([float(x.size) for x in arrays])]


def summarised(calls: Calls) -> Calls:
    """The calls with `summaries` of their inputs and outputs."""
    return [LayerCall(c.path, summaries(c.inputs), summaries(c.outputs))
            for c in calls]


# -- the run ------------------------------------------------------------------

class RecordedRun(Run):
    """Side `a` of a comparison, from a file: it has the steps that were
    kept.

    Attributes
    ----------
    header : dict
    optimizer : Optimizer or None
        None where it is not one of mgpu's.
    loss : Loss or None
        None where it is not one of mgpu's.
    lent_calls : callable
        The `calls` of another run, for steps in which the layers of both get
        the same. It raises `CannotRun` for other steps.
    """

    def __init__(self, file: str):
        self._reader, self._file = Reader(file), file
        self.header = header = self._reader.header
        self._side = side = header["side"]
        self._kept = {node["step"]: node for node in header["kept"]}
        self.name, self.dtype = side["name"], header["dtype"]
        self.batch_norm = side["batch_norm"]
        self.devices = side["options"]["devices"]
        self.entries = [Entry(**{**e, "shape": tuple(e["shape"]),
                                 "aliases": tuple(e["aliases"])})
                        for e in side["entries"]]
        self.layers = [Layer(x["path"], x["kind"], _tuples(x["options"]),
                             tuple(x["parameters"]))
                       for x in side["layers"]]
        # Traces of version 0.2 have none.
        self.keys = {stage: list(map(tuple, own)) for stage, own
                     in side.get("keys", {}).items()}
        self.optimizer = known_optimizer(side["optimizer"])
        self.loss = known_loss(side["loss"])
        self.lent_calls: Callable[..., list[Calls]] = super().calls
        self.updates = self._update_rule(side)
        self._now = self.before(min(self._kept))

    def _update_rule(self, side: Mapping[str, Any]) -> UpdateRule:
        rates = {at["optimizer"]["num_update"]: at["rates"]
                 for node in self.header["kept"]
                 for at in (node["before"], node["after"])}
        own = {name: (lr, wd) for name, _, lr, wd, _ in side["params"]}
        return UpdateRule(
            self.optimizer or Optimizer(), side["slots"],
            {name: side["lr_mult"].get(name, lr)
             for name, (lr, _) in own.items()},
            {name: side["wd_mult"].get(name, wd)
             for name, (_, wd) in own.items()},
            sorted(own, key=by_layer(list(own))),
            lambda name, num_update: rates[num_update][name])

    def options(self) -> dict[str, Any]:
        return {**self._side["options"],
                "trace": os.path.basename(self._file),
                "sha256": self._reader.sha256}

    # what was kept

    def kept(self) -> list[int]:
        """The numbers of the steps in the file."""
        return sorted(self._kept)

    def batch(self, step: int) -> Batch:
        node = self._kept[step]
        return self._reader.batch(node["X"]), self._reader.batch(node["y"])

    def before(self, step: int) -> State:
        """The state that a kept step started from."""
        return self._reader.state(self._kept[step]["before"])

    def kept_calls(self, step: int, what: str) -> Calls:
        """`what`: "calls", which are summarised, or "rows_of_calls", the
        first rows of outputs, which only the first kept step has."""
        return self._reader.calls(self._kept[step].get(what, ()))

    # as of any run

    def state(self) -> State:
        return self._now

    def load(self, state: State, memory: bool = True) -> None:
        """Nothing: a file does not change."""

    def restore(self) -> None:
        """Nothing: there is no network to give back."""

    def step(self, X: Any, y: Any, step: int = 0, predict: bool = True
             ) -> StepResult:
        node, read = self._kept[step], self._reader
        # Traces of version 0.1 have no predictions, those of 0.2 on several
        # devices are of each device's own statistics.
        predictions = node.get("evaluated", node.get("predictions")
                               if self.devices == 1 else None)
        return StepResult(
            [read.get(x) for x in node["outputs"]], read.get(node["losses"]),
            read.get_all(node["gradients"]), read.state(node["after"]),
            node["apart"], node["rate"], node["rows"], node["divisor"],
            predictions and [read.get(x) for x in predictions],
            list(dict.fromkeys(
                call.path for call in self.kept_calls(step, "calls"))))

    def probe(self, X: Any) -> RunWith:
        """See `describe_probe`: other values raise ValueError."""
        node, get = self.header["probe"], self._reader.get
        own = at_one_device(self._now, self.entries)
        passes: list[tuple[Any, ...]] = [
            (node, lambda: own, lambda: matching.drawn(self.entries))]
        if "named" in node:     # not in traces of version 0.1
            passes.append((node["named"], *[lambda: {
                **own, **matching.drawn(self.entries, named=True)}] * 2))

        def run(values: Mapping[str, np.ndarray], traced: bool
                ) -> tuple[list, list]:
            for known, *expected in passes:
                if all(np.array_equal(x, values[n], equal_nan=True)
                       for n, x in expected[traced]().items()):
                    return ([get(x) for x in known["outputs"]], []) \
                        if not traced else ([], [
                            (tuple(names), get(x))
                            for names, x in known["calls"]])
            raise ValueError("a trace holds no pass with these values.")
        return run

    def prepared(self, X: Any, y: Any) -> Batch:
        return self.refuse("'prepare'") if self._side["prepare"] else (X, y)

    def calls(self, X: Any, y: Any, step: int, **options: Any) -> list[Calls]:
        return self.lent_calls(X, y, step)


def _tuples(x: Any) -> Any:
    """Options of layers hold tuples, which JSON turns into lists."""
    if isinstance(x, dict):
        return {k: _tuples(v) for k, v in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
