"""Causes of other initial values."""
import math
from collections.abc import Callable, Sequence

import numpy as np

from mgpu import initializers
from mgpu.parity.causes.case import Case, Cause, Found


def _fan_in(shape: Sequence[int]) -> float:
    return math.prod(shape[1:])


def _average_fan(shape: Sequence[int]) -> float:
    return sum(initializers.fans(shape)) / 2


#: formula -> (uniform?, half width or standard deviation of a shape)
_FORMULAS: dict[str, tuple[bool, Callable[[Sequence[int]], float]]] = {
    "Uniform(0.07), Gluon's default": (True, lambda s: 0.07),
    "U(+-1/sqrt(fan_in)), torch's default": (
        True, lambda s: _fan_in(s) ** -0.5),
    "Xavier uniform": (True, lambda s: (3 / _average_fan(s)) ** 0.5),
    "He uniform, kaiming_uniform_": (
        True, lambda s: (6 / _fan_in(s)) ** 0.5),
    "Normal(0.01)": (False, lambda s: 0.01),
    "N(0, 1), torch's default for embeddings": (False, lambda s: 1.0),
    "Xavier normal": (False, lambda s: _average_fan(s) ** -0.5),
    "He normal, kaiming_normal_": (
        False, lambda s: (2 / _fan_in(s)) ** 0.5),
    "MSRAPrelu(), Gluon's": (
        False, lambda s: (2 / (1.0625 * _average_fan(s))) ** 0.5),
}


def _fits(value: np.ndarray, uniform: bool, size: float) -> bool:
    """Whether a draw of this formula would look like `value`: within four
    standard errors of the standard deviation (of a uniform one, 0.45 /
    sqrt(n), of a normal one, 0.71 / sqrt(n), relative), and inside the
    bounds of a uniform one."""
    n, spread = value.size, float(np.sqrt(np.mean(value ** 2)))
    if not uniform:
        # a uniform draw ends at 1.73 deviations; n normal ones go beyond
        return abs(spread / size - 1) < 4 * 0.71 / n ** 0.5 and (
            n < 64 or float(np.abs(value).max()) > 1.9 * size)
    return float(np.abs(value).max()) <= size * (1 + 1e-6) and abs(
        spread * 3 ** 0.5 / size - 1) < 4 * 0.45 / n ** 0.5


def causes(case: Case) -> Found:
    one, two = case.evidence.initial
    found: Found = []
    texts: dict[str, list[str]] = {}
    weights = [g.name for g in case.wrong("initial")
               if case.kinds[g.name] == "weight" and g.a == g.a
               and one[g.name].ndim > 1]
    if weights:
        for side, values in (("a", one), ("b", two)):
            texts[side] = [
                text for text, (uniform, size) in _FORMULAS.items()
                if all(_fits(values[n], uniform, size(values[n].shape))
                       for n in weights)]
        common = [t for t in texts["a"] if t in texts["b"]]
        if common:
            found.append(Cause("initial draw", (
                f"the weights of both sides look like {common[0]}, drawn "
                "with other random numbers: engines never draw alike, seeds "
                "or not. Start both from one set, weights='a'"), 0.0))
        elif texts["a"] or texts["b"]:
            looks = {s: texts[s][0] if texts[s] else "no formula known here"
                     for s in texts}
            found.append(Cause("initialiser", (
                f"the weights of {case.engine('a')} look like {looks['a']}, "
                f"those of {case.engine('b')} like {looks['b']} (first "
                f"{weights[0]}). Give both the same: Side(init=...), or "
                "mgpu.initialize(net, init=...) on both engines"),
                0.0 if texts["a"] and texts["b"] else 1.0))
    others = [g.name for g in case.wrong("initial")
              if case.kinds[g.name] in ("bias", "gamma", "beta")]
    for side, own, other in (("a", one, two), ("b", two, one)):
        plain = [n for n in others if np.unique(own[n]).size == 1
                 and np.unique(other[n]).size > 1]
        if others and plain == others:
            far = "b" if side == "a" else "a"
            value = float(own[plain[0]].flat[0])
            text = (f"{plain[0]} and {len(plain) - 1} other biases are "
                    f"{value:g} on {case.engine(side)} and random on "
                    f"{case.engine(far)}, as torch's layers draw them: "
                    "torch.nn.init.zeros_ on torch, or Side(init=...)")
            if found and found[0].name == "initialiser":
                found[0] = found[0]._replace(
                    text=found[0].text + "; also " + text)
            else:
                found.insert(0, Cause("initialiser", text, 0.0))
    return found
