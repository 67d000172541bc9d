"""Checkpoints of a training, and files of weights and trainer states."""
from typing import TYPE_CHECKING

from mgpu.utils.moved import attributes_of

if TYPE_CHECKING:
    from mgpu.checkpoints.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]

# Not loaded with the package: replicas need its other modules.
__getattr__ = attributes_of(__name__, {
    name: "mgpu.checkpoints.checkpoint" for name in __all__})
