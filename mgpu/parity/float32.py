"""What MXNet computes in float32 in a float64 network, and torch in one case.

It is put into the other side, function by function, so that the search for a
difference goes on past it.
"""
from typing import Any, NamedTuple

from mgpu.parity.location import pairs
from mgpu.parity.measure import CHAOS, TOLERANCE, Gap
from mgpu.parity.run import State, StepResult

#: what is of float32, by the names of `mgpu.backends.probing.Float32Functions`
WORDS = {
    "leaky_relu": "MXNet multiplies the negative half of LeakyReLU in float32",
    "prelu": "MXNet multiplies the negative half of PReLU in float32",
    "elu": "MXNet keeps alpha of ELU as float32",
    "selu": "MXNet keeps the constants of SELU as float32",
    "gelu": "MXNet computes GELU in float32",
    "erf": "MXNet keeps the constant of the gradient of erf as float32",
    "hard_sigmoid": "MXNet keeps alpha and beta of hard_sigmoid as float32",
    "clip": "MXNet keeps the bounds of clip as float32",
    "hardsigmoid": "torch keeps the 1/6 of the gradient of hardsigmoid as "
                   "float32",
    "layer_norm": "MXNet keeps epsilon of LayerNorm as float32",
    "group_norm": "MXNet keeps epsilon of GroupNorm as float32",
    "interpolate": "MXNet computes the positions of BilinearResize2D in "
                   "float32"}

#: other kinds of layers that call them
_KINDS = {"hard_sigmoid": "hardsigmoid", "erf": "gelu"}

#: the spacing of numbers of float32 at 1
EPSILON = 2.0 ** -23
#: relative differences below are rounding of float64
_ROUNDING = 1e-12


class _Try(NamedTuple):
    """One step with some functions as in MXNet."""

    one: StepResult
    two: StepResult
    gaps: list[Gap]
    #: relative differences in the order of the step: of inputs and outputs
    #: of layers, then the gaps
    apart: list[float]

    def is_closer(self, other: "_Try") -> bool:
        """Whether the first difference that is not as in `other` is
        smaller."""
        for new, old in zip(self.apart, other.apart):
            if max(new, old) > _ROUNDING and not 0.1 * old <= new <= 10 * old:
                return new < old
        return False


class Float32:
    """Finds what explains a difference, and leaves it in the side that can
    compute like MXNet.

    Parameters
    ----------
    comparison : mgpu.parity.comparison.Comparison

    Attributes
    ----------
    found : list of dict
        See `mgpu.parity.result.Result.float32`.
    """

    def __init__(self, comparison: Any) -> None:
        self._comparison = comparison
        able = [run for run in (comparison.a, comparison.b)
                if run.float32 is not None]
        # the side that computes as MXNet does, if one of the two can
        self._run: Any = able[0] if len(able) == 1 \
            and comparison.dtype == "float64" else None
        self.found: list[dict[str, Any]] = []

    def put_in(self, number: int, X: Any, y: Any, before: State,
               one: StepResult, two: StepResult, gaps: list[Gap]
               ) -> tuple[StepResult, StepResult, list[Gap]]:
        """Let functions compute as in MXNet where that makes the sides agree
        further in this step, and in all later ones. Returns the step's
        results and gaps then."""
        if self._run is None:
            return one, two, gaps
        untried = self._met(number, X, y, before)
        if not untried:
            return one, two, gaps
        chosen = self._run.float32
        first = best = self._try(number, X, y, before, one, two, gaps)
        names, count = chosen.names, len(self.found)
        while True:
            for name in untried:
                chosen.names |= {name}
                tried = self._take(number, X, y, before, best)
                if tried.is_closer(best):
                    self._note(name, best, tried)
                    break
                chosen.names -= {name}
            else:
                break
            best = tried
            untried.remove(name)
        if self._too_far(number, X, y, before, first, best):
            chosen.names = names
            del self.found[count:]
            best = first
        return best.one, best.two, best.gaps

    def _too_far(self, number: int, X: Any, y: Any, before: State,
                 first: _Try, best: _Try) -> bool:
        """Whether more is gone in `best` than float32 explains: what
        rounding to it moves by itself, or what it takes where the network
        enlarges that."""
        left = {(g.stage, g.name): g.relative for g in best.gaps}
        gone = [g for g in first.gaps if g.relative > max(
            TOLERANCE["float32"], 10 * left.get((g.stage, g.name), 0.0))]
        if not gone:
            return False
        work = self._comparison
        moved = {(g.stage, g.name): g.relative for g in work.near(
            before, X, y, best.one, best.two, number, 1, EPSILON
            / work.epsilon)}
        return any(g.relative > CHAOS * moved.get((g.stage, g.name), 0.0)
                   for g in gone)

    def _met(self, number: int, X: Any, y: Any, before: State) -> list[str]:
        """Functions that the step calls, and that are not chosen yet."""
        run, chosen = self._run, self._run.float32
        self._load(before)
        chosen.met, chosen.watched = {}, True
        try:
            run.forward(*run.prepared(X, y), number)
        finally:
            chosen.watched = False
        return [name for name in chosen.met if name not in chosen.names]

    def _load(self, before: State) -> None:
        work = self._comparison
        if self._run is work.a:
            work.a.load(before)
        else:
            work.load_b(before)

    def _take(self, number: int, X: Any, y: Any, before: State, last: _Try
              ) -> _Try:
        work, run = self._comparison, self._run
        self._load(before)
        step = run.step(X, y, number)
        one, two = (step, last.two) if run is work.a \
            else (last.one, work.in_terms_of_a(step))
        return self._try(number, X, y, before, one, two,
                         work.compare_results(number, one, two))

    def _try(self, number: int, X: Any, y: Any, before: State,
             one: StepResult, two: StepResult, gaps: list[Gap]) -> _Try:
        work = self._comparison
        calls_a, calls_b = work.calls(number, X, y, before)
        layers_a, layers_b = work.a.by_path(), work.b.by_path()
        apart = [
            work.single_gap(number, "layer", "", x, z).relative
            for i, j in pairs([call.path for call in calls_a],
                              [call.path for call in calls_b],
                              layers_a, layers_b, work.plan)
            for own, other in ((calls_a[i].inputs, calls_b[j].inputs),
                               (calls_a[i].outputs, calls_b[j].outputs))
            for x, z in zip(own, other) if x.shape == z.shape]
        return _Try(one, two, gaps, apart + [g.relative for g in gaps])

    def _note(self, name: str, before: _Try, after: _Try) -> None:
        """Keep what was found: how large the difference was that is gone."""
        size = max((old for old, new in zip(before.apart, after.apart)
                    if old > _ROUNDING and new < 0.1 * old), default=0.0)
        run = self._run
        ran = set((after.one if run is self._comparison.a
                   else after.two).ran)
        self.found.append({
            "function": name, "text": WORDS[name], "size": size,
            "layers": [layer.path for layer in run.layers
                       if layer.kind in (name, _KINDS.get(name))
                       and layer.path in ran]})
