"""The specification `mgpu.backends.base`, on both backends and on both array
families of MXNet: classes, arrays, and functions of arrays. Gradients are in
test_contract_gradients.py, threads in test_contract_parallel.py."""
import ast
import functools
import inspect
import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from contract import gradient, leaf, modes, recording
from helpers import (ENGINES, assert_bit_equal, foreign_array, mlp,
                     numerical_gradient, refusal_of_foreign,
                     relative_difference, using_engine)
from mgpu import cpu
from mgpu.backends.base import Backend
from mgpu.backends.network import Network
from mgpu.backends.ops import Ops
from mgpu.backends.probing import Probe

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64",
          "bool")


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def backend(engine):
    with using_engine(engine) as backend:
        yield backend


# -- the classes --------------------------------------------------------------

def parameters(function):
    return [(p.name, p.kind, p.default)
            for p in inspect.signature(function).parameters.values()]


def test_signatures_are_those_of_the_specification(backend):
    network = backend.network(mlp(backend))
    checked = 0
    for own, specification in ((backend, Backend),
                               (backend.ops, Ops),
                               (network, Network),
                               (network, Probe)):
        assert specification in type(own).__mro__
        for name, method in vars(specification).items():
            if callable(method) and not name.startswith("_"):
                written = getattr(type(own), name)
                assert parameters(written) == parameters(method), name
                assert written is not method or has_body(method), name
                checked += 1
    assert checked > 70


@pytest.mark.parametrize("part", [Backend, Network, Ops, Probe])
def test_required_methods_come_first(part):
    """In the contract, so that one finds what a backend must have."""
    optional = [has_body(method) for name, method in vars(part).items()
                if inspect.isfunction(method) and not name.startswith("_")]
    assert any(optional) and optional == sorted(optional)


def has_body(function):
    """Whether it does more than to have a docstring."""
    node, = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return len(node.body) > 1


# -- put and to_numpy ---------------------------------------------------------

def test_put_keeps_the_dtype_or_converts(backend, devices):
    for dtype in DTYPES:
        x = (np.arange(6).reshape(2, 3) % 4).astype(dtype)
        array = x
        for device in devices:      # from the host, then between devices
            array = backend.put(array, device)
            assert_bit_equal(backend.to_numpy(array), x)
            assert tuple(array.shape) == (2, 3)
    x = np.array([1.0, 2.0])
    for dtype in DTYPES[:-1]:
        for source in (x, backend.put(x, cpu(0))):
            array = backend.put(source, cpu(1), dtype=dtype)
            assert_bit_equal(backend.to_numpy(array), x.astype(dtype))


def test_numbers_have_the_dtypes_of_both_backends(backend):
    """Python floats become float32, the default of both; arrays stay."""
    for x, dtype in [
            (3, "int64"), (2.5, "float32"), ([1, 2], "int64"),
            ([1.5], "float32"), ([[True, False]], "bool"),
            ((1.0, 2), "float32"), (np.float64(2.5), "float64"),
            (np.array([0.1]), "float64"), (range(3), "int64")]:
        array = backend.to_numpy(backend.put(x, cpu(0)))
        assert_bit_equal(array, np.array(x, dtype=dtype))


def test_put_takes_any_layout(backend):
    for x in (np.arange(6.0).reshape(2, 3).T, np.arange(6.0)[::-2],
              np.asfortranarray(np.arange(6.0).reshape(2, 3)),
              np.broadcast_to(np.float32(2), (2, 2)),
              np.zeros((0, 3), "float32"), np.zeros((2, 0)),
              np.arange(3, dtype=">f4"), np.arange(3, dtype=">i8")):
        array = backend.to_numpy(backend.put(x, cpu(1)))
        assert_bit_equal(array, x.astype(x.dtype.newbyteorder("=")))


@pytest.mark.parametrize("source", ["numpy", "native"])
def test_put_always_copies(backend, source):
    like = backend.put([0.0], cpu(0))
    for target in (cpu(0), cpu(1), like):
        for dtype in (None, "float32"):
            x = np.float32([1, 2, 3])
            if source == "native":
                x = backend.put(x, cpu(0))
            y = backend.put(x, target, dtype=dtype)
            y += 1
            left = x if source == "numpy" else backend.to_numpy(x)
            assert left.tolist() == [1, 2, 3]
            x *= 10
            assert backend.to_numpy(y).tolist() == [2, 3, 4]


def test_to_numpy_gives_a_fresh_copy(backend):
    x = backend.put(np.float32([1, 2]), cpu(0))
    host, again = backend.to_numpy(x), backend.to_numpy(x)
    assert type(host) is np.ndarray and host.flags.writeable
    host += 5
    assert again.tolist() == backend.to_numpy(x).tolist() == [1, 2]
    x += 1
    assert host.tolist() == [6, 7] and again.tolist() == [1, 2]


def test_to_numpy_of_a_recorded_array(backend):
    x = leaf(backend, [1.0, 2.0])
    with recording(backend):
        y = x * 3
        assert backend.to_numpy(y).tolist() == [3, 6]
    backend.backward([y])
    assert gradient(backend, x) == [3, 3]


def test_arrays_of_the_other_framework_are_refused(backend):
    x, name = foreign_array(backend)
    for take in (backend.to_numpy, lambda x: backend.put(x, cpu(0))):
        with pytest.raises(TypeError) as refused:
            take(x)
        assert str(refused.value) == refusal_of_foreign(backend, name)


def test_what_is_no_array_is_refused(backend):
    for x in (None, {}, object(), [object()], "text", ["a"], np.array(["a"]),
              [None], [[1], [1, 2]]):
        with pytest.raises(TypeError, match=f"expected an array of numbers; "
                           f"received {type(x).__name__}"):
            backend.put(x, cpu(0))
    for x in (np.ones(2), [1.0], None):
        with pytest.raises(TypeError, match=f"received {type(x).__name__}"):
            backend.to_numpy(x)


def test_an_unknown_dtype_is_refused(backend):
    for make in (lambda: backend.put([1.0], cpu(0), dtype="flaot32"),
                 lambda: backend.ops.astype(backend.put([1.0], cpu(0)),
                                            "flaot32")):
        with pytest.raises(ValueError, match="unknown dtype; received "
                           "'flaot32'. Use"):
            make()


# -- the array families of MXNet ----------------------------------------------

def family(x):
    return type(x).__module__ + "." + type(x).__name__


def test_new_arrays_are_of_the_family_in_use(engine, backend):
    x = backend.put([1.0], cpu(0))
    with recording(backend):
        arrays = [x, backend.put(x, cpu(1)), backend.ops.relu(x), x * 2,
                  backend.ops.concat([x, x]), backend.ops.zeros_like(x),
                  backend.put([1.0], x), x[0:1], backend.ops.flat_view(x)]
    arrays += mgpu.split_and_load([1.0, 2.0], [cpu(0), cpu(1)])
    assert {family(a) for a in arrays} == {{
        "mxnet-nd": "mxnet.ndarray.ndarray.NDArray",
        "mxnet-np": "mxnet.numpy.ndarray",
        "torch": "torch.Tensor"}[engine]}


def test_arrays_keep_their_family_in_any_mode(engine):
    """An array that a user brings decides, not the mode of the process."""
    for other in (e for e in ENGINES if e.split("-")[0]
                  == engine.split("-")[0]):
        with using_engine(engine) as backend:
            x = leaf(backend, [3.0, -4.0])
        with using_engine(other) as backend:
            with recording(backend):
                y = backend.ops.relu(backend.put(x, cpu(1))) * 2
            y2 = backend.put([1.0], y)      # on its device, so of its family
            backend.backward([y])
            total = [backend.put(x, d) for d in (cpu(0), cpu(1))]
            mgpu.allreduce(total)
        assert {family(a) for a in (x, y, y2, *total)} == {family(x)}
        with using_engine(engine) as backend:
            assert gradient(backend, x) == [2, 0]
            assert backend.to_numpy(total[1]).tolist() == [6, -8]


def test_the_process_keeps_its_mode(backend, devices):
    before = modes(backend)
    xs = [leaf(backend, [1.0], d) for d in devices]
    with recording(backend):
        losses = backend.parallel([lambda x=x: x * x for x in xs])
    backend.backward(losses)
    mgpu.allreduce([backend.grad(x) for x in xs])
    replicas = mgpu.initialize(mlp(backend), devices,
                               "uniform", dtype="float64")
    with recording(backend):
        backend.backward(replicas([backend.put(np.ones((2, 6)), d)
                                   for d in devices]))
    assert modes(backend) == before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(modes(backend)))
    thread.start()
    thread.join()
    fresh = (True, False) if backend.name == "torch" else (False,) * 4
    assert seen[0][:len(fresh)] == fresh


# -- the rest -----------------------------------------------------------------

def test_what_is_no_network_is_refused(backend):
    wanted = {"mxnet": "gluon.Block", "torch": "torch.nn.Module"}
    for net in (None, 3, mlp, np.ones(2), SimpleNamespace()):
        with pytest.raises(TypeError) as refused:
            backend.network(net)
        assert str(refused.value) == (
            f"the {backend.name} backend takes a {wanted[backend.name]}; "
            f"received {type(net).__module__}.{type(net).__name__}.")


def test_host_dtypes_that_one_backend_lacks_raise_on_both(backend):
    for dtype, wide in (("int16", "int64"), ("uint16", "int64"),
                        ("uint64", "int64"), ("complex64", "float64")):
        with pytest.raises(ValueError, match=(
                f"unknown dtype; received '{dtype}'. Convert the data: "
                rf"x.astype\('{wide}'\)")):
            backend.put(np.ones(2, dtype), cpu(0))


# -- the dialect --------------------------------------------------------------

def test_the_dialect_computes_as_numpy_does(backend):
    a, b = np.array([[1.0, -2.0], [0.5, 4.0]]), np.array([[2.0, 4.0],
                                                          [-1.0, 0.5]])
    x, y = (backend.put(v, cpu(0)) for v in (a, b))
    for made, expected in [
            (x + y, a + b), (x - y, a - b), (x * y, a * b), (x / y, a / b),
            (x + 2.5, a + 2.5), (2.5 - x, 2.5 - a), (x * 3.0, a * 3.0),
            (1.0 / x, 1.0 / a), (-x, -a), (abs(x), abs(a)), (x ** 2, a ** 2),
            (x ** 3.0, a ** 3.0), (x[0:1], a[0:1]), (x[1:], a[1:]),
            (x.reshape((4,)), a.ravel()),
            (x.reshape((1, 2, 2)), a.reshape(1, 2, 2))]:
        assert_bit_equal(backend.to_numpy(made), expected)
    assert len(x) == 2 and tuple(x.shape) == (2, 2)
    for change in ("+=", "-=", "*=", "/="):
        for other in ("y", "0.5"):
            z, c = backend.put(a, cpu(0)), a.copy()
            alias = z
            exec(f"z {change} {other}")
            exec(f"c {change} {other}", {}, {"c": c, "y": b})
            assert_bit_equal(backend.to_numpy(alias), c)


def test_slices_write_through(backend):
    x = backend.put(np.arange(6.0), cpu(0))
    flat = x[2:5]
    flat += 10.0
    flat[0:1] = 7.0
    x[5:6] = backend.put([1.5], cpu(0), dtype="float64")
    assert backend.to_numpy(x).tolist() == [0, 1, 7, 13, 14, 1.5]


def test_values_may_come_from_another_device(backend, devices):
    x = backend.put(np.zeros((2, 2)), cpu(0))
    for i, device in enumerate(devices):
        x[:] = backend.put(np.full((2, 2), i), device, dtype="float64")
        assert (backend.to_numpy(x) == i).all()


# -- Ops ----------------------------------------------------------------------

def windows(x, size, stride):
    view = np.lib.stride_tricks.sliding_window_view(x, size, axis=(2, 3))
    return view[:, :, ::stride, ::stride]


def conv2d(x, weight, bias=None, stride=1, padding=0):
    x = np.pad(x, [(0, 0), (0, 0)] + [(padding, padding)] * 2)
    y = np.einsum("nchwij,ocij->nohw",
                  windows(x, weight.shape[2:], stride), weight)
    return y if bias is None else y + bias[:, None, None]


def log_softmax(x, axis=-1):
    x = x - x.max(axis=axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=axis, keepdims=True))


def pick(x, index, axis=-1):
    index = np.expand_dims(index.astype(np.int64), axis)
    return np.take_along_axis(x, index, axis).squeeze(axis)


def some(*shape, seed=0):
    """Values of size 1, away from 0 and from each other's ties."""
    n = int(np.prod(shape))
    values = (np.arange(n) - n / 2 + 0.25) * 4 / n
    return np.random.default_rng(seed).permutation(values).reshape(shape)


X, Y = some(2, 3, 4), some(2, 3, 4, seed=1) + 0.06
POSITIVE = abs(X) + 0.5
IMAGE = some(2, 2, 5, 5)

# name, inputs (float64 ones are differentiated), further arguments, NumPy's
# answer
CASES = [
    ("abs", [X], {}, np.abs), ("sign", [X], {}, np.sign),
    ("sqrt", [POSITIVE], {}, np.sqrt), ("exp", [X], {}, np.exp),
    ("log", [POSITIVE], {}, np.log),
    ("maximum", [X, Y], {}, np.maximum), ("minimum", [X, Y], {}, np.minimum),
    ("maximum", [X], {"y": 0.3}, lambda x, y: np.maximum(x, y)),
    ("minimum", [X], {"y": 0.3}, lambda x, y: np.minimum(x, y)),
    ("relu", [X], {}, lambda x: np.maximum(x, 0)),
    ("sigmoid", [X], {}, lambda x: 1 / (1 + np.exp(-x))),
    ("softplus", [X], {}, lambda x: np.logaddexp(0, x)),
    ("log_softmax", [X], {}, log_softmax),
    ("log_softmax", [X], {"axis": 1}, log_softmax),
    ("pick", [X, np.array([[0, 3, 1], [2, 2, 0]])], {}, pick),
    ("pick", [X, np.float32([[0, 2, 1, 0], [1, 1, 0, 2]])], {"axis": 1},
     pick),
    ("pick", [X[0], np.uint8([2, 0, 1, 1])], {"axis": 0}, pick),
    *(("nll", inputs, options, lambda *a, **o: -pick(*a, **o))
      for inputs, options in (
          ([X, np.array([[0, 3, 1], [2, 2, 0]])], {}),
          ([X, np.float32([[0, 2, 1, 0], [1, 1, 0, 2]])], {"axis": 1}),
          ([X[0], np.uint8([3, 0, 1])], {}))),
    *[(name, [X], options, getattr(np, name)) for name in ("sum", "mean")
      for options in ({}, {"axis": 0}, {"axis": -1}, {"axis": (0, 2)},
                      {"axis": 1, "keepdims": True},
                      {"axis": (1, 2), "keepdims": True})],
    ("dot", [X[0], Y[1].T], {}, np.dot),
    ("conv2d", [IMAGE, some(3, 2, 3, 3)], {}, conv2d),
    ("conv2d", [IMAGE, some(3, 2, 2, 3), some(3)], {}, conv2d),
    ("conv2d", [IMAGE, some(2, 2, 3, 3), some(2)],
     {"stride": 2, "padding": 1}, conv2d),
    *[(f"{kind}_pool2d", [IMAGE], options,
       lambda x, size, stride=None, function=function: function(
           windows(x, (size, size), stride or size), axis=(-2, -1)))
      for kind, function in (("avg", np.mean), ("max", np.max))
      for options in ({"size": 2}, {"size": 3, "stride": 1},
                      {"size": 2, "stride": 3})],
    ("concat", [X, Y], {}, lambda *xs: np.concatenate(xs)),
    ("concat", [X, Y[:, :1]], {"axis": 1},
     lambda *xs, axis: np.concatenate(xs, axis)),
    ("concat", [X, Y], {"axis": -1},
     lambda *xs, axis: np.concatenate(xs, axis)),
    ("concat", [X], {}, lambda x: x),
    ("concat", [X[:0], X, X[:0]], {}, lambda *xs: np.concatenate(xs)),
    ("concat", [X[:0], X[:0]], {}, lambda *xs: np.concatenate(xs)),
    ("slice_axis", [X], {"axis": 0, "begin": 1, "end": 2},
     lambda x, axis, begin, end: x[begin:end]),
    ("slice_axis", [X], {"axis": 1, "begin": 0, "end": 2},
     lambda x, axis, begin, end: x[:, begin:end]),
    ("slice_axis", [X], {"axis": -1, "begin": 1, "end": 4},
     lambda x, axis, begin, end: x[..., begin:end]),
    ("slice_axis", [X], {"axis": 1, "begin": 2, "end": 2},
     lambda x, axis, begin, end: x[:, begin:end]),
    ("flat_view", [X], {}, np.ravel),
    ("zeros_like", [X], {}, np.zeros_like),
    ("from_host", [X], {}, lambda x: Y),
    ("astype", [X], {"dtype": "float64"}, lambda x, dtype: x.astype(dtype)),
    ("stop_gradient", [X], {}, lambda x: x),
]
OPS = sorted({name for name, *_ in CASES})


def cases_of(name):
    return [case for case in CASES if case[0] == name]


def call(ops, name, arrays, options):
    if name == "concat":
        return ops.concat(arrays, **options)
    if name == "from_host":
        return ops.from_host(Y, *arrays)
    return getattr(ops, name)(*arrays, **options)


def answer(name, arrays, options, function):
    return np.asarray(function(*arrays, **options))


def test_every_function_has_a_case():
    assert set(OPS) == {name for name in vars(Ops)
                        if not name.startswith("_")}


@pytest.mark.parametrize("name", OPS)
def test_ops_compute_as_numpy_does(name):
    """And write to none of their inputs, nor does who writes to a result."""
    for engine in ENGINES:
        for _, inputs, options, function in cases_of(name):
            with using_engine(engine) as backend:
                arrays = [backend.put(x, cpu(1)) for x in inputs]
                result = call(backend.ops, name, arrays, options)
                made = backend.to_numpy(result)
                expected = answer(name, inputs, options, function)
                if engine == "mxnet-nd" and expected.shape == ():
                    expected = expected.reshape(1)  # mx.nd has no 0-d results
                assert made.shape == expected.shape
                assert made.dtype == np.float64
                # At most some dozen roundings of float64 numbers of size 1.
                np.testing.assert_allclose(made, expected, rtol=1e-13,
                                           atol=1e-14, err_msg=engine)
                # These may share memory with their input.
                if 0 not in result.shape and name not in (
                        "flat_view", "slice_axis", "stop_gradient"):
                    result *= 0.0
                    result += 77.0
                for x, array in zip(inputs, arrays):
                    assert_bit_equal(backend.to_numpy(array), x)


@pytest.mark.parametrize("name", [name for name in OPS if name not in (
    "zeros_like", "from_host", "stop_gradient")])
def test_ops_have_the_gradients_of_numpys_answer(name):
    for _, inputs, options, function in cases_of(name):
        expected = answer(name, inputs, options, function)
        if not all(x.size for x in (*inputs, expected)):
            continue
        weights = some(*expected.shape, seed=2) + 1

        def weighted(i, v, inputs=inputs, options=options, function=function,
                     weights=weights):
            replaced = [*inputs[:i], v, *inputs[i + 1:]]
            return (answer(name, replaced, options, function) * weights).sum()
        wanted = {i: numerical_gradient(functools.partial(weighted, i), x)
                  for i, x in enumerate(inputs) if x.dtype == np.float64}
        for engine in ENGINES:
            with using_engine(engine) as backend:
                arrays = [leaf(backend, x) if i in wanted
                          else backend.put(x, cpu(0))
                          for i, x in enumerate(inputs)]
                w = backend.put(weights.reshape(expected.shape or (
                    (1,) if engine == "mxnet-nd" else ())), cpu(0))
                with recording(backend):
                    loss = call(backend.ops, name, arrays, options) * w
                backend.backward([loss])
                for i, x in wanted.items():
                    # The error of the numerical gradient: 1e-16 * |sum| /
                    # step = 1e-11.
                    assert relative_difference(
                        backend.to_numpy(backend.grad(arrays[i])), x,
                        floor=1.0) < 1e-10, engine


def test_writing_to_a_flat_view_writes_to_the_array(backend):
    for shape in ((2, 3), (6,), (1, 1), ()):
        x = backend.put(np.zeros(shape), cpu(0))
        flat = backend.ops.flat_view(x)
        assert tuple(flat.shape) == (max(1, int(np.prod(shape))),)
        flat[0:1] = 5.0
        flat += 1.0
        assert_bit_equal(backend.to_numpy(x).ravel()[:1], np.array([6.0]))


def test_a_flat_view_is_refused_where_it_would_be_a_copy(backend):
    x = backend.put(X[0], cpu(0))
    if backend.name == "torch":     # MXNet's arrays are always contiguous
        with pytest.raises(ValueError, match="received one of shape "
                           r"\(4, 3\) with strides \(1, 4\)\. Use"):
            backend.ops.flat_view(x.T)
    else:
        assert backend.ops.flat_view(x.T).shape == (12,)


def test_astype_converts_and_passes_gradients(backend):
    x = leaf(backend, [1.0, 2.0, 3.0])
    for dtype in ("float32", "float16", "int32", "uint8"):
        for form in (dtype, np.dtype(dtype), np.dtype(dtype).type):
            assert_bit_equal(backend.to_numpy(backend.ops.astype(x, form)),
                             np.array([1, 2, 3], dtype))
    for dtype in ("float32", "float16"):
        with recording(backend):
            y = backend.ops.astype(x, dtype) * 2
        backend.backward([y])
        assert_bit_equal(backend.to_numpy(backend.grad(x)), np.full(3, 2.0))


def test_softplus_does_not_overflow_and_keeps_small_values(backend):
    x = np.array([-800.0, -40.0, -20.5, -1.0, 0.0, 1.0, 20.5, 40.0, 800.0])
    made = backend.to_numpy(backend.ops.softplus(backend.put(x, cpu(0))))
    # Elementwise: two roundings of an exact formula.
    np.testing.assert_allclose(made, np.logaddexp(0, x), rtol=1e-15)


def test_slopes_at_a_kink_are_the_same_on_both_backends(backend):
    for name, at, options, slope in (
            ("relu", 0.0, {}, 0.0), ("abs", 0.0, {}, 0.0),
            ("maximum", 0.5, {"y": 0.5}, 1.0),
            ("minimum", 0.5, {"y": 0.5}, 1.0)):
        x = leaf(backend, [at])
        with recording(backend):
            y = getattr(backend.ops, name)(x, **options)
        backend.backward([y])
        assert gradient(backend, x) == [slope], name


def test_nan_is_not_lost(backend):
    x = backend.put(np.array([np.nan, 1.0, np.nan]), cpu(0))
    y = backend.put(np.array([1.0, np.nan, np.nan]), cpu(0))
    ops = backend.ops
    for made in (ops.maximum(x, y), ops.minimum(x, y), x + y, ops.exp(x) + y):
        assert np.isnan(backend.to_numpy(made)).all()
