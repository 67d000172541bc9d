"""Sums over ranks within a pass (``batch_norm="sync"``).

Before each sum the ranks synchronize: they compare the names of their sums,
and receive an error of another rank. A rank without examples joins all sums
of the others.
"""
import threading
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

#: the name of the exchange before a sum
_WORK = "a sum of batch_norm='sync'"
#: the name that a rank passes after its backward passes
_END = "the end of the pass"


class Sums:
    """The sums in the passes of this process.

    Attributes
    ----------
    passes : int
        Number of passes of all ranks so far.
    """

    def __init__(self, world: Any) -> None:
        self._world, self.passes = world, 0
        self._lock = threading.Lock()       # held for a whole sum
        self._error: BaseException | None = None    # of a backward pass
        self._waits: dict[str, Callable[[], None]] = {}

    def begin(self, rows: bool, engine: str, wait: Callable[[], None]
              ) -> list[bool]:
        """Begin a pass on all ranks. Returns which of them have examples.
        ``wait()`` waits until the current backward passes of the backend have
        ended."""
        found = self._world.gather("a pass with batch_norm='sync'", rows)
        self.passes += 1
        self._waits[engine] = wait
        return found

    def add(self, name: str, part: np.ndarray, count: int
            ) -> tuple[int, np.ndarray]:
        """In a forward pass, the sums of `count` and of `part` over all
        ranks."""
        with self._lock:
            said, total = self._add(name, part, count)
        assert total is not None
        return sum(said), total

    def add_gradient(self, name: str, part: np.ndarray, reached: bool
                     ) -> np.ndarray | None:
        """In a backward pass, the sum of `part` over all ranks; None if no
        rank has `reached` it. After an error NaN: `synchronize` raises the
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
        """The values of `more` of all ranks with examples, and the sum; None
        if all are 0."""
        said = self._agree([name, str(part.dtype), list(part.shape), more])
        if not any(said[3]):
            return said[3], None
        # In float64, which a backend passes to gloo if it adds in another
        # dtype: MXNet calls this within an operation, where its KVStore would
        # wait forever.
        flat = part.reshape(-1).astype(np.float64)
        with self._world.together():
            self._world.reduce(flat)
        return said[3], flat.astype(part.dtype).reshape(part.shape)

    def _agree(self, own: list[Any] | None) -> list[Any]:
        """Name, dtype and shape of the current sum of all ranks with
        examples, and the value that each adds to them. Raises RuntimeError
        on all ranks if their sums differ."""
        ranks = {rank: one for rank, one in enumerate(
            self._world.all_gather(_WORK, own)) if one is not None}
        first, *others = ranks.values()
        if any(one[:3] != first[:3] for one in others):
            raise RuntimeError(
                "synchronized batch normalization needs the same layers in "
                "the same order on every rank; received "
                + ", ".join(f"{one[0]} ({one[1]} {tuple(one[2])}) on rank "
                            f"{rank}" for rank, one in ranks.items())
                + ". Call the same layers on each rank, and "
                "compute the loss from the same outputs; or use "
                "batch_norm='per_device' for such a network.")
        return [*first[:3], [one[3] for one in ranks.values()]]

    def serve(self) -> None:
        """Join all sums of a pass in which this rank has no examples."""
        with self._lock:
            while True:
                name, _, shape, said = self._agree(None)
                if name == _END:
                    return
                if any(said):
                    with self._world.together():
                        self._world.reduce(np.zeros(prod(shape)))

    def end(self) -> None:
        """Release the ranks without examples: the backward passes of this
        rank have ended."""
        with self._lock:
            self._agree([_END, "", [], 0])

    def synchronize(self) -> None:
        """Wait for the sums of backward passes, and raise an error of one of
        them. Required before any other exchange of the ranks."""
        for wait in list(self._waits.values()):
            wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
