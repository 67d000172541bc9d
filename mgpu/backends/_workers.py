"""Threads, one per device, that live as long as there is work for them.

Both engines run thunks through `Workers`: torch always, because a CPU
backward pass runs in the thread that calls it, MXNet only where thunks wait
for each other.
"""
import contextvars
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from mgpu import probes

#: seconds without work after which a thread ends
IDLE = 30.0

_here = threading.local()       # .inside: this thread is a worker

Jobs = queue.SimpleQueue        # of callables; None: end


def inside_worker() -> bool:
    return getattr(_here, "inside", False)


class Workers:
    """Runs number i of a list of thunks in thread i.

    A thread starts when there is first work for it, and ends after `idle`
    seconds without any; the next work for it starts another.

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
    """

    def __init__(self, name: str, start: Callable[[], None],
                 carry: Callable[[], Callable[[], AbstractContextManager]],
                 idle: float = IDLE):
        self._name, self._start, self._carry = name, start, carry
        self._idle = idle
        self._reset()
        # A forked child has none of its parent's threads.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._places: list[tuple[Jobs, threading.Thread] | None] = []
        # One call at a time: thunks that wait for each other must not be
        # interleaved with those of another caller. Who holds it may also
        # change `_places`.
        self._one_call = threading.Lock()

    def run(self, thunks: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results, when all thunks have returned; or the first exception
        by number. In turn inside a thunk: its own thread may be wanted.
        After Ctrl-C either no thunk has begun or all have run,
        once: none waits for one that was never started, and no thread works
        on behind the caller's back (a second Ctrl-C does not wait)."""
        if inside_worker():
            return run_in_turn(thunks)
        call = _Call(probes.timed(thunks), self._carry())
        if thunks:
            with self._one_call:
                queues = self._queues(len(thunks))
                try:
                    call.hand_out(queues)
                    call.wait()
                except BaseException:
                    call.hand_out(queues)   # those that were not, yet
                    call.wait()
                    raise
        return call.outcome()

    def close(self) -> None:
        """End all threads, and wait for them; for a call under way first.
        The next `run` starts new ones. RuntimeError inside a thunk, whose
        thread would wait for itself."""
        if inside_worker():
            raise RuntimeError("a thunk cannot end the thread that it runs "
                               "in; close the workers outside of parallel.")
        with self._one_call:
            places, self._places = self._places, []
            threads = [place for place in places if place is not None]
            for jobs, _ in threads:
                jobs.put(None)
            for _, thread in threads:
                thread.join()

    def _queues(self, count: int) -> list[Jobs]:
        """Of the threads 0 to `count` - 1, which run."""
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
        return [jobs for jobs, _ in places[:count]]

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
            del job     # and with it what the thunk holds

    def _leaves(self, i: int, jobs: Jobs) -> bool:
        """Whether thread `i` may end; if so its place is free. Not during a
        call, which may be about to give it work, and never waiting for one,
        which may be waiting for this thread."""
        if not self._one_call.acquire(blocking=False):
            return False
        try:
            if not jobs.empty():    # left by a call that two Ctrl-C ended
                return False
            place = self._places[i] if i < len(self._places) else None
            if place is not None and place[0] is jobs:
                self._places[i] = None
            return True
        finally:
            self._one_call.release()


class _Call:
    """The thunks of one `Workers.run`, and what became of them."""

    def __init__(self, thunks: Sequence[Callable[[], Any]],
                 modes: Callable[[], AbstractContextManager]):
        self._thunks, self._modes = list(thunks), modes
        self._contexts = [contextvars.copy_context() for _ in thunks]
        self._once = [iter((None,)) for _ in thunks]
        self._results: list[Any] = [None] * len(thunks)
        self._errors: list[Any] = [None] * len(thunks)
        self._number = itertools.count(1)
        self._all_ended = False
        self._ending = threading.Lock()     # cheaper than an Event
        self._ending.acquire()

    def hand_out(self, queues: Sequence[Jobs]) -> None:
        for i, jobs in enumerate(queues):
            jobs.put(partial(self._do, i))

    def _do(self, i: int) -> None:
        for _ in self._once[i]:     # no second time
            try:
                with self._modes():
                    self._results[i] = self._contexts[i].run(self._thunks[i])
            except BaseException as error:      # handed to the caller
                self._errors[i] = error
            # Before the caller goes on: this thread may keep the call for
            # some time, and must not keep the caller's arrays.
            self._thunks[i] = self._contexts[i] = None
            if next(self._number) == len(self._thunks):
                self._all_ended = True
                self._ending.release()

    def wait(self) -> None:
        """Until all thunks have ended; a second time too, as Ctrl-C may come
        when the lock has just been taken."""
        if not self._all_ended:
            self._ending.acquire()

    def outcome(self) -> list[Any]:
        """Results, or the first exception; to be asked for once."""
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
            errors.append(None)
        except Exception as error:
            results.append(None)
            errors.append(error)
    return first_error_or(results, errors)


def first_error_or(results: list[Any], errors: list[Any]) -> list[Any]:
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return results
    # Its traceback leads to these frames: were it found there again, it and
    # all arrays on the way would stay until the garbage is collected.
    errors.clear()
    results.clear()
    try:
        raise first
    finally:
        del first
