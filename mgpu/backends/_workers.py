"""Threads, one per device, that live as long as the process.

Both backends run thunks (functions without arguments) through `Workers`: torch
all but short ones, because a CPU backward pass runs in the thread that calls
it; MXNet only where thunks wait for each other.
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
from mgpu.backends.base import ContextManager
from mgpu.utils import probes

#: seconds without work after which a thread gives freed memory back
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

    A thread starts when there is first work for it. After `IDLE` seconds
    without any it gives freed memory back. At the end of the interpreter all
    are ended, which waits for their work: it cannot be cut short in the
    backend's code.

    Parameters
    ----------
    name : str
        Thread i is called ``{name}-{i}``.
    start : callable
        Called once in each new thread.
    carry : callable
        Called in the calling thread; returns a factory of a context manager
        that sets the caller's per-thread modes in the worker.
    aside : callable
        Gives a block in which the calling thread waits for these threads: it
        holds no lock there that a thunk of another caller may wait for.
    """

    def __init__(self, name: str, start: Callable[[], None],
                 carry: Callable[[], Callable[[], ContextManager]],
                 aside: Callable[[], ContextManager] = nullcontext):
        self._name, self._start, self._carry = name, start, carry
        self._aside = aside
        self._reset()
        # A forked child has none of its parent's threads.
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.end)

    def _reset(self) -> None:
        self._threads: list[tuple[Jobs, threading.Thread]] = []
        # One call at a time: thunks that wait for each other must not be
        # interleaved with those of another caller.
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
        call nothing of the backend's.
        """
        if inside_worker():
            return run_in_turn(thunks)
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "a signal handler starts no work on devices while the code "
                "that it interrupts waits for some; received a call of mgpu "
                "in one. Set a flag in the handler, and look at it between "
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
                call.hand_out(self._threads)    # those that were not, yet
                call.wait()
                raise
            finally:
                self._caller = None
            self._call = None
        return call.outcome()

    def end(self) -> None:
        """End all threads, and wait `AT_EXIT` seconds for them at most. Where
        a second Ctrl-C has left their work and ends the process, it ends at
        once, by that signal."""
        threads, self._threads = self._threads, []
        if self._call is not None:
            if getattr(sys, "last_type", None) is KeyboardInterrupt:
                print(end="", flush=True)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            self._call.hand_out(threads)    # what has begun may wait for it
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
            del job     # and what the thunk refers to


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

    def hand_out(self, threads: Sequence[tuple[Jobs, Any]]) -> None:
        for i, (jobs, _) in enumerate(threads[:len(self._once)]):
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


def run_here(thunks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all thunks in this thread, one after the other, as if each were
    in a thread of its own."""
    before = inside_worker()
    try:
        _here.inside = True
        return run_in_turn([partial(contextvars.copy_context().run, thunk)
                            for thunk in thunks])
    finally:
        _here.inside = before


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
