"""How far apart two tensors are, and whether that is a difference."""
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

#: largest relative difference in a lock-step that counts as rounding, by
#: dtype; docs/internals/parity.md, "Tolerances", has the measurements
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
#: a difference of up to this many times what a change of the last bits does
#: to one side is rounding
CHAOS = 16.0
#: a tensor whose largest value is below this share of the largest value in
#: its layer is compared on the scale of the layer
FLOOR = 1e-3
#: rounding leaves at most this share of the layer's scale, in units in the
#: last place, in a tensor that is zero in exact arithmetic
ZERO = 2 ** 12
#: elements that are compared at a time
_BLOCK = 1 << 18
#: a summary of an array: values at so many places, means of so many subsets
PLACES, PARTS = 64, 61
#: the stages of a step, in their order
STAGES = ("initial", "layer", "output", "loss", "gradient", "devices",
          "clipping", "rate", "weight", "memory", "statistic", "prediction")


class Gap(NamedTuple):
    """How one tensor differs in one step.

    Attributes
    ----------
    step : int
        From 1.
    stage : str
        One of `STAGES`.
    name : str
        The tensor's name in `a`; "" where the stage has only one.
    absolute, relative : float
        ``max|a - b|``, and that divided by `scale`.
    scale : float
        The largest value of the tensor, or of its layer if the tensor is
        under a thousandth of that.
    status : str
        "same"; "zero": zero in exact arithmetic, so both values are
        rounding; "rounding": above the tolerance, but not more than a change
        of the last bits does to `a` itself; "different".
    index : tuple of int
        Where the difference is largest.
    a, b : float
        The values there.
    own : float or None
        The relative change that a change of the last bits makes in the
        tensor of `a`. Measured only above the tolerance.
    """

    step: int
    stage: str
    name: str
    absolute: float
    relative: float
    scale: float
    status: str
    index: tuple[int, ...]      # type: ignore[assignment]
    a: float
    b: float
    own: float | None = None

    def __str__(self) -> str:
        where = f" {self.name}" if self.name else ""
        at = list(self.index) if self.index else "the value"
        return (f"step {self.step}, {self.stage}{where} at {at}: "
                f"{self.a:.17g} against {self.b:.17g} (difference "
                f"{self.absolute:.2e}, relative {self.relative:.2e})")


def layer_of(name: str) -> str:
    """``"3.0.conv1.bias"`` -> ``"3.0.conv1"``."""
    return name.rpartition(".")[0]


def scales(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray],
           layer: Callable[[str], str] = layer_of
           ) -> dict[str, tuple[float, bool]]:
    """The scale of each tensor, and whether it is the tensor's own size
    (True) or its layer's (False). A layer has the size of its largest
    tensor, on whichever side that is. See docs/internals/parity.md, "The
    measure"."""
    own = {name: max(size_of(x[name]) for x in (a, b) if name in x)
           for name in {**a, **b}}
    largest: dict[str, float] = {}
    for name, size in own.items():
        key = layer(name)
        largest[key] = max(largest.get(key, 0.0), size)
    return {name: (size, True) if size >= FLOOR * largest[layer(name)]
            else (largest[layer(name)], False)
            for name, size in own.items()}


def in_shape_of(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`z`, in the shape of `x` if they differ in axes of length 1 only."""
    return z.reshape(x.shape) if [n for n in x.shape if n != 1] \
        == [n for n in z.shape if n != 1] else z


def size_of(x: np.ndarray) -> float:
    """The largest absolute value that is finite."""
    return max((float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
                for part in blocks(x) for sizes in [np.abs(part)]),
               default=0.0)


def blocks(x: np.ndarray) -> Iterator[np.ndarray]:
    """`x`, flat, a piece at a time: what is computed from a large tensor
    needs little memory."""
    flat = np.asarray(x).reshape(-1)
    for begin in range(0, flat.size, _BLOCK):
        yield flat[begin:begin + _BLOCK]


def compare_tensors(step: int, stage: str, a: Mapping[str, np.ndarray],
                    b: Mapping[str, np.ndarray], tolerance: float,
                    epsilon: float,
                    layer: Callable[[str], str] = layer_of) -> list[Gap]:
    """A `Gap` for each name that both sides have.

    Parameters
    ----------
    tolerance : float
        Largest relative difference that is "same".
    epsilon : float
        The spacing of numbers at 1 in the dtype of the comparison.
    """
    return [gap(step, stage, name, a[name], b[name], scale, tolerance,
                0.0 if own else ZERO * epsilon)
            for name, (scale, own) in scales(a, b, layer).items()
            if name in a and name in b]


def gap(step: int, stage: str, name: str, a: Any, b: Any, scale: float,
        tolerance: float, zero: float = 0.0) -> Gap:
    """The `Gap` of two arrays on the scale `scale`. `zero`: up to this share
    of the scale both are taken for zero."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return Gap(step, stage, name, np.inf, np.inf, scale, "different", (),
                   float(a.size), float(b.size))
    if not a.size:
        return Gap(step, stage, name, 0.0, 0.0, scale, "same", (), 0.0, 0.0)
    absolute, place = -1.0, 0
    for i, (x, z) in enumerate(zip(blocks(a), blocks(b))):
        apart = _apart(x, z)
        here = int(apart.argmax())
        if apart[here] > absolute:
            absolute, place = float(apart[here]), i * _BLOCK + here
    index = np.unravel_index(place, a.shape)
    relative = absolute / scale if scale else (0.0 if not absolute else np.inf)
    status = "different" if relative > tolerance else "zero" if zero * scale \
        and max(size_of(a), size_of(b)) <= zero * scale else "same"
    return Gap(step, stage, name, absolute, relative, scale, status,
               tuple(int(i) for i in index), float(a[index]),
               float(b[index]))


def _apart(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``|x - z|``. Equal infinities, and NaN on both sides, are equal. NaN on
    one side is an infinite difference."""
    finite = np.isfinite(x) & np.isfinite(z)
    same = (x == z) | (np.isnan(x) & np.isnan(z))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(same, 0.0, np.where(finite, np.abs(
            x.astype(np.float64) - z.astype(np.float64)), np.inf))


def summary(x: np.ndarray) -> np.ndarray:
    """Some values of `x`, and means of interleaved subsets of it, so that a
    change of any one value shows: arrays with equal summaries are taken for
    equal. A short array is its own summary."""
    x = np.asarray(x, np.float64).reshape(-1)
    if x.size <= PLACES + PARTS:
        return x
    places = np.linspace(0, x.size - 1, PLACES).astype(int)
    return np.concatenate([x[places], [x[i::PARTS].mean()
                                       for i in range(PARTS)]])
