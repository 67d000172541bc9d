"""Autograd functions, array copies and work on several devices, for both
backends."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import Backend, get_backend, messages, seed_all
from mgpu.backends.device import as_devices
from mgpu.data.nested import NoRows
from mgpu.nn.losses import parts_of_batch
from mgpu.training.trainer import check_batch_size
from mgpu.utils import probes
from mgpu.utils.arguments import integer


def put(x: Any, device: Any, *, dtype: str | None = None) -> Any:
    """Copy `x` to `device` as a native array.

    Parameters
    ----------
    x : native array, NumPy array, or numbers
    device : device, or a native array on the target device
    dtype : str, optional
        Default: the dtype of `x`.

    Raises
    ------
    TypeError
        `x` is an array of the other framework.
    ValueError
        The device is not available.
    """
    backend = get_backend()
    if not backend.is_native(device):
        device, = as_devices([device])
    return backend.put(x, device, dtype=dtype)


def to_numpy(x: Any) -> np.ndarray:
    """Copy a native array to the host. Waits for pending work on it."""
    return get_backend().to_numpy(x)


def attach_grad(x: Any, grad_req: str = "write") -> None:
    """Make `x` a leaf: `backward` overwrites its gradient (``"write"``), adds
    to it (``"add"``), or leaves it unchanged (``"null"``)."""
    backend = get_backend()
    backend.attach_grad(_native(x, backend), grad_req)


def grad(x: Any) -> Any:
    """Return the gradient of a leaf, not a copy. Zeros before the first
    `backward`."""
    backend = get_backend()
    return backend.grad(_native(x, backend))


def _native(x: Any, backend: Backend) -> Any:
    if not backend.is_native(x):
        raise messages.not_native(x, backend.name)
    return x


def seed(s: int) -> None:
    """Seed the random number generators of the backends, as for dropout. Each
    device has its own generator, so masks are reproducible for the same
    devices and backend. Initial weights and the order of the data have
    separate seeds."""
    seed_all(integer("seed", s, 0))


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Record operations for `backward` and run layers in training mode inside
    the block (Gluon's ``autograd.record``). The previous modes are restored
    at its end, also after an error."""
    return get_backend().scope(recording=True, training=train_mode)


def no_grad() -> AbstractContextManager[None]:
    """Disable recording and training mode inside the block (Gluon's
    ``autograd.pause``)."""
    return get_backend().scope(recording=False, training=False)


def backward(losses: Any | Sequence[Any]) -> None:
    """Compute the gradients of all leaves of the graphs of `losses`.

    Parameters
    ----------
    losses : native array, or list of them
        Each is summed over its elements; None entries are skipped. Losses of
        different devices run in parallel.

    Raises
    ------
    RuntimeError
        A loss was not computed inside `record`. (PyTorch also records outside
        `record`, until `no_grad`: a loss computed there from the user's own
        arrays does not raise.)
    TypeError
        A loss is not an array of the backend.
    ValueError
        `losses` is empty; or each of several losses is the mean over the
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
                         "Pass examples to at least one device.")
    means = [*map(backend.mean_on, losses)] if len(losses) > 1 else [None]
    if None not in means and len(set(means)) > 1:
        raise ValueError(
            "the losses of several devices are summed, and a sum of means "
            f"is not the mean; received {len(losses)} means. Pass one value "
            "per example (reduction='none') and Trainer.step(batch size), or "
            "pass the loss function to mgpu.train_batch.")
    with probes.stage("compute", "backward", numbers=numbers):
        backend.backward(losses)
    distributed.current().sums.synchronize()


def parallel(fn: Callable[..., Any], *per_device: Sequence[Any]) -> list[Any]:
    """Call `fn` for each device: ``[fn(a[0], b[0], ...), fn(a[1], b[1], ...),
    ...]``.

    The calls run in parallel: in one thread per device on torch, in MXNet's
    own asynchronous queues on MXNet. They inherit the caller's recording,
    training and array modes. Waits for all calls, then raises the first
    exception. A `parallel` inside `fn` runs sequentially. Where the first
    list has None, as outputs of replicas have for a device without examples,
    `fn` is not called and the result is None.
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
    """Update the parameters of one device in place: ``p -= lr * grad /
    batch_size``, then set the gradients to zero (the book's function).

    Raises
    ------
    ValueError
        A parameter has no gradient, or `batch_size` is not a finite number
        above 0. No parameter has changed.
    """
    batch_size = check_batch_size(batch_size)
    backend = get_backend()
    gradients = [backend.grad(_native(p, backend)) for p in params]
    with backend.scope(recording=False):
        for p, g in zip(params, gradients):
            p -= lr * g / batch_size
            g[...] = 0
