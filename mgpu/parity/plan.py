"""Which values of two networks are the same: see `Plan`."""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.parity.forms import Step, Turn, take, text, undone
from mgpu.training.parameters import STATISTICS


class Entry(NamedTuple):
    """One parameter or running statistic of one side."""

    name: str
    kind: str
    shape: tuple[int, ...]
    trained: bool
    aliases: tuple[str, ...] = ()       # other names of the same tensor
    buffer: bool = False        # the network's own, not a frozen parameter

    @property
    def is_statistic(self) -> bool:
        return self.kind in STATISTICS

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


def own(name: str) -> str:
    """The layer of a parameter, or a parameter of the network itself."""
    return name.rpartition(".")[0] or name


class Pair(NamedTuple):
    """Parameters with the same elements: `a` and `b` are names, one or
    several. The steps turn the values of `a` into those of `b`."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one tensor is one tensor."""
        return len(self.a) == len(self.b) == 1

    def inverse(self) -> "Pair":
        """The pair with `a` and `b` exchanged."""
        return Pair(self.b, self.a, undone(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """One name is a string, several are a list."""
        turned = self.whole and len(self.steps) == 1 \
            and isinstance(self.steps[0], Turn)
        return {**{side: names[0] if len(names) == 1 else list(names)
                   for side, names in (("a", self.a), ("b", self.b))},
                "axes": self.steps[0][0] if turned else None,
                "layout": text(self.steps)}


class Plan(NamedTuple):
    """How values travel between two networks.

    Attributes
    ----------
    how : str
        "given map", "equal names", "order and shape", "position in the
        graph", "form and position", or the first and one of the others for
        the rest.
    pairs : list of Pair
    left : dict of str -> list of str
        For "a" and "b": constants without a partner, which stay as they are.
    confirmed : bool or None
        Whether a forward pass gave equal outputs under this plan. None: not
        tried.
    notes : list of str
        What a reader should know, for example shared parameters.
    """

    how: str
    pairs: list[Pair]
    left: dict[str, list[str]] = {}
    confirmed: bool | None = None
    notes: list[str] = []

    def to_b(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values of `a`, by the names and in the layout of `b`. Of tensors
        that are joined, all must be there, or none is."""
        found: dict[str, np.ndarray] = {}
        for pair in self.pairs:
            if all(n in values for n in pair.a):
                found.update(zip(pair.b, take(pair.steps, [
                    np.asarray(values[n]) for n in pair.a])))
        return found

    def inverse(self) -> "Plan":
        """The plan with `a` and `b` exchanged."""
        return self._replace(pairs=[p.inverse() for p in self.pairs])

    def to_a(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values of `b`, by the names and in the layout of `a`."""
        return self.inverse().to_b(values)

    def names(self) -> dict[str, str]:
        """For each name of `a`, the first name of its pair in `b`."""
        return {name: pair.b[0] for pair in self.pairs for name in pair.a}

    def crossed(self) -> list[tuple[str, str]]:
        """Layers (or parameters of the network itself) and their partners,
        where each has the name of another one's partner: two towers, the
        experts of a mixture."""
        partners = {own(p.a[0]): own(p.b[0]) for p in self.pairs[::-1]}

        def returns(name: str) -> bool:
            at: str | None = name
            for _ in partners:
                at = partners.get(at or "")
                if at == name:
                    return True
            return False
        return [(n, m) for n, m in partners.items() if n != m and returns(n)
                ][::-1]

    def turned(self, a: Sequence[Entry], b: Sequence[Entry]
               ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Names of tensors of one kind and shape that are not partners in the
        order in which they stand: parts of one tensor, or a tensor and one
        that stands before the partner of the tensor before it."""
        known = [{e.name: (i, e.kind, e.shape) for i, e in enumerate(side)}
                 for side in (a, b)]
        found = []
        last: dict[Any, tuple[int, Pair]] = {}
        for pair in sorted(self.pairs, key=lambda p: known[0][p.a[0]][0]):
            both = [[own_side[n] for n in names] for own_side, names in zip(
                known, (pair.a, pair.b))]
            if any(entries != sorted(entries) and len(
                    {e[1:] for e in entries}) == 1 for entries in both):
                found.append((pair.a, pair.b))
            if pair.whole and not pair.steps:
                (i, kind, shape), = both[1]
                before = last.get((kind, shape))
                if before is not None and before[0] > i:
                    found.append((before[1].a + pair.a,
                                  before[1].b + pair.b))
                last[kind, shape] = i, pair
        return found

    def lines(self) -> list[str]:
        """The plan as text: a line for each pair."""
        lines = [f"matched by {self.how}: {len(self.pairs)} tensors" + {
            True: ", confirmed by a forward pass",
            False: ", NOT confirmed: with equal values the outputs differ",
            None: ""}[self.confirmed]]
        lines += [f"  {', '.join(p.a)} <- {', '.join(p.b)}" + (
            f" {text(p.steps)}" if p.steps else "") for p in self.pairs]
        for side, names in self.left.items():
            lines += [f"  left as it is in {side}: {name}" for name in names]
        return lines + [f"  {note}" for note in self.notes]
