"""Batches of a comparison: the first ones, and the same ones again."""
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mgpu.data.nested import map_leaves

Batch = tuple[Any, Any]
Batches = Iterable[Batch]


def endless(batches: Batches, steps: int | None
            ) -> tuple[Batch, Iterator[Batch], int]:
    """The first batch; `batches`, again from the beginning where they end;
    and the number of steps to take (default: one for each batch). ValueError
    without any."""
    if not steps:
        batches = list(batches)
        steps = len(batches)
    once = iter(batches)
    first = next(once, None)
    if first is None or steps < 1:
        raise ValueError("a comparison needs a batch; received none. Pass "
                         "batches=[(X, y), ...].")
    whole = itertools.chain([first], once)
    again = itertools.cycle(whole) if once is batches else itertools.chain(
        whole, itertools.chain.from_iterable(itertools.repeat(batches)))
    return first, itertools.islice(again, steps), steps


def first_rows(data: Any, n: int) -> Any:
    """The first `n` rows of each array in `data`, as NumPy arrays."""
    return map_leaves(lambda x: np.asarray(x)[:n], data)
