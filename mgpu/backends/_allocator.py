"""Settings of the C library's allocator: keep freed memory, or release it."""
import ctypes
import functools

from mgpu.utils import environment

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@functools.cache
def keep_freed_memory() -> bool:
    """Configure the allocator to keep freed memory for reuse.

    By default, glibc returns each large array to the system immediately, and
    allocates it again, page by page, in every step. Threads other than the
    main one do so for any threshold, because their heaps are limited to 64
    MB; with this setting, new threads share the main heap. Resident memory
    remains at its peak until `give_back`. With ``MGPU_KEEP_MEMORY=0``, and
    without glibc, nothing changes.

    Returns
    -------
    bool
        Whether the setting is active.
    """
    if not environment.keep_memory():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # Versions that map everything above half of a thread's heap reject
        # the larger value.
        return bool((mallopt(_MMAP_THRESHOLD, 1 << 30)
                     or mallopt(_MMAP_THRESHOLD, 1 << 25))
                    and mallopt(_TRIM_THRESHOLD, -1)      # never
                    and mallopt(_ARENA_MAX, 1))
    except (AttributeError, OSError, TypeError):    # not glibc
        return False


def give_back() -> None:
    """Release the memory kept by `keep_freed_memory`, in 65 ms per GB. Called
    at the end of training, not during it and not in a finalizer."""
    if keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)
