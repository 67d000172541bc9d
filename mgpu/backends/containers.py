"""Lists, tuples, dicts, deques and dataclasses, which may hold arrays."""
import collections
import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

#: the arguments of one device: (args, kwargs)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Batch(NamedTuple):
    """What the devices' calls are parts of.

    Attributes
    ----------
    bounds : list of (start, stop)
        The examples of each call.
    join : callable
        ``join(values, name, place)``: an attribute's values on the devices,
        joined like an output. ValueError where they cannot be.
    split_like : callable
        See `BatchSplit.split_like`; the size is that of this batch.
    """

    bounds: Sequence[tuple[int, int]]
    join: Callable[[list[Any], str, tuple[int, str]], Any]
    split_like: Callable[..., Any]


def _not_joined(values: list[Any], name: str, place: Any) -> Any:
    return values[0]


#: one call by itself
ONE = Batch([(0, 1)], _not_joined, lambda x, part, *_: x)


class Probed(NamedTuple):
    """What a pass that nothing sees has given.

    Attributes
    ----------
    output : object
    attribute : callable
        ``attribute((id of a module, name))``: what forward has set there.
    """

    output: Any
    attribute: Callable[[tuple[int, str]], Any]


def parts(x: Any) -> tuple[list[Any], list[Any]] | None:
    """The keys and the values of a container, or None for anything else."""
    if hasattr(type(x), "__dataclass_fields__"):
        names = [f.name for f in dataclasses.fields(x)
                 if f.init and hasattr(x, f.name)]
        return names, [getattr(x, name) for name in names]
    if isinstance(x, (dict, collections.UserDict)):
        return list(x), list(x.values())
    if isinstance(x, (list, tuple, collections.deque)):
        return list(range(len(x))), list(x)
    return None


def rebuild(x: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """A container like `x` with other values under the same keys."""
    if hasattr(type(x), "__dataclass_fields__"):
        return dataclasses.replace(x, **dict(zip(keys, values)))
    if isinstance(x, tuple):
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    new = copy.copy(x)      # of a subclass with its attributes
    if isinstance(x, (dict, collections.UserDict)):
        new.update(zip(keys, values))
    else:
        new.clear()
        new.extend(values)
    return new


def replace(x: Any, is_array: Callable[[Any], bool],
            function: Callable[[Any], Any]) -> Any:
    """`x` with ``function(array)`` for each array in it.

    Returns `x` itself where no array changes.
    """
    if is_array(x):
        return function(x)
    found = parts(x)
    if not found:
        return x
    new = [replace(value, is_array, function) for value in found[1]]
    if all(a is b for a, b in zip(new, found[1])):
        return x
    return rebuild(x, found[0], new)


def have_form(x: Any, other: Any, is_array: Callable[[Any], bool], old: int,
              new: int) -> bool:
    """Whether the arrays in `x` have the shapes of those in `other`, with
    `new` examples for `old` ones."""
    shapes, others = ([tuple(array.shape) for array in arrays_in(
        value, is_array)] for value in (x, other))
    return list(map(len, shapes)) == list(map(len, others)) and all(
        n == m or (m, n) == (old, new) for shape, like in zip(shapes, others)
        for n, m in zip(shape, like))


def arrays_in(x: Any, is_array: Callable[[Any], bool]) -> list[Any]:
    """All arrays in `x`, in order."""
    if is_array(x):
        return [x]
    found = parts(x)
    return [array for value in found[1]
            for array in arrays_in(value, is_array)] if found else []


# -- what functions hold besides ----------------------------------------------

#: makes an object of others than it holds, in their order
Make = Callable[[list[Any]], Any]


def opened(x: Any, roots: tuple[type, ...]) -> tuple[list[Any], Make | None]:
    """What a container, partial, closure, bound method or weak reference
    holds, and what makes one like it; nothing and None for other objects.

    `roots` are the types of modules and arrays: no other object has methods
    and weak references that are made again.
    """
    if isinstance(x, functools.partial):
        count = 1 + len(x.args)
        return [x.func, *x.args, *x.keywords.values()], lambda new: \
            functools.partial(*new[:count],
                              **dict(zip(x.keywords, new[count:])))
    if isinstance(x, types.FunctionType):
        cells = [*filter(_is_filled, x.__closure__ or ())]
        return [cell.cell_contents for cell in cells], \
            functools.partial(_function_like, x, cells)
    if isinstance(x, types.MethodType):
        return [x.__self__] if isinstance(x.__self__, roots) else [], \
            lambda new: types.MethodType(x.__func__, *new)
    if isinstance(x, weakref.WeakMethod):
        held, make = opened(x(), roots)
        return held, make and (lambda new: weakref.WeakMethod(make(new)))
    if isinstance(x, weakref.ref):
        return [x()] if isinstance(x(), roots) else [], \
            lambda new: weakref.ref(*new)
    if isinstance(x, (set, frozenset)):
        return [*x], type(x)
    found = parts(x)
    if found is None:
        return [], None
    if isinstance(x, dict):
        return found[1] + found[0], functools.partial(_dict_like, x)
    return found[1], functools.partial(rebuild, x, found[0])


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _function_like(x: types.FunctionType, cells: list[types.CellType],
                   new: list[Any]) -> types.FunctionType:
    # Unchanged cells are shared: counters by `nonlocal` go on.
    other = {id(cell): types.CellType(value) for cell, value in zip(
        cells, new) if value is not cell.cell_contents}
    made = types.FunctionType(
        x.__code__, x.__globals__, x.__name__, x.__defaults__,
        tuple(other.get(id(cell), cell) for cell in x.__closure__ or ()))
    made.__kwdefaults__ = x.__kwdefaults__
    made.__dict__.update(x.__dict__)
    return made


def _dict_like(x: dict[Any, Any], new: list[Any]) -> Any:
    made = copy.copy(x)
    made.clear()
    made.update(zip(new[len(x):], new))
    return made
