"""Threads, one per device, that live as long as there is work for them.

Both engines run thunks (functions without arguments) through `Workers`: torch
always, because a CPU backward pass runs in the thread that calls it; MXNet
only where thunks wait for each other.
"""
import atexit
import contextvars
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from mgpu import probes
from mgpu.backends._allocator import give_back
from mgpu.backends.base import ContextManager

#: seconds without work after which a thread ends
IDLE = 30.0
#: seconds that the end of the interpreter waits for work
AT_EXIT = 60.0

_here = threading.local()       # .inside: this thread is a worker

Jobs = queue.SimpleQueue        # of callables; None: end


def inside_worker() -> bool:
    """Whether this thread belongs to a `Workers`."""
    return getattr(_here, "inside", False)


class Workers:
    """Runs number i of a list of thunks in thread i.

    A thread starts when there is first work for it, and ends after `idle`
    seconds without any; the next work for it starts another. The last one to
    end gives freed memory back. At the end of the interpreter all are ended,
    which waits for their work: it cannot be cut short in the engine's code.

    Parameters
    ----------
    name : str
        Thread i is called ``{name}-{i}``.
    start : callable
        Called once in each new thread.
    carry : callable
        Called in the calling thread; returns a factory of a context manager
        that sets the caller's per-thread modes in the worker.
    idle : float
        Seconds.
    aside : callable
        Gives a block in which the calling thread waits for these threads: it
        holds no lock there that a thunk of another caller may wait for.
    """

    def __init__(self, name: str, start: Callable[[], None],
                 carry: Callable[[], Callable[[], ContextManager]],
                 idle: float = IDLE,
                 aside: Callable[[], ContextManager] = nullcontext):
        self._name, self._start, self._carry = name, start, carry
        self._idle, self._aside = idle, aside
        self._reset()
        # A forked child has none of its parent's threads.
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.end)

    def _reset(self) -> None:
        self._places: list[tuple[Jobs, threading.Thread] | None] = []
        # One call at a time: thunks that wait for each other must not be
        # interleaved with those of another caller. Who holds it may also
        # change `_places`.
        self._one_call = threading.Lock()
        self._call: _Call | None = None     # that runs, or was left
        self._caller: int | None = None     # the thread that waits for it

    def run(self, thunks: Sequence[Callable[[], Any]],
            carry: bool = True) -> list[Any]:
        """Return the results when all thunks have returned, or raise the
        first exception by number.

        One thunk runs in the calling thread. Inside a thunk, they run one
        after the other, because they may need the thread that the thunk runs
        in. After Ctrl-C either no thunk has
        begun or all have run, once: none waits for one that was never
        started, and no thread goes on after the call (a second Ctrl-C does
        not wait). Without `carry` they run in no modes of the caller's: they
        call nothing of the engine's.
        """
        if inside_worker():
            return run_in_turn(thunks)
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "a signal handler starts no work on devices while the code "
                "that it interrupts waits for some; received a call of mgpu "
                "in one. Set a flag in the handler, and look at it between "
                "steps.")
        if len(thunks) == 1:
            return run_in_turn(thunks)
        call = _Call(probes.timed(thunks),
                     self._carry() if carry else nullcontext)
        if thunks:
            with self._aside(), self._one_call:
                queues = self._queues(len(thunks))
                self._call = call
                self._caller = threading.get_ident()
                try:
                    call.hand_out(queues)
                    call.wait()
                except BaseException:
                    call.hand_out(queues)   # those that were not, yet
                    call.wait()
                    raise
                finally:
                    self._caller = None
                self._call = None
        return call.outcome()

    def _queues(self, count: int) -> list[Jobs]:
        """The queues of the threads 0 to `count` - 1, which now run."""
        places = self._places
        places.extend([None] * (count - len(places)))
        for i in range(count):
            if places[i] is None:
                jobs: Jobs = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._loop, args=(i, jobs), daemon=True,
                    name=f"{self._name}-{i}")
                thread.start()
                places[i] = jobs, thread
        return [place[0] for place in places[:count] if place is not None]

    def end(self) -> None:
        """End all threads, and wait `AT_EXIT` seconds for them at most: also
        for work that a second Ctrl-C has left."""
        places, self._places = [p for p in self._places if p], []
        if self._call is not None:      # who has begun may wait for the rest
            self._call.hand_out([jobs for jobs, _ in places])
        for jobs, _ in places:
            jobs.put(None)
        end = time.monotonic() + AT_EXIT
        for _, thread in places:
            thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, i: int, jobs: Jobs) -> None:
        _here.inside = True
        self._start()
        while True:
            try:
                job = jobs.get(timeout=self._idle)
            except queue.Empty:
                if self._leaves(i, jobs):
                    return
                continue
            if job is None:
                return
            job()
            del job     # and what the thunk refers to

    def _leaves(self, i: int, jobs: Jobs) -> bool:
        """Whether thread `i` may end; if so, free its place.

        It may not end during a call, which may be about to give it work; and
        it does not wait for a call, which may be waiting for this thread.
        """
        if not self._one_call.acquire(blocking=False):
            return False
        try:
            if not jobs.empty():    # of a call that two Ctrl-C ended
                return False
            place = self._places[i] if i < len(self._places) else None
            if place is not None and place[0] is jobs:
                self._places[i] = None
            if not any(self._places):
                give_back()
            return True
        finally:
            self._one_call.release()


class _Call:
    """The thunks of one `Workers.run`, and what became of them."""

    def __init__(self, thunks: Sequence[Callable[[], Any]],
                 modes: Callable[[], ContextManager]):
        self._thunks: list[Any] = list(thunks)
        self._modes = modes
        self._contexts: list[Any] = [contextvars.copy_context()
                                     for _ in thunks]
        self._once = [iter((None,)) for _ in thunks]
        self._results: list[Any] = [None] * len(thunks)
        self._errors: list[Any] = [None] * len(thunks)
        self._number = itertools.count(1)
        self._all_ended = False
        self._ending = threading.Lock()     # cheaper than an Event
        self._ending.acquire()

    def hand_out(self, queues: Sequence[Jobs]) -> None:
        for i, jobs in enumerate(queues[:len(self._once)]):
            jobs.put(partial(self._do, i))

    def _do(self, i: int) -> None:
        for _ in self._once[i]:     # no second time
            try:
                with self._modes():
                    self._results[i] = self._contexts[i].run(self._thunks[i])
            except BaseException as error:      # handed to the caller
                self._errors[i] = error
            # Drop them before the caller continues: this thread may keep
            # this object for some time, and must not keep arrays alive.
            self._thunks[i] = self._contexts[i] = None
            if next(self._number) == len(self._thunks):
                self._all_ended = True
                self._ending.release()

    def wait(self) -> None:
        """Wait until all thunks have ended. It may be called again, as Ctrl-C
        may come when the lock has just been taken."""
        if not self._all_ended:
            self._ending.acquire()

    def outcome(self) -> list[Any]:
        """Return the results or raise the first exception; to be called
        once."""
        results, errors = self._results, self._errors
        del self._results, self._errors
        return first_error_or(results, errors)


def run_in_turn(thunks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all thunks in this thread, one after the other."""
    results: list[Any] = []
    errors: list[Any] = []
    for thunk in probes.timed(thunks):
        try:
            results.append(thunk())
        except Exception as error:
            errors.append(error)
    return first_error_or(results, errors)


def first_error_or(results: list[Any], errors: list[Any]) -> list[Any]:
    """Raise the first exception in `errors`; without one, the results."""
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return results
    # Its traceback refers to these frames. If they referred to it as well,
    # it and all arrays in them would stay until garbage is collected.
    errors.clear()
    results.clear()
    try:
        raise first
    finally:
        del first
