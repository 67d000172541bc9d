"""Random streams: of the devices, and torch's default one, which all threads
share."""
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu.backends._torch.arithmetic import TAKING

# Held while a thread draws from torch's default stream.
_everyone = threading.RLock()
# .stop: in a thread that holds `_everyone` because it draws data
_here = threading.local()


class Watch:
    """Notices numbers that are drawn from torch's default stream while
    several threads run.

    Attributes
    ----------
    inside : bool
        Whether a thread draws alone.
    """

    def __init__(self) -> None:
        self._warned = False
        self._turns, self.inside = 0, False

    def turn(self, begins: bool) -> None:
        """A thread begins or ends to draw alone, as it may."""
        self._turns, self.inside = self._turns + 1, begins

    def state(self) -> Any:
        return None if self.inside \
            else (self._turns, torch.default_generator.get_state())

    def check(self, before: Any) -> None:
        now = self.state()
        if before is None or now is None or now[0] != before[0] \
                or torch.equal(now[1], before[1]) or self._warned:
            return
        self._warned = True
        warnings.warn(
            "numbers were drawn from torch's default random stream while "
            "several devices ran at the same time: which device got which is "
            "chance, and another run gives others. A network that drew them "
            "takes turns from now on. In functions of your own for "
            "mgpu.parallel, and in threads of your own, draw from a "
            "torch.Generator each. (Said once.)", stacklevel=2)


#: the stream is one for the process
watch = Watch()


@contextlib.contextmanager
def standing_in(own: torch.Generator) -> Iterator[Callable[[], bool]]:
    """A block in which `own` stands in for torch's default stream of its
    device, and no other thread draws from that; gives a function that tells
    afterwards whether the block has drawn."""
    default = torch.default_generator if own.device.type == "cpu" \
        else torch.cuda.default_generators[own.device.index]
    with _everyone:
        watch.turn(True)
        users, before = default.get_state(), own.get_state()
        default.set_state(before)
        try:
            yield lambda: not torch.equal(before, own.get_state())
        finally:
            own.set_state(default.get_state())
            default.set_state(users)
            watch.turn(False)


@contextlib.contextmanager
def undisturbed(stop: Sequence[Any]) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.drawing`."""
    _take_turn(stop)
    try:
        yield
    finally:
        _give_turn()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """See `mgpu.backends.base.Backend.aside`."""
    stop = _give_turn()
    try:
        yield
    finally:
        if stop is not None:
            _take_turn(stop)


def _take_turn(stop: Sequence[Any]) -> None:
    # The holder may wait for this thread, having said `stop`.
    while not _everyone.acquire(timeout=0.05):
        if stop:
            raise InterruptedError("nobody waits for this work any more")
    watch.turn(True)
    _here.stop = stop


def _give_turn() -> Sequence[Any] | None:
    """End this thread's turn to draw data; None where it has none."""
    stop = getattr(_here, "stop", None)
    if stop is not None:
        _here.stop = None
        watch.turn(False)
        _everyone.release()
    return stop


class Queue:
    """Devices that run at the same time until one has to draw from torch's
    default stream. It waits for the others to end, or to wait as well; then
    these go on in turn, each with the stream as it was before: what their
    checkpoints have kept.

    Attributes
    ----------
    used : bool
        Whether one has drawn.
    """

    def __init__(self) -> None:
        self.used = False
        self._change = threading.Condition()
        self._running: set[int] = set()
        self._waiting: set[int] = set()
        self._turn: int | None = None       # the device that has it
        self._before = torch.empty(0)

    def call(self, i: int, thunk: Callable[[], Any]) -> Any:
        """The result of the thunk of device `i`."""
        with self._change:
            self._change.wait_for(lambda: self._turn is None)
            self._running.add(i)
        try:
            return thunk()
        finally:
            with self._change:
                self._running.discard(i)
                if self._turn == i:
                    torch.set_rng_state(self._before)
                    watch.turn(False)
                    _everyone.release()
                    self._turn = None
                self._change.notify_all()

    def take_turn(self, i: int) -> None:
        """Wait until device `i` may draw, to the end of its thunk."""
        with self._change:
            if self._turn == i:
                return
            self._running.remove(i)
            self._waiting.add(i)
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._turn is None and not self._running
                and i == min(self._waiting))
            self._waiting.remove(i)
            self._turn, self.used = i, True
        _everyone.acquire()
        watch.turn(True)
        self._before = torch.get_rng_state()


class Draws(TorchDispatchMode):
    """Notices operations that draw from torch's default streams or from
    those of `own`, or that run where one has been seeded; also where it is
    put back behind them.

    Attributes
    ----------
    found : bool
    """

    def __init__(self, own: Sequence[torch.Generator] = ()) -> None:
        super().__init__()
        self._generators = [*default_generators(), *own]
        self._seeds = self._read(torch.Generator.initial_seed)
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False    # see strict.Mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        may = not self.found and not getattr(TAKING, "now", False) and \
            torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        before = self._read(torch.Generator.get_state) if may else []
        result = func(*args, **(kwargs or {}))
        if may:     # rrelu does not draw where it predicts
            self.found |= not all(map(torch.equal, before, self._read(
                torch.Generator.get_state)))
        self.found |= self._read(torch.Generator.initial_seed) != self._seeds
        return result

    def _read(self, what: Callable[[torch.Generator], Any]) -> list[Any]:
        return list(map(what, self._generators))


def default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *(
        torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
