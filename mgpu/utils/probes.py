"""Instrumentation points for `mgpu.Profile`. Imports no module of mgpu.

Backends, collectives and the training loop call these functions, and an
active `mgpu.Profile` receives the calls. Without one, a call costs the lookup
of a context variable.
"""
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

Thunks = Sequence[Callable[[], Any]]


#: the active Profile, with methods `begin_step` and `begin_stage`
listener: ContextVar[Any] = ContextVar("mgpu_profile", default=None)
#: its current stage, with methods `mark` and `timed`
open_stage: ContextVar[Any] = ContextVar("mgpu_stage", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()
_here = threading.local()       # .at_once: see the function


def step(devices: Sequence[Any], batch: Any = None
         ) -> AbstractContextManager[None]:
    """Context manager around a training step that a `Profile` measures.

    `train_batch` is such a step. In a custom loop, wrap each step in this
    block.

    Parameters
    ----------
    devices : sequence of Device
        All devices of the step. An active Profile waits for them before and
        after the step.
    batch : int, array or nested arrays, optional
        The batch size, or the data whose examples are counted.

    Notes
    -----
    A step that raises is not recorded; neither is a nested step, nor a step
    in another thread than the one that entered the Profile.
    """
    profile = listener.get()
    return _NOTHING if profile is None else profile.begin_step(devices, batch)


def stage(kind: str, name: str, devices: Sequence[Any] | None = None,
          results: Callable[[], Sequence[Any]] | None = None,
          numbers: Sequence[int] | None = None
          ) -> AbstractContextManager[None]:
    """Context manager around a stage of a step.

    `split_and_load`, ``replicas(shards)``, `backward` and the two halves of
    `Trainer.step` are stages. With an active Profile, the end of the block
    waits for the devices, so that stages do not overlap. A nested stage
    counts as part of the outer one.

    Parameters
    ----------
    kind : {"copy", "compute", "reduce", "update"}
    name : str
        Name in the report, for example "forward".
    devices : sequence of Device, optional
        Devices used in this stage (default: those of the step).
    results : callable, optional
        Called at the end of the block. Returns the arrays that the stage
        computes on each device (nested, or None). The Profile waits for them
        to measure the time of each device. Without `results`, all devices
        have the time of the slowest.
    numbers : sequence of int, optional
        Indices in `devices` of those with work (default: all).

    Raises
    ------
    ValueError
        Unknown `kind`. Checked only with an active Profile.
    """
    profile = listener.get()
    return _NOTHING if profile is None else profile.begin_stage(
        kind, name, devices, results, numbers)


def staged(kind: str, name: str,
           results: Callable[[Any], Sequence[Any]]) -> Callable:
    """Decorator: each call of the method is a `stage` of the first device.
    ``results(self.replicas)`` returns the arrays to wait for."""
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
    """The network's gradients, on the first device. Not copies."""
    return _on_first(replicas, lambda p: p.grad())


def weights(replicas: Any) -> list[list[Any]]:
    """The network's trainable parameters, on the first device. Not copies."""
    return _on_first(replicas, lambda p: p.data())


def _on_first(replicas: Any, read: Callable[[Any], Any]) -> list[list[Any]]:
    requests = replicas.grad_reqs()
    first = [read(p) for p in replicas.params() if requests[p.name] != "null"]
    return [first, *([] for _ in range(1, len(replicas)))]


def mark(device: Any) -> AbstractContextManager[None]:
    """Context manager in a stage: attribute this block to `device`."""
    opened = open_stage.get()
    return _NOTHING if opened is None else opened.mark(device)


def timed(thunks: Thunks) -> Thunks:
    """`thunks`, one for each device, timed if a stage is open."""
    opened = open_stage.get()
    return thunks if opened is None else opened.timed(thunks)


def at_once() -> None:
    """Declare, in a function run by `mgpu.parallel`, that it computes
    synchronously: no work is queued when it returns."""
    _here.at_once = True


def begin_thunk() -> None:
    """Mark the start, in this thread, of a function that may call
    `at_once`."""
    _here.at_once = False


def was_at_once() -> bool:
    """Whether `at_once` was called in this thread since `begin_thunk`."""
    return _here.at_once


@contextmanager
def only_queueing() -> Iterator[None]:
    """Context manager in which thunks only queue work for devices. They are
    not timed; the end of the stage waits for the work."""
    token = open_stage.set(None)
    try:
        yield
    finally:
        open_stage.reset(token)
