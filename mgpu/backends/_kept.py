"""What forward hooks keep where all devices share it."""
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
    """The arrays that the user's forward hooks reach outside of modules, as
    they are now: in a dictionary that a function closes over, perhaps, which
    the replicas share, or have copies of.

    Parameters
    ----------
    layers : iterable of networks
        All with the tables of hooks that Gluon and torch have.
    array, network : type
        Those of the engine.
    """

    def __init__(self, layers: Iterable[Any] = (), array: type = object,
                 network: type = object) -> None:
        self._types = array, network
        self._found: list[tuple[Any, list[tuple[Any, Any]]]] = [
            (hook, [(_reference(x), _version(x))
                    for x in reached(hook, *self._types)])
            for m in layers
            for table in (m._forward_hooks, m._forward_pre_hooks)
            for hook in table.values()]

    def check(self) -> None:
        """ValueError where the passes of several devices have put others
        there."""
        for hook, known in self._found:
            now: list[Any] = list(reached(hook, *self._types))
            if len(now) != len(known) or any(
                    ref() is not x or _version(x) != version
                    for x, (ref, version) in zip(now, known)):
                raise ValueError(
                    "on several devices a forward hook keeps tensors on its "
                    "module, of which each device has one; received "
                    f"{getattr(hook, '__qualname__', repr(hook))}, which has "
                    "put them where all devices share them. Write "
                    "module.kept = output, and return it with the network's "
                    "output; or use one device.")


def _reference(x: Any) -> Callable[[], Any]:
    """Gives `x`; keeps it alive only where the engine has no weak references
    to arrays."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x


def _version(x: Any) -> Any:
    """What counts the writes to `x`, if the engine does."""
    return getattr(x, "_version", None)


def global_names(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code looks up, inner functions too."""
    return (*code.co_names, *(
        name for inner in code.co_consts if isinstance(inner, CodeType)
        for name in global_names(inner)))


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
        cells = [cell.cell_contents for cell in x.__closure__ or ()
                 if cell != _EMPTY_CELL]
        parts = [*cells, *(x.__defaults__ or ()),
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
