"""Does a network train the same on any number of devices? See `invariance`.
"""
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mgpu.backends import backend_of
from mgpu.losses import SoftmaxCrossEntropyLoss
from mgpu.parity import measure
from mgpu.parity.comparison import (TOLERANCE, Batches, Comparison, Result,
                                    _check)
from mgpu.parity.measure import Gap
from mgpu.parity.sides import Call, Masks, Side, State
from mgpu.nested import rows_of

#: from good to bad; "not compared" is said of a layer whose outputs on the
#: devices do not join to the output on one
STATUSES = ("exact", "not compared", "batch statistics", "wrong")
#: what belongs to no layer: the network's outputs and the loss
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
        The largest relative difference of what the layer puts out, of its
        gradients, updated weights, optimiser memory and statistics.
    origin : list of int
        Numbers of devices where the layer's output differs though what it
        was given agrees: the difference arises here.
    """

    path: str
    kind: str
    parameters: list[str]
    status: dict[int, str] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)
    origin: list[int] = field(default_factory=list)


@dataclass
class InvarianceReport:
    """What `invariance` found.

    Attributes
    ----------
    verdict : str
        The worst status of all: "exact" (but for rounding), "batch
        statistics" or "wrong".
    devices : list of int
        The first is what the others are compared with.
    layers : list of LayerReport
        In the order of the network; the last stands for the network's
        outputs and the loss.
    results : dict of int -> Result
        The lock-step of each number of devices against the first.
    synced : dict of int -> Result
        The same with ``batch_norm="sync"``, where the first differs.
    side : dict
        Engine, network, optimiser, ...
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

    def __str__(self) -> str:
        k0, *others = self.devices
        lines = [f"{self.verdict} ({self.side['network']} on "
                 f"{self.side['engine']}, batch_norm="
                 f"{self.settings['batch_norm']!r}, "
                 f"{self.settings['steps']} steps, "
                 f"{self.settings['dtype']})"]
        names = [f"{x.path or '(network)'} {x.kind}".strip()
                 for x in self.layers]
        width = max(map(len, names), default=0)
        columns = max((len(s) for x in self.layers
                       for s in x.status.values()), default=0) + 10
        lines.append(" " * width + "".join(
            f"  {f'{k} devices / {k0}':<{columns}}" for k in others))
        for name, x in zip(names, self.layers):
            cells = []
            for k in others:
                text = x.status[k] if x.status[k] == "not compared" \
                    else f"{x.status[k]} {x.worst[k]:.1e}"
                mark = " *" if k in x.origin else ""
                cells.append(f"  {text + mark:<{columns}}")
            lines.append(f"{name:<{width}}{''.join(cells)}")
        lines = [line.rstrip() for line in lines]
        if any(x.origin for x in self.layers):
            lines.append("* arises here: what the layer is given agrees")
        if self.verdict == "batch statistics":
            lines.append("batch statistics: each device normalises with the "
                         "mean and variance of its own rows; with "
                         "batch_norm='sync' it is exact")
        for k, result in self.results.items():
            wrong = self.synced.get(k, result)
            if wrong.first is not None:
                lines.append(f"{k} devices: {wrong.first}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As lists, dicts, text and numbers; numbers of devices are text."""
        def keyed(values: Mapping[int, Any]) -> dict[str, Any]:
            return {str(k): v for k, v in values.items()}
        return {
            "format": "mgpu invariance 1", "verdict": self.verdict,
            "devices": self.devices, "side": self.side,
            "settings": self.settings,
            "layers": [{"path": x.path, "kind": x.kind,
                        "parameters": x.parameters,
                        "status": keyed(x.status), "worst": keyed(x.worst),
                        "origin": x.origin} for x in self.layers],
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

    Lock-step on one engine: before every step the network on K devices gets
    the state of that on ``devices[0]``, takes the same step on the same
    batch, and everything is compared: the output of each layer (the rows of
    all devices put together), losses, gradients, weights, the optimiser's
    memory, and statistics (those of one device with those of each of K).

    A layer is

    - *exact*: no difference but rounding;
    - *batch statistics*: it differs with this `batch_norm`, and is exact
      with ``"sync"``, which is run too then;
    - *wrong*: it differs with ``"sync"`` as well.

    A difference travels to all later layers, and in the gradients to all
    layers; `LayerReport.origin` says where it arises.

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
        ``progress(done, all)`` after each step, without those of "sync".

    Returns
    -------
    InvarianceReport

    Raises
    ------
    ValueError
        Numbers of devices that are none, or fewer than two; what `compare`
        refuses; a compiled (hybridized) network with ``"sync"``.
    TypeError
        A network instead of a function.
    """
    numbers = list(devices)
    if len(numbers) < 2 or len(set(numbers)) < len(numbers) or any(
            isinstance(k, bool) or not isinstance(k, (int, np.integer))
            or k < 1 for k in numbers):
        raise ValueError("two or more different numbers of devices are "
                         f"compared; received {devices!r}. Use for example "
                         "(1, 2, 4).")
    _check(dropout=(dropout, ("masks", "off")),
           dtype=(dtype, tuple(TOLERANCE)))
    side = net_factory if isinstance(net_factory, Side) else Side(net_factory)
    make = factory(side.net)
    side = side.over(Side(
        None, None, loss or SoftmaxCrossEntropyLoss(), optimizer,
        optimizer_params, semantics, batch_norm=batch_norm, native=native,
        seed=seed))
    batches = list(batches) if not steps else batches
    if iter(batches) is batches:
        batches = [batch for batch, _ in zip(batches, range(steps))]
    every = steps or len(batches)
    total, done = every * (len(numbers) - 1), 0

    def pair(k: int, policy: str, told: Any) -> "_Pair":
        def on(count: int) -> Side:
            return fresh(side, make, devices=int(count), batch_norm=policy)
        return _Pair(on(numbers[0]), on(k), batches=batches, steps=steps,
                     dtype=dtype, weights="a", given=None, rules=(),
                     masks=Masks(seed, dropout == "off"),
                     tolerance=tolerance or TOLERANCE[dtype], seed=seed,
                     progress=told)

    def tell(number: int, _: int) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)
    results: dict[int, Result] = {}
    synced: dict[int, Result] = {}
    layers: dict[str, LayerReport] = {}
    start: State | None = None
    for k in numbers[1:]:
        work = pair(k, side.batch_norm, tell)
        start = start or work.a.state()     # the same for every pair
        results[k], own = work.judged(start)
        again: Mapping[str, _Seen] = own
        if side.batch_norm != "sync" and any(x.differs for x in own.values()):
            work = pair(k, "sync", lambda number, all_: None)
            synced[k], again = work.judged(start)
        for layer in work.layers():
            layers.setdefault(layer.path, layer)
        for path, report in layers.items():
            seen = own[path]
            report.worst[k] = seen.worst
            report.status[k] = (
                "wrong" if again[path].differs else
                "batch statistics" if seen.differs else
                "exact" if seen.compared else "not compared")
            if (again if again[path].differs else own)[path].origin:
                report.origin.append(k)
    statuses = {s for x in layers.values() for s in x.status.values()}
    verdict = max(statuses - {"not compared"}, key=STATUSES.index)
    first = next(iter(results.values()))
    return InvarianceReport(
        verdict, [int(k) for k in numbers], list(layers.values()), results,
        synced, {k: v for k, v in first.sides["a"].items()
                 if k != "devices"},
        {**first.settings, "batch_norm": side.batch_norm})


def factory(net: Any) -> Callable[[], Any]:
    """`net`, where it is a function that makes networks (TypeError)."""
    try:
        backend_of(net)
    except TypeError:
        if callable(net):
            return net
    raise TypeError("expected a function that makes the network, so that "
                    f"each run gets a new one; received {type(net).__name__}"
                    ". Pass for example lambda: Net().")


def fresh(side: Side, net: Any, **options: Any) -> Side:
    """`side` for another run: schedules count updates, so each run has its
    own."""
    return replace(side, net=net, lr_scheduler=copy.deepcopy(
        side.lr_scheduler), optimizer_params=copy.deepcopy(
            side.optimizer_params), optimizer=copy.deepcopy(side.optimizer),
        **options)


@dataclass
class _Seen:
    """What one comparison says of a layer."""

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
        try:
            self.a.load(start)
            self.initial = start, start
            seen = {x.path: _Seen() for x in self.layers()}
            self._outputs(seen)
            result = self.lockstep()
        finally:
            self.restore()
        owner = {n: x.path for x in self.a.layers for n in x.parameters}
        for gap in result.gaps:
            if gap.stage == "layer":    # _outputs has seen all of them
                continue
            name = gap.name
            if gap.stage == "memory":
                name = measure.layer_of(name)
            seen[owner.get(name, NETWORK)].add(gap)
        return result, seen

    def _calls(self, X: Any, y: Any, number: int
               ) -> tuple[list[Call], list[Call]]:
        """The rows of all devices joined, as far as they can be."""
        columns = [list(zip(*runner.traces(X, y, number)))
                   for runner in (self.a, self.b)]
        rows = rows_of(X) or 1
        calls: tuple[list[Call], list[Call]] = [], []
        for one, two in zip(*columns):
            joined = [[_joined(x, z, rows) for x, z in zip(
                zip(*(c[which] for c in one)), zip(*(c[which] for c in two)))]
                for which in (1, 2)]
            for side, column in enumerate((one, two)):
                calls[side].append(Call(column[0].path, *(
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
                [self._alone(1, "layer", one.path, x, z)
                 for x, z in zip(one[which], two[which])]
                for which in (1, 2))
            for gap in outputs:
                layer.add(gap)
            if layer.differs and not any(g.status == "different"
                                         for g in inputs):
                layer.origin = True
        for runner in (self.a, self.b):
            runner.load(start)


def _joined(x: Sequence[np.ndarray], z: Sequence[np.ndarray], rows: int
            ) -> tuple[np.ndarray, np.ndarray] | None:
    """What a layer gave on the devices of either side, joined along the axis
    along which the rows lie; None where there is no such axis."""
    if x[0].ndim == 0 or x[0].ndim != z[0].ndim:
        return None
    for axis in range(x[0].ndim):
        try:
            one, two = np.concatenate(x, axis), np.concatenate(z, axis)
        except ValueError:      # other axes differ: not this one
            continue
        # Rows that are missing are a difference.
        if one.shape == two.shape or axis == 0 and len(one) % rows == 0:
            return one, two
    return None
