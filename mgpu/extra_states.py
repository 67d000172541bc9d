"""What layers add to the state of a network, and what callbacks keep, as JSON
and arrays: no pickle."""
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends.base import Backend
from mgpu.device import Device

_PLAIN = {type(None), bool, int, float, str}
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_TABLES: dict[str, Any] = {
    "dict": dict, "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs))}


def pack(states: Mapping[str, Sequence[Any]], backend: Backend
         ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What fits JSON, and the arrays. `states`: by name, the state on each
    device. ValueError for what is neither, with its name."""
    header: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, every in states.items():
        packed = []
        for state in every:
            own: list[np.ndarray] = []
            packed.append((pack_one(state, own, backend, (
                "the extra state of a layer", repr(name),
                "get_extra_state")), own))
        bits = {(json.dumps(tree), *((str(x.dtype), x.shape, x.tobytes())
                                     for x in own)) for tree, own in packed}
        header[name] = []
        for i, (tree, own) in enumerate(packed[:1] if len(bits) == 1
                                        else packed):
            header[name].append(tree)
            arrays |= {f"{name}|{i}|{n}": x for n, x in enumerate(own)}
    return header, arrays


def pack_one(x: Any, arrays: list[np.ndarray], backend: Backend,
             words: tuple[str, str, str]) -> Any:
    """What fits JSON of one state; its arrays are added to `arrays`. `words`
    of a refusal: what the state is, whose, and the method that gave it."""
    def inner(part: Any) -> Any:
        return pack_one(part, arrays, backend, words)

    kind = type(x).__name__
    if type(x) in _PLAIN:
        return x
    if isinstance(x, np.str_):
        return str(x)
    if type(x) in (list, tuple):
        return [kind, [inner(part) for part in x]]
    if type(x) in (dict, OrderedDict, Counter):
        return [kind, [[inner(key), inner(part)] for key, part in x.items()]]
    if backend.is_native(x):
        found = backend.to_numpy(x)
        if found.dtype.name in messages.DTYPES:
            arrays.append(found)
            # torch.float64, or MXNet's <class 'numpy.float64'>
            dtype = str(x.dtype).rpartition(".")[2].rstrip("'>")
            return ["native", len(arrays) - 1, dtype]
    elif isinstance(x, (np.generic, np.ndarray, bytes)) \
            and not isinstance(x, np.ma.MaskedArray):
        found = np.frombuffer(x, np.uint8) if type(x) is bytes \
            else np.array(x)
        if found.dtype.kind in "biuf":
            arrays.append(found)
            return [kind if isinstance(x, bytes) else
                    "scalar" if isinstance(x, np.generic) else "array",
                    len(arrays) - 1]
    of, whose, method = words
    raise ValueError(
        f"a checkpoint holds no pickle, so {of} is made of numbers, text, "
        "arrays of numbers, and lists, tuples and dicts of them; received "
        f"{type(x).__module__}.{type(x).__qualname__} in {whose}. Let "
        f"{method} return what it consists of.")


def unpack(header: Mapping[str, Sequence[Any]],
           arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """By name, the state on each device, or the one of all, for `build`. An
    Exception for what `pack` cannot have packed."""
    found = {name: [resolve(tree, f"{name}|{i}|", arrays)
                    for i, tree in enumerate(trees)]
             for name, trees in header.items()}
    for every in found.values():
        for tree in every:
            build(tree, None, None)
    return found


def resolve(tree: Any, prefix: str, arrays: Mapping[str, np.ndarray]
              ) -> Any:
    """A tree of `pack_one` with its arrays, which have names with `prefix`,
    for `build`."""
    if type(tree) in _PLAIN:
        return tree
    kind, content, *dtype = tree
    if kind in _LISTS:
        return [kind, [resolve(x, prefix, arrays) for x in content]]
    if kind in _TABLES:
        return [kind, [[resolve(x, prefix, arrays) for x in pair]
                       for pair in content]]
    return [kind, arrays[f"{prefix}{content}"], *dtype]


def build(tree: Any, backend: Backend | None, device: Device | None) -> Any:
    """A state of `unpack` anew, its native arrays on `device` (None: as NumPy
    arrays)."""
    if type(tree) in _PLAIN:
        return tree
    kind, content, *dtype = tree
    if kind in _LISTS:
        return _LISTS[kind](build(x, backend, device) for x in content)
    if kind in _TABLES:
        return _TABLES[kind]((build(key, backend, device),
                              build(x, backend, device))
                             for key, x in content)
    if kind == "bytes":
        return content.tobytes()
    if kind == "scalar":
        return content[()]
    if kind == "array":
        return content.copy()
    if kind != "native":
        raise ValueError(f"a state of the kind {kind!r}")
    return content if backend is None else \
        backend.put(content, device, dtype=dtype[0])
