"""Prefetch batches in a background thread."""
import atexit
import contextvars
import functools
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import length_hint
from typing import Any

from mgpu.backends import get_backend
from mgpu.backends.device import Device, as_devices, try_all_gpus
from mgpu.data.inputs import as_rounds
from mgpu.data.iterators import BatchIterator, Epoch
from mgpu.data.nested import map_leaves
from mgpu.utils.arguments import batches, integer

#: seconds that the interpreter's exit waits for a batch in progress
AT_EXIT = 10.0

#: name of a worker thread; threads are reused by later iterators
_NAME = "mgpu-prefetch"


# Worker threads never end: MXNet does not free the random streams of a thread
# (5 MB).
_idle: list[queue.SimpleQueue] = []     # one for each idle thread
os.register_at_fork(after_in_child=_idle.clear)     # threads do not fork
_here = threading.local()       # .ended: queue of the thread's current job


def _hand_out(job: list[Callable[[], Any]], ended: queue.SimpleQueue) -> None:
    """Run the function in `job` in a worker thread, which removes it from
    `job` first and adds an entry to `ended` at the end."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_loop, args=(jobs,), name=f"{_NAME}-idle",
                         daemon=True).start()
    jobs.put((job, ended))


def _loop(jobs: queue.SimpleQueue) -> None:
    thread = threading.current_thread()
    while True:
        job, ended = jobs.get()
        _here.ended = ended
        thread.name = _NAME
        job.pop()()     # keep no reference to it
        thread.name = f"{_NAME}-idle"
        _idle.append(jobs)
        ended.put(True)


def prefetch(data: Iterable[Any], depth: int = 1, *, devices: Any = None
             ) -> "Prefetched":
    """Iterate over `data`, prefetching batches in a background thread.

    Each ``iter()``, and so each ``for`` loop, iterates over `data` once, with
    one thread that keeps up to `depth` batches ready. ``iter(data)`` is
    called in the caller's thread. The background thread has the caller's
    context variables and the modes of the current backend (MXNet's NumPy
    mode, recording, autocast).

    Random numbers of the framework that `data` uses are reproducible after
    `mgpu.seed`. On torch they come from the default generator, as without
    `prefetch`; on MXNet, which has generators for each thread, from new ones.

    `data` may be prefetched itself and may run networks. It must not wait for
    the loop to process a batch, which would be a deadlock.

    Parameters
    ----------
    data : iterable
        Batches of any type.
    depth : int
        Number of batches to prefetch, 1 or more. They take the memory of
        `depth` batches.
    devices : devices, optional
        Devices that will use the batches (default: all GPUs). For CUDA
        devices of torch, arrays in a batch, including those in tuples, lists
        and dicts, are copied to pinned memory as CPU tensors, so `put` and
        `split_batch` copy asynchronously. Otherwise batches are not copied.

    Returns
    -------
    iterable
        Has the ``len()`` of `data`, if any. Its iterator blocks until a batch
        is ready. An exception of `data` is raised after the batches before
        it, and ends the iteration.

        Prefetching stops after the last batch, an exception, ``break`` or
        Ctrl-C, or when the iterator is deleted or closed, and waits for the
        batch in progress. Batches that were prefetched and not used are lost
        if `data` is an iterator that ``iter()`` does not restart.

    Raises
    ------
    ValueError
        `depth` is not an integer of 1 or more, or `devices` are invalid.
    TypeError
        `data` is not iterable.
    """
    depth = integer("depth", depth, 1)
    return Prefetched(batches("data", data), depth, None if devices is None
                      else as_devices(devices))


def order_of(data: Any) -> BatchIterator | None:
    """The `BatchIterator` that `data` is or prefetches, or None."""
    while isinstance(data, Prefetched):
        data = data.data
    return data if isinstance(data, BatchIterator) else None


def place_of(data: Any) -> list[Any] | None:
    """`BatchIterator.place` of the next batch of `data`, which processes
    compare. None without a known order."""
    order = order_of(data)
    return None if order is None else order.place(*order.position)


class Prefetched:
    """Iterable returned by `prefetch`.

    Attributes
    ----------
    data : iterable
        Source of the batches.
    """

    def __init__(self, data: Iterable[Any], depth: int,
                 devices: list[Device] | None) -> None:
        self.data, self._depth, self._devices = data, depth, devices

    def __len__(self) -> int:
        return len(self.data)      # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: `data` may count its epochs by iter(). The
        # thread, in `draw`, has no reference to the generator below, because
        # deleting the generator ends the thread. SimpleQueue, which is
        # written in C, instead of semaphores and events: Ctrl-C inside these
        # can leave a lock acquired.
        backend, data = get_backend(), self.data
        pin = backend.pinner(self._devices or try_all_gpus())
        source = iter(as_rounds(data))
        epoch = source if isinstance(source, Epoch) else None
        if epoch is not None:
            source = epoch.batches
        # An entry is put for each batch, so no more than `data` has.
        depth = min(self._depth, max(1, length_hint(data, 1 << 16)))
        modes, context = backend.carry(), contextvars.copy_context()
        drawn: queue.SimpleQueue = queue.SimpleQueue()  # a batch, or the end
        requests: queue.SimpleQueue = queue.SimpleQueue()   # of a batch
        ended: queue.SimpleQueue = queue.SimpleQueue()
        stop: list[bool] = []       # not empty: stop drawing
        failure: list[BaseException] = []
        job: list[Callable[[], Any]] = []
        process = os.getpid()       # a forked process has no thread

        def draw(drawing: Callable[[], AbstractContextManager[None]]) -> None:
            try:
                with modes():
                    while requests.get() and not stop:
                        with drawing():
                            box = list(itertools.islice(source, 1))
                        if not box:
                            break
                        if pin is not None:
                            box = map_leaves(pin, box)
                        drawn.put(box)
                        del box
            except BaseException as error:  # raised in the caller's thread
                failure.append(error)
            drawn.put([])

        def end(seconds: float | None = None) -> None:
            stop.append(True)
            requests.put(True)
            # The thread itself may delete the last reference.
            if not job and process == os.getpid() \
                    and getattr(_here, "ended", None) is not ended:
                with backend.aside(), suppress(queue.Empty):
                    ended.put(ended.get(timeout=seconds))

        def batches() -> Iterator[Any]:
            # Without random numbers, no streams are needed.
            fixed = isinstance(data, (list, tuple)) \
                or isinstance(data, BatchIterator) and data.fixed
            job.append(functools.partial(
                context.run, draw, nullcontext if fixed
                else backend.drawing(stop)))
            for _ in range(depth):
                requests.put(True)
            # Backend code aborts if the interpreter exits during it.
            atexit.register(end, AT_EXIT)
            try:
                _hand_out(job, ended)
                while True:
                    with backend.aside():
                        box = drawn.get()
                    requests.put(True)
                    if not box:
                        break
                    if epoch is not None:
                        epoch.taken()
                    yield box.pop()     # keep no reference to it
                if failure:
                    raise failure.pop()
                if epoch is not None:
                    epoch.ended()
            finally:
                atexit.unregister(end)
                if not sys.is_finalizing():     # atexit has waited
                    end()
        return batches()

    def __repr__(self) -> str:
        return f"prefetch({self.data!r}, depth={self._depth})"
