"""Networks on several devices, training steps, training loops, evaluation."""
from typing import TYPE_CHECKING

from mgpu.utils.moved import attributes_of

if TYPE_CHECKING:
    from mgpu.errors import NonFiniteLoss
    from mgpu.training.functions import (attach_grad, backward, grad, no_grad,
                                         parallel, put, record, seed, sgd,
                                         to_numpy)
    from mgpu.training.history import History
    from mgpu.training.loop import train, train_epochs
    from mgpu.training.step import train_batch

__all__ = ["History", "NonFiniteLoss", "attach_grad", "backward", "grad",
           "no_grad", "parallel", "put", "record", "seed", "sgd", "to_numpy",
           "train", "train_batch", "train_epochs"]

# Not loaded with the package: its modules need each other.
__getattr__ = attributes_of(__name__, dict.fromkeys(__all__, "mgpu._api"))
