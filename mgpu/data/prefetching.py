"""The next batches, drawn in the background while the devices compute."""
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
from mgpu.data.datasets import BatchIterator, Epoch
from mgpu.data.inputs import as_rounds
from mgpu.data.nested import map_leaves
from mgpu.utils.arguments import batches, integer

#: seconds that the end of the interpreter waits for a batch that is drawn
AT_EXIT = 10.0

#: the name of a thread that draws; it is kept for the next iterator
_NAME = "mgpu-prefetch"


# Threads that draw, or wait for something to draw, never end: MXNet does not
# give back what a thread's random streams take (5 MB).
_idle: list[queue.SimpleQueue] = []     # of each thread that waits
os.register_at_fork(after_in_child=_idle.clear)     # it has no such thread
_here = threading.local()       # .ended: of what this thread draws


def _hand_out(job: list[Callable[[], Any]], ended: queue.SimpleQueue) -> None:
    """Let a thread take the function out of `job` and call it; then `ended`
    has an entry."""
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
        job.pop()()     # no reference to it stays here
        thread.name = f"{_NAME}-idle"
        _idle.append(jobs)
        ended.put(True)


def prefetch(data: Iterable[Any], depth: int = 1, *, devices: Any = None
             ) -> "Prefetched":
    """The batches of `data`, in its order, drawn ahead by one thread.

    Each ``iter()``, so each ``for`` loop, goes through `data` once, in a
    thread that draws for it alone: a batch as soon as fewer than `depth`
    wait to be taken. ``iter(data)`` itself is called by ``iter()``, in the
    caller's thread; the thread has the caller's context variables and the
    modes of the current backend (MXNet's NumPy mode, recording, autocast).
    Random numbers of the framework that `data` draws are the same in every
    run after one `mgpu.seed`: on torch those of its default stream, as
    without `prefetch`; on MXNet, where each thread has streams, new ones.
    `data` may be prefetched itself and may run networks, but must not wait
    for what the loop does with a batch: the loop may wait for it.

    Parameters
    ----------
    data : iterable
        Of anything; what can be gone through once per epoch stays so.
    depth : int
        Batches that are drawn and not taken, 1 or more; the memory of
        `depth` batches besides the one in use.
    devices : devices, optional
        Where the batches go (default: all GPUs). For CUDA devices of torch
        the arrays of a batch, also inside tuples, lists and dicts, are
        copied to page-locked memory and become CPU tensors, so that `put`
        and `split_batch` need not wait for their copies. Otherwise batches
        are handed on as they are.

    Returns
    -------
    iterable
        It has the ``len()`` of `data`, where that has one. Its iterator
        blocks while no batch is ready. An exception of `data` is raised
        after the batches before it, and ends the iteration.

        Drawing ends with the iteration: after the last batch, an exception,
        ``break`` or Ctrl-C, or when the iterator is dropped or closed; that
        waits for the batch that is being drawn. The thread is kept for a
        later iterator. Of an iterator that is not started again by
        ``iter()``, batches that were drawn and not taken are lost then.

    Raises
    ------
    ValueError
        `depth` is not a whole number of 1 or more; or `devices` holds
        something that is not a device.
    TypeError
        `data` is not iterable.
    """
    depth = integer("depth", depth, 1)
    return Prefetched(batches("data", data), depth, None if devices is None
                      else as_devices(devices))


def order_of(data: Any) -> BatchIterator | None:
    """The `BatchIterator` behind `data`, if there is one."""
    while isinstance(data, Prefetched):
        data = data.data
    return data if isinstance(data, BatchIterator) else None


def place_of(data: Any) -> list[Any] | None:
    """Where a loop over `data` goes on, as processes compare it
    (`BatchIterator.place`); None without a known order."""
    order = order_of(data)
    return None if order is None else order.place(*order.position)


class Prefetched:
    """What `prefetch` returns.

    Attributes
    ----------
    data : iterable
        Where the batches come from.
    """

    def __init__(self, data: Iterable[Any], depth: int,
                 devices: list[Device] | None) -> None:
        self.data, self._depth, self._devices = data, depth, devices

    def __len__(self) -> int:
        return len(self.data)      # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: `data` may count its epochs by iter(). What
        # the thread knows, in `draw`, does not lead to the generator below:
        # dropping that is what ends the thread. No semaphore and no event:
        # Ctrl-C inside one can leave its lock taken, for ever. These queues
        # are written in C.
        backend, data = get_backend(), self.data
        pin = backend.pinner(self._devices or try_all_gpus())
        source = iter(as_rounds(data))
        epoch = source if isinstance(source, Epoch) else None
        if epoch is not None:
            epoch.moves = False
        # An entry is made for each: no more than could ever wait.
        depth = min(self._depth, max(1, length_hint(data, 1 << 16)))
        modes, context = backend.carry(), contextvars.copy_context()
        drawn: queue.SimpleQueue = queue.SimpleQueue()  # a batch, or nothing
        wanted: queue.SimpleQueue = queue.SimpleQueue()     # draw one
        ended: queue.SimpleQueue = queue.SimpleQueue()
        stop: list[bool] = []       # not empty: draw no more
        failure: list[BaseException] = []
        job: list[Callable[[], Any]] = []
        process = os.getpid()       # a forked one has no thread to wait for

        def draw(drawing: Callable[[], AbstractContextManager[None]]) -> None:
            try:
                with modes():
                    while wanted.get() and not stop:
                        with drawing():
                            box = list(itertools.islice(source, 1))
                        if not box:
                            break
                        if pin is not None:
                            box = map_leaves(pin, box)
                        drawn.put(box)
                        del box
            except BaseException as error:  # raised where it is waited for
                failure.append(error)
            drawn.put([])

        def end(seconds: float | None = None) -> None:
            stop.append(True)
            wanted.put(True)
            # The last reference may go while the thread itself runs.
            if not job and process == os.getpid() \
                    and getattr(_here, "ended", None) is not ended:
                with backend.aside(), suppress(queue.Empty):
                    ended.put(ended.get(timeout=seconds))

        def batches() -> Iterator[Any]:
            # What draws no random numbers needs no streams.
            fixed = isinstance(data, (list, tuple)) \
                or isinstance(data, BatchIterator) and data.fixed
            job.append(functools.partial(
                context.run, draw, nullcontext if fixed
                else backend.drawing(stop)))
            for _ in range(depth):
                wanted.put(True)
            # Code of a backend aborts where the interpreter ends under it.
            atexit.register(end, AT_EXIT)
            try:
                _hand_out(job, ended)
                while True:
                    with backend.aside():
                        box = drawn.get()
                    wanted.put(True)
                    if not box:
                        break
                    if epoch is not None:
                        epoch.taken()
                    yield box.pop()     # no reference to it stays here
                if failure:
                    raise failure.pop()
                if epoch is not None:
                    epoch.ended()
            finally:
                atexit.unregister(end)
                if not sys.is_finalizing():     # that has waited already
                    end()
        return batches()

    def __repr__(self) -> str:
        return f"prefetch({self.data!r}, depth={self._depth})"
