"""What hooks keep where all devices share it, and what objects hold."""
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import (CellType, CodeType, FunctionType, MethodType,
                   ModuleType)
from typing import Any

_LARGE = 1000       # a collection with more items is data
_EMPTY_CELL = CellType()
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)


class Kept:
    """The arrays that the user's hooks reach outside of modules, as they are
    now: in a dictionary that a function closes over, perhaps, which the
    replicas share, or have copies of.

    Parameters
    ----------
    hooks : iterable of (str, callable)
        Each with its kind: "forward", "backward", or "tensor".
    array, network : type, or tuple of them
        Those of the engine.

    Attributes
    ----------
    backward : bool
        Whether some of the hooks run in backward passes.
    """

    def __init__(self, hooks: Iterable[tuple[str, Any]] = (),
                 array: type | tuple[type, ...] = object,
                 network: type = object) -> None:
        self._types = array, network
        self._found: list[tuple[str, Any, list[tuple[Any, Any]]]] = [
            (kind, hook, [(_reference(x), version(x))
                          for x in reached(hook, *self._types)])
            for kind, hook in hooks]
        self.backward = any(kind != "forward" for kind, *_ in self._found)

    def check(self, backward: bool = False) -> None:
        """ValueError where the passes of several devices have put others
        there; `backward`: backward passes alone, in hooks on layers, or on
        tensors that forward passes have made."""
        for kind, hook, known in self._found:
            if backward and kind == "forward":
                continue
            now: list[Any] = list(reached(hook, *self._types))
            if len(now) != len(known) or any(
                    ref() is not x or version(x) != before
                    for x, (ref, before) in zip(now, known)):
                cure = (
                    "Write module.kept = output, and return it with the "
                    "network's output" if kind == "forward" else
                    "Return the layer's output with the network's output, and "
                    "take its gradient on each device: output.retain_grad() "
                    "before the backward pass")
                raise ValueError(
                    f"on several devices a {kind} hook keeps tensors on its "
                    "module, of which each device has one; received "
                    f"{getattr(hook, '__qualname__', repr(hook))}, which has "
                    f"put them where all devices share them. {cure}; or use "
                    "one device.")


def forward_hooks(layers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Those of layers, with the tables that Gluon and torch have."""
    for m in layers:
        for table in (m._forward_hooks, m._forward_pre_hooks):
            yield from (("forward", hook) for hook in table.values())


def _reference(x: Any) -> Callable[[], Any]:
    """Gives `x`; keeps it alive only where the engine has no weak references
    to arrays."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


def version(x: Any) -> int | None:
    """The number of writes to `x`, if the engine counts them: not MXNet, and
    torch not in inference mode."""
    try:
        return x._version
    except (AttributeError, RuntimeError):
        return None


def global_names(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code looks up, inner functions too; without
    those of pytest, which rewrites each `assert`."""
    return (*(name for name in code.co_names if not name.startswith("@")), *(
        name for inner in code.co_consts if isinstance(inner, CodeType)
        for name in global_names(inner)))


def cells(function: FunctionType) -> list[Any]:
    """What a function closes over, as far as it has a value."""
    return [cell.cell_contents for cell in function.__closure__ or ()
            if cell != _EMPTY_CELL]


class Untold:
    """Which of the arrays that nobody knows on other devices (they stand for
    what was left in attributes outside of the replicas' passes) a pass has
    read; code of the user's may catch the error."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        #: whether a pass has, which went on perhaps: what it has left in the
        #: place of such an array is nothing to go on from
        self.again = False

    def read(self, error: Exception) -> Exception:
        """A pass reads an array that `error` is about; returns it."""
        self._error = self._error or error
        return error

    def forget(self) -> None:
        """A pass begins."""
        self.again, self._error = self.again or self._error is not None, None

    def check(self) -> None:
        """ValueError if a pass has read one since `forget`."""
        if self._error is not None:
            raise self._error


def reached(x: Any, array: type | tuple[type, ...], network: type,
            depth: int = 5, met: set[int] | None = None) -> Iterator[Any]:
    """The arrays in what a hook may write to."""
    met = set() if met is None else met
    if isinstance(x, array):
        yield x
        return
    if not depth or id(x) in met or isinstance(x, (
            type, network, ModuleType, str)):
        return
    met.add(id(x))
    parts: Sequence[Any] = ()
    if isinstance(x, FunctionType):
        parts = [*cells(x), *(x.__defaults__ or ()),
                 *(x.__kwdefaults__ or {}).values(),
                 *map(x.__globals__.get, global_names(x.__code__))]
    elif isinstance(x, MethodType):
        parts = [x.__self__, x.__func__]
    elif isinstance(x, partial):
        parts = [x.func, x.args, x.keywords]
    elif isinstance(x, _COLLECTIONS):
        parts = list(x.values() if isinstance(x, dict) else x) \
            if len(x) <= _LARGE else ()
    elif type(x).__module__.split(".")[0] not in (
            "mgpu", network.__module__.split(".")[0]):
        parts = list(getattr(x, "__dict__", {}).values())
    for part in parts:
        yield from reached(part, array, network, depth - 1, met)


def pickled(x: Any) -> list[Any] | None:
    """What pickle would store of `x`; None: it is one thing."""
    try:
        reduced = x.__reduce_ex__(4)
    except Exception:       # a lock, a file, a generator
        return None
    if isinstance(reduced, str):
        return None
    _, arguments, state, items, pairs = (*reduced, *[None] * 4)[:5]
    return [*arguments, state, *(items or ()),
            *(part for pair in pairs or () for part in pair)]


def deep_copy(x: Any, twins: dict[Any, Any]) -> Any:
    """``copy.deepcopy(x, twins)``, also of dicts whose entries are their
    attributes, which that leaves empty, or fails with: ``self.__dict__ =
    self``, ``__getattr__ = dict.__getitem__``."""
    found = _own_attributes(x, twins)
    for one, own in found:
        kind: Any = type(one)
        twin = twins[id(one)] = kind.__new__(kind)
        if own:
            object.__setattr__(twin, "__dict__", twin)
    made = copy.deepcopy(x, twins)
    for one, own in found:
        dict.update(twins[id(one)], [
            copy.deepcopy(pair, twins) for pair in dict.items(one)])
        if not own:
            _space(twins[id(one)]).update(copy.deepcopy(_space(one), twins))
    return made


def _own_attributes(x: Any, twins: dict[Any, Any]) -> list[tuple[Any, bool]]:
    """Such dicts in `x`, and whether each is its own ``__dict__``."""
    found, waiting, met = [], [x], set(twins)
    while waiting:
        one = waiting.pop()
        if id(one) in met or isinstance(one, (
                type, ModuleType, str, int, float)):
            continue
        met.add(id(one))
        space = _space(one)
        if space is one:
            found.append((one, True))
        else:
            waiting += list(space.values())
            if isinstance(one, dict) and type(one) is not dict:
                try:
                    getattr(one, "__deepcopy__", None)
                except Exception:
                    found.append((one, False))
        if isinstance(one, _COLLECTIONS) and len(one) <= _LARGE:
            waiting += list(dict.values(one) if isinstance(one, dict)
                            else one)
    return found


def _space(x: Any) -> dict[Any, Any]:
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
