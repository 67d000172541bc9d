"""What a module is besides its arrays: layers, attributes, hooks."""
import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import graph
from torch.nn.parameter import is_lazy

from mgpu.backends import messages
from mgpu.backends._kept import (deep_copy, forward_hooks, global_names,
                                 pickled, reached, version)
from mgpu.backends._torch.names import joined
from mgpu.backends._torch.places import (Places, Unknown, is_trained,
                                         unread)

# What reaches the copies by other ways, and what torch does not copy.
_ELSEWHERE = {"_parameters", "_buffers", "_modules", "training",
              "_compiled_call_impl"}
_LARGE = 1000       # a collection with more items is data
_MANY, _DEEP = 5000, 50     # objects in one attribute, one in the other
_PLAIN = {int, float, complex, bool, str, bytes, type(None), FunctionType}
_ARRAYS, _BUFFER = object(), object()
# Collections of torch's own layers, which no pass changes in place.
_OF_TORCH = {"_non_persistent_buffers_set", "_reversed_padding_repeated_twice",
             "_flat_weights", "_flat_weights_names", "_all_weights"}
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_OF_MODULE = set(vars(nn.Module()))
_WEAK: tuple[type, ...] = (weakref.ref, *weakref.ProxyTypes)
# Attributes of the user's may have names that end so, too.
_TABLES = {name for name in _OF_MODULE if name.endswith("_hooks")}


class Attributes:
    """Makes the copies of a module follow what the user changes of it.

    Attributes in which forward passes keep tensors belong to each copy: what
    is there was computed from the rows of its device. Passes are told by
    that they put tensors into the copies too; a user puts them only into the
    module.

    Parameters
    ----------
    layers : list of list of nn.Module
        Those of the user's module, then those of each copy of it.
    """

    def __init__(self, layers: Sequence[list[nn.Module]]) -> None:
        self._first, *self._copies = layers
        self._members = _members(self._first)
        self._names = _names(self._first[0])
        #: (number of the layer, name): those in which passes keep tensors
        self._kept: set[tuple[int, str]] = set()
        self._places = Places(layers, _OF_MODULE)
        #: see `Places.shared`
        self.shared = self._places.shared
        self.check_shared = self._places.check_shared
        self._before: list[dict[str, Any]] = []     # see `begin_lag`
        #: to be called when a pass of the module has ended
        self.leave = self._places.leave
        self.untold = self._places.untold
        self.settle()
        #: buffers that passes have not made, which follow by themselves
        self._ready = [{name for name, b in m._buffers.items()
                          if b is not None} for m in self._first]

    @unread
    def shapes(self, module: nn.Module) -> list[tuple[str, torch.Size]]:
        """Of the tensors in attributes of the layers of a copy."""
        return [(joined(path, name), t.shape)
                for path, m in module.named_modules()
                for name, x in vars(m).items() if name not in _OF_MODULE
                for t in reached(x, torch.Tensor, nn.Module)]

    @unread
    def settle(self) -> None:
        """What the copies have is what they are to have."""
        met: dict[int, Any] = {}
        self._places.settle()
        self._known = [_Seen(m, met) for m in self._first]
        self._in_copies = list(map(self._of_copies, range(len(self._first))))
        self._find_streams()

    def _find_streams(self) -> None:
        """The generators in attributes, each with those of the copies."""
        self._streams: list[tuple[torch.Generator, list[Any]]] = []
        for number, layer in enumerate(self._first if self._copies else ()):
            for name, x in vars(layer).items():
                if name in _ELSEWHERE or name in _OF_MODULE \
                        or type(x) in _PLAIN:
                    continue
                own, *others = (
                    list(reached(vars(one).get(name), torch.Generator,
                                 nn.Module))
                    for one in (layer, *(c[number] for c in self._copies)))
                if all(len(other) == len(own) for other in others):
                    self._streams += [
                        (first, [one for one in rest if one is not first])
                        for first, *rest in zip(own, *others)]
        self.note_streams()

    def note_streams(self) -> None:
        """A pass is over: what differs at the next one, the user has
        seeded."""
        self._drawn = [first.get_state() for first, _ in self._streams]

    def _follow_streams(self) -> None:
        for (first, others), drawn in zip(self._streams, self._drawn):
            state = first.get_state()
            if not torch.equal(state, drawn):
                for other in others:
                    other.set_state(state)

    def late_buffers(self) -> list[str]:
        """Those that passes have made, and that torch would save."""
        return [joined(path, name) for (path, m), ready in zip(
                    self._first[0].named_modules(), self._ready)
                for name, b in m._buffers.items() if b is not None
                and name not in ready
                and name not in m._non_persistent_buffers_set]

    @unread
    def follow(self) -> bool:
        """Give the copies the attributes and hooks that the module has.
        Returns whether that changed something."""
        met, places = dict[int, Any](), self._places.scan()
        edited, inside = self._places.follow(places), \
            self._places.edited(places)
        changed = bool(edited or inside)
        self._kept |= edited.keys()
        given = {**inside, **edited}
        for (number, name), twins in given.items():
            for copied, own in zip(self._copies, twins):
                self._copy(name, number, copied, own, next(
                    (x for x in own.values() if isinstance(x, Unknown)),
                    None))
        self._follow_streams()
        for number, (layer, known) in enumerate(zip(self._first,
                                                    self._known)):
            behind = self._behind(number, known)
            here = any(n == number for n, _ in inside)
            if not here and not behind and known.holds(layer, met):
                continue
            seen = _Seen(layer, met)
            for name in {**known.content, **seen.content}:
                content = seen.content.get(name)
                if (number, name) not in given and (
                        name in behind or known.content.get(name) != content
                        if content is not _ARRAYS
                        else known.values.get(name) is not seen.values[name]
                        and self._is_the_users(number, name)):
                    changed = True
                    for copied in self._copies:
                        self._copy(name, number, copied)
            self._known[number] = seen
            self._in_copies[number] = self._of_copies(number)
        self._places.settle()
        if changed:
            self._find_streams()
        return changed

    @unread
    def begin_lag(self, source: int | None) -> None:
        """A pass of copy `source` begins, and perhaps none of some others."""
        self._before = [] if source is None else [
            {name: (x, _versions(x)) for name, x in table.items()
             if name not in _ELSEWHERE}
            for m in [self._first, *self._copies][source]
            for table in (m._buffers, vars(m))]

    @unread
    def catch_up(self, source: int, idle: int) -> None:
        """Give copy `idle` (0: the user's module) what a pass has kept in
        copy `source` since `begin_lag`, and would have kept there: attributes
        and buffers. What is no tensor follows the user's module anyway."""
        every = [self._first, *self._copies]
        twins = _twins(every[source], every[idle], self._ready)
        for number, (here, there, of_buffers, of_layer) in enumerate(zip(
                every[source], every[idle], self._before[::2],
                self._before[1::2])):
            found, buffers = vars(here), here._buffers
            _take(buffers, there._buffers, [
                name for name in {**buffers, **there._buffers}
                if name not in self._ready[number]
                and _moved(of_buffers.get(name), buffers.get(name))], twins)
            _take(found, vars(there), [
                name for name in {**found, **vars(there)}
                if name not in _ELSEWHERE and name not in _TABLES
                and _moved(of_layer.get(name), found.get(name))
                and _lags(found.get(name), vars(there).get(name),
                          source == 0)], twins)
        if idle == 0:
            self._places.leave()

    def _behind(self, number: int, known: "_Seen") -> set[str]:
        """The names of numbers, lists and the like that passes have changed
        in a copy, and that the module has otherwise; quick."""
        first, found = vars(self._first[number]), set[str]()
        for seen, copied in zip(self._in_copies[number], self._copies):
            own = vars(copied[number])
            names = list(known.collections)
            if len(own) != len(seen) \
                    or not all(map(is_, own.values(), seen.values())):
                names += [name for name, x in own.items()
                          if seen.get(name) is not x]
            for name in names:
                if name in first and name not in _ELSEWHERE \
                        and name not in _TABLES and _is_plain(first[name]) \
                        and _content(first[name]) != _content(own.get(name)):
                    found.add(name)
        return found

    def _of_copies(self, number: int) -> list[dict[str, Any]]:
        """What the copies of a layer have, but for what passes keep."""
        return [{name: x for name, x in vars(copied[number]).items()
                 if (number, name) not in self._kept}
                for copied in self._copies]

    def _is_the_users(self, number: int, name: str) -> bool:
        """Whether tensors that are new in an attribute come from the user,
        and not from a pass."""
        if any(seen.get(name) is not vars(copied[number]).get(name)
               for seen, copied in zip(self._in_copies[number],
                                       self._copies)):
            self._kept.add((number, name))
        return bool(self._copies) and (number, name) not in self._kept \
            and all(x.is_leaf for x in reached(
                vars(self._first[number])[name], torch.Tensor, nn.Module))

    def _copy(self, name: str, number: int, copied: list[nn.Module],
              tensors: dict[int, Any] | None = None, unknown: Any = None
              ) -> None:
        """`unknown`: in the place of what cannot be copied, if some tensor
        in it is that."""
        source, target = vars(self._first[number]), vars(copied[number])
        if name in source:
            twins = _twins(self._first, copied, self._ready) | (tensors or {})
            value = source[name]
            target[name] = type(value)(
                (key, _twin(hook, twins)) for key, hook in value.items()) \
                if name in _TABLES else _twin(value, twins, unknown)
        else:
            target.pop(name, None)

    def check_layers(self) -> None:
        """Refuse other layers, parameters or buffers than there were. A
        buffer that forward passes have made on several devices, or on the
        only one, is what they keep there."""
        members = _members(self._first)
        if len(members) == len(self._members) \
                and all(map(is_, members, self._members)):
            return
        now = _names(self._first[0])
        changed = {name for name in {**self._names, **now}
                   if self._names.get(name) != now.get(name)}
        made = {name for copied in self._copies or [self._first]
                for name, x in _names(copied[0]).items() if x is _BUFFER}
        if not all(now.get(name) is _BUFFER and name in made
                   for name in changed):
            raise messages.changed_layers(sorted(changed))
        # A parameter took another one's place, perhaps.
        self._members, self._names = members, now


def follow_attributes(parameters: Sequence[Sequence[Any]]) -> None:
    """Give the parameters of the copies the attributes of those of the
    user's module, which come first. ValueError for a tensor: nobody knows
    which rows it was made from; and for a hook on several of them."""
    for first, *copies in zip(*parameters):
        # One of them is mgpu's own.
        if first._backward_hooks and len(first._backward_hooks) > 1:
            _check_hooks(first._backward_hooks.values())
        own = vars(first)
        if not own and not any(map(vars, copies)):
            continue
        tensors = [name for x in (first, *copies) for name, value
                   in vars(x).items() if isinstance(value, torch.Tensor)]
        if tensors:
            raise ValueError(
                "on several devices a parameter has no attributes that are "
                f"tensors; received {tensors[0]!r}. Keep it in a buffer of "
                "the layer, or use one device.")
        for x in copies:
            vars(x).clear()
            vars(x).update(own)


def _check_hooks(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        code = getattr(hook, "__code__", None)
        if code is not None and code.co_filename == graph.__file__:
            raise ValueError(
                "on several devices a hook waits for the gradient of one "
                "parameter; received torch.autograd.graph."
                "register_multi_grad_hook, which waits for several, of the "
                "first device alone. Read the gradients between "
                "Trainer.allreduce_grads and Trainer.update, where they are "
                "those of all rows; or use one device.")


def check_views(net: nn.Module) -> None:
    """ValueError for a NumPy view of a parameter that the copies of `net`
    would have as it was: small arrays follow by their contents."""
    found = [(joined(path, name), x) for path, m in net.named_modules()
             for name, x in vars(m).items() if name not in _ELSEWHERE
             and isinstance(x, (np.ndarray, *_COLLECTIONS))]
    views = [(name, x) for name, a in found for x in _numpy_arrays(a, 5)]
    for full, p in net.named_parameters() if views else ():
        begin = p.data_ptr()
        end = begin + p.untyped_storage().nbytes()
        for name, x in views:
            if p.is_cpu and begin <= x.ctypes.data < end:
                raise ValueError(
                    "on several devices a network has no large NumPy views "
                    f"of its parameters; received {name!r}, which is one of "
                    f"{full!r}. Keep the tensor, {full}.detach(), of which "
                    "each device has its own.")


def _numpy_arrays(x: Any, depth: int) -> Iterator[np.ndarray]:
    """Those in collections that have no content here: see `_parts`."""
    if isinstance(x, np.ndarray) and x.size > _LARGE:
        yield x
    elif isinstance(x, _COLLECTIONS) and depth and len(x) <= _LARGE:
        for part in x.values() if isinstance(x, dict) else x:
            yield from _numpy_arrays(part, depth - 1)


def hooks_of(layers: Sequence[nn.Module], makers: Sequence[FunctionType]
             ) -> Iterator[tuple[str, Any]]:
    """The hooks on layers, and `makers_of_hooks`, each with the kind of hook
    that it is, or that it makes."""
    for kind, hook in (*forward_hooks(layers), *(
            ("backward", hook) for m in layers
            for table in (m._backward_hooks, m._backward_pre_hooks)
            for hook in table.values())):
        yield "tensor" if _makes_hooks(
            getattr(hook, "__code__", None)) else kind, hook
    yield from (("tensor", f) for f in makers)


def makers_of_hooks(layers: Sequence[nn.Module]) -> list[FunctionType]:
    """The functions of the user's layers that put hooks on tensors."""
    return [f for f in _functions(layers) if _makes_hooks(f.__code__)]


def caches_weights(layers: Sequence[nn.Module]) -> bool:
    """Whether passes may use ``torch.nn.utils.parametrize.cached()``, whose
    cache is one for all copies of a module."""
    return any(hasattr(m, "parametrizations") for m in layers) and any(
        "cached" in global_names(f.__code__) for f in _functions(layers))


def _functions(layers: Sequence[nn.Module]) -> list[FunctionType]:
    kinds = {kind for m in layers for kind in type(m).__mro__
             if kind.__module__.split(".")[0] not in ("torch", "builtins")}
    return [f for kind in kinds for f in vars(kind).values()
            if isinstance(f, FunctionType)]


@cache
def _makes_hooks(code: CodeType | None) -> bool:
    return code is not None and not {
        "register_hook", "register_multi_grad_hook"}.isdisjoint(
            global_names(code))


class _Seen:
    """The attributes of a layer, as they are now."""

    def __init__(self, layer: nn.Module, met: dict[int, Any]) -> None:
        self.values = dict(vars(layer))
        self.content = {name: _read(name, x, met) for name, x
                        in vars(layer).items() if name not in _ELSEWHERE}
        inner = [(name, vars(layer)[name], x)
                 for name, x in self.content.items()
                 if not _is_constant(vars(layer)[name])
                 and not (name in _OF_TORCH
                          and type(layer).__module__.startswith("torch."))]
        self.collections = [name for name, x, content in inner
                            if isinstance(x, _COLLECTIONS)
                            and name not in _OF_MODULE]
        self._empty = [x for _, x, content in inner if content == []]
        self._filled = [(name, x, content) for name, x, content in inner
                        if content != [] and content is not _ARRAYS]

    def holds(self, layer: nn.Module, met: dict[int, Any]) -> bool:
        """Whether `layer` has these attributes; quick."""
        values = vars(layer).values()
        return len(values) == len(self.values) \
            and all(map(is_, values, self.values.values())) \
            and not any(self._empty) \
            and all(_read(name, x, met) == content
                    for name, x, content in self._filled)


def _versions(x: Any) -> list[tuple[int, int | None]]:
    """The tensors in `x`, and how often each was written to."""
    return [] if type(x) in _PLAIN else [
        (id(t), version(t)) for t in reached(x, torch.Tensor, nn.Module)]


def _moved(before: tuple[Any, list[Any]] | None, x: Any) -> bool:
    """Whether a pass may have changed what was `before`: not, where that
    holds tensors, and the same ones as then."""
    return before is None or x is not before[0] or not before[1] \
        or _versions(x) != before[1]


def _lags(x: Any, y: Any, follows: bool) -> bool:
    """Whether `y` may be another thing than `x`, of another copy; `follows`:
    what has a content that is known is copied by `Attributes.follow`."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x is not y and not (
            (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
            and torch.equal(x, y))
    content, other = _content(x), _content(y)
    if _ARRAYS in (content, other):
        return True
    if isinstance(x, (np.ndarray, *_COLLECTIONS)) and content == (id(x), x):
        return True     # a large one
    return not follows and _held(content) != _held(other)


def _held(content: Any) -> Any:
    """A `_content` without what objects are: they differ in each copy."""
    if isinstance(content, list):
        return list(map(_held, content))
    if isinstance(content, tuple):
        return _held(list(content[2:] if isinstance(content[0], int)
                          else content))
    return content


def _take(source: dict[str, Any], target: dict[str, Any],
          names: Iterable[str], twins: dict[Any, Any]) -> None:
    """Copy entries of one copy's table to that of another one."""
    for name in names:
        x, y = source.get(name), target.get(name)
        if name not in source:
            del target[name]
        elif isinstance(x, torch.Generator) \
                and isinstance(y, torch.Generator):
            y.set_state(x.get_state())      # others may hold it
        else:
            # What depends on parameters has no history on another device.
            twins |= {id(t): t.detach().clone()
                      for t in reached(x, torch.Tensor, nn.Module)
                      if not t.is_leaf and id(t) not in twins}
            twins |= {id(t): t for t in reached(y, torch.Tensor, nn.Module)
                      if is_trained(t)}     # see `copied`
            with contextlib.suppress(Exception):    # a file, a lock
                target[name] = deep_copy(x, twins)


def _members(layers: Sequence[nn.Module]) -> list[Any]:
    found: list[Any] = []
    for m in layers:
        found += [m, type(m), *m._modules.values(), *m._parameters.values(),
                  *(name for name, b in m._buffers.items() if b is not None)]
    return found


def _names(net: nn.Module) -> dict[str, Any]:
    """By name: each layer, each buffer, and which parameter is one with
    which."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        found[path] = (module, type(module))
        for name, p in module._parameters.items():
            if p is not None:
                full = joined(path, name)
                found[full] = first.setdefault(id(p), full)
        found.update((joined(path, name), _BUFFER)
                     for name, b in module._buffers.items() if b is not None)
    return found


def _read(name: str, x: Any, met: dict[int, Any]) -> Any:
    """The content of an attribute; `met`: those of others, by `id`. Layers
    share them: a configuration."""
    if name in _TABLES:
        return _hooks(x)
    if id(x) not in met:
        met[id(x)] = _content(x)
    return met[id(x)]


def _is_constant(x: Any) -> bool:
    """Whether the content of `x` is the same as long as `x` is."""
    return type(x) in _PLAIN \
        or type(x) in (tuple, frozenset) and all(map(_is_constant, x))


def _is_plain(x: Any) -> bool:
    """Whether `_content` tells nothing of the identity of `x`."""
    if isinstance(x, _COLLECTIONS):
        return len(x) <= _LARGE and all(
            map(_is_plain, [*x, *x.values()] if isinstance(x, dict) else x))
    return type(x) in _PLAIN


def _content(x: Any, met: dict[int, tuple[Any, Any]] | None = None,
             depth: int = 0) -> Any:
    """What is another one when the user has changed `x`; `met`: what was
    read on the way, by `id`, with its content. Each object is read once, so
    a graph of objects takes as long as it is large."""
    kind = type(x)
    if kind in _PLAIN:
        return kind, x      # 1 is not True
    if isinstance(x, torch.Tensor):
        return _ARRAYS
    met = {} if met is None else met
    if id(x) in met:
        return met[id(x)][1]
    met[id(x)] = x, (id(x), x)      # never asks x whether it equals another
    parts = _parts(x) if len(met) <= _MANY and depth < _DEEP else None
    if parts is None or len(parts) > _LARGE:
        return id(x), x
    if not parts and isinstance(x, _COLLECTIONS):
        return []
    contents = [_content(part, met, depth + 1) for part in parts]
    if _ARRAYS in contents:
        return _ARRAYS
    if not isinstance(x, _COLLECTIONS):
        return id(x), x, contents
    met[id(x)] = x, (kind, contents)
    return kind, contents


def _parts(x: Any) -> list[Any] | None:
    """What pickle would store of `x`; None: it is one thing."""
    if isinstance(x, dict):
        return [*x, *x.values(), *vars(x).values()] \
            if hasattr(x, "__dict__") else [*x, *x.values()]
    if isinstance(x, _COLLECTIONS):
        return list(x)
    if isinstance(x, np.ndarray):
        return [x.shape, x.dtype.str, x.tobytes()] \
            if x.size <= _LARGE and not x.dtype.hasobject else None
    if isinstance(x, (type, nn.Module, ModuleType, torch.fx.Graph)):
        return None
    return pickled(x)


def _hooks(table: dict[int, Any]) -> list[Any]:
    """The `_content` of a table of hooks. A hook may hold tensors."""
    contents = [(key, _content(hook)) for key, hook in table.items()]
    return [(key, id(table[key]) if content is _ARRAYS else content)
            for key, content in contents]


def _twins(layers: Sequence[nn.Module], copied: Sequence[nn.Module],
           buffers: Sequence[set[str]]) -> dict[Any, Any]:
    """What `copy.deepcopy` is to take in the place of the layers and
    parameters of a module, and of the memory that these and `buffers`
    have."""
    found: dict[Any, Any] = {}
    memory = found["torch"] = dict[int, Any]()     # torch's own key
    weak = found["weak"] = list[Any]()      # as long as they are looked up
    for m, n, names in zip(layers, copied, buffers):
        found[id(m)] = n
        if weakref.getweakrefcount(m):
            weak += weakref.getweakrefs(m)
            found |= {id(ref): _weak_twin(ref, n)
                      for ref in weakref.getweakrefs(m)}
        for name, x in (*m._parameters.items(), *m._buffers.items()):
            twin = n._parameters.get(name)
            if x is not None and twin is not None:
                found[id(x)] = twin
            elif name in names:
                twin = n._buffers.get(name)
            if x is not None and twin is not None \
                    and not (is_lazy(x) or is_lazy(twin)):
                space, other = x.untyped_storage(), twin.untyped_storage()
                if space.nbytes() == other.nbytes():
                    memory[space._cdata] = other
    return found


def follow_weak(net: nn.Module, made: nn.Module) -> None:
    """Let weak references to layers in the attributes of `made`, a copy of
    `net`, be those to its own layers: `copy.deepcopy` leaves them as they
    are."""
    layers, copies = list(net.modules()), list(made.modules())
    if not any(map(weakref.getweakrefcount, layers)):
        return
    twins = _twins(layers, copies, [set(m._buffers) for m in layers])
    for m, n in zip(layers, copies):
        for name, x in vars(m).items():
            if name not in _OF_MODULE and any(
                    id(ref) in twins for ref in reached(x, _WEAK, nn.Module)):
                vars(n)[name] = _twin(x, twins)


def _weak_twin(ref: Any, twin: nn.Module) -> Any:
    """A weak reference to `twin`, of the kind of `ref`."""
    if isinstance(ref, weakref.WeakMethod):
        method = ref()
        return ref if method is None \
            else weakref.WeakMethod(method.__func__.__get__(twin))
    return weakref.proxy(twin) if isinstance(ref, weakref.ProxyTypes) \
        else weakref.ref(twin)


def copied(x: Any, twins: dict[Any, Any], own: Iterable[Any] = ()) -> Any:
    """``deep_copy(x, twins)``. A leaf that has gradients, and is none of the
    `own` parameters, is the user's to train: all copies hold it itself, so
    that what each device adds to its gradient arrives there."""
    met = {**twins, "torch": {**twins.get("torch", {})}}
    made = deep_copy(x, met)
    known = set(map(id, own))
    leaves = {id(t): t for t in met.get(id(met), ())
              if id(t) not in known and isinstance(t, torch.Tensor)
              and is_trained(t)}
    if not leaves:
        return made
    spaces = [t.untyped_storage() for t in leaves.values()
              if t.layout is torch.strided]
    return deep_copy(x, {**twins, **leaves, "torch": {
        **{space._cdata: space for space in spaces},
        **twins.get("torch", {})}})


def _twin(x: Any, twins: dict[int, Any], otherwise: Any = None) -> Any:
    try:
        return copied(x, twins)
    except Exception:       # a file, a lock: there is only one
        return x if otherwise is None else otherwise
