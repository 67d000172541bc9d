"""What several test modules share: measures of difference, numerical
gradients, the backends with their array families, and (from `nets`) pairs
of small native networks."""
import contextlib
import re

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS, ENGINES  # noqa: F401, for the tests
from mgpu.parity import measure
from nets import bricks, convnet, mlp  # noqa: F401, for the tests

#: a test that takes the fixture `backend`, on one framework only
on_mxnet, on_torch = (pytest.mark.parametrize(
    "engine", [name for name in ENGINES if name.startswith(framework)],
    indirect=True) for framework in ("mxnet", "torch"))


@contextlib.contextmanager
def using_engine(engine):
    """The Backend object of one of `ENGINES`, in use inside the block. For
    "mxnet-np" this thread is in MXNet's NumPy mode, as user code would say
    it; the mode of the process stays."""
    with mgpu.using_backend(engine.split("-")[0]) as backend, \
            contextlib.ExitStack() as stack:
        if engine == "mxnet-np":
            import mxnet as mx
            stack.enter_context(mx.util.np_shape(True))
            stack.enter_context(mx.util.np_array(True))
        yield backend


def foreign_array(backend):
    """An array of the other framework, and how messages call its type. A
    stand-in where the other backend is not among those to test."""
    other = "torch" if backend.name == "mxnet" else "mxnet"
    if other in BACKENDS:
        with mgpu.using_backend(other) as engine:
            x = engine.put(np.float32([1, 2, 3]), mgpu.cpu(0))
    else:
        x = type("Array", (), {"__module__": other, "shape": (3,)})()
    return x, f"{type(x).__module__}.{type(x).__name__}"


def refusal_of_foreign(backend, name):
    """What is said about it, whatever was asked."""
    return (f"expected an array of the {backend.name} backend; received "
            f"{name}. mgpu converts nothing between frameworks silently: use "
            "mgpu.to_numpy under the other backend, then mgpu.put.")


def name_of(x):
    """The id of a test's parameter: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(x))


def on(*numbers):
    """The logical CPU devices with these numbers."""
    return [mgpu.cpu(i) for i in numbers]


# -- measures -----------------------------------------------------------------

def relative_difference(a, b, floor=0.0):
    """``max|a - b| / max(max|b|, floor)`` over one whole tensor, as a float:
    never elementwise, which would ask for correct digits of rounding noise.

    0.0 where both are equal, empty too; infinite for a NaN or an infinity
    anywhere (so that neither ``<`` nor ``max()`` can overlook it) and where
    `b` and `floor` are zero but `a` is not. Different shapes are an error.
    """
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape} differ"
    if not a.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    difference = float(np.abs(a - b).max())
    scale = max(float(np.abs(b).max()), floor)
    if scale:
        return difference / scale
    return float("inf") if difference else 0.0


def assert_bit_equal(a, b):
    """Same shape, same dtype, same bits: -0.0 is not 0.0, and a NaN equals
    the same NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape} differ"
    assert a.dtype == b.dtype, f"dtypes {a.dtype} and {b.dtype} differ"
    if a.tobytes() != b.tobytes():
        wrong = np.array([x.tobytes() != y.tobytes()
                          for x, y in zip(a.ravel(), b.ravel())])
        first = int(np.flatnonzero(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {a.size} elements differ in their bits; first "
            f"at {tuple(map(int, np.unravel_index(first, a.shape)))}: "
            f"{a.ravel()[first]!r} and {b.ravel()[first]!r}")


def assert_all_equal(a, b):
    """Two dicts of arrays: the same names, and the same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert_bit_equal(a[name], b[name])


def worst(ours, reference):
    """The largest relative difference of two dicts of arrays, and where:
    the measure of `mgpu.parity` (docs/internals/parity.md)."""
    assert ours and ours.keys() == reference.keys(), (
        ours.keys() ^ reference.keys())
    gaps = {name: relative_difference(ours[name], reference[name], scale)
            for name, (scale, _) in measure.scales(reference, ours).items()}
    name = max(gaps, key=gaps.get)
    return gaps[name], name


def numerical_gradient(f, x, step=2.0 ** -10):
    """The gradient of ``f(array) -> number`` at the float64 array `x`, by
    central differences over five points.

    The error is about ``step^4 / 30 * f'''''`` and ``1e-16 * |f| / step``:
    near 1e-12 for functions and slopes of size 1. `f` must be smooth within
    ``2 * step`` of `x` in each coordinate.
    """
    x = np.array(x, dtype=np.float64)
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape):
        values = []
        for shift in (-2, -1, 1, 2):
            moved = x.copy()
            moved[i] += shift * step
            values.append(float(f(moved)))
        far_left, left, right, far_right = values
        gradient[i] = (8 * (right - left) - (far_right - far_left)) \
            / (12 * step)
    return gradient
