"""The specification `mgpu.backends.base`, on both engines and on both array
families of MXNet: one body for all."""
import asyncio
import contextvars
import inspect
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from helpers import (ENGINES, assert_bit_equal, foreign_array, mlp, name_of,
                     numerical_gradient, refusal_of_foreign,
                     relative_difference, using_engine)
from mgpu import cpu
from mgpu.backends import base

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64",
          "bool")


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def backend(engine):
    with using_engine(engine) as backend:
        yield backend


def leaf(backend, values, device=cpu(0), grad_req="write"):
    x = backend.put(np.array(values, dtype=np.float64), device)
    backend.attach_grad(x, grad_req)
    return x


def recording(backend):
    return backend.scope(recording=True, training=True)


def gradient(backend, x):
    return backend.to_numpy(backend.grad(x)).tolist()


# -- the classes --------------------------------------------------------------

def parameters(function):
    return [(p.name, p.kind, p.default)
            for p in inspect.signature(function).parameters.values()]


def test_signatures_are_those_of_the_specification(backend):
    network = backend.network(mlp(backend))
    replica, = network.replicate([cpu(0)])
    checked = 0
    for own, specification in ((backend, base.Backend),
                               (backend.ops, base.Ops),
                               (network, base.Network),
                               (replica, base.Replica)):
        assert isinstance(own, specification)
        for name, method in vars(specification).items():
            if callable(method) and not name.startswith("_"):
                assert parameters(getattr(type(own), name)) \
                    == parameters(method), name
                checked += 1
    assert checked > 70


def test_what_a_backend_must_write_is_little():
    """Everything else has a default that fits any engine."""
    assert sum(len(part.__abstractmethods__) for part in (
        base.Backend, base.Ops, base.Network, base.Replica)) <= 50


# -- put and to_numpy ---------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
def test_put_keeps_the_dtype(backend, dtype, devices):
    x = (np.arange(6).reshape(2, 3) % 4).astype(dtype)
    array = x
    for device in devices:      # from the host, then from device to device
        array = backend.put(array, device)
        assert_bit_equal(backend.to_numpy(array), x)
        assert tuple(array.shape) == (2, 3)


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("native", [False, True])
def test_put_converts_where_it_is_told(backend, dtype, native):
    x = np.array([1.0, 2.0])
    source = backend.put(x, cpu(0)) if native else x
    array = backend.put(source, cpu(1), dtype=dtype)
    assert_bit_equal(backend.to_numpy(array), x.astype(dtype))


@pytest.mark.parametrize("x, dtype", [
    (3, "int64"), (2.5, "float32"), ([1, 2], "int64"), ([1.5], "float32"),
    ([[True, False]], "bool"), ((1.0, 2), "float32"),
    (np.float64(2.5), "float64"), (np.array([0.1]), "float64"),
    (range(3), "int64")])
def test_numbers_have_the_dtypes_of_both_engines(backend, x, dtype):
    """Python floats become float32, the default of both; arrays stay."""
    array = backend.to_numpy(backend.put(x, cpu(0)))
    assert_bit_equal(array, np.array(x, dtype=dtype))


@pytest.mark.parametrize("x", [
    np.arange(6.0).reshape(2, 3).T, np.arange(6.0)[::-2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.float32(2), (2, 2)), np.zeros((0, 3), "float32"),
    np.zeros((2, 0)), np.arange(3, dtype=">f4"), np.arange(3, dtype=">i8")],
    ids=lambda x: f"{x.dtype.str}{x.shape}{x.strides}")
def test_put_takes_any_layout(backend, x):
    array = backend.to_numpy(backend.put(x, cpu(1)))
    assert_bit_equal(array, x.astype(x.dtype.newbyteorder("=")))


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("target", [cpu(0), cpu(1), "array"])
@pytest.mark.parametrize("source", ["numpy", "native"])
def test_put_always_copies(backend, source, target, dtype):
    x = np.float32([1, 2, 3])
    if source == "native":
        x = backend.put(x, cpu(0))
    where = target if target != "array" else backend.put([0.0], cpu(0))
    y = backend.put(x, where, dtype=dtype)
    assert y is not x

    def values(a):
        return np.array(a if source == "numpy" else backend.to_numpy(a))
    y += 1
    assert values(x).tolist() == [1, 2, 3]
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


def test_is_native(backend):
    assert backend.is_native(backend.put([1.0], cpu(0)))
    for x in (np.ones(2), [1.0], 1.0, None, "x", foreign_array(backend)[0]):
        assert not backend.is_native(x)


def test_put_refuses_the_other_framework(backend):
    x, name = foreign_array(backend)
    with pytest.raises(TypeError) as refused:
        backend.put(x, cpu(0))
    assert str(refused.value) == refusal_of_foreign(backend, name)


@pytest.mark.parametrize("x", [None, {}, object(), [object()], "text",
                               ["a"], np.array(["a"]), [None], [[1], [1, 2]]],
                         ids=name_of)
def test_put_refuses_what_is_no_array(backend, x):
    with pytest.raises(TypeError, match=f"expected an array of numbers; "
                       f"received {type(x).__name__}"):
        backend.put(x, cpu(0))


def test_an_unknown_dtype_is_refused(backend):
    for make in (lambda: backend.put([1.0], cpu(0), dtype="flaot32"),
                 lambda: backend.ops.astype(backend.put([1.0], cpu(0)),
                                            "flaot32")):
        with pytest.raises(ValueError, match="unknown dtype; received "
                           "'flaot32'. Use"):
            make()


@pytest.mark.parametrize("x", [np.ones(2), [1.0], None])
def test_to_numpy_refuses_what_is_not_native(backend, x):
    with pytest.raises(TypeError, match=f"received {type(x).__name__}"):
        backend.to_numpy(x)


def test_to_numpy_refuses_the_other_framework(backend):
    x, name = foreign_array(backend)
    with pytest.raises(TypeError) as refused:
        backend.to_numpy(x)
    assert str(refused.value) == refusal_of_foreign(backend, name)


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


def modes(backend):
    """The framework's own per-thread and process-wide modes."""
    if backend.name == "torch":
        import torch
        return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                torch.get_default_dtype())
    import mxnet as mx
    return (mx.npx.is_np_array(), mx.npx.is_np_shape(),
            mx.autograd.is_recording(), mx.autograd.is_training())


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


# -- gradients ----------------------------------------------------------------

@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_gradient_starts_as_zeros(backend, grad_req, devices):
    for device in devices:
        x = backend.put(np.float32([[1, 2, 3]]), device)
        assert backend.attach_grad(x, grad_req) is None
        g = backend.grad(x)
        assert_bit_equal(backend.to_numpy(g), np.zeros((1, 3), "float32"))
        assert not backend.is_fresh(x)
        g[:] = 5                    # itself, not a copy
        assert gradient(backend, x) == [[5, 5, 5]]
        backend.attach_grad(x, grad_req)
        assert gradient(backend, x) == [[0, 0, 0]]


@pytest.mark.parametrize("grad_req, after", [
    ("write", [[2, 4], [2, 4]]), ("add", [[2, 4], [4, 8]])])
def test_backward_writes_or_adds(backend, grad_req, after):
    x = leaf(backend, [1.0, 2.0], grad_req=grad_req)
    for expected in after:
        with recording(backend):
            y = x * x
        backend.backward([y])
        assert gradient(backend, x) == expected
    backend.grad(x)[:] = 0          # zero_grad
    assert gradient(backend, x) == [0, 0]


def test_grad_req_null_is_left_alone(backend):
    x = leaf(backend, [1.0, 2.0], grad_req="null")
    w = leaf(backend, [3.0, 4.0])
    with recording(backend):
        y = x * w
    backend.backward([y])
    assert gradient(backend, w) == [1, 2]
    assert not backend.is_fresh(x)
    with recording(backend):
        y = x * x
    with pytest.raises(RuntimeError, match="backward needs losses"):
        backend.backward([y])
    backend.attach_grad(x)          # thawed
    with recording(backend):
        y = x * x
    backend.backward([y])
    assert gradient(backend, x) == [2, 4]


def test_a_gradient_that_is_held_stays_the_gradient(backend):
    """What `grad` gave before the loop shows every later backward pass."""
    x = leaf(backend, [1.0, 2.0])
    held = backend.grad(x)
    for scale in (1.0, 2.0):
        with recording(backend):
            y = x * scale
        backend.backward([y])
        assert backend.to_numpy(held).tolist() == [scale, scale]


@pytest.mark.parametrize("prepare", [
    lambda b, x: None, lambda b, x: b.attach_grad(x, "null")],
    ids=["nothing attached", "null"])
def test_no_gradient(backend, prepare):
    x = backend.put(np.float32([1, 2]), cpu(0))
    prepare(backend, x)
    with pytest.raises(ValueError) as refused:
        backend.grad(x)
    assert str(refused.value) == (
        "the array has no gradient attached; use mgpu.attach_grad(x) before "
        "the forward pass.")


def test_an_unknown_grad_req_changes_nothing(backend):
    x = leaf(backend, [1.0])
    backend.grad(x)[:] = 3
    for wrong in ("wirte", None, ""):
        with pytest.raises(ValueError) as refused:
            backend.attach_grad(x, wrong)
        assert str(refused.value) == (
            f"unknown grad_req; received {wrong!r}. Use 'write', 'add' or "
            "'null'.")
    assert gradient(backend, x) == [3]


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_only_floats_have_gradients(backend, dtype):
    x = backend.put(np.ones(2, dtype), cpu(0))
    with pytest.raises(ValueError, match=f"received {dtype}"):
        backend.attach_grad(x)


def test_a_result_can_become_a_leaf(backend):
    x = leaf(backend, [1.0, 2.0])
    with recording(backend):
        y = x * x
        backend.attach_grad(y)
        z = y * 3
    backend.backward([z])
    assert gradient(backend, y) == [3, 3]
    assert gradient(backend, x) == [0, 0]


def test_fresh_until_used(backend):
    x, other = leaf(backend, [1.0]), leaf(backend, [1.0])
    for _ in range(2):
        assert not backend.is_fresh(x)
        with recording(backend):
            y = x * 2
        assert not backend.is_fresh(x)
        backend.backward([y])
        assert backend.is_fresh(x) and not backend.is_fresh(other)
        backend.mark_used(x)
    assert gradient(backend, other) == [0]
    backend.mark_used(other)
    assert not backend.is_fresh(other)


def test_put_is_differentiable_across_devices(backend, devices):
    """The gradient flows back to the device of the source."""
    x = leaf(backend, [1.0, 2.0])
    with recording(backend):
        copies = [backend.put(x, d) for d in devices]
        losses = [c * c * (i + 1) for i, c in enumerate(copies)]
    backend.backward(losses)
    k = len(devices)
    assert gradient(backend, x) == [k * (k + 1), 2 * k * (k + 1)]


def test_put_where_an_array_is_and_with_a_dtype_is_differentiable(backend):
    x = leaf(backend, [1.0, 2.0])
    like = backend.put([0.0], cpu(1))
    with recording(backend):
        y = backend.put(x, like, dtype="float32")
        z = y * y
    assert backend.to_numpy(z).dtype == np.float32
    backend.backward([z])
    assert gradient(backend, x) == [2, 4]


def test_leaves_change_in_place_where_nothing_is_recorded(backend):
    x = leaf(backend, [1.0, 2.0])
    with backend.scope(recording=False):
        x -= 0.5
        x[:] = x * 2
        backend.grad(x)[:] = 9
    with recording(backend):
        y = x * x
    backend.backward([y])
    assert backend.to_numpy(x).tolist() == [1, 3]
    assert gradient(backend, x) == [2, 6]


def test_a_leaf_is_not_kept_alive(backend):
    """Bookkeeping about gradients must not hold the memory of arrays."""
    import gc
    import weakref
    x = leaf(backend, [1.0, 2.0])
    with recording(backend):
        y = x * x
    backend.backward([y])
    if not hasattr(type(x), "__weakref__"):
        return      # mx.nd: nothing of ours can refer to it weakly or not
    gone = weakref.ref(x)
    del x, y
    gc.collect()
    assert gone() is None


# -- backward -----------------------------------------------------------------

@pytest.mark.parametrize("shape", [(2,), (2, 3), (1,)])
def test_each_loss_is_summed(backend, shape, devices):
    values = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    xs = [leaf(backend, values, d) for d in devices]
    with recording(backend):
        losses = [x * x * (i + 1.0) for i, x in enumerate(xs)]
    assert backend.backward(losses) is None
    for i, x in enumerate(xs):
        assert_bit_equal(backend.to_numpy(backend.grad(x)),
                         2 * values * (i + 1))
        assert backend.is_fresh(x)


@pytest.mark.parametrize("grad_req, times", [("write", 1), ("add", 2)])
def test_losses_that_share_a_leaf(backend, grad_req, times, devices):
    """The rule for "write" is: one `backward`, one sum."""
    shared = leaf(backend, [1.0, 2.0], grad_req=grad_req)
    own = [leaf(backend, [1.0, 1.0], d) for d in devices]
    k = len(devices)
    for n in range(1, 3):
        with recording(backend):
            losses = [backend.put(shared, d) * x * (i + 1.0)
                      for i, (d, x) in enumerate(zip(devices, own))]
        backend.backward(losses)
        count = n if grad_req == "add" else 1
        assert gradient(backend, shared) == [count * k * (k + 1) / 2] * 2
        assert [gradient(backend, x) for x in own] \
            == [[i + 1, 2 * i + 2] for i in range(k)]


def test_the_same_loss_twice_counts_twice(backend):
    x = leaf(backend, [1.0, 2.0])
    with recording(backend):
        y = x * 2
    backend.backward([y, y])
    assert gradient(backend, x) == [4, 4]


# -- whose batch a gradient is of, and who wrote it ---------------------------

TORCH, MXNET = (pytest.mark.parametrize("engine", [
    name for name in ENGINES if (name == "torch") is torch])
    for torch in (True, False))


def watch(backend, columns, requests=None):
    return backend.watch_gradients(columns,
                                   requests or ["write"] * len(columns[0]))


def losses_of(backend, columns):
    with recording(backend):
        return [sum((x * 2.0 for x in leaves), 0.0) for leaves in columns]


def fresh(backend, columns):
    return [backend.is_fresh(x) for leaves in columns for x in leaves]


def test_a_second_pass_on_a_device_begins_a_new_batch(backend, devices):
    """Device by device is one batch; "add" goes on through batches."""
    k = len(devices)
    columns = [[leaf(backend, [1.0], d)] for d in devices]
    adding = [leaf(backend, [1.0], d, "add") for d in devices]
    _kept = watch(
        backend, [[*x, y] for x, y in zip(columns, adding)],
        ["write", "add"])
    for _ in range(2):
        for i in range(k):
            backend.backward(losses_of(backend, [[*columns[i], adding[i]]]))
            assert fresh(backend, columns) == [j <= i for j in range(k)]
        assert fresh(backend, [adding]) == [True] * k
    for x in columns[0]:        # a step
        backend.mark_used(x)
    backend.backward(losses_of(backend, columns[:1]))
    assert all(fresh(backend, columns))


@pytest.mark.parametrize("abandoned", [[0], [1], [0, 1, 2], [2, 0]])
def test_losses_that_are_given_together_are_one_batch(backend, abandoned):
    """Whatever was left on some of the devices."""
    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(3)]
    _kept = watch(backend, columns)
    for i in abandoned:
        backend.backward(losses_of(backend, [columns[i]]))
    for some in ([0, 1, 2], [1, 2], [1]):
        backend.backward(losses_of(backend, [columns[i] for i in some]))
        assert fresh(backend, columns) == [i in some for i in range(3)]


def test_a_new_batch_voids_what_its_pass_does_not_reach(backend):
    columns = [[leaf(backend, [1.0], cpu(i)) for _ in range(2)]
               for i in range(2)]
    _kept = watch(backend, columns)
    backend.backward(losses_of(backend, columns))
    backend.backward(losses_of(backend, [columns[0][:1]]))
    assert fresh(backend, columns) == [True, False, False, False]


@pytest.mark.parametrize("passes, batch", [
    ("0 0 1 1", "01"), ("00 11 22 0 1 2", "012"), ("0 1 1 0", "01"),
    ("0 0 1", "01"), ("01 0 0 1", "01"), ("0 1 2 0", "0"), ("012 01", "01"),
    ("0 0 1 1 0 0", "0"), ("0 0 1 1 01", "01"), ("01 01 2 2", "012"),
    ("0 1 1", None), ("0 0 0 1 1", None), ("1 0 1", None),
    ("0 1 1 1 0 0", None), ("0 1 1 01", "01")], ids=str)
def test_passes_tell_the_latest_batch(backend, passes, batch):
    """Each with the numbers of the devices that it reaches, here "00" for two
    of one device; None: they do not tell."""
    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(3)]
    kept = watch(backend, columns)
    for reached in passes.replace("00", "0 0").replace("11", "1 1").replace(
            "22", "2 2").split():
        backend.backward(losses_of(backend, [columns[int(i)]
                                             for i in reached]))
    counts = {i: passes.count(str(i)) for i in range(3) if str(i) in passes}
    assert kept.passes.doubt == ({} if batch else counts)
    assert fresh(backend, columns) == [
        str(i) in (batch or passes) for i in range(3)]
    for x in columns[0] + columns[1] + columns[2]:      # a step
        backend.mark_used(x)
    backend.backward(losses_of(backend, columns[2:]))
    assert not kept.passes.doubt
    assert fresh(backend, columns) == [False, False, True]


@pytest.mark.parametrize("when", ["before a pass", "before a step",
                                  "after a step"])
def test_watching_gradients_changes_no_operation_in_place(backend, when):
    """On MXNet the memory of a result may not be there yet."""
    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(2)]
    kept = watch(backend, columns)
    if when != "before a pass":
        backend.backward(losses_of(backend, columns))
        backend.note_edits(kept, when == "before a step")
    x, y = (backend.put(np.full(2000, value, "float32"), cpu(0))
            for value in (1.0, 0.5))
    for _ in range(20):
        results = []
        for _ in range(100):
            results.append(x * 2)
            results[-1] += y    # while the other one runs, or before
        assert all((backend.to_numpy(one) == 2.5).all() for one in results)


@MXNET
def test_an_address_is_asked_for_when_the_memory_is_there(backend,
                                                          monkeypatch):
    """Sooner loses the result, but only in the microseconds in which the
    library allots the memory: the test above meets that by chance alone."""
    from mgpu.backends._mxnet import calls
    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(2)]
    _kept = watch(backend, columns)
    backend.backward(losses_of(backend, columns))
    real_wait, real_data, waited, asked = (calls.wait_for, calls.data_of,
                                           set(), [])

    def wait_for(handle):
        waited.add(handle)
        return real_wait(handle)

    def data_of(handle):
        asked.append(handle)
        return real_data(handle)

    y = backend.put(np.ones(3), cpu(0))
    result = y * 2
    monkeypatch.setattr(calls, "wait_for", wait_for)
    monkeypatch.setattr(calls, "data_of", data_of)
    result += y
    handle = result.handle.value
    assert handle in asked and handle in waited


@MXNET
def test_a_function_of_the_users_is_part_of_the_pass(backend):
    """The library calls it in a thread of its own, when the pass has long
    been queued, and lets it write to the gradient itself."""
    import mxnet as mx
    go = threading.Event()

    class Triple(mx.autograd.Function):
        def forward(self, x):
            return x * 3

        def backward(self, dy):
            assert go.wait(30)
            return dy * 3

    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(2)]
    _kept = watch(backend, columns)
    functions = [Triple() for _ in columns]
    with recording(backend):
        losses = [function(x) for function, (x,) in zip(functions, columns)]
    backend.backward(losses)
    go.set()
    for x, in columns:
        assert gradient(backend, x) == [3]
        assert backend.is_fresh(x) and not backend.edited(x)


@MXNET
def test_an_error_stays_with_its_arrays(backend):
    """The engine tells an error once: it belongs to who uses the result,
    perhaps another thread."""
    import mxnet as mx
    good = backend.put(np.ones((1, 1)), cpu(0))
    for read in (backend.to_numpy, lambda x: backend.host_views([x])):
        bad = mx.nd.linalg.potrf(-good.as_nd_ndarray())
        view, = backend.host_views([good])
        backend.run_on_host_views([lambda view=view: view.fill(2)], [good])
        with pytest.raises(mx.MXNetError):
            read(bad)


@MXNET
@pytest.mark.timeout(60)
def test_a_pass_does_not_wait_for_thunks_that_wait_for_it(backend):
    """Such as those of another thread, whose network asks for gradients
    while its replicas meet."""
    losses = []
    with recording(backend):
        for i in range(2):
            y = sum(leaf(backend, [1.0], cpu(i)) for _ in range(40))
            losses.append(y)        # long enough for threads of its own
    inside, begun = threading.Barrier(3, timeout=30), threading.Event()

    def ask(i):
        inside.wait()
        assert begun.wait(30)
        x = leaf(backend, [2.0], cpu(i))
        with recording(backend):
            y = x * x
        backend.backward([y])
        return gradient(backend, x)
    found = []
    thread = threading.Thread(target=lambda: found.append(backend.parallel(
        [lambda i=i: ask(i) for i in range(2)], rendezvous=True)))
    thread.start()
    inside.wait()
    threading.Timer(0.2, begun.set).start()
    backend.backward(losses)
    thread.join()
    assert found == [[[4], [4]]]


@MXNET
def test_networks_come_while_another_one_is_trained(backend):
    columns = [[leaf(backend, [1.0], cpu(i))] for i in range(2)]
    _kept = [watch(backend, columns) for _ in range(100)]
    end = threading.Event()

    def come():
        while not end.is_set():
            _other = watch(backend, columns)    # the one before goes
    thread = threading.Thread(target=come)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(500):
            backend.settle(columns[0][0])
    finally:
        end.set()
        thread.join()
        sys.setswitchinterval(interval)


@TORCH
def test_a_pass_that_fails_leaves_nothing_fresh(backend):
    x, y = leaf(backend, [1.0]), leaf(backend, [1.0])
    watch(backend, [[x, y]])
    loss, = losses_of(backend, [[x, y]])

    def fail(_):
        raise ValueError("by the test")
    handle = y.register_hook(fail)
    with pytest.raises(ValueError, match="by the test"):
        backend.backward([loss])
    handle.remove()
    assert fresh(backend, [[x, y]]) == [False, False]
    for _ in range(2):
        backend.backward(losses_of(backend, [[x, y]]))
        assert gradient(backend, x) == gradient(backend, y) == [2]
        assert fresh(backend, [[x, y]]) == [True, True]


@TORCH
@pytest.mark.parametrize("edit", [
    lambda x: x.grad.mul_(0.5), lambda x: setattr(x, "grad", x.grad * 1),
    lambda x: setattr(x, "grad", None),
    lambda x: __import__("torch").nn.utils.clip_grad_norm_([x], 1e9)])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_gradient_that_something_else_wrote_is_edited(
        backend, edit, grad_req):
    x = leaf(backend, [1.0], grad_req=grad_req)
    assert not backend.edited(x)
    for _ in range(2):
        backend.backward(losses_of(backend, [[x]]))
        assert not backend.edited(x)
        edit(x)
        assert backend.edited(x)
        backend.mark_used(x)
        assert backend.edited(x)
        backend.grad(x)
        backend.settle(x)
        assert not backend.edited(x)
    backend.backward(losses_of(backend, [[x]]))
    edit(x)
    backend.backward(losses_of(backend, [[x]]))     # "add" keeps the edit
    assert backend.edited(x) == (grad_req == "add")


@MXNET
def test_a_watch_makes_no_operation_of_the_users_fail(backend):
    """What is watched may have no gradient any more."""
    x, y = leaf(backend, [1.0]), backend.put(np.array([1.0]), cpu(1))
    watched = watch(backend, [[x], [y]])
    backend.backward(losses_of(backend, [[x]]))
    assert watched.noting
    y += 1
    x.grad[:] = 2
    assert backend.to_numpy(y).tolist() == [2]
    assert backend.edited(x) and not backend.edited(y)


@TORCH
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_asking_for_gradients_changes_none(backend, grad_req):
    """`torch.autograd.grad` after and before a backward pass."""
    import torch
    x, y = (leaf(backend, [1.0], grad_req=grad_req) for _ in range(2))
    watch(backend, [[x], [y]], [grad_req])
    loss, = losses_of(backend, [[x, y]])
    torch.autograd.grad(loss.sum(), [x], retain_graph=True)
    assert fresh(backend, [[x, y]]) == [False, False]
    backend.backward([loss])
    found = torch.autograd.grad(losses_of(backend, [[x, y]])[0].sum(), [x])
    assert found[0].tolist() == gradient(backend, x) == [2]
    assert fresh(backend, [[x, y]]) == [True, True]
    assert not backend.edited(x)


@TORCH
@pytest.mark.parametrize("inputs", [False, True])
def test_torchs_own_backward_writes_too(backend, inputs):
    x, y = leaf(backend, [1.0]), leaf(backend, [1.0])
    for n in range(1, 3):
        loss, = losses_of(backend, [[x * n, y]])
        loss.sum().backward(inputs=[x] if inputs else None)
        assert gradient(backend, x) == [2 * n]
        assert fresh(backend, [[x, y]]) == [True, not inputs]


UNRECORDED = ("backward needs losses that were computed inside mgpu.record() "
              "from arrays with gradients attached; received one that was "
              "not. Put the forward pass inside `with mgpu.record():`.")


@pytest.mark.parametrize("make", [
    lambda b, x: b.put([1.0], cpu(0)),
    lambda b, x: b.put([1.0], cpu(0)) * 2,
    lambda b, x: b.ops.stop_gradient(x) * 2], ids=["new", "from new",
                                                   "stopped"])
@pytest.mark.parametrize("beside_another", [False, True])
def test_a_loss_that_was_not_recorded(backend, make, beside_another):
    x, other = leaf(backend, [1.0]), leaf(backend, [1.0], cpu(1))
    with recording(backend):
        losses = [other * 2] if beside_another else []
        losses.append(make(backend, x))
    with pytest.raises(RuntimeError) as refused:
        backend.backward(losses)
    assert str(refused.value) == UNRECORDED
    assert gradient(backend, x) == gradient(backend, other) == [0]
    assert not backend.is_fresh(x) and not backend.is_fresh(other)


def test_a_loss_from_where_recording_is_off(backend):
    x = leaf(backend, [1.0])
    with recording(backend), backend.scope(recording=False):
        y = x * 2
    with pytest.raises(RuntimeError) as refused:
        backend.backward([y])
    assert str(refused.value) == UNRECORDED


# -- scope --------------------------------------------------------------------

def flags(backend):
    return backend.is_recording(), backend.is_training()


def test_scopes_nest_and_leave_what_is_none(backend):
    assert flags(backend) == (False, False)
    with backend.scope(recording=True, training=True):
        assert flags(backend) == (True, True)
        with backend.scope(recording=False):
            assert flags(backend) == (False, True)
            with backend.scope(training=False):
                assert flags(backend) == (False, False)
                with backend.scope():
                    assert flags(backend) == (False, False)
            assert flags(backend) == (False, True)
        assert flags(backend) == (True, True)
    assert flags(backend) == (False, False)


def test_a_scope_belongs_to_its_thread(backend):
    seen = []
    with backend.scope(recording=True, training=True):
        thread = threading.Thread(target=lambda: seen.append(flags(backend)))
        thread.start()
        thread.join()
        assert flags(backend) == (True, True)
    assert seen == [(False, False)]


def test_a_scope_holds_no_await(backend):
    """Where another task computes meanwhile: its flags would be wrong."""
    replicas = mgpu.initialize(mlp(backend), [cpu(0)])
    x, seen = mgpu.put(np.ones((2, 6), "float32"), mgpu.cpu(0)), []

    async def awaits():
        with mgpu.record():
            await asyncio.sleep(0)

    async def computes():
        for use in (lambda: replicas[0](x), mgpu.no_grad().__enter__):
            with pytest.raises(RuntimeError, match="blocks hold no await"):
                use()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with mgpu.no_grad():
            seen.append(replicas[0](x).shape)

    async def main():
        await asyncio.gather(awaits(), computes())
        with mgpu.record():     # a block without one is as ever
            seen.append(replicas[0](x).shape)
        await awaits()          # nobody else computes

    with mgpu.no_grad():        # and what holds outside holds in all tasks
        asyncio.run(main())
    assert seen == [(2, 3)] * 2 and not backend.is_recording()
    for function in (awaits, lambda: (yield)):
        with pytest.raises(TypeError, match="done when they return"):
            mgpu.record()(function)


# -- parallel -----------------------------------------------------------------

@pytest.fixture(params=[False, True], ids=["free", "rendezvous"])
def parallel(request, backend):
    return lambda thunks: backend.parallel(thunks, rendezvous=request.param)


def test_results_are_in_order(parallel, devices):
    assert parallel([lambda d=d: d for d in devices]) == devices
    assert parallel([]) == []


def test_the_first_exception_is_raised_after_all_have_run(parallel):
    ran = []

    def thunk(i):
        ran.append(i)
        if i in (1, 2):
            raise ValueError(i)
    with pytest.raises(ValueError) as raised:
        parallel([lambda i=i: thunk(i) for i in range(4)])
    assert raised.value.args == (1,)
    assert sorted(ran) == [0, 1, 2, 3]
    assert parallel([lambda: 1, lambda: 2]) == [1, 2]   # and goes on working


class Odd(BaseException):
    """Not an `Exception`, as KeyboardInterrupt is not."""


def test_nothing_is_swallowed(parallel):
    def stop():
        raise Odd
    with pytest.raises(Odd):
        parallel([lambda: 1, stop])
    assert parallel([lambda: 1, lambda: 2]) == [1, 2]


variable = contextvars.ContextVar("variable", default=None)


def test_the_callers_modes_are_carried(backend, parallel, devices):
    token = variable.set("mine")
    try:
        for recording, training in ((True, True), (False, True),
                                    (True, False), (False, False)):
            with backend.scope(recording, training):
                here = modes(backend)
                seen = parallel([
                    lambda: (variable.get(), mgpu.get_backend(),
                             flags(backend), modes(backend))
                    for _ in devices])
            assert seen == [("mine", backend, (recording, training), here)
                            ] * len(devices)
    finally:
        variable.reset(token)


def test_torch_autocast_and_inference_mode_are_carried(backend, parallel):
    if backend.name == "torch":
        import torch
        x = torch.ones(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            assert [y.dtype for y in parallel([lambda: x @ x] * 2)] \
                == [torch.bfloat16] * 2
        with torch.inference_mode():
            assert all(y.is_inference() for y in parallel([lambda: x + x] * 2))
        with torch.no_grad():
            assert parallel([torch.is_grad_enabled] * 2) == [False] * 2
    assert parallel([lambda: modes(backend)] * 2) == [modes(backend)] * 2


def test_a_thunk_leaves_no_mode_behind(backend, parallel):
    before = modes(backend)

    def thunk():
        with backend.scope(recording=True, training=True):
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        parallel([thunk, thunk])
    assert parallel([lambda: (flags(backend), modes(backend))] * 2) \
        == [((False, False), before)] * 2


def test_nested_parallel_runs_in_turn(backend, parallel):
    def inner(i):
        return backend.parallel([lambda j=j: 10 * i + j for j in range(3)])
    assert parallel([lambda i=i: inner(i) for i in range(2)]) \
        == [[0, 1, 2], [10, 11, 12]]


def test_no_rendezvous_inside_a_rendezvous(backend):
    """It would wait for ever."""
    def inner():
        return backend.parallel([lambda: 1, lambda: 2], rendezvous=True)
    with pytest.raises(RuntimeError) as refused:
        backend.parallel([inner, inner], rendezvous=True)
    assert str(refused.value) == (
        "functions that wait for each other cannot start inside a function "
        "that mgpu.parallel runs; call the replicas together, outside of it.")


def test_backward_inside_parallel(backend, parallel, devices):
    xs = [leaf(backend, [1.0, 2.0], d) for d in devices]

    def step(x):
        with recording(backend):
            y = x * x
        backend.backward([y])
        return gradient(backend, x)
    assert parallel([lambda x=x: step(x) for x in xs]) \
        == [[2, 4]] * len(devices)


def test_callers_from_several_threads(backend):
    """Each gets its own results; thunks that wait for each other are not
    interleaved with those of another caller, which would wait for ever."""
    results, context = {}, contextvars.copy_context()

    def meet(meeting, n, i):
        meeting.wait()
        return n, i

    def call(n):
        results[n] = []
        for _ in range(50):
            meeting = threading.Barrier(3, timeout=10)
            results[n].append(backend.parallel(
                [lambda i=i: meet(meeting, n, i) for i in range(3)],
                rendezvous=True))
    threads = [threading.Thread(target=context.copy().run, args=(call, n))
               for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)     # as many interleavings as there can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == {n: [[(n, i) for i in range(3)]] * 50
                       for n in range(4)}


# -- the rest -----------------------------------------------------------------

def test_synchronize_waits_and_returns_nothing(backend, devices):
    x = backend.put(np.ones((64, 64)), devices[-1])
    y = backend.ops.dot(x, x)
    assert backend.synchronize(devices) is None
    assert backend.synchronize([]) is None
    assert backend.to_numpy(y)[0, 0] == 64


def dropout(backend, devices):
    """Masks of a dropout layer on each device."""
    if backend.name == "torch":
        from torch import nn
        net = nn.Sequential(nn.Dropout(0.5))
    else:
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dropout(0.5))
    replicas = mgpu.initialize(net, devices, "uniform")
    ones = [backend.put(np.ones(256, "float32"), d) for d in devices]

    def masks():
        with recording(backend):
            return [backend.to_numpy(y).tolist() for y in replicas(ones)]
    return masks


@pytest.mark.parametrize("net", [None, 3, mlp, np.ones(2), SimpleNamespace()],
                         ids=name_of)
def test_what_is_no_network_is_refused(backend, net):
    wanted = {"mxnet": "gluon.Block", "torch": "torch.nn.Module"}
    with pytest.raises(TypeError) as refused:
        backend.network(net)
    assert str(refused.value) == (
        f"the {backend.name} backend takes a {wanted[backend.name]}; "
        f"received {type(net).__module__}.{type(net).__name__}. Choose the "
        "engine with mgpu.set_backend before the network is made.")


def test_doctor_gives_levels_and_texts(backend):
    for level, text in backend.doctor():
        assert level in ("info", "warning", "error") and text


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
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(CASES)]


def call(ops, name, arrays, options):
    if name == "concat":
        return ops.concat(arrays, **options)
    if name == "from_host":
        return ops.from_host(Y, *arrays)
    return getattr(ops, name)(*arrays, **options)


def answer(name, arrays, options, function):
    return np.asarray(function(*arrays, **options))


def test_every_function_has_a_case():
    assert {name for name, *_ in CASES} == {
        name for name in vars(base.Ops) if not name.startswith("_")}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ops_compute_as_numpy_does(engine, backend, case):
    name, inputs, options, function = case
    arrays = [backend.put(x, cpu(1)) for x in inputs]
    made = backend.to_numpy(call(backend.ops, name, arrays, options))
    expected = answer(*case)
    if engine == "mxnet-nd" and expected.shape == ():
        expected = expected.reshape(1)      # mx.nd has no 0-d results
    assert made.shape == expected.shape and made.dtype == np.float64
    # At most some dozen roundings of float64 numbers of size 1.
    np.testing.assert_allclose(made, expected, rtol=1e-13, atol=1e-14)
    for x, array in zip(inputs, arrays):
        assert_bit_equal(backend.to_numpy(array), x)


@pytest.mark.parametrize("case", [
    case for case in CASES if case[0] not in ("zeros_like", "from_host")
    and answer(*case).size and all(x.size for x in case[1])],
    ids=lambda case: case[0])
def test_ops_have_the_gradients_of_numpys_answer(engine, backend, case):
    name, inputs, options, function = case
    expected = answer(*case)
    weights = some(*expected.shape, seed=2) + 1
    arrays = [backend.put(x, cpu(0)) for x in inputs]
    for array, x in zip(arrays, inputs):
        if x.dtype == np.float64:
            backend.attach_grad(array)
    shape = expected.shape or ((1,) if engine == "mxnet-nd" else ())
    w = backend.put(weights.reshape(shape), cpu(0))
    with recording(backend):
        loss = call(backend.ops, name, arrays, options) * w
    if name == "stop_gradient":
        with pytest.raises(RuntimeError):
            backend.backward([loss])
        return
    backend.backward([loss])
    for i, x in enumerate(inputs):
        if x.dtype != np.float64:
            continue

        def value(v):
            replaced = [*inputs[:i], v, *inputs[i + 1:]]
            return (answer(name, replaced, options, function) * weights).sum()
        # The error of the numerical gradient: 1e-16 * |sum| / step = 1e-11.
        assert relative_difference(
            backend.to_numpy(backend.grad(arrays[i])),
            numerical_gradient(value, x), floor=1.0) < 1e-10


@pytest.mark.parametrize("case", [
    case for case in CASES
    # These may share memory: the first writes to it, the others say so.
    if case[0] not in ("flat_view", "slice_axis", "stop_gradient")],
    ids=lambda case: case[0])
def test_results_are_fresh(backend, case):
    name, inputs, options, _ = case
    arrays = [backend.put(x, cpu(0)) for x in inputs]
    result = call(backend.ops, name, arrays, options)
    assert not any(result is x for x in arrays)
    if 0 in result.shape:
        return
    result *= 0.0
    result += 77.0
    for x, array in zip(inputs, arrays):
        assert_bit_equal(backend.to_numpy(array), x)


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_astype_converts_and_passes_gradients(backend, dtype):
    x = leaf(backend, [1.0, 2.0, 3.0])
    for form in (dtype, np.dtype(dtype), np.dtype(dtype).type):
        assert_bit_equal(backend.to_numpy(backend.ops.astype(x, form)),
                         np.array([1, 2, 3], dtype))
    if "float" in dtype:
        with recording(backend):
            y = backend.ops.astype(x, dtype) * 2
        backend.backward([y])
        assert_bit_equal(backend.to_numpy(backend.grad(x)), np.full(3, 2.0))


def test_softplus_does_not_overflow_and_keeps_small_values(backend):
    x = np.array([-800.0, -40.0, -20.5, -1.0, 0.0, 1.0, 20.5, 40.0, 800.0])
    made = backend.to_numpy(backend.ops.softplus(backend.put(x, cpu(0))))
    # Elementwise: two roundings of an exact formula.
    np.testing.assert_allclose(made, np.logaddexp(0, x), rtol=1e-15)


@pytest.mark.parametrize("name, x, slope", [("relu", 0.0, 0.0),
                                            ("abs", 0.0, 0.0),
                                            ("maximum", 0.5, 1.0),
                                            ("minimum", 0.5, 1.0)])
def test_slopes_at_a_kink_are_the_same_on_both_engines(backend, name, x,
                                                       slope):
    leaf_x = leaf(backend, [x])
    options = {"y": 0.5} if name.endswith("imum") else {}
    with recording(backend):
        y = getattr(backend.ops, name)(leaf_x, **options)
    backend.backward([y])
    assert gradient(backend, leaf_x) == [slope]


def test_nan_is_not_lost(backend):
    x = backend.put(np.array([np.nan, 1.0, np.nan]), cpu(0))
    y = backend.put(np.array([1.0, np.nan, np.nan]), cpu(0))
    ops = backend.ops
    for made in (ops.maximum(x, y), ops.minimum(x, y), x + y, ops.exp(x) + y):
        assert np.isnan(backend.to_numpy(made)).all()


def test_ctrl_c_lets_the_threads_finish(backend):
    """KeyboardInterrupt arrives when no thunk works on behind one's back."""
    begun, go, finished = threading.Event(), threading.Event(), []

    def thunk():
        begun.set()
        go.wait(30)
        finished.append(1)

    def press():
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        go.set()
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        backend.parallel([thunk, thunk], rendezvous=True)
    presser.join()
    assert finished == [1, 1]
    assert backend.parallel([int, int], rendezvous=True) == [0, 0]


class Preempted(Exception):
    """What a signal handler of the program raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("count", [1, 2])
def test_no_signal_cuts_work_in_the_hosts_memory_short(backend, count,
                                                       number):
    def handler(*_):
        raise Preempted

    def signalled():    # once: a second one may come when all is over
        # To the thread that handles it: another one, to which the system may
        # give it, may come to it when the handler is gone.
        signal.pthread_kill(threading.main_thread().ident, number)
        done.append(1)
    done, before = [], signal.signal(number, handler)
    try:
        with pytest.raises(Preempted):
            backend.run_on_host_views(
                [signalled, *[lambda: done.append(1)] * (count - 1)], [])
    finally:
        signal.signal(number, before)
    assert done == [1] * count


@pytest.mark.parametrize("value", ["0", "many"]
                         if "torch" in BACKENDS else [])
def test_a_wrong_number_of_threads_is_refused(value):
    done = subprocess.run(
        [sys.executable, "-c", "import mgpu; mgpu.set_backend('torch')"],
        env={**os.environ, "MGPU_THREADS_PER_DEVICE": value},
        capture_output=True, text=True, timeout=120)
    assert f"1 or more; received '{value}'" in done.stderr


@pytest.mark.parametrize("dtype, wide", [
    ("int16", "int64"), ("uint16", "int64"), ("uint64", "int64"),
    ("complex64", "float64")])
def test_host_dtypes_that_one_engine_lacks_are_refused_by_both(backend, dtype,
                                                               wide):
    with pytest.raises(ValueError, match=(
            f"unknown dtype; received '{dtype}'. Convert the data: "
            rf"x.astype\('{wide}'\)")):
        backend.put(np.ones(2, dtype), mgpu.cpu(0))
