"""Weights and buffers in a safetensors file: `Replicas.save` and `load`."""
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mgpu.utils import files
from mgpu.utils.tensor_files import digest_of

if TYPE_CHECKING:
    from mgpu.training.replicas import Replicas

FORMAT = "mgpu weights 1"


#: endings that name another format than safetensors
_OTHER_FORMATS = (".bin", ".ckpt", ".h5", ".npy", ".npz", ".onnx", ".params",
                  ".pkl", ".pt", ".pt2", ".pth")


def check_ending(file: files.FilePath) -> None:
    """Raise ValueError where the name of a file to write says that it has
    another format than safetensors."""
    if files.path_of(file).lower().endswith(_OTHER_FORMATS):
        raise ValueError(
            "Replicas.save writes a safetensors file; got "
            f"{os.fspath(file)!r}. Use the ending .safetensors, or "
            "replicas.save_parameters for Gluon's .params; for .pt and .pth "
            "call torch.save(replicas.state_dict(), file).")


def save(replicas: "Replicas", file: files.FilePath) -> None:
    """See `Replicas.save`."""
    world = replicas.span.world
    with world.guard():
        check_ending(file)
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
        world.agree("Replicas.load", {
            name: digest_of(x) for name, x in values.items()
            } if world.size > 1 else {},
            "Let every rank read the same file.")
        write()


def read(file: files.FilePath) -> dict[str, np.ndarray]:
    """The arrays of any safetensors file but mgpu's others. OSError,
    CheckpointCorrupt, ValueError."""
    header, arrays = files.read_arrays(
        file, None, "a safetensors file", lambda *contents: contents)
    if header and header["format"] != FORMAT:
        raise ValueError(
            "Replicas.load reads weights, of Replicas.save or of other "
            f"programs; received {os.fspath(file)!r}, a file of "
            f"{header['format']!r}. Use mgpu.load_checkpoint or "
            "Trainer.load_states.")
    return arrays


def _under_own_names(replicas: "Replicas", values: Mapping[str, np.ndarray]
                     ) -> dict[str, np.ndarray]:
    """The weight and bias of a norm are gamma and beta here."""
    own = {p.name for p in replicas.all_parameters()}
    found = {}
    for name, x in values.items():
        for other, ending in (("weight", "gamma"), ("bias", "beta")):
            ours = name.removesuffix(other) + ending
            if name not in own and name.endswith(other) \
                    and ours in own - values.keys():
                name = ours
        found[name] = x
    return found
