"""Random streams: of the devices, and torch's default stream, which all
threads share."""
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

#: number of parallel passes whose minimum time counts: others may have waited
#: for a core
PASSES = 8

# Held while a thread draws from torch's default stream.
_everyone = threading.RLock()


class _Here(threading.local):
    #: in a data-loading thread that holds `_everyone`
    stop: Sequence[Any] | None = None
    #: in a device's thread with a `Queue`
    take_turn: Callable[[], None] | None = None


_here = _Here()


class Watch:
    """Detects draws from torch's default stream while several threads run.

    Attributes
    ----------
    found : int
        Number of passes with such draws.
    """

    def __init__(self) -> None:
        self.found, self._warned = 0, False
        self._turns, self._inside = 0, False

    def turn(self, begins: bool) -> None:
        """Record that a thread begins or ends to draw exclusively."""
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
            "several devices have drawn random numbers from torch's default "
            "generator in parallel, so this run is not reproducible. If a "
            "network drew them, its devices take turns from now on. In your "
            "own threads and functions for mgpu.parallel, use a "
            "torch.Generator each. (This warning is shown once.)",
            stacklevel=2)


#: one for the process, as the stream
watch = Watch()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Context manager with exclusive use of torch's default stream."""
    with _everyone:
        watch.turn(True)
        try:
            yield
        finally:
            watch.turn(False)


@contextlib.contextmanager
def standing_in(own: torch.Generator) -> Iterator[Callable[[], bool]]:
    """Context manager that replaces torch's default stream of a device by
    `own`, with exclusive use. Returns a function that reports afterwards
    whether the block has drawn numbers."""
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
    """Context manager in which the caller has exclusive use of torch's
    default stream. Returns a function as `standing_in`, for the streams of
    Python and NumPy too."""
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
    # The owner of the lock may have set `stop` and wait for this thread.
    while not _everyone.acquire(timeout=0.05):
        if stop:
            raise InterruptedError("the work was canceled")
    watch.turn(True)
    _here.stop = stop


def _end() -> Sequence[Any] | None:
    """End this thread's turn to draw data. None if it had no turn."""
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
    """Runs devices in parallel until they draw from torch's default stream.

    A device that draws calls `take_turn`, and waits until the others have
    ended or wait too. Then these continue in turn, each with the initial
    state of the stream, which their checkpoints have saved.

    Attributes
    ----------
    used : bool
        Whether a device has drawn.
    """

    def __init__(self) -> None:
        self.used = False
        self._change = threading.Condition()
        self._running: set[int] = set()
        self._waiting: set[int] = set()
        self._turn: int | None = None       # device with the turn

    def call(self, i: int, thunk: Callable[[], Any]) -> Any:
        """Call the thunk of device `i`."""
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
        """Block until device `i` may draw, until the end of its thunk."""
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
    """Runs the devices of a network in parallel, or in turn if they draw from
    a shared stream.

    The first pass of each kind runs in turn, to detect draws.

    Parameters
    ----------
    run : callable
        Calls thunks, number i for device i, and blocks until all return. With
        ``here=True``, sequentially in the calling thread.
    turn : callable
        ``turn(i)``: context manager for device `i` while no other device
        runs. Returns a function that reports whether it has drawn.
    """

    def __init__(self, run: Callable[..., list[Any]], turn: Callable[
            [int], AbstractContextManager[Callable[[], bool]]]) -> None:
        self._run, self._turn = run, turn
        #: whether passes draw, by kind; None: backward passes
        self._draws: dict[Any, bool] = {}
        self._compiled = False      # whether the last pass was compiled
        self._by_chance = False     # whether it drew in parallel
        self._last: Any = None      # its kind and size
        #: by kind and size: the times of the thunks in the last pass, and of
        #: the last parallel passes
        self._seconds: Callable[..., tuple[list[float], deque[float]]] = \
            lru_cache(16)(lambda *_: ([], deque(maxlen=PASSES)))

    def forward(self, kind: Any, size: int, compiled: bool,
                together: Callable[..., list[Any]] | None,
                thunks: dict[int, Callable[[], Any]]) -> list[Any]:
        """Run thunks, by device, for `size` examples. `together` runs thunks
        that wait for each other."""
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
        """Run the thunks of a backward pass."""
        if self._draws.get(None) is not False or any(self._draws.values()):
            results, drew = self._in_turn(None, devices, thunks)
            if drew and self._by_chance:
                raise RuntimeError(
                    "the backward pass draws random numbers, as a checkpoint "
                    "does, but the forward pass has drawn from torch's "
                    "default generator in parallel, and cannot be recomputed. "
                    "Repeat the step: from now on the devices take turns.")
            return results
        # Checkpoints set and restore the default stream, in K threads.
        state = torch.get_rng_state()
        results = self._faster(True, thunks)
        torch.set_rng_state(state)
        return results

    def _faster(self, backward: bool, thunks: Sequence[Callable[[], Any]]
                ) -> list[Any]:
        """Run thunks in parallel, or sequentially in the calling thread if
        that is faster for this pass: small layers take less time than waking
        threads."""
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
        """Run thunks in turn. Returns the results, and whether one has drawn.
        Those run by `together` wait for each other in between."""
        _here.take_turn = None      # may remain after an interrupt
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
            # A forward that seeds the stream may restore it.
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
    """Dispatch mode that detects operations that draw from torch's default
    streams or from `own`, or that run after one was seeded, even if the
    stream is restored later.

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
        if may:     # rrelu does not draw in prediction
            self.found |= not all(map(torch.equal, before, self._read(
                torch.Generator.get_state)))
        self.found |= self._read(torch.Generator.initial_seed) != self._seeds
        return result

    def _read(self, what: Callable[[torch.Generator], Any]) -> list[Any]:
        return list(map(what, self._generators))


def default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *(
        torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
