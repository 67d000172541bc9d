"""The host's own memory: NumPy in the place of an engine, and the allocator.
"""
import ctypes
import functools
import os
from typing import Any

import numpy as np

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> bool:
    """Let the process keep memory that it has freed, for its next use.

    By default glibc gives each large array back to the system at once, and
    gets it anew, page by page, in every step; a thread other than the first
    does so whatever the threshold, as its own heap is cut into pieces of 64
    MB. So new threads share the first one's heap. Resident memory stays at
    its highest. ``MGPU_KEEP_MEMORY=0`` leaves the allocator alone; so does
    another C library.

    Returns
    -------
    bool
        Whether it was done.
    """
    if os.environ.get("MGPU_KEEP_MEMORY") == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # The larger one is refused by versions that map whatever exceeds
        # half of a thread's heap.
        return bool((mallopt(_MMAP_THRESHOLD, 1 << 30)
                     or mallopt(_MMAP_THRESHOLD, 1 << 25))
                    and mallopt(_TRIM_THRESHOLD, -1)      # never
                    and mallopt(_ARENA_MAX, 1))
    except (AttributeError, OSError, TypeError):    # no glibc
        return False


class HostOps:
    """What elementwise rules need of `Ops`, on NumPy arrays."""

    abs = staticmethod(np.abs)
    sign = staticmethod(np.sign)
    sqrt = staticmethod(np.sqrt)
    maximum = staticmethod(np.maximum)
    minimum = staticmethod(np.minimum)
    zeros_like = staticmethod(np.zeros_like)

    @staticmethod
    def astype(x: Any, dtype: Any) -> np.ndarray:
        return x.astype(dtype)
