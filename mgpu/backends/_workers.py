"""Threads, one per device, that live as long as the process.

Both engines run thunks through `Workers`: torch always, because a CPU
backward pass runs in the thread that calls it, MXNet only where thunks wait
for each other.
"""
import contextvars
import os
import queue
import threading
from contextlib import AbstractContextManager
from typing import Any, Callable, List, Sequence

_here = threading.local()       # .inside: this thread is a worker


def inside_worker() -> bool:
    return getattr(_here, "inside", False)


class Workers:
    """Runs number i of a list of thunks in thread i.

    Parameters
    ----------
    start : callable
        Called once in each new thread.
    carry : callable
        Called in the calling thread; returns a factory of a context manager
        that sets the caller's per-thread modes in the worker.
    """

    def __init__(self, name: str, start: Callable[[], None],
                 carry: Callable[[], Callable[[], AbstractContextManager]]):
        self._name, self._start, self._carry = name, start, carry
        self._reset()
        # A forked child has none of its parent's threads.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._queues: List[queue.SimpleQueue] = []
        # One call at a time: thunks that wait for each other must not be
        # interleaved with those of another caller.
        self._one_call = threading.Lock()

    def _loop(self, jobs: queue.SimpleQueue) -> None:
        _here.inside = True
        self._start()
        while True:
            jobs.get()()

    def run(self, thunks: Sequence[Callable[[], Any]]) -> List[Any]:
        results: List[Any] = [None] * len(thunks)
        errors: List[Any] = [None] * len(thunks)
        done = threading.Event()
        left = [len(thunks)]
        counting = threading.Lock()
        modes = self._carry()

        def job(i: int, thunk: Callable[[], Any]) -> Callable[[], None]:
            context = contextvars.copy_context()
            once = iter([None])

            def call() -> None:
                if next(once, call) is call:
                    return
                try:
                    with modes():
                        results[i] = context.run(thunk)
                except BaseException as error:  # handed to the caller
                    errors[i] = error
                finally:
                    with counting:
                        left[0] -= 1
                        if not left[0]:
                            done.set()
            return call

        if thunks:
            with self._one_call:
                while len(self._queues) < len(thunks):
                    jobs: queue.SimpleQueue = queue.SimpleQueue()
                    threading.Thread(
                        target=self._loop, args=(jobs,), daemon=True,
                        name=f"{self._name}-{len(self._queues)}").start()
                    self._queues.append(jobs)
                work = [job(i, thunk) for i, thunk in enumerate(thunks)]
                try:
                    for jobs, call in zip(self._queues, work):
                        jobs.put(call)
                    done.wait()
                except BaseException:
                    # Ctrl-C: what is begun is finished first, so that no
                    # thread works on behind the caller's back and none waits
                    # for one that was never started.
                    for jobs, call in zip(self._queues, work):
                        jobs.put(call)
                    done.wait()
                    raise
        return first_error_or(results, errors)


def run_in_turn(thunks: Sequence[Callable[[], Any]]) -> List[Any]:
    """Call all thunks in this thread, one after the other."""
    results: List[Any] = []
    errors: List[Any] = []
    for thunk in thunks:
        try:
            results.append(thunk())
            errors.append(None)
        except Exception as error:
            results.append(None)
            errors.append(error)
    return first_error_or(results, errors)


def first_error_or(results: List[Any], errors: List[Any]) -> List[Any]:
    for error in errors:
        if error is not None:
            raise error
    return results
