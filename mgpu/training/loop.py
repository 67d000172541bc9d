"""The training loop, once for both backends."""
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
from mgpu.training.evaluation import (check_place, check_scores,
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
    """A loss as processes compare it: its name, and options of mgpu's."""
    return [getattr(loss, "__qualname__", type(loss).__qualname__), {
        name: repr(x) for name, x in vars(loss).items()}
        if isinstance(loss, OwnLoss) else {}]


def _by_example(losses: list[Any], batches: Sequence[tuple[Any, Any]],
                replicas: Replicas, batch_axis: int) -> list[Any]:
    """Losses of batches with one number each, once for each example."""
    ops, k = replicas.backend.ops, len(replicas)
    found = list(losses)
    for n, (X, _) in enumerate(batches):
        rows, x = rows_of(X, batch_axis) or 0, losses[n * k]
        if x is not None and is_number(x, rows) \
                and not any(y is not None for y in losses[n * k + 1:][:k - 1]):
            with replicas.backend.scope(recording=False):
                found[n * k] = ops.concat([x.reshape((1,))] * rows)
    return found


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
    try:
        return None if is_empty(as_inputs(X)) else repr([
            (x.dtype, x.shape, digest_of(x))
            for x in map(on_host, arrays_in((X, y)))])
    except (TypeError, ValueError, RuntimeError):   # the step says more
        return None


def _grouped(batches: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """`count` batches at a time; at the end those that are there. Copies, of
    several: an iterable may fill the arrays of one batch anew for the
    next."""
    backend, source = get_backend(), iter(batches)

    def copied(x: Any) -> Any:
        return backend.put(x, x) if backend.is_native(x) else copy.copy(x)
    while group := [map_leaves(copied, batch) if count > 1 else batch
                    for batch in islice(source, min(count, sys.maxsize))]:
        yield group
        del group       # or it would outlive its step


@dataclass
class Loop:
    """The epochs of a training.

    Parameters
    ----------
    step : callable
        Takes a list of `accumulate` batches, and returns the losses.
    stop : Stop
        May end the training between two steps.
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
        #: losses that are not read: the epoch, the rows, arrays
        self._waiting: deque[tuple[int, int, list[Any]]] = deque()
        self._done = 0                  # whole epochs
        self._sizes: list[int] = []     # rows of the steps of this epoch
        self._joined = 0                # of them, those of all processes
        self._over = False              # a callback has ended it

    def run(self) -> History:
        """Train to the end."""
        # The scope is for Ctrl-C, which may come while one inside it ends.
        try:
            with self._world.guard(), self._backend.scope(), self.stop:
                self._run()
        except BaseException as error:
            with contextlib.suppress(AttributeError, TypeError):    # no place
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
        """What is left of an epoch."""
        backend, history, sizes = self._backend, self._history, self._sizes
        folder, used = self.folder, len(sizes)     # by the run before
        rest = self._batches if folder is None \
            else folder.rest(self._batches, used * self.accumulate)
        backend.synchronize(self.devices)
        first = len(history.loss_per_step) - used
        begin = time.perf_counter()
        for group in _grouped(map(as_pair, self.stop.taken(rest)),
                              self.accumulate):
            if len(sizes) == used:
                X, y = group[0]
                _refuse_copies(self._world, self._batches, X, y, self._done)
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
                "train_iter must give a batch or more in each epoch; "
                f"received none in epoch {self._done + 1}. Use an iterable "
                "that can be gone through again, such as a list.")
        self._settle(down_to=0)
        backend.synchronize(self.devices)
        self._join()
        seconds = time.perf_counter() - begin
        history.seconds.append(seconds)
        history.images_per_second.append(sum(sizes[used:]) / seconds)
        history.train_loss.append(float(np.average(
            history.loss_per_step[first:], weights=sizes)))
        for name, x in (self.weights() if self.weights else {}).items():
            if not np.isfinite(backend.to_numpy(x)).all():
                self._refuse(f"weights {name!r}", "NaN or infinity after "
                             f"epoch {self._done + 1}")
        note = f"loss {history.train_loss[-1]:.3f}"
        if self.evaluate is not None:
            with self.stop.at_once():
                accuracy = float(self.evaluate())
            self._world.agree("train: the result of evaluate", {
                "accuracy": repr(accuracy)},
                "Let evaluate return a number that all ranks have found "
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
        """A step; whether a callback asks for the end."""
        losses = self.step(group)
        rows = sum(len(loss) for loss in losses if loss is not None)
        self._waiting.append((self._done, rows, losses))
        self._sizes.append(rows)
        ended = self._call("on_step", losses)
        del losses      # or they would outlive their settlement
        self._settle(down_to=self.max_inflight - 1)
        if self.max_inflight == 1:
            self._backend.synchronize(self.devices)
        return ended

    def _settle(self, down_to: int) -> None:
        """Read losses until so many steps are waiting."""
        while len(self._waiting) > down_to:
            epoch, rows, losses = self._waiting.popleft()
            total = sum(float(self._backend.to_numpy(loss).astype(
                np.float64).sum()) for loss in losses if loss is not None)
            steps = self._history.loss_per_step
            steps.append(total / rows if rows else 0.0)
            if not np.isfinite(total):
                self._refuse("loss", f"{total / rows} in step {len(steps)} "
                             f"(epoch {epoch + 1})")

    def _refuse(self, what: str, received: str) -> None:
        raise NonFiniteLoss(
            f"the {what} must be finite; received {received} on "
            f"{self.devices}. Lower the learning rate, clip the gradients, "
            "or look for bad data.")

    def _join(self) -> None:
        """Losses and rows of all steps so far are those of all processes."""
        self._settle(down_to=0)
        sizes, steps = self._sizes, self._history.loss_per_step
        new = range(self._joined, len(sizes))
        self._joined = len(sizes)
        if self._world.size > 1 and new:
            at = len(steps) - len(sizes)
            told = self._world.gather("the losses of an epoch", [
                [steps[at + i] for i in new], [sizes[i] for i in new]])
            for n, i in enumerate(new):
                sizes[i] = sum(rows[n] for _, rows in told)
                steps[at + i] = sum(means[n] * rows[n]
                                    for means, rows in told) / sizes[i]

    def _save(self) -> None:
        if self.folder is not None and (self.folder.midway
                                        or not self._sizes):
            self._join()
            self.folder.save(self._done, self._history.of_epochs(self._done),
                             self._sizes, *self.calls.state())

    def _call(self, hook: str, losses: Any = None) -> bool:
        """Call the callbacks; returns whether they ask for the end."""
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
    animator : mgpu.d2l.Animator, optional
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
        Draw a progress bar, where tqdm is installed and standard error is a
        terminal or a notebook.
    animator : mgpu.d2l.Animator, optional
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
        devices or another backend: `seed` of `load_checkpoint`.
    accumulate : int
        So many batches are one step, as of all their rows together (a loss
        that is one number is averaged over the batches); the last step of an
        epoch takes those that are left. The passes are theirs: batch norm
        and dropout see one batch after the other. The batches of a step are
        drawn before it. The history counts steps, and
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
    check_pair(replicas, trainer)
    check_loss(loss)
    if not (evaluate is None or callable(evaluate)):
        raise TypeError("evaluate is a function; received "
                        f"{type(evaluate).__name__}.")
    if device is not None:
        check_place(replicas, device)
    for what, data in (("train_iter", train_iter), ("test_iter", test_iter)):
        # What Python gives once. Iterators of other classes may begin anew.
        if isinstance(data, Iterator) and integer(
                "num_epochs", num_epochs, 1) > 1 and type(data).__module__ in (
                "builtins", "itertools"):
            raise ValueError(
                f"{what} is gone through in each epoch; received a "
                f"{type(data).__name__}, which gives its batches once, for "
                f"{num_epochs} epochs. Pass a list, or a data loader.")
    score: Loss = loss
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
        score = loss        # the first output tells
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
            "resume, checkpoint_every and resume_seed go with checkpoint_dir; "
            "received none. Name a folder for the checkpoints.")
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
