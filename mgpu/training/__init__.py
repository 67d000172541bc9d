"""Recording, backward, and the training loop, once for both engines."""
import contextlib
import hashlib
import math
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import (Callable, Iterable, Iterator, Mapping,
                             Sequence)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate as running
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np

from mgpu import distributed, notebook, prefetching, probes
from mgpu.arguments import batches as as_batches
from mgpu.arguments import integer
from mgpu.backends import (Backend, get_backend, give_back, messages,
                           using_backend)
from mgpu.callbacks import Calls, Event
from mgpu.checkpoint_folder import Folder
from mgpu.device import Device, as_devices
from mgpu.errors import NonFiniteLoss
from mgpu.evaluation import (check_place, check_scores, evaluate_accuracy_gpus,
                             shards_of)
from mgpu.files import FilePath
from mgpu.inputs import as_rounds, choose
from mgpu.losses import Loss as OwnLoss
from mgpu.losses import check_per_example, parts_of_batch
from mgpu.nested import (NoRows, as_inputs, as_pair, examples_of, is_empty,
                         is_listed, is_whole, leaves, lists_in, map_leaves,
                         row_counts, rows_of)
from mgpu.progress import ProgressBar
from mgpu.replicas import Replicas
from mgpu.split import cut_rows, join_shards, shard_bounds, split_batch
from mgpu.stopping import Stop, Stopped
from mgpu.trainer import Trainer, check_batch_size, check_pair

Loss = Callable[[Any, Any], Any]


# -- pieces -------------------------------------------------------------------

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
        No loss at all.
    """
    backend = get_backend()
    if isinstance(losses, NoRows):
        return
    if not isinstance(losses, (list, tuple)):
        losses = [losses]
    numbers = [i for i, loss in enumerate(losses) if loss is not None]
    losses = [losses[i] for i in numbers]
    for loss in losses:
        if not backend.is_native(loss):
            messages.refuse_foreign(loss, backend.name)
            raise TypeError(f"backward takes arrays of the {backend.name} "
                            f"backend; received {type(loss).__name__}. Pass "
                            "what the loss returned.")
    if not losses:
        raise ValueError("backward needs at least one loss; received none. "
                         "Give some device rows.")
    with probes.stage("compute", "backward", numbers=numbers):
        backend.backward(losses)
    distributed.current().sums.settle()


def parallel(fn: Callable[..., Any], *per_device: Sequence[Any]) -> list[Any]:
    """``[fn(a[0], b[0], ...), fn(a[1], b[1], ...), ...]``, at the same time.

    Number i runs for device i: in a thread of its own on torch, queued on
    the engine by MXNet. Recording, training and array modes are those of the
    caller. Waits for all; then the first exception is raised. Inside `fn`,
    another `parallel` runs one call after the other. Where the first list has
    None for some devices, as what replicas return has for those without
    rows, `fn` is not called for them, and the result is None.
    """
    lengths = {len(column) for column in per_device}
    if len(lengths) != 1:
        raise ValueError("parallel takes lists of one length, with an entry "
                         "per device; received lengths "
                         f"{[len(c) for c in per_device]}. Give each list an "
                         "entry for every device.")
    if isinstance(per_device[0], NoRows):
        return NoRows(per_device[0])
    idle = [x is None for x in per_device[0]]
    calls = [(lambda: None) if none and not all(idle) else partial(fn, *row)
             for none, row in zip(idle, zip(*per_device))]
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


def train_batch(X: Any, y: Any, replicas: Replicas, loss: Loss,
                trainer: Trainer, split_f: Callable = split_batch,
                ignore_stale_grad: bool = False, *, accumulate: int = 1,
                clip_norm: float | None = None, batch_axis: int = 0
                ) -> list[Any]:
    """One step: split, all forwards, all backwards, all-reduce, update.

    The loss is called once, with the outputs and labels of all devices joined
    on the first one. What it returns is minimised as the framework alone
    would: values for each example by their mean, one number as it stands.

    Parameters
    ----------
    X, y : arrays of n rows (native or NumPy, or nested)
        A tuple or list of arrays stands for several inputs of the network,
        `mgpu.Kwargs` for inputs by name. A dict with ``y=None`` is a whole
        batch: entries that the network's forward names go to it by name (all
        if it has ``**kwargs``), and the loss is called with the whole dict,
        ``loss(output, batch)``. A forward with one parameter without a
        default, whose name no entry has, takes the dict as its one input. An
        entry that neither takes is refused while forward has parameters that
        no entry gives.
    replicas : Replicas
    loss : callable
        ``loss(pred, label)``: one value per example, an array (n, ...) of
        several (of tokens or pixels: the mean of each example counts), or one
        number, with any reduction. With several processes it sees those of
        its own, and one number counts once for each process.
    trainer : Trainer
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``; of a whole batch
        the first counts. A list of dicts, or of arrays of different lengths,
        may be the labels of as many rows (the boxes of each picture).
    ignore_stale_grad : bool
        Skip parameters that no row of the batch reached, as torch does; by
        default they are an error (`Trainer.step`).
    accumulate : int
        Cut the batch into so many parts (fewer where it has fewer rows),
        which pass one after the other: less memory, and the numbers of one
        pass, but for what depends on rows together or on the number of
        passes (batch norm, dropout). Not with lists of other than arrays.
    clip_norm : float, optional
        The largest norm of all gradients of the mean loss together
        (`Trainer.step_parts`).
    batch_axis : int
        The axis of the examples, 0 or more, in each array of `X` and `y`, and
        in the values of the loss: 1 for inputs (time, batch, features) with
        labels and losses (time, batch). An array with fewer axes has them on
        its last one: labels (batch,). The axis of the outputs is found. A
        `split_f` of your own splits so itself. A shape does not tell its
        layout: with the default, an array (time, batch) is split along the
        time.

    Returns
    -------
    list of native arrays
        The losses of each device's rows, on the first device and not waited
        for; None where a device had no rows. Of a loss that is one number:
        that number first, and None for all other devices. The losses are
        without the trainer's `loss_scale`. Afterwards each gradient
        (``.grad``) is that of the sum over all rows, or of the one number,
        times that scale: the update divides by both, and leaves the gradient
        as it is.

    Raises
    ------
    ValueError
        `X` and `y` of different lengths, an empty batch, a loss of another
        shape, an output without an entry for each row, or a trainer of other
        replicas.
    """
    accumulate = integer("accumulate", accumulate, 1)
    batch_axis = integer("batch_axis", batch_axis, 0)
    parts = [(X, y)]
    if accumulate > 1:
        _check_all(replicas, trainer, loss)
        parts = _cut(X, y, replicas.span.world, accumulate, batch_axis)
    losses = _train_batches(parts, replicas, loss, trainer, split_f,
                            ignore_stale_grad, clip_norm=clip_norm,
                            batch_axis=batch_axis)
    if len(parts) == 1 or all(x is None or not x.shape for x in losses):
        return losses[:len(replicas)] if len(parts) == 1 else losses
    with replicas.backend.scope(recording=False):
        return [replicas.backend.ops.concat(own) if own else None for own in (
            [x for x in losses[i::len(replicas)] if x is not None]
            for i in range(len(replicas)))]


def _cut(X: Any, y: Any, world: distributed.World, count: int,
         batch_axis: int) -> list[tuple[Any, Any]]:
    """A batch in `count` parts, or fewer where no process has as many
    rows."""
    rows, every = rows_of(X, batch_axis) or 0, {
        n for data in (X, y) for n in row_counts(data, batch_axis)}
    if every - {rows} or any(is_listed(x) for x in lists_in((X, y))):
        raise ValueError(
            "accumulate cuts arrays that have a row for each example; "
            f"received arrays of {sorted(every)} rows, or lists of other than "
            "arrays. Train on the parts as "
            "batches: mgpu.train(accumulate=) takes several for one step.")
    count = min(count, max(1, *world.gather("train_batch: rows", rows)))
    bounds = shard_bounds(rows, count)
    return list(zip(*(cut_rows(data, bounds, (X, y), batch_axis)
                      for data in (X, y)), strict=True))


def _train_batches(batches: Sequence[tuple[Any, Any]], replicas: Replicas,
                   loss: Loss, trainer: Trainer, split_f: Callable,
                   ignore_stale_grad: bool = False,
                   check: Callable[[Any], None] | None = None,
                   clip_norm: float | None = None, batch_axis: int = 0
                   ) -> list[Any]:
    """`train_batch` of all `batches` in one step; returns the losses of each
    device for the first one, then for the next. `check`: may refuse the
    output of a device."""
    _check_all(replicas, trainer, loss, split_f)
    devices, stage = replicas.devices, probes.stage
    losses: list[Any] = []

    def split(X: Any, y: Any) -> tuple[list[Any], list[Any], Any]:
        with stage("copy", "split", devices,
                   lambda: list(zip(X_shards, y_shards, strict=True))):
            X_shards, y_shards = shards_of(X, y, devices, split_f,
                                           batch_axis)
        judge = loss
        if is_whole(X, y):
            choice = choose(X, replicas.network.inputs())
            X_shards = list(map(choice.take, y_shards))
            judge = choice.told(loss)
        _check_labels(X_shards, y_shards, devices)
        return X_shards, y_shards, judge

    def run(X: Any, y: Any) -> float:
        X_shards, y_shards, judge = ready.pop() if ready else split(X, y)
        if replicas.span.wide and all(is_empty(as_inputs(shard))
                                      for shard in X_shards):
            replicas.pass_over()
            losses.extend([None] * len(devices))
            return 0
        if check is not None:
            judge = partial(_checked, check, judge)
        with replicas.told():
            own, count = _pass(replicas, X_shards, y_shards, judge,
                               trainer.loss_scale, batch_axis)
        losses.extend(own)
        return count
    with using_backend(replicas.backend.name) as backend, \
            replicas.span.world.guard(), \
            backend.scope(), replicas.owned(), \
            probes.step(devices, batches[0][0]):
        ready = [split(*batches[0])]        # what is refused has no pass
        if len(batches) > 1 or clip_norm is not None:
            trainer.check_parts(len(batches), clip_norm)
            trainer.step_parts([partial(run, *one) for one in batches],
                               ignore_stale_grad, clip_norm)
        else:
            trainer.step(run(*batches[0]), ignore_stale_grad)
    return losses


def _named(loss: Loss) -> list[Any]:
    """A loss as processes compare it: its name, and options of mgpu's."""
    return [getattr(loss, "__qualname__", type(loss).__qualname__), {
        name: repr(x) for name, x in vars(loss).items()}
        if isinstance(loss, OwnLoss) else {}]


def _check_all(replicas: Any, trainer: Any, loss: Any,
               split_f: Any = split_batch) -> None:
    """`check_pair`, and refuse what is not a loss or splits nothing."""
    check_pair(replicas, trainer)
    if not callable(split_f):
        raise TypeError("split_f is a function of (X, y, devices); received "
                        f"{type(split_f).__name__}. Leave it out.")
    if not callable(loss):
        raise TypeError("a loss is called with the outputs and the labels; "
                        f"received {type(loss).__name__}. Use one of "
                        "mgpu.losses, or a function of (pred, label).")


def _check_labels(X_shards: Sequence[Any], y_shards: Sequence[Any],
                  devices: Sequence[Device]) -> None:
    """Refuse labels of rows that no network would meet."""
    for X, y, device in zip(X_shards, y_shards, devices):
        if is_empty(as_inputs(X)) and not is_empty(y):
            raise ValueError(
                "a device has inputs where it has labels; received "
                f"{examples_of(y)[0]} rows of labels without inputs on "
                f"{device}. The first array of the inputs is the one whose "
                "rows count.")


def _pass(replicas: Replicas, X_shards: list[Any], y_shards: list[Any],
          loss: Loss, scale: float, batch_axis: int
          ) -> tuple[list[Any], float]:
    """A forward pass, the loss, and a backward pass. Returns the losses by
    device, and what the gradient is to be divided by."""
    devices, stage = replicas.devices, probes.stage
    busy = [i for i, shard in enumerate(X_shards)
            if not is_empty(as_inputs(shard))]
    with record(), replicas.autocast():
        output, sizes = replicas.joined(X_shards, y_shards, batch_axis)
        with replicas.backend.scope(recording=False) if len(busy) > 1 \
                else contextlib.nullcontext():
            y = join_shards([y_shards[i] for i in busy], sizes, devices[0],
                            batch_axis)
        with stage("compute", "loss", devices, lambda: [values], [0]):
            values = loss(output, y)
            is_number = _is_number(values, sum(sizes))
            if not is_number:
                values = check_per_example(values, sum(sizes),
                                           batch_axis=batch_axis,
                                           arrays=[output, y])
        scaled = values if scale == 1.0 else values * scale
    with stage("compute", "backward", devices,
               partial(probes.gradients, replicas), busy):
        backward(scaled)
        replicas.end_pass()
    losses: list[Any] = [None] * len(devices)
    if is_number:
        losses[0] = values
        return losses, 1
    with replicas.backend.scope(recording=False):
        for i, end, size in zip(busy, running(sizes), sizes, strict=True):
            losses[i] = replicas.backend.ops.stop_gradient(
                values[end - size:end])
    return losses, sum(sizes)


def _by_example(losses: list[Any], batches: Sequence[tuple[Any, Any]],
                replicas: Replicas, batch_axis: int) -> list[Any]:
    """Losses of batches with one number each, once for each example."""
    ops, k = replicas.backend.ops, len(replicas)
    found = list(losses)
    for n, (X, _) in enumerate(batches):
        rows, x = rows_of(X, batch_axis) or 0, losses[n * k]
        if x is not None and _is_number(x, rows) \
                and not any(y is not None for y in losses[n * k + 1:][:k - 1]):
            with replicas.backend.scope(recording=False):
                found[n * k] = ops.concat([x.reshape((1,))] * rows)
    return found


def _is_number(values: Any, examples: int) -> bool:
    """Whether a loss is one number, and not a value for each example."""
    shape = tuple(getattr(values, "shape", (0,)))
    return math.prod(shape) == 1 and (not shape or examples > 1)


def _checked(check: Callable[[Any], None], loss: Loss, output: Any, y: Any
             ) -> Any:
    check(output)
    return loss(output, y)


# -- the loop -----------------------------------------------------------------

@dataclass
class History:
    """What a training run measured.

    Attributes
    ----------
    devices : list of str
    train_loss : list of float
        Mean loss per example, by epoch.
    test_acc : list of float
        Between 0 and 1, by epoch; empty without test data.
    seconds : list of float
        Training time by epoch, all devices waited for, without evaluation.
    images_per_second : list of float
    loss_per_step : list of float
        Mean loss per example of each batch.
    """

    devices: list[str] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    test_acc: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images_per_second: list[float] = field(default_factory=list)
    loss_per_step: list[float] = field(default_factory=list)

    def of_epochs(self, count: int) -> dict[str, list[Any]]:
        """The lists by name, those of epochs with `count` entries: fit for
        JSON."""
        every = {name: list(x) for name, x in vars(self).items()}
        return {name: x if name in ("devices", "loss_per_step")
                else x[:count] for name, x in every.items()}

    def take(self, lists: Mapping[str, list[Any]]) -> None:
        """Go on from `of_epochs` of an earlier run."""
        for name in vars(self):
            if name != "devices":
                getattr(self, name)[:] = lists[name]

    def __repr__(self) -> str:
        return f"History of {len(self.seconds)} epochs: {self.summary()}"

    def _repr_html_(self) -> str:
        blank = [""] * len(self.seconds)
        return notebook.table(
            self.summary(), ("epoch", "train loss", "test accuracy",
                             "seconds", "images/s"), [
                (i + 1, f"{loss:.4f}", acc and f"{acc:.4f}", f"{s:.2f}",
                 f"{rate:.0f}") for i, (loss, acc, s, rate) in enumerate(zip(
                     self.train_loss, self.test_acc or blank, self.seconds,
                     self.images_per_second, strict=False))])

    def summary(self) -> str:
        """One line, as the book prints it: the last test accuracy (without
        test data, the last training loss), seconds per epoch, devices."""
        if not self.seconds:
            return f"no finished epoch on [{', '.join(self.devices)}]"
        acc = f"test acc: {self.test_acc[-1]:.2f}, " if self.test_acc else \
            f"train loss: {self.train_loss[-1]:.3f}, "
        return (f"{acc}{float(np.mean(self.seconds)):.1f} sec/epoch on "
                f"[{', '.join(self.devices)}]")


def _refuse_copies(world: distributed.World, data: Any, X: Any, y: Any,
                   epoch: int) -> None:
    """Refuse an epoch that begins with the same rows in two processes."""
    if world.size == 1:
        return
    own = prefetching.place_of(data)
    told = world.gather("the first batch of an epoch", [
        _digest(X, y) if own is None else None, own])
    world.check_orders([place for _, place in told],
                       f"train on one order of batches, in epoch {epoch + 1}")
    seen: dict[str, int] = {}
    for rank, (digest, _) in enumerate(told):
        if digest is None:
            continue
        if digest in seen:
            raise ValueError(
                "each process trains on its own rows; received the same "
                f"first batch on ranks {seen[digest]} and {rank} in epoch "
                f"{epoch + 1}, so that its rows would count twice. Take "
                "mgpu.datasets.IndexedIterator(dataset, batch_size), which "
                "gives each process its rows, or a DataLoader with torch's "
                "DistributedSampler.")
        seen[digest] = rank


def _digest(X: Any, y: Any) -> str | None:
    """Of all values in a batch; None where it has no rows, or is nothing
    that has any."""
    backend, found = get_backend(), hashlib.blake2b(digest_size=16)

    def add(x: Any) -> None:
        host = backend.to_numpy(x) if backend.is_native(x) else np.asarray(x)
        found.update(f"{host.dtype} {host.shape}".encode())
        found.update(np.ascontiguousarray(host).tobytes())
    if is_empty(as_inputs(X)):
        return None
    try:
        map_leaves(add, (X, y))
    except (TypeError, ValueError, RuntimeError):   # the step says more
        return None
    return found.hexdigest()


def _over_processes(world: distributed.World, means: list[float],
                    sizes: list[int]) -> tuple[list[float], list[int]]:
    """The mean loss and the rows of each step, over all processes."""
    if world.size == 1 or not means:
        return means, sizes
    told = world.gather("the losses of an epoch", [means, sizes])
    rows = [sum(n) for n in zip(*(n for _, n in told), strict=True)]
    return [sum(mean[i] * n[i] for mean, n in told) / count
            for i, count in enumerate(rows)], rows


@contextlib.contextmanager
def _carried(history: History) -> Iterator[None]:
    """What ends the block early has `history` with it."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError, TypeError):    # no place
            error.history = history     # type: ignore[attr-defined]
        raise


def train_epochs(step: Callable[[Any, Any], list[Any]],
                 train_iter: Iterable[tuple[Any, Any]],
                 num_epochs: int, devices: Sequence[Device], *,
                 evaluate: Callable[[], float] | None = None,
                 weights: Callable[[], dict[str, Any]] | None = None,
                 progress: bool = False, animator: Any = None,
                 description: str = "", prefetch: int = 0,
                 max_inflight: int = 2) -> History:
    """The loop around any step, from scratch or not.

    Parameters
    ----------
    step : callable
        ``step(X, y)`` trains on one batch and returns the losses of its
        rows, a list with one native array (or None) per device. `y` is None
        where a batch is a dict, `X`.
    train_iter : iterable of (X, y), or of dicts
    num_epochs : int
    devices : sequence of Device
    evaluate : callable, optional
        The test accuracy; called after each epoch, outside the timed lap.
    weights : callable, optional
        The parameters by name, native arrays of one device, to be checked
        after each epoch. MXNet's ReLU and max-pooling layers turn a NaN into
        a number, so a loss can be finite over weights that are not.
    progress : bool
        Draw a bar (tqdm; without the package there is none).
    animator : mgpu.plotting.Animator, optional
        Gets (epoch, [train loss, test accuracy]).
    prefetch : int
        Batches that a thread draws ahead (`mgpu.prefetch`); 0: each batch
        is drawn when the step before it has been queued. That is the
        default because a thread that draws takes Python time, and on CPU
        devices a core, from the steps: it pays where drawing is slow.
    max_inflight : int
        Steps that may be queued with their losses unread, 1 or more. Before
        another one is, the losses of the oldest are read, which waits for
        its forward pass (and all steps before it), and let go: that bounds
        the memory. 1: all work of a step is waited for before the next is
        queued, as by the ``waitall`` in the book's section "Training on
        Multiple GPUs". What happens without it, and how two steps may
        overlap, is an exercise of its section "Concise Implementation for
        Multiple GPUs": 2 is the answer. The numbers do not depend on it.
        Steps overlap on devices with a queue, GPUs. On CPU devices a step
        ends when its weights are there, also on MXNet.

    Raises
    ------
    NonFiniteLoss
        A loss that is NaN or infinite, naming its step; it is read when
        ``max_inflight - 1`` more steps of the epoch have been queued, so
        that checking costs no wait, and they have run by then. Or a weight,
        after an epoch.
    ValueError
        No batch in an epoch, a number of epochs or of steps below 1, or of
        batches below 0. With several processes: an epoch that begins with
        the same rows in two of them.
    BaseException
        Whatever ends the loop early, Ctrl-C too, has as its attribute
        `history` what was measured until then.
    """
    return _epochs(lambda batches: step(*batches[0]), train_iter, num_epochs,
                   devices, evaluate, weights,
                   progress, animator, description, prefetch, max_inflight,
                   Stop(distributed.current(), False))


class _Ended(BaseException):
    """A callback asks for the end, after a step."""


def _grouped(batches: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """`count` batches at a time; at the end those that are there. ValueError
    where drawing one has changed another."""
    source = iter(batches)
    while True:
        group, marks = [], []
        for batch in islice(source, min(count, sys.maxsize)):
            group.append(batch)
            if len(group) < count:      # others follow, which may change it
                marks.append(_mark(batch))
        if not group:
            return
        if any(_mark(one) != mark for one, mark in zip(group, marks)):
            raise ValueError(
                f"accumulate={count} draws the batches of a step before it; "
                "received an iterable that fills the arrays, or lists, of one "
                "batch anew for the next. Give each batch its own: (X.copy(), "
                "y.copy()).")
        yield group
        del group, batch    # or they would outlive their step


def _mark(batch: Any) -> list[Any]:
    """What changes with the contents of a batch: checksums of its arrays,
    texts, and other objects."""
    backend, found = get_backend(), list[Any]()
    for x in leaves(batch):
        if backend.is_native(x):
            x = backend.to_numpy(x)
        if isinstance(x, (list, tuple)):    # of numbers
            x = np.asarray(x)
        if isinstance(x, np.ndarray) and x.dtype != object:
            raw: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            found.append(zlib.crc32(raw))
        else:
            found += [one if isinstance(one, (str, bytes, int)) else _Same(one)
                      for one in (x.ravel() if isinstance(x, np.ndarray)
                                  else [x])]
    return found


class _Same:
    """Equal to itself alone, and to others of the same object."""

    def __init__(self, value: Any):
        self.value = value      # alive: no other has its address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _epochs(step: Callable[[list[Any]], list[Any]],
            train_iter: Iterable[tuple[Any, Any]], num_epochs: int,
            devices: Sequence[Device], evaluate: Callable[[], float] | None,
            weights: Callable[[], dict[str, Any]] | None, progress: bool,
            animator: Any, description: str, prefetch: int, max_inflight: int,
            stop: Stop, folder: Folder | None = None,
            resume: Callable[[], dict[str, Any] | None] | None = None,
            accumulate: int = 1, calls: Calls | None = None,
            event: Callable[..., Event] | None = None) -> History:
    """`train_epochs`, which `stop` may end, with checkpoints in `folder`.
    `step` is called with a list of `accumulate` batches. `resume`: brings all
    to the place that it returns. `event`: makes those of `calls`."""
    num_epochs = integer("num_epochs", num_epochs, 1)
    max_inflight = integer("max_inflight", max_inflight, 1)
    ahead = integer("prefetch", prefetch, 0)
    batches = as_rounds(as_batches("train_iter", train_iter))
    if ahead:
        batches = prefetching.prefetch(train_iter, ahead, devices=devices)
    if animator is not None and not hasattr(animator, "add"):
        raise TypeError("animator must be an mgpu.plotting.Animator; "
                        f"received {animator!r}. Pass one, or None.")
    backend, world = get_backend(), distributed.current()
    history = History([name for names in world.gather(
        "train", [str(d) for d in devices]) for name in names])
    total = num_epochs * length_hint(train_iter) if progress else 0
    waiting: deque[tuple[int, int, list[Any]]] = deque()
    done = 0                    # whole epochs
    sizes: list[int] = []       # rows of the steps of the one that runs
    joined = 0                  # of them, those of all processes
    over = False                # a callback has ended it
    steps = calls is not None and calls.steps
    begun = calls is None

    def begin_calls() -> None:
        """No batch has been refused: the callbacks begin too."""
        nonlocal begun
        if not begun and calls is not None:
            begun = True
            calls.begin()

    def settle(down_to: int) -> None:
        while len(waiting) > down_to:
            epoch, rows, losses = waiting.popleft()
            total = sum(float(backend.to_numpy(loss).astype(
                np.float64).sum()) for loss in losses if loss is not None)
            history.loss_per_step.append(total / rows if rows else 0.0)
            if not np.isfinite(total):
                refuse("loss", f"{total / rows} in step "
                       f"{len(history.loss_per_step)} (epoch {epoch + 1})")

    def refuse(what: str, received: str) -> None:
        raise NonFiniteLoss(
            f"the {what} must be finite; received {received} on "
            f"{list(devices)}. Lower the learning rate, clip the gradients, "
            "or look for bad data.")

    def join() -> None:
        """Losses and rows of all steps so far are those of all processes."""
        nonlocal joined
        settle(down_to=0)
        new = len(sizes) - joined
        at = len(history.loss_per_step) - new
        history.loss_per_step[at:], sizes[joined:] = _over_processes(
            world, history.loss_per_step[at:], sizes[joined:])
        joined = len(sizes)

    def save() -> None:
        begin_calls()
        if folder is not None and (folder.midway or not sizes):
            join()
            folder.save(done, history.of_epochs(done), sizes,
                        calls.state() if calls else None)

    def call(hook: str, losses: Any = None) -> bool:
        """Call the callbacks; returns whether they ask for the end."""
        if calls is None or event is None:
            return False
        begin_calls()
        return calls.call(hook, event(
            history, done + (losses is not None), num_epochs,
            len(history.loss_per_step) + len(waiting), losses))

    def run() -> None:
        nonlocal done, joined, over
        while done < num_epochs and not over:
            used = len(sizes)       # by the run before this one
            rest = batches if folder is None \
                else folder.rest(batches, used * accumulate)
            backend.synchronize(list(devices))
            first = len(history.loss_per_step) - used
            begin = time.perf_counter()
            for group in _grouped(map(as_pair, stop.taken(rest)), accumulate):
                if len(sizes) == used:
                    X, y = group[0]
                    _refuse_copies(world, batches, X, y, done)
                losses = step(group)
                rows = sum(len(loss) for loss in losses if loss is not None)
                waiting.append((done, rows, losses))
                sizes.append(rows)
                ended = steps and call("on_step", losses)
                del losses      # or they would outlive their settlement
                settle(down_to=max_inflight - 1)
                if max_inflight == 1:
                    backend.synchronize(list(devices))
                for _ in group:
                    bar.advance()
                if ended:
                    raise _Ended
                stop.check()
                if folder is not None and folder.every \
                        and (first + len(sizes)) % folder.every == 0:
                    save()
            if not sizes:
                raise ValueError(
                    "train_iter must give a batch or more in each epoch; "
                    f"received none in epoch {done + 1}. Use an iterable "
                    "that can be gone through again, such as a list.")
            settle(down_to=0)
            backend.synchronize(list(devices))
            join()
            seconds = time.perf_counter() - begin
            history.seconds.append(seconds)
            history.images_per_second.append(sum(sizes[used:]) / seconds)
            history.train_loss.append(float(np.average(
                history.loss_per_step[first:], weights=sizes)))
            for name, x in (weights() if weights else {}).items():
                if not np.isfinite(backend.to_numpy(x)).all():
                    refuse(f"weights {name!r}", f"NaN or infinity after epoch "
                           f"{done + 1}")
            if evaluate is not None:
                with stop.at_once():
                    accuracy = float(evaluate())
                world.agree("train: the result of evaluate", {
                    "accuracy": repr(accuracy)},
                    "Let evaluate return a number that all ranks have found "
                    "together, as evaluate_accuracy_gpus does.")
                history.test_acc.append(accuracy)
            done, joined = done + 1, 0
            sizes.clear()
            drawn(done)
            bar.note(f"loss {history.train_loss[-1]:.3f}" + (
                f", test acc {history.test_acc[-1]:.3f}"
                if history.test_acc else ""))
            over = call("on_epoch")
            save()
            stop.check()

    def drawn(epoch: int) -> None:
        if animator is not None:
            animator.add(epoch, [
                history.train_loss[epoch - 1],
                history.test_acc[epoch - 1] if history.test_acc else None])

    # The scope is for Ctrl-C, which may come while one inside it ends.
    with world.telling(), _carried(history), backend.scope(), stop:
        found = resume() if resume else None
        if found is not None:
            begin_calls()
            done, sizes = found["epochs"], found["sizes"]
            joined = len(sizes)
            history.take(found["history"])
            if calls is not None:
                over = calls.restore(found.get("callbacks", ()),
                                     found["arrays"])
            for epoch in range(done):
                drawn(epoch + 1)
        total = max(0, total - accumulate * len(history.loss_per_step))
        with ProgressBar(progress, description or "train", total or None,
                         "batch") as bar:
            try:
                run()
            except _Ended:
                join()
                save()
            except Stopped:
                stop.undo()
                save()
                raise stop.error() from None
        try:
            call("on_end")
            stop.check()
        except Stopped:     # the last checkpoint is written
            raise stop.error() from None
    give_back()
    return history


def _check_again(what: str, data: Any, num_epochs: int) -> None:
    """Refuse what Python gives once. Iterators of other classes may begin
    anew."""
    if isinstance(data, types.GeneratorType) or isinstance(data, Iterator) \
            and type(data).__module__ in ("builtins", "itertools"):
        raise ValueError(
            f"{what} is gone through in each epoch; received a "
            f"{type(data).__name__}, which gives its batches once, for "
            f"{num_epochs} epochs. Pass a list, or a data loader.")


def train(replicas: Replicas, train_iter: Iterable[tuple[Any, Any]],
          test_iter: Iterable[tuple[Any, Any]] | None, loss: Loss,
          trainer: Trainer, num_epochs: int, *,
          split_f: Callable = split_batch, device: Any = None,
          progress: bool = True, animator: Any = None, prefetch: int = 0,
          max_inflight: int = 2,
          evaluate: Callable[[], float] | None = None,
          checkpoint_dir: FilePath | None = None, resume: str | None = None,
          keep: int = 3, checkpoint_every: int | None = None,
          resume_seed: int | None = None, accumulate: int = 1,
          clip_norm: float | None = None, callbacks: Sequence[Any] = (),
          batch_axis: int = 0) -> History:
    """Train and evaluate on all devices of `replicas`.

    While it runs, SIGTERM lets the step end, and ends the training with the
    exit status 143 (SystemExit); so does Ctrl-C, with KeyboardInterrupt,
    where there is a `checkpoint_dir`. A checkpoint is written before. With
    several processes all ranks stop after the same step. Signals that the
    program handles itself stay with it.

    Parameters
    ----------
    replicas, loss, trainer, split_f
        As in `train_batch`.
    train_iter, test_iter : iterables of (X, y), or of dicts
        Anything that can be gone through once per epoch: those of
        `mgpu.datasets`, a torch or a Gluon DataLoader, a DataIter of MXNet
        (``mx.io.NDArrayIter``), which is reset before each epoch; rows that
        fill up its last batch are left out. `test_iter` may be None. With it
        the network gives scores (n, classes), two or more.
    num_epochs : int
    device : device, optional
        Evaluate only there (default: on all devices).
    progress : bool
        Draw a progress bar, where tqdm is installed.
    animator : mgpu.plotting.Animator, optional
    prefetch, max_inflight : int
        Batches drawn ahead, and steps queued: see `train_epochs`.
    evaluate : callable, optional
        In the place of `test_iter`: a measure of your own, called after each
        epoch; `History.test_acc` has what it returns.
    checkpoint_dir : path, optional
        Write a checkpoint into this folder, which is made if it is not
        there, after each epoch: ``step-00000012.safetensors`` after 12
        steps. See `save_checkpoint`.
    resume : {None, "auto"}
        "auto": go on from the newest checkpoint in the folder, history
        included, or from the one before it where that one is damaged
        (RuntimeWarning); begin where there is none. Times in the history
        are those that each run has measured.
    keep : int
        How many checkpoints stay, the newest; 1 or more.
    checkpoint_every : int, optional
        Write one after every so many steps too. On MXNet a run with random
        numbers in it (dropout) is bit-equal to those that save at the same
        steps.
    resume_seed : int, optional
        Begin new random streams where the checkpoint is resumed, on other
        devices or another engine: `seed` of `load_checkpoint`.
    accumulate : int
        So many batches are one step, as of all their rows together; the
        last step of an epoch takes those that are left. The passes are
        theirs: batch norm and dropout see one batch after the other. The
        batches of a step are drawn before it. The history counts steps, and
        so does `checkpoint_every`. A run is resumed with the same number.
    clip_norm : float, optional
        As in `train_batch`.
    callbacks : list
        What is called after steps and epochs, and may end the training: see
        `mgpu.callbacks`. Their states are in the checkpoints.
    batch_axis : int
        As in `train_batch`.

    Returns
    -------
    History
        After a callback has asked for the end in a step: without the epoch
        that is not done, but with its steps in `loss_per_step`.

    Raises
    ------
    NonFiniteLoss, ValueError
        See `train_epochs`.
    CheckpointCorrupt, OSError, ValueError
        See `load_checkpoint` and `save_checkpoint`. FileExistsError: the
        folder holds checkpoints, and `resume` is None. BlockingIOError:
        another training runs in it. ValueError: batches that two threads
        would draw ahead, one from the other (`prefetch`, `mgpu.prefetch`).
    ValueError
        `test_iter` and an output that is no scores (n, classes), with the
        first batch (a tuple of arrays is refused after the epoch: in
        prediction it may be one; so are batches of `test_iter` whose
        labels are not known); `test_iter` and `evaluate`; a generator, for
        several epochs. Nothing has changed.
    """
    _check_all(replicas, trainer, loss)
    check: Callable[[Any], None] | None = None
    if not callable(split_f) or not (evaluate is None or callable(evaluate)):
        raise TypeError(
            "split_f and evaluate are functions; received "
            f"{type(split_f).__name__} and {type(evaluate).__name__}. Leave "
            "them out, or pass functions.")
    if device is not None:
        check_place(replicas, device)
    num_epochs = integer("num_epochs", num_epochs, 1)
    if num_epochs > 1:
        for what, data in (("train_iter", train_iter),
                           ("test_iter", test_iter)):
            _check_again(what, data, num_epochs)
    if test_iter is not None:
        as_batches("test_iter", test_iter)
        if isinstance(test_iter, (list, tuple, str)):   # others may run out
            for batch in test_iter[:1]:
                as_pair(batch)
        if evaluate is not None:
            raise ValueError(
                "evaluate is called in the place of test_iter; received "
                "both. Pass test_iter=None, and use the test data in the "
                "function.")
        check = check_scores

        def evaluate() -> float:
            return evaluate_accuracy_gpus(replicas, test_iter, partial(
                split_batch, batch_axis=batch_axis)
                if split_f is split_batch else split_f, device=device)

    def step(batches: list[Any]) -> list[Any]:
        nonlocal check
        losses = _train_batches(batches, replicas, loss, trainer, split_f,
                                check=check, clip_norm=clip_norm,
                                batch_axis=batch_axis)
        check = None        # the first output tells
        return _by_example(losses, batches, replicas, batch_axis)
    accumulate = integer("accumulate", accumulate, 1)
    batch_axis = integer("batch_axis", batch_axis, 0)
    trainer.check_parts(accumulate, clip_norm)
    calls = Calls(callbacks, replicas, evaluate is not None,
                  checkpoint_dir is not None)
    folder = None
    if checkpoint_dir is not None:
        folder = Folder(checkpoint_dir, replicas, trainer, train_iter,
                        test_iter, keep, checkpoint_every, prefetch,
                        accumulate, calls.check)
    elif (resume, checkpoint_every, resume_seed) != (None, None, None):
        raise ValueError(
            "resume, checkpoint_every and resume_seed go with checkpoint_dir; "
            "received none. Name a folder for the checkpoints.")
    world = replicas.span.world
    if world.size > 1:
        world.agree("mgpu.train", {
            "num_epochs": num_epochs, "loss": _named(loss),
            "checkpoints": folder is not None,
            "checkpoint_every": checkpoint_every, "keep": keep,
            "resume": resume, "resume_seed": resume_seed,
            "accumulate": accumulate, "clip_norm": clip_norm,
            "callbacks": calls.names()},
            "Pass the same to train on every rank.")

    def weights() -> dict[str, Any]:
        replicas.check_digests(world.gather("the weights of an epoch",
                                            replicas.digest()))
        return {p.name: p.data() for p in replicas.params()}
    with folder or contextlib.nullcontext(), \
            using_backend(replicas.backend.name):
        return _epochs(
            step, train_iter, num_epochs, replicas.devices, evaluate,
            weights, progress,
            animator, "", prefetch, max_inflight,
            Stop(world, folder is not None,
                 folder.kept_streams if folder else None), folder,
            folder and partial(folder.open, resume, resume_seed, num_epochs)
            or None, accumulate, calls, partial(Event, replicas, trainer))
