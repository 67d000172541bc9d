"""The C library's allocator, told to keep memory that the process frees, and
to give it back."""
import ctypes
import functools

from mgpu.utils import environment

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep memory that it has freed, for its next use.

    By default glibc returns each large array to the system at once, and asks
    for it again, page by page, in every step. A thread other than the first
    one does so whatever the threshold, because its own heap is cut into
    pieces of 64 MB; so new threads share the first one's heap. Resident
    memory stays at its highest value until `give_back`. With
    ``MGPU_KEEP_MEMORY=0``, and with another C library than glibc, nothing is
    changed.

    Returns
    -------
    bool
        Whether it was done.
    """
    if not environment.keep_memory():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # Versions that map whatever exceeds half of a thread's heap refuse
        # the larger value.
        return bool((mallopt(_MMAP_THRESHOLD, 1 << 30)
                     or mallopt(_MMAP_THRESHOLD, 1 << 25))
                    and mallopt(_TRIM_THRESHOLD, -1)      # never
                    and mallopt(_ARENA_MAX, 1))
    except (AttributeError, OSError, TypeError):    # no glibc
        return False


def give_back() -> None:
    """Give the system what `keep_freed_memory` keeps, which takes 65 ms a GB:
    at the end of a training, not in one and not in a finaliser."""
    if keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)
