"""Where running code tells a `Profile` what it does. Imports nothing of mgpu.

Backends, collectives and the training loop call these functions; a
`mgpu.Profile` that is on listens. While none is on, each call costs one look
at a context variable.
"""
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

Thunks = Sequence[Callable[[], Any]]


#: the Profile that is on here, which has `begin_step` and `begin_stage`
listener: ContextVar[Any] = ContextVar("mgpu_profile", default=None)
#: its stage that has begun and not ended, which has `mark` and `timed`
open_stage: ContextVar[Any] = ContextVar("mgpu_stage", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()
_here = threading.local()       # .at_once: see the function


def step(devices: Sequence[Any], batch: Any = None
         ) -> AbstractContextManager[None]:
    """A train step on `devices`, which a `Profile` measures. `train_batch`
    is one; in a loop of your own, put each step inside this block.

    Parameters
    ----------
    devices : sequence of Device
        All devices of the step. A Profile that is on waits for them before
        and after the step.
    batch : int, array or nested arrays, optional
        The number of rows, or the data whose rows are counted.

    Notes
    -----
    A step that raises is not kept. A step inside a step, and a step of
    another thread than the one that entered the Profile, is not seen.
    """
    profile = listener.get()
    return _NOTHING if profile is None else profile.begin_step(devices, batch)


def stage(kind: str, name: str, devices: Sequence[Any] | None = None,
          results: Callable[[], Sequence[Any]] | None = None,
          numbers: Sequence[int] | None = None
          ) -> AbstractContextManager[None]:
    """A stage of a step. `split_and_load`, ``replicas(shards)``, `backward`
    and the two halves of `Trainer.step` are stages already.

    While a Profile is on, the end of the block waits for the devices, so
    that stages do not overlap. A stage inside a stage belongs to the outer
    one.

    Parameters
    ----------
    kind : {"copy", "compute", "reduce", "update"}
    name : str
        Says more: "forward".
    devices : sequence of Device, optional
        Those that work in this stage (default: those of the step).
    results : callable, optional
        Called at the end. Returns, for each device, the arrays that the
        stage computes there (nested, or None). The Profile waits for these
        arrays, which tells when each device was done. Without `results`, all
        devices count as done when the last one is.
    numbers : sequence of int, optional
        Places in `devices` of those that have work to do (default: all).

    Raises
    ------
    ValueError
        Another kind. (Checked while a Profile is on.)
    """
    profile = listener.get()
    return _NOTHING if profile is None else profile.begin_stage(
        kind, name, devices, results, numbers)


def staged(kind: str, name: str,
           results: Callable[[Any], Sequence[Any]]) -> Callable:
    """A `stage` of the first device around each call of a method of an object
    that has ``self.replicas``; `results` gets these replicas."""
    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def wrapped(self: Any, *args: Any, **options: Any) -> Any:
            if listener.get() is None:
                return method(self, *args, **options)
            with stage(kind, name, self.replicas.devices,
                       partial(results, self.replicas), [0]):
                return method(self, *args, **options)
        return wrapped
    return decorate


def gradients(replicas: Any) -> list[list[Any]]:
    """The network's gradients, not copies, on the first device."""
    return _on_first(replicas, lambda p: p.grad())


def weights(replicas: Any) -> list[list[Any]]:
    """The network's trained parameters, not copies, on the first device."""
    return _on_first(replicas, lambda p: p.data())


def _on_first(replicas: Any, read: Callable[[Any], Any]) -> list[list[Any]]:
    requests = replicas.grad_reqs()
    first = [read(p) for p in replicas.params() if requests[p.name] != "null"]
    return [first, *([] for _ in range(1, len(replicas)))]


def mark(device: Any) -> AbstractContextManager[None]:
    """Inside a stage: what this block does is done for `device`."""
    opened = open_stage.get()
    return _NOTHING if opened is None else opened.mark(device)


def timed(thunks: Thunks) -> Thunks:
    """What a backend calls instead of `thunks`, of which number i is for
    device i: the same functions, timed where a stage is open."""
    opened = open_stage.get()
    return thunks if opened is None else opened.timed(thunks)


def at_once() -> None:
    """Called in a function that `mgpu.parallel` runs: this function computes
    by itself, and nothing is left to wait for when it returns."""
    _here.at_once = True


def begin_thunk() -> None:
    """A function that may call `at_once` begins in this thread."""
    _here.at_once = False


def was_at_once() -> bool:
    """Whether `at_once` was called in this thread since `begin_thunk`."""
    return _here.at_once


@contextmanager
def only_queueing() -> Iterator[None]:
    """Inside the block, thunks only queue work for devices, so their times
    say nothing of when that work is done: the end of the stage waits."""
    token = open_stage.set(None)
    try:
        yield
    finally:
        open_stage.reset(token)
