"""Dropout masks that depend neither on the engine nor on the devices."""
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu.backends import get_backend


class Masks:
    """Dropout masks, drawn in NumPy.

    A mask is a function of the seed, the step, the number of the call in the
    step, and the row of the whole batch. ``off=True``: nothing is dropped.
    Values that are kept are divided by ``1 - rate`` (inverted dropout), as
    both frameworks do.

    Attributes
    ----------
    drawn : bool
        Whether a layer, or ``F.dropout``, has asked for one.
    taken : list of tuple
        Rate, axes and shape of each that the last pass has asked for.
    """

    drawn = False

    def __init__(self, seed: int, off: bool = False):
        self._seed, self.off = seed, off
        self._lock = threading.Lock()

    def begin(self, step: int, rows: Sequence[int]) -> None:
        """The next calls belong to a pass of step `step`, in which device i
        has ``rows[i]`` rows."""
        self._step, self._rows = step, list(rows)
        self._calls = [0] * len(rows)
        self.taken: list[tuple[Any, ...]] = []
        self._places: np.ndarray | None = None

    def take(self, places: Sequence[int]) -> None:
        """The next calls belong to a pass of these rows of the batch, on one
        device; -1 for rows of another batch."""
        if len(self._rows) == 1 and places and min(places) >= 0 \
                and len(places) < self._rows[0]:
            self._places, self._calls = np.array(places), [0]

    def __call__(self, x: Any, rate: float, axes: tuple[int, ...], index: int
                 ) -> Any:
        """See `mgpu.backends.probing.DrawMask`."""
        backend = get_backend()
        with self._lock:
            number = self._calls[index]
            self._calls[index] += 1
            self.drawn = True
            self.taken.append((rate, tuple(axes), tuple(x.shape)))
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
        mask = np.ones((1,) * len(shape)) if self.off \
            else self._draw(shape, rate, number, index)
        with backend.scope(recording=False):
            return backend.ops.astype(backend.put(mask, x), x.dtype)

    def _draw(self, shape: tuple[int, ...], rate: float, number: int,
              index: int) -> np.ndarray:
        rows, total = self._rows[index], sum(self._rows)
        entropy = [self._seed, self._step, number]
        part: Any = slice(None)
        if self._places is not None:
            rows = len(self._places)
        if rows and shape and shape[0] % rows == 0:
            per_row = shape[0] // rows      # a reshape may fold axes into 0
            whole = (total * per_row, *shape[1:])
            begin = sum(self._rows[:index]) * per_row
            part = slice(begin, begin + shape[0])
            if self._places is not None:
                part = (self._places[:, None] * per_row
                        + np.arange(per_row)).ravel()
        else:
            whole = shape
            entropy.append(index)
        keep = np.random.default_rng(entropy).random(whole) >= rate
        return keep[part] / (1 - rate) if rate < 1 else keep[part] * 0.0
