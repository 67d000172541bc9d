"""Does a network train the same on any number of devices?"""
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mgpu.data.nested import rows_of
from mgpu.parity import measure
from mgpu.parity.batches import Batches, endless
from mgpu.parity.comparison import Comparison
from mgpu.parity.measure import TOLERANCE, Gap
from mgpu.parity.result import Result
from mgpu.parity.run import Calls, LayerCall, State
from mgpu.parity.side import check_common, complete, factory, fresh
from mgpu.utils import notebook
from mgpu.utils.arguments import is_integer

__all__ = ["InvarianceReport", "LayerReport", "NETWORK", "STATUSES",
           "TOLERANCE", "factory", "fresh", "invariance"]

#: from good to bad; "not compared": the outputs of the layer on the devices
#: cannot be joined to the output on one device
STATUSES = ("exact", "not compared", "batch statistics", "wrong")
#: stands for the network's outputs and the loss, which belong to no layer
NETWORK = "(output and loss)"


@dataclass
class LayerReport:
    """One layer on several numbers of devices.

    Attributes
    ----------
    path, kind : str
    parameters : list of str
    status : dict of int -> str
        One of `STATUSES` for each number of devices.
    worst : dict of int -> float
        The largest relative difference of the layer's outputs, gradients,
        updated weights, optimizer memory and statistics.
    origin : list of int
        Numbers of devices where the layer's output differs although its
        input agrees: the difference arises here.
    """

    path: str
    kind: str
    parameters: list[str]
    status: dict[int, str] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)
    origin: list[int] = field(default_factory=list)

    def add(self, k: int, own: "_Seen", synced: "_Seen") -> None:
        """What was seen on `k` devices, with the network's own policy and
        with "sync"."""
        self.worst[k] = own.worst
        self.status[k] = ("wrong" if synced.differs else
                          "batch statistics" if own.differs else
                          "exact" if own.compared else "not compared")
        if (synced if synced.differs else own).origin:
            self.origin.append(k)

    def row(self) -> list[str]:
        """The layer, and the status for each number of devices."""
        return [f"{self.path or '(network)'} {self.kind}".strip(), *(
            (status if status == "not compared"
             else f"{status} {self.worst[k]:.1e}") + " *" * (k in self.origin)
            for k, status in self.status.items())]


@dataclass(repr=False)
class InvarianceReport:
    """What `invariance` found.

    Attributes
    ----------
    verdict : str
        The worst status of all: "exact" (but for rounding), "batch
        statistics" or "wrong". "no proof": nothing differs, and the first
        of `results` says why that proves nothing.
    devices : list of int
        The others are compared with the first.
    layers : list of LayerReport
        In the order of the network; the last stands for the network's
        outputs and the loss.
    results : dict of int -> Result
        The lock-step of each number of devices against the first.
    synced : dict of int -> Result
        The same with ``batch_norm="sync"``, where the first differs.
    side : dict
        Engine, network, optimizer, ...
    settings : dict
    """

    verdict: str
    devices: list[int]
    layers: list[LayerReport]
    results: dict[int, Result]
    synced: dict[int, Result]
    side: dict[str, Any]
    settings: dict[str, Any]

    @property
    def exact(self) -> bool:
        return self.verdict == "exact"

    def _head(self) -> str:
        return (f"{self.verdict} ({self.side['network']} on "
                f"{self.side['engine']}, batch_norm="
                f"{self.settings['batch_norm']!r}, "
                f"{self.settings['steps']} steps, {self.settings['dtype']})")

    def _grid(self) -> list[list[str]]:
        """A row for each layer, under a row of titles."""
        k0, *others = self.devices
        return [["", *(f"{k} devices / {k0}" for k in others)],
                *(layer.row() for layer in self.layers)]

    def __str__(self) -> str:
        grid = self._grid()
        widths = [max(map(len, column)) for column in zip(*grid)]
        lines = [self._head(), *("  ".join(map(str.ljust, row, widths)
                                           ).rstrip() for row in grid)]
        if any(x.origin for x in self.layers):
            lines.append("* arises here: the layer's input agrees")
        if self.verdict == "batch statistics":
            lines.append("batch statistics: each device normalizes with the "
                         "mean and variance of its own rows; with "
                         "batch_norm='sync' it is exact")
        for k, result in self.results.items():
            wrong = self.synced.get(k, result)
            if wrong.first is not None:
                lines.append(f"{k} devices: {wrong.first}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<InvarianceReport: {self._head()}>"

    def _repr_html_(self) -> str:
        (_, *titles), *rows = self._grid()
        return notebook.table(self._head(), ("layer", *titles), rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as lists, dicts, text and numbers. Numbers of devices
        are text, as JSON's keys must be."""
        def keyed(values: Mapping[int, Any]) -> dict[str, Any]:
            return {str(k): v for k, v in values.items()}
        return {
            "format": "mgpu invariance 1", "verdict": self.verdict,
            "devices": self.devices, "side": self.side,
            "settings": self.settings,
            "layers": [{**asdict(x), "status": keyed(x.status),
                        "worst": keyed(x.worst)} for x in self.layers],
            "results": keyed({k: r.to_dict()
                              for k, r in self.results.items()}),
            "synced": keyed({k: r.to_dict()
                             for k, r in self.synced.items()})}


def invariance(net_factory: Callable[[], Any], *, batches: Batches,
               devices: Sequence[int] = (1, 2, 4, 8),
               loss: Callable | None = None, optimizer: Any = "sgd",
               optimizer_params: Mapping[str, Any] | None = None,
               semantics: str = "gluon", batch_norm: str = "per_device",
               native: bool = False, steps: int | None = None,
               dtype: str = "float64", dropout: str = "masks",
               tolerance: float | None = None, seed: int = 0,
               progress: Callable[[int, int], None] | None = None
               ) -> InvarianceReport:
    """Compare the steps that a network takes on several numbers of devices.

    This is a lock-step on one engine. Before every step the network on K
    devices gets the state of the network on ``devices[0]`` and takes the
    same step on the same batch. Everything is compared: the output of each
    layer (the rows of all devices joined), losses, gradients, weights, the
    optimizer's memory, and statistics (those of one device with those of
    each of K).

    A layer is

    - *exact*: there is no difference but rounding;
    - *batch statistics*: it differs with this `batch_norm`, and is exact
      with ``"sync"``, which is then run too;
    - *wrong*: it differs with ``"sync"`` as well.

    A difference travels to all later layers, and in the gradients to all
    layers. `LayerReport.origin` says where it arises.

    Parameters
    ----------
    net_factory : function that makes a network, or Side with one
        Called for each number of devices.
    batches : iterable of (X, y)
        May hold fewer rows than there are devices.
    devices : sequence of int
        Two or more different numbers.
    loss, optimizer, optimizer_params, semantics, batch_norm, native, steps,\
 dtype, dropout, tolerance, seed
        As for `compare`.
    progress : callable, optional
        ``progress(done, all)`` after each step; those of "sync" are not
        counted.

    Returns
    -------
    InvarianceReport

    Raises
    ------
    ValueError
        Fewer than two numbers of devices, or equal or impossible ones; what
        `compare` refuses; a compiled (hybridized) network with ``"sync"``.
    TypeError
        A network instead of a function.
    """
    numbers = list(devices)
    if not len(numbers) == len(set(numbers)) > 1 \
            or not all(is_integer(k, 1) for k in numbers):
        raise ValueError("two or more different numbers of devices are "
                         f"compared; received {devices!r}. Use for example "
                         "(1, 2, 4).")
    check_common(dropout, dtype)
    side = complete(net_factory, loss=loss, optimizer=optimizer,
                    optimizer_params=optimizer_params, semantics=semantics,
                    batch_norm=batch_norm, native=native, seed=seed)
    make = factory(side.net)
    _, taken, steps = endless(batches, steps)
    batches, total = list(taken), steps * (len(numbers) - 1)
    done, tell = itertools.count(1), progress or (lambda done, total: None)

    def compared(k: int, policy: Any, progress: Any) -> "_Pair":
        return _Pair(*(fresh(side, make, devices=int(n), batch_norm=policy)
                       for n in (numbers[0], k)), batches=batches,
                     steps=steps, dtype=dtype, dropout=dropout,
                     tolerance=tolerance, seed=seed, progress=progress)

    results: dict[int, Result] = {}
    synced: dict[int, Result] = {}
    layers: dict[str, LayerReport] = {}
    start: State | None = None
    for k in numbers[1:]:
        pair = compared(k, side.batch_norm, lambda *_: tell(next(done), total))
        start = start or pair.a.state()     # the same for every pair
        results[k], own = pair.judged(start)
        again = own
        if side.batch_norm != "sync" and any(x.differs for x in own.values()):
            pair = compared(k, "sync", None)
            synced[k], again = pair.judged(start)
        for layer in pair.layers():
            layers.setdefault(layer.path, layer).add(
                k, own[layer.path], again[layer.path])
    statuses = {s for x in layers.values() for s in x.status.values()}
    verdict = max(statuses - {"not compared"}, key=STATUSES.index)
    first = next(iter(results.values()))
    if verdict == "exact" and first.verdict == "no proof":
        verdict = first.verdict
    return InvarianceReport(
        verdict, [int(k) for k in numbers], list(layers.values()), results,
        synced, {k: v for k, v in first.sides["a"].items()
                 if k != "devices"},
        {**first.settings, "batch_norm": side.batch_norm})


@dataclass
class _Seen:
    """What one comparison found in a layer."""

    worst: float = 0.0
    differs: bool = False
    origin: bool = False
    compared: bool = False

    def add(self, gap: Gap) -> None:
        self.compared = True
        self.differs |= gap.status == "different"
        self.worst = max(self.worst, gap.relative)


class _Pair(Comparison):
    """One number of devices against another."""

    def layers(self) -> list[LayerReport]:
        return [*(LayerReport(x.path, x.kind, list(x.parameters))
                  for x in self.a.layers), LayerReport(NETWORK, "", [])]

    def judged(self, start: State) -> tuple[Result, dict[str, _Seen]]:
        """The result of the lock-step from `start`, and that of each layer
        by its path."""
        with closing(self):
            self.a.load(start)
            self.initial = start, start
            seen = {x.path: _Seen() for x in self.layers()}
            self._outputs(seen)
            result = self.lockstep()
        owner = {n: x.path for x in self.a.layers for n in x.parameters}
        for gap in result.gaps:
            name = measure.layer_of(gap.name) if gap.stage == "memory" \
                else gap.name
            if gap.stage != "layer":    # _outputs has seen all of them
                seen[owner.get(name, NETWORK)].add(gap)
        return result, seen

    def _calls(self, X: Any, y: Any, number: int, predict: bool = False
               ) -> tuple[Calls, Calls]:
        """With the rows of all devices joined, as far as they can be."""
        columns = [list(zip(*run.calls(X, y, number, predict=predict)))
                   for run in (self.a, self.b)]
        rows = rows_of(X) or 1
        calls: tuple[Calls, Calls] = [], []
        for one, two in zip(*columns):
            joined = [[_joined(x, z, rows) for x, z in zip(
                zip(*(c[which] for c in one)), zip(*(c[which] for c in two)))]
                for which in (1, 2)]
            for side, column in enumerate((one, two)):
                calls[side].append(LayerCall(column[0].path, *(
                    [pair[side] for pair in pairs if pair is not None]
                    for pairs in joined)))
        return calls

    def _outputs(self, seen: dict[str, _Seen]) -> None:
        """The outputs of all layers in the first step."""
        X, y = self.first_batch
        start = self.a.state()
        self.b.load(start)
        for one, two in zip(*self._calls(X, y, 1)):
            if one.path not in seen:
                continue
            layer = seen[one.path]
            if two.path != one.path:    # other layers run: no counterpart
                layer.differs = layer.origin = True
                break
            inputs, outputs = (
                [self.single_gap(1, "layer", one.path, x, z)
                 for x, z in zip(*both)]
                for both in ((one.inputs, two.inputs),
                             (one.outputs, two.outputs)))
            for gap in outputs:
                layer.add(gap)
            layer.origin = layer.differs and not any(
                g.status == "different" for g in inputs)
        for run in (self.a, self.b):
            run.load(start)


def _joined(x: Sequence[np.ndarray], z: Sequence[np.ndarray], rows: int
            ) -> tuple[np.ndarray, np.ndarray] | None:
    """The arrays of a layer on the devices of each side, joined along the
    axis of the rows. None where there is no such axis."""
    if x[0].ndim == 0 or x[0].ndim != z[0].ndim:
        return None
    if len(x) != len(z) and len({v.shape for v in (*x, *z)}) == 1:
        # of no rows: computed from a weight, on each device
        return np.stack([x[0]] * len(z)), np.stack(z)
    for axis in range(x[0].ndim):
        try:
            one, two = np.concatenate(x, axis), np.concatenate(z, axis)
        except ValueError:      # other axes differ: not this one
            continue
        # Rows that are missing are a difference.
        if one.shape == two.shape or axis == 0 and len(one) % rows == 0:
            return one, two
    return None
