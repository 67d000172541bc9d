"""Functions of ``torch.nn.init`` with a random stream of mgpu."""
import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch.nn import init

from mgpu.backends._torch.streams import standing_in
from mgpu.backends.native_objects import GivenInitializer

_FUNCTIONS = [getattr(init, name) for name in (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_",
    "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
    "sparse_", "constant_", "zeros_", "ones_", "eye_", "dirac_")]


class TorchDraws(GivenInitializer):
    """A function of ``torch.nn.init``, with options.

    Computes on the host in float64, so both backends and all devices have the
    same values."""

    def __init__(self, function: Any, options: dict[str, Any]):
        name = f"torch.nn.init.{function.__name__}"
        known = inspect.signature(function)
        if options.get("generator") is not None:
            raise ValueError(
                "initial values depend on seed= of mgpu.initialize; "
                f"received {name} with a generator. Omit it, and pass seed=.")
        try:
            known.bind(None, **options)
        except TypeError as error:
            raise ValueError(
                f"{name} has the options {known}; received "
                f"{options}: {error}. Use functools.partial({name}, "
                "option=value).") from None
        self._function, self._options = function, options
        named = ", ".join(f"{key}={x!r}" for key, x in options.items())
        self.text = f"{name}({named})"

    def draw(self, name, shape, rng):
        # Not as generator=, which sparse_ does not use for all numbers.
        stream = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        x = torch.empty(shape, dtype=torch.float64)
        try:
            with standing_in(stream):
                values: np.ndarray = self._function(
                    x, **self._options).numpy()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.text} cannot draw the shape {shape}: "
                             f"{error}") from None
        return values


def initializer(x: Any) -> TorchDraws | None:
    """Convert a function of ``torch.nn.init``, or a `functools.partial` of
    one. None for other objects.

    Raises
    ------
    ValueError
        The function is not supported, or has invalid or positional options.
    """
    options: dict[str, Any] = {}
    while isinstance(x, functools.partial):
        if x.args:
            raise ValueError(
                "options of an initializer must be keyword arguments; "
                f"received functools.partial of {x.func.__name__} with "
                f"{x.args!r}. Name them: functools.partial(function, "
                "name=value).")
        options = {**x.keywords, **options}
        x = x.func
    if getattr(x, "__module__", None) != init.__name__ or not callable(x):
        return None
    if x not in _FUNCTIONS:
        raise ValueError(
            "init= takes the functions of torch.nn.init that end in '_'; "
            f"received {x.__name__}. Use one of "
            f"{', '.join(f.__name__ for f in _FUNCTIONS)}.")
    return TorchDraws(x, options)
