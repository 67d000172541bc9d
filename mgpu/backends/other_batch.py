"""Attributes with an entry for each example of an earlier batch."""
import math
from collections.abc import Callable
from typing import Any

from mgpu.backends import containers

_OPERATIONS = (
    "__getitem__ __setitem__ __iter__ __bool__ __float__ __int__ __array__ "
    "__neg__ __abs__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__").split() + [
        f"__{side}{name}__" for side in ("", "r", "i") for name in (
            "add sub mul matmul truediv floordiv mod pow").split()]


class OtherBatch:
    """Placeholder for an attribute array that belongs to a batch of another
    size.

    The array has an entry for each example of an earlier batch, so the part
    of a device cannot be determined. The placeholder has the dtype of the
    array and the shape of a part whose size differs from the device's part
    of this batch as the sizes of the batches do: a comparison of sizes gives
    the answer of one device. Access to the values raises RuntimeError.

    Parameters
    ----------
    array : native array
    name : str
        Name of the attribute.
    shape : tuple of int
    device : native device
    """

    def __init__(self, array: Any, name: str, shape: tuple[int, ...],
                 device: Any) -> None:
        shape = type(array.shape)(shape)
        vars(self).update(
            _original=array, shape=shape, dtype=array.dtype, ndim=len(shape),
            device=device, context=device, ctx=device, size=math.prod(shape),
            _text=f"the attribute {name} has an entry for each example of an "
            f"earlier batch, of shape {tuple(array.shape)}; this batch has "
            "another size. Reset the attribute before it, or use batches of "
            "one size (drop_last=True).")
        if callable(array.size):        # a method in torch
            vars(self).update(
                size=lambda dim=None: shape if dim is None else shape[dim],
                dim=lambda: len(shape), numel=lambda: math.prod(shape))

    @property       # type: ignore[misc]
    def __class__(self) -> Any:     # for isinstance
        return type(self._original)

    def __len__(self) -> int:
        return int(self.shape[0])

    def detach(self) -> Any:
        """The same placeholder."""
        return self

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        self._raise()

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(self._text)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        containers.arrays_in((args, kwargs), cls._is_one)[0]._raise()

    @classmethod
    def _is_one(cls, x: Any) -> bool:
        return type(x) is cls


for _name in _OPERATIONS:
    setattr(OtherBatch, _name, OtherBatch._raise)


def of_other_batch(x: Any, part: Any, is_array: Callable[[Any], bool],
                   name: str, sizes: tuple[int, int, int], device: Any) -> Any:
    """`x` with placeholders for its arrays. `part` is the device's part of it;
    `sizes` are the numbers of examples in `x`, in the present batch, and in
    the device's part of that."""
    old, new, own = sizes
    axes = containers.differing_axes(x, part, is_array)

    def placeholder(array: Any) -> OtherBatch:
        shape, axis = list(array.shape), next(axes, None)
        if axis is not None:
            shape[axis] = max(own + old - new, 0)
        return OtherBatch(array, name, tuple(shape), device)
    return containers.replace(x, is_array, placeholder)
