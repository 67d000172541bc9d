"""Do all replicas hold the same bits, each in memory of its own?"""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends.base import Backend, Device
from mgpu.errors import ReplicaMismatchError
from mgpu.parameters import Parameter


class Extent(NamedTuple):
    """What one array occupies."""

    space: str
    begin: int
    end: int
    device: Device
    name: str


def extents(backend: Backend, devices: Sequence[Device], name: str,
            arrays: Sequence[Any]) -> list[Extent]:
    """The places of one parameter's arrays; waits for them."""
    found = []
    for device, x in zip(devices, arrays, strict=True):
        space, begin, end = backend.memory(x)
        if begin < end:
            found.append(Extent(str(space), begin, end, device, name))
    return found


def check_apart(extents: Sequence[Extent]) -> None:
    """ReplicaMismatchError where arrays of two devices share memory."""
    last: Extent | None = None      # the one that reaches furthest so far
    for here in sorted(extents):
        if last is None or here.space != last.space or here.begin >= last.end:
            last = here
        elif here.device != last.device:
            raise ReplicaMismatchError(
                f"each replica must have memory of its own; {last.name!r} on "
                f"{last.device} and {here.name!r} on {here.device} share "
                "theirs, so what one device writes changes the other. Copy "
                "arrays with mgpu.put or x[:] = v; do not put one device's "
                "array in another one's place.")
        elif here.end > last.end:
            last = here


def mismatch(p: Parameter, a: Device, b: Device, x: np.ndarray,
               y: np.ndarray) -> ReplicaMismatchError:
    """The error for the parameter `p`, which is `x` on `a` and `y` on `b`."""
    if x.shape != y.shape or x.dtype != y.dtype:
        how = f"they are {x.shape} {x.dtype} and {y.shape} {y.dtype}"
    else:
        with np.errstate(invalid="ignore"):     # infinity minus infinity
            gaps = np.abs(x.astype(np.float64) - y.astype(np.float64))
        # A NaN on only one side is as far away as can be.
        gaps[np.isnan(gaps)] = np.inf
        gaps[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
        how = (f"{np.count_nonzero(gaps)} of {gaps.size} elements differ, "
               f"by {gaps.max():.6g} at most") if gaps.any() else \
            "they are equal numbers with other bits (signs of zeros, NaNs)"
    return ReplicaMismatchError(
        f"all replicas must hold the same values; {p.name!r} on {a} and on "
        f"{b} does not: {how}. Something wrote to only one replica, or "
        "gradients were not all-reduced: write with Parameter.set_data or "
        "Replicas.import_numpy, which reach all, and step with Trainer.")


