"""Modules of a network, their arrays, and attributes that refer to them."""
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
from mgpu.backends.network import STATISTICS

_INTERNAL = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
_HOOKS = frozenset(name for name in _INTERNAL if name.endswith("hooks"))
_PLAIN = _INTERNAL - _HOOKS
#: tables of a module
TABLES = "_parameters", "_buffers", "_modules"
#: types without references
ATOMS = (int, float, bool, str, bytes, complex, type(None), type, torch.dtype,
         torch.device, torch.Size, types.BuiltinFunctionType)
#: types of attributes with a value for each device
MUTABLE = (torch.Tensor, np.ndarray, bytearray, list, tuple, dict, set)
_UNSUPPORTED = {"ScriptModule", "DistributedDataParallel", "DataParallel",
                "FullyShardedDataParallel", "FSDPModule", "DTensor"}


def plain_network(net: nn.Module) -> nn.Module:
    """The module wrapped by `torch.compile`, or `net`."""
    return getattr(net, "_orig_mod", net)


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def made_more(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"forward of {type(module).__name__} made a layer or a parameter. "
        "Call the network once before it runs on several devices.")


def version(x: Any) -> Any:
    """A value that changes with in-place writes, counted by torch, to `x` or
    tensors in it, and with the contents of containers."""
    if isinstance(x, torch.Tensor):
        return 0 if x.is_inference() else x._version
    found = containers.parts(x)
    return 0 if found is None else tuple(
        value if isinstance(value, ATOMS) else (_Same(value), version(value))
        for value in found[1])


class _Same:
    """Compares equal for the same object, which it keeps alive."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self._x is other._x


class Contents:
    """Snapshot of the contents of modules' tables, for later comparison."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._owners = modules
        self.read()

    def read(self) -> None:
        """Take a new snapshot."""
        self._tables = [*map(vars, self._owners)]
        self._dicts = [x for table in self._tables for x in (
            table, *map(table.__getitem__, TABLES))]
        self._sizes = [*map(len, self._dicts)]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(dict.values, self._dicts))]

    def are_same(self) -> bool:
        """Whether all tables hold the same objects as in the snapshot."""
        return all(map(is_, map(vars, self._owners), self._tables)) \
            and [*map(len, self._dicts)] == self._sizes \
            and [*chain.from_iterable(self._dicts)] == self._keys \
            and all(map(is_, chain.from_iterable(
                map(dict.values, self._dicts)), self._values))

    def before(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """The ``__dict__`` and `TABLES` of each module in the snapshot."""
        items = zip(self._keys, self._values)
        dicts = (dict(islice(items, size)) for size in self._sizes)
        return zip(*[dicts] * (1 + len(TABLES)), strict=True)


class Tree:
    """Modules and arrays reachable from a network. Valid while it
    `is_current`.

    Parameters
    ----------
    net : nn.Module

    Attributes
    ----------
    modules : list of nn.Module
        Without duplicates; includes those in plain lists, closures and bound
        methods.
    paths : list of str
        Paths of registered modules, which come first.
    by_id : dict
        id -> module.
    compiled : bool
        Whether a module is compiled.
    arrays : dict
        id -> parameter, buffer, or another tensor that requires a gradient.
    references, values : dict
        Keys (id of a module, name) of attributes that refer to a module or to
        one of `arrays`, and of others with mutable values.
    key : tuple
        Equal for equal structures and modes.

    Raises
    ------
    TypeError
        A module cannot be copied (ScriptModule, DDP, FSDP, DTensor).
    """

    def __init__(self, net: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.by_id: dict[int, nn.Module] = {}
        self._referring: dict[int, bool] = {}
        self._alive: list[Any] = []     # so that ids are not reused
        #: mutable objects with references, and these references
        self._inside: list[tuple[Any, list[Any]]] = []
        self._empty: list[dict[Any, Any]] = []      # tables of hooks
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
        """Whether the tree is up to date: all modules have the same
        attributes, and containers the same contents."""
        return self._contents.are_same() and not any(self._empty) \
            and [*map(type, self.modules)] == self._types \
            and [*map(_requires_grad, self._tensors)] == self._trained \
            and all(len(now := _opened(x)[0]) == len(held)
                    and all(map(is_, now, held)) for x, held in self._inside)

    def has_graphs(self) -> bool:
        """Whether the tree keeps the graph of an earlier pass alive."""
        return not all(x.is_leaf for x in self._tensors)

    def sizes(self) -> list[tuple[int, int]]:
        """Current numbers of parameters and children of each module."""
        return [(len(m._parameters), len(m._modules)) for m in self.modules]

    @functools.cached_property
    def statistics(self) -> list[torch.Tensor]:
        """Running statistics of norm layers."""
        return [x for module in self.modules if isinstance(module, NORMS)
                for name, x in module._buffers.items()
                if name in STATISTICS and x is not None]

    @functools.cached_property
    def of_norms(self) -> set[int]:
        """The ids of the statistics and counters of norm layers."""
        return {id(x) for module in self.modules if isinstance(module, NORMS)
                for name, x in module._buffers.items()
                if name in (*STATISTICS, "num_batches_tracked")}

    @functools.cached_property
    def buffers_on_cpu(self) -> set[int]:
        """The ids of the dense buffers on the CPU, except `of_norms`."""
        return {key for key, x in self.arrays.items()
                if not x.requires_grad and not isinstance(x, nn.Parameter)
                and x.device.type == "cpu" and x.layout is torch.strided
                } - self.of_norms

    def shares(self, x: Any) -> bool:
        """Whether an array in `x` shares memory with one of `arrays`."""
        found = [t for t in containers.arrays_in(x, is_tensor)
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
        """Whether `x` refers to a module or to one of `arrays`, directly or
        not. Adds both."""
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
    """Copies of objects, by id of the object.

    Attributes
    ----------
    rebuilt : list
        Objects rebuilt by `redirect`, kept alive so that their ids are not
        reused.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        super().__init__(copies)
        self.rebuilt: list[Any] = []


def redirect(x: Any, copies: Copies) -> Any:
    """Replace each reference y in `x` by ``copies[id(y)]``.

    Containers, partials, closures and bound methods are rebuilt if a
    reference changes, and added to `copies`; otherwise `x` is returned.
    """
    if id(x) in copies:
        return copies[id(x)]
    if isinstance(x, (*ATOMS, torch.Tensor, nn.Module)):
        return x
    old, make = _opened(x)
    copies[id(x)] = x       # for self-references
    new = [redirect(value, copies) for value in old]
    if make is None or all(map(is_, new, old)):
        del copies[id(x)]
        return x
    copies[id(x)] = made = make(new)
    copies.rebuilt.append(x)
    return made
