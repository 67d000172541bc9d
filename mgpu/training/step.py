"""A training step: one batch on all devices."""
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate as running
from typing import Any

from mgpu import distributed
from mgpu.backends import using_backend
from mgpu.backends.device import Device
from mgpu.data.nested import (as_inputs, examples_of, is_empty, is_listed,
                              lists_in, row_counts, rows_of)
from mgpu.data.split import cut_rows, join_shards, shard_bounds, split_batch
from mgpu.nn.losses import check_per_example
from mgpu.training.evaluation import split_inputs
from mgpu.training.functions import backward, record
from mgpu.training.replicas import Replicas
from mgpu.training.trainer import Trainer, check_pair
from mgpu.utils import probes
from mgpu.utils.arguments import integer

Loss = Callable[[Any, Any], Any]


def train_batch(X: Any, y: Any, replicas: Replicas, loss: Loss,
                trainer: Trainer, split_f: Callable = split_batch,
                ignore_stale_grad: bool = False, *, accumulate: int = 1,
                clip_norm: float | None = None, batch_axis: int = 0
                ) -> list[Any]:
    """Perform one training step on a batch: split, forward, backward,
    all-reduce, update.

    The loss is called once, with the outputs and labels of all devices
    concatenated on the first one. One value per example is reduced by the
    mean, as on one device; a single number is minimized unchanged.

    Parameters
    ----------
    X, y : arrays of n examples (native or NumPy, or nested)
        A tuple or list of arrays stands for several inputs of the network,
        `mgpu.Kwargs` for inputs by name. A dict with ``y=None`` is a whole
        batch: entries with the name of a forward parameter are passed to it
        (all entries for ``**kwargs``), and the loss is called with the whole
        dict, ``loss(output, batch)``. If forward has one parameter without a
        default, and no entry has its name, the dict is its one input. Raises
        ValueError for an entry that neither reads, while forward has
        parameters without an entry.
    replicas : Replicas
    loss : callable
        ``loss(pred, label)`` returns one value per example; an array (n, ...)
        with several values per example (for tokens or pixels), which are
        averaged for each example; or one number, with any reduction. In
        distributed training it gets the rank's own examples, and one number
        counts once for each rank.
    trainer : Trainer
    split_f : callable
        ``split_f(X, y, devices) -> (X_shards, y_shards)``. For a whole batch
        the second is ignored. A list of dicts, or of arrays of different
        lengths, may be the labels, one item per example (the boxes of each
        image).
    ignore_stale_grad : bool
        Skip parameters that no example of the batch reached, as torch does.
        By default they raise (`Trainer.step`).
    accumulate : int
        Split the batch into this many parts (fewer for a smaller batch), with
        one pass each: uses less memory. The results equal those of one pass,
        except for what depends on the whole batch or on the number of passes
        (batch norm, dropout; a loss that is one number is averaged over the
        parts). Not supported for lists of other objects than arrays.
    clip_norm : float, optional
        The maximum norm of the gradients of the mean loss, over all
        parameters together (`Trainer.step_parts`).
    batch_axis : int
        The batch dimension, 0 or more, of each array in `X` and `y` and of
        the values of the loss: 1 for inputs (time, batch, features) with
        labels and losses (time, batch). An array with fewer axes has it last:
        labels (batch,). The batch dimension of the outputs is detected. A
        user-defined `split_f` splits by itself. With the default, an array
        (time, batch) is split along the time.

    Returns
    -------
    list of native arrays
        The losses of each device's examples, on the first device; does not
        wait for them. None for a device without examples. For a loss that is
        one number: the number, then None for all other devices. The losses do
        not include the trainer's `loss_scale`. Afterwards each gradient
        (``.grad``) is that of the sum over all examples, or of the one
        number, times that scale. The update divides by both and does not
        change the gradient.

    Raises
    ------
    ValueError
        `X` and `y` have different lengths; the batch is empty; the shape of
        the loss is wrong; an output has no batch dimension; `trainer` is that
        of other replicas.
    """
    check_pair(replicas, trainer)
    check_loss(loss)
    parts = [(X, y)]
    if integer("accumulate", accumulate, 1) > 1:
        parts = _cut(X, y, replicas.span.world, accumulate, batch_axis)
    losses = train_batches(parts, replicas, loss, trainer, split_f,
                           ignore_stale_grad, clip_norm=clip_norm,
                           batch_axis=batch_axis)
    if len(parts) == 1 or all(x is None or not x.shape for x in losses):
        return losses
    with replicas.backend.scope(recording=False):
        return [replicas.backend.ops.concat(own) if own else None for own in (
            [x for x in losses[i::len(replicas)] if x is not None]
            for i in range(len(replicas)))]


def _cut(X: Any, y: Any, world: distributed.World, count: int,
         batch_axis: int) -> list[tuple[Any, Any]]:
    """Split a batch into `count` parts, or fewer if no rank has that many
    examples."""
    rows, every = rows_of(X, batch_axis) or 0, {
        n for data in (X, y) for n in row_counts(data, batch_axis)}
    if every - {rows} or any(is_listed(x) for x in lists_in((X, y))):
        raise ValueError(
            "accumulate requires arrays of equal batch size; "
            f"received sizes {sorted(every)}, or lists of other objects "
            "than arrays. Split the batch, and pass several "
            "batches for one step to mgpu.train(accumulate=).")
    count = min(count, max(1, *world.gather("train_batch: rows", rows)))
    bounds = shard_bounds(rows, count)
    return list(zip(*(cut_rows(data, bounds, (X, y), batch_axis)
                      for data in (X, y)), strict=True))


def train_batches(batches: Sequence[tuple[Any, Any]], replicas: Replicas,
                  loss: Loss, trainer: Trainer, split_f: Callable,
                  ignore_stale_grad: bool = False,
                  clip_norm: float | None = None, batch_axis: int = 0
                  ) -> list[Any]:
    """`train_batch` of all `batches` in one step. Returns the losses of each
    device for the first batch, then for the next."""
    batch_axis = integer("batch_axis", batch_axis, 0)
    devices = replicas.devices
    losses: list[Any] = []

    def split(X: Any, y: Any) -> tuple[list[Any], list[Any], Any]:
        with probes.stage("copy", "split", devices,
                          lambda: list(zip(X_shards, y_shards, strict=True))):
            X_shards, y_shards, loss_fn = split_inputs(
                X, y, devices, split_f, batch_axis, replicas.network.inputs,
                loss)
        _check_labels(X_shards, y_shards, devices)
        return X_shards, y_shards, loss_fn

    def run(X: Any, y: Any) -> float:
        X_shards, y_shards, loss_fn = ready.pop() if ready else split(X, y)
        busy = [i for i, shard in enumerate(X_shards)
                if not is_empty(as_inputs(shard))]
        if replicas.span.wide and not busy:
            replicas.skip_pass()
            losses.extend([None] * len(devices))
            return 0
        with replicas.reporting():
            own, count = _pass(replicas, X_shards, y_shards, busy, loss_fn,
                               trainer.loss_scale, batch_axis)
        losses.extend(own)
        return count
    with using_backend(replicas.backend.name) as backend, \
            replicas.span.world.guard(), \
            backend.scope(), replicas.exclusive(), \
            probes.step(devices, batches[0][0]):
        ready = [split(*batches[0])]        # raises before any pass
        if len(batches) > 1 or clip_norm is not None:
            trainer.check_parts(len(batches), clip_norm)
            trainer.step_parts([partial(run, *one) for one in batches],
                               ignore_stale_grad, clip_norm)
        else:
            trainer.step(run(*batches[0]), ignore_stale_grad)
    return losses


def check_loss(loss: Any) -> None:
    """Raise TypeError if `loss` cannot be called with outputs and labels."""
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__qualname__}" if isinstance(loss, type) \
            else f"{loss!r} of type {type(loss).__name__}"
        raise TypeError("expected a loss, called as loss(output, label); "
                        f"received {what}. Pass a function or an object.")


def _check_labels(X_shards: Sequence[Any], y_shards: Sequence[Any],
                  devices: Sequence[Device]) -> None:
    """Raise ValueError for labels on a device without inputs."""
    for X, y, device in zip(X_shards, y_shards, devices):
        if is_empty(as_inputs(X)) and not is_empty(y):
            raise ValueError(
                "a device with labels needs inputs; received "
                f"{examples_of(y)[0]} labels without inputs on "
                f"{device}. The first array of the inputs determines the "
                "number of examples.")


def _pass(replicas: Replicas, X_shards: list[Any], y_shards: list[Any],
          busy: list[int], loss: Loss, scale: float, batch_axis: int
          ) -> tuple[list[Any], float]:
    """Run forward, loss and backward; `busy`: the indices of the devices with
    examples. Returns the losses by device, and the divisor of the
    gradients."""
    devices, stage = replicas.devices, probes.stage
    with record(), replicas.autocast():
        output, sizes = replicas.joined(X_shards, y_shards, batch_axis)
        with replicas.backend.scope(recording=False) if len(busy) > 1 \
                else contextlib.nullcontext():
            y = join_shards([y_shards[i] for i in busy], sizes, devices[0],
                            batch_axis)
        with stage("compute", "loss", devices, lambda: [values], [0]):
            values = loss(output, y)
            one = is_number(values, sum(sizes))
            if not one:
                values = check_per_example(values, sum(sizes),
                                           batch_axis=batch_axis,
                                           arrays=[output, y])
        scaled = values if scale == 1.0 else values * scale
    with stage("compute", "backward", devices,
               partial(probes.gradients, replicas), busy):
        replicas.discard_gradients()
        backward(scaled)
        replicas.end_pass()
    losses: list[Any] = [None] * len(devices)
    with replicas.backend.scope(recording=False):
        if one:
            losses[0] = replicas.backend.ops.stop_gradient(values)
            return losses, 1
        for i, end, size in zip(busy, running(sizes), sizes, strict=True):
            losses[i] = replicas.backend.ops.stop_gradient(
                values[end - size:end])
    return losses, sum(sizes)


def is_number(values: Any, examples: int) -> bool:
    """Whether a loss is one number instead of a value for each example."""
    shape = tuple(getattr(values, "shape", (0,)))
    return math.prod(shape) == 1 and (not shape or examples > 1)
