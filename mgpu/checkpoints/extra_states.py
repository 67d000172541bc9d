"""Python values as JSON and arrays, without pickle: what layers add to the
state of a network, and what callbacks keep."""
from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from mgpu.backends import Backend
from mgpu.backends.device import Device

_PLAIN = {type(None), bool, int, float, str}
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_TABLES: dict[str, Any] = {
    "dict": dict, "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs))}


def pack(value: Any, arrays: dict[str, np.ndarray], prefix: str,
         backend: Backend, words: tuple[str, str, str]) -> Any:
    """What fits JSON of `value`; its arrays are added to `arrays`, under
    names that begin with `prefix`. ValueError for other kinds of values;
    `words` for it: what the value is, whose, and the method that gave it."""
    numbers = count()

    def tree(x: Any) -> Any:
        kind, found, dtype = type(x).__name__, None, []
        if type(x) in _PLAIN:
            return x
        if isinstance(x, np.str_):
            return str(x)
        if type(x) in (list, tuple):
            return [kind, [*map(tree, x)]]
        if type(x) in (dict, OrderedDict, Counter):
            return [kind, [[tree(key), tree(part)]
                           for key, part in x.items()]]
        if backend.is_native(x):
            kind, found = "native", backend.to_numpy(x)
            # torch.float64, or MXNet's <class 'numpy.float64'>
            dtype = [str(x.dtype).rpartition(".")[2].rstrip("'>")]
        elif type(x) is bytes:
            found = np.frombuffer(x, np.uint8)
        elif isinstance(x, (np.generic, np.ndarray)) \
                and not isinstance(x, np.ma.MaskedArray):
            kind = "scalar" if isinstance(x, np.generic) else "array"
            found = np.array(x)
        if found is None or found.dtype.kind not in "biuf":
            of, whose, method = words
            raise ValueError(
                f"a checkpoint holds no pickle, so {of} is made of numbers, "
                "text, arrays of numbers, and lists, tuples and dicts of "
                f"them; received {type(x).__module__}."
                f"{type(x).__qualname__} in {whose}. Let {method} return "
                "what it consists of.")
        number = next(numbers)
        arrays[f"{prefix}{number}"] = found
        return [kind, number, *dtype]
    return tree(value)


def unpack(tree: Any, arrays: Mapping[str, np.ndarray], prefix: str,
           backend: Backend | None = None, device: Device | None = None
           ) -> Any:
    """The value of `pack`, its native arrays on `device` (without `backend`:
    as NumPy arrays). An Exception for what `pack` does not make."""
    def value(tree: Any) -> Any:
        if type(tree) in _PLAIN:
            return tree
        kind, content, *dtype = tree
        if kind in _LISTS:
            return _LISTS[kind](map(value, content))
        if kind in _TABLES:
            return _TABLES[kind]((value(key), value(x)) for key, x in content)
        x = arrays[f"{prefix}{content}"]
        if kind == "native":
            return x if backend is None \
                else backend.put(x, device, dtype=dtype[0])
        kinds: dict[str, Any] = {"bytes": np.ndarray.tobytes,
                                 "scalar": lambda x: x[()],
                                 "array": np.ndarray.copy}
        return kinds[kind](x)
    return value(tree)
