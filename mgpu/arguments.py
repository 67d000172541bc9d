"""Checks that arguments of many functions share."""
import operator
from typing import Any

import numpy as np


def is_integer(value: Any, least: int) -> bool:
    """Whether `value` is a whole number (of Python, NumPy or any type with
    ``__index__``; no truth value) of `least` or more."""
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def integer(name: str, value: Any, least: int) -> int:
    """`value` as an int of `least` or more, or ValueError."""
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer of {least} or more; "
                         f"received {value!r}.")
    return operator.index(value)
