"""What a lock-step puts on trial, and what it does not."""
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from typing import Any

import numpy as np

from mgpu.backends.probing import Layer
from mgpu.parity.location import ACTIVATIONS, NAMES, kind_of, pairs
from mgpu.parity.matching import Plan
from mgpu.parity.run import Run, State, StepResult

#: Options that every pass reaches, whatever the data: the outputs agree, so
#: they mean the same. `flatten` would show in the shape.
_REACHED = {"activation", "axis", "bias", "center", "flatten", "relu", "rows",
            "scale", "units", "use_global_stats"}


class Coverage:
    """Collects what the steps of a lock-step reached.

    Parameters
    ----------
    a, b : Run
    plan : Plan
    """

    def __init__(self, a: Run, b: Run, plan: Plan):
        self._runs, self._plan = {"a": a, "b": b}, plan
        self._ran: dict[str, dict[str, None]] = {"a": {}, "b": {}}
        self._trained = [e.name for e in a.entries if e.trained]
        self._moved: set[str] = set()
        self._reached: set[str] = set()
        #: rows of an embedding that moved
        self._rows: dict[str, Any] = {
            name: False for layer in a.layers if layer.kind == "embedding"
            for name in layer.parameters if name in self._trained}
        self._finite, self._predicted = False, True
        #: paths of partners that compute other things
        self._apart: set[tuple[str, str]] = set()
        self.had_loss = False   # a step of the user's own may return none

    def add(self, before: State, one: StepResult, two: StepResult) -> None:
        """One step, from the state `before`."""
        self._ran["a"] |= dict.fromkeys(one.ran)
        self._ran["b"] |= dict.fromkeys(two.ran)
        self.had_loss |= bool(one.losses.size)
        self._finite |= bool(np.isfinite(one.losses).all()
                             and np.isfinite(two.losses).all())
        self._predicted &= None not in (one.predictions, two.predictions)
        self._reached |= {n for n, g in one.gradients.items() if g.any()}
        for name in self._trained:
            moved = before.values[name] != one.after.values[name]
            if moved.any():
                self._moved.add(name)
            if name in self._rows:
                self._rows[name] |= moved.reshape(len(moved), -1).any(axis=1)

    def nothing(self) -> str | None:
        """Why two sides that agree prove nothing; None if they do."""
        if not self._finite:
            return "no step had a finite loss"
        if not self._moved:
            return ("no parameter moved (a rate of 0, or no gradient that "
                    "reaches one)")
        return None

    def leave_out(self, apart: set[tuple[str, str]]) -> None:
        """Layers (paths) that have one place and other outputs: as the sides
        agree, they make the same by other operators."""
        self._apart = apart

    def options(self) -> list[str]:
        """Options that differ between layers that belong together. If the
        outputs agree, no step has reached the difference."""
        own, other = (run.by_path() for run in self._runs.values())
        one, two = (list(ran) for ran in self._ran.values())
        found = []
        for i, j in pairs(one, two, own, other, self._plan):
            a, b = own.get(one[i]), other.get(two[j])
            if a is not None and b is not None \
                    and (one[i], two[j]) not in self._apart:
                found += [f"layers {a.path!r} of a and {b.path!r} of b: "
                          + difference for difference in _differences(a, b)]
                acts = (_activation(a, one[i + 1:], own),
                        _activation(b, two[j + 1:], other))
                inside = any(layer.options.get(name) for layer in (a, b)
                             for name in ("activation", "relu"))
                if inside and None not in acts and len(set(acts)) > 1:
                    found.append(f"behind layers {a.path!r} of a and "
                                 f"{b.path!r} of b: {acts[0]} and {acts[1]}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """See `mgpu.parity.result.Result.coverage`."""
        still = [n for n in self._trained
                 if n not in self._moved or n not in self._reached]
        idle = {side: [layer.path for layer in run.layers
                       if layer.path not in self._ran[side]]
                for side, run in self._runs.items()}
        missing = [
            *_named("no gradient moved parameter", still),
            *(text for side, paths in idle.items()
              for text in _named(f"{side} did not run layer", paths)),
            *(f"{(~rows).sum()} of {len(rows)} rows of {name!r} were not "
              "reached" for name, rows in self._rows.items()
              if name in self._moved and not np.all(rows))]
        if not self._predicted:
            missing.append("prediction mode: the trace holds no predictions")
        return {"parameters": [len(self._trained) - len(still),
                               len(self._trained)],
                **{f"layers_{side}": [len(run.layers) - len(idle[side]),
                                      len(run.layers)]
                   for side, run in self._runs.items()},
                "not_on_trial": missing, "options": self.options()}


def _named(what: str, names: list[str]) -> list[str]:
    return [f"{what}{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
            ] if names else []


def _differences(a: Layer, b: Layer) -> Iterator[str]:
    """The options in which two layers with equal outputs differ."""
    one, two = (NAMES.get(layer.kind, layer.kind).removesuffix("cell")
                for layer in (a, b))
    if "symbolblock" in (one, two):
        return      # a whole graph, which is no layer's partner
    if one != two:
        yield f"{_words(a)} and {_words(b)}"
        return
    mine, yours = _effective(a), _effective(b)
    for name in mine:
        x, z = mine[name], yours.get(name, mine[name])
        if isinstance(x, tuple) and isinstance(z, tuple) and len(x) != len(z):
            continue    # (width) of the one is (width, channels) of the other
        if x != z and not (isinstance(x, float) and isinstance(z, float)
                           and isclose(x, z)):
            yield f"{a.kind} with {name} {x!r} and {z!r}"


def _words(layer: Layer) -> str:
    options = ", ".join(f"{name} {x!r}" for name, x in layer.options.items())
    return f"{layer.kind} ({options})" if options else layer.kind


def _effective(layer: Layer) -> Mapping[str, Any]:
    """The options without those that have no effect for any input."""
    options = {name: x for name, x in layer.options.items()
               if name not in _REACHED}
    if "dilation" in options:
        options["dilation"] = tuple(
            1 if k == 1 else d
            for k, d in zip(options["kernel"], options["dilation"]))
        if isinstance(options["padding"], str):
            options["padding"] = tuple(
                (k - 1) * d // 2 if options["padding"] == "same" else 0
                for k, d in zip(options["kernel"], options["dilation"]))
    if "ceil" in options and set(options["stride"]) == {1}:
        options["ceil"] = False     # every size divides
    if not options.get("ceil") and not any(options.get("padding") or ()):
        options.pop("count_include_pad", None)
    return options


def _activation(layer: Layer, following: Sequence[str],
                layers: Mapping[str, Layer]) -> str | None:
    """The activation inside `layer` or right behind it, in Gluon's words;
    None where none is known."""
    kind = "relu" if layer.options.get("relu") \
        else layer.options.get("activation") \
        or (kind_of(following[0], layers) if following else "")
    kind = NAMES.get(kind, kind)
    return kind if kind in ACTIVATIONS else None
