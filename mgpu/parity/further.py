"""Differences behind the first one.

Layers behind one that differs get other inputs, which hides what differs
there. So a side runs with the numbers of the other: after each call of a
layer, the outputs of its partner take the place of its own. Then every layer
gets what its partner got, as if all before it were put right, and what still
differs does so by itself.
"""
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mgpu.parity.diagnosis import causes_of
from mgpu.parity.float32 import WORDS
from mgpu.parity.location import (Location, differences, ends,
                                   other_functions, pairs,
                                   read_elsewhere)
from mgpu.parity.measure import in_shape_of
from mgpu.parity.result import Evidence, Result
from mgpu.parity.run import Calls, Put

#: differences of single layers up to this many tolerances are rounding
_ROUNDING = 100


def further(work: Any, known: Evidence) -> list[Evidence]:
    """The evidence of each place that differs besides that of `known`: of
    layers, and of the loss.

    Parameters
    ----------
    work : mgpu.parity.comparison.Comparison
    known : Evidence
        With a `location`. Without one, or where no side can run with other
        numbers, nothing is found.
    """
    runs = work.a, work.b
    if known.location is None or work.summarised \
            or not any(run.replaces for run in runs) \
            or len(work.a.devices) != len(work.b.devices):
        return []
    which = 1 if work.b.replaces else 0
    work.load_both(known.before)
    calls = [run.calls(known.X, known.y, known.step) for run in runs]
    put = [_targets(work, one, two, which) for one, two in zip(*calls)]
    found = _pass(work, known, which, calls[1 - which], put)
    chosen = runs[which].float32
    if found and chosen is not None and runs[1 - which].float32 is None \
            and work.dtype == "float64":
        # What MXNet computes in float32 is no further fault: a place counts
        # if it differs with and without that.
        before, chosen.names = chosen.names, frozenset(WORDS)
        try:
            also = {_place(e) for e in _pass(
                work, known, which, calls[1 - which], put)}
        finally:
            chosen.names = before
        found = [e for e in found if _place(e) in also]
    return found


def _place(evidence: Evidence) -> Any:
    return evidence.location and evidence.location.at


def _pass(work: Any, known: Evidence, which: int, other: list[Calls],
          put: list[Put]) -> list[Evidence]:
    """As `further`, from one pass of the side `which` with the numbers `put`
    of the other one, whose calls are `other`."""
    work.load_both(known.before)
    own, outputs, losses = (work.a, work.b)[which].forced(
        known.X, known.y, known.step, put)
    calls = (own, other) if which == 0 else (other, own)
    taken = [known.a, known.b]
    if losses.shape != taken[which].losses.shape:   # the user's own is a mean
        losses = losses.mean(keepdims=True)
    taken[which] = replace(taken[which], outputs=outputs, losses=losses)
    found = replace(known, a=taken[0], b=taken[1], location=None, later=[],
                    calls=calls)
    places = list(_places(work, calls[0][0], calls[1][0], known.location,
                          put[0], which))
    evidence = [replace(found, location=place) for place in places]
    if any(_apart(work, known.step, x, z) for x, z in zip(*(
            side.outputs for side in taken))):
        return evidence if places else []
    if _apart(work, known.step, *(side.losses for side in taken)):
        evidence.append(found)
    return evidence


def _targets(work: Any, calls_a: Calls, calls_b: Calls, which: int) -> Put:
    """What takes the place of the outputs of the side `which`."""
    found: dict[int, Any] = {}
    layers = work.a.by_path(), work.b.by_path()
    met = [*pairs([c.path for c in calls_a], [c.path for c in calls_b],
                  *layers, work.plan)]
    for at in met:
        if other_functions(calls_a[at[0]], calls_b[at[1]], layers) \
                or read_elsewhere(calls_a, calls_b, *layers, at, met):
            continue    # each may be a part of what the other is
        last = ends((calls_a, calls_b), at, layers)
        own, other = ((calls_a, calls_b)[i][last[i]].outputs
                      for i in (which, 1 - which))
        values = [in_shape_of(x, z) for x, z in zip(own, other)]
        if values and all(x.shape == z.shape for x, z in zip(own, values)):
            found.setdefault(last[which], values)
    return found


def _places(work: Any, calls_a: Calls, calls_b: Calls, first: Any,
            put: Put, which: int) -> Iterator[Location]:
    """All places but the first."""
    layers = work.a.by_path(), work.b.by_path()
    between = False
    for place in differences(calls_a, calls_b, *layers, work.plan,
                             _ROUNDING * work.tolerance):
        # Dropout layers get their masks in turn: one more shifts them.
        shifted = place.inputs_agree and place.a and place.b \
            and place.a.kind == "dropout" \
            and place.a.options == place.b.options
        if place.at != first.at and (place.inputs_agree or not between) \
                and not shifted:
            yield place
        # What comes from elsewhere may reach several layers.
        between |= not place.inputs_agree
        if ends((calls_a, calls_b), place.at, layers)[which] not in put:
            return      # what is behind it got other numbers


def described(result: Result, found: list[Evidence]) -> list[dict[str, Any]]:
    """See `Result.further`."""
    def where(place: Location | None) -> str:
        if place is None:
            return "the loss, from equal outputs"
        path = place.call_b.path
        layer = f"layer {path} of b" if path else "b"
        return f"{layer}, from equal inputs" if place.inputs_agree \
            else f"what {layer} gets"
    return [{"place": where(evidence.location),
             "causes": causes_of(result, evidence)} for evidence in found]


def _apart(work: Any, step: int, x: Any, z: Any) -> bool:
    return work.single_gap(step, "output", "", x, z
                           ).relative > _ROUNDING * work.tolerance
