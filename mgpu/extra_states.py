"""What layers add to the state of a network, as JSON and arrays: no pickle."""
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mgpu.backends import messages
from mgpu.backends.base import Backend
from mgpu.device import Device

_PLAIN = {type(None), bool, int, float, str}
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_TABLES: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}


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
            packed.append((_packed(state, name, own, backend), own))
        bits = {(json.dumps(tree), *((str(x.dtype), x.shape, x.tobytes())
                                     for x in own)) for tree, own in packed}
        header[name] = []
        for i, (tree, own) in enumerate(packed[:1] if len(bits) == 1
                                        else packed):
            header[name].append(tree)
            arrays |= {f"{name}|{i}|{n}": x for n, x in enumerate(own)}
    return header, arrays


def _packed(x: Any, name: str, arrays: list[np.ndarray], backend: Backend
            ) -> Any:
    def inner(part: Any) -> Any:
        return _packed(part, name, arrays, backend)

    kind = type(x).__name__
    if type(x) in _PLAIN:
        return x
    if type(x) is _LISTS.get(kind):
        return [kind, [inner(part) for part in x]]
    if type(x) is _TABLES.get(kind):
        return [kind, [[inner(key), inner(part)] for key, part in x.items()]]
    if backend.is_native(x):
        found = backend.to_numpy(x)
        if found.dtype.name in messages.DTYPES:
            arrays.append(found)
            dtype = str(x.dtype).rpartition(".")[2]
            return ["native", len(arrays) - 1, dtype]
    elif isinstance(x, (np.generic, np.ndarray, bytes)):
        found = np.frombuffer(x, np.uint8) if type(x) is bytes \
            else np.array(x)
        if found.dtype.kind in "biuf":
            arrays.append(found)
            return [kind if isinstance(x, bytes) else
                    "scalar" if isinstance(x, np.generic) else "array",
                    len(arrays) - 1]
    raise ValueError(
        "a checkpoint holds no pickle, so the extra state of a layer is made "
        "of numbers, text, arrays of numbers, and lists, tuples and dicts of "
        f"them; received {type(x).__module__}.{type(x).__qualname__} in "
        f"{name!r}. Let get_extra_state return what it consists of.")


def unpack(header: Mapping[str, Sequence[Any]],
           arrays: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """By name, the state on each device, or the one of all, for `build`. An
    Exception for what `pack` cannot have packed."""
    found = {name: [_resolved(tree, f"{name}|{i}|", arrays)
                    for i, tree in enumerate(trees)]
             for name, trees in header.items()}
    for every in found.values():
        for tree in every:
            build(tree, None, None)
    return found


def _resolved(tree: Any, prefix: str, arrays: Mapping[str, np.ndarray]
              ) -> Any:
    if type(tree) in _PLAIN:
        return tree
    kind, content, *dtype = tree
    if kind in _LISTS:
        return [kind, [_resolved(x, prefix, arrays) for x in content]]
    if kind in _TABLES:
        return [kind, [[_resolved(x, prefix, arrays) for x in pair]
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
