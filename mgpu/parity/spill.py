"""Large arrays of a comparison lie in files, not in memory.

A comparison keeps what several steps computed. Of a large network only the
step that runs is in memory; the rest is mapped from files that have no name
and end with the last array.
"""
import tempfile
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from mgpu.parity.run import State, StepResult

#: bytes of a mapping from which on it is put into a file
LEAST = 32 << 20
_ALIGNED = 64

_Key = TypeVar("_Key", bound=Hashable)


def spilled(arrays: Mapping[_Key, np.ndarray]) -> dict[_Key, np.ndarray]:
    """The same arrays, mapped read-only from a file if they are large."""
    if sum(x.nbytes for x in arrays.values()) < LEAST:
        return dict(arrays)
    found: dict[_Key, np.ndarray] = {}
    with tempfile.TemporaryFile(prefix="mgpu-parity-") as file:
        places = {}
        for key, x in arrays.items():
            if x.nbytes and type(x) is np.ndarray:
                places[key] = file.seek(-file.tell() % _ALIGNED, 1)
                np.ascontiguousarray(x).tofile(file)
        file.flush()
        # One mapping for all: a process may have some thousand files open.
        whole = np.memmap(file, np.uint8, "r") if places else np.empty(
            0, np.uint8)
        for key, x in arrays.items():
            found[key] = x if key not in places else whole[
                places[key]:places[key] + x.nbytes].view(x.dtype).reshape(
                    x.shape)
    return found


def spilled_state(state: State) -> State:
    """A state whose values and optimizer's memory are `spilled`."""
    memory = state.optimizer
    return State(spilled(state.values),
                 memory._replace(slots=spilled(memory.slots)))


def spilled_step(step: StepResult) -> StepResult:
    """The same step, with its gradients and its state `spilled`."""
    step.gradients = spilled(step.gradients)
    step.after = spilled_state(step.after)
    if step.own is not None:
        step.own = step.own._replace(left=spilled(step.own.left))
    return step

