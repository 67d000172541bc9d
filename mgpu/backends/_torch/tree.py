"""The modules of a network, their arrays, and the attributes that refer to
either."""
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import nn

from mgpu.backends import containers
from mgpu.backends._torch.names import NORMS
from mgpu.backends.base import STATISTICS

_INTERNAL = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
_HOOKS = frozenset(name for name in _INTERNAL if name.endswith("hooks"))
_PLAIN = _INTERNAL - _HOOKS
#: of a module, by name
TABLES = "_parameters", "_buffers", "_modules"
#: values that hold nothing
ATOMS = (int, float, bool, str, bytes, complex, type(None), type, torch.dtype,
         torch.device, torch.Size, types.BuiltinFunctionType)
#: types whose values each device has for itself
MUTABLE = (torch.Tensor, np.ndarray, bytearray, list, tuple, dict, set)
_UNSUPPORTED = {"ScriptModule", "DistributedDataParallel", "DataParallel",
                "FullyShardedDataParallel", "FSDPModule", "DTensor"}


def plain_network(net: nn.Module) -> nn.Module:
    """The module that `torch.compile` wraps, else `net`."""
    return getattr(net, "_orig_mod", net)


def made_more(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"forward of {type(module).__name__} made a layer or a parameter. "
        "Call the network once before it runs on several devices.")


def version(x: Any) -> Any:
    """What changes with the in-place writes that torch has counted, to a
    tensor or to those in a container, and with what a container holds."""
    if isinstance(x, torch.Tensor):
        return 0 if x.is_inference() else x._version
    found = containers.parts(x)
    return 0 if found is None else tuple(
        value if isinstance(value, ATOMS) else (_Same(value), version(value))
        for value in found[1])


class _Same:
    """Equal for the same object, whose id is not used again meanwhile."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self._x is other._x


class Contents:
    """What the tables of modules hold, to be compared with what they hold
    later."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._owners = modules
        self.read()

    def read(self) -> None:
        """Compare with what they hold now."""
        self._tables = [*map(vars, self._owners)]
        self._dicts = [x for table in self._tables for x in (
            table, *map(table.__getitem__, TABLES))]
        self._sizes = [*map(len, self._dicts)]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(dict.values, self._dicts))]

    def are_same(self) -> bool:
        """Whether all of them hold the same objects as before."""
        return all(map(is_, map(vars, self._owners), self._tables)) \
            and [*map(len, self._dicts)] == self._sizes \
            and [*chain.from_iterable(self._dicts)] == self._keys \
            and all(map(is_, chain.from_iterable(
                map(dict.values, self._dicts)), self._values))

    def before(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """What each module's ``__dict__`` and `TABLES` have held."""
        items = zip(self._keys, self._values)
        dicts = (dict(islice(items, size)) for size in self._sizes)
        return zip(*[dicts] * (1 + len(TABLES)), strict=True)


class Tree:
    """Modules and arrays that are reachable from a network. It may be used
    again while it `is_current`.

    Parameters
    ----------
    net : nn.Module

    Attributes
    ----------
    modules : list of nn.Module
        Each once; also those in plain lists, closures and bound methods.
    paths : list of str
        Of the first of them, which are registered.
    by_id : dict
        id -> module.
    compiled : bool
        Whether a module is.
    arrays : dict
        id -> parameter, buffer, or another tensor that requires a gradient.
    references, values : dict
        The keys are (id of a module, name): its attributes that refer to a
        module or to one of `arrays`, and others with mutable values.
    key : tuple
        Equal as long as the structure and the modes are.

    Raises
    ------
    TypeError
        A module that cannot be copied (ScriptModule, DDP, FSDP, DTensor).
    """

    def __init__(self, net: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.by_id: dict[int, nn.Module] = {}
        self._referring: dict[int, bool] = {}
        self._alive: list[Any] = []     # or ids would be used again
        #: what may come to hold other objects, with those that it holds
        self._inside: list[tuple[Any, list[Any]]] = []
        self._empty: list[dict[Any, Any]] = []      # of hooks
        self._tensors: list[torch.Tensor] = []
        self.arrays: dict[int, torch.Tensor] = {}
        self.references: dict[tuple[int, str], None] = {}
        self.values: dict[tuple[int, str], None] = {}
        self.paths = [path for path, _ in net.named_modules()]
        self._refers(net)
        for module in self.modules:     # which grow
            self._read_attributes(module)
        self.key = tuple((id(m), type(m), m.training) for m in self.modules)
        self._types = [*map(type, self.modules)]
        self.compiled = any(type(m).__name__ == "OptimizedModule"
                            or m._compiled_call_impl is not None
                            for m in self.modules)
        self._contents = Contents(self.modules)
        self._tensors += self.arrays.values()
        self._trained = [*map(_requires_grad, self._tensors)]

    def is_current(self) -> bool:
        """Whether a new tree of the network would be the same: all modules
        have the same attributes, and containers the same contents."""
        return self._contents.are_same() and not any(self._empty) \
            and [*map(type, self.modules)] == self._types \
            and [*map(_requires_grad, self._tensors)] == self._trained \
            and all(len(now := _opened(x)[0]) == len(held)
                    and all(map(is_, now, held)) for x, held in self._inside)

    def has_graphs(self) -> bool:
        """Whether it would keep the graph of an earlier pass alive."""
        return not all(x.is_leaf for x in self._tensors)

    def sizes(self) -> list[tuple[int, int]]:
        """How many parameters and layers each module has now."""
        return [(len(m._parameters), len(m._modules)) for m in self.modules]

    @functools.cached_property
    def statistics(self) -> list[torch.Tensor]:
        """The running statistics of norm layers."""
        return [x for module in self.modules if isinstance(module, NORMS)
                for name, x in module._buffers.items()
                if name in STATISTICS and x is not None]

    @functools.cached_property
    def of_norms(self) -> set[int]:
        """The ids of the buffers of norm layers."""
        return {id(x) for module in self.modules if isinstance(module, NORMS)
                for x in module._buffers.values()}

    def shares(self, x: Any) -> bool:
        """Whether an array in `x` has the memory of one of `arrays`."""
        found = [t for t in containers.arrays_in(
            x, lambda t: isinstance(t, torch.Tensor))
            if t.layout is torch.strided]
        return bool(found) and not {
            t.untyped_storage().data_ptr() for t in found}.isdisjoint(
            t.untyped_storage().data_ptr() for t in self.arrays.values()
            if t.layout is torch.strided)

    def _add(self, module: nn.Module) -> None:
        if id(module) in self.by_id:
            return
        arrays = [x for x in (*module._parameters.values(),
                              *module._buffers.values()) if x is not None]
        for one in (module, *module._modules.values(), *arrays):
            if _UNSUPPORTED & {cls.__name__ for cls in type(one).__mro__}:
                raise TypeError(
                    f"a {type(one).__name__} cannot be copied to several "
                    "devices. Pass the plain module.")
        self.modules.append(module)
        self.by_id[id(module)] = module
        self.arrays.update((id(x), x) for x in arrays)

    def _read_attributes(self, module: nn.Module) -> None:
        for name, x in module.__dict__.items():
            if name in _HOOKS and isinstance(x, dict) and not x:
                self._empty.append(x)
            elif isinstance(x, ATOMS) or name in _PLAIN:
                continue
            elif self._refers(x):
                self.references[id(module), name] = None
            elif isinstance(x, MUTABLE) and name not in _INTERNAL:
                self.values[id(module), name] = None

    def _refers(self, x: Any) -> bool:
        """Whether `x` leads to a module or to one of `arrays`; both are
        added."""
        if isinstance(x, ATOMS):
            return False
        if isinstance(x, nn.Module):
            for module in x.modules():
                self._add(module)
            return True
        if isinstance(x, torch.Tensor):
            self._tensors.append(x)
            if x.requires_grad:
                self.arrays.setdefault(id(x), x)
            return id(x) in self.arrays
        if id(x) not in self._referring:
            self._referring[id(x)] = False      # while it is read
            self._alive.append(x)
            held = _opened(x)[0]
            if held and not isinstance(x, (tuple, types.MethodType)) \
                    or isinstance(x, (set, types.FunctionType)) \
                    or containers.parts(x) == ([], []):
                self._inside.append((x, held))
            self._referring[id(x)] = any([self._refers(value)
                                          for value in held])
        return self._referring[id(x)]


_requires_grad = attrgetter("requires_grad")


def _opened(x: Any) -> tuple[list[Any], containers.Make | None]:
    return containers.opened(x, (nn.Module, torch.Tensor))


class Copies(dict[int, Any]):
    """Copies of objects, by the id of the object.

    Attributes
    ----------
    rebuilt : list
        The objects that `redirect` has rebuilt. They stay alive, or another
        object would get the id of one of them, and its copy.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        super().__init__(copies)
        self.rebuilt: list[Any] = []


def redirect(x: Any, copies: Copies) -> Any:
    """`x` with ``copies[id(y)]`` for each y that it leads to.

    Containers, partials, closures and bound methods are rebuilt where
    something in them changes, and added to `copies`; else `x` itself is
    returned.
    """
    if id(x) in copies:
        return copies[id(x)]
    if isinstance(x, (*ATOMS, torch.Tensor, nn.Module)):
        return x
    old, make = _opened(x)
    copies[id(x)] = x       # while it is read, for one that holds itself
    new = [redirect(value, copies) for value in old]
    if make is None or all(map(is_, new, old)):
        del copies[id(x)]
        return x
    copies[id(x)] = made = make(new)
    copies.rebuilt.append(x)
    return made
