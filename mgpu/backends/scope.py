"""Context manager that sets and restores flags of the thread."""
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

Flags = tuple[bool | None, ...]


class _Here(threading.local):
    def __init__(self) -> None:
        self.tasks: list[Any] = []      # the tasks that entered blocks


_here = _Here()


def _task() -> Any:
    """The running asyncio task of this thread, or None."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    return asyncio.current_task()


def check_task() -> None:
    """Raise RuntimeError if another task of this thread awaits inside a
    block, because the flags of that block would be active here."""
    _check(_task())


def _check(task: Any) -> None:
    tasks = _here.tasks
    if tasks and tasks[-1] is not None and tasks[-1] is not task \
            and not tasks[-1].done():
        raise RuntimeError(
            "await is not supported inside record() and no_grad(), which set "
            f"flags of the thread; {tasks[-1]!r} awaits inside one. Leave the "
            "block before each await.")


class Scope(ContextDecorator):
    """Context manager and decorator that sets flags, and restores them.

    A class instead of a generator function: a generator interrupted by Ctrl-C
    stays alive in the traceback, and would restore its flags when that is
    deleted.

    Parameters
    ----------
    read : callable
        Returns the flags of this thread as a tuple.
    write : callable
        Sets the flags. None: unchanged.
    flags : tuple
        New values.

    Raises
    ------
    RuntimeError
        See `check_task`.
    TypeError
        The decorated function is a coroutine or generator function.
    """

    def __init__(self, read: Callable[[], Flags],
                 write: Callable[..., None], flags: Flags):
        self._read, self._write, self._flags = read, write, flags
        # A list, because a block may be reentered.
        self._before: list[Flags] = []

    def _recreate_cm(self) -> "Scope":      # each call of a decorated function
        return Scope(self._read, self._write, self._flags)

    def __call__(self, func: Any) -> Any:
        if inspect.iscoroutinefunction(func) \
                or inspect.isgeneratorfunction(func) \
                or inspect.isasyncgenfunction(func):
            raise TypeError(
                "record() and no_grad() do not decorate coroutines and "
                f"generators; received {func!r}. Use a block inside it.")
        return super().__call__(func)

    def __enter__(self) -> None:
        task = _task()
        _check(task)
        self._before.append(self._read())
        _here.tasks.append(task)
        self._write(*self._flags)

    def __exit__(self, *_: Any) -> None:
        self._write(*self._before.pop())
        if _here.tasks:     # empty if another thread exits
            _here.tasks.pop()
