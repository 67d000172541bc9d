"""OpenMP threads of the calling thread."""
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_SOFT = 1       # omp_pause_soft


@functools.cache
def _pause() -> Callable[[], object]:
    """``omp_pause_resource`` for the host, of torch's OpenMP library; a
    function without effect if it is not available."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"):
        try:
            library = ctypes.CDLL(str(path))
            return functools.partial(library.omp_pause_resource, _SOFT,
                                     library.omp_get_initial_device())
        except (AttributeError, OSError):
            continue
    return lambda: None


def end_threads() -> None:
    """End the OpenMP threads of the calling thread. Its next parallel
    operation restarts them (0.1 ms).

    After an operation, these threads spin for milliseconds, on cores that the
    threads of the devices need: LeNet in float64 on two devices took 25 %
    longer.
    """
    _pause()()


def begin_thread(count: int) -> None:
    """Set the number of cores of the calling thread, which is new."""
    # Read once, or the first operation uses the setting of other threads.
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Context manager that sets the number of cores of this thread, which may
    be one of the user, and restores it."""
    before = torch.get_num_threads()
    try:
        if before != count:
            torch.set_num_threads(count)
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
