"""Which parameter of one network is which of the other."""
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.parameters import STATISTICS

#: what an explicit map may say of a parameter of `a`: its name in `b`, or
#: ``{"to": name, "transpose": axes}``
Target = str | Mapping[str, Any]
Rules = Sequence[tuple[str, str]]
#: see `Probe`
RunWith = Callable[[Mapping[str, np.ndarray], bool], tuple[list, list]]


class MatchError(ValueError):
    """The parameters of two networks cannot be matched, or in several ways.

    Attributes
    ----------
    candidates : dict of str -> list of str
        For each parameter of `a` without a partner, those of `b` that it
        could be; under ``""`` those of `b` that are left.
    """

    def __init__(self, message: str, candidates: dict[str, list[str]]):
        super().__init__(message)
        self.candidates = candidates


class Entry(NamedTuple):
    """One parameter or running statistic of one side."""

    name: str
    kind: str
    shape: tuple[int, ...]
    trained: bool
    aliases: tuple[str, ...] = ()       # other names of the same tensor

    @property
    def is_statistic(self) -> bool:
        return self.kind in STATISTICS

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


class Pair(NamedTuple):
    """`a` and `b` are names; ``b's value == a's.transpose(axes)``."""

    a: str
    b: str
    axes: tuple[int, ...] | None = None


class Plan(NamedTuple):
    """How values travel between two networks.

    Attributes
    ----------
    how : str
        "given map", "equal names", "order and shape", "position in the
        graph", or the first and one of the others for the rest.
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
        """Values of `a`, by the names and in the layout of `b`."""
        return {pair.b: _turn(values[pair.a], pair.axes)
                for pair in self.pairs if pair.a in values}

    def inverse(self) -> "Plan":
        """The plan with `a` and `b` exchanged."""
        return self._replace(pairs=[
            Pair(p.b, p.a, p.axes and tuple(int(i) for i in
                                            np.argsort(p.axes)))
            for p in self.pairs])

    def to_a(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values of `b`, by the names and in the layout of `a`."""
        return self.inverse().to_b(values)

    def lines(self) -> list[str]:
        """The plan as text: a line for each pair."""
        lines = [f"matched by {self.how}: {len(self.pairs)} tensors" + {
            True: ", confirmed by a forward pass",
            False: ", NOT confirmed: with equal values the outputs differ",
            None: ""}[self.confirmed]]
        lines += [f"  {p.a} <- {p.b}" + (f" transposed to {p.axes}"
                                         if p.axes else "")
                  for p in self.pairs]
        for side, names in self.left.items():
            lines += [f"  left as it is in {side}: {name}" for name in names]
        return lines + [f"  {note}" for note in self.notes]


def _turn(value: Any, axes: tuple[int, ...] | None) -> np.ndarray:
    value = np.asarray(value)
    if axes is None:
        return value
    lead = value.ndim - len(axes)       # statistics of several devices
    return value.transpose([*range(lead), *(i + lead for i in axes)])


def match(a: Sequence[Entry], b: Sequence[Entry], *,
          given: Mapping[str, Target] | None = None, rules: Rules = (),
          probe: "Probe | None" = None) -> Plan:
    """Match the parameters and running statistics of two networks.

    The pairs in `given` are settled first. The rest is matched by equal
    names (after `rules`), by order and shape, and by position in the graph.
    The first complete match that a forward pass of `probe` confirms is
    taken, else the first complete one.

    Parameters
    ----------
    a, b : sequences of Entry
        In the order of the layers.
    given : dict, optional
        For names of `a`: the name in `b`, or ``{"to": name, "transpose":
        axes}`` where ``b = a.transpose(axes)``.
    rules : sequence of (pattern, replacement)
        Regular expressions that turn names of `b` into names of `a`.
    probe : Probe, optional

    Raises
    ------
    MatchError
        No complete match, or several candidates that nothing tells apart.
        The text and `candidates` list them.
    """
    settled = _given(a, b, given or {})
    rest_a, rest_b = _unpaired(a, b, settled)
    ways: list[tuple[str, Callable[[], list[Pair] | None]]] = [
        ("equal names", lambda: _by_name(rest_a, rest_b, rules)),
        ("order and shape", lambda: _by_order(rest_a, rest_b)),
        ("position in the graph",
         lambda: None if probe is None
         else _by_position(rest_a, rest_b, probe, settled))]
    notes = _shared(a, b)
    found: list[Plan] = []
    if not _needed(rest_a) and not _needed(rest_b) and settled:
        ways = [("", lambda: [])]
    for how, way in ways:
        pairs = way()
        if pairs is None:
            continue
        pairs = settled + pairs
        how = " and ".join(filter(None, ("given map" if settled else "", how)))
        left = {side: [e.name for e in entries] for side, entries
                in zip("ab", _unpaired(a, b, pairs))}
        plan = Plan(how, pairs, left, None, notes)
        if probe is not None:
            plan = plan._replace(confirmed=probe.confirms(plan))
        if plan.confirmed is not False:
            return plan
        found.append(plan)
    if not found:
        raise _no_match(rest_a, rest_b, notes)
    if found[0].how != "equal names":
        _refuse_disagreement(found)
    return found[0]


def _refuse_disagreement(plans: list[Plan]) -> None:
    """Several complete plans, none of them confirmed."""
    found: dict[str, dict[str, None]] = {}
    for pair in (pair for plan in plans for pair in plan.pairs):
        found.setdefault(pair.a, {})[pair.b] = None
    candidates = {name: list(names) for name, names in found.items()
                  if len(names) > 1}
    if candidates:
        raise MatchError(
            "parameters must match in one way; received networks for which "
            + " and ".join(plan.how for plan in plans) + " disagree, and "
            "under neither the outputs are equal: " + "; ".join(
                f"{name}: {' or '.join(names)}" for name, names in
                list(candidates.items())[:6])
            + ". Name these pairs in map=.", candidates)


def _unpaired(a: Sequence[Entry], b: Sequence[Entry], pairs: Sequence[Pair]
              ) -> tuple[list[Entry], list[Entry]]:
    done_a, done_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
    return ([e for e in a if e.name not in done_a],
            [e for e in b if e.name not in done_b])


def _needed(entries: Iterable[Entry]) -> list[Entry]:
    return [e for e in entries if e.kind != "other"]


def _given(a: Sequence[Entry], b: Sequence[Entry],
           given: Mapping[str, Target]) -> list[Pair]:
    of_a, of_b = ({name: e for e in side for name in (e.name, *e.aliases)}
                  for side in (a, b))
    pairs: dict[Pair, None] = {}
    wrong = []
    for name, target in given.items():
        axes = None
        if not isinstance(target, str):
            axes = target.get("transpose")
            axes = None if axes is None else tuple(int(i) for i in axes)
            target = target.get("to", "")
        if name not in of_a or target not in of_b:
            wrong.append(f"{name!r} -> {target!r}: no such name in "
                         + ("a" if name not in of_a else "b"))
            continue
        one, other = of_a[name], of_b[target]
        order = range(len(one.shape)) if axes is None else axes
        if sorted(order) != list(range(len(one.shape))):
            wrong.append(f"{name!r}: {axes} are not the axes of {one}")
        elif tuple(one.shape[i] for i in order) != other.shape:
            wrong.append(f"{one} -> {other}: another shape")
        pairs[Pair(one.name, other.name, axes)] = None
    for side in ("a", "b"):
        names = [getattr(pair, side) for pair in pairs]
        wrong += [f"{name!r} of {side} is named twice"
                  for name in sorted({n for n in names if names.count(n) > 1})]
    if wrong:
        raise MatchError("a map pairs each name of a with one of b, of equal "
                         "shape; received " + "; ".join(wrong) + ". Correct "
                         "these entries.", {})
    return list(pairs)


def _by_name(a: Sequence[Entry], b: Sequence[Entry], rules: Rules
             ) -> list[Pair] | None:
    def renamed(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return name
    of_b: dict[str, Entry] = {}
    for e in b:
        for name in (e.name, *e.aliases):
            of_b.setdefault(renamed(name), e)
    pairs = []
    for e in a:
        other = next((of_b[n] for n in (e.name, *e.aliases) if n in of_b),
                     None)
        if other is not None and other.shape == e.shape:
            pairs.append(Pair(e.name, other.name))
        elif e.kind != "other":
            return None
    taken = {pair.b for pair in pairs}
    complete = len(taken) == len(pairs) and all(
        e.name in taken for e in _needed(b))
    return pairs if complete else None


def _by_order(a: Sequence[Entry], b: Sequence[Entry]) -> list[Pair] | None:
    pairs = []
    kinds = dict.fromkeys(e.kind for e in (*a, *b))
    for kind in kinds:      # one kind after the other: Gluon and torch
        ones = [e for e in a if e.kind == kind]     # mix them differently
        others = [e for e in b if e.kind == kind]
        if [e.shape for e in ones] != [e.shape for e in others]:
            if kind == "other":
                continue
            # Gluon keeps a gamma and a beta that it does not use; torch none.
            ones, others = ([e for e in side if e.trained]
                            for side in (ones, others))
            if [e.shape for e in ones] != [e.shape for e in others]:
                return None
        pairs += [Pair(x.name, y.name) for x, y in zip(ones, others)]
    place = {e.name: i for i, e in enumerate(a)}
    return sorted(pairs, key=lambda pair: place[pair.a])


class Probe:
    """Two networks that can be run with chosen values.

    Parameters
    ----------
    run_a, run_b : callables
        ``run(values, traced)`` writes the values, by the side's own names,
        and makes a prediction. It returns (outputs, calls). `outputs` is a
        list of arrays, `calls` has (names of the layer's parameters, first
        input) for each call of an innermost layer, in order. `traced` says
        which one is asked for; the other is empty, since calls take memory.
    values_a : dict
        Values of `a` that the probe starts from.
    """

    def __init__(self, run_a: RunWith, run_b: RunWith,
                 values_a: Mapping[str, np.ndarray]):
        self._run_a, self._run_b = run_a, run_b
        self.values = values_a
        self._outputs: list | None = None

    def confirms(self, plan: Plan) -> bool:
        """Whether equal values give equal outputs under `plan`."""
        if self._outputs is None:
            self._outputs, _ = self._run_a(self.values, False)
        outputs, _ = self._run_b(plan.to_b(self.values), False)
        return len(outputs) == len(self._outputs) and all(
            x.shape == y.shape and close(x, y)
            for x, y in zip(self._outputs, outputs))

    def calls(self, values_a: Mapping[str, np.ndarray],
              values_b: Mapping[str, np.ndarray]) -> tuple[list, list]:
        """The calls of both networks with these values."""
        return (self._run_a(values_a, True)[1], self._run_b(values_b, True)[1])


def close(x: np.ndarray, y: np.ndarray, tolerance: float = 1e-6) -> bool:
    """Whether both are equal up to `tolerance` of the largest value."""
    size = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    return bool(np.abs(x - y).max(initial=0.0) <= tolerance * size)


def drawn(entries: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Values that depend only on kind and shape."""
    def draw(entry: Entry) -> np.ndarray:
        key = repr((entry.kind, entry.shape)).encode()
        rng = np.random.default_rng(zlib.crc32(key))
        if entry.kind in ("gamma", "running_var"):
            return rng.uniform(0.5, 1.5, entry.shape)   # not near 0
        size = np.prod(entry.shape[1:]) if len(entry.shape) > 1 else 1e2
        return rng.normal(0, max(size, 1) ** -0.5, entry.shape)
    return {e.name: draw(e) for e in entries}


def _by_position(a: Sequence[Entry], b: Sequence[Entry], probe: Probe,
                 settled: list[Pair]) -> list[Pair] | None:
    """Match by the input that arrives at a layer.

    Both networks get values that depend only on kind and shape, so that
    layers which could be confused hold the same ones. Two layers are
    partners if the same input arrives at them and their parameters have the
    same kinds and shapes. The order of the calls decides between several
    that read the same input; the forward pass then confirms it or not.
    """
    of_a, of_b = ({e.name: e for e in side} for side in (a, b))
    fixed = Plan("", settled)
    values_a, values_b = (drawn(side) for side in (a, b))
    known = {p.a: probe.values[p.a] for p in settled}
    values_a.update(known)
    values_b.update(fixed.to_b(known))
    try:
        calls_a, calls_b = probe.calls(values_a, values_b)
    except ValueError:
        return None

    def useful(calls: Any, known: Mapping[str, Entry]) -> list[Any]:
        found: list[Any] = []
        seen: set[str] = set()
        for names, x in calls:
            entries = tuple(known[n] for n in names if n in known)
            if entries and entries[0].name not in seen:
                seen.update(e.name for e in entries)
                found.append((tuple((e.kind, e.shape) for e in entries),
                              entries, x))
        return found
    waiting = useful(calls_b, of_b)
    pairs = []
    for form, entries, x in useful(calls_a, of_a):
        for i, (other_form, others, y) in enumerate(waiting):
            if sorted(form) == sorted(other_form) and x.size == y.size \
                    and close(x.reshape(-1), y.reshape(-1)):
                alike: dict[Any, list[Entry]] = {}
                for e in others:
                    alike.setdefault((e.kind, e.shape), []).append(e)
                pairs += [Pair(e.name, alike[e.kind, e.shape].pop(0).name)
                          for e in entries]
                del waiting[i]
                break
    # Parameters outside innermost layers are matched by order.
    more = _by_order(*_unpaired(a, b, pairs))
    return None if more is None else pairs + more


def _shared(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
    return [f"shared in {side}: {' = '.join((e.name, *e.aliases))}"
            for side, entries in (("a", a), ("b", b))
            for e in entries if e.aliases]


def _no_match(a: Sequence[Entry], b: Sequence[Entry], notes: list[str]
              ) -> MatchError:
    a, b = _needed(a), _needed(b)

    def like(e: Entry, entries: Sequence[Entry]) -> list[str]:
        return [o.name for o in entries
                if (o.shape, o.kind) == (e.shape, e.kind)]
    candidates = {e.name: like(e, b) for e in a
                  if not len(like(e, b)) == len(like(e, a)) == 1}
    shapes_a, shapes_b = ([e.shape for e in side] for side in (a, b))
    left = [e for e in b if shapes_b.count(e.shape) > shapes_a.count(e.shape)]
    candidates[""] = [e.name for e in left]

    def some(items: list[str]) -> str:
        return ", ".join(items[:6]) + (
            f" and {len(items) - 6} more" if len(items) > 6 else "") \
            or "none"
    lines = [f"{next(e for e in a if e.name == name)}: candidates "
             f"{some(names)}" for name, names in candidates.items() if name]
    return MatchError(
        "every parameter of one network needs its partner in the other; "
        f"received {len(a)} and {len(b)} that fit neither by name, by order "
        f"and shape, nor by position in the graph. In a: {some(lines)}. "
        f"Too many in b: {some([str(e) for e in left])}. " + "".join(
            note[0].upper() + note[1:] + ". " for note in notes)
        + "Name the pairs in "
        "map=, or turn names of b into names of a by rules=.", candidates)
