"""How far apart two tensors are, and when that is a difference."""
import numpy as np
import pytest

from mgpu.parity import measure

def gaps(a, b, tolerance=1e-6):
    return {g.name: g for g in measure.compare_tensors(
        1, "gradient", a, b, tolerance, 2.0 ** -52)}


def test_the_measure_is_that_of_the_tensor():
    a = {"l.weight": np.array([1.0, 1e-9])}
    found, = gaps(a, {"l.weight": np.array([1.0, 2e-9])}).values()
    assert found.relative == pytest.approx(1e-9) and found.index == (1,)
    assert (found.a, found.b, found.status) == (1e-9, 2e-9, "same")


def test_a_small_tensor_above_the_floor_keeps_its_own_scale():
    a = {"l.weight": np.ones(2), "l.bias": np.array([0.01])}
    b = {"l.weight": np.ones(2), "l.bias": np.array([0.01 + 1e-7])}
    found = gaps(a, b)["l.bias"]
    assert found.status == "different" and found.scale < 0.011


def test_a_tensor_under_the_floor_has_its_layers_scale():
    a = {"l.weight": np.ones(2), "l.bias": np.array([1e-17]),
         "m.bias": np.array([1e-17])}
    b = {"l.weight": np.ones(2), "l.bias": np.array([-3e-17]),
         "m.bias": np.array([1e-17])}
    found = gaps(a, b)
    assert found["l.bias"].status == "zero" and found["l.bias"].scale == 1
    assert found["m.bias"].status == "same"
    b["l.bias"] = np.array([2e-6])
    assert gaps(a, b)["l.bias"].status == "different"


def test_a_layer_has_the_size_of_what_one_side_alone_has():
    a = {"l.weight": np.ones(2), "l.bias": np.array([1e-17])}
    for one, two in ((a, {"l.bias": -a["l.bias"]}),
                     ({"l.bias": -a["l.bias"]}, a)):
        found = gaps(one, two)
        assert found.keys() == {"l.bias"}
        assert found["l.bias"].status == "zero"


@pytest.mark.parametrize("value, status", [
    (np.nan, "different"), (np.inf, "different"), (1.0, "same")])
def test_what_is_not_finite_differs(value, status):
    found = gaps({"x": np.ones(2)}, {"x": np.array([1.0, value])})["x"]
    assert found.status == status


def test_nan_on_both_sides_is_equal_and_another_shape_is_not():
    x = np.array([np.nan, np.inf, 1.0])
    assert gaps({"x": x}, {"x": x.copy()})["x"].status == "same"
    assert gaps({"x": x}, {"x": x[:2]})["x"].status == "different"
