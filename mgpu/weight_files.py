"""Weights and buffers in a safetensors file: `Replicas.save` and `load`."""
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mgpu import files, tensor_files

if TYPE_CHECKING:
    from mgpu.replicas import Replicas

FORMAT = "mgpu weights 1"


def save(replicas: "Replicas", file: files.FilePath) -> None:
    """See `Replicas.save`."""
    world = replicas.span.world
    with world.guard():
        files.path_of(file)
        values = replicas.export_numpy()
        if world.is_main:
            files.write_arrays(file, {"format": FORMAT,
                                      "engine": replicas.backend.name},
                               values)
        world.gather("Replicas.save")


def load(replicas: "Replicas", file: files.FilePath) -> None:
    """See `Replicas.load`."""
    world = replicas.span.world
    with world.guard():
        values = _under_own_names(replicas, read(file))
        write = replicas.fit_numpy(values)
        digest = hashlib.sha256()
        for name in sorted(values) if world.size > 1 else ():
            digest.update(f"{name} {values[name].shape}".encode())
            digest.update(np.ascontiguousarray(values[name]).tobytes())
        world.agree("Replicas.load", {"values": digest.hexdigest()},
                    "Let every rank read the same file.")
        write()


def read(file: files.FilePath) -> dict[str, np.ndarray]:
    """The arrays of any safetensors file but mgpu's others. OSError,
    CheckpointCorrupt, ValueError."""
    with files.opened(file) as stream:
        try:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("it is no regular file")
            header, arrays = tensor_files.read_any(stream, about.st_size)
        except Exception as error:
            raise files.corrupt(file, "a safetensors file", error) from error
    if header and header["format"] != FORMAT:
        raise ValueError(
            "Replicas.load reads weights, of Replicas.save or of other "
            f"programs; received {os.fspath(file)!r}, which is a file of "
            f"{json.dumps(header['format'])}. Use mgpu.load_checkpoint or "
            "Trainer.load_states.")
    return arrays


def _under_own_names(replicas: "Replicas", values: Mapping[str, np.ndarray]
                     ) -> dict[str, np.ndarray]:
    """The weight and bias of a norm are gamma and beta here."""
    free = {p.name for p in replicas.all_parameters()} - values.keys()
    own = {p.name for p in replicas.all_parameters()}
    found = {}
    for name, x in values.items():
        for other, ending in (("weight", "gamma"), ("bias", "beta")):
            ours = name.removesuffix(other) + ending
            if name not in own and name.endswith(other) and ours in free:
                name = ours
        found[name] = x
    return found


