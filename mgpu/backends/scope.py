"""A context manager that sets the flags of a thread and restores them."""
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

Flags = tuple[bool | None, ...]


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
    """

    def __init__(self, read: Callable[[], Flags],
                 write: Callable[..., None], flags: Flags):
        self._read, self._write, self._flags = read, write, flags
        # A list: a block may be entered again inside itself.
        self._before: list[Flags] = []

    def _recreate_cm(self) -> "Scope":      # each call of a decorated function
        return Scope(self._read, self._write, self._flags)

    def __enter__(self) -> None:
        self._before.append(self._read())
        self._write(*self._flags)

    def __exit__(self, *_: Any) -> None:
        self._write(*self._before.pop())
