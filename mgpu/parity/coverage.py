"""What a lock-step puts on trial, and what it does not."""
from typing import Any

import numpy as np

from mgpu.parity.run import Run, State, StepResult

#: of each kind of thing that was not on trial, so many are named
_NAMED = 8


class Coverage:
    """Collects what the steps of a lock-step reached.

    Parameters
    ----------
    a, b : Run
    """

    def __init__(self, a: Run, b: Run):
        self._runs = {"a": a, "b": b}
        self._ran: dict[str, set[str]] = {"a": set(), "b": set()}
        self._trained = [e.name for e in a.entries if e.trained]
        self._moved: set[str] = set()
        self._reached: set[str] = set()
        #: rows of an embedding that moved
        self._rows: dict[str, Any] = {
            name: False for layer in a.layers if layer.kind == "embedding"
            for name in layer.parameters if name in self._trained}
        self._finite, self._predicted = False, True

    def add(self, before: State, one: StepResult, two: StepResult) -> None:
        """One step, from the state `before`."""
        self._ran["a"] |= one.ran
        self._ran["b"] |= two.ran
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
                "not_on_trial": missing}


def _named(what: str, names: list[str]) -> list[str]:
    if len(names) > _NAMED:
        return [f"{what}s {', '.join(map(repr, names[:_NAMED]))} and "
                f"{len(names) - _NAMED} more"]
    return [f"{what} {name!r}" for name in names]
