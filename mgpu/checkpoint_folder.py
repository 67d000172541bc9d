"""The checkpoints of one run of `train`, in a folder of their own."""
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mgpu import checkpoint, files
from mgpu.arguments import integer, one_of
from mgpu.datasets import BatchIterator
from mgpu.errors import CheckpointCorrupt
from mgpu.prefetching import Prefetched
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
                 keep: int, every: int | None) -> None:
        self._path = files.path_of(folder)
        self._replicas, self._trainer = replicas, trainer
        self._train, self._test = train_iter, test_iter
        self._source = source_of(train_iter)
        self._tested = source_of(test_iter)
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
        self._test_epoch = self._begun()

    def _begun(self) -> int | None:
        return None if self._tested is None else self._tested.epoch

    # -- going on -----------------------------------------------------------

    def open(self, resume: str | None, seed: int | None
             ) -> dict[str, Any] | None:
        """Where the run goes on, whose state is in place then; None: at its
        beginning. Inside of `World.telling`."""
        one_of("resume", resume, (None, "auto"))
        world, path, contents = self._replicas.span.world, None, None
        if world.is_main:
            os.makedirs(self._path, exist_ok=True)
            files.sweep(self._path)
            found = self._files()
            if found and resume is None:
                raise FileExistsError(
                    "a run has a folder of its own; received "
                    f"{self._path!r}, which holds {len(found)} checkpoints. "
                    "Pass resume='auto' to go on from the newest, or another "
                    "checkpoint_dir.")
            path, contents = _newest(found)
        path = world.gather("train: resume", path)[0]
        if path is None:
            return None
        loop = checkpoint.load(path, contents, self._replicas, self._trainer,
                               self._data, seed, "resume_seed=")
        if loop is None:
            raise CheckpointCorrupt(
                "train goes on from a checkpoint that train has written; "
                f"{path!r} is one of mgpu.save_checkpoint. Load it with "
                "mgpu.load_checkpoint.")
        if self._tested is not None and loop["test_epoch"] is not None:
            self._tested.epoch = self._test_epoch = loop["test_epoch"]
        self._at = loop["epochs"], len(loop["history"]["loss_per_step"])
        return loop

    def _files(self) -> list[str]:
        """The paths of all checkpoints, the newest first."""
        found = [(int(match[1]), name) for name in os.listdir(self._path)
                 if (match := _NAME.fullmatch(name))]
        return [os.path.join(self._path, name)
                for _, name in sorted(found, reverse=True)]

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
             sizes: Sequence[int]) -> None:
        """Write a checkpoint, after `epochs` and as many steps as `sizes`
        has. What there is already is not written again."""
        steps = len(history["loss_per_step"])
        if self._at == (epochs, steps):
            return
        if not sizes:
            self._test_epoch = self._begun()
        world = self._replicas.span.world
        path = os.path.join(self._path, f"step-{steps:08d}.safetensors")
        if world.is_main and os.path.islink(path):
            os.unlink(path)     # the names in this folder are mgpu's
        checkpoint.write(path, self._replicas, self._trainer, self._data, {
            "epochs": epochs, "sizes": list(sizes), "history": history,
            "test_epoch": self._test_epoch})
        self._at = epochs, steps
        if world.is_main:
            for old in self._files()[self._keep:]:
                os.unlink(old)


def _newest(found: Sequence[str]
            ) -> tuple[str | None, checkpoint.Contents | None]:
    """The newest checkpoint that is whole; says which are not."""
    for i, path in enumerate(found):
        try:
            return path, checkpoint.read(path)
        except CheckpointCorrupt as error:
            if i == len(found) - 1:
                raise
            warnings.warn(f"{error} The run goes on from the checkpoint "
                          "before it.", RuntimeWarning, stacklevel=5)
    return None, None


def source_of(data: Any) -> BatchIterator | None:
    """The `BatchIterator` behind `data`, if there is one."""
    source = data.data if isinstance(data, Prefetched) else data
    return source if isinstance(source, BatchIterator) else None
