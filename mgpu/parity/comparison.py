"""Do two networks train the same? See `compare`."""
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from mgpu.backends import give_back
from mgpu.backends.probing import AVERAGE
from mgpu.data.nested import map_leaves
from mgpu.parity import keys, matching, measure
from mgpu.parity.averages import Averages
from mgpu.parity.batches import Batches, endless, first_rows
from mgpu.parity.constants import Constants
from mgpu.parity.coverage import Coverage
from mgpu.parity.diagnosis import diagnose
from mgpu.parity.float32 import Float32
from mgpu.parity.formulas import Formulas
from mgpu.parity.further import described, further
from mgpu.parity.live import LiveRun, refuse_draws
from mgpu.parity.location import Location, apart, locate, outputs_of
from mgpu.parity.masks import Masks
from mgpu.parity.matching import Entry
from mgpu.parity.measure import CHAOS, STAGES, TOLERANCE, Gap
from mgpu.parity.own import OwnRun
from mgpu.parity.plan import own as owner
from mgpu.parity.precision import by_dtype
from mgpu.parity.result import FLOAT32, FORMULAS, Evidence, Result
from mgpu.parity.run import (Arrays, Calls, Run, State, StepResult,
                             at_one_device, gradients_left, join_devices,
                             translate)
from mgpu.parity.side import check_common, complete
from mgpu.parity.spill import spilled_state, spilled_step
from mgpu.utils.arguments import is_number, one_of

__all__ = ["CHAOS", "Comparison", "Evidence", "Location", "NUDGES", "Result",
           "STAGES", "TOLERANCE", "check_deterministic", "compare",
           "endless", "joined", "locate"]

#: the changes of the last bits that are tried, in units in the last place
NUDGES = (4, 8, 16, 32)
#: what rounding moves, a change so many times as large moves further, by a
#: share of that at least; what a decision moves (an index, a threshold) stays
FARTHER, SHARE = 2.0 ** 8, 2.0 ** -3
#: where rounding moves a tensor by more than this share, a step proves nothing
LARGE = 1e-2
#: what the forward pass gives, which has no kinks as gradients have
_FORWARD = ("output", "loss", "statistic", "prediction")

joined = join_devices       # its older name


def compare(a: Any, b: Any, *, batches: Batches,
            loss: Callable | None = None, optimizer: Any = "sgd",
            optimizer_params: Mapping[str, Any] | None = None,
            semantics: str = "gluon", devices: Any = 1,
            batch_norm: str = "per_device", native: bool = False,
            steps: int | None = None, dtype: str = "float64",
            weights: str = "a",
            map: Mapping[str, matching.Target] | None = None,
            rules: matching.Rules = (), dropout: str = "masks",
            tolerance: float | None = None, strict: bool = False,
            seed: int = 0, step_a: Callable[[Any], Any] | None = None,
            step_b: Callable[[Any], Any] | None = None,
            progress: Callable[[int, int], None] | None = None) -> Result:
    """Compare how two networks train, in lock-step.

    Before every step both sides get the same state: weights, running
    statistics, the optimizer's memory. One step is taken on each. Then
    outputs, the loss of each example, every gradient, every updated weight,
    the optimizer's memory and all statistics are compared. The proof holds
    for a whole training, however chaotic.

    Parameters
    ----------
    a, b : network, function that makes one, or Side
        Of either engine, or both of one. The options of a `Side` come before
        those given here.
    batches : iterable of (X, y)
        NumPy arrays, rows first. One that ends early is begun again.
    loss, optimizer, optimizer_params, semantics, batch_norm, native, devices
        See `Side`. Default loss: `SoftmaxCrossEntropyLoss`.
    steps : int, optional
        Default: as many as there are batches.
    dtype : {"float64", "float32"}
    weights : {"a", "b", "own"}
        The side whose values both start from. "own": each side keeps or
        draws its own, and they are compared as stage "initial".
    map, rules
        How parameters match: `given` and `rules` of `matching.match`.
    dropout : {"masks", "off"}
        The same masks for both sides, drawn in NumPy, or no dropout at all.
    tolerance : float, optional
        Default: `TOLERANCE` of the dtype.
    strict : bool
        Options of layers that differ, and whose difference these
        batches do not reach, count as different. So do values of what is not
        trained, where they may not be constants.
    step_a, step_b : callable, optional
        The training step of the user's own code on that side; see `step` of
        `Side`.
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
    The networks are trained during the call and get their values and dtype
    back. On MXNet they stay initialized on the devices, and its random
    streams go on from a number that they gave: their state cannot be read.
    """
    one_of("weights", weights, ("a", "b", "own"))
    check_common(dropout, dtype)
    sides = [complete(
        side, devices=1 if step or getattr(side, "step", None) else devices,
        loss=loss, optimizer=optimizer, optimizer_params=optimizer_params,
        semantics=semantics, batch_norm=batch_norm, native=native, seed=seed,
        step=step) for side, step in ((a, step_a), (b, step_b))]
    with closing(Comparison(
            *sides, batches=batches, steps=steps, dtype=dtype, seed=seed,
            dropout=dropout, tolerance=tolerance, strict=strict,
            weights=weights, given=map, rules=rules, progress=progress
            )) as work:
        try:
            return work.lockstep()
        except Exception as error:
            work.check_outputs(error)
            raise


def check_deterministic(run: LiveRun, X: Any, y: Any) -> None:
    """Refuse a network that draws random numbers of its own (ValueError)."""
    before = run.state()

    def passes(X: Any, y: Any) -> tuple[Any, ...]:
        batch = run.prepared(X, y)

        def once() -> list[np.ndarray]:
            try:
                return run.forward(*batch)
            finally:
                run.load(before)        # a pass may have moved a buffer
        return once(), *run.draws_in(once)
    few = [first_rows(z, 2 * len(run.devices)) for z in (X, y)] \
        if not isinstance(run, OwnRun) else (X, y)  # may count the rows
    try:
        first, second, drew = passes(*few)
    except Exception:       # a network may be written for so many rows
        first, second, drew = passes(X, y)
    refuse_draws(run, drew, any(not np.array_equal(x, z, equal_nan=True)
                                for x, z in zip(first, second)))


def _stepped(run: Run, X: Any, y: Any, number: int) -> StepResult:
    """A step, which may draw where a first pass has not: in its backward
    pass, in its loss, or from a step on."""
    step = partial(run.step, X, y, number)
    if isinstance(run, OwnRun) or not isinstance(run, LiveRun):
        return step()
    taken, drew = run.draws_in(step)
    refuse_draws(run, drew)
    return taken


class Comparison:
    """Two runs, and the plan by which values travel between them.

    Parameters
    ----------
    a, b : Side or Run
        A `Side` is complete.
    given, rules
        See `matching.match`.
    others
        As for `compare`.
    """

    #: whether calls of layers hold summaries
    summarised = False
    #: what had other values in `b`
    constants = Constants(set(), [], [])

    def __init__(self, a: Any, b: Any, *, batches: Batches,
                 steps: int | None, dtype: str, seed: int, dropout: str,
                 tolerance: float | None = None, strict: bool = False,
                 weights: str = "a", given: Any = None,
                 rules: matching.Rules = (),
                 progress: Callable[[int, int], None] | None = None):
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        if not is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError("tolerance is a relative difference, 0 or more "
                             f"and under 1; received {tolerance!r}.")
        self.first_batch, self.batches, self.steps = endless(batches, steps)
        self.strict = strict
        self.dtype, self.masks = dtype, Masks(seed, dropout == "off")
        self.progress = progress or (lambda done, steps: None)
        self.epsilon = float(np.finfo(dtype).eps)
        self.notes: list[str] = []
        with contextlib.ExitStack() as undo:
            self.a = self._run(a)
            undo.callback(self.a.restore)
            self.b = self._run(b)
            undo.callback(self.b.restore)
            self.settings: dict[str, Any] = {
                "steps": self.steps, "dtype": dtype,
                "tolerance": self.tolerance, "seed": seed, "weights": weights,
                "dropout": "off" if self.masks.off else "masks drawn in NumPy"}
            self._begin(given, rules, weights)
            undo.pop_all()

    def _begin(self, given: Any, rules: matching.Rules, weights: str) -> None:
        """Match what the runs have, and see what both remember."""
        self.b.like = self.a.keys
        self._match(given, rules, weights)
        slots = self.a.updates.slots, self.b.updates.slots
        self._memory = slots[0] == slots[1]
        own = [run for run in (self.a, self.b) if isinstance(run, OwnRun)]
        #: whether averages of the weights are compared
        self._averages = len(own) == 2
        self._alone = Averages(self.a.entries, (self.initial[0], translate(
            _averages_of(self.initial[1]), self.plan.inverse(), self.b,
            self.a)))
        if len(own) == 1 and own[0].parts.averaged:
            self.notes.append("the average of the weights is kept on one "
                              "side only, and was not on trial")
        if not self._memory:
            self.notes.append(
                f"the optimizers remember different things ({slots[0]} and "
                f"{slots[1]}), which are neither made equal nor compared")

    def _run(self, side: Any) -> Run:
        """The run of a network, initialized for the first batch; one of a
        file is there already."""
        if isinstance(side, Run):
            return side
        kind = OwnRun if side.step else LiveRun
        return kind(side, self.first_batch[0], self.dtype, self.masks)

    def close(self) -> None:
        """Give both networks their values and dtype back, and the system the
        memory that the comparison took."""
        for run in (self.a, self.b):
            run.restore()
        give_back()

    def check_outputs(self, error: Exception) -> None:
        """Say which side returns what, where a loss refuses other outputs
        than those of the other side (ValueError)."""
        counts = [len(run.keys.get("output") or run.keys.get("prediction")
                      or ()) for run in (self.a, self.b)]
        if counts[0] != counts[1] and all(counts) and any(
                isinstance(run, LiveRun) and run.refused
                for run in (self.a, self.b)):
            one, two = (f"{n} array{'s' * (n != 1)}" for n in counts)
            raise ValueError(
                "both networks return what the loss takes; received one (a) "
                f"that returns {one} and one (b) that returns {two}, and a "
                f"loss that raised {type(error).__name__}: {error} Let both "
                "return the same, or pass a loss that takes what either "
                "returns.") from error

    # -- before the first step ----------------------------------------------

    def _match(self, given: Any, rules: matching.Rules, weights: str) -> None:
        """Find the plan, and the values that both sides start from."""
        start = spilled_state(self.a.state()), spilled_state(self.b.state())
        values_b = at_one_device(start[1], self.b.entries)
        whole = self.first_batch[0]

        def matched(X: Any) -> matching.Plan:
            return matching.match(
                self.a.entries, self.b.entries, given=given, rules=rules,
                probe=matching.Probe(
                    self.a.probe(X), self.b.probe(X),
                    at_one_device(start[0], self.a.entries),
                    (self.a.layers, self.b.layers),
                    # as far as float32 rounds in many layers
                    1e-4 if self.dtype == "float32" else 1e-6,
                    {e.name: values_b[e.name]
                     for e in self.b.entries if e.kind == "other"}))
        try:
            try:
                self.plan = matched(first_rows(whole, 2))
            except Exception as error:
                if isinstance(error, matching.MatchError) \
                        or not isinstance(self.a, LiveRun):
                    raise   # a trace has no other pass
                # A network may be written for so many rows.
                self.plan = matched(whole)
        finally:
            self.a.load(start[0])
            self.b.load(start[1])
        self._note_crossed(given)
        self.initial = start
        self.constants = Constants.of(
            self.plan, self.a.entries, self.b.entries, start[0].values,
            start[1].values, self.tolerance)
        if weights == "b":
            self.a.load(translate(start[1], self.plan.inverse(), self.b,
                                  self.a), memory=False)
        for run in (self.a, self.b):
            # A step of the user's own is taken only when its turn comes:
            # it may count its calls.
            if isinstance(run, LiveRun) and not isinstance(run, OwnRun):
                check_deterministic(run, *self.first_batch)
        if not all(pair.whole for pair in self.plan.pairs):
            self.notes += dict.fromkeys(
                f"{run.updates.optimizer!r} does not update each element by "
                "itself: how parameters are divided makes a difference"
                for run in (self.a, self.b) if not run.updates.by_element())
        if any(layer.kind == "dropout" for run in (self.a, self.b)
               for layer in run.layers):
            self.notes.append("dropout: " + self.settings["dropout"])

    def _note_crossed(self, given: Any) -> None:
        """Say of layers that stand for one another, unless the user has."""
        if given or self.plan.confirmed is not True \
                or self.plan.how in ("equal names", "order and shape"):
            return
        crossed = self.plan.crossed()
        turned = self.plan.turned(self.a.entries, self.b.entries)
        if turned and not crossed:
            names, others = (", ".join(dict.fromkeys(owner(n) for n in side))
                             for side in turned[0])
            self.notes.append(
                f"{names} of a {'are' if ', ' in names else 'is'} {others} of "
                f"b in this order ({len(turned)} such tensors), which is not "
                "that in which they were made: a forward pass decides between "
                "tensors of one shape. Weights that are loaded in the order "
                "in which they stand give something else; if a port uses one "
                "in another's place, exchange them")
        if crossed:
            n, m = crossed[0]
            self.notes.append(
                f"{n} of a is paired with {m} of b, although b has "
                f"{n} too ({len(crossed)} such names): paired by equal names, "
                "the outputs differ, and so they do with weights that are "
                "loaded by name. If a port uses one layer in another's place, "
                "exchange them; if it is meant, say so with a map")

    def _note_keys(self) -> None:
        """Say which outputs are partners whose keys differ."""
        self.notes += dict.fromkeys(
            note for stage in self.a.keys.keys() & self.b.keys.keys()
            if (note := keys.unlike(self.a.keys[stage], self.b.keys[stage])))

    # -- lock-step ----------------------------------------------------------

    def lockstep(self) -> Result:
        """Take all steps, each from equal states, and compare them."""
        gaps: list[Gap] = []
        if self.settings["weights"] == "own":
            gaps += [g for g in self._tensors(
                0, "initial", self.initial[0].values,
                self.plan.to_a(self.initial[1].values))
                if g.name not in self.constants.names]
        losses: dict[str, list[float]] = {"a": [], "b": []}
        evidence: list[Evidence] = []
        known: set = set()      # stages that differed in a step before
        earlier: list[tuple[StepResult, StepResult]] = []
        seen = Coverage(self.a, self.b, self.plan)
        self._float32, formulas = (float32 := Float32(self)), Formulas(self)
        for number, X, y, before in self._walk():
            self.load_b(before)
            one = spilled_step(_stepped(self.a, X, y, number))
            two = self.in_terms_of_a(spilled_step(
                _stepped(self.b, X, y, number)))
            seen.add(before, one, two)
            if not earlier:
                gaps += self._constants(before, one, two)
            found = formulas.explain(number, X, y, before, one, two,
                                     self.compare_results(number, one, two))
            if _different(found) - known:
                found = self._against_rounding(found, before, X, y, one,
                                               two, number)
                if _different(found) - known:
                    one, two, new = float32.put_in(number, X, y, before, one,
                                                   two, found)
                    if new is not found:
                        found = self._against_rounding(new, before, X, y, one,
                                                       two, number)
                found = formulas.explain(number, X, y, before, one, two, found)
                if _different(found) - known:
                    proof, more = self._evidence(
                        number, X, y, before, one, two, earlier, found)
                    if not evidence:
                        self._note_draws(number, X, y, before)
                    known |= _different(found)
                    found = more + found
                    evidence.append(proof)
                self.a.load(one.after)
            gaps += found
            for side, taken in (("a", one), ("b", two)):
                losses[side].append(float(np.mean(taken.losses))
                                    if taken.losses.size else math.nan)
            earlier = earlier[-1:] + [(one, two)]
            self._last = one.after
            self.progress(len(losses["a"]), self.steps)
        if not evidence and _different(gaps):
            # only in the values that the sides started from
            evidence = [self._evidence(number, X, y, before, one, two,
                                       earlier[:-1], [])[0]]
        self._note_keys()
        result = self._result(gaps, losses)
        result.float32 = float32.found
        result.formulas = list(formulas.found.values())
        if result.same and (result.float32 or result.formulas):
            result.verdict = FLOAT32 if not result.formulas else FORMULAS \
                + ", and MXNet's float32" * bool(result.float32)
        if seen.options() and not _different(gaps):
            seen.leave_out(apart(
                *self.calls(number, X, y, before), self.a.by_path(),
                self.b.by_path(), self.plan, self.tolerance))
        result.coverage = seen.to_dict()
        if evidence:
            self._explain(result, *evidence)
        self._judge(result, seen)
        if result.agrees and self.dtype == "float64":
            wrong = by_dtype({"a": self.a, "b": self.b}, X, y, result.notes)
            if wrong:
                result.verdict, result.reason = "different", wrong
        return result

    def _constants(self, before: State, *after: StepResult) -> list[Gap]:
        """The gaps of constants, once a step has been taken."""
        found = self.constants.moved(
            before.values, *(step.after.values for step in after))
        if self.strict or self.settings["weights"] == "own":
            return found.wrong + found.unsure
        self.notes += found.note()
        return found.wrong

    def _note_draws(self, number: int, X: Any, y: Any, before: State) -> None:
        """Say of steps of the user's own that draw random numbers."""
        for run, load in ((self.a, self.a.load), (self.b, self.load_b)):
            if isinstance(run, OwnRun):
                load(before)
                one, two = (run.forward(X, y, number) for _ in range(2))
                if any(not np.array_equal(x, z, equal_nan=True)
                       for x, z in zip(one, two)):
                    run.draws = True
                    self.notes.append(
                        f"the step on {run.name} draws random numbers of its "
                        "own outside of dropout layers: taken twice from one "
                        "state, it gives other outputs")

    def _judge(self, result: Result, seen: Coverage) -> None:
        """Two dead networks agree perfectly: that is no proof."""
        result.prove_nothing(seen.nothing())
        if self.plan.confirmed is False and not result.float32:
            result.prove_nothing(
                "with equal values the outputs differ, although no step "
                "shows a difference")
        if self._averages:
            result.prove_nothing(self._alone.unproven())
        result.prove_nothing(_blurred(result.gaps, self.epsilon))
        if self.strict and result.first is None \
                and result.coverage["options"]:
            result.verdict = "different"
            result.reason = "options of layers differ, which no step reached"
        if seen.had_loss and not all(map(np.isfinite, result.losses["a"])):
            result.notes.append("the loss is not finite: from there on the "
                                "comparison proves nothing")

    def load_both(self, state: State) -> None:
        """Give both sides a state of `a`."""
        self.a.load(state)
        self.load_b(state)

    def load_b(self, state: State) -> None:
        """Give `b` a state of `a`."""
        self.b.load(translate(state, self.plan, self.a, self.b), self._memory)

    def _explain(self, result: Result, first: Evidence, *later: Evidence
                 ) -> None:
        """Add the place of the first difference, and its causes."""
        if result.worst.get("initial"):
            first.initial = (self.initial[0].values,
                             self.plan.to_a(self.initial[1].values))
        first.later += later
        result.evidence = first
        place = first.location or first.predicting
        if place is not None:
            result.location = {
                "a": place.a and place.a._asdict(),
                "b": place.b and place.b._asdict(),
                "inputs_agree": place.inputs_agree,
                "predicting": first.location is None}
        result.causes = diagnose(result)
        result.further = described(result, further(self, first))

    def _walk(self) -> Iterator[tuple[int, Any, Any, State]]:
        """For each step: its number, the batch, and what `a` starts from."""
        self._last = spilled_state(self.a.state())
        for number, (X, y) in enumerate(self.batches, 1):
            yield number, X, y, self._last

    def in_terms_of_a(self, step: StepResult) -> StepResult:
        """A step of `b`, changed to the names and terms of `a`."""
        back = self.plan.inverse()
        step.gradients = back.to_b(step.gradients)
        step.apart = _worst(step.apart, back.names())
        if step.own is not None:
            step.own = step.own._replace(left=back.to_b(step.own.left))
        step.after = translate(step.after, back, self.b, self.a)
        return step

    def compare_results(self, step: int, one: StepResult, two: StepResult
                        ) -> list[Gap]:
        """The gaps of all stages of one step, stage after stage."""
        own = one.own is not None or two.own is not None
        gaps = self._outputs_of(step, "output", one.outputs, two.outputs, own)
        if one.predictions is not None and two.predictions is not None:
            gaps += self._outputs_of(step, "prediction", one.predictions,
                                     two.predictions, own)
        losses = one.losses, two.losses
        if own and losses[0].shape != losses[1].shape:
            # what the one side returns is compared with the other's mean
            for x in (one, two):
                x.losses = x.losses.mean(keepdims=True) if all(
                    z.size for z in losses) else np.zeros(0)
        if not own or one.losses.size:
            gaps.append(self.single_gap(step, "loss", "", one.losses,
                                        two.losses))
        gaps += self._own_gaps(step, one, two) if own else \
            self._tensors(step, "gradient", one.gradients, two.gradients)
        firsts = {n: p.a[0] for p in self.plan.pairs for n in p.a}
        mine, yours = (_worst(s.apart, firsts) for s in (one, two))
        worst = max([0.0, *mine.values(), *yours.values()])
        gaps += [measure.gap(
            step, "devices", name, mine.get(name, 0.0),
            yours.get(name, 0.0), worst, 0.0)
            for name in {**mine, **yours} if worst]
        entries = {e.name: e for e in self.a.entries}
        after = _as_many(one.after.values, two.after.values, entries.values())
        for stage, statistic in (("weight", False), ("statistic", True)):
            gaps += self._tensors(step, stage, *(
                {n: v for n, v in values.items() if n in entries
                 and entries[n].is_statistic is statistic}
                for values in after))
        memory = [{f"{name}.{slot}": value for (name, slot), value
                   in result.after.optimizer.slots.items()
                   if np.ndim(value) and (self._memory or slot == AVERAGE)}
                  for result in (one, two)]
        if own:     # what one side has thrown away counts as zeros
            known = {f"{n}.{AVERAGE}" for n in self._alone.left_out(one, two)
                     if self._averages}
            memory = [{n: mine[n] if n in mine else np.zeros_like(yours[n])
                       for n in {**memory[0], **memory[1]} if n not in known
                       and (self._averages or not n.endswith("." + AVERAGE))}
                      for mine, yours in (memory, memory[::-1])]
            gaps += self._count_gaps(step, one, two)
        if self._memory or memory[0]:
            gaps += self._tensors(step, "memory", *memory)
        return sorted(gaps, key=lambda g: STAGES.index(g.stage))

    def _count_gaps(self, step: int, one: StepResult, two: StepResult
                    ) -> list[Gap]:
        """The gap of the numbers of updates, on which a formula may depend:
        of the first weight for which they differ."""
        counts = [result.after.optimizer.counts for result in (one, two)]
        trained = {e.name for e in self.a.entries if e.trained}
        wrong = [n for n in {**counts[0], **counts[1]}
                 if n in trained and self._memory
                 and counts[0].get(n) != counts[1].get(n)]
        return [self.single_gap(
            step, "memory", f"{n}.updates",
            *(np.array(float(own.get(n, 0))) for own in counts))
            for n in wrong[:1]]

    def _outputs_of(self, step: int, stage: str, one: list[np.ndarray],
                    two: list[np.ndarray], own: bool = False) -> list[Gap]:
        """`own`: code of the user's has called a network, perhaps in another
        form (on half a batch): what has no partner is left. States may have
        an axis of one layer more."""
        pairs = [(x, measure.in_shape_of(x, z) if own else z)
                 for x, z in itertools.zip_longest(
                     one, two, fillvalue=np.zeros(0))]
        return [self.single_gap(
            step, stage, str(i) if len(one) > 1 else "", x, z)
            for i, (x, z) in enumerate(pairs)
            if stage == "prediction" or not own or x.shape == z.shape]

    def _own_gaps(self, step: int, one: StepResult, two: StepResult
                  ) -> list[Gap]:
        """The gaps of gradients and rates where the user's code takes the
        steps. Gradients count as the optimizers get them; where they differ,
        and did not when the backward pass ended, the stage is "clipping".
        Those of weights that no optimizer has do not count."""
        held = one.gradients.keys() | two.gradients.keys()

        def left(step: StepResult) -> Arrays:
            return {n: g for n, g in gradients_left(step).items()
                    if n in held}

        def pair(x: Arrays, z: Arrays) -> tuple[Arrays, Arrays]:
            # A loop of the framework leaves zeros, or nothing at all.
            return tuple({n: v[n] if n in v else np.zeros_like(w[n])
                          for n in {**x, **z} if n in names}
                         for v, w in ((x, z), (z, x)))  # type: ignore
        names = self.plan.names()
        gaps = self._tensors(step, "gradient",
                             *pair(one.gradients, two.gradients))
        if _different(gaps):
            before = self._tensors(step, "gradient",
                                   *pair(left(one), left(two)))
            gaps = before if _different(before) else [
                g._replace(stage="clipping") for g in gaps]
        rates = [(name, np.array(self.a.updates.last_rate(
            name, one.after.optimizer.num_update)), np.array(
                self.b.updates.last_rate(
                    names[name], two.after.optimizer.num_update)))
                 for name in one.gradients
                 if name in two.gradients and name in names]
        if rates:
            n, x, z = max(rates, key=lambda r: abs(r[1] - r[2]))
            gaps.append(self.single_gap(step, "rate", n, x, z))
        return gaps

    def _tensors(self, step: int, stage: str, x: Arrays, z: Arrays
                 ) -> list[Gap]:
        layer = measure.layer_of if stage != "memory" \
            else lambda name: measure.layer_of(measure.layer_of(name))
        gaps = measure.compare_tensors(
            step, stage, x, z, self.tolerance, self.epsilon, layer)
        # on one side nothing reached these
        alone = (x.keys() ^ z.keys()) & self.plan.names().keys()
        return gaps + [Gap(step, stage, name, np.inf, np.inf, 1.0,
                           "different", (), float(name in x),
                           float(name in z)) for name in alone]

    def single_gap(self, step: int, stage: str, name: str, x: np.ndarray,
                   z: np.ndarray) -> Gap:
        """The gap of a tensor that belongs to no layer's parameters."""
        scale = max(measure.size_of(x), measure.size_of(z))
        return measure.gap(step, stage, name, x, z, scale, self.tolerance)

    def _against_rounding(self, found: list[Gap], before: State, X: Any,
                          y: Any, one: StepResult, two: StepResult,
                          number: int) -> list[Gap]:
        """Tell rounding from a difference: what does a change of a few units
        in the last place do to `a`? `NUDGES` are tried until they explain
        all gaps: a value next to a kink (ReLU) needs luck, or more units."""
        given = found
        # What differs without a nudge too comes from memory outside the
        # state (gradients that add up). It is not rounding.
        fixed = {(g.stage, g.name)
                 for g in self._again(before, X, y, one, two, number)
                 if g.status == "different"}
        own: dict[tuple[str, str], float] = {}
        for size in NUDGES:
            near = partial(self.near, before, X, y, one, two, number, size)
            for key, far in self._by_rounding(near, found).items():
                if key not in fixed:
                    own[key] = max(own.get(key, 0.0), far)
            found = [g if g.status != "different" else g._replace(
                own=(left := own.get((g.stage, g.name), 0.0)),
                status="rounding" if g.relative <= CHAOS * left
                else "different") for g in found]
            if not _different(found):
                break
        if isinstance(self.a, OwnRun) and any(
                g.status == "different" and (g.stage, g.name) not in fixed
                for g in self._again(before, X, y, one, two, number)):
            self.notes.append(
                f"the step on {self.a.name} does something else when it is "
                "taken once more from one state: it carries on what its parts "
                "do not name, so that nothing is taken for rounding")
            return given
        return found

    def _by_rounding(self, near: Callable[[float], list[Gap]],
                     found: list[Gap]) -> dict[tuple[str, str], float]:
        """How far a change of the last bits moves each tensor of `a`, as far
        as rounding does that: nothing if it changes what the network decides,
        so that the forward pass jumps. Where it moves a gradient much further
        than the sides are apart, an update may differ twice as far as that
        difference takes it. `near`: how far a change so many times as large
        moves them."""
        moved = {(g.stage, g.name): g.relative for g in near(1)}
        # What is rounded to float32 jumps by its last bit, and no decision.
        limit = TOLERANCE["float32" if self._float32.found else self.dtype]
        jumps = {key: far for key, far in moved.items()
                 if key[0] in _FORWARD and far > limit}
        if jumps:
            farther = {(g.stage, g.name): g.relative
                       for g in near(FARTHER)}
            if any(farther.get(key, 0.0) < FARTHER * SHARE * far
                   for key, far in jumps.items()):
                return {}
        shares = {g.name: 2 * g.relative / (CHAOS * far) for g in found
                  if g.stage == "gradient"
                  and (far := moved.get(("gradient", g.name), 0.0))
                  > CHAOS * max(g.relative, self.tolerance)}
        return {(stage, name): far * shares.get(
            name if stage == "weight" else measure.layer_of(name)
            if stage == "memory" else "", 1.0)
            for (stage, name), far in moved.items()}

    def near(self, before: State, X: Any, y: Any, one: StepResult,
              two: StepResult, number: int, size: int, times: float
              ) -> list[Gap]:
        """How far `a` gets from `one` if all is moved by `size` units in the
        last place, or by so many times that in the same directions."""
        nudge = partial(self._nudged, size=size * times,
                        signs=np.random.default_rng((number, size)))
        near = map_leaves(nudge, X)
        values = {name: nudge(value) for name, value in before.values.items()}
        self.a.nudge = lambda ones: nudge(ones, whole=True)
        try:                    # gradients of rows may cancel out
            return self._again(before._replace(values=values), near, y, one,
                               two, number)
        finally:
            self.a.nudge = None

    def _nudged(self, x: Any, size: float, signs: np.random.Generator,
                whole: bool = False) -> np.ndarray:
        """An array whose floats are moved by `size` units in the last place,
        up or down. Whole numbers are not, unless `whole`: no rounding makes
        others of them, and a network may take an index from them."""
        x = np.asarray(x)
        if x.dtype.kind != "f":
            return x
        factor = 1 + size * self.epsilon * signs.choice((-1.0, 1.0), x.shape)
        if not whole:
            factor = np.where(x == np.rint(x), 1.0, factor)
        return np.asarray(x * factor, self.dtype)

    def _again(self, start: State, X: Any, y: Any, one: StepResult,
               two: StepResult, number: int) -> list[Gap]:
        """How far `a` gets from `one` if it starts elsewhere."""
        self.a.load(start)
        return self.compare_results(number, one, self.a.step(X, y, number))

    def _calls(self, X: Any, y: Any, number: int, predict: bool
               ) -> tuple[Calls, Calls]:
        if len(self.a.devices) == len(self.b.devices):
            (one,), (two,) = (run.calls(X, y, number, first=True,
                                        predict=predict)
                              for run in (self.a, self.b))
            return one, two
        # other shards: only the rows of all devices can be compared
        return join_devices(self.a.calls(X, y, number, predict=predict)), \
            join_devices(self.b.calls(X, y, number, predict=predict))

    def calls(self, number: int, X: Any, y: Any, before: State,
              predict: bool = False) -> tuple[Calls, Calls]:
        """All calls of layers of both sides in a step from `before`."""
        self.load_both(before)
        return self._calls(X, y, number, predict)

    def _evidence(self, number: int, X: Any, y: Any, before: State,
                  one: StepResult, two: StepResult,
                  earlier: list[tuple[StepResult, StepResult]],
                  found: list[Gap]) -> tuple[Evidence, list[Gap]]:
        """The evidence of a step. Where outputs differ, also the gap of the
        first layer whose output does."""
        location, predicting, gaps = None, None, []
        wrong = _different(found)
        if wrong & {"output", "prediction"}:
            after = translate(two.after, self.plan, self.a, self.b)
            predict = "output" not in wrong
            location = locate(*self.calls(number, X, y, before, predict),
                              self.a.by_path(), self.b.by_path(), self.plan,
                              self.tolerance, self.summarised)
            self.b.load(after, self._memory)
            if predict:     # no cause of a training pass is looked for there
                location, predicting = None, location
        if location is not None:
            one_call, two_call = location.call_a, location.call_b
            both = [*zip(*outputs_of(one_call, two_call, self.summarised))]
            given = [*zip(one_call.inputs, two_call.inputs)]
            if not location.inputs_agree and given and both and len({
                    x.shape for x in both[0]}) > len({
                        x.shape for x in given[0]}):
                both = given    # which can be compared
            apart = [self.single_gap(
                number, "layer", location.call_a.path, x, z)
                for x, z in both or [(np.zeros(0), np.zeros(0))]]
            gaps.append(next((g for g in apart if g.status == "different"),
                             apart[0])._replace(status="different"))
        return Evidence(number, X, y, before, one, two, earlier, location,
                        predicting, self.a, self.b, self.plan), gaps

    def _result(self, gaps: list[Gap], losses: dict[str, list[float]]
                ) -> Result:
        wrong = [g for g in gaps if g.status == "different"]
        order = {e.name: i for i, e in enumerate(self.a.entries)}

        def place(g: Gap) -> Any:
            layer = order.get(g.name, len(order))
            return (g.step, STAGES.index(g.stage),
                    -layer if g.stage == "gradient" else layer)
        return Result(
            "different" if wrong else "same", gaps, self.plan,
            {"a": self.a.options(), "b": self.b.options()}, losses,
            self.settings, min(wrong, key=place, default=None),
            notes=list(self.notes))


def _different(gaps: Sequence[Gap]) -> set[str]:
    """The stages in which something differs."""
    return {g.stage for g in gaps if g.status == "different"}


def _averages_of(state: State) -> State:
    """The state without any other memory."""
    return state._replace(optimizer=state.optimizer._replace(slots={
        key: x for key, x in state.optimizer.slots.items()
        if key[1] == AVERAGE}))


def _blurred(gaps: Sequence[Gap], epsilon: float) -> str | None:
    """What to say where rounding alone moves a tensor so far that a mistake
    in it would not show. What is zero but for rounding, and an update by such
    a gradient, are no place of a mistake."""
    sizes: dict[tuple[int, str], float] = {}
    for g in gaps:
        key = g.step, g.stage
        sizes[key] = max(sizes.get(key, 0.0), g.scale)
    noise = {(g.step, g.name) for g in gaps if g.stage == "gradient" and (
        g.status == "zero"
        or g.scale <= measure.ZERO * epsilon * sizes[g.step, g.stage])}
    for g in gaps:
        name = measure.layer_of(g.name) if g.stage == "memory" else g.name
        if g.status == "rounding" and g.relative > LARGE \
                and (g.step, name) not in noise:
            return (f"in step {g.step} rounding alone moves {g.stage} "
                    f"{g.name}".rstrip() + f" by {g.own:.0%} of its size, so "
                    "that a mistake there would not show. Compare "
                    + "in float64, " * (epsilon > 1e-10)
                    + "with other data or from other weights")
    return None


def _worst(apart: Mapping[str, float], names: Mapping[str, str]
           ) -> dict[str, float]:
    """The largest number under each of the new names."""
    found: dict[str, float] = {}
    for name, distance in apart.items():
        name = names.get(name, name)
        found[name] = max(found.get(name, 0.0), distance)
    return found


def _as_many(x: Arrays, z: Arrays, entries: Iterable[Entry]) -> list[Arrays]:
    """Values with as many copies of each statistic on both sides.
    Statistics of one device stand for those of all; of other numbers of
    devices, each is compared with all that hold the same share of them."""
    both = dict(x), dict(z)
    for e in entries:
        if e.is_statistic and all(e.name in v for v in both):
            count = math.lcm(*(len(v[e.name]) for v in both))
            for v in both:
                v[e.name] = np.repeat(v[e.name], count // len(v[e.name]), 0)
    return list(both)
