"""Do two networks train the same? See `compare`."""
import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mgpu.losses import SoftmaxCrossEntropyLoss
from mgpu.parity import matching, measure
from mgpu.parity.matching import Plan
from mgpu.parity.measure import STAGES, Gap
from mgpu.parity.sides import (Call, Masks, Record, Runner, Side, State,
                               translate)
from mgpu.nested import map_leaves

MODES = ("lockstep", "free", "accuracy")
#: largest relative difference of a lock-step that counts as rounding;
#: docs/guide/parity.md, "Tolerances", has the measurements
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
#: a difference of up to this many times what a change of the last bits does
#: to one side alone is rounding
CHAOS = 16.0
#: changes of the last bits that are tried, in units in the last place
NUDGES = (4, 8, 16, 32)

Batches = Iterable[tuple[Any, Any]]


class Location(NamedTuple):
    """The first layer whose output differs.

    Attributes
    ----------
    a, b : base.Layer or None
        None where a layer has no counterpart.
    inputs_agree : bool
        False: its input differs already, although all layers before it
        agree: the cause is a function between the layers.
    call_a, call_b : Call
    """

    a: Any
    b: Any
    inputs_agree: bool
    call_a: Call
    call_b: Call


@dataclass
class Evidence:
    """All that is known of the step with the first difference; `b` is in the
    names and layout of `a`. What `diagnosis` works on; not saved."""

    step: int
    X: Any
    y: Any
    before: State
    a: Record
    b: Record
    #: the records of the steps before, both in the names of `a`
    earlier: list[tuple[Record, Record]]
    location: Location | None
    runner_a: Any
    runner_b: Any
    plan: Plan
    #: values of both at the start where each side had its own
    initial: tuple[dict[str, Any], dict[str, Any]] | None = None
    #: of later steps in which a stage differed for the first time
    later: list["Evidence"] = field(default_factory=list)


@dataclass
class Result:
    """What `compare` found.

    Attributes
    ----------
    mode : str
    verdict : str
        "same" or "different".
    gaps : list of Gap
        Lock-step: one for each tensor, stage and step.
    first : Gap or None
        The first difference: by step, then stage, then layer (the gradient
        pass runs backwards, and so does the order there).
    worst : dict of str -> Gap
        The largest relative difference of each stage.
    location : dict or None
        The first layer whose output differs: "a" and "b" (path, kind,
        options) and "inputs_agree".
    causes : list of Cause
        Likely causes of `first`, the best first.
    plan : Plan
        How parameters were matched.
    sides : dict
        "a" and "b": engine, network, devices, optimiser, ...
    losses : dict
        "a" and "b": mean loss of each step.
    settings : dict
        tolerance, dtype, seed, steps, dropout, weights.
    notes : list of str
        What a reader must know to believe the verdict.
    curves : dict
        Free mode: "distance" and "floor", relative, one value a step.
        Accuracy mode: "a" and "b", one value a seed, and "test".
    evidence : Evidence or None
        Not part of `to_dict`.
    """

    mode: str
    verdict: str
    gaps: list[Gap]
    plan: Plan
    sides: dict[str, dict[str, Any]]
    losses: dict[str, list[float]]
    settings: dict[str, Any]
    first: Gap | None = None
    location: dict[str, Any] | None = None
    causes: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence | None = None

    @property
    def same(self) -> bool:
        return self.verdict == "same"

    @property
    def worst(self) -> dict[str, Gap]:
        found: dict[str, Gap] = {}
        for gap in self.gaps:
            if gap.stage not in found \
                    or gap.relative > found[gap.stage].relative:
                found[gap.stage] = gap
        return {stage: found[stage] for stage in STAGES if stage in found}

    def __str__(self) -> str:
        lines = [f"{self.verdict} ({self.mode}, "
                 f"{self.settings['steps']} steps, "
                 f"{self.settings['dtype']})"]
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        lines += [f"likely cause: {cause}" for cause in self.causes[:3]]
        lines += [f"worst {stage}: {gap.relative:.1e} {gap.name}"
                  for stage, gap in self.worst.items()]
        return "\n".join(lines + self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything but `evidence`, as lists, dicts, text and numbers."""
        return {
            "format": "mgpu parity 1", "mode": self.mode,
            "verdict": self.verdict,
            "first": self.first and self.first._asdict(),
            "location": self.location,
            "causes": [cause._asdict() for cause in self.causes],
            "worst": {s: g._asdict() for s, g in self.worst.items()},
            "gaps": [gap._asdict() for gap in self.gaps],
            "plan": {"how": self.plan.how, "left": self.plan.left,
                     "confirmed": self.plan.confirmed,
                     "notes": self.plan.notes,
                     "pairs": [p._asdict() for p in self.plan.pairs]},
            "sides": self.sides, "losses": self.losses,
            "settings": self.settings, "notes": self.notes,
            "curves": self.curves}


def compare(a: Any, b: Any, *, batches: Batches,
            loss: Callable | None = None, optimizer: Any = "sgd",
            optimizer_params: Mapping[str, Any] | None = None,
            semantics: str = "gluon", devices: Any = 1,
            batch_norm: str = "per_device", native: bool = False,
            steps: int | None = None, dtype: str = "float64",
            mode: str = "lockstep", weights: str = "a",
            map: Mapping[str, matching.Target] | None = None,
            rules: matching.Rules = (), dropout: str = "masks",
            tolerance: float | None = None, seed: int = 0,
            test: Batches | None = None, seeds: Sequence[int] = range(5),
            progress: Callable[[int, int], None] | None = None) -> Result:
    """Compare how two networks train.

    ``mode="lockstep"``, the proof: before every step both sides get the same
    state (weights, running statistics, the optimiser's memory); one step is
    taken on each; outputs, the loss of each example, every gradient, every
    updated weight, the optimiser's memory and all statistics are compared.
    It holds for a whole training, however chaotic.

    ``mode="free"``: both start alike and run on their own. Their distance is
    judged against the *chaos floor*: that of `a` from itself after a change
    of the last bits at the start.

    ``mode="accuracy"``: each of `seeds` trains `a` and, from another draw,
    `b`; the accuracies on `test` go through Welch's two-sample test.

    Parameters
    ----------
    a, b : network, function that makes one, or Side
        Of either engine, or both of one. A `Side` has its own options, which
        come before those given here.
    batches : iterable of (X, y)
        NumPy arrays, rows first. One that ends early is begun again.
    loss, optimizer, optimizer_params, semantics, batch_norm, native, devices
        See `Side`. Default loss: `SoftmaxCrossEntropyLoss`.
    steps : int, optional
        Default: as many as there are batches.
    dtype : {"float64", "float32"}
    weights : {"a", "b", "own"}
        Whose values both sides start from; "own": each side keeps or draws
        its own, which are compared as stage "initial".
    map, rules
        How parameters match: `given` and `rules` of `matching.match`.
    dropout : {"masks", "off"}
        The same masks for both sides, drawn in NumPy, or no dropout at all.
    tolerance : float, optional
        Default: `TOLERANCE` of the dtype.
    test, seeds
        Accuracy mode: batches to count on, and the seeds of each side. `a`
        and `b` must be functions there, so that each seed gets a new net.
    progress : callable, optional
        ``progress(done, steps)`` after each step.

    Returns
    -------
    Result

    Raises
    ------
    MatchError
        The parameters cannot be matched.
    ValueError
        A wrong option; a loss of another shape; a network that draws random
        numbers outside its dropout layers.

    Notes
    -----
    The networks are trained for the time of the call and get their values
    and dtype back. On MXNet they stay initialised on the devices.
    """
    _check(mode=(mode, MODES), weights=(weights, ("a", "b", "own")),
           dropout=(dropout, ("masks", "off")),
           dtype=(dtype, tuple(TOLERANCE)))
    defaults = Side(None, devices, loss or SoftmaxCrossEntropyLoss(),
                    optimizer, optimizer_params, semantics, None, None, None,
                    batch_norm, native, None, None, None, seed)
    sides = [(s if isinstance(s, Side) else Side(s)).over(defaults)
             for s in (a, b)]
    if mode == "accuracy":
        from mgpu.parity.accuracy import compare_accuracy
        return compare_accuracy(*sides, batches=batches, test=test,
                                seeds=list(seeds), steps=steps, dtype=dtype,
                                progress=progress)
    work = Comparison(*sides, batches=batches, steps=steps, dtype=dtype,
                      weights=weights, given=map, rules=rules,
                      masks=Masks(seed, dropout == "off"),
                      tolerance=tolerance or TOLERANCE[dtype], seed=seed,
                      progress=progress or (lambda done, steps: None))
    try:
        return work.lockstep() if mode == "lockstep" else work.free()
    finally:
        work.restore()


def _check(**options: tuple[str, Sequence[str]]) -> None:
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"unknown {name}; received {value!r}. Use one "
                             f"of {', '.join(map(repr, known))}.")


def endless(batches: Batches, steps: int | None
            ) -> tuple[Iterator[tuple[Any, Any]], int]:
    """`batches` again and again, and the number of steps to take."""
    if not steps:
        batches = list(batches)
        steps = len(batches)
    if steps < 1:
        raise ValueError("a comparison needs a batch; received none. Pass "
                         "batches=[(X, y), ...].")

    def run() -> Iterator[tuple[Any, Any]]:
        seen, some = [], False
        for batch in batches:
            if iter(batches) is batches:
                seen.append(batch)      # an iterator runs out
            yield batch
            some = True
        while some:
            yield from seen or batches
    return itertools.islice(run(), steps), steps


def check_deterministic(runner: Runner, X: Any, y: Any) -> None:
    """Refuse a network that draws random numbers of its own (ValueError)."""
    n = 2 * len(runner.devices)
    X, y, before = _rows_of(X, n), _rows_of(y, n), runner.state()
    first, second = (runner.forward(X, y) for _ in range(2))
    runner.load(before)
    if any(not np.array_equal(x, z, equal_nan=True)
           for x, z in zip(first, second)):
        raise ValueError(
            "both sides must draw the same random numbers; received a "
            f"network on {runner.name} that draws its own outside its "
            "dropout layers (two passes from one state differ). Use dropout "
            "layers, or switch the other random parts off.")


class Comparison:
    """Two runners, the plan between them, and what has been seen."""

    def __init__(self, a: Side, b: Side, *, batches: Batches,
                 steps: int | None, dtype: str, weights: str,
                 given: Any, rules: matching.Rules, masks: Masks,
                 tolerance: float, seed: int,
                 progress: Callable[[int, int], None]):
        self.batches, self.steps = endless(batches, steps)
        self.first_batch = next(self.batches)
        self.batches = itertools.chain([self.first_batch], self.batches)
        self.tolerance, self.dtype, self.masks = tolerance, dtype, masks
        self.progress = progress
        self.epsilon = float(np.finfo(dtype).eps)
        self.notes: list[str] = []
        X, y = self.first_batch
        self.a = self._runner(a)
        self.b = self._runner(b)
        self.settings = {
            "steps": self.steps, "dtype": dtype, "tolerance": tolerance,
            "seed": seed, "weights": weights,
            "dropout": "off" if masks.off else "masks drawn in NumPy"}
        self._match(given, rules, weights)
        self._memory = self.a.slots() == self.b.slots()
        if not self._memory:
            self.notes.append(
                "the optimisers remember different things "
                f"({self.a.slots()} and {self.b.slots()}), which are neither "
                "made equal nor compared")

    def _runner(self, side: Any) -> Any:
        return Runner(side, self.first_batch[0], self.dtype, self.masks)

    def restore(self) -> None:
        for runner in (self.a, self.b):
            runner.restore()

    # -- before the first step ----------------------------------------------

    def _match(self, given: Any, rules: matching.Rules, weights: str) -> None:
        start = self.a.state(), self.b.state()
        X, _ = self.first_batch
        probe_X = _rows_of(X, 2)
        values = {e.name: start[0].values[e.name][0]
                  if e.kind in ("running_mean", "running_var")
                  else start[0].values[e.name] for e in self.a.entries}
        probe = matching.Probe(*self._probes(probe_X), values)
        try:
            self.plan = matching.match(self.a.entries, self.b.entries,
                                       given=given, rules=rules, probe=probe)
        finally:
            self.a.load(start[0])
            self.b.load(start[1])
        self.initial = start
        if weights == "b":
            self.a.load(translate(start[1], self.plan.inverse(), self.b,
                                  self.a), memory=False)
            self.initial = self.a.state(), start[1]
        self._check_deterministic()

    def _probes(self, X: Any) -> Sequence[Callable]:
        return self.a.probe(X), self.b.probe(X)

    def _check_deterministic(self) -> None:
        for runner in (self.a, self.b):
            check_deterministic(runner, *self.first_batch)
        if any(layer.kind == "dropout" for runner in (self.a, self.b)
               for layer in runner.layers):
            self.notes.append("dropout: " + self.settings["dropout"])

    # -- lock-step ----------------------------------------------------------

    def lockstep(self) -> Result:
        gaps: list[Gap] = []
        if self.settings["weights"] == "own":
            gaps += self._tensors(0, "initial", self.initial[0].values,
                                  self.plan.to_a(self.initial[1].values))
        losses: dict[str, list[float]] = {"a": [], "b": []}
        evidence: Evidence | None = None
        known: set = set()      # stages that differed in a step before
        earlier: list[tuple[Record, Record]] = []
        for number, X, y, before in self._walk():
            self.b.load(translate(before, self.plan, self.a, self.b),
                        self._memory)
            one = self.a.step(X, y, number)
            two = self._in_terms_of_a(self.b.step(X, y, number))
            found = self.compare_records(number, one, two)
            if {g.stage for g in found if g.status == "different"} - known:
                found = self._against_rounding(found, before, X, y, one,
                                               two, number)
                wrong = {g.stage for g in found if g.status == "different"}
                if wrong - known:
                    new, more = self._evidence(
                        number, X, y, before, one, two, earlier, found)
                    found = more + found
                    known |= wrong
                    if evidence is None:
                        evidence = new
                    else:
                        evidence.later.append(new)
                self.a.load(one.after)
            gaps += found
            losses["a"].append(float(np.mean(one.losses)))
            losses["b"].append(float(np.mean(two.losses)))
            earlier = earlier[-1:] + [(one, two)]
            self._last = one.after
            self.progress(len(losses["a"]), self.steps)
        if evidence is None and any(g.status == "different" for g in gaps):
            # only in the values that the sides started from
            evidence, _ = self._evidence(number, X, y, before, one, two,
                                         earlier[:-1], [])
        if evidence is not None and self.settings["weights"] == "own":
            evidence.initial = (
                self.initial[0].values,
                self.plan.to_a(self.initial[1].values))
        result = self._result("lockstep", gaps, losses)
        result.evidence = evidence
        if evidence is not None and evidence.location is not None:
            place = evidence.location
            result.location = {
                "a": place.a and place.a._asdict(),
                "b": place.b and place.b._asdict(),
                "inputs_agree": place.inputs_agree}
        if not result.same:
            result.causes = self._diagnose(result)
        self._check_moved(result, self._last)
        return result

    def _diagnose(self, result: Result) -> list[Any]:
        from mgpu.parity.diagnosis import diagnose
        return diagnose(result)

    def _walk(self) -> Iterator[tuple[int, Any, Any, State]]:
        """For each step: its number, the batch, and what `a` starts from."""
        self._last = self.a.state()
        for number, (X, y) in enumerate(self.batches, 1):
            yield number, X, y, self._last

    def _check_moved(self, result: Result, after: State) -> None:
        """Two dead networks agree perfectly: say so."""
        moved = [e.name for e in self.a.entries if e.trained and np.any(
            self.initial[0].values[e.name] != after.values[e.name])]
        if not moved:
            result.notes.append("no weight moved: the comparison proves "
                                "nothing")
        if not all(map(np.isfinite, result.losses["a"])):
            result.notes.append("the loss is not finite: from there on the "
                                "comparison proves nothing")

    def _in_terms_of_a(self, record: Record) -> Record:
        back = self.plan.inverse()
        names = {pair.a: pair.b for pair in back.pairs}
        record.gradients = back.to_b(record.gradients)
        record.apart = {names.get(n, n): d for n, d in record.apart.items()}
        record.after = translate(record.after, back, self.b, self.a)
        return record

    def compare_records(self, step: int, one: Record, two: Record
                        ) -> list[Gap]:
        """All stages of one step."""
        gaps = []
        for i, (x, z) in enumerate(itertools.zip_longest(
                one.outputs, two.outputs, fillvalue=np.zeros(0))):
            gaps.append(self._alone(step, "output", str(i) if len(
                one.outputs) > 1 else "", x, z))
        gaps.append(self._alone(step, "loss", "", one.losses, two.losses))
        gaps += self._tensors(step, "gradient", one.gradients, two.gradients)
        worst = max([0.0, *one.apart.values(), *two.apart.values()])
        if worst:
            for name in {**one.apart, **two.apart}:
                gaps.append(measure.gap(
                    step, "devices", name, one.apart.get(name, 0.0),
                    two.apart.get(name, 0.0), worst, 0.0))
        kinds = {e.name: e.kind for e in self.a.entries}
        after = _as_many(one.after.values, two.after.values, kinds)
        for stage, wanted in (("weight", False), ("statistic", True)):
            gaps += self._tensors(step, stage, *(
                {n: v for n, v in values.items() if n in kinds
                 and kinds[n].startswith("running") is wanted}
                for values in after))
        if self._memory:
            gaps += self._tensors(step, "memory", *(
                {f"{name}.{slot}": value for (name, slot), value
                 in record.after.optimizer.slots.items() if np.ndim(value)}
                for record in (one, two)))
        return sorted(gaps, key=lambda g: STAGES.index(g.stage))

    def _tensors(self, step: int, stage: str, x: Mapping[str, np.ndarray],
                 z: Mapping[str, np.ndarray]) -> list[Gap]:
        both = [name for name in x if name in z]
        layer = measure.layer_of if stage != "memory" \
            else lambda name: measure.layer_of(measure.layer_of(name))
        gaps = measure.compare_tensors(
            step, stage, {n: x[n] for n in both}, {n: z[n] for n in both},
            self.tolerance, self.epsilon, layer)
        matched = {pair.a for pair in self.plan.pairs}
        for name in (x.keys() ^ z.keys()):
            if name in matched:     # on one side nothing reached it
                gaps.append(Gap(
                    step, stage, name, np.inf, np.inf, 1.0, "different", (),
                    float(name in x), float(name in z)))
        return gaps

    def _alone(self, step: int, stage: str, name: str, x: np.ndarray,
               z: np.ndarray) -> Gap:
        scale = max(measure.size_of(x), measure.size_of(z))
        return measure.gap(step, stage, name, x, z, scale, self.tolerance)

    def _against_rounding(self, found: list[Gap], before: State, X: Any,
                          y: Any, one: Record, two: Record, number: int
                          ) -> list[Gap]:
        """Tell rounding from a difference: what do a few units in the last
        place do to `a` alone? `NUDGES` are tried until all is explained: a
        value beside a kink (ReLU) needs luck, or more than one unit."""
        signs = np.random.default_rng(number)
        # What differs without a nudge too comes from memory outside the
        # state (gradients that add up), and is no rounding.
        fixed = {(g.stage, g.name)
                 for g in self._again(before, X, y, one, two, number)
                 if g.status == "different"}
        own: dict[tuple[str, str], float] = {}
        for size in NUDGES:
            def nudge(x: Any) -> np.ndarray:
                x = np.asarray(x)
                if x.dtype.kind != "f":
                    return x
                factor = 1 + size * self.epsilon * signs.choice(
                    (-1.0, 1.0), x.shape)
                return (x * factor).astype(self.dtype)
            near = map_leaves(nudge, X)
            values = {name: nudge(value)
                      for name, value in before.values.items()}
            for g in self._again(before._replace(values=values), near, y,
                                 one, two, number):
                key = g.stage, g.name
                if key not in fixed:
                    own[key] = max(own.get(key, 0.0), g.relative)
            found = [g if g.status != "different" else g._replace(
                         own=own.get((g.stage, g.name), 0.0),
                         status="rounding" if g.relative <= CHAOS * own.get(
                             (g.stage, g.name), 0.0) else "different")
                     for g in found]
            if all(g.status != "different" for g in found):
                break
        return found

    def _again(self, start: State, X: Any, y: Any, one: Record, two: Record,
               number: int) -> list[Gap]:
        """How far `a` gets from `one` if it starts elsewhere."""
        self.a.load(start)
        return self.compare_records(number, one, self.a.step(X, y, number))

    def _calls(self, X: Any, y: Any, number: int
               ) -> tuple[list[Call], list[Call]]:
        if len(self.a.devices) == len(self.b.devices):
            return self.a.trace(X, y, number), self.b.trace(X, y, number)
        # other shards: only the rows of all devices can be compared
        return joined(self.a.traces(X, y, number)), \
            joined(self.b.traces(X, y, number))

    def _evidence(self, number: int, X: Any, y: Any, before: State,
                  one: Record, two: Record,
                  earlier: list[tuple[Record, Record]], found: list[Gap]
                  ) -> tuple[Evidence, list[Gap]]:
        location, gaps = None, []
        if any(g.stage == "output" and g.status == "different" for g in found):
            after = translate(two.after, self.plan, self.a, self.b)
            self.a.load(before)
            self.b.load(translate(before, self.plan, self.a, self.b),
                        self._memory)
            location = locate(*self._calls(X, y, number), self.a.layers,
                              self.b.layers, self.plan, self.tolerance)
            self.b.load(after, self._memory)
            if location is not None:
                x, z = (c.outputs[0] if c.outputs else np.zeros(0)
                        for c in (location.call_a, location.call_b))
                gaps.append(self._alone(number, "layer",
                                        location.call_a.path, x, z
                                        )._replace(status="different"))
        return Evidence(number, X, y, before, one, two, earlier, location,
                        self.a, self.b, self.plan), gaps

    def _result(self, mode: str, gaps: list[Gap],
                losses: dict[str, list[float]]) -> Result:
        wrong = [g for g in gaps if g.status == "different"]
        order = {e.name: i for i, e in enumerate(self.a.entries)}

        def place(g: Gap) -> Any:
            layer = order.get(g.name, len(order))
            return (g.step, STAGES.index(g.stage),
                    -layer if g.stage == "gradient" else layer)
        return Result(
            mode, "different" if wrong else "same", gaps, self.plan,
            {"a": self.a.options(), "b": self.b.options()}, losses,
            self.settings, min(wrong, key=place, default=None),
            notes=list(self.notes))

    # -- free-running -------------------------------------------------------

    def free(self) -> Result:
        batches = list(self.batches)
        start = self.a.state()
        self.b.load(translate(start, self.plan, self.a, self.b), self._memory)
        signs = np.random.default_rng(0)
        nudged = start._replace(values={
            name: value * (1 + self.epsilon * signs.choice(
                (-1.0, 1.0), value.shape)) for name, value
            in start.values.items()})

        def run(runner: Runner) -> list[Record]:
            records = []
            for number, (X, y) in enumerate(batches, 1):
                record = runner.step(X, y, number)
                record.outputs, record.gradients = [], {}
                records.append(record)
                self._done += 1
                self.progress(self._done, 3 * len(batches))
            return records
        self._done = 0
        one = run(self.a)
        self.a.load(nudged)
        near = run(self.a)
        two = [self._in_terms_of_a(record) for record in run(self.b)]
        curves: dict[str, Any] = {"distance": [], "floor": []}
        gaps, floor = [], self.epsilon
        for number, (x, n, z) in enumerate(zip(one, near, two), 1):
            def distance(other: Record) -> list[Gap]:
                return [g for g in self.compare_records(number, x, other)
                        if g.stage in ("loss", "weight", "statistic")]
            apart, own = distance(z), distance(n)
            floor = max([floor, *(g.relative for g in own)])
            worst = max(apart, key=lambda g: g.relative)
            curves["distance"].append(worst.relative)
            curves["floor"].append(floor)
            far = worst.relative > max(self.tolerance, CHAOS * floor)
            gaps += [g._replace(own=floor, status="different" if far
                                and g is worst else "same") for g in apart]
        return self._finish_free(gaps, curves, one, two)

    def _finish_free(self, gaps: list[Gap], curves: dict[str, Any],
                     one: list[Record], two: list[Record]) -> Result:
        result = self._result("free", gaps, {
            side: [float(np.mean(r.losses)) for r in records]
            for side, records in (("a", one), ("b", two))})
        result.curves = curves
        result.notes.append(
            "the distance is judged against the chaos floor, that of a from "
            "itself after a change of the last bits at the start; where the "
            "floor is large a free run proves little, lock-step does")
        return result


def _as_many(x: Mapping[str, np.ndarray], z: Mapping[str, np.ndarray],
             kinds: Mapping[str, str]) -> list[dict[str, np.ndarray]]:
    """Statistics of one device stand for those of all; of other numbers of
    devices, each is compared with all that hold the same part of them."""
    both = dict(x), dict(z)
    for name, kind in kinds.items():
        if kind.startswith("running") and all(name in v for v in both):
            count = math.lcm(*(len(v[name]) for v in both))
            for v in both:
                v[name] = np.repeat(v[name], count // len(v[name]), 0)
    return list(both)


def _rows_of(data: Any, n: int) -> Any:
    return map_leaves(lambda x: np.asarray(x)[:n], data)


def joined(traces: Sequence[Sequence[Call]]) -> list[Call]:
    """The calls of all devices as if one had had all rows."""
    def join(columns: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        return [np.concatenate([np.atleast_1d(x) for x in xs])
                for xs in zip(*columns)]
    return [Call(calls[0].path, join([c.inputs for c in calls]),
                 join([c.outputs for c in calls])) for calls in zip(*traces)]


def locate(calls_a: Sequence[Call], calls_b: Sequence[Call],
           layers_a: Sequence[Any], layers_b: Sequence[Any], plan: Plan,
           tolerance: float) -> Location | None:
    """The first layer whose output differs, or None: a layer with parameters
    is paired with that of its partner's parameters, others by kind, in the
    order of the calls between those."""
    of_a, of_b = ({layer.path: layer for layer in layers}
                  for layers in (layers_a, layers_b))
    partner = {pair.b: pair.a for pair in plan.pairs}

    def key(call: Call, layers: Mapping[str, Any], rename: Mapping[str, str]
            ) -> Any:
        layer = layers.get(call.path)
        names = [rename.get(n, n) for n in layer.parameters] if layer else []
        names = [n for n in names if n in wanted]
        return names[0] if names else (layer.kind if layer else "")
    wanted = {pair.a for pair in plan.pairs}
    keys_a = [key(c, of_a, {}) for c in calls_a]
    keys_b = [key(c, of_b, partner) for c in calls_b]
    blocks = difflib.SequenceMatcher(None, keys_a, keys_b,
                                     autojunk=False).get_matching_blocks()

    def agree(x: list[np.ndarray], z: list[np.ndarray]) -> bool:
        return len(x) == len(z) and all(
            p.size == q.size and matching.close(
                p.reshape(-1), q.reshape(-1), tolerance)
            for p, q in zip(x, z))

    def activated(call: Call, other: Call, own: Mapping[str, Any],
                  others: Mapping[str, Any], calls: Sequence[Call], i: int
                  ) -> list[np.ndarray]:
        """The output, behind the activation layer that follows it where the
        other side's layer has that activation inside."""
        inside = others[other.path].options.get("activation") \
            if other.path in others else None
        follows = own.get(calls[i + 1].path) if i + 1 < len(calls) else None
        if inside and follows is not None and follows.kind == inside:
            return calls[i + 1].outputs
        return call.outputs
    for block in blocks:
        for i in range(block.size):
            one, two = calls_a[block.a + i], calls_b[block.b + i]
            if not agree(one.outputs, two.outputs) and not agree(
                    activated(one, two, of_a, of_b, calls_a, block.a + i),
                    activated(two, one, of_b, of_a, calls_b, block.b + i)):
                return Location(of_a.get(one.path), of_b.get(two.path),
                                agree(one.inputs, two.inputs), one, two)
    return None
