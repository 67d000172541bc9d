"""The checkpoint directory of one run of `train`."""
import fcntl
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mgpu.checkpoints import checkpoint
from mgpu.data.prefetching import Prefetched, order_of
from mgpu.errors import CheckpointCorrupt
from mgpu.training.replicas import Replicas
from mgpu.training.trainer import Trainer
from mgpu.utils import files
from mgpu.utils.arguments import integer, one_of

#: by the number of steps
_NAME = re.compile(r"step-\d{8,}\.safetensors")


class Folder:
    """Checkpoints of `train`: written, pruned, and found again.

    Attributes
    ----------
    midway : bool
        Whether a checkpoint may be written within an epoch: the position in
        the data is known.
    """

    def __init__(self, folder: files.FilePath, replicas: Replicas,
                 trainer: Trainer, train_iter: Any, test_iter: Any,
                 keep: int, every: int | None, prefetch: int,
                 accumulate: int, check: Callable[[Sequence[Any]], None],
                 begin: tuple[str | None, int | None, int]) -> None:
        # The current directory of the program may change.
        self._path = os.path.abspath(files.path_of(folder))
        self._replicas, self._trainer = replicas, trainer
        self._source, self._tested = order_of(train_iter), order_of(test_iter)
        self.midway = self._source is not None \
            or isinstance(train_iter, Sequence)
        #: what a run has in common with the one that it resumes: the batches
        #: of an epoch, of a list, and those of a step
        self._common = {
            "batches": len(train_iter) if self._source is None and self.midway
            else None, "accumulate": accumulate}
        self._check_callbacks, self._begin = check, begin
        self._keep = integer("keep", keep, 1)
        self.every = None if every is None \
            else integer("checkpoint_every", every, 1)
        if isinstance(train_iter, Prefetched) and (
                prefetch or isinstance(train_iter.data, Prefetched)):
            raise ValueError(
                "with checkpoint_dir one thread draws ahead; received "
                f"mgpu.prefetch of {type(train_iter.data).__name__}, and "
                f"prefetch={prefetch}. Pass one of the two.")
        if every is not None and not self.midway:
            raise ValueError(
                "checkpoint_every takes a BatchIterator (mgpu.datasets), "
                "mgpu.prefetch of one, or a list of batches; received "
                f"{type(train_iter).__name__}. Leave it out: a checkpoint is "
                "written at the end of each epoch.")
        #: epochs and name of the last file; names of damaged ones
        self._last, self._damaged = (0, ""), set[str]()
        self._descriptor = -1       # of the folder, on rank 0
        self._test_epoch = self._tested and self._tested.epoch

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._descriptor in _descriptors:    # not in a forked child
            _descriptors.remove(self._descriptor)
            os.close(self._descriptor)

    # -- resuming -----------------------------------------------------------

    def open(self) -> dict[str, Any] | None:
        """Open the directory and restore the state of the run. Returns its
        position; None for a new run. Call it inside `World.guard`. The
        directory is locked until the block ends."""
        resume, seed, num_epochs = self._begin
        one_of("resume", resume, (None, "auto"))
        world, name, contents = self._replicas.span.world, None, None
        if world.is_main:
            os.makedirs(self._path, exist_ok=True)
            self._lock()
            files.sweep(self._path)
            found = self._names()
            if found and resume is None:
                raise FileExistsError(
                    f"{self._path!r} holds {len(found)} checkpoints. Pass "
                    "resume='auto' to resume from the newest, or another "
                    "checkpoint_dir.")
            name, contents = self._newest(found)
            if contents is not None:
                self._check(contents[0]["loop"], num_epochs)
        name = world.gather("train: resume", name)[0]
        if name is None:
            return None
        loop, arrays = checkpoint.load(
            self._full(name), contents, self._replicas, self._trainer,
            self._source, seed, "resume_seed=")
        if self._tested is not None and loop["test_epoch"] is not None:
            self._tested.epoch = self._test_epoch = loop["test_epoch"]
        self._last = loop["epochs"], name
        return {**loop, "arrays": arrays}

    def _lock(self) -> None:
        """The folder is of one run at a time. Where the process ends, the
        system unlocks it."""
        self._descriptor = os.open(self._path, os.O_RDONLY)
        _descriptors.add(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another training runs now in {self._path!r}. Wait for its "
                "end, or pass another checkpoint_dir.") from error
        except OSError:     # not every file system can
            pass

    def _names(self) -> list[str]:
        """Of all checkpoints, the newest first."""
        return sorted(filter(_NAME.fullmatch, os.listdir(self._path)),
                      key=lambda name: (len(name), name), reverse=True)

    def _full(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _newest(self, found: Sequence[str]
                ) -> tuple[str | None, checkpoint.Contents | None]:
        """The newest checkpoint that is whole; warns of those that are not,
        and remembers them."""
        for name in found:
            path = self._full(name)
            try:
                contents = checkpoint.read(path)
                loop = contents[0].get("loop")
                if loop is None:
                    raise CheckpointCorrupt(
                        "train resumes its own checkpoints; received "
                        f"{path!r}, one of mgpu.save_checkpoint. Load it with "
                        "mgpu.load_checkpoint.")
                if name != _name(loop["history"]):
                    raise CheckpointCorrupt(
                        f"{path!r} is {_name(loop['history'])}. Give it its "
                        "name back, or remove it.")
                return name, contents
            except CheckpointCorrupt as error:
                if name == found[-1]:
                    raise
                self._damaged.add(name)
                warnings.warn(f"{error} Resuming from the previous "
                              "checkpoint.", RuntimeWarning, stacklevel=5)
        return None, None

    def _check(self, loop: Mapping[str, Any], num_epochs: int) -> None:
        """Raise ValueError if arguments of `train` have changed."""
        if loop["epochs"] > num_epochs:
            raise ValueError(
                f"received num_epochs={num_epochs} for a checkpoint after "
                f"{loop['epochs']}. Train further.")
        for name, value in self._common.items():
            if loop.get(name, value) != value:
                raise ValueError(
                    f"received {name}={value} for a checkpoint with "
                    f"{loop[name]} (batches: of a list). Pass the same, or "
                    "use another checkpoint_dir.")
        self._check_callbacks(loop.get("callbacks", ()))

    def rest(self, batches: Iterable[Any], used: int) -> Iterable[Any]:
        """The batches of an epoch after the first `used` ones."""
        if self._source is None:
            return islice(batches, used, None)
        return batches if not used or self._source.position[1] else ()

    # -- writing ------------------------------------------------------------

    def save(self, epochs: int, history: Mapping[str, Any],
             sizes: Sequence[int], states: Sequence[Any],
             arrays: Mapping[str, Any]) -> None:
        """Write a checkpoint, after `epochs` and as many steps as `sizes`
        has, with what `Calls.state` gives. What there is already is not
        written again."""
        if not sizes:
            self._test_epoch = self._tested and self._tested.epoch
        name = _name(history)
        if self._last == (epochs, name):
            return
        is_main = self._replicas.span.world.is_main
        if is_main:
            self._check_there()
        checkpoint.write(
            self._full(name), self._replicas, self._trainer, self._source, {
                "epochs": epochs, "sizes": list(sizes), "history": history,
                "test_epoch": self._test_epoch, "callbacks": states,
                **self._common}, arrays)
        self._last = epochs, name
        if is_main:
            self._damaged.discard(name)
            whole = [x for x in self._names() if x not in self._damaged]
            for old in whole[self._keep:]:
                os.unlink(self._full(old))

    def _check_there(self) -> None:
        """The folder of this run is where it was: its name may be another
        run's now, whose checkpoints are not to be replaced or deleted."""
        if not os.path.exists(self._path) or not os.path.samestat(
                os.fstat(self._descriptor), os.stat(self._path)):
            raise FileNotFoundError(
                f"the folder {self._path!r} was moved or removed since train "
                "has begun. No checkpoint was written. Move it back, and "
                "train with resume='auto'.")


def _name(history: Mapping[str, Any]) -> str:
    """Of a checkpoint: the number of its steps."""
    return f"step-{len(history['loss_per_step']):08d}.safetensors"


#: of the folders that this process holds
_descriptors: set[int] = set()


def _release_in_child() -> None:
    """A forked child may outlive the run, and holds no folder."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_release_in_child)
