"""Worker threads, one per device, for the lifetime of the process.

Both backends run thunks (functions without arguments) in `Workers`: torch all
except short ones, because a CPU backward pass runs in the calling thread;
MXNet only thunks that wait for each other.
"""
import atexit
import contextvars
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from mgpu.backends._allocator import give_back
from mgpu.backends.types import ContextManager
from mgpu.utils import probes

#: seconds without work after which a thread releases freed memory
IDLE = 30.0
#: seconds that the interpreter's exit waits for work
AT_EXIT = 60.0

_here = threading.local()       # .inside: whether this thread is a worker

Jobs = queue.SimpleQueue        # of callables; None: end


def inside_worker() -> bool:
    """Whether this thread belongs to a `Workers`."""
    return getattr(_here, "inside", False)


class Workers:
    """Thread pool that runs thunk i in thread i.

    A thread starts with its first work. After `IDLE` seconds without work it
    releases freed memory. The interpreter's exit ends all threads, and waits
    for their work, which cannot be interrupted in a backend's code.

    Parameters
    ----------
    name : str
        Thread i has the name ``{name}-{i}``.
    start : callable
        Called once in each new thread.
    carry : callable
        Called in the calling thread. Returns a function that returns a
        context manager, which sets the caller's thread-local modes in the
        worker.
    aside : callable
        Returns a context manager in which the calling thread waits for the
        workers. It releases locks that thunks of other callers may wait for.
    """

    def __init__(self, name: str, start: Callable[[], None],
                 carry: Callable[[], Callable[[], ContextManager]],
                 aside: Callable[[], ContextManager] = nullcontext):
        self._name, self._start, self._carry = name, start, carry
        self._aside = aside
        self._reset()
        # Threads do not survive a fork.
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.end)

    def _reset(self) -> None:
        self._threads: list[tuple[Jobs, threading.Thread]] = []
        # One call at a time: thunks that wait for each other must not be
        # interleaved with those of another caller.
        self._one_call = threading.Lock()
        self._call: _Call | None = None     # running, or interrupted
        self._caller: int | None = None     # the thread that waits for it

    def run(self, thunks: Sequence[Callable[[], Any]],
            carry: bool = True) -> list[Any]:
        """Run the thunks and return their results. Blocks until all have
        returned; then raises the exception of the first that failed.

        A single thunk runs in the calling thread. Nested calls run the thunks
        sequentially, because they may need the thread of the outer thunk.
        After Ctrl-C, either no thunk has started or all have run, so none
        waits for one that was not started, and none runs after the call; a
        second Ctrl-C does not wait. Without `carry`, the caller's modes are
        not set: the thunks do not use the backend.
        """
        if inside_worker():
            return run_in_turn(thunks)
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "a signal handler must not start work on devices while the "
                "interrupted code waits for devices; received a call of mgpu "
                "in one. Set a flag in the handler, and check it between "
                "steps.")
        if len(thunks) < 2:
            return run_in_turn(thunks)
        call = _Call(probes.timed(thunks),
                     self._carry() if carry else nullcontext)
        with self._aside(), self._one_call:
            for i in range(len(self._threads), len(thunks)):
                jobs: Jobs = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._loop, args=(jobs,), daemon=True,
                    name=f"{self._name}-{i}")
                thread.start()
                self._threads.append((jobs, thread))
            self._call = call
            self._caller = threading.get_ident()
            try:
                call.hand_out(self._threads)
                call.wait()
            except BaseException:
                call.hand_out(self._threads)    # the remaining ones
                call.wait()
                raise
            finally:
                self._caller = None
            self._call = None
        return call.outcome()

    def end(self) -> None:
        """End all threads, waiting at most `AT_EXIT` seconds. After a second
        Ctrl-C that ends the process during a call, the signal ends it
        immediately."""
        threads, self._threads = self._threads, []
        if self._call is not None:
            if getattr(sys, "last_type", None) is KeyboardInterrupt:
                print(end="", flush=True)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            self._call.hand_out(threads)    # started thunks may wait for them
        for jobs, _ in threads:
            jobs.put(None)
        end = time.monotonic() + AT_EXIT
        for _, thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, jobs: Jobs) -> None:
        _here.inside = True
        self._start()
        while True:
            try:
                job = jobs.get(timeout=IDLE)
            except queue.Empty:
                give_back()
                job = jobs.get()
            if job is None:
                return
            job()
            del job     # releases the references of the thunk


class _Call:
    """The thunks of a `Workers.run`, and their results."""

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

    def hand_out(self, threads: Sequence[tuple[Jobs, Any]]) -> None:
        for i, (jobs, _) in enumerate(threads[:len(self._once)]):
            jobs.put(partial(self._do, i))

    def _do(self, i: int) -> None:
        for _ in self._once[i]:     # at most once
            try:
                with self._modes():
                    self._results[i] = self._contexts[i].run(self._thunks[i])
            except BaseException as error:      # raised in the caller
                self._errors[i] = error
            # Release them before the caller continues: this thread may hold
            # this object for some time, and must not keep arrays alive.
            self._thunks[i] = self._contexts[i] = None
            if next(self._number) == len(self._thunks):
                self._all_ended = True
                self._ending.release()

    def wait(self) -> None:
        """Block until all thunks have ended. May be called again, because
        Ctrl-C may arrive when the lock was just acquired."""
        if not self._all_ended:
            self._ending.acquire()

    def outcome(self) -> list[Any]:
        """Return the results, or raise the first exception. Called once."""
        results, errors = self._results, self._errors
        del self._results, self._errors
        return first_error_or(results, errors)


def run_here(thunks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call the thunks sequentially in this thread, each in a copy of the
    context, as in worker threads."""
    before = inside_worker()
    try:
        _here.inside = True
        return run_in_turn([partial(contextvars.copy_context().run, thunk)
                            for thunk in thunks])
    finally:
        _here.inside = before


def run_in_turn(thunks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call the thunks sequentially in this thread."""
    results: list[Any] = []
    errors: list[Any] = []
    for thunk in probes.timed(thunks):
        try:
            results.append(thunk())
        except Exception as error:
            errors.append(error)
    return first_error_or(results, errors)


def first_error_or(results: list[Any], errors: list[Any]) -> list[Any]:
    """Raise the first exception in `errors`, or return the results."""
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return results
    # The traceback refers to these frames. References from the frames to the
    # exception would keep it, and all arrays, until garbage collection.
    errors.clear()
    results.clear()
    try:
        raise first
    finally:
        del first
