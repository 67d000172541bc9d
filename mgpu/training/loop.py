"""The training loop, for both backends."""
import contextlib
import copy
import sys
import time
from collections import deque
from collections.abc import (Callable, Iterable, Iterator, Mapping,
                             Sequence)
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np

from mgpu import distributed
from mgpu.backends import get_backend, give_back, using_backend
from mgpu.backends.device import Device
from mgpu.checkpoints.checkpoint_folder import Folder
from mgpu.data import prefetching
from mgpu.data.inputs import as_rounds
from mgpu.data.nested import (arrays_in, as_inputs, as_pair, is_empty,
                              map_leaves, rows_of)
from mgpu.data.split import split_batch
from mgpu.errors import NonFiniteLoss
from mgpu.nn.losses import Loss as OwnLoss
from mgpu.nn.metrics import on_host
from mgpu.training.callbacks import Calls
from mgpu.training.evaluation import (check_device, check_scores,
                                      evaluate_accuracy_gpus)
from mgpu.training.history import History
from mgpu.training.progress import ProgressBar
from mgpu.training.replicas import Replicas
from mgpu.training.step import Loss, check_loss, is_number, train_batches
from mgpu.training.stopping import Stop, Stopped
from mgpu.training.trainer import Trainer, check_pair
from mgpu.utils.arguments import batches as as_batches, hinting, integer
from mgpu.utils.files import FilePath
from mgpu.utils.tensor_files import digest_of


def _named(loss: Loss) -> list[Any]:
    """A loss as ranks compare it: its name, and the options of mgpu's own."""
    return [getattr(loss, "__qualname__", type(loss).__qualname__), {
        name: repr(x) for name, x in vars(loss).items()}
        if isinstance(loss, OwnLoss) else {}]


def _by_example(losses: list[Any], batches: Sequence[tuple[Any, Any]],
                replicas: Replicas, batch_axis: int) -> list[Any]:
    """Repeat each loss that is one number once for each example."""
    ops, k = replicas.backend.ops, len(replicas)
    found = list(losses)
    for n, (X, _) in enumerate(batches):
        rows, x = rows_of(X, batch_axis) or 0, losses[n * k]
        if x is not None and is_number(x, rows) \
                and not any(y is not None for y in losses[n * k + 1:][:k - 1]):
            with replicas.backend.scope(recording=False):
                found[n * k] = ops.concat([x.reshape((1,))] * rows)
    return found


def _check_distinct(world: distributed.World, data: Any, X: Any, y: Any,
                   epoch: int) -> None:
    """Raise ValueError if two ranks begin an epoch with the same examples."""
    if world.size == 1:
        return
    own = prefetching.place_of(data)
    reports = world.gather("the first batch of an epoch", [
        _digest(X, y) if own is None else None, own])
    world.check_orders([place for _, place in reports],
                       f"train on one order of batches, in epoch {epoch + 1}")
    seen: dict[str, int] = {}
    for rank, (digest, _) in enumerate(reports):
        if digest is None:
            continue
        if digest in seen:
            raise ValueError(
                "each rank trains on its own examples; received the same "
                f"first batch on ranks {seen[digest]} and {rank} in epoch "
                f"{epoch + 1}, so that its examples would count twice. Use "
                "mgpu.datasets.IndexedIterator(dataset, batch_size), which "
                "shards the examples over the ranks, or a DataLoader with "
                "torch's DistributedSampler.")
        seen[digest] = rank


def _digest(X: Any, y: Any) -> str | None:
    """A digest of all values in a batch; None for an empty batch, and for
    objects without arrays."""
    try:
        return None if is_empty(as_inputs(X)) else repr([
            (x.dtype, x.shape, digest_of(x))
            for x in map(on_host, arrays_in((X, y)))])
    except (TypeError, ValueError, RuntimeError):   # the step raises
        return None


def _grouped(batches: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """Group `count` batches at a time; the last group may be smaller. Batches
    of a larger group are copied: an iterable may reuse the arrays of one
    batch for the next."""
    backend, source = get_backend(), iter(batches)

    def copied(x: Any) -> Any:
        return backend.put(x, x) if backend.is_native(x) else copy.copy(x)
    while group := [map_leaves(copied, batch) if count > 1 else batch
                    for batch in islice(source, min(count, sys.maxsize))]:
        yield group
        del group       # or it would outlive its step


@dataclass
class Loop:
    """The epochs of a training run.

    Parameters
    ----------
    step : callable
        Trains on a list of `accumulate` batches, and returns the losses.
    stop : Stop
        May end the training between steps.
    folder : Folder, optional
        For checkpoints.
    calls : Calls
        The callbacks.
    others
        As in `train_epochs` and `train`.
    """

    step: Callable[[list[Any]], list[Any]]
    train_iter: Iterable[Any]
    num_epochs: int
    devices: Sequence[Device]
    stop: Stop
    calls: Calls
    evaluate: Callable[[], float] | None
    weights: Callable[[], dict[str, Any]] | None
    progress: bool
    animator: Any
    prefetch: int
    max_inflight: int
    description: str = ""
    accumulate: int = 1
    folder: Folder | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_epochs", 1), ("max_inflight", 1),
                            ("prefetch", 0)):
            setattr(self, name, integer(name, getattr(self, name), least))
        as_batches("train_iter", self.train_iter)
        if self.animator is not None and not hasattr(self.animator, "add"):
            raise TypeError("animator must be an mgpu.d2l.Animator; "
                            f"received {self.animator!r}. Pass one, or None.")
        self._batches = prefetching.prefetch(
            self.train_iter, self.prefetch, devices=self.devices) \
            if self.prefetch else as_rounds(self.train_iter)
        self._backend, self._world = get_backend(), distributed.current()
        self._history = History([name for names in self._world.gather(
            "train", list(map(str, self.devices))) for name in names])
        #: steps whose losses have not been read: epoch, examples, arrays
        self._waiting: deque[tuple[int, int, list[Any]]] = deque()
        self._done = 0                  # complete epochs
        self._sizes: list[int] = []     # examples of each step of this epoch
        self._joined = 0                # steps whose sizes are of all ranks
        self._over = False              # a callback has stopped the training

    def run(self) -> History:
        """Train until the last epoch, or a stop."""
        # The scope covers Ctrl-C while an inner block exits.
        try:
            with self._world.guard(), self._backend.scope(), self.stop:
                self._run()
        except BaseException as error:
            with contextlib.suppress(AttributeError, TypeError):    # slots
                error.history = self._history   # type: ignore[attr-defined]
            raise
        give_back()
        return self._history

    def _run(self) -> None:
        if self.folder is not None:
            self._resume(self.folder.open())
        total = self.num_epochs * length_hint(self.train_iter) \
            - self.accumulate * len(self._history.loss_per_step) \
            if self.progress else 0
        with ProgressBar(self.progress, self.description or "train",
                         max(0, total) or None, "batch") as bar:
            try:
                while self._done < self.num_epochs and not self._over:
                    self._epoch(bar)
                self._call("on_end")
                self.stop.check()
            except Stopped:
                self.stop.undo()
                self._save()
                raise self.stop.error() from None

    def _resume(self, found: Mapping[str, Any] | None) -> None:
        if found is not None:
            self._done, self._sizes = found["epochs"], found["sizes"]
            self._joined = len(self._sizes)
            self._history.take(found["history"])
            self._over = self.calls.restore(found.get("callbacks", ()),
                                            found["arrays"])
            for epoch in range(self._done):
                self._draw(epoch + 1)

    def _epoch(self, bar: ProgressBar) -> None:
        """Run the rest of an epoch."""
        backend, history, sizes = self._backend, self._history, self._sizes
        folder, used = self.folder, len(sizes)     # by the resumed run
        rest = self._batches if folder is None \
            else folder.rest(self._batches, used * self.accumulate)
        backend.synchronize(self.devices)
        first = len(history.loss_per_step) - used
        begin = time.perf_counter()
        for group in _grouped(map(as_pair, self.stop.taken(rest)),
                              self.accumulate):
            if len(sizes) == used:
                X, y = group[0]
                _check_distinct(self._world, self._batches, X, y, self._done)
            self._over = self._queue(group)
            for _ in group:
                bar.advance()
            if self._over:
                self._join()
                return self._save()
            self.stop.check()
            if folder is not None and folder.every \
                    and (first + len(sizes)) % folder.every == 0:
                self._save()
        if not sizes:
            raise ValueError(
                "train_iter must yield at least one batch in each epoch; "
                f"received none in epoch {self._done + 1}. Use an iterable "
                "that can be iterated again, such as a list.")
        self._read_losses(down_to=0)
        backend.synchronize(self.devices)
        self._join()
        seconds = time.perf_counter() - begin
        history.seconds.append(seconds)
        history.images_per_second.append(sum(sizes[used:]) / seconds)
        history.train_loss.append(float(np.average(
            history.loss_per_step[first:], weights=sizes)))
        for name, x in (self.weights() if self.weights else {}).items():
            if not np.isfinite(backend.to_numpy(x)).all():
                self._raise(f"weights {name!r}", "NaN or infinity after "
                             f"epoch {self._done + 1}")
        note = f"loss {history.train_loss[-1]:.3f}"
        if self.evaluate is not None:
            with self.stop.at_once():
                accuracy = float(self.evaluate())
            self._world.agree("train: the result of evaluate", {
                "accuracy": repr(accuracy)},
                "Let evaluate return a number that the ranks computed "
                "together, as evaluate_accuracy_gpus does.")
            history.test_acc.append(accuracy)
            note += f", test acc {accuracy:.3f}"
        self._done, self._joined = self._done + 1, 0
        sizes.clear()
        self._draw(self._done)
        bar.note(note)
        self._over = self._call("on_epoch")
        self._save()
        self.stop.check()

    def _queue(self, group: list[Any]) -> bool:
        """Queue a step. Returns whether a callback stops the training."""
        losses = self.step(group)
        rows = sum(len(loss) for loss in losses if loss is not None)
        self._waiting.append((self._done, rows, losses))
        self._sizes.append(rows)
        ended = self._call("on_step", losses)
        del losses      # or they would stay alive while their values are read
        self._read_losses(down_to=self.max_inflight - 1)
        if self.max_inflight == 1:
            self._backend.synchronize(self.devices)
        return ended

    def _read_losses(self, down_to: int) -> None:
        """Read losses until `down_to` steps are unread."""
        while len(self._waiting) > down_to:
            epoch, rows, losses = self._waiting.popleft()
            total = sum(float(self._backend.to_numpy(loss).astype(
                np.float64).sum()) for loss in losses if loss is not None)
            steps = self._history.loss_per_step
            steps.append(total / rows if rows else 0.0)
            if not np.isfinite(total):
                self._raise("loss", f"{total / rows} in step {len(steps)} "
                             f"(epoch {epoch + 1})")

    def _raise(self, what: str, received: str) -> None:
        raise NonFiniteLoss(
            f"the {what} must be finite; received {received} on "
            f"{self.devices}. Lower the learning rate, clip the gradients, "
            "or check the data.")

    def _join(self) -> None:
        """Exchange the losses and sizes of new steps with all ranks."""
        self._read_losses(down_to=0)
        sizes, steps = self._sizes, self._history.loss_per_step
        new = range(self._joined, len(sizes))
        self._joined = len(sizes)
        if self._world.size > 1 and new:
            at = len(steps) - len(sizes)
            reports = self._world.gather("the losses of an epoch", [
                [steps[at + i] for i in new], [sizes[i] for i in new]])
            for n, i in enumerate(new):
                sizes[i] = sum(rows[n] for _, rows in reports)
                steps[at + i] = sum(means[n] * rows[n]
                                    for means, rows in reports) / sizes[i]

    def _save(self) -> None:
        if self.folder is not None and (self.folder.midway
                                        or not self._sizes):
            self._join()
            self.folder.save(self._done, self._history.of_epochs(self._done),
                             self._sizes, *self.calls.state())

    def _call(self, hook: str, losses: Any = None) -> bool:
        """Call the callbacks. Returns whether one stops the training."""
        return self.calls.call(
            hook, self._history, self._done + (losses is not None),
            self.num_epochs,
            len(self._history.loss_per_step) + len(self._waiting), losses)

    def _draw(self, epoch: int) -> None:
        if self.animator is not None:
            accuracies = self._history.test_acc
            self.animator.add(epoch, [
                self._history.train_loss[epoch - 1],
                accuracies[epoch - 1] if accuracies else None])


def train_epochs(step: Callable[[Any, Any], list[Any]],
                 train_iter: Iterable[tuple[Any, Any]],
                 num_epochs: int, devices: Sequence[Device], *,
                 evaluate: Callable[[], float] | None = None,
                 weights: Callable[[], dict[str, Any]] | None = None,
                 progress: bool = False, animator: Any = None,
                 description: str = "", prefetch: int = 0,
                 max_inflight: int = 2) -> History:
    """Run a training loop around any step function.

    Parameters
    ----------
    step : callable
        ``step(X, y)`` trains on one batch. Returns the losses of its
        examples: a list with one native array (or None) per device. `y` is
        None where the batch `X` is a dict.
    train_iter : iterable of (X, y), or of dicts
    num_epochs : int
    devices : sequence of Device
    evaluate : callable, optional
        Returns the test accuracy. Called after each epoch; not timed.
    weights : callable, optional
        Returns the parameters by name, native arrays on one device. They are
        checked for NaN and infinity after each epoch. MXNet's ReLU and
        max-pooling layers turn a NaN into a number, so the loss can be finite
        with parameters that are not.
    progress : bool
        Draw a progress bar, if tqdm is installed.
    animator : mgpu.d2l.Animator, optional
        Gets (epoch, [train loss, test accuracy]).
    prefetch : int
        Batches that a thread loads ahead (`mgpu.prefetch`). 0, the default:
        each batch is loaded after the previous step has been queued. A
        loading thread takes Python time, and on CPU devices a core, from the
        steps: it pays off where loading is slow.
    max_inflight : int
        Steps that may be queued with their losses unread, 1 or more. Before
        the next step is queued, the losses of the oldest one are read, which
        waits for its forward pass and for all steps before it, and then
        freed. This bounds the memory. 1: wait for all work of a step before
        the next is queued, as the ``waitall`` in the book's section "Training
        on Multiple GPUs". The results do not depend on it. Steps overlap on
        devices with a queue, GPUs. On CPU devices a step ends when its
        parameters are updated, also on MXNet.

    Raises
    ------
    NonFiniteLoss
        A loss is NaN or infinite; the message has its step. It is read after
        ``max_inflight - 1`` more steps of the epoch were queued, which have
        run by then: the check does not wait. Or a parameter, after an epoch.
    ValueError
        An epoch without batches; `num_epochs` or `max_inflight` below 1;
        `prefetch` below 0. In distributed training: an epoch that begins with
        the same examples on two ranks.
    BaseException
        Every exception that ends the loop, KeyboardInterrupt included, has an
        attribute `history` with the measurements so far.
    """
    return Loop(lambda batches: step(*batches[0]), train_iter, num_epochs,
                devices, Stop(distributed.current(), False), Calls(),
                evaluate=evaluate, weights=weights, progress=progress,
                animator=animator, description=description, prefetch=prefetch,
                max_inflight=max_inflight).run()


@hinting(epochs="num_epochs", max_epochs="num_epochs",
         n_epochs="num_epochs", epoch="num_epochs",
         val_iter="test_iter", valid_iter="test_iter",
         batch_size="batches of that size in train_iter",
         optimizer="trainer=mgpu.Trainer(replicas, optimizer)",
         verbose="progress")
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

    On SIGTERM the step ends, a checkpoint is written, and the training exits
    with status 143 (SystemExit). With `checkpoint_dir` Ctrl-C does the same
    and raises KeyboardInterrupt. In distributed training all ranks stop after
    the same step. Signals with a handler of the program's are not caught.

    Parameters
    ----------
    replicas, loss, trainer, split_f
        As in `train_batch`.
    train_iter, test_iter : iterables of (X, y), or of dicts
        Iterables that can be iterated once per epoch: `mgpu.datasets`, a
        torch or a Gluon DataLoader, or a DataIter of MXNet
        (``mx.io.NDArrayIter``), which is reset before each epoch and whose
        padding is dropped. `test_iter` may be None. With it the network must
        return scores (n, classes), with at least two classes.
    num_epochs : int
    device : device, optional
        Evaluate on this device only. Default: all devices.
    progress : bool
        Draw a progress bar, if tqdm is installed and standard error is a
        terminal or a notebook.
    animator : mgpu.d2l.Animator, optional
    prefetch, max_inflight : int
        Batches loaded ahead, and steps queued: see `train_epochs`.
    evaluate : callable, optional
        Called after each epoch in place of `test_iter`. Its return value, a
        number, goes into `History.test_acc`.
    checkpoint_dir : path, optional
        Write a checkpoint into this directory after each epoch, for example
        ``step-00000012.safetensors`` after 12 steps. It is created if it does
        not exist. See `save_checkpoint`.
    resume : {None, "auto"}
        "auto": resume from the newest checkpoint in the directory, history
        included. If it is corrupt, warn (RuntimeWarning) and use the one
        before it. If there are no checkpoints, start a new run. Each run
        measures its own times in the history.
    keep : int
        Number of newest checkpoints to keep, 1 or more.
    checkpoint_every : int, optional
        Write a checkpoint after every `checkpoint_every` steps too. On MXNet
        a run with random numbers (dropout) is bit-equal to runs that save at
        the same steps.
    resume_seed : int, optional
        Seed the random number generators after resuming on other devices or
        another backend: `seed` of `load_checkpoint`.
    accumulate : int
        Number of batches of one step, whose gradients equal those of one
        large batch. A loss that is one number is averaged over the batches.
        The last step of an epoch takes the remaining batches. Batch norm and
        dropout see each batch separately. The batches of a step are loaded
        before it. The history and `checkpoint_every` count steps. Resume a
        run with the same number.
    clip_norm : float, optional
        As in `train_batch`.
    callbacks : list
        Called after steps and epochs; they may stop the training: see
        `mgpu.callbacks`. Checkpoints hold their states.
    batch_axis : int
        As in `train_batch`.

    Returns
    -------
    History
        If a callback stops the training within an epoch, `loss_per_step` has
        the steps of that epoch, and the other lists do not have the epoch.

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
        directory holds checkpoints, and `resume` is None. BlockingIOError:
        another training uses it. ValueError: both `prefetch` and
        `mgpu.prefetch` load batches ahead.
    ValueError
        With `test_iter`, an output other than scores (n, classes): with the
        first batch, or for a tuple of arrays after the first epoch, because
        it may be one array in prediction mode. Batches of `test_iter` without
        known labels: after the first epoch. Both `test_iter` and `evaluate`.
        A generator, for several epochs. Nothing has changed.
    """
    check_pair(replicas, trainer)
    check_loss(loss)
    if not (evaluate is None or callable(evaluate)):
        raise TypeError("evaluate must be callable; received "
                        f"{type(evaluate).__name__}.")
    if device is not None:
        check_device(replicas, device)
    for what, data in (("train_iter", train_iter), ("test_iter", test_iter)):
        # Generators and iterators of Python end. Other classes may restart.
        if isinstance(data, Iterator) and integer(
                "num_epochs", num_epochs, 1) > 1 and type(data).__module__ in (
                "builtins", "itertools"):
            raise ValueError(
                f"{what} must be iterable once per epoch; received a "
                f"{type(data).__name__}, which yields its batches once, for "
                f"{num_epochs} epochs. Pass a list, or a data loader.")
    score: Loss = loss
    if test_iter is not None:
        as_batches("test_iter", test_iter)
        if isinstance(test_iter, (list, tuple, str)):   # others may exhaust
            for batch in test_iter[:1]:
                as_pair(batch)
        if evaluate is not None:
            raise ValueError(
                "evaluate replaces test_iter; received both. "
                "Pass test_iter=None, and use the test data in the "
                "function.")

        def score(output: Any, y: Any) -> Any:
            check_scores(output)
            return loss(output, y)

        def evaluate() -> float:
            return evaluate_accuracy_gpus(replicas, test_iter, partial(
                split_batch, batch_axis=batch_axis)
                if split_f is split_batch else split_f, device=device)

    def step(batches: list[Any]) -> list[Any]:
        nonlocal score
        losses = train_batches(batches, replicas, score, trainer, split_f,
                               clip_norm=clip_norm, batch_axis=batch_axis)
        score = loss        # checked with the first output
        return _by_example(losses, batches, replicas, batch_axis)

    def weights() -> dict[str, Any]:
        replicas.check_digests(world.gather("the weights of an epoch",
                                            replicas.digest()))
        return {p.name: p.data() for p in replicas.params()}
    accumulate = integer("accumulate", accumulate, 1)
    batch_axis = integer("batch_axis", batch_axis, 0)
    trainer.check_parts(accumulate, clip_norm)
    calls = Calls(callbacks, replicas, trainer, evaluate is not None,
                  checkpoint_dir is not None)
    world, folder = replicas.span.world, None
    if checkpoint_dir is not None:
        folder = Folder(checkpoint_dir, replicas, trainer, train_iter,
                        test_iter, keep, checkpoint_every, prefetch,
                        accumulate, calls.check,
                        (resume, resume_seed, num_epochs))
    elif (resume, checkpoint_every, resume_seed) != (None, None, None):
        raise ValueError(
            "resume, checkpoint_every and resume_seed require checkpoint_dir; "
            "received none. Pass a directory for the checkpoints.")
    if world.size > 1:
        world.agree("mgpu.train", {
            "num_epochs": num_epochs, "loss": _named(loss),
            "checkpoints": folder is not None,
            "checkpoint_every": checkpoint_every, "keep": keep,
            "resume": resume, "resume_seed": resume_seed,
            "accumulate": accumulate, "clip_norm": clip_norm,
            "callbacks": calls.names()},
            "Pass the same to train on every rank.")
    with folder or contextlib.nullcontext(), \
            using_backend(replicas.backend.name):
        return Loop(
            step, train_iter, num_epochs, replicas.devices, Stop(
                world, folder is not None, replicas.backend.kept_streams
                if folder else None), calls, evaluate, weights,
            progress, animator, prefetch, max_inflight, "", accumulate,
            folder).run()
