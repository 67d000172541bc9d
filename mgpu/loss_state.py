"""A loss that is called for the rows of each device, and what it keeps.

What a loss counts or sums up while it runs would depend on the number of
devices, and on which of them is first. So after the first call of a step what
the loss keeps may not change any more: numbers, arrays, lists and dicts in
its attributes, in variables that it closes over, in globals that it names. A
dict may get new keys, as a cache does. What cannot be read (how far a
generator is) is refused where the loss reaches it.
"""
import dis
import io
import itertools
import pickle
import random
import re
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import (BuiltinFunctionType, CellType, CodeType, FunctionType,
                   MappingProxyType, MemberDescriptorType, MethodType,
                   ModuleType)
from typing import Any, NamedTuple

import numpy as np

from mgpu.backends import ENTRIES, base

_STANDARD = set(sys.stdlib_module_names) - {"test"}
_FOREIGN = {"mgpu", "numpy", *_STANDARD, *(
    entry.framework for entry in ENTRIES.values())}
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}
_DICTS = (dict, MappingProxyType)
_FUNCTIONS = (FunctionType, MethodType, partial)
_EMPTY = CellType()
_LARGE = 1000       # a collection with more items is data, or a log
_CELLS = 5000       # more are not looked at
_BYTES = 1 << 20    # nor arrays with more, where the engine counts no writes
#: what is called without being named
_CALLED = {"__call__", "forward", "hybrid_forward", "__enter__", "__exit__",
           "__getitem__", "__setitem__", "__add__", "__iadd__", "__next__"}
#: names of functions that draw
_DRAWS = re.compile("(?i)rand|dropout|noise|bernoulli|multinom|poisson|gumbel"
                    "|normal(?!i)|uniform|exponential|sample(?!_w)|shuffle")
_ANY = {"getattr", "setattr", "vars", "__dict__"}
#: classes of the standard library that are but data, which their own methods
#: change: `Namespace`, `SimpleNamespace`, `UserDict`, `Queue`, `Value`
_DATA = {"argparse", "types", "collections", "queue",
         "multiprocessing.sharedctypes"}
_BARE = {"builtins", "abc", "typing", "enum"}


class _Content(NamedTuple):
    """What an array or a stream of random numbers holds."""

    value: Any


class SharedLoss:
    """`loss`, to be called for each device of a step, inside ``with``.

    Raises
    ------
    ValueError
        Another call than the first has changed what the loss keeps.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], replicas: Any,
                 backend: base.Backend | None = None) -> None:
        self.loss = loss
        self._replicas = (lambda: None) if replicas is None \
            else weakref.ref(replicas)
        self._backend: base.Backend = backend or replicas.backend
        self._codes: dict[CodeType, list[str]] = {}     # what each imports
        self._names = set(_CALLED)      # of attributes that code may reach
        self._first = threading.RLock()   # a signal handler may train
        self.__enter__()
        count = -1
        while len(self._names) > count:
            count = len(self._names)
            found = self._kept()
        #: whether there is something that could change
        self.keeps = any(map(_may_change, found.values())) \
            or not isinstance(loss, FunctionType) \
            and not _foreign(type(loss).__module__) \
            or any(one.opname in ("STORE_GLOBAL", "STORE_ATTR")
                   for code in self._codes
                   for one in dis.get_instructions(code))

    def __enter__(self) -> "SharedLoss":
        """Another step."""
        self._refused = ""
        self._known: dict[tuple[int, Any], Any] | None = None
        self._owners: dict[int, Any] = {}
        self._moving: set[int] | None = None
        self._of_net: set[int] | None = None
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # Of the errors of several devices the first is raised, which may be
        # a consequence: torch finds what it needs for a gradient changed.
        if self._refused and isinstance(error, Exception) \
                and str(error) != self._refused:
            raise ValueError(self._refused) from error

    def __call__(self, output: Any, y: Any) -> Any:
        with self._first:
            if self._known is None:
                values = self.loss(output, y)
                self._known = self._kept(self._owners)
                return values
        values = self.loss(output, y)
        self._check(self._kept())
        return values

    def _check(self, now: dict[tuple[int, Any], Any]) -> None:
        for place, before in (self._known or {}).items():
            if place in now and _same(before, now[place]) \
                    or place not in now and len(now) >= _CELLS:
                continue
            owner, key = self._owners[place[0]], place[1]
            self._refuse(
                f"changes {key!r} of {_name(owner)}. Count outside of it "
                "(set what it reads before each step, or pass it in y), sum "
                "up what train_batch returns, or use one device.")

    def _refuse(self, what: str) -> None:
        self._refused = (
            "a loss keeps no state: on several devices it is called for the "
            f"rows of each; received {_name(self.loss)}, which {what}")
        raise ValueError(self._refused)

    # -- what it reaches -----------------------------------------------------

    def _kept(self, owners: dict[int, Any] | None = None
              ) -> dict[tuple[int, Any], Any]:
        found: dict[tuple[int, Any], Any] = {}
        # What is near first: no more than `_CELLS` are looked at.
        waiting = deque[Any]([self.loss])
        met: set[int] = set()
        while waiting and len(found) < _CELLS:
            x = waiting.popleft()
            if id(x) in met:
                continue
            met.add(id(x))
            if owners is not None:
                owners[id(x)] = x
            for key, value in self._parts(x):
                if type(value) in _PLAIN or type(value) is _Content:
                    found[id(x), key] = value
                    continue
                content = self._content(value)
                found[id(x), key] = value if content is None else content
                if content is None:
                    if _runs(value):
                        self._refuse(
                            f"reaches {key!r} of {_name(x)}, a "
                            f"{type(value).__qualname__}, of which cannot be "
                            "read how far it is. Draw from it outside of the "
                            "loss, before each step, make a list of it, or "
                            "use one device.")
                    waiting.append(value)
        return found

    def _content(self, x: Any) -> _Content | None:
        """What an array or a stream holds; None for anything else."""
        if isinstance(x, (np.ndarray, np.generic)):
            return _Content(None if x.nbytes > _BYTES or x.dtype.hasobject
                            else zlib.crc32(x.tobytes()))
        if self._backend.is_native(x):
            size = int(np.prod(x.shape, dtype=int))
            mark = self._backend.mark(x)
            if mark is None or size <= 16:      # .data leaves no mark
                mark = None if size > _BYTES >> 3 else \
                    self._backend.to_numpy(x).tobytes()
            return _Content(mark)
        if isinstance(x, itertools.count):
            return _Content(repr(x))
        if isinstance(x, random.Random):
            return _Content(x.getstate())
        if isinstance(x, (np.random.Generator, np.random.RandomState)):
            return _Content(pickle.dumps(x))
        if type(x).__name__ == "Generator" and hasattr(x, "get_state"):
            return _Content(self._backend.to_numpy(x.get_state()).tobytes())
        return None

    def _parts(self, x: Any) -> Iterator[tuple[Any, Any]]:
        """What is in `x`, and the code of the loss may reach, by name."""
        if isinstance(x, FunctionType):
            yield from self._of_function(x)
        elif isinstance(x, MethodType):
            yield from (("__func__", x.__func__), ("__self__", x.__self__))
        elif isinstance(x, partial):
            yield from (("func", x.func), ("args", x.args),
                        ("keywords", x.keywords), *self._named(vars(x)))
        elif isinstance(x, BuiltinFunctionType):
            if not isinstance(x.__self__, (ModuleType, type(None))):
                yield "__self__", x.__self__
        elif isinstance(x, (list, tuple, deque, *_DICTS)):
            if len(x) > _LARGE:
                yield "length", len(x)
            else:
                yield from list(x.items() if isinstance(x, _DICTS)
                                else enumerate(x))
            if not isinstance(x, (tuple, *_DICTS)):
                yield "length", len(x)
            if not _foreign(type(x).__module__):
                yield from self._of_object(x)
        elif isinstance(x, (set, frozenset)):
            yield "content", _Content(frozenset(map(id, x)))
        elif isinstance(x, ModuleType):
            if x is np and "random" in self._names:
                yield "random", np.random
            elif x is random or x is np.random:
                yield "stream", x.random.__self__
            elif not _foreign(x.__name__):
                yield from self._named(vars(x))
        elif isinstance(x, type):
            if not _foreign(x.__module__):
                for one in x.__mro__[:-1]:
                    yield from map(_function_in, self._named(vars(one)))
        else:
            yield from self._of_object(x)
        if "__wrapped__" in (_space(x) or ()):
            yield "__wrapped__", vars(x)["__wrapped__"]

    def _of_function(self, x: Any) -> Iterator[tuple[Any, Any]]:
        cells = [(name, cell.cell_contents) for name, cell in zip(
            x.__code__.co_freevars, x.__closure__ or ()) if cell != _EMPTY]
        if _foreign(x.__globals__.get("__name__", "")):
            # A decorator, around functions of the user's.
            yield from ((name, value) for name, value in cells
                        if isinstance(value, _FUNCTIONS)
                        or callable(value) and hasattr(value, "__dict__")
                        and not isinstance(value, type))
            return
        yield from cells
        yield from self._named(vars(x))
        yield from enumerate(x.__defaults__ or ())
        yield from (x.__kwdefaults__ or {}).items()
        for code in _codes(x.__code__):
            # "@": pytest's, in the place of an `assert`
            names = [name for name in code.co_names
                     if not name.startswith("@")]
            if code not in self._codes:
                self._codes[code] = [
                    one.argval for one in dis.get_instructions(code)
                    if one.opname == "IMPORT_NAME"]
                self._names.update(names)
                if not _ANY.isdisjoint(names):
                    self._names.update(text for text in code.co_consts
                                       if isinstance(text, str))
            for name in names:
                if name in x.__globals__:
                    yield name, x.__globals__[name]
            package = x.__globals__.get("__package__") or ""
            for name in self._codes[code]:
                for full in (name, f"{package}.{name}".rstrip(".")):
                    if full in sys.modules:
                        yield full, sys.modules[full]

    def _of_object(self, x: Any) -> Iterator[tuple[Any, Any]]:
        parts = self._backend.parts(x)
        replicas: Any = self._replicas()
        if parts is not None and replicas and replicas.network.is_shared \
                and id(x) in self._layers(replicas.net):
            return      # each device has what its pass has left there
        if parts and not (replicas and x is replicas.net):
            if self._moving is None:    # what passes move meanwhile
                self._moving = {id(b) for p in replicas.buffers()
                                for b in p.list_data()} \
                    if replicas and replicas.complete else set()
            yield from (part for part in parts
                        if id(part[1]) not in self._moving)
        modules = {one.__module__ for one in type(x).__mro__}
        if _root(type(x).__module__) == "mgpu":
            return
        foreign = _foreign(type(x).__module__)
        if not foreign:
            yield "its class", type(x)
        space = _space(x)
        if space is not None:
            yield from ((name, value) for name, value
                        in self._named(space, not foreign)
                        # which mgpu sets for the time of a pass
                        if parts is None or name not in ("training",
                                                         "forward"))
            if parts is None:   # what methods that are not read may change
                within = not modules.isdisjoint(_DATA)
                if within or hasattr(type(x), "state_dict") or not _STANDARD \
                        .isdisjoint(map(_root, modules - _BARE)):
                    yield from [pair for pair in list(space.items())
                                if within or type(pair[1]) in _PLAIN]
        elif not foreign:
            for name in self._names:
                slot = getattr(type(x), name, None)
                if isinstance(slot, MemberDescriptorType) \
                        and hasattr(x, name):
                    yield name, getattr(x, name)
        if isinstance(x, weakref.ref):
            yield "what it refers to", x()
        yield from _memory(x)

    def _layers(self, net: Any) -> set[int]:
        if self._of_net is None:
            self._of_net, waiting = set(), [net]
            while waiting:
                layer = waiting.pop()
                parts = self._backend.parts(layer)
                if parts is not None and id(layer) not in self._of_net:
                    self._of_net.add(id(layer))
                    waiting += [part for _, part in parts]
        return self._of_net

    def _named(self, space: Any, any_too: bool = True
               ) -> list[tuple[Any, Any]]:
        if any_too and not _ANY.isdisjoint(self._names):
            return list(space.items())
        return [(name, space[name]) for name
                in sorted(space.keys() & self._names, key=str)]


def is_pure(loss: Callable[[Any, Any], Any], backend: base.Backend,
            call: Callable[[], Any]) -> tuple[Any, bool]:
    """What ``call()`` returns, which calls `loss`; and whether another call
    of it would do no harm: it draws nothing, by the names in its code, and
    has changed nothing that it keeps."""
    try:
        known = SharedLoss(loss, None, backend)
        before = known._kept()
    except ValueError:      # it draws from an iterator
        return call(), False
    value = call()
    now = known._kept()
    return value, all(place in now and _same(x, now[place])
                      for place, x in before.items()) \
        and not any(map(_DRAWS.search, known._names))


def _root(module: Any) -> str:
    return str(module).split(".")[0]


def _foreign(module: Any) -> bool:
    return _root(module) in _FOREIGN


def _space(x: Any) -> Any:
    """The attributes of an object, whatever its own ``__getattr__`` is."""
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None


def _runs(x: Any) -> bool:
    """Whether `x` is a generator, or another iterator of the standard
    library or a framework, that is not at its end."""
    return isinstance(x, Iterator) and not isinstance(x, io.IOBase) \
        and _foreign(type(x).__module__) \
        and _root(type(x).__module__) != "mgpu" \
        and getattr(x, "gi_frame", x) is not None


def _memory(x: Any) -> Iterator[tuple[str, _Content]]:
    """The bytes of an `array.array`, a `bytearray`, a ctypes object; what
    was written to a file in memory."""
    if isinstance(x, (io.StringIO, io.BytesIO)):
        if not x.closed:
            yield "content", _Content((x.getvalue(), x.tell()))
        return
    try:
        view = memoryview(x)
    except TypeError:
        return
    yield "content", _Content(zlib.crc32(view.tobytes())
                              if view.nbytes <= _BYTES else view.nbytes)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _function_in(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    name, x = pair
    if isinstance(x, (staticmethod, classmethod)):
        return name, x.__func__
    return name, x.fget if isinstance(x, property) else x


def _may_change(x: Any) -> bool:
    return not isinstance(x, (*_FUNCTIONS, type, BuiltinFunctionType)) \
        and not (isinstance(x, ModuleType) and _foreign(x.__name__))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is _Content:
        return bool(a.value == b.value)
    return type(a) in _PLAIN and (a == b or a != a and b != b)


def _name(x: Any) -> str:
    try:
        name = x.__qualname__
    except Exception:       # of a __getattr__ of its own
        name = None
    return name if name and isinstance(name, str) \
        else f"a {type(x).__qualname__}"
