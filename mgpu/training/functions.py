"""Recording, backward passes and work on several devices, for both
backends."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import Backend, get_backend, messages
from mgpu.backends.device import as_devices
from mgpu.data.nested import NoRows
from mgpu.nn.losses import parts_of_batch
from mgpu.training.trainer import check_batch_size
from mgpu.utils import probes
from mgpu.utils.arguments import integer


def put(x: Any, device: Any, *, dtype: str | None = None) -> Any:
    """A fresh copy of `x` on `device`, as a native array.

    Parameters
    ----------
    x : native array, NumPy array, or numbers
    device : device, or a native array on the target device
    dtype : str, optional
        Otherwise the dtype is kept.

    Raises
    ------
    TypeError
        An array of the other framework.
    ValueError
        A device that is not there.
    """
    backend = get_backend()
    if not backend.is_native(device):
        device, = as_devices([device])
    return backend.put(x, device, dtype=dtype)


def to_numpy(x: Any) -> np.ndarray:
    """A copy of a native array on the host. Waits for pending work on it."""
    return get_backend().to_numpy(x)


def attach_grad(x: Any, grad_req: str = "write") -> None:
    """Make `x` a leaf: `backward` writes its gradient (``"write"``), adds to
    it (``"add"``), or leaves it as it is (``"null"``)."""
    backend = get_backend()
    backend.attach_grad(_native(x, backend), grad_req)


def grad(x: Any) -> Any:
    """The gradient of a leaf, not a copy; zeros before any `backward`."""
    backend = get_backend()
    return backend.grad(_native(x, backend))


def _native(x: Any, backend: Backend) -> Any:
    if not backend.is_native(x):
        raise messages.not_native(x, backend.name)
    return x


def seed(s: int) -> None:
    """Start the random streams of the current backend again (dropout masks):
    one stream per device, so masks are the same for the same devices and
    the same backend. Weights and data orders have seeds of their own."""
    get_backend().seed(integer("seed", s, 0))


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Inside the block operations are recorded for `backward` and layers run
    in training mode (Gluon's ``autograd.record``). Earlier flags come back
    at its end, also after an error."""
    return get_backend().scope(recording=True, training=train_mode)


def no_grad() -> AbstractContextManager[None]:
    """Inside the block nothing is recorded and layers predict (Gluon's
    ``autograd.pause``)."""
    return get_backend().scope(recording=False, training=False)


def backward(losses: Any | Sequence[Any]) -> None:
    """Write the gradients of all leaves that the losses depend on.

    Parameters
    ----------
    losses : native array, or list of them (None entries are passed over)
        Each is summed over its elements. Losses of different devices run at
        the same time.

    Raises
    ------
    RuntimeError
        A loss that was not computed inside `record`. (PyTorch itself
        records outside of it too, until `no_grad`: there such a loss of
        arrays that the user multiplied by hand goes through.)
    TypeError
        Something that is not an array of the backend.
    ValueError
        No loss at all; or each of several losses is the mean over the
        examples of one device.
    """
    backend = get_backend()
    if isinstance(losses, NoRows):
        return
    if not isinstance(losses, (list, tuple)):
        losses = [losses]
    numbers = [i for i, loss in enumerate(losses) if loss is not None]
    losses = [losses[i] for i in numbers]
    messages.check_native(losses, backend, "backward takes",
                          "Pass what the loss returned.")
    if not losses:
        raise ValueError("backward needs at least one loss; received none. "
                         "Give some device rows.")
    means = [*map(backend.mean_on, losses)] if len(losses) > 1 else [None]
    if None not in means and len(set(means)) > 1:
        raise ValueError(
            "the losses of several devices are added up, and a sum of means "
            f"is not the mean; received {len(losses)} means. Pass one value "
            "per example (reduction='none') and Trainer.step(batch size), or "
            "pass the loss function to mgpu.train_batch.")
    with probes.stage("compute", "backward", numbers=numbers):
        backend.backward(losses)
    distributed.current().sums.settle()


def parallel(fn: Callable[..., Any], *per_device: Sequence[Any]) -> list[Any]:
    """``[fn(a[0], b[0], ...), fn(a[1], b[1], ...), ...]``, at the same time.

    Number i runs for device i: in a thread of its own on torch, queued on
    the backend by MXNet. Recording, training and array modes are those of the
    caller. Waits for all; then the first exception is raised. Inside `fn`,
    another `parallel` runs one call after the other. Where the first list has
    None for some devices, as what replicas return has for those without
    rows, `fn` is not called for them, and the result is None.
    """
    if isinstance(per_device[0], NoRows):
        return NoRows(per_device[0])
    idle = [x is None for x in per_device[0]]
    calls = [(lambda: None) if none and not all(idle) else partial(fn, *row)
             for none, *row in zip(idle, *per_device, strict=True)]
    before = parts_of_batch.get()
    token = parts_of_batch.set(max(before, idle.count(False)))
    try:
        return get_backend().parallel(calls)
    finally:
        parts_of_batch.reset(token)


def sgd(params: Sequence[Any], lr: float, batch_size: float) -> None:
    """``p -= lr * grad / batch_size`` in place for each of one device's
    parameters, then the gradient is set to zero (the book's function).

    Raises
    ------
    ValueError
        A parameter without a gradient, or a batch size that is no finite
        number above 0. Nothing has changed then.
    """
    batch_size = check_batch_size(batch_size)
    backend = get_backend()
    gradients = [backend.grad(_native(p, backend)) for p in params]
    with backend.scope(recording=False):
        for p, g in zip(params, gradients):
            p -= lr * g / batch_size
            g[...] = 0
