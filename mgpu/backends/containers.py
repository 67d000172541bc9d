"""Containers of arrays: lists, tuples, dicts, deques and dataclasses."""
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
    """A batch that is split over devices.

    Attributes
    ----------
    bounds : list of (start, stop)
        The examples of each call.
    join : callable
        ``join(values, name, place)`` joins the values of an attribute on the
        devices, as an output. Raises ValueError.
    split_like : callable
        See `BatchSplit.split_like`, with the size of this batch.
    """

    bounds: Sequence[tuple[int, int]]
    join: Callable[[list[Any], str, tuple[int, str]], Any]
    split_like: Callable[..., Any]


def _not_joined(values: list[Any], name: str, place: Any) -> Any:
    return values[0]


#: a batch of a single call
ONE = Batch([(0, 1)], _not_joined, lambda x, part, *_: x)


class Probed(NamedTuple):
    """Result of a pass without side effects.

    Attributes
    ----------
    output : object
    attribute : callable
        ``attribute((id of a module, name))``: the value set by forward.
    """

    output: Any
    attribute: Callable[[tuple[int, str]], Any]


def parts(x: Any) -> tuple[list[Any], list[Any]] | None:
    """Keys and values of a container. None for other objects."""
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
    """A container of the type of `x` with other values for the same keys."""
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
    """`x` with each array replaced by ``function(array)``. Returns `x` itself
    if no array changes."""
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
    """Whether the arrays in `x` have the shapes of those in `other`, except
    for `new` examples instead of `old`."""
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


# -- references of functions and other objects --------------------------------

#: makes a copy of an object with other references, in order
Make = Callable[[list[Any]], Any]


def opened(x: Any, roots: tuple[type, ...]) -> tuple[list[Any], Make | None]:
    """The references of a container, partial, closure, bound method or weak
    reference, and a function that makes a copy with others. An empty list and
    None for other objects.

    `roots` are the types of modules and arrays. Bound methods and weak
    references of other objects are not copied.
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
    # Unchanged cells are shared, for example `nonlocal` counters.
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
