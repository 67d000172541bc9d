"""Attributes with an entry for each example of an earlier batch."""
from typing import Any

from mgpu.backends import containers

#: attributes for the form of an array, in both frameworks
_FORM = {"context", "ctx", "device", "dim", "dtype", "ndim", "numel", "shape",
         "size"}
_OPERATIONS = (
    "__getitem__ __setitem__ __iter__ __bool__ __float__ __int__ __array__ "
    "__neg__ __abs__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__").split() + [
        f"__{side}{name}__" for side in ("", "r", "i") for name in (
            "add sub mul matmul truediv floordiv mod pow").split()]


class OtherBatch:
    """Placeholder for an attribute array that belongs to a batch of another
    size.

    The array has an entry for each example of an earlier batch, so the part
    of a device cannot be determined. The placeholder has the shape and dtype
    of the array. Access to the values raises RuntimeError.

    Parameters
    ----------
    array : native array
    name : str
        Name of the attribute.
    """

    def __init__(self, array: Any, name: str) -> None:
        vars(self).update(_original=array, _text=(
            f"the attribute {name} has an entry for each example of an "
            f"earlier batch, of shape {tuple(array.shape)}; this batch has "
            "another size. Reset the attribute before it, or use batches of "
            "one size (drop_last=True)."))

    @property       # type: ignore[misc]
    def __class__(self) -> Any:     # for isinstance
        return type(self._original)

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        if name == "detach":
            return lambda: self
        if name not in _FORM:
            self._raise()
        return getattr(self._original, name)

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
