"""What a comparison finds."""
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mgpu.parity.causes.registry import Cause
from mgpu.parity.location import Location
from mgpu.parity.matching import Plan
from mgpu.parity.measure import STAGES, Gap
from mgpu.parity.run import Arrays, Calls, Run, State, StepResult
from mgpu.utils import notebook

#: the worst first
STATUSES = ("different", "formula", "rounding", "zero", "same")
#: the verdict where nothing else differs than what MXNet does in float32
FLOAT32 = "same but for MXNet's float32"
#: the verdict where nothing else differs than named formulas
FORMULAS = "same but for named formulas"
#: a verdict on one screen names so many of a kind, and says how many more
SHORT = 3
#: instead of a cause, where something differs
NO_CAUSE = "none that mgpu knows explains it"
#: a note of what is so unless somebody asked for something else
ROUTINE = "dropout: masks drawn in NumPy"
#: columns of `Result.by_stage`
BY_STAGE = ("stage", "relative", "tensor", "step", "status")


@dataclass
class Evidence:
    """What is known of a step in which something differs for the first time.
    `b` is in the names and layout of `a`. The diagnosis works on it; it is
    not saved.

    Attributes
    ----------
    step : int
    X, y : nested NumPy arrays
        The batch.
    before : State
    a, b : StepResult
    earlier : list of (StepResult, StepResult)
        Of up to two steps before.
    location, predicting : Location or None
        In training mode; where that agrees, in prediction mode.
    run_a, run_b : Run
    plan : Plan
    initial : (dict, dict)
        The values of both at the start, where each side has its own.
    later : list of Evidence
        Of later steps in which another stage differs for the first time.
    calls : (list, list) or None
        All calls of layers on each device of both sides, where they are
        others than those of a step: see `mgpu.parity.further`.
    """

    step: int
    X: Any
    y: Any
    before: State
    a: StepResult
    b: StepResult
    earlier: list[tuple[StepResult, StepResult]]
    location: Location | None
    predicting: Location | None
    run_a: Run
    run_b: Run
    plan: Plan
    initial: tuple[Arrays, Arrays] = ({}, {})
    later: list["Evidence"] = field(default_factory=list)
    calls: tuple[list[Calls], list[Calls]] | None = None


@dataclass(repr=False)
class Result:
    """What `compare` found.

    Attributes
    ----------
    verdict : str
        "same", "different", "same but for MXNet's float32", "same but for
        named formulas", or "no proof": nothing differs, and for a `reason`
        that proves nothing.
    reason : str or None
        Of "no proof", and of "different" where no number differs.
    coverage : dict
        "parameters", how many a gradient moved, of how many;
        "layers_a" and "layers_b", how many layers ran, of how many;
        "not_on_trial", what no step reached, in words; "options", the
        options of layers that differ, in words: if nothing else differs, no
        step reached the difference.
    float32 : list of dict
        In float64: what MXNet computes in float32, and which was
        put into the other side before the search went on: "function", "text",
        "layers" (paths; empty for calls outside of layers), and "size", the
        largest relative difference that it explains.
    formulas : list of dict
        With a step of the user's own: formulas that Gluon and
        PyTorch have in different forms, and that explain all differences
        where they act, proven by computing one side's update with the
        other's: "text", and "size", the largest relative difference.
    gaps : list of Gap
        One for each tensor, stage and step.
    first : Gap or None
        The first difference: by step, then stage, then layer (the backward
        pass goes from the last layer to the first, and so does the order
        there).
    worst : dict of str -> Gap
        The largest relative difference of each stage.
    location : dict or None
        The first layer whose output differs: "a" and "b" (path, kind,
        options), "inputs_agree", and "predicting": whether only its outputs
        in prediction mode differ.
    causes : list of Cause
        Likely causes of `first`, the best first.
    further : list of dict
        What differs besides, if the place of `first` is put right: "place",
        in words, and "causes".
    plan : Plan
        How parameters were matched.
    sides : dict
        "a" and "b": engine, network, devices, optimizer, ...
    losses : dict
        "a" and "b": the mean loss of each step.
    settings : dict
        tolerance, dtype, seed, steps, dropout, weights.
    notes : list of str
        What a reader must know to believe the verdict.
    evidence : Evidence or None
        Not in `to_dict`.
    """

    verdict: str
    gaps: list[Gap]
    plan: Plan
    sides: dict[str, dict[str, Any]]
    losses: dict[str, list[float]]
    settings: dict[str, Any]
    first: Gap | None = None
    location: dict[str, Any] | None = None
    causes: list[Cause] = field(default_factory=list)
    further: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str | None = None
    coverage: dict[str, Any] = field(default_factory=dict)
    float32: list[dict[str, Any]] = field(default_factory=list)
    formulas: list[dict[str, Any]] = field(default_factory=list)
    evidence: Evidence | None = None

    @property
    def same(self) -> bool:
        return self.verdict == "same"

    @property
    def agrees(self) -> bool:
        """Whether they are the same, perhaps but for MXNet's float32 or for
        formulas of the frameworks."""
        return self.verdict.startswith("same")

    def proves(self, float32: bool = False, formulas: bool = False) -> bool:
        """Whether they are the same, but for MXNet's float32 (`float32`) or
        for formulas of the frameworks (`formulas`)."""
        return self.agrees and (float32 or not self.float32) \
            and (formulas or not self.formulas)

    @property
    def worst(self) -> dict[str, Gap]:
        found: dict[str, Gap] = {}
        for gap in self.gaps:
            if gap.stage not in found \
                    or gap.relative > found[gap.stage].relative:
                found[gap.stage] = gap
        return {stage: found[stage] for stage in STAGES if stage in found}

    def largest(self) -> Gap | None:
        """The largest relative difference that neither rounding nor a formula
        of the frameworks explains."""
        return max((g for g in self.gaps
                    if g.status not in ("rounding", "formula")),
                   key=lambda g: g.relative, default=None)

    def by_stage(self) -> list[list[str]]:
        """The largest relative difference of each stage as text, with the
        columns `BY_STAGE`."""
        rows = []
        for stage, gap in self.worst.items():
            counts = Counter(g.status for g in self.gaps if g.stage == stage)
            rows.append([stage, f"{gap.relative:.1e}", gap.name or "-",
                         str(gap.step), ", ".join(
                             f"{counts[s]} {s}" for s in STATUSES
                             if counts[s])])
        return rows

    def on_trial(self, most: int | None = None) -> list[str]:
        """The coverage, and what was not on trial, as lines of text; with at
        most so many (`most`) of what there may be hundreds of."""
        if not self.coverage:
            return []
        moved, a, b = (
            " of ".join(map(str, self.coverage[name]))
            for name in ("parameters", "layers_a", "layers_b"))
        return [f"on trial: {moved} parameters; {a} layers of a and {b} of b",
                *_some("not on trial", [
                    joined(text.split(", "), most)
                    for text in self.coverage["not_on_trial"]], most),
                *_some("warning: not reached by this data",
                       self.coverage["options"]
                       if self.first is None else [], most),
                *(_float32_line(found, most) for found in self.float32),
                *(f"formula: {f['text']} (a difference of up to "
                  f"{f['size']:.1e})" for f in self.formulas)]

    def short_notes(self) -> list[str]:
        """The notes that a verdict on one screen has room for."""
        return _some("note", [note for note in dict.fromkeys(self.notes)
                              if note != ROUTINE], SHORT)

    def prove_nothing(self, reason: str | None) -> None:
        """Take back that nothing differs, for a reason."""
        if reason is not None and self.agrees:
            self.verdict, self.reason = "no proof", reason

    def _head(self, causes: int) -> list[str]:
        lines = [f"{self.verdict} (lockstep, "
                 f"{self.settings['steps']} steps, "
                 f"{self.settings['dtype']})"]
        if self.reason is not None:
            lines.append(
                self.reason if self.verdict == "different"
                else f"nothing is proved: {self.reason}")
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        return lines + [f"likely cause: {cause}"
                        for cause in self.causes[:causes]]

    def further_lines(self, most: int | None = None) -> list[str]:
        """`further` as lines of text. `most`: so many, each with no more than
        the name of its cause."""
        lines = [f"{found['place']}: " + (
            NO_CAUSE if not found["causes"]
            else found["causes"][0].name if most
            else str(found["causes"][0])) for found in self.further[:most]]
        left = len(self.further) - len(lines)
        return lines + [f"{left} more places" if left > 1 else
                        "one more place"] * (left > 0)

    def __str__(self) -> str:
        likely = self.likely()
        likely[:1] = [f"likely cause: {cause}" for cause in likely[:1]]
        lines = self._head(0) + likely + [
            f"also different: {line}" for line in self.further_lines(SHORT)]
        gap = self.largest()
        if self.first is None and gap is not None:
            lines.append(f"largest difference: {gap.relative:.1e} "
                         f"({gap.stage} {gap.name}".rstrip() + ")")
        lines += self.on_trial(SHORT)
        if self.plan.confirmed is False and not self.causes:
            # perhaps it is the matching
            lines.append(self.plan.lines()[0])
        return "\n".join(lines + self.short_notes())

    def likely(self) -> list[str]:
        """The best cause, and the names of the others; or that there is none
        where one was looked for."""
        if not self.causes:
            return [NO_CAUSE] * (self.first is not None)
        others = [cause.name for cause in self.causes[1:]]
        return [str(self.causes[0])] + [
            f"other likely causes: {joined(others, SHORT)}"] * bool(others)

    def __repr__(self) -> str:
        return f"<Result: {self._head(0)[0]}>"

    def _repr_html_(self) -> str:
        return notebook.table("; ".join(self._head(1)), BY_STAGE,
                              self.by_stage())

    def to_dict(self) -> dict[str, Any]:
        """Everything but `evidence`, as lists, dicts, text and numbers."""
        return {
            "format": "mgpu parity 1", "verdict": self.verdict,
            "reason": self.reason,
            "coverage": self.coverage, "float32": self.float32,
            "formulas": self.formulas,
            "first": self.first and self.first._asdict(),
            "location": self.location,
            "causes": [cause._asdict() for cause in self.causes],
            "further": [{**found, "causes": [
                cause._asdict() for cause in found["causes"]]}
                for found in self.further],
            "worst": {s: g._asdict() for s, g in self.worst.items()},
            "gaps": [gap._asdict() for gap in self.gaps],
            "plan": {**self.plan._asdict(),
                     "pairs": [p.to_dict() for p in self.plan.pairs]},
            "sides": self.sides, "losses": self.losses,
            "settings": self.settings, "notes": self.notes}


def _some(what: str, texts: list[str], most: int | None) -> list[str]:
    """A line for each text, and one for those that are too many."""
    left = _left(texts, most)
    return [f"{what}: {text}" for text in texts[:len(texts) - left]] + [
        f"{what}: {left} more"] * bool(left)


def joined(names: list[str], most: int | None) -> str:
    """Names with commas between them, and the number of the rest."""
    left = _left(names, most)
    return ", ".join(names[:len(names) - left]) + (
        f" and {left} more" if left else "")


def _left(texts: list[str], most: int | None) -> int:
    """How many are left out: never one, which takes no more room."""
    return len(texts) - most if most and len(texts) > most + 1 else 0


def _float32_line(found: dict[str, Any], most: int | None) -> str:
    layers, s = joined(found["layers"], most), "s" * (
        len(found["layers"]) > 1)
    return (f"{found['text'].split()[0]}'s float32: {found['text']} "
            f"({f'layer{s} {layers}' if layers else 'between layers'}; a "
            f"difference of up to {found['size']:.1e})")
