"""A context manager that sets the flags of a thread and restores them."""
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

Flags = tuple[bool | None, ...]


class _Here(threading.local):
    def __init__(self) -> None:
        self.tasks: list[Any] = []      # in which blocks were entered


_here = _Here()


def _task() -> Any:
    """The asyncio task that this thread runs, or None."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    return asyncio.current_task()


def check_task() -> None:
    """Refuse to compute while another task of this thread awaits inside a
    block: its flags would hold here (RuntimeError)."""
    _check(_task())


def _check(task: Any) -> None:
    tasks = _here.tasks
    if tasks and tasks[-1] is not None and tasks[-1] is not task \
            and not tasks[-1].done():
        raise RuntimeError(
            "record() and no_grad() set flags of the thread, so their blocks "
            f"hold no await; received another task's: {tasks[-1]!r} awaits "
            "inside one. Leave the block before each await.")


class Scope(ContextDecorator):
    """Writes flags on entry, and the earlier ones on exit.

    It is a class and not a generator function: a generator that Ctrl-C cuts
    short lives on in the traceback, and would write its flags whenever that
    is dropped.

    Parameters
    ----------
    read : callable
        Returns the flags of this thread, a tuple.
    write : callable
        Sets as many flags; None leaves a flag as it is.
    flags : tuple
        What to write.

    Raises
    ------
    RuntimeError
        See `check_task`.
    TypeError
        It decorates a function whose body runs after the call.
    """

    def __init__(self, read: Callable[[], Flags],
                 write: Callable[..., None], flags: Flags):
        self._read, self._write, self._flags = read, write, flags
        # A list: a block may be entered again inside itself.
        self._before: list[Flags] = []

    def _recreate_cm(self) -> "Scope":      # each call of a decorated function
        return Scope(self._read, self._write, self._flags)

    def __call__(self, func: Any) -> Any:
        if inspect.iscoroutinefunction(func) \
                or inspect.isgeneratorfunction(func) \
                or inspect.isasyncgenfunction(func):
            raise TypeError(
                "record() and no_grad() decorate functions that are done "
                f"when they return; received {func!r}. Write the block "
                "inside it.")
        return super().__call__(func)

    def __enter__(self) -> None:
        task = _task()
        _check(task)
        self._before.append(self._read())
        _here.tasks.append(task)
        self._write(*self._flags)

    def __exit__(self, *_: Any) -> None:
        self._write(*self._before.pop())
        if _here.tasks:     # not where another thread closes
            _here.tasks.pop()
