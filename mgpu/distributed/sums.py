"""Sums over processes in the middle of passes (``batch_norm="sync"``).

Before each sum all ranks meet: they say which one they are at, and hear of an
error on another rank. A rank without rows takes part in whatever the others
say.
"""
import threading
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

#: what processes do when they meet here
_WORK = "a sum of batch_norm='sync'"
#: the name that a rank gives when its backward passes are over
_END = "the end of the pass"


class Sums:
    """The sums of all passes of this process.

    Attributes
    ----------
    passes : int
        How many passes over all ranks have begun.
    """

    def __init__(self, world: Any) -> None:
        self._world, self.passes = world, 0
        self._lock = threading.Lock()       # held for a whole sum
        self._error: BaseException | None = None    # of a backward pass
        self._waits: dict[str, Callable[[], None]] = {}

    def begin(self, rows: bool, engine: str, wait: Callable[[], None]
              ) -> list[bool]:
        """A pass begins, which all ranks do together. Which of them have
        rows. ``wait()`` waits until backward passes of `backend` that are
        under way have ended."""
        found = self._world.gather("a pass with batch_norm='sync'", rows)
        self.passes += 1
        self._waits[engine] = wait
        return found

    def add(self, name: str, part: np.ndarray, count: int
            ) -> tuple[int, np.ndarray]:
        """The sums of `count` and of `part` over all ranks: of a forward
        pass."""
        with self._lock:
            said, total = self._add(name, part, count)
        assert total is not None
        return sum(said), total

    def add_gradient(self, name: str, part: np.ndarray, reached: bool
                     ) -> np.ndarray | None:
        """The sum of `part` over all ranks: of a backward pass. None where no
        rank has `reached` it. NaN where that fails: `settle` raises the
        error."""
        with self._lock:
            if self._error is None:
                try:
                    return self._add(name, part, reached)[1]
                except BaseException as error:
                    self._error = error
        return np.full_like(part, np.nan)

    def _add(self, name: str, part: np.ndarray, more: int
             ) -> tuple[list[int], np.ndarray | None]:
        """What the ranks with rows say in the place of `more`, and the sum;
        None where all say 0."""
        said = self._agree([name, str(part.dtype), list(part.shape), more])
        if not any(said[3]):
            return said[3], None
        # In float64, which a backend leaves to gloo if it adds in another
        # dtype: MXNet calls this in the middle of an operation, where its
        # KVStore would wait for ever.
        flat = part.reshape(-1).astype(np.float64)
        with self._world.together():
            self._world.reduce(flat)
        return said[3], flat.astype(part.dtype).reshape(part.shape)

    def _agree(self, own: list[Any] | None) -> list[Any]:
        """Name, dtype and shape of the sum that all ranks with rows are at,
        and what each of them adds to that. RuntimeError, on all ranks, where
        they are not at the same."""
        told = {rank: one for rank, one in enumerate(
            self._world.meet(_WORK, own)) if one is not None}
        first, *others = told.values()
        if any(one[:3] != first[:3] for one in others):
            raise RuntimeError(
                "synchronized batch normalization needs the same layers in "
                "the same order on every rank; received "
                + ", ".join(f"{one[0]} ({one[1]} {tuple(one[2])}) on rank "
                            f"{rank}" for rank, one in told.items())
                + ". Call the same layers for the rows of each rank, and "
                "compute the loss of the same outputs; or use "
                "batch_norm='per_device' for such a network.")
        return [*first[:3], [one[3] for one in told.values()]]

    def serve(self) -> None:
        """Take part in all sums of a pass of which this rank has no rows."""
        with self._lock:
            while True:
                name, _, shape, said = self._agree(None)
                if name == _END:
                    return
                if any(said):
                    with self._world.together():
                        self._world.reduce(np.zeros(prod(shape)))

    def end(self) -> None:
        """The backward passes of this rank have ended: let those without
        rows go on."""
        with self._lock:
            self._agree([_END, "", [], 0])

    def settle(self) -> None:
        """Wait for sums that backward passes are still at, and raise what has
        failed in one. Before anything else that ranks do together."""
        for wait in list(self._waits.values()):
            wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
