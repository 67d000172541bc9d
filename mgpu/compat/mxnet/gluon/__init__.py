"""``gluon``: `Trainer`, losses and data of mgpu; blocks and layers are MXNet's
own."""
from typing import Any

from mgpu.backends import mxnet_compat
from mgpu.compat.mxnet import metric
from mgpu.compat.mxnet.gluon import data, loss, utils
from mgpu.compat.mxnet.modules import module, missing
from mgpu.training.parameters import Parameter
from mgpu.training.trainer import Trainer

__all__ = ["Parameter", "Trainer", "data", "loss", "metric", "utils"]

_BLOCKS = ("Block", "HybridBlock", "SymbolBlock")


def __getattr__(name: str) -> Any:
    if name in _BLOCKS:
        return getattr(mxnet_compat().gluon, name)
    return module(__name__, name) or missing(__name__)(name)
