"""``autograd``: recording and backward passes."""
from typing import Any

import mgpu
from mgpu.compat.mxnet.arrays import Rows
from mgpu.compat.mxnet.modules import missing
from mgpu.training.functions import no_grad as pause, record

__all__ = ["backward", "pause", "record"]
__getattr__ = missing(__name__)


def backward(heads: Any) -> None:
    """`mgpu.backward` of losses: `Rows`, a list of them, whose sum counts, or
    a list of native arrays."""
    every = heads if isinstance(heads, (list, tuple)) else [heads]
    mgpu.backward([x for one in every for x in (
        one.shards if isinstance(one, Rows) else [one])])
