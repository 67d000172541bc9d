"""What blocks keep in attributes, for each device.

All replicas of a network are one Block. On several devices each replica sees
its attributes as if it ran alone: they are exchanged between the passes of
two devices. What the Block has outside of passes is device 0's.
"""
import copy
import dis
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np

from mgpu.backends import base, messages
from mgpu.backends._kept import Untold, deep_copy, pickled
from mgpu.backends._mxnet import places
from mgpu.backends._mxnet.dispatch import is_known
from mgpu.backends._mxnet.framework import mx
from mgpu.backends._mxnet.layers import all_stored

_gluon = mx.gluon
#: attributes of every block, which all devices share
_GLUONS = {*vars(_gluon.nn.HybridSequential(prefix="")),
           "forward", "hybrid_forward"}
_MANY, _DEEP = 5000, 50     # objects in one attribute, one in the other
_LARGE = 1000       # a collection with more items is data
_LARGE_ARRAY = 1 << 16
_CONSTANT = {int, float, complex, bool, str, bytes, type(None),
             types.FunctionType, types.BuiltinFunctionType}
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_ONE = (mx.nd.NDArray, _gluon.Block, _gluon.Parameter, _gluon.ParameterDict,
        mx.Context, mx.sym.Symbol, type, types.ModuleType)


class _Is:
    """An object that equals only itself."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other.x is self.x

    __hash__ = None     # type: ignore[assignment]


def _is_constant(x: Any) -> bool:
    return type(x) in _CONSTANT \
        or type(x) in (tuple, frozenset) and all(map(_is_constant, x))


class _Content:
    """What is in an object that may change, to be compared.

    Attributes
    ----------
    value : object
    arrays : list
        Those of the engine in it, in order.
    single, large : dict
        By `id`: what each device is to have the same object of, and large
        collections, whose items are.
    """

    def __init__(self, x: Any) -> None:
        self.arrays = list[Any]()
        self.single, self.large = dict[int, Any](), dict[int, Any]()
        self.value = self._read(x, set(), 0)

    def _read(self, x: Any, met: set[int], depth: int) -> Any:
        """Each object once, so a graph of them takes as long as it is
        large; `met`: those that were read, which what is returned holds."""
        kind = type(x)
        if kind in _CONSTANT:
            return kind, x      # 1 is not True
        if isinstance(x, _ONE):
            self.arrays += [x] * isinstance(x, mx.nd.NDArray)
            self.single[id(x)] = x
            return _Is(x)
        if id(x) in met:
            return _Is(x)
        met.add(id(x))
        if isinstance(x, np.ndarray):
            if x.size <= _LARGE_ARRAY and not x.dtype.hasobject:
                return _Is(x), x.shape, x.dtype.str, x.tobytes()
            self.single[id(x)] = x
            return _Is(x)
        if isinstance(x, _COLLECTIONS) and len(x) > _LARGE:
            self.large[id(x)] = x
            return _Is(x), len(x)
        parts = _parts(x) if depth < _DEEP and len(met) <= _MANY \
            else None
        if parts is None:
            return _Is(x)
        contents = [self._read(part, met, depth + 1) for part in parts]
        return _Is(x), contents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self.value == other.value

    __hash__ = None     # type: ignore[assignment]


def _parts(x: Any) -> list[Any] | None:
    """What pickle would store of `x`; None: it is one thing."""
    if type(x) is dict:
        return [*x, *x.values()]
    if type(x) in _COLLECTIONS:
        return list(x)
    return pickled(x)


def _arrays(x: Any) -> list[Any]:
    """Those in what `_Block.left` holds of an attribute."""
    return x.arrays if isinstance(x, _Content) \
        else [x] * isinstance(x, mx.nd.NDArray)


def _same(x: Any, before: Any) -> bool:
    """Whether what `_Block.left` holds of an attribute is what it was."""
    return before is x or isinstance(x, _Content) and before == x


class _Block:
    """The attributes of one block, for each device."""

    def __init__(self, path: str, block: Any, count: int) -> None:
        self.path, self.block = path, block
        self._values = list(vars(block).values())
        now = self._names()
        #: by device
        self.own = [now] * count
        #: those of device 0 when all devices got them, and after its last
        #: pass
        self.given: dict[str, Any] = {}
        self.left: dict[str, Any] = {}
        self._all: dict[str, Any] | None = None     # what all devices have
        self._kept = set[str]()     # in which passes leave arrays
        self._unknown = set[str]()  # where other devices had unknown ones

    def _names(self) -> dict[str, Any]:
        attributes = vars(self.block)
        return {name: attributes[name] for name in
                attributes.keys() - _GLUONS - self.block._reg_params.keys()
                - self.block._children.keys()}

    def now(self, index: int) -> dict[str, Any]:
        """Those of the device that the block has now; quick."""
        values = list(vars(self.block).values())
        if len(values) != len(self._values) \
                or not all(map(is_, values, self._values)):
            self._values, self.own[index] = values, self._names()
        return self.own[index]

    def exchange(self, index: int, other: int) -> None:
        """Let the block have those of a device after those of another."""
        theirs, mine = self.own[index], self.now(other)
        if theirs is mine:
            return
        attributes = vars(self.block)
        kept = {*self.block._children, *self.block._reg_params}
        attributes.update((name, x) for name, x in theirs.items()
                          if name not in kept)      # a layer now
        for name in mine.keys() - theirs.keys():
            del attributes[name]
        self._values = list(attributes.values())

    def leave(self, inputs: set[int]) -> None:
        """A pass of device 0 has ended; `inputs`: by `id`, what is the
        user's anyway."""
        if self.now(0) is self._all and not self._changing:
            return
        self.left = self._read(self.own[0])
        for name, x in self.left.items():
            known = inputs.union(map(id, _arrays(self.given.get(name))))
            for array in _arrays(x):
                if id(array) not in known:
                    self._kept.add(name)
                    places.keep(array)

    @property
    def _changing(self) -> bool:
        return any(isinstance(x, _Content) for x in self.left.values())

    def _read(self, own: dict[str, Any]) -> dict[str, Any]:
        """Constants and arrays themselves, and the content of others. In
        layers of Gluon what begins with "_" is theirs."""
        known = is_known(self.block)
        return {name: x if _is_constant(x) or isinstance(x, _ONE)
                or known and name[0] == "_" else _Content(x)
                for name, x in own.items()}

    def follow(self, memos: Sequence[dict[int, Any]], refuses: bool,
               blocks: Iterable[Any], untold: Untold, names: list[str]
               ) -> None:
        """Give all devices what is the user's, or is no array. `names`: of
        attributes with arrays that nobody knows on other devices."""
        own = self.now(0)
        if own is self._all and not self._changing \
                and all(x is own for x in self.own):
            return
        now, left = self._read(own), self.left
        edited = self._edited(now, blocks, untold, names) if self._kept \
            else {}
        for i in range(1, len(self.own)):
            mine, theirs = dict(own), self.own[i]
            memos[i].update((key, others[i - 1]) for found in edited.values()
                            for key, others in found.items()
                            if others[i - 1] is not None)
            for name, x in now.items():
                same = left.get(name) == x and bool(
                    x.arrays or self.given.get(name) == x) \
                    if isinstance(x, _Content) else \
                    isinstance(x, mx.nd.NDArray) and left.get(name) is x
                if name in edited:
                    same = any(others[i - 1] is None
                               for others in edited[name].values())
                if same and name in theirs:
                    mine[name] = theirs[name]
                    continue
                for a in _arrays(x):
                    if memos[i].get(id(a), a) is a:
                        places.share(a, self.full_name(name),
                                     type(self.block))
                if isinstance(x, _Content):
                    unknown = [y for others in edited.get(name, {}).values()
                               if isinstance(y := others[i - 1],
                                             places.Unknown)]
                    mine[name] = _twin(own[name], x, memos[i], refuses,
                                       self.full_name(name), unknown)
                elif name in edited:
                    mine[name] = memos[i].get(id(x), x)
            self.own[i] = own if all(x is own[name] for name, x
                                     in mine.items()) else mine
        self.given = self.left = now
        self._all = own

    def held(self, index: int, shown: int) -> tuple[dict[str, Any],
                                                    dict[str, Any]]:
        """What device `index` has, and what there is in it."""
        own = self.now(index) if index == shown else self.own[index]
        return own, self._read(own)

    def take(self, index: int, values: dict[str, Any], shown: int) -> None:
        """Give these values to one device."""
        if index == shown:
            vars(self.block).update(values)
            self.now(index)
            self.leave(set())
        else:
            self.own[index] = {**self.own[index], **values}

    def full_name(self, name: str) -> str:
        return f"{self.path}.{name}".lstrip(".")

    def _edited(self, now: dict[str, Any], blocks: Iterable[Any],
                untold: Untold, names: list[str]
                ) -> dict[str, dict[int, list[Any]]]:
        """By name, then by the `id` of an array that the user, or a call of
        the network itself, has put where passes leave some: what the other
        devices are to have in its place, None for what they had."""
        for name in self._kept & self.left.keys():
            arrays = _arrays(self.left[name])
            each_has = [_arrays(self._read({name: x.get(name)})[name])
                        for x in self.own[1:]]
            for j, x in enumerate(arrays):
                place, kind = places.find(x)
                if place is not None and kind == places.ITSELF:
                    place.others = [each[j] if len(each) == len(arrays)
                                    else None for each in each_has]
        found: dict[str, dict[int, list[Any]]] = {}
        count = len(self.own) - 1
        if not untold.again:
            self._unknown = {name for name in self._unknown if any(
                isinstance(a, places.Unknown) for own in self.own[1:]
                for a in _Content(own.get(name)).arrays)}
        for name in self._kept & now.keys():
            x, left = now[name], self.left.get(name)
            same = _same(x, left) and not any(
                _is_written(a) and not _is_data(blocks, a)
                for a in _arrays(x))
            if same and not (untold.again and name in self._unknown):
                continue
            old, columns = _arrays(left), dict[int, list[Any]]()
            certain = True
            for j, a in enumerate(_arrays(x)):
                others = _elsewhere(a, old[j] if j < len(old) else None,
                                    count)
                stays = any(a is b for b in old) and not _is_written(a)
                if same or others is None or not stays and any(
                        other is None and _arrays(self._read(
                            {name: own.get(name)})[name])
                        for other, own in zip(others, self.own[1:])):
                    certain, others = False, [None] * count
                columns[id(a)] = others
            if not certain:
                self._unknown.add(name)
                names.append(self.full_name(name))
                error = partial(messages.untold_array, names[-1], names)
                for a in _arrays(x):
                    unknown = places.unknown_of(a)(untold, error)
                    columns[id(a)] = [unknown if other is None else other
                                      for other in columns[id(a)]]
            if columns:
                found[name] = columns
        for name in found:
            for a in _arrays(now[name]):
                places.keep(a)
                place, _ = places.find(a)
                if place is not None:
                    place.others, place.written = found[name][id(a)], False
        return found


class Attributes:
    """The attributes of a network's blocks, for each device.

    Before a pass all devices have what the Block has, as on torch: what the
    user wrote there, and the numbers, lists and NumPy arrays that the pass of
    device 0 has left. Arrays of the engine are those of each device's rows.

    Parameters
    ----------
    refuses : bool
        Whether there must be copies of all.
    """

    def __init__(self, refuses: bool = True) -> None:
        self._refuses, self.untold = refuses, Untold()
        self._blocks: list[_Block] = []
        self._shown = 0
        self._numbers: list[tuple[Any, ...]] = []
        #: before the first passes that are recorded: the NumPy arrays that
        #: all devices have, and copies
        self._shared: list[tuple[Any, ...]] | None = None
        self._before: list[dict[str, Any]] = []     # see `begin_lag`

    def follow(self, blocks: Sequence[tuple[str, Any]], count: int) -> None:
        """Before passes of `count` devices; `blocks`: (path, block) of all
        blocks of the network, none if no code of the user's runs."""
        earlier = {id(one.block): one for one in self._blocks}
        now = {id(block): (path, block) for path, block in blocks}
        self._blocks = [earlier.get(key) or _Block(path, block, count)
                        for key, (path, block) in now.items()]
        memos: list[dict[int, Any]] = [{} for _ in range(count)]
        names = list[str]()
        every = [block for _, block in now.values()]
        for one in self._blocks:
            one.follow(memos, self._refuses, every, self.untold, names)
        self.untold.again = False
        # Those of one class have the same functions, but for Lambda's.
        unlike = {id(b if is_known(b) else type(b)): b for b in every}
        self._numbers = [(type(block), *number) for block in unlike.values()
                         for number in _numbers(block)]
        if self._shared is None and blocks and mx.autograd.is_recording():
            self._shared = [
                (f"{one.path}.{name}".lstrip("."), one.block, x, x.copy())
                for one in self._blocks for name, value in one.given.items()
                if isinstance(value, _Content)
                for x in value.single.values() if isinstance(x, np.ndarray)]

    def check(self) -> None:
        """ValueError where passes have counted outside of the blocks, or the
        first ones have written to a NumPy array of all devices."""
        shared, self._shared = self._shared or [], []
        for name, block, x, before in shared:
            if x.tobytes() != before.tobytes():
                raise messages.shared_array(name, type(block))
        for kind, function, name, before in self._numbers:
            now = _outside(function, _kinds(kind)).get(name, {})
            if any(now.get(key, x) != x for key, x in before.items()):
                raise messages.shared_number(name, kind)

    @contextmanager
    def of(self, index: int, inputs: Any = ()) -> Iterator[None]:
        """Inside the block code of the user's runs for a device."""
        if not self._blocks:
            yield
            return
        before = self._shown
        self.show(index)
        try:
            with places.passing(self._refuses):
                yield
        finally:
            if index == 0:
                known = {id(x) for x in _Content(inputs).arrays}
                for one in self._blocks:
                    one.leave(known)
            self.show(before)

    def begin_lag(self, source: int | None) -> None:
        """A pass of device `source` begins, and perhaps none of some."""
        self._before = [] if source is None else [
            one.held(source, self._shown)[1] for one in self._blocks]

    def catch_up(self, source: int, idle: dict[int, Any]) -> None:
        """Give devices `idle`, with their contexts, the arrays that a pass of
        `source` has kept since `begin_lag`. What is no array follows device
        0 anyway."""
        for one, before in zip(self._blocks, self._before):
            own, now = one.held(source, self._shown)
            kept = {name: x for name, x in now.items() if _arrays(x)
                    and not any(isinstance(a, places.Unknown)
                                for a in _arrays(x))
                    and not _same(x, before.get(name))}
            for i, context in idle.items() if kept else ():
                memo = {id(a): a.detach().copyto(context)
                        for x in kept.values() for a in _arrays(x)}
                one.take(i, {name: _twin(
                    own[name], x, memo, self._refuses, one.full_name(name))
                    if isinstance(x, _Content) else memo[id(x)]
                    for name, x in kept.items()}, self._shown)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The arrays of the blocks hold after the block what they do now."""
        before = [(x, x.copy()) for one in self._blocks
                  for value in one.given.values() for x in _arrays(value)]
        try:
            yield
        finally:
            for x, own in before:
                if _bits(x) != _bits(own):
                    x[...] = own

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of the arrays that the blocks have now, by their attributes."""
        return [(one.full_name(name), a.shape)
                for one in self._blocks
                for name, x in one.now(self._shown).items()
                for a in _Content(x).arrays
                if not isinstance(a, places.Unknown)]

    def show(self, index: int) -> None:
        """Let the blocks have the attributes of a device."""
        if index != self._shown:
            for one in self._blocks:
                one.exchange(index, self._shown)
            self._shown = index


def _is_data(blocks: Iterable[Any], x: Any) -> bool:
    """Whether `x` is a parameter's array or gradient."""
    for p in (p for b in blocks for p in b._params._params.values()):
        with suppress(RuntimeError):    # no value, or no gradient
            if any(x is y for y in all_stored(p)) \
                    or any(x is y for y in p.list_grad()):
                return True
    return False


def _is_written(x: Any) -> bool:
    """Whether the user has written to what a pass of device 0 has left, and
    that other devices do not share."""
    place, _ = places.find(x)
    return place is not None and place.written \
        and any(other is not x for other in place.others)


def _elsewhere(x: Any, left: Any, count: int) -> list[Any] | None:
    """What `count` other devices are to have where the user has put `x` on
    device 0, whose pass has left `left`, or None there: for each what it had
    (None: that, whatever it is), without a history, or zeros; or `x`, if what
    they had was the same. None if that is not certain."""
    place, kind = places.find(x)
    if place is not None and kind != places.OTHER and not place.written:
        return [y if y is None or kind == places.ITSELF else y.detach()
                for y in place.others]
    had = places.find(left)[0] if left is not None else None
    if had is not None and any(isinstance(y, places.Unknown)
                               for y in had.others):
        had = None
    others = had.others if had is not None and left.shape == x.shape else []
    if not x.asnumpy().any():
        return [None if y is None else _zeros(y) for y in others] \
            or [x] * count
    if had is not None and had.others and not had.written and all(
            y is not None and y.shape == left.shape and _bits(y)
            == _bits(left) for y in had.others):
        return [x] * count
    return None


def _zeros(x: Any) -> Any:
    with mx.autograd.pause():
        zeros = x.copy()
        zeros[:] = 0
    return zeros


def _bits(x: Any) -> bytes:
    return x.asnumpy().tobytes()


def _numbers(block: Any) -> Iterator[tuple[Any, str, Any]]:
    """(function, name, numbers) of what is outside of `block` and its passes
    may count in."""
    kinds = _kinds(type(block))
    functions = [vars(block).get("_func"), vars(block).get("_func_impl")] \
        if is_known(block) else [
            *(getattr(type(block), name, None) for name in
              ("forward", "hybrid_forward", "__call__")),
            *(x for kind in kinds for method in vars(kind).values()
              if isinstance(x := getattr(method, "__func__", method),
                            types.FunctionType)
              and any(_changes(x.__code__)))]
    for function in dict.fromkeys(filter(None, functions)):
        if isinstance(function, types.FunctionType) and _is_users(function):
            for name, numbers in _outside(function, kinds).items():
                yield function, name, numbers


def _is_users(x: Any) -> bool:
    return (x.__module__ or "").partition(".")[0] != "mxnet"


def _kinds(kind: type) -> list[type]:
    """The classes of the user's that `kind` is made of."""
    return [one for one in kind.__mro__ if _is_users(one)
            and one is not object]


@cache
def _changes(code: types.CodeType) -> tuple[bool, frozenset[str]]:
    """Whether a function stores outside of itself, or in collections; the
    attributes that it reads and writes, of whatever object."""
    names: dict[str, set[str]] = {}
    for step in dis.get_instructions(code):
        names.setdefault(step.opname, set()).add(step.argval)
    read = names.get("LOAD_ATTR", set())
    return not _STORES.isdisjoint(names), frozenset(
        read & names.get("STORE_ATTR", set()))


_STORES = {"STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"}


def _outside(function: types.FunctionType, kinds: Sequence[type] = ()
             ) -> dict[str, Any]:
    """The numbers that a method of classes `kinds` finds outside of itself,
    by name; those in lists and dicts by their places there, and those in
    attributes that it changes."""
    code, globals_ = function.__code__, function.__globals__
    found = {name: globals_[name] for name in code.co_names
             if name in globals_}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):      # empty yet
            found[name] = cell.cell_contents
    numbers: dict[str, Any] = {}
    for name, x in found.items():
        if type(x) in (int, float):
            numbers[name] = {None: x}
        elif type(x) in (list, dict) and 0 < len(x) <= _LARGE:
            pairs = x.items() if type(x) is dict else enumerate(x)
            numbers[name] = {key: value for key, value in list(pairs)
                             if type(value) in (int, float)}
    _, attributes = _changes(code)
    if attributes:
        found |= {kind.__name__: kind for kind in reversed(kinds)}
    for name, x in found.items() if attributes else ():
        with suppress(TypeError):       # it has no attributes
            own = vars(x)
            numbers.update((f"{name}.{key}", {None: own[key]})
                           for key in attributes & own.keys()
                           if type(own[key]) in (int, float))
    return numbers


class Turns(base.Turns):
    """Replicas take turns, each with the attributes of its device."""

    at_once = 1

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes

    def begin(self, index) -> None:
        self._attributes.show(index)

    def __exit__(self, error, *_) -> None:
        self._attributes.show(0)


def _twin(x: Any, content: _Content, memo: dict[int, Any], refuse: bool,
          name: str, unknown: Sequence[Any] = ()) -> Any:
    """`unknown`: what is so in it, and takes its place where it cannot be
    copied."""
    memo.update((key, value) for key, value in content.single.items()
                if key not in memo)
    memo.update((key, copy.copy(value)) for key, value
                in content.large.items() if key not in memo)
    try:
        return deep_copy(x, memo)
    except Exception as error:      # a lock, a file: there is only one
        if refuse and isinstance(x, types.GeneratorType):
            raise messages.one_generator(name) from error
        return unknown[0] if unknown else x
