"""The checkpoints of one run of `train`, in a folder of their own."""
import contextlib
import fcntl
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mgpu import checkpoint, files
from mgpu.arguments import integer, one_of
from mgpu.errors import CheckpointCorrupt
from mgpu.prefetching import Prefetched, order_of
from mgpu.replicas import Replicas
from mgpu.trainer import Trainer

#: by the number of steps
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


class Folder:
    """Checkpoints of `train`: written, pruned, and found again.

    Attributes
    ----------
    midway : bool
        Whether a checkpoint may be made between two steps of an epoch: the
        place in the data is known.
    """

    def __init__(self, folder: files.FilePath, replicas: Replicas,
                 trainer: Trainer, train_iter: Any, test_iter: Any,
                 keep: int, every: int | None, prefetch: int,
                 accumulate: int = 1,
                 check: Callable[[Sequence[Any]], None] = lambda _: None
                 ) -> None:
        # What the program's current folder becomes does not matter.
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
        self._check_callbacks = check
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
        self._at: tuple[int, int] | None = None     # of the last file
        self._damaged: set[str] = set()
        self._held = contextlib.ExitStack()
        self._descriptor = -1
        self._test_epoch = self._tested and self._tested.epoch

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.close()

    def kept_streams(self) -> Callable[[], None]:
        """See `Backend.kept_streams`."""
        return self._replicas.backend.kept_streams()

    # -- resuming -----------------------------------------------------------

    def open(self, resume: str | None, seed: int | None, num_epochs: int
             ) -> dict[str, Any] | None:
        """Where the run goes on, whose state is in place then; None: at its
        beginning. Inside of `World.guard`. The folder is this run's alone
        until its block ends."""
        one_of("resume", resume, (None, "auto"))
        world, path, contents = self._replicas.span.world, None, None
        if world.is_main:
            os.makedirs(self._path, exist_ok=True)
            self._descriptor = self._held.enter_context(_lock(self._path))
            files.sweep(self._path)
            found = self._files()
            if found and resume is None:
                raise FileExistsError(
                    f"{self._path!r} holds {len(found)} checkpoints. Pass "
                    "resume='auto' to go on from the newest, or another "
                    "checkpoint_dir.")
            path, contents = self._newest(found)
            if contents is not None:
                self._check(contents[0]["loop"], num_epochs)
        path = world.gather("train: resume", path)[0]
        if path is None:
            return None
        loop = checkpoint.load(path, contents, self._replicas, self._trainer,
                               self._source, seed, "resume_seed=")
        assert loop is not None
        if self._tested is not None and loop["test_epoch"] is not None:
            self._tested.epoch = self._test_epoch = loop["test_epoch"]
        self._at = loop["epochs"], _steps(loop)
        return loop

    def _files(self) -> list[str]:
        """The paths of all checkpoints, the newest first."""
        found = [(int(match[1]), name) for name in os.listdir(self._path)
                 if (match := _NAME.fullmatch(name))]
        return [os.path.join(self._path, name)
                for _, name in sorted(found, reverse=True)]

    def _newest(self, found: Sequence[str]
                ) -> tuple[str | None, checkpoint.Contents | None]:
        """The newest checkpoint that is whole; warns of those that are not,
        and remembers them."""
        for path in found:
            try:
                contents = checkpoint.read(path)
                loop = contents[0].get("loop")
                if loop is None:
                    raise CheckpointCorrupt(
                        "train resumes its own checkpoints; received "
                        f"{path!r}, one of mgpu.save_checkpoint. Load it with "
                        "mgpu.load_checkpoint.")
                if path != self._name(loop):
                    raise CheckpointCorrupt(
                        f"{path!r} is of {_steps(loop)} steps. Give it its "
                        "name back, or remove it.")
                return path, contents
            except CheckpointCorrupt as error:
                if path == found[-1]:
                    raise
                self._damaged.add(path)
                warnings.warn(f"{error} The run goes on from the checkpoint "
                              "before it.", RuntimeWarning, stacklevel=5)
        return None, None

    def _check(self, loop: Mapping[str, Any], num_epochs: int) -> None:
        """Refuse to resume with other arguments of `train`."""
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
        """The batches of an epoch of which `used` are done."""
        if not used:
            return batches
        if self._source is None:
            return islice(batches, used, None)
        return batches if self._source.position[1] else ()

    # -- writing ------------------------------------------------------------

    def save(self, epochs: int, history: Mapping[str, Any],
             sizes: Sequence[int],
             calls: tuple[list[Any], Mapping[str, Any]] | None = None
             ) -> None:
        """Write a checkpoint, after `epochs` and as many steps as `sizes`
        has, with what `Calls.state` gives. What there is already is not
        written again."""
        if not sizes:
            self._test_epoch = self._tested and self._tested.epoch
        states, arrays = calls or ([], {})
        loop = {"epochs": epochs, "sizes": list(sizes), "history": history,
                "test_epoch": self._test_epoch, "callbacks": states,
                "arrays": arrays, **self._common}
        if self._at == (epochs, _steps(loop)):
            return
        path, is_main = self._name(loop), self._replicas.span.world.is_main
        if is_main:
            self._check_there()
        checkpoint.write(path, self._replicas, self._trainer, self._source,
                         loop)
        self._at = epochs, _steps(loop)
        if is_main:
            self._damaged.discard(path)
            whole = [old for old in self._files() if old not in self._damaged]
            for old in whole[self._keep:]:
                os.unlink(old)

    def _name(self, loop: Mapping[str, Any]) -> str:
        return os.path.join(self._path,
                            f"step-{_steps(loop):08d}.safetensors")

    def _check_there(self) -> None:
        """The folder of this run is where it was: its name may be another
        run's now, whose checkpoints are not to be replaced or deleted."""
        if not os.path.exists(self._path) or not os.path.samestat(
                os.fstat(self._descriptor), os.stat(self._path)):
            raise FileNotFoundError(
                f"the folder {self._path!r} was moved or removed since train "
                "has begun. No checkpoint was written. Move it back, and "
                "train with resume='auto'.")


def _steps(loop: Mapping[str, Any]) -> int:
    return len(loop["history"]["loss_per_step"])


#: of the folders that this process holds
_descriptors: set[int] = set()


def _release_in_child() -> None:
    """A forked child may outlive the run, and holds no folder."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def _lock(path: str) -> Iterator[int]:
    """A block for one run in a folder at a time, with the folder's
    descriptor. Where the process ends, the system ends it."""
    descriptor = os.open(path, os.O_RDONLY)
    _descriptors.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another training runs now in {path!r}. Wait for its end, "
                "or pass another checkpoint_dir.") from error
        except OSError:     # not every file system can
            pass
        yield descriptor
    finally:
        if descriptor in _descriptors:      # not in a forked child
            _descriptors.remove(descriptor)
            os.close(descriptor)
