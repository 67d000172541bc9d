"""Which parameter of one network is which of the other."""
import difflib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends.probing import Layer
from mgpu.parity.constants import by_value
from mgpu.parity.maps import (MatchError, Target, alternatives, as_map,
                              read_map)
from mgpu.parity.measure import in_shape_of
from mgpu.parity.plan import Entry, Pair, Plan
from mgpu.parity.search import (SIZES, Choice, Group, aligned, alignments,
                                decide, equal_shapes)

#: the most lines of a message
_LINES = 15
Rules = Sequence[tuple[str, str]]
#: see `Probe`
RunWith = Callable[[Mapping[str, np.ndarray], bool], tuple[list, list]]


def match(a: Sequence[Entry], b: Sequence[Entry], *,
          given: Mapping[str, Target] | None = None, rules: Rules = (),
          probe: "Probe | None" = None) -> Plan:
    """Match the parameters and running statistics of two networks.

    The pairs in `given` are settled first. The rest is matched by equal
    names (after `rules`), by order and shape, and by position in the graph.
    The first complete match that a forward pass of `probe` confirms is
    taken. If there is none, parameters that have another form in `b` are
    looked for; only a forward pass can tell that they are the same. Else the
    first complete match is taken.

    Parameters
    ----------
    a, b : sequences of Entry
        In the order of the layers.
    given : dict, optional
        For names of `a`: the name in `b`, or a dict of what
        `mgpu.parity.maps.Wish` has.
    rules : sequence of (pattern, replacement)
        Regular expressions that turn names of `b` into names of `a`.
    probe : Probe, optional

    Raises
    ------
    MatchError
        No complete match, or several candidates that nothing tells apart.
        The text and `candidates` list them.
    """
    settled = read_map(a, b, given or {})
    rest_a, rest_b = _unpaired(a, b, settled)
    ways: list[tuple[str, Callable[[], list[Pair] | None]]] = [
        ("equal names", lambda: _by_name(rest_a, rest_b, rules)),
        ("order and shape", lambda: _by_order(rest_a, rest_b)),
        ("position in the graph",
         lambda: None if probe is None
         else _by_position(rest_a, rest_b, probe, settled))]
    notes = _shared(a, b)
    found: list[Plan] = []

    def plan_of(how: str, pairs: list[Pair]) -> Plan:
        plan = Plan(how, pairs, _left(a, b, pairs), None, notes)
        return plan if probe is None else plan._replace(
            confirmed=probe.confirms(plan))
    if not _needed(rest_a) and not _needed(rest_b) and settled:
        ways = [("", lambda: [])]
    for how, way in ways:
        pairs = way()
        if pairs is None:
            continue
        how = " and ".join(filter(None, ("given map" if settled else "", how)))
        if probe is not None and probe.values_b:
            pairs, loose = by_value(rest_a, rest_b, pairs, probe.values,
                                    probe.values_b, probe.tolerance)
            # Each may be right as its own network uses it.
            if loose and (plan := plan_of(how, settled + pairs)).confirmed:
                return plan
            pairs += loose
        plan = plan_of(how, settled + pairs)
        if plan.confirmed is not False:
            return plan
        found.append(plan)
    likely: list[tuple[Choice, int]] = []
    if probe is not None and ways[0][0]:
        likely, confirmed = _by_form(a, rest_a, rest_b, probe, settled)
        if confirmed:
            pairs = settled + [pair for choice, option in likely
                               for pair in choice.pairs(option)]
            return Plan("given map and " * bool(settled)
                        + "form and position", pairs, _left(a, b, pairs),
                        True, notes)
    if not found:
        raise _no_match(rest_a, rest_b, notes, likely)
    if found[0].how != "equal names":
        _refuse_disagreement(found)
    return found[0]


def _refuse_disagreement(plans: list[Plan]) -> None:
    """Several complete plans, none of them confirmed."""
    found: dict[str, dict[str, None]] = {}
    for plan in plans:
        for name, other in plan.names().items():
            found.setdefault(name, {})[other] = None
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
    done_a = {name for pair in pairs for name in pair.a}
    done_b = {name for pair in pairs for name in pair.b}
    return ([e for e in a if e.name not in done_a],
            [e for e in b if e.name not in done_b])


def _left(a: Sequence[Entry], b: Sequence[Entry], pairs: Sequence[Pair]
          ) -> dict[str, list[str]]:
    return {side: [e.name for e in entries] for side, entries
            in zip("ab", _unpaired(a, b, pairs))}


def _needed(entries: Iterable[Entry]) -> list[Entry]:
    return [e for e in entries if e.kind != "other"]


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
            pairs.append(Pair((e.name,), (other.name,)))
        elif e.kind != "other":
            return None
    taken = {name for pair in pairs for name in pair.b}
    complete = len(taken) == len(pairs) and all(
        e.name in taken for e in _needed(b))
    return pairs if complete else None


def _by_order(a: Sequence[Entry], b: Sequence[Entry]) -> list[Pair] | None:
    groups = aligned(a, b, equal_shapes)
    if groups is None:      # kinds are read from names, which may say nothing
        forms = [[(e.shape, e.is_statistic) for e in _needed(side)]
                 for side in (a, b)]
        if forms[0] == forms[1]:
            groups = equal_shapes(_needed(a), _needed(b))
    place = {e.name: i for i, e in enumerate(a)}
    return None if groups is None else sorted(
        (Pair((one.name,), (other.name,)) for (one,), (other,) in groups),
        key=lambda pair: place[pair.a[0]])


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
    layers : (sequence, sequence)
        The layers of both.
    tolerance : float
        The largest difference of equal outputs, relative to the largest value.
    values_b : dict
        The values of `b` before the probe. Its constants without a partner
        keep them.
    """

    def __init__(self, run_a: RunWith, run_b: RunWith,
                 values_a: Mapping[str, np.ndarray],
                 layers: Sequence[Sequence[Layer]] = ((), ()),
                 tolerance: float = 1e-6,
                 values_b: Mapping[str, np.ndarray] | None = None):
        self._run_a, self._run_b = run_a, run_b
        self.tolerance = tolerance
        self.values, self.values_b = values_a, dict(values_b or {})
        self.kinds = [{name: layer.kind for layer in side
                       for name in layer.parameters} for side in layers]
        self._outputs: list | None = None

    def confirms(self, plan: Plan) -> bool:
        """Whether equal values give equal outputs under `plan`."""
        if self._outputs is None:
            self._outputs = self.outputs(self.values)
        return self.agrees(plan, self.values, self._outputs)

    def outputs(self, values_a: Mapping[str, np.ndarray]) -> list:
        """What `a` returns with these values."""
        return self._run_a(values_a, False)[0]

    def agrees(self, plan: Plan, values_a: Mapping[str, np.ndarray],
               expected: list) -> bool:
        """Whether `b` returns the same with these values under `plan`."""
        outputs, _ = self._run_b({**self.values_b, **plan.to_b(values_a)},
                                 False)
        pairs = [(x, in_shape_of(x, y)) for x, y in zip(expected, outputs)]
        return len(outputs) == len(expected) and all(
            x.shape == y.shape and close(x, y, self.tolerance)
            for x, y in pairs)

    def calls(self, values_a: Mapping[str, np.ndarray],
              values_b: Mapping[str, np.ndarray]) -> tuple[list, list]:
        """The calls of both networks with these values."""
        return self._run_a(values_a, True)[1], self.calls_of_b(values_b)

    def calls_of_b(self, values_b: Mapping[str, np.ndarray]) -> list:
        """The calls of `b` with these values."""
        return self._run_b(values_b, True)[1]


def close(x: np.ndarray, y: np.ndarray, tolerance: float = 1e-6) -> bool:
    """Whether both are equal up to `tolerance` of the largest value."""
    size = max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0))
    return bool(np.abs(x - y).max(initial=0.0) <= tolerance * size)


def drawn(entries: Sequence[Entry], named: bool = False
          ) -> dict[str, np.ndarray]:
    """Values that depend only on kind and shape; `named`: and on the name,
    and none for a network's own constants. A gamma that is not trained may
    be fixed, so that its value is not used: it is 1, or `named` has none."""
    def draw(entry: Entry) -> np.ndarray:
        key = repr((entry.kind, entry.shape, *[entry.name] * named)).encode()
        rng = np.random.default_rng(zlib.crc32(key))
        if _is_fixed(entry):
            return np.ones(entry.shape)
        if entry.kind in ("gamma", "running_var"):
            return rng.uniform(0.5, 1.5, entry.shape)   # not near 0
        size = np.prod(entry.shape[1:]) if len(entry.shape) > 1 else 1e2
        return rng.normal(0, max(size, 1) ** -0.5, entry.shape)
    return {e.name: draw(e) for e in entries
            if not (named and (e.kind == "other" or _is_fixed(e)))}


def _is_fixed(entry: Entry) -> bool:
    return entry.kind == "gamma" and not entry.trained


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
    known = {n: probe.values[n] for p in settled for n in p.a}
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
            if sorted(form) == sorted(other_form) and _same_input(x, y):
                alike: dict[Any, list[Entry]] = {}
                for e in others:
                    alike.setdefault((e.kind, e.shape), []).append(e)
                pairs += [Pair((e.name,),
                               (alike[e.kind, e.shape].pop(0).name,))
                          for e in entries]
                del waiting[i]
                break
    # Parameters outside innermost layers are matched by order.
    more = _by_order(*_unpaired(a, b, pairs))
    return None if more is None else pairs + more


def _same_input(x: np.ndarray, y: np.ndarray) -> bool:
    return x.size == y.size and close(x.reshape(-1), y.reshape(-1))


def _by_form(every: Sequence[Entry], a: Sequence[Entry], b: Sequence[Entry],
             probe: Probe, settled: list[Pair]
             ) -> tuple[list[tuple[Choice, int]], bool]:
    """Match parameters of other forms: choices with their options, and
    whether forward passes confirm them. Each of `a` (`every` one) gets values
    of its own for that: what is zero at the start would fit anywhere."""
    try:
        values = {**probe.values, **drawn(every, named=True)}
        expected = probe.outputs(values)
        calls, calls_b = probe.calls(values, {})
    except ValueError:      # a trace without such a pass
        return [], False
    if not any(np.any(x) for x in expected):
        return [], False    # dead outputs fit anything

    def agreement(pairs: list[Pair]) -> int:
        waiting = [x for _, x in probe.calls_of_b(
            Plan("", settled + pairs).to_b(values))]
        count = 0
        for _, x in calls:
            for i, y in enumerate(waiting):
                if _same_input(x, y):
                    del waiting[i]
                    count += 1
                    break
        return count

    def confirmed(pairs: list[Pair]) -> bool:
        plan = Plan("", settled + pairs)
        return probe.agrees(plan, values, expected) and probe.confirms(plan)
    likely: list[tuple[Choice, int]] = []
    for choices in alignments(a, b, probe.kinds, [
            [n for names, _ in side for n in names]
            for side in (calls, calls_b)]):
        options, sure = decide(choices, agreement, confirmed)
        if sure or not likely:
            likely = list(zip(choices, options))
        if sure:
            return likely, True
    return likely, False


def _shared(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
    return [f"shared in {side}: {' = '.join((e.name, *e.aliases))}"
            for side, entries in (("a", a), ("b", b))
            for e in entries if e.aliases]


def _no_match(a: Sequence[Entry], b: Sequence[Entry], notes: list[str],
              likely: Sequence[tuple[Choice, int]]) -> MatchError:
    a, b = _needed(a), _needed(b)

    def like(e: Entry, entries: Sequence[Entry]) -> list[str]:
        return [o.name for o in entries
                if (o.shape, o.kind) == (e.shape, e.kind)]
    candidates = {e.name: like(e, b) for e in a
                  if not len(like(e, b)) == len(like(e, a)) == 1}
    shapes_a, shapes_b = ([e.shape for e in side] for side in (a, b))
    left = [e for e in b if shapes_b.count(e.shape) > shapes_a.count(e.shape)]
    candidates[""] = [e.name for e in left]

    likely = likely or [
        (choice, 0) for choices in alignments(a, b) for choice in choices]
    lines, spare = _misfits(a, b) if not likely else ([
        _line(*found) for choice, option in likely
        for found in choice.misfits(option)], [])
    notes = [f"  {note}" for note in notes]
    if spare:
        notes.insert(0, "  left in b: " + _some([str(e) for e in spare]))
    room = _LINES - 2 - min(len(notes), 3)
    return MatchError("\n".join([
        "every parameter of one network needs its partner in the other; "
        f"received {len(a)} and {len(b)} that fit neither by name, by order "
        "and shape, by position in the graph, nor in another form that a "
        "forward pass confirms:",
        *(lines if len(lines) <= room else [
            *lines[:room - 1], f"  and {len(lines) - room + 1} more"]),
        *notes[:3],
        "Entries that are proposed are guesses from shapes and names: check "
        "each, and try fewer. Add entries to map= (--map takes a JSON file), "
        "or turn names of b into names of a by rules=."]), candidates)


def _some(items: list[str]) -> str:
    return ", ".join(items[:6]) + (
        f" and {len(items) - 6} more" if len(items) > 6 else "")


def _misfits(a: Sequence[Entry], b: Sequence[Entry]
             ) -> tuple[list[str], list[Entry]]:
    """A line for each tensor that fits no other: its nearest partner, and
    the entries of a map that make it one. Also those of b that are left."""
    rest: list[list[Entry]] = [[], []]
    for kind in dict.fromkeys(e.kind for e in (*a, *b)):
        ones, others = ([e for e in side if e.kind == kind]
                        for side in (a, b))
        for what, i, j, p, q in difflib.SequenceMatcher(
                None, [e.shape for e in ones], [e.shape for e in others],
                autojunk=False).get_opcodes():
            if what != "equal":
                rest[0] += ones[i:j]
                rest[1] += others[p:q]
    alone, pairs = [], []
    while rest[0]:
        e = rest[0][0]
        near = sorted(rest[1], key=lambda o: (
            o.kind != e.kind, np.prod(o.shape) != np.prod(e.shape),
            -difflib.SequenceMatcher(None, e.name, o.name).ratio()))
        group, entries = _partners(rest[0], near)
        if entries:
            pairs.append(_line(group, entries))
        else:
            alone.append(f"  {e}: nothing like it in b" + (
                f", nearest is {near[0]}" if near else ""))
        rest = [[x for x in side if x not in used]
                for side, used in zip(rest, group)]
    return alone + pairs, rest[1]


def _partners(a: Sequence[Entry], b: Sequence[Entry]
              ) -> tuple[Group, dict[str, Any]]:
    """The first tensor of `a`, perhaps with others of its shape, and the
    first of `b` that it can be, with the entries of a map."""
    for o in b:
        for n, m in SIZES:
            ones, others = (tuple(
                x for x in side if (x.kind, x.shape) == (e.kind, e.shape)
                )[:count] for side, e, count in ((a, a[0], n), (b, o, m)))
            said = next(alternatives(
                [e.shape for e in ones], [e.shape for e in others]), None) \
                if (len(ones), len(others)) == (n, m) else None
            if said is not None:
                return (ones, others), as_map(ones, others, said)
    return ((a[0],), ()), {}


def _line(group: Group, entries: Mapping[str, Any]) -> str:
    ones, others = (_some([str(e) for e in side]) for side in group)
    return f"  {ones} and {others}: {json.dumps(entries)[1:-1]}"
