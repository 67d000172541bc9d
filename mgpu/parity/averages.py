"""Averages that one side alone keeps of what no optimizer moves.

A copy of a network that averages its weights also holds running statistics;
a dictionary of the weights holds none, and what is averaged is evaluated with
the statistics of the network.
"""
from collections.abc import Iterable, Sequence

import numpy as np

from mgpu.backends.probing import AVERAGE
from mgpu.parity.matching import Entry
from mgpu.parity.run import State, StepResult


class Averages:
    """Which averages of one side are no difference.

    Parameters
    ----------
    entries : iterable of Entry
        Of side a.
    start : (State, State)
        What both sides begin with, in the terms of `a`.
    """

    def __init__(self, entries: Iterable[Entry], start: Sequence[State]):
        self._untrained = {e.name for e in entries if not e.trained}
        self._start = start
        #: by side, a copy of what it began with, which no step moved
        self._still: dict[str, str] = {}

    def left_out(self, *steps: StepResult) -> set[str]:
        """Names whose average one side alone has, and which is what the
        network holds, so that it says nothing of its own, or what it was at
        the start, so that nobody averages it."""
        found = set()
        held = [{n for n, slot in step.after.optimizer.slots
                 if slot == AVERAGE} for step in steps]
        for side, step, start, alone in zip(
                "ab", steps, self._start, (held[0] - held[1],
                                           held[1] - held[0])):
            for name in alone & self._untrained:
                now = np.ravel(step.after.optimizer.slots[name, AVERAGE])
                if np.array_equal(now, np.ravel(step.after.values[name])):
                    found.add(name)
                elif (name, AVERAGE) in start.optimizer.slots \
                        and np.array_equal(now, np.ravel(
                            start.optimizer.slots[name, AVERAGE])):
                    found.add(name)
                    self._still.setdefault(side, name)
        return found

    def unproven(self) -> str | None:
        """What to say of a copy whose statistics no step moves."""
        for side, name in self._still.items():
            return (f"the average of {side} holds {name}, which its steps "
                    "never move, and the other side's holds none: evaluated "
                    "as it is, that average takes the values of the start. "
                    "Copy the running statistics in the step as well, or, if "
                    "the averaged weights go into the network, give these "
                    "alone as the part: dict(average.named_parameters())")
        return None
