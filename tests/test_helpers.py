"""The helpers fail on a wrong answer: a test that trusts them can fail."""
import math

import numpy as np
import pytest

import mgpu
from helpers import (ENGINES, convnet, mlp, numerical_gradient,
                     relative_difference, using_engine)


def test_relative_difference_is_one_number_for_the_tensor():
    assert relative_difference([1.0, 100.0], [1.5, 100.0]) == 0.005
    assert relative_difference([0.0, 0.5], [0.0, 0.0], floor=2.0) == 0.25
    assert relative_difference([3.0], [1.0], floor=100.0) == 0.02
    assert relative_difference(np.int64([3]), np.int64([2])) == 0.5


def test_relative_difference_overlooks_nothing():
    for equal in ([], [0.0, 0.0], [1.0, -2.0]):
        assert relative_difference(equal, equal) == 0.0
    for a, b in (([math.nan], [math.nan]), ([1.0, math.nan], [1.0, 1.0]),
                 ([math.inf], [math.inf]), ([1.0], [-math.inf]),
                 ([1e-300], [0.0])):
        assert relative_difference(a, b) == math.inf


def test_numerical_gradient():
    x = np.array([[0.5, -1.0], [2.0, 0.25]])
    gradient = numerical_gradient(
        lambda v: np.sin(v[0]).sum() + v[1, 0] * np.exp(v[1, 1]), x)
    exact = [[np.cos(0.5), np.cos(-1.0)],
             [np.exp(0.25), 2 * np.exp(0.25)]]
    # 1e-16 * |f| / step = 3e-13, and step^4 / 30 * f''''' = 1e-13
    assert relative_difference(gradient, exact) < 2e-12
    assert relative_difference(gradient, np.negative(exact)) > 1
    assert x[0, 0] == 0.5


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("make, shape", [(mlp, (2, 6)),
                                         (convnet, (2, 2, 6, 6))])
def test_networks_are_the_same_on_all_backends(make, shape, deferred):
    x = np.random.default_rng(0).standard_normal(shape)
    names, outputs = [], []
    for engine in ENGINES:
        with using_engine(engine) as backend:
            replicas = mgpu.initialize(
                make(backend, deferred=deferred), [mgpu.cpu(1)],
                mgpu.initializers.Xavier(), dtype="float64", sample=x)
            names.append([(p.name, p.kind, p.shape)
                          for p in replicas.params()])
            outputs.append(mgpu.to_numpy(replicas[0](mgpu.put(x, "cpu:1"))))
    assert all(n == names[0] for n in names)
    # A few dozen float64 additions per output.
    assert all(relative_difference(y, outputs[0]) < 1e-14 for y in outputs)
    assert np.ptp(outputs[0]) > 0
