"""What the calls of a schedule change in it: MXNet's count as they go."""
import contextlib
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from mgpu import lr_scheduler
from mgpu.arguments import Hints
from mgpu.backends.base import Backend

Schedule = Callable[[int], float]

_PLAIN = {type(None), bool, int, float, str}
_PARTS = 50         # objects of one schedule that are looked at
_LARGE = 1000       # a table, or a log, of which no copies are made


class ScheduleState:
    """What a trainer knows of its schedule, whatever that is.

    A schedule may be any callable. What its calls change in its attributes,
    and in those of schedules inside it, is its state, if it is made of
    numbers, text, lists, tuples, dicts and NumPy arrays; all else are
    options, which belong to the program.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._schedule: Any = None
        self._start: dict[str, Any] = {}    # its attributes when first met
        self._moved: set[str] = set()       # those that calls change
        self._keeps = False

    def meet(self, schedule: Any) -> None:
        """Remember it as it is, if it is another one than before."""
        if schedule is not self._schedule:
            self._schedule, self._moved = schedule, set()
            self._start = self._read()

    def ask(self, schedule: Schedule, number: int) -> float:
        """``schedule(number)``; outside of `moving` it is left as it was."""
        self.meet(schedule)
        if self._keeps:
            return schedule(number)
        before = self._read()
        try:
            return schedule(number)
        finally:
            self._put(before, self._changed(before))

    def moving(self, schedule: Any) -> contextlib.AbstractContextManager[None]:
        """Inside the block an update asks `schedule`: what the calls change
        stays, unless the block fails."""
        self.meet(schedule)
        return contextlib.nullcontext() if schedule is None \
            else self._moving()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        before, self._keeps = self._read(), True
        try:
            yield
        except BaseException:
            self._put(before, self._changed(before))
            raise
        finally:
            self._keeps = False
        self._moved |= self._changed(before)

    def _changed(self, before: Mapping[str, Any]) -> set[str]:
        """The keys of what is not as it was `before`."""
        after = self._read()
        return {key for key in before.keys() | after.keys()
                if key not in before or key not in after
                or not _same(before[key], after[key])}

    def export(self, schedule: Any) -> dict[str, Any] | None:
        """Its state as JSON has it, for `restore`; None without one."""
        if schedule is None:
            return None
        self.meet(schedule)
        now = self._read()
        return {"kind": _kind(schedule), "start": _packed(self._start),
                "now": _packed({key: now[key] for key in self._moved
                                if key in now})}

    def restore(self, schedule: Any, saved: Mapping[str, Any] | None) -> None:
        """Put `export` of the same schedule back; what is of another one, or
        has other options, begins where it did. None, of older files:
        nothing is done."""
        if saved is None or schedule is None:
            return
        self.meet(schedule)
        alike = saved["kind"] == _kind(schedule) and json.dumps(
            saved["start"], sort_keys=True) == json.dumps(
                _packed(self._start), sort_keys=True)
        now = unpack(saved["now"]) if alike else {}
        self._moved |= set(now)
        self._put({**{key: value for key, value in self._start.items()
                           if key in self._moved}, **now}, self._moved)

    # -- its attributes -----------------------------------------------------

    def _spaces(self) -> dict[str, dict[str, Any]]:
        """The attributes of a schedule and of those inside it, by path."""
        found: dict[str, dict[str, Any]] = {}
        waiting, met = [("", self._schedule)], set()
        while waiting and len(found) < _PARTS:
            path, x = waiting.pop(0)
            if isinstance(x, MethodType):
                x = x.__self__
            if id(x) in met or type(x).__module__ == lr_scheduler.__name__ \
                    or isinstance(x, (type, ModuleType, Hints)) \
                    or self._backend.parts(x) is not None:
                continue    # no state, or a network, or what trains it
            met.add(id(x))
            inner: Any = ()
            if isinstance(x, partial):
                inner = ("func", x.func), *enumerate(x.args)
            elif isinstance(x, (list, tuple)) and len(x) < _LARGE:
                inner = enumerate(x)
            elif isinstance(x, dict) and len(x) < _LARGE:
                inner = x.items()
            elif not met - {id(x)} or callable(x):
                space = getattr(x, "__dict__", None)
                if isinstance(space, dict):
                    found[path], inner = space, space.items()
            waiting += [(f"{path}.{key}", part) for key, part in inner
                        if type(part) not in _PLAIN]
        return found

    def _read(self) -> dict[str, Any]:
        """All attributes, by path; copies of what may change in place."""
        return {f"{path}/{name}": x if type(x) in _PLAIN else _copy(x)
                for path, space in self._spaces().items()
                for name, x in space.items()}

    def _put(self, values: Mapping[str, Any], keys: Collection[str]
             ) -> None:
        """Write the attributes `keys`; without a value there they go."""
        if not keys:
            return
        spaces = self._spaces()
        for key in keys:
            path, _, name = key.rpartition("/")
            space = spaces.get(path, {})
            if key not in values:
                space.pop(name, None)
                continue
            value, old = _copy(values[key]), space.get(name)
            if type(value) is list is type(old):
                old[:] = value      # the user may have it too
            elif type(value) is dict is type(old):
                old.clear()
                old.update(value)
            elif type(value) is np.ndarray is type(old) \
                    and value.shape == old.shape and value.dtype == old.dtype:
                old[...] = value
            else:
                space[name] = value


def check(saved: Any) -> None:
    """An Exception for what `ScheduleState.export` cannot have given."""
    if saved is not None:
        str(saved["kind"]), unpack(saved["start"]), unpack(saved["now"])


def _kind(schedule: Any) -> str:
    root = schedule.__self__ if isinstance(schedule, MethodType) else schedule
    return f"{type(root).__module__}.{type(root).__qualname__}"


def _copy(x: Any) -> Any:
    """A copy of plain data; all else as it is."""
    if type(x) is list and _PLAIN.issuperset(map(type, x)) \
            and len(x) < _LARGE:
        return x[:]     # quicker
    tree = _tree(x)
    return x if tree is None else _built(tree)


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) in _PLAIN and type(a) is type(b) and a == b:
        return True
    if type(a) is list is type(b) and len(a) == len(b) \
            and all(map(operator.is_, a, b)):
        return True
    tree = _tree(a)
    return tree is not None and json.dumps(tree) == json.dumps(_tree(b))


def _tree(x: Any) -> Any:
    """Plain data as JSON has it: ``[kind, content]``. None for all else."""
    kind = type(x).__name__
    if type(x) in _PLAIN:
        return [kind, x]
    if isinstance(x, (np.generic, np.ndarray)):
        if type(x).__module__ == "numpy" and x.dtype.kind in "biuf" \
                and x.itemsize <= 8 and x.size < _LARGE:
            return [kind, x.tolist(), x.dtype.str]
    elif type(x) in (list, tuple, dict) and len(x) < _LARGE:
        parts = [_tree(part) for part in (
            [one for pair in x.items() for one in pair]
            if type(x) is dict else x)]
        return None if None in parts else [kind, parts]
    return None


def _built(tree: Any) -> Any:
    kind, content, *dtype = tree
    if dtype:
        found = np.array(content, dtype[0])
        return found if kind == "ndarray" else found[()]
    if kind in ("list", "tuple"):
        parts = [_built(part) for part in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        parts = [_built(part) for part in content]
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if type(content) not in _PLAIN or type(content).__name__ != kind:
        raise ValueError(f"{content!r} is no {kind}")
    return content


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is plain."""
    trees = {key: _tree(x) for key, x in values.items()}
    return {key: tree for key, tree in trees.items() if tree is not None}


def unpack(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `ScheduleState.export` has packed."""
    return {key: _built(tree) for key, tree in values.items()}
