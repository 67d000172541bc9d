"""Outputs that have keys: which of one side is which of the other's.

A network may return a dict or a named tuple. What has a key is compared with
what has the same key, whatever the order; the rest is in order.
"""
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.data.nested import leaves

#: the keys and positions that lead to an array
Path = tuple[Any, ...]


def paths(data: Any) -> list[Path]:
    """The path of each of the `leaves` of `data`: keys as text, positions as
    numbers."""
    if isinstance(data, Mapping):
        entries: list[Any] = [(str(k), v) for k, v in data.items()]
    elif isinstance(data, (list, tuple)) and not any(
            x is data for x in leaves(data)):   # as numbers in a list are
        entries = list(zip(getattr(data, "_fields", range(len(data))), data))
    else:
        return [()] * len(leaves(data))
    return [(key, *rest) for key, value in entries for rest in paths(value)]


def in_order_of(arrays: list[np.ndarray], own: Sequence[Path],
                other: Sequence[Path]) -> list[np.ndarray]:
    """The arrays, which have the paths `own`, as another side has them: what
    has a path of its own only takes the places that are left, in order. An
    empty array stands where there is none."""
    if list(own) == list(other) or len(own) != len(arrays) \
            or not (_named(own) and _named(other)):
        return arrays
    known = dict(zip(own, arrays))
    left = [x for path, x in known.items() if path not in set(other)]
    return [known[path] if path in known else left.pop(0) if left
            else np.zeros(0) for path in other] + left


def unlike(one: Sequence[Path], two: Sequence[Path]) -> str | None:
    """What to say where the keys of both sides differ."""
    if not (_named(one) and _named(two)):
        return None
    alone = [[".".join(map(str, path)) for path in mine
              if path not in set(yours)]
             for mine, yours in ((one, two), (two, one))]
    if not alone[0] or not alone[1]:
        return None
    return ("the outputs have other keys: what has a key of its own only is "
            "compared in order, " + ", ".join(
                f"{x} of a with {z} of b" for x, z in zip(*alone))
            + ". If one of them is meant for another, give both sides the "
            "same keys")


def _named(own: Sequence[Path]) -> bool:
    return any(isinstance(key, str) for path in own for key in path)
