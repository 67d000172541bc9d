"""Constants of networks: what is not trained and drawn by no initializer, such
as a table of positions, a mask, or the mean of the input.

A network computes them itself, so that a port can compute them wrongly. They
are compared as they were before one side got the other's values.
"""
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mgpu.parity.maps import Wish, pair_of
from mgpu.parity.measure import TOLERANCE, Gap, gap, in_shape_of, size_of
from mgpu.parity.plan import Entry, Pair, Plan

Values = Mapping[str, np.ndarray]


def apart(name: str, x: np.ndarray, z: np.ndarray, tolerance: float) -> Gap:
    """The gap of a constant. Where a side holds float32, rounding is that of
    float32: in a table, of a sine of as many as its longest axis has."""
    if any(np.array_equal(v, v.astype(np.float32), equal_nan=True)
           for v in (x, z)):
        tolerance = max(tolerance, TOLERANCE["float32"], max(
            np.shape(x), default=1) * float(np.finfo(np.float32).eps))
    return gap(0, "initial", name, x, z, max(size_of(x), size_of(z)),
               tolerance)


def by_value(a: Sequence[Entry], b: Sequence[Entry], pairs: Sequence[Pair],
             values_a: Values, values_b: Values, tolerance: float
             ) -> tuple[list[Pair], list[Pair]]:
    """The pairs, where constants with equal values are partners whatever
    they are called; apart from them, those of constants that differ."""
    ones, others = ({e.name: e for e in side if e.kind == "other"}
                    for side in (a, b))

    def equal(n: str, m: str) -> bool:
        x = values_a[n]
        return apart(n, x, in_shape_of(x, values_b[m]), tolerance
                     ).status != "different"
    loose = [p for p in pairs if p.whole and not p.steps and p.a[0] in ones
             and p.b[0] in others and not equal(p.a[0], p.b[0])]
    firm = [p for p in pairs if p not in loose]
    left, free = ([n for n in side if not any(n in names for names in done)]
                  for side, done in ((ones, [p.a for p in firm]),
                                     (others, [p.b for p in firm])))
    for n in left:
        found = next((m for m in free if np.unique(values_a[n]).size > 1
                      and equal(n, m)), None)
        if found is not None:
            free.remove(found)
            said = {"reshape": True} if ones[n].shape \
                != others[found].shape else {}
            firm.append(pair_of(
                [(ones[n], Wish.read({**said, "to": [found]}))],
                [others[found]]))
            loose = [p for p in loose if p.a != (n,) and p.b != (found,)]
    return firm, loose


class Constants(NamedTuple):
    """What was initialized, is not trained, and had other values in `b` than
    in `a`. Frozen parameters are constants unless weights are frozen too:
    then they may have been trained, and have the values of one side as all
    weights have.

    Attributes
    ----------
    names : set of str
        Of all that is not trained, by the names of `a`.
    wrong : list of Gap
    unsure : list of Gap
    """

    names: set[str]
    wrong: list[Gap]
    unsure: list[Gap]

    @classmethod
    def of(cls, plan: Plan, a: Sequence[Entry], b: Sequence[Entry],
           values_a: Values, values_b: Values, tolerance: float
           ) -> "Constants":
        """Those of a plan, from the values before the comparison."""
        known = [{e.name: e for e in side} for side in (a, b)]
        fixed = []
        for pair in plan.pairs:
            both = [own[n] for own, names in zip(known, (pair.a, pair.b))
                    for n in names]
            if not any(e.trained or e.is_statistic for e in both):
                fixed.append((pair, both))
        # beside these nothing tells what a user froze from a constant
        frozen = any(e.kind == "weight" for _, both in fixed for e in both
                     if not any(x.buffer for x in both))
        found = cls({n for pair, _ in fixed for n in pair.a}, [], [])
        for pair, both in fixed:
            one = plan._replace(pairs=[pair])
            back = one.to_a(values_b)
            sure = all(e.buffer for e in both) or not frozen
            constant = any(e.kind == "other" for e in both)
            for n in pair.a:
                g = apart(n, values_a[n], back[n], tolerance)
                if g.status == "different":
                    (found.wrong if sure and constant else found.unsure
                     ).append(g)
        return found

    def moved(self, before: Values, *after: Values) -> "Constants":
        """Without what a step changes: the memory of a layer is no
        constant."""
        still = [g for g in self.wrong if all(
            g.name not in values or np.array_equal(
                values[g.name], before[g.name], equal_nan=True)
            for values in after)]
        return self._replace(wrong=still, unsure=self.unsure + [
            g for g in self.wrong if g not in still])

    def note(self) -> list[str]:
        """What to say of those that may be none."""
        if not self.unsure:
            return []
        g = self.unsure[0]
        return [f"what is not trained had other values in b than in a, and "
                f"both got those of one side: {g.name}, at {list(g.index)} "
                f"{g.a:.6g} against {g.b:.6g}" + (
                    f", and {len(self.unsure) - 1} more"
                    if self.unsure[1:] else "")
                + "; whether a network computes them right was not on trial"]
