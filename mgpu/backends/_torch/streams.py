"""Random streams: of the devices, and torch's default one, which all threads
share."""
import contextlib
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu.backends._torch.arithmetic import TAKING

#: passes at the same time of which the shortest counts: others may have had
#: to wait for a core
PASSES = 8

# Held while a thread draws from torch's default stream.
_everyone = threading.RLock()


class _Here(threading.local):
    #: in a thread that holds `_everyone` because it draws data
    stop: Sequence[Any] | None = None
    #: in a device's thread that has a `Queue`
    take_turn: Callable[[], None] | None = None


_here = _Here()


class Watch:
    """Notices numbers that are drawn from torch's default stream while
    several threads run.

    Attributes
    ----------
    found : int
        How often.
    """

    def __init__(self) -> None:
        self.found, self._warned = 0, False
        self._turns, self._inside = 0, False

    def turn(self, begins: bool) -> None:
        """A thread begins or ends to draw alone, as it may."""
        self._turns, self._inside = self._turns + 1, begins

    def state(self) -> Any:
        return None if self._inside \
            else (self._turns, torch.default_generator.get_state())

    def check(self, before: Any) -> None:
        now = self.state()
        if before is None or now is None or now[0] != before[0] \
                or torch.equal(now[1], before[1]):
            return
        self.found += 1
        if self._warned:
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
def _alone() -> Iterator[None]:
    """A block in which no other thread draws from torch's default stream."""
    with _everyone:
        watch.turn(True)
        try:
            yield
        finally:
            watch.turn(False)


@contextlib.contextmanager
def standing_in(own: torch.Generator) -> Iterator[Callable[[], bool]]:
    """A block in which `own` stands in for torch's default stream of its
    device, and no other thread draws from that; gives a function that tells
    afterwards whether the block has drawn."""
    default = torch.default_generator if own.device.type == "cpu" \
        else torch.cuda.default_generators[own.device.index]
    with _alone():
        users, before = default.get_state(), own.get_state()
        default.set_state(before)
        try:
            yield lambda: not torch.equal(before, own.get_state())
        finally:
            own.set_state(default.get_state())
            default.set_state(users)


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """A block in which the caller alone draws from torch's default stream;
    gives what `standing_in` does, also for the streams of Python and
    NumPy."""
    before = states()
    watch.turn(True)
    try:
        yield lambda: states() != before
    finally:
        watch.turn(False)


def states() -> tuple[Any, ...]:
    """The states of torch's default stream, and of Python's and NumPy's."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[2]


@contextlib.contextmanager
def undisturbed(stop: Sequence[Any]) -> Iterator[None]:
    """See `mgpu.backends.base.Backend.drawing`."""
    _begin(stop)
    try:
        yield
    finally:
        _end()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """See `mgpu.backends.base.Backend.aside`."""
    stop = _end()
    try:
        yield
    finally:
        if stop is not None:
            _begin(stop)


def _begin(stop: Sequence[Any]) -> None:
    # The holder may wait for this thread, having said `stop`.
    while not _everyone.acquire(timeout=0.05):
        if stop:
            raise InterruptedError("nobody waits for this work any more")
    watch.turn(True)
    _here.stop = stop


def _end() -> Sequence[Any] | None:
    """End this thread's turn to draw data; None where it has none."""
    stop, _here.stop = _here.stop, None
    if stop is not None:
        watch.turn(False)
        _everyone.release()
    return stop


def take_turn() -> None:
    """See `Queue`."""
    if _here.take_turn is not None:
        _here.take_turn()


class Queue:
    """Devices that run at the same time until one has to draw from torch's
    default stream, and calls `take_turn`. It waits for the others to end, or
    to wait as well; then these go on in turn, each with the stream as it was
    before: what their checkpoints have kept.

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

    def call(self, i: int, thunk: Callable[[], Any]) -> Any:
        """The result of the thunk of device `i`."""
        with self._change:
            self._change.wait_for(lambda: self._turn is None)
            self._running.add(i)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, i)
            _here.take_turn = partial(self._take_turn, i, stack)
            return thunk()

    def _end(self, i: int) -> None:
        _here.take_turn = None
        with self._change:
            self._running.discard(i)
            if self._turn == i:
                self._turn = None
            self._change.notify_all()

    def _take_turn(self, i: int, stack: contextlib.ExitStack) -> None:
        """Wait until device `i` may draw, to the end of its thunk."""
        if self._turn == i:
            return
        with self._change:
            self._running.remove(i)
            self._waiting.add(i)
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._turn is None and not self._running
                and i == min(self._waiting))
            self._waiting.remove(i)
            self._turn, self.used = i, True
        stack.enter_context(_alone())
        stack.callback(torch.set_rng_state, torch.get_rng_state())


class Turns:
    """Runs the devices of a network at the same time, unless they draw from a
    stream that all share: then in turn, as the first pass of each kind, which
    tells.

    Parameters
    ----------
    run : callable
        Calls thunks, number i for device i, and waits for all of them; with
        ``here=True`` one after the other in the calling thread.
    turn : callable
        ``turn(i)``: a block for device `i` while no other device runs; gives
        a function that tells afterwards whether it has drawn.
    """

    def __init__(self, run: Callable[..., list[Any]], turn: Callable[
            [int], AbstractContextManager[Callable[[], bool]]]) -> None:
        self._run, self._turn = run, turn
        #: whether passes draw, by kind; of None: backward passes
        self._draws: dict[Any, bool] = {}
        self._compiled = False      # the network of the last pass
        self._by_chance = False     # which device drew what, in the last pass
        self._last: Any = None      # its kind and size
        #: by these: how long each thunk of the last pass took, and how long
        #: the last passes at the same time did
        self._seconds: Callable[..., tuple[list[float], deque[float]]] = \
            lru_cache(16)(lambda *_: ([], deque(maxlen=PASSES)))

    def forward(self, kind: Any, size: int, compiled: bool,
                together: Callable[..., list[Any]] | None,
                thunks: dict[int, Callable[[], Any]]) -> list[Any]:
        """The results of thunks, by device, for `size` examples. `together`
        runs those that wait for each other."""
        self._by_chance, self._compiled = False, compiled
        self._last = kind, size
        if self._draws.get(kind) is not False:
            if len(self._draws) > 16:
                self._draws.clear()
            return self._in_turn(kind, list(thunks), list(thunks.values()),
                                 together)[0]
        before, queue = watch.found, Queue()
        results = (together or partial(self._faster, False))([
            partial(queue.call, i, thunk) for i, thunk in thunks.items()])
        self._by_chance = watch.found != before
        if self._by_chance or queue.used:
            self._draws[kind] = True    # from now on in turn
        return results

    def backward(self, devices: Sequence[int], thunks: Sequence[Any]
                 ) -> list[Any]:
        """The results of thunks of these devices."""
        if self._draws.get(None) is not False or any(self._draws.values()):
            results, drew = self._in_turn(None, devices, thunks)
            if drew and self._by_chance:
                raise RuntimeError(
                    "the backward pass draws random numbers, as a checkpoint "
                    "does that computes a forward pass again; but that pass "
                    "was the first to draw from torch's default stream, and "
                    "which device drew which numbers was chance. Repeat the "
                    "step: from now on the devices take turns.")
            return results
        # Checkpoints set the default stream, and put it back: in K threads.
        state = torch.get_rng_state()
        results = self._faster(True, thunks)
        torch.set_rng_state(state)
        return results

    def _faster(self, backward: bool, thunks: Sequence[Callable[[], Any]]
                ) -> list[Any]:
        """The results of thunks that run at the same time, or one after the
        other in the calling thread where the same pass takes less time so:
        small layers take less than it takes to wake threads."""
        if len(thunks) < 2:
            return self._run(thunks)
        each, together = self._seconds(self._last, backward)
        here = len(together) == PASSES and sum(each) < min(together)
        each.clear()

        def timed(thunk: Callable[[], Any]) -> Any:
            begin = time.perf_counter()
            result = thunk()
            each.append(time.perf_counter() - begin)
            return result
        begin = time.perf_counter()
        results = self._run([partial(timed, x) for x in thunks], here=here)
        if not here:
            together.append(time.perf_counter() - begin)
        return results

    def _in_turn(self, kind: Any, devices: Sequence[int],
                 thunks: Sequence[Any],
                 together: Callable[..., list[Any]] | None = None
                 ) -> tuple[list[Any], bool]:
        """The results, and whether one of the thunks has drawn. Those that
        run `together` wait for each other in between."""
        _here.take_turn = None      # where an interrupt has left one
        known = self._draws.get(kind, False)
        caches: dict[int, Any] = {i: {} for i in devices}   # threads share it
        looking = contextlib.nullcontext if together or self._compiled \
            or known and not self._by_chance else Draws
        drawn = []

        @contextlib.contextmanager
        def turn(i: int) -> Iterator[None]:
            parametrize._cache = caches[i]
            with self._turn(i) as drew, looking() as draws:
                yield
            # A forward that seeds the stream may leave it as it was.
            drawn.append(drew() or draws is not None and draws.found)
        try:
            if together is not None:
                results = together(thunks, lambda n: turn(devices[n]))
            else:
                results = self._run([
                    turn(i)(thunk)
                    for i, thunk in zip(devices, thunks, strict=True)],
                    here=True)
        finally:
            parametrize._cache = {}
        found = any(drawn) or any(caches.values())
        self._draws[kind] = known or found
        return results, found


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
