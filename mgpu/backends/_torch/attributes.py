"""What a module is besides its arrays: layers, attributes, hooks."""
import copy
from collections.abc import Sequence
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

from mgpu.backends import messages
from mgpu.backends._torch.names import joined

# What reaches the copies by other ways, and what torch does not copy.
_ELSEWHERE = {"_parameters", "_buffers", "_modules", "training",
              "_compiled_call_impl"}
_LARGE = 1000       # a collection with more items is data
_PLAIN = {int, float, complex, bool, str, bytes, type(None), FunctionType}
_ARRAYS = object()


class Attributes:
    """Makes the copies of a module follow what the user changes of it.

    Attributes that hold tensors belong to each copy: a forward pass may
    have kept there what it computed from the rows of its device.

    Parameters
    ----------
    layers : list of list of nn.Module
        Those of the user's module, then those of each copy of it.
    """

    def __init__(self, layers: Sequence[list[nn.Module]]) -> None:
        self._first, *self._copies = layers
        self._members = _members(self._first)
        self._names = _names(self._first[0])
        self._known = [_Seen(m) for m in self._first]

    def follow(self) -> bool:
        """Give the copies the attributes and hooks that the module has.
        Returns whether that changed something."""
        changed = False
        for number, (layer, known) in enumerate(zip(self._first,
                                                    self._known)):
            if known.holds(layer):
                continue
            seen = self._known[number] = _Seen(layer)
            for name in {**known.content, **seen.content}:
                content = seen.content.get(name)
                if content is not _ARRAYS \
                        and known.content.get(name) != content:
                    changed = True
                    for copied in self._copies:
                        self._copy(name, number, copied)
        return changed

    def _copy(self, name: str, number: int, copied: list[nn.Module]) -> None:
        source, target = vars(self._first[number]), vars(copied[number])
        if name in source:
            twins: dict[int, Any] = {id(x): twin for x, twin in zip(
                _members(self._first), _members(copied))}
            target[name] = copy.deepcopy(source[name], twins)
        else:
            target.pop(name, None)

    def check_layers(self) -> None:
        """Refuse other layers, or other parameters, than there were."""
        members = _members(self._first)
        if len(members) == len(self._members) \
                and all(map(is_, members, self._members)):
            return
        now = _names(self._first[0])
        if now != self._names:
            raise messages.changed_layers(
                name for name in {**self._names, **now}
                if self._names.get(name) != now.get(name))
        self._members = members     # a parameter took another one's place


class _Seen:
    """The attributes of a layer, as they are now."""

    def __init__(self, layer: nn.Module) -> None:
        self._values = list(vars(layer).values())
        self.content = {name: _content(x) for name, x in vars(layer).items()
                        if name not in _ELSEWHERE}
        inner = [(vars(layer)[name], x) for name, x in self.content.items()
                 if type(vars(layer)[name]) not in _PLAIN]
        self._empty = [x for x, content in inner if content == []]
        self._filled = [(x, content) for x, content in inner
                        if content != [] and content is not _ARRAYS]

    def holds(self, layer: nn.Module) -> bool:
        """Whether `layer` has these attributes; quick."""
        values = vars(layer).values()
        return len(values) == len(self._values) \
            and all(map(is_, values, self._values)) \
            and not any(self._empty) \
            and all(_content(x) == content for x, content in self._filled)


def _members(layers: Sequence[nn.Module]) -> list[Any]:
    found: list[Any] = []
    for m in layers:
        found += [m, type(m), *m._modules.values(), *m._parameters.values()]
    return found


def _names(net: nn.Module) -> dict[str, Any]:
    """By name: each layer, and which parameter is one with which."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        found[path] = (module, type(module))
        for name, p in module._parameters.items():
            if p is not None:
                full = joined(path, name)
                found[full] = first.setdefault(id(p), full)
    return found


def _content(x: Any, inside: bool = False) -> Any:
    """What is another one when the user has changed `x`."""
    if type(x) in _PLAIN:
        return x
    if isinstance(x, torch.Tensor):
        return _ARRAYS
    if isinstance(x, (dict, list, tuple, set)) and len(x) <= _LARGE:
        content = [(key, _content(x[key], inside)) for key in x] \
            if isinstance(x, dict) else [_content(item, inside) for item in x]
        values = [c for _, c in content] if isinstance(x, dict) else content
        return _ARRAYS if _ARRAYS in values else content
    if inside or isinstance(x, (type, nn.Module)) \
            or not hasattr(x, "__dict__"):
        return id(x), x     # never asks x whether it equals another one
    content = _content(vars(x), True)
    return _ARRAYS if content is _ARRAYS else (id(x), x, content)
