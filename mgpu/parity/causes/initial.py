"""Causes of other initial values."""
from collections.abc import Callable

import numpy as np

from mgpu.nn import initializers
from mgpu.parity.causes.difference import Difference, once
from mgpu.parity.causes.registry import Found, cause


#: formula -> (uniform?, half width or standard deviation, from the numbers of
#: inputs and of outputs of one unit)
_FORMULAS: dict[str, tuple[bool, Callable[[int, int], float]]] = {
    "Uniform(0.07), Gluon's default": (True, lambda i, o: 0.07),
    "U(+-1/sqrt(fan_in)), torch's default": (True, lambda i, o: i ** -0.5),
    "Xavier uniform": (True, lambda i, o: (6 / (i + o)) ** 0.5),
    "He uniform, kaiming_uniform_": (True, lambda i, o: (6 / i) ** 0.5),
    "Normal(0.01)": (False, lambda i, o: 0.01),
    "N(0, 1), torch's default for embeddings": (False, lambda i, o: 1.0),
    "Xavier normal": (False, lambda i, o: (2 / (i + o)) ** 0.5),
    "He normal, kaiming_normal_": (False, lambda i, o: (2 / i) ** 0.5),
    "MSRAPrelu(), Gluon's": (
        False, lambda i, o: (4 / (1.0625 * (i + o))) ** 0.5),
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


@once
def _formulas(d: Difference) -> tuple[list[str], list[list[str]]]:
    """The weights that differ, and for each side the formulas that all of
    them look like."""
    weights = [g.name for g in d.wrong("initial")
               if d.kinds[g.name] == "weight" and g.a == g.a
               and d.evidence.initial[0][g.name].ndim > 1]
    return weights, [[
        text for text, (uniform, size) in _FORMULAS.items() if weights
        and all(_fits(values[n], uniform, size(*initializers.fans(
            values[n].shape))) for n in weights)]
        for values in d.evidence.initial]


def _in_other_order(x: np.ndarray, z: np.ndarray) -> str:
    return ", the same numbers in another order" if x.shape == z.shape \
        and np.allclose(np.sort(x, None), np.sort(z, None)) else ""


def _constants(d: Difference, other: bool) -> Found:
    gaps = [g for g in d.wrong("initial") if not d.trained[g.name]
            and (d.kinds[g.name] == "other") is other]
    if gaps:
        names, (one, two) = [g.name for g in gaps], d.evidence.initial
        n, far = names[0], gaps[0].absolute     # beside rounding
        at = tuple(np.argwhere(~np.isclose(
            one[n], two[n], 0, 1e-3 * far if np.isfinite(far) else 0,
            equal_nan=True))[0])
        own = d.b.names[n]
        yield (f"{n}{f' (in b {own})' if own != n else ''} is not trained, "
               f"and its first number that differs is {one[n][at]:.9g} on "
               f"{d.a} and {two[n][at]:.9g} on {d.b}, at "
               f"{[int(i) for i in at]}{_in_other_order(one[n], two[n])}: "
               "compute it alike on both sides. "
               "Where it is drawn at random on purpose, copy the one's "
               "values into the other before the comparison"
               + (f"; also {', '.join(names[1:4])}" if names[1:] else "")), 0.0


@cause("constant", "initial")
def constant(d: Difference) -> Found:
    """What a network has computed itself, and never trains."""
    yield from _constants(d, True)


@cause("order of parameters", "initial")
def other_places(d: Difference) -> Found:
    """The same values, in other parameters."""
    one, two = d.evidence.initial
    wrong = [g.name for g in d.wrong("initial")
             if d.kinds[g.name] != "other"]
    source = {n: m for n in wrong for m in wrong
              if m != n and np.array_equal(one[m], two[n])}
    if wrong and len(set(source.values())) == len(wrong):
        words = ", ".join(f"that of {m} in {n}"
                          for n, m in [*source.items()][:4])
        yield (f"{d.b} has the values of {d.a} in other parameters ({words}):"
               " its layers are registered in another order. Load values by "
               "name, not by position"), 0.0


@cause("initializer", "initial")
def initializer(d: Difference) -> Found:
    biases, (weights, known) = _other_biases(d), _formulas(d)
    if set(known[0]) & set(known[1]) or not known[0] + known[1]:
        if biases:
            yield biases, 0.0
        return
    a, b = (texts[0] if texts else "no formula known here" for texts in known)
    yield (f"the weights of {d.a} look like {a}, those of {d.b} like {b} "
           f"(first {weights[0]}): give both one Side(init=...)" + (
               f"; also {biases}" if biases else "")), \
        0.0 if all(known) else None


def _other_biases(d: Difference) -> str | None:
    """Are the biases constant on one side, and random on the other?"""
    names = [g.name for g in d.wrong("initial")
             if d.kinds[g.name] in ("bias", "gamma", "beta")]
    one, two = d.evidence.initial
    for side, far, own, other in ((d.a, d.b, one, two), (d.b, d.a, two, one)):
        if names and all(np.unique(own[n]).size == 1
                         and np.unique(other[n]).size > 1 for n in names):
            return (f"{names[0]} and {len(names) - 1} other biases are "
                    f"{float(own[names[0]].flat[0]):g} on {side} and random "
                    f"on {far}, as torch draws them: use Side(init=...)")
    return None


@cause("initial draw", "initial")
def draw(d: Difference) -> Found:
    _, (one, two) = _formulas(d)
    for formula in [text for text in one if text in two][:1]:
        yield (f"the weights of both sides look like {formula}, with other "
               "random numbers, whatever the seeds: use weights='a'"), 0.0


@cause("constant", "initial", resort=1)
def frozen(d: Difference) -> Found:
    """A constant that is kept as a frozen weight."""
    yield from _constants(d, False)
