"""The functions of ``torch.nn.init``, drawn in NumPy."""
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import init

from mgpu.backends import base

Shape = tuple[int, ...]


def _fans(shape: Shape) -> tuple[int, int]:
    """Torch's own function, which reads the shape only."""
    return init._calculate_fan_in_and_fan_out(torch.empty(shape,
                                                          device="meta"))


def _uniform(shape: Shape, rng: Any, a: float, b: float) -> np.ndarray:
    return rng.uniform(a, b, shape)


def _normal(shape: Shape, rng: Any, mean: float, std: float) -> np.ndarray:
    return rng.normal(mean, std, shape)


def _trunc_normal(shape: Shape, rng: Any, mean: float, std: float, a: float,
                  b: float) -> np.ndarray:
    """What lies outside of [a, b] is drawn again."""
    low, high = ((x - mean) / (std * math.sqrt(2)) for x in (a, b))
    inside = (math.erf(high) - math.erf(low)) / 2
    if inside < 1e-3:
        raise ValueError(
            "trunc_normal_ draws again what lies outside of [a, b]; received "
            f"[{a!r}, {b!r}], which has {inside:.1e} of a normal distribution "
            f"around {mean!r} of deviation {std!r}. Choose wider bounds: they "
            "are values, and no multiples of std.")
    values = rng.normal(mean, std, math.prod(shape))
    while (wrong := (values < a) | (values > b)).any():
        values[wrong] = rng.normal(mean, std, int(wrong.sum()))
    return values.reshape(shape)


def _xavier(shape: Shape, gain: float) -> float:
    return gain * math.sqrt(2.0 / sum(_fans(shape)))


def _kaiming(shape: Shape, a: float, mode: str, nonlinearity: Any) -> float:
    fan = init._calculate_correct_fan(torch.empty(shape, device="meta"),
                                      mode)
    return init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


def _xavier_uniform(shape: Shape, rng: Any, gain: float) -> np.ndarray:
    bound = math.sqrt(3.0) * _xavier(shape, gain)
    return rng.uniform(-bound, bound, shape)


def _xavier_normal(shape: Shape, rng: Any, gain: float) -> np.ndarray:
    return rng.normal(0.0, _xavier(shape, gain), shape)


def _kaiming_uniform(shape: Shape, rng: Any, **options: Any) -> np.ndarray:
    bound = math.sqrt(3.0) * _kaiming(shape, **options)
    return rng.uniform(-bound, bound, shape)


def _kaiming_normal(shape: Shape, rng: Any, **options: Any) -> np.ndarray:
    return rng.normal(0.0, _kaiming(shape, **options), shape)


def _orthogonal(shape: Shape, rng: Any, gain: float) -> np.ndarray:
    if len(shape) < 2:
        raise ValueError("orthogonal_ needs a weight of at least two axes; "
                         f"received the shape {shape}.")
    rows, columns = shape[0], math.prod(shape[1:])
    start = rng.normal(0.0, 1.0, (rows, columns))
    q, r = np.linalg.qr(start.T if rows < columns else start)
    q = q * np.sign(np.diag(r))
    return gain * (q.T if rows < columns else q).reshape(shape)


def _sparse(shape: Shape, rng: Any, sparsity: float, std: float
            ) -> np.ndarray:
    if len(shape) != 2 or not 0 <= sparsity <= 1:
        raise ValueError(
            "sparse_ draws a weight of two axes, with sparsity from 0 to 1; "
            f"received the shape {shape} and {sparsity!r}.")
    values = rng.normal(0.0, std, shape)
    count = math.ceil(sparsity * shape[0])
    for column in range(shape[1]):
        values[rng.permutation(shape[0])[:count], column] = 0
    return values


def _itself(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """A function that draws nothing, by itself."""
    def fill(shape: Shape, rng: Any, **options: Any) -> np.ndarray:
        return function(torch.empty(shape, dtype=torch.float64),
                        **options).numpy()
    return fill


_RULES: dict[Any, Callable[..., np.ndarray]] = {
    init.uniform_: _uniform, init.normal_: _normal,
    init.trunc_normal_: _trunc_normal, init.xavier_uniform_: _xavier_uniform,
    init.xavier_normal_: _xavier_normal,
    init.kaiming_uniform_: _kaiming_uniform,
    init.kaiming_normal_: _kaiming_normal, init.orthogonal_: _orthogonal,
    init.sparse_: _sparse, **{
        function: _itself(function) for function in (
            init.constant_, init.zeros_, init.ones_, init.eye_,
            init.dirac_)}}


class TorchDraws(base.GivenInitializer):
    """A function of ``torch.nn.init``, with options."""

    def __init__(self, function: Any, options: dict[str, Any]):
        rule = _RULES[function]
        name = f"torch.nn.init.{function.__name__}"
        if options.get("generator") is not None:
            raise ValueError(
                "initial values are drawn in NumPy from mgpu.initialize's "
                f"seed=; received {name} with a generator. Leave it out, and "
                "pass seed=.")
        tensor, *known = inspect.signature(function).parameters.values()
        wrong = [key for key in options
                 if key not in {p.name for p in known}]
        needed = [p.name for p in known
                  if p.default is p.empty and p.name not in options]
        if wrong or needed:
            raise ValueError(
                f"the options of {name} are "
                f"{', '.join(p.name for p in known) or 'none'}; received "
                f"{', '.join(options) or 'none'}. Use functools.partial("
                f"{name}" + "".join(f", {x}=..." for x in needed) + ").")
        every = {p.name: p.default for p in known if p.name != "generator"}
        every.update((key, x) for key, x in options.items()
                     if key != "generator")
        self._draw = functools.partial(rule, **every)
        named = ", ".join(f"{key}={x!r}" for key, x in options.items())
        self.text = f"{name}({named})"

    def draw(self, name, shape, rng):
        try:
            return self._draw(shape, rng)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.text} cannot draw the shape {shape}: "
                             f"{error}") from None


def initializer(x: Any) -> TorchDraws | None:
    """`x`, a function of ``torch.nn.init``, or a `functools.partial` of one.
    None for what is no function of that module.

    Raises
    ------
    ValueError
        One without a counterpart, wrong options, or options by their place.
    """
    options: dict[str, Any] = {}
    while isinstance(x, functools.partial):
        if x.args:
            raise ValueError(
                "an initialiser is a function of the weight, with options by "
                f"name; received functools.partial of {x.func.__name__} with "
                f"{x.args!r}. Name them: functools.partial(function, "
                "name=value).")
        options = {**x.keywords, **options}
        x = x.func
    if getattr(x, "__module__", None) != init.__name__ or not callable(x):
        return None
    if x not in _RULES:
        raise ValueError(
            "init= takes the functions of torch.nn.init that end in '_'; "
            f"received {x.__name__}. Use one of "
            f"{', '.join(f.__name__ for f in _RULES)}.")
    return TorchDraws(x, options)
