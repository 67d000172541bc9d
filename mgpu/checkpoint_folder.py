"""The checkpoints of one run of `train`, in a folder of their own."""
import contextlib
import fcntl
import os
import re
import warnings
from collections.abc import (Callable, Iterable, Iterator, Mapping,
                             Sequence)
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
                 check: Callable[[Sequence[Any]], None] | None = None
                 ) -> None:
        #: batches of a step; what may refuse the callbacks of a checkpoint
        self._accumulate, self._check = accumulate, check
        # What the program's current folder becomes does not matter.
        self._path = os.path.abspath(_named(folder))
        self._replicas, self._trainer = replicas, trainer
        self._train, self._test = train_iter, test_iter
        _check_drawn_once(train_iter, prefetch)
        self._source = order_of(train_iter)
        self._tested = order_of(test_iter)
        self._keep = integer("keep", keep, 1)
        self.every = None if every is None \
            else integer("checkpoint_every", every, 1)
        self.midway = self._source is not None \
            or isinstance(train_iter, Sequence)
        if every is not None and not self.midway:
            raise ValueError(
                "checkpoint_every takes data whose place in an epoch can be "
                "found again: a BatchIterator (mgpu.datasets), mgpu.prefetch "
                "of one, or a list of batches; received "
                f"{type(train_iter).__name__}. Leave it out: a checkpoint is "
                "written at the end of each epoch.")
        if not replicas.complete:
            raise ValueError(
                "checkpoint_dir takes a network whose shapes are known, or "
                "no checkpoint would go back into it; received one whose "
                "first batch completes them. Pass sample= to "
                "mgpu.initialize.")
        self._at: tuple[int, int] | None = None     # of the last file
        self._passed: list[str] = []    # what is there and not whole
        self._held = contextlib.ExitStack()
        self._descriptor = -1
        self._test_epoch = self._begun()

    def _begun(self) -> int | None:
        return None if self._tested is None else self._tested.epoch

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.close()

    def kept_streams(self) -> Callable[[], None]:
        """See `Backend.kept_streams`."""
        return self._replicas.backend.kept_streams()

    # -- going on -----------------------------------------------------------

    def open(self, resume: str | None, seed: int | None, num_epochs: int
             ) -> dict[str, Any] | None:
        """Where the run goes on, whose state is in place then; None: at its
        beginning. Inside of `World.guard`. The folder is this run's alone
        until its block ends."""
        one_of("resume", resume, (None, "auto"))
        world, path, contents = self._replicas.span.world, None, None
        if world.is_main:
            _make(self._path)
            self._descriptor = self._held.enter_context(_alone(self._path))
            files.sweep(self._path)
            found = self._files()
            if found and resume is None:
                raise FileExistsError(
                    "a run has a folder of its own; received "
                    f"{self._path!r}, which holds {len(found)} checkpoints. "
                    "Pass resume='auto' to go on from the newest, or another "
                    "checkpoint_dir.")
            path, contents = _newest(found, self._passed)
            if contents is not None:
                loop = contents[0].get("loop")
                _check_loop(path, loop, num_epochs, self._length,
                            self._accumulate)
                if self._check is not None:
                    self._check((loop or {}).get("callbacks", ()))
        path = world.gather("train: resume", path)[0]
        if path is None:
            return None
        loop = checkpoint.load(path, contents, self._replicas, self._trainer,
                               self._data, seed, "resume_seed=")
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

    def _check_there(self) -> None:
        """The folder of this run is where it was: its name may be another
        run's now, whose checkpoints are not to be replaced or deleted."""
        try:
            there = os.path.samestat(os.fstat(self._descriptor),
                                     os.stat(self._path))
        except FileNotFoundError:
            there = False
        if not there:
            raise FileNotFoundError(
                "the folder of a run stays where it is; received "
                f"{self._path!r}, which was moved or removed since train "
                "has begun. No checkpoint was written. Move it back, and "
                "train with resume='auto'.")

    @property
    def _length(self) -> int | None:
        """The batches of an epoch, of a list."""
        return len(self._train) if self._source is None \
            and isinstance(self._train, Sequence) else None

    @property
    def _data(self) -> Any:
        return self._train if self._source is not None else None

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
        steps = len(history["loss_per_step"])
        if self._at == (epochs, steps):
            return
        if not sizes:
            self._test_epoch = self._begun()
        world = self._replicas.span.world
        states, arrays = calls or ([], {})
        path = _path(self._path, steps)
        if world.is_main:
            self._check_there()
            _clear(path)
        checkpoint.write(path, self._replicas, self._trainer, self._data, {
            "epochs": epochs, "sizes": list(sizes), "history": history,
            "test_epoch": self._test_epoch, "batches": self._length,
            "accumulate": self._accumulate, "callbacks": states}, arrays)
        self._at = epochs, steps
        if world.is_main:
            self._passed = [old for old in self._passed if old != path]
            whole = [old for old in self._files()
                     if os.path.isfile(old) and old not in self._passed]
            for old in whole[self._keep:]:
                os.unlink(old)


def _path(folder: str, steps: int) -> str:
    return os.path.join(folder, f"step-{steps:08d}.safetensors")


def _named(folder: files.FilePath) -> str:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise (ValueError if folder == "" else TypeError)(
            "checkpoint_dir names a folder; received "
            f"{folder!r}. Pass a text, for example 'run', or a pathlib.Path.")
    return files.path_of(folder)


def _make(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            "checkpoint_dir names a folder, which is made if it is not "
            f"there; received {path!r}, and something else is in its place, "
            "or in that of a folder above it. Pass the name of a folder."
            ) from error


#: of the folders that this process holds
_descriptors: set[int] = set()


def _let_go() -> None:
    """A forked child may outlive the run, and holds no folder."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[int]:
    """A block for one run in a folder at a time, with the folder's
    descriptor. Where the process ends, the system ends it."""
    descriptor = os.open(path, os.O_RDONLY)
    _descriptors.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                "a run has a folder of its own; received "
                f"{path!r}, in which another training runs now. Wait for its "
                "end, or pass another checkpoint_dir.") from error
        except OSError:     # not every file system can
            pass
        yield descriptor
    finally:
        if descriptor in _descriptors:      # not in a forked child
            _descriptors.remove(descriptor)
            os.close(descriptor)


def _clear(path: str) -> None:
    """Make room for a checkpoint where no regular file is: the names in this
    folder are mgpu's. A folder moves aside."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.isdir(path):
        os.rename(path, f"{path}.{os.urandom(4).hex()}")
    elif os.path.exists(path) and not os.path.isfile(path):
        os.unlink(path)


def _steps(loop: Mapping[str, Any]) -> int:
    return len(loop["history"]["loss_per_step"])


def _check_loop(path: str | None, loop: Mapping[str, Any] | None,
                num_epochs: int, batches: int | None, accumulate: int
                ) -> None:
    if loop is None:
        raise CheckpointCorrupt(
            "train goes on from a checkpoint that train has written; "
            f"{path!r} is one of mgpu.save_checkpoint. Load it with "
            "mgpu.load_checkpoint, and use another checkpoint_dir.")
    if loop["epochs"] > num_epochs:
        raise ValueError(
            f"train goes on to epoch num_epochs; received {num_epochs} for a "
            f"checkpoint after {loop['epochs']}. Train further, or use "
            "another checkpoint_dir.")
    if loop.get("batches", batches) != batches:
        raise ValueError(
            "train goes on with the data that it has begun with; received "
            f"{_batches(batches)} for a checkpoint of {path!r}, whose run "
            f"had {_batches(loop['batches'])}. Pass the same data, or use "
            "another checkpoint_dir.")
    if loop.get("accumulate", 1) != accumulate:
        raise ValueError(
            "train goes on with steps of as many batches; received "
            f"accumulate={accumulate} for a checkpoint with "
            f"{loop.get('accumulate', 1)}. Pass the same, or use another "
            "checkpoint_dir.")


def _batches(count: int | None) -> str:
    return "no list of batches" if count is None \
        else f"a list of {count} batches"


def _check_drawn_once(data: Any, prefetch: int) -> None:
    if isinstance(data, Prefetched) and (
            prefetch or isinstance(data.data, Prefetched)):
        raise ValueError(
            "with checkpoint_dir one thread draws ahead, or the place in the "
            "data is lost; received mgpu.prefetch of "
            f"{type(data.data).__name__}, and prefetch={prefetch!r}. Pass "
            "the data itself with prefetch=, or mgpu.prefetch of it "
            "without.")


def _newest(found: Sequence[str], passed: list[str]
            ) -> tuple[str | None, checkpoint.Contents | None]:
    """The newest checkpoint that is whole; says which are not, and adds them
    to `passed`."""
    for i, path in enumerate(found):
        try:
            if not os.path.isfile(path):
                raise files.corrupt(path, "a checkpoint of train",
                                    ValueError("it is no regular file"))
            contents = checkpoint.read(path)
            loop = contents[0].get("loop")
            if loop is not None and path != _path(
                    os.path.dirname(path), _steps(loop)):
                raise CheckpointCorrupt(
                    "a checkpoint of train has the number of its steps in "
                    f"its name; received {path!r}, which is of "
                    f"{_steps(loop)} steps. Give it its name back, or "
                    "remove it.")
            return path, contents
        except CheckpointCorrupt as error:
            if i == len(found) - 1:
                raise
            passed.append(path)
            warnings.warn(f"{error} The run goes on from the checkpoint "
                          "before it.", RuntimeWarning, stacklevel=5)
    return None, None
