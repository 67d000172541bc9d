"""Sections of code that signals do not interrupt."""
import _signal      # `signal` makes enums in each call
import threading
from collections.abc import Callable
from typing import Any

_defers = False     # whether signals are deferred now


def uninterrupted(thunk: Callable[[], Any]) -> Any:
    """Call `thunk` and return its result. SIGINT (Ctrl-C) and SIGTERM, if
    handled by the program, are deferred until it returns; a second one is
    not."""
    global _defers
    if _defers or threading.current_thread() is not threading.main_thread():
        return thunk()
    before = {number: handler for number in (_signal.SIGINT, _signal.SIGTERM)
              if callable(handler := _signal.getsignal(number))}
    waiting: list[tuple[int, Any]] = []

    def wait(number: int, frame: Any) -> None:
        if waiting:
            before[number](number, frame)
        waiting.append((number, frame))
    for number in before:
        _signal.signal(number, wait)
    _defers = True
    try:
        return thunk()
    finally:
        _defers = False
        for number, handler in before.items():
            _signal.signal(number, handler)
        for number, frame in waiting[:1]:
            before[number](number, frame)
