"""OpenMP's threads of the thread that calls torch."""
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_SOFT = 1       # omp_pause_soft


@functools.cache
def _pause() -> Callable[[], object]:
    """OpenMP's ``omp_pause_resource`` for the host, of torch's own library;
    a function that does nothing where there is none."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"):
        try:
            library = ctypes.CDLL(str(path))
            return functools.partial(library.omp_pause_resource, _SOFT,
                                     library.omp_get_initial_device())
        except (AttributeError, OSError):
            continue
    return lambda: None


def end_threads() -> None:
    """End the OpenMP threads of the calling thread; its next parallel
    operation starts them again (0.1 ms).

    After an operation these threads wait busily for the next one, for
    milliseconds. Meanwhile they take the cores that the threads of the
    devices need: LeNet in float64 on two devices took a quarter longer.
    """
    _pause()()


def begin_thread(count: int) -> None:
    """The calling thread, which is new, computes on `count` cores."""
    # Asked once, or its first operation sets what other threads set last.
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the block, this thread computes on `count` cores. The thread may
    be the user's own."""
    before = torch.get_num_threads()
    try:
        if before != count:
            torch.set_num_threads(count)
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
