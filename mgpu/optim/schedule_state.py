"""What the calls of a schedule change in it: MXNet's count as they go."""
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from mgpu.backends import Backend
from mgpu.optim import lr_scheduler
from mgpu.utils.arguments import Hints, finite

Schedule = Callable[[int], float]

_PLAIN = {type(None), bool, int, float, str}
_PARTS = 50         # objects of one schedule that are searched
_LARGE = 1000       # a longer table, or log, is no state


def rate_of(schedule: Schedule, number: int) -> float:
    """The rate of update `number`. ValueError or TypeError for a schedule
    that returns no finite number, 0 or more."""
    rate = schedule(number)
    finite("what a schedule returns", rate, ", 0 or more", lambda x: x >= 0)
    return float(rate)


class ScheduleState:
    """The state of a trainer's schedule, whatever that is.

    A schedule may be any callable. What its calls change in its attributes,
    and in those of schedules inside it, is its state, if it is made of
    numbers, text, lists, tuples, dicts and NumPy arrays; all else are
    options, which belong to the program.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._schedule: Any = None
        self._start: dict[str, Any] = {}    # its attributes at first
        self._moved: set[str] = set()       # those that calls change

    def begin(self, schedule: Any) -> None:
        """Remember its attributes, if it is another one than before."""
        if schedule is not self._schedule:
            self._schedule, self._moved = schedule, set()
            self._start = self._read()

    def look(self, schedule: Schedule, number: int) -> float:
        """`rate_of`, which leaves the schedule as it was."""
        with self.moving(schedule, False):
            return rate_of(schedule, number)

    @contextlib.contextmanager
    def moving(self, schedule: Any, stays: bool = True) -> Iterator[None]:
        """A block that may call `schedule`: what that changes is state, and
        is undone where the block fails, or unless it `stays`."""
        self.begin(schedule)
        before, done = self._read(), False
        try:
            yield
            done = stays
        finally:
            after = self._read()
            changed = {key for key in before.keys() | after.keys()
                       if before.get(key) != after.get(key)}
            if done:
                self._moved |= changed
            else:
                self._write(before, changed)

    def export(self, schedule: Any) -> dict[str, Any] | None:
        """Its state as JSON has it, for `restore`; None without one."""
        if schedule is None:
            return None
        self.begin(schedule)
        now = self._read()
        return {"kind": _kind(schedule), "start": self._start,
                "now": {key: now[key] for key in self._moved & now.keys()}}

    def restore(self, schedule: Any, saved: Mapping[str, Any] | None) -> None:
        """Put `export` of the same schedule back; what is of another one, or
        has other options, begins where it did. None, of older files:
        nothing is done."""
        if saved is None or schedule is None:
            return
        self.begin(schedule)
        same = saved["kind"] == _kind(schedule) and json.dumps(
            saved["start"], sort_keys=True) == json.dumps(
                self._start, sort_keys=True)
        now = saved["now"] if same else {}
        self._moved |= now.keys()
        self._write({**self._start, **now}, self._moved)

    # -- its attributes -----------------------------------------------------

    def _spaces(self) -> dict[str, dict[str, Any]]:
        """The attributes of the schedule and of callables inside it, by
        path."""
        found: dict[str, dict[str, Any]] = {}
        seen, left = set[int](), [("", self._schedule)]
        while left:
            path, x = left.pop()
            if isinstance(x, MethodType):
                x = x.__self__
            if type(x) in _PLAIN or id(x) in seen or len(seen) > _PARTS \
                    or type(x).__module__ == lr_scheduler.__name__ \
                    or isinstance(x, (type, ModuleType, Hints)) \
                    or self._backend.parts(x) is not None:
                continue    # no state, or a network, or what trains it
            seen.add(id(x))
            inner: Any = {}
            if isinstance(x, partial):
                inner = {"func": x.func, **dict(enumerate(x.args))}
            elif isinstance(x, (list, tuple, dict)):
                if len(x) < _LARGE:
                    inner = x if isinstance(x, dict) else dict(enumerate(x))
            elif not path or callable(x):
                inner = found[path] = getattr(x, "__dict__", {})
            left += [(f"{path}.{key}", part)
                     for key, part in reversed([*inner.items()])]
        return found

    def _read(self) -> dict[str, Any]:
        """Attributes of plain data by path, as JSON has them."""
        return {f"{path}/{name}": tree
                for path, space in self._spaces().items()
                for name, x in space.items()
                if (tree := _tree(x)) is not None}

    def _write(self, values: Mapping[str, Any], keys: set[str]) -> None:
        """Set the attributes `keys`; those without a value are deleted."""
        spaces = self._spaces() if keys else {}
        for key in keys:
            path, _, name = key.rpartition("/")
            space = spaces.get(path, {})
            old = space.pop(name, None)
            if key in values:
                value = built(values[key])
                if type(value) is list is type(old):
                    old[:] = value      # the user may have it too
                    value = old
                space[name] = value


def check(saved: Any) -> None:
    """An Exception for what `ScheduleState.export` cannot have given."""
    if saved is not None:
        str(saved["kind"])
        for tree in (*saved["start"].values(), *saved["now"].values()):
            built(tree)


def _kind(schedule: Any) -> str:
    root = schedule.__self__ if isinstance(schedule, MethodType) else schedule
    return f"{type(root).__module__}.{type(root).__qualname__}"


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


def built(tree: Any) -> Any:
    """The plain data of a tree in `ScheduleState.export`."""
    kind, content, *dtype = tree
    if dtype:
        found = np.array(content, dtype[0])
        return found if kind == "ndarray" else found[()]
    if kind in ("list", "tuple", "dict"):
        parts = [built(part) for part in content]
        return parts if kind == "list" else tuple(parts) if kind == "tuple" \
            else dict(zip(parts[::2], parts[1::2], strict=True))
    if type(content) not in _PLAIN or type(content).__name__ != kind:
        raise ValueError(f"{content!r} is no {kind}")
    return content
