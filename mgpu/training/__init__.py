"""A step, the loop around it, and what they are made of."""
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
