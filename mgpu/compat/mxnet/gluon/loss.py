"""``gluon.loss``: the losses of `mgpu.losses`, which take `Rows` too."""
from typing import Any

import numpy as np

import mgpu
from mgpu.compat.mxnet.arrays import NUMBERS, Rows
from mgpu.compat.mxnet.modules import missing
from mgpu.data.nested import shards_of
from mgpu.nn import losses

__getattr__ = missing(__name__)


def _over_devices(loss: type[losses.Loss]) -> type[losses.Loss]:
    """`loss`, which takes `Rows` too, and returns `Rows` for them."""
    class OverDevices(loss):        # type: ignore[valid-type, misc]
        def __call__(self, *arrays: Any, **named: Any) -> Any:
            given = [*arrays, *named.values()]
            one = next((x for x in given if isinstance(x, Rows)), None)
            of_one = super().__call__
            if one is None:
                return of_one(*arrays, **named)

            def on_one(*row: Any) -> Any:
                return of_one(*row[:len(arrays)],
                              **dict(zip(named, row[len(arrays):])))
            return one.like(mgpu.parallel(on_one, *(
                _column(x, len(one.shards)) for x in given)))

    OverDevices.__name__ = OverDevices.__qualname__ = loss.__name__
    OverDevices.__doc__ = loss.__doc__
    return OverDevices


def _column(x: Any, count: int) -> list[Any]:
    """An entry for each of `count` devices, of an argument beside `Rows`."""
    if isinstance(x, Rows) or isinstance(x, list) and all(
            one is None or hasattr(one, "shape") for one in x):
        return shards_of(x)
    if x is None or isinstance(x, NUMBERS) \
            or isinstance(x, np.ndarray) and x.shape[:1] == (1,):
        return [x] * count      # the same for all rows
    raise TypeError(
        "beside a batch on its contexts a loss takes other batches, numbers, "
        "and NumPy arrays of one row; received "
        f"{type(x).__name__} of shape {tuple(np.shape(x))}. Put what has a "
        "value for each row on the contexts: x.as_in_context(ctx); give the "
        "rest a first axis of 1.")


globals().update({
    name: _over_devices(cls) for name, cls in vars(losses).items()
    if isinstance(cls, type) and issubclass(cls, losses.Loss)
    and cls is not losses.Loss})
