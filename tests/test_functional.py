"""Differentiable collectives, and the backend's functions by name."""
import inspect

import numpy as np
import pytest

import mgpu
from batches import pictures
from helpers import (ENGINES, assert_bit_equal, relative_difference,
                     using_engine)
from mgpu import cpu
from mgpu.backends.ops import Ops
from mgpu.nn import functional as F


@pytest.fixture
def backend(engine):
    """Both array families of MXNet."""
    return engine


def leaves(backend, hosts, grad_req="write"):
    xs = [backend.put(x, cpu(i)) for i, x in enumerate(hosts)]
    for x in xs:
        backend.attach_grad(x, grad_req)
    return xs


def random(*shapes):
    return [pictures(shape[0], shape[1:], "float64", seed)
            for seed, shape in enumerate(shapes)]


def test_results_are_new_arrays_on_their_devices(backend, devices):
    hosts = [np.ones((1, 2))] * len(devices)
    xs = [backend.put(x, cpu(i)) for i, x in enumerate(hosts)]
    for function in (F.allreduce, F.allgather):
        ys = function(xs)
        if backend.name == "mxnet":
            assert [y.ctx for y in ys] == [x.ctx for x in xs]
        for i, y in enumerate(ys):
            y += 1.0 + i
        for i, y in enumerate(ys):
            total = len(xs) if function is F.allreduce else 1
            assert (backend.to_numpy(y) == total + 1 + i).all()
        for x, host in zip(xs, hosts):
            assert_bit_equal(backend.to_numpy(x), host)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_allgather(backend, devices, axis):
    """Of lengths that differ; each gets the sum of its slices' gradients."""
    k = len(devices)
    hosts = random(*((i + 1, 3) if axis == 0 else (3, i + 1)
                     for i in range(k)))
    joined, xs = np.concatenate(hosts, axis), leaves(backend, hosts)
    weights = random(*[joined.shape] * k)
    with mgpu.record():
        ys = F.allgather(xs, axis=axis)
        losses = [y * backend.put(w, y)
                  for y, w in zip(ys, weights, strict=True)]
    mgpu.backward(losses)
    for y in ys:
        assert_bit_equal(backend.to_numpy(y), joined)
    slices = np.split(sum(weights), np.cumsum([x.shape[axis] for x in hosts])
                      [:-1], axis)
    for x, expected in zip(xs, slices):
        assert relative_difference(backend.to_numpy(mgpu.grad(x)),
                                   expected) < 1e-15


def test_ops_without_a_gradient_are_refused(backend):
    xs = leaves(backend, [np.ones(2)] * 2)
    for op in ("max", None):
        with pytest.raises(ValueError) as refused:
            F.allreduce(xs, op=op)
        assert str(refused.value) == (
            f"unknown op; received {op!r}. Use one of 'sum', 'mean'.")


# -- the backend's functions --------------------------------------------------

# `from_host` takes an array of the host: that is `mgpu.put`.
PUBLIC = sorted(name for name in vars(Ops)
                if name[0] != "_" and name != "from_host")


def test_each_name_is_that_function(backend):
    for name in PUBLIC:
        function = getattr(F, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(backend.ops), name,
                          lambda self, *args, **kwargs: (args, kwargs))
            assert function(1, 2, axis=3) == ((1, 2), {"axis": 3})
        assert function.__name__ == name
        assert function.__doc__ == getattr(Ops, name).__doc__
    assert {*PUBLIC, "allreduce", "allgather"} == {*F.__all__} <= {*dir(F)}
    assert str(inspect.signature(F.allreduce)).startswith(
        "(data: list[typing.Any], *, op: str = 'sum')")


def test_functions_look_up_the_backend_when_called():
    """A function that was imported by name follows `using_backend`."""
    relu = F.relu
    for engine in ENGINES:
        with using_engine(engine) as backend:
            y = relu(backend.put(np.float32([-1, 2]), cpu(0)))
            assert backend.is_native(y)
            assert backend.to_numpy(y).tolist() == [0, 2]


def test_there_are_no_other_names():
    for name in ("mish", "register", "mro", "_relu", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(F, name)
        assert name not in dir(F)
