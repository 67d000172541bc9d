"""Signals that end a training between two steps."""
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from mgpu.distributed import World

T = TypeVar("T")

#: seconds after which a second Ctrl-C is a new one: launchers forward it to
#: processes that have received it themselves
_AGAIN = 1.0


class Stopped(BaseException):
    """Raised between two steps after a signal, or a stop on another rank."""


class Stop:
    """A block in which the step ends before SIGTERM, and with `interrupts`
    Ctrl-C, end the training.

    All ranks learn of the signal in the same exchange. Handlers are set in
    the main thread alone, for signals with a default handler, and restored.
    A second Ctrl-C does not wait. `keep`: returns a function that restores
    the current state of the random number generators.
    """

    def __init__(self, world: World, interrupts: bool,
                 keep: Callable[[], Callable[[], None]] | None = None
                 ) -> None:
        self._world, self._free, self._when = world, False, 0.0
        self._defaults: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
        if interrupts:
            self._defaults[signal.SIGINT] = signal.default_int_handler
        self._set: list[int] = []
        self._keep = keep
        #: of an interrupted block
        self._put_back: Callable[[], None] | None = None

    def __enter__(self) -> "Stop":
        self._world.clear_stop()
        if threading.current_thread() is threading.main_thread():
            for number, default in self._defaults.items():
                if signal.getsignal(number) == default:
                    self._set.append(number)
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for number in self._set:
            signal.signal(number, self._defaults[number])
        stop, heard = self._world.stop_signal, self._world.stopping
        self._world.clear_stop()
        if kind is None and stop is not None and heard is None:
            signal.raise_signal(stop)       # after the last exchange

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == self._world.stop_signal == signal.SIGINT \
                and now - self._when > _AGAIN:
            raise KeyboardInterrupt
        if self._world.stop_signal is None:
            self._world.stop_signal, self._when = number, now
        if self._free:
            self._free = False
            raise Stopped

    def check(self) -> None:
        """Raise `Stopped` if all ranks know of a stop."""
        if self._world.stopping is not None:
            raise Stopped

    def error(self) -> BaseException:
        """The exception that ends the training: that of the signal's default
        handler, or exit status 143."""
        return KeyboardInterrupt() if self._world.stopping == signal.SIGINT \
            else SystemExit(128 + signal.SIGTERM)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block of a single process a signal raises `Stopped`. Several
        ranks must agree first."""
        alone = self._world.size == 1
        if alone and self._keep is not None:
            self._put_back = self._keep()
        self._free = alone
        try:
            yield
        finally:
            self._free = False
        self._put_back = None

    def undo(self) -> None:
        """Restore the random number generators to the start of the block that
        `Stopped` interrupted: it will be repeated."""
        if self._put_back is not None:
            self._put_back()

    def taken(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`; each wait for one is `at_once`."""
        source = iter(batches)
        while True:
            with self.at_once():
                box = list(islice(source, 1))
            if not box:
                return
            yield box.pop()     # keeps no reference to it
