"""Argument checks."""
import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar, cast

import numpy as np


def is_integer(value: Any, least: int) -> bool:
    """Whether `value` is an integer, at least `least`: of Python, NumPy or
    any type with ``__index__``, except bool."""
    if type(value) is int:      # quicker
        return value >= least
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a real number: of Python, NumPy or any subclass of
    `numbers.Real`, except bool."""
    return type(value) is float or (    # quicker
        isinstance(value, Real) and not isinstance(value, bool))


def integer(name: str, value: Any, least: int) -> int:
    """`value` as an int, at least `least`. Raises ValueError."""
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer of {least} or more; "
                         f"received {value!r}.")
    return operator.index(value)


def batch_size(value: Any) -> int:
    """`value` as a batch size, 1 or more; accepts a float such as 32.0.
    Raises ValueError."""
    if is_number(value) and float(value).is_integer():
        value = int(value)
    return integer("batch_size", value, 1)


def number(name: str, value: Any, least: float = -math.inf,
           most: float = math.inf) -> float:
    """`value` as a finite float in [`least`, `most`]. Raises ValueError."""
    if not is_number(value) or not math.isfinite(value) \
            or not least <= value <= most:
        low = "" if least == -math.inf else f" of {least:g} or more"
        high = "" if most == math.inf else f" and {most:g} or less"
        raise ValueError(f"{name} must be a finite number{low}{high}; "
                         f"received {value!r}.")
    return float(value)


def finite(what: str, value: Any, limits: str = "",
           fits: Callable[[float], bool] = lambda value: True) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number and
    ``fits(value)``. `limits` describes the condition in the message."""
    rule = f"{what} must be a finite number{limits}"
    if not is_number(value):
        raise TypeError(f"{rule}; received {value!r} of type "
                        f"{type(value).__name__}.")
    if not (abs(value) < math.inf and fits(value)):
        raise ValueError(f"{rule}; received {value!r}.")


def check_batch_size(batch_size: Any) -> float:
    """`batch_size` as the divisor of sums over examples, a number of examples
    or tokens, or a sum of weights. Raises ValueError unless it is a finite
    number above 0."""
    if is_integer(batch_size, 1):
        return operator.index(batch_size)
    x = batch_size.item() if getattr(batch_size, "shape", None) == () \
        else batch_size
    if is_number(x) and not isinstance(x, np.bool_) \
            and 0 < x < math.inf:
        return float(x)
    raise ValueError(f"batch_size must be a finite number above 0; received "
                     f"{batch_size!r}. Pass the global batch size, over all "
                     "devices, or another divisor of the loss: the number of "
                     "tokens, or the sum of the weights.")


def one_of(name: str, value: Any, known: Collection[Any]) -> Any:
    """`value`. Raises ValueError if it is not in `known`."""
    if value not in known:
        raise ValueError(f"unknown {name}; received {value!r}. Use one of "
                         f"{', '.join(map(repr, known))}.")
    return value


def one_given(**values: Any) -> Any:
    """The value of an argument with two names. Raises TypeError unless
    exactly one of `values` is not None."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        raise TypeError(f"expected {' or '.join(values)}; received "
                        f"{' and '.join(given) or 'neither'}. Pass one.")
    return values[given[0]]


def batches(name: str, value: Any) -> Any:
    """`value`. Raises TypeError if it is not iterable."""
    if not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        raise TypeError(f"{name} must be an iterable of batches; received "
                        f"{type(value).__name__}. Pass a list of (X, y) "
                        "pairs, or a data loader.")
    return value


def by_name(name: str, value: Any) -> Mapping[str, Any]:
    """`value`, or an empty dict for None. Raises TypeError if it is not a
    mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict with names as keys; received "
                        f"{type(value).__name__}: {value!r:.60}.")
    return value


def described(thing: Any) -> str:
    """``Class(option=value, ...)``: the options of the constructor, which are
    attributes of the same names, or of these behind an underscore."""
    found = {name: getattr(thing, name, getattr(thing, f"_{name}", thing))
             for name in inspect.signature(type(thing)).parameters}
    options = ", ".join(f"{name}={value!r}" for name, value in found.items()
                        if value is not thing)
    return f"{type(thing).__name__}({options})"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def hinting(**hints: str) -> Callable[[_Function], _Function]:
    """Decorate a function so that a keyword of another framework raises a
    TypeError with its hint: what to write."""
    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in hints:
                    raise TypeError(
                        f"{function.__qualname__.removesuffix('.__init__')}() "
                        f"has no argument {name!r}. Use {hints[name]}.")
            return function(*args, **kwargs)
        return cast(_Function, call)
    return decorate


class Hints:
    """Mixin whose AttributeError suggests mgpu's name for a framework's."""

    #: attribute name of a framework -> mgpu's
    _hints: ClassVar[Mapping[str, str]] = {}
    #: public names that other modules of mgpu use, and users do not
    _internal: ClassVar[Collection[str]] = ()

    def __dir__(self) -> list[str]:
        """What a user calls."""
        return sorted(name for name in super().__dir__()
                      if not name.startswith("_")
                      and name not in self._internal)

    if not TYPE_CHECKING:
        def __getattr__(self, name):
            use = f". Use {self._hints[name]}." if name in self._hints else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
                + use, name=name, obj=self)
