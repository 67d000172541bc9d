"""What hooks keep where all devices share it, and what objects hold."""
import copy
import dis
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
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


#: what may leave instructions behind it out
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def reads(layers: Iterable[Any], name: str) -> bool:
    """Whether code of these layers may read an attribute `name`; any code
    does that which is not theirs."""
    layers = list(layers)
    if any(True for _ in forward_hooks(layers)):
        return True
    found = [_read_names(kind) for kind in set(map(type, layers))]
    return any(names is None or name in names for names in found)


@cache
def _read_names(kind: type) -> frozenset[str] | None:
    """The attributes that the code of a class of layers reads. None: it may
    be any, since functions outside of the class get the layer."""
    found = set[str]()
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("mxnet", "torch", "builtins"):
            continue
        for f in vars(one).values():
            if not isinstance(f, FunctionType):
                if callable(f) or hasattr(f, "__get__"):
                    return None
                continue
            names = global_names(f.__code__)
            steps = list(dis.get_instructions(f.__code__))
            own = f.__code__.co_varnames[:1]
            if set(f.__code__.co_freevars) - {"__class__"} \
                    or any(isinstance(x, CodeType)
                           for x in f.__code__.co_consts) \
                    or any(isinstance(f.__globals__.get(x), FunctionType)
                           for x in names) \
                    or not {"getattr", "vars", "__dict__"}.isdisjoint(names) \
                    or any(step.opname != "STORE_ATTR" and own and (
                               step.argval == own[0] or isinstance(
                                   step.argval, tuple)
                               and own[0] in step.argval)
                           and not after.opname.endswith(("_ATTR", "_METHOD"))
                           for step, after in pairwise(steps)):
                return None
            found.update(_read_first(steps, own))
    return frozenset(found)


def _read_first(steps: Sequence[dis.Instruction], own: tuple[str, ...]
                ) -> set[str]:
    """The attributes that a function reads, without those that it has always
    written to its `own` object before."""
    names = [step.opname for step in steps]
    # `try` jumps without an instruction of its own
    always = names.count("PUSH_EXC_INFO") == names.count("WITH_EXCEPT_START")
    read, written = set[str](), set[str]()
    for before, step in pairwise(steps):
        always = always and step.opcode not in _JUMPS
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read |= {step.argval} - written
        elif step.opname == "STORE_ATTR" and always \
                and before.opname.startswith("LOAD_FAST") \
                and (before.argval,) == own:
            written.add(step.argval)
    return read


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
