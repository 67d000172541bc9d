"""Gradients, backward passes and scopes as `mgpu.backends.base` says, on both
backends and on both array families of MXNet."""
import asyncio
import threading

import numpy as np
import pytest

import mgpu
from contract import flags, gradient, leaf, recording
from helpers import ENGINES, assert_bit_equal, mlp
from mgpu import cpu


@pytest.fixture
def backend(engine):
    return engine


TORCH, MXNET = (pytest.mark.parametrize("engine", [
    name for name in ENGINES if (name == "torch") is torch], indirect=True)
    for torch in (True, False))


# -- gradients ----------------------------------------------------------------

def test_a_gradient_starts_as_zeros(backend):
    for grad_req in ("write", "add"):
        x = backend.put(np.float32([[1, 2, 3]]), cpu(1))
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
    backend.attach_grad(x)          # thawed
    with recording(backend):
        y = x * x
    backend.backward([y])
    assert gradient(backend, x) == [2, 4]


@MXNET
def test_a_gradient_that_is_held_stays_the_gradient(backend):
    """What `grad` gave before the loop shows every later backward pass. (On
    torch each makes an array, as after ``zero_grad()``.)"""
    x = leaf(backend, [1.0, 2.0])
    held = backend.grad(x)
    for scale in (1.0, 2.0):
        with recording(backend):
            y = x * scale
        backend.backward([y])
        assert backend.to_numpy(held).tolist() == [scale, scale]


def test_no_gradient(backend):
    without = backend.put(np.float32([1, 2]), cpu(0))
    for x in (without, leaf(backend, [1.0], grad_req="null")):
        with pytest.raises(ValueError) as refused:
            backend.grad(x)
        assert str(refused.value) == (
            "the array has no gradient attached; use mgpu.attach_grad(x) "
            "before the forward pass.")


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


def test_only_floats_have_gradients(backend):
    for dtype in ("int64", "uint8", "bool"):
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


# -- backward -----------------------------------------------------------------

def test_each_loss_is_summed(backend, devices):
    for shape in ((2,), (2, 3), (1,)):
        values = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
        xs = [leaf(backend, values, d) for d in devices]
        with recording(backend):
            losses = [x * x * (i + 1.0) for i, x in enumerate(xs)]
        assert backend.backward(losses) is None
        for i, x in enumerate(xs):
            assert_bit_equal(backend.to_numpy(backend.grad(x)),
                             2 * values * (i + 1))
            assert backend.is_fresh(x)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_losses_that_share_a_leaf(backend, grad_req, devices):
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


# -- passes of the frameworks' own --------------------------------------------


def losses_of(backend, columns):
    with recording(backend):
        return [sum((x * 2.0 for x in leaves), 0.0) for leaves in columns]


def fresh(backend, columns):
    return [backend.is_fresh(x) for leaves in columns for x in leaves]


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
    functions = [Triple() for _ in columns]
    with recording(backend):
        losses = [function(x) for function, (x,) in zip(functions, columns)]
    backend.backward(losses)
    go.set()
    for x, in columns:
        assert gradient(backend, x) == [3]
        assert backend.is_fresh(x)


@MXNET
def test_an_error_stays_with_its_arrays(backend):
    """The backend tells an error once: it belongs to who uses the result,
    perhaps another thread."""
    import mxnet as mx
    good = backend.put(np.ones((1, 1)), cpu(0))
    for read in (backend.to_numpy, lambda x: backend.host_views([x])):
        bad = mx.nd.linalg.potrf(-good.as_nd_ndarray())
        view, = backend.host_views([good])
        backend.run_on_host_views([lambda view=view: view.fill(2)], [good])
        with pytest.raises(mx.MXNetError):
            read(bad)


@TORCH
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_asking_for_gradients_changes_none(backend, grad_req):
    """`torch.autograd.grad` after and before a backward pass."""
    import torch
    x, y = (leaf(backend, [1.0], grad_req=grad_req) for _ in range(2))
    loss, = losses_of(backend, [[x, y]])
    torch.autograd.grad(loss.sum(), [x], retain_graph=True)
    assert fresh(backend, [[x, y]]) == [False, False]
    backend.backward([loss])
    found = torch.autograd.grad(losses_of(backend, [[x, y]])[0].sum(), [x])
    assert found[0].tolist() == gradient(backend, x) == [2]
    assert fresh(backend, [[x, y]]) == [True, True]


UNRECORDED = ("backward needs losses that were computed inside mgpu.record() "
              "from arrays with gradients attached; received one that was "
              "not. Put the forward pass inside `with mgpu.record():`.")


def paused(backend, x):
    with backend.scope(recording=False):
        return x * 2


@pytest.mark.parametrize("make", [
    lambda b, x: b.put([1.0], cpu(0)),
    lambda b, x: b.put([1.0], cpu(0)) * 2,
    lambda b, x: b.ops.stop_gradient(x) * 2,
    lambda b, x: leaf(b, [1.0], grad_req="null") * 2, paused],
    ids=["new", "from new", "stopped", "null", "paused"])
def test_a_loss_that_was_not_recorded(backend, make):
    """Alone, or beside one that was."""
    x, other = leaf(backend, [1.0]), leaf(backend, [1.0], cpu(1))
    for beside_another in (False, True):
        with recording(backend):
            losses = [other * 2] if beside_another else []
            losses.append(make(backend, x))
        with pytest.raises(RuntimeError) as refused:
            backend.backward(losses)
        assert str(refused.value) == UNRECORDED
        assert gradient(backend, x) == gradient(backend, other) == [0]
        assert not backend.is_fresh(x) and not backend.is_fresh(other)


# -- scope --------------------------------------------------------------------

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
            with pytest.raises(RuntimeError, match="await is not supported"):
                use()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with mgpu.no_grad():
            seen.append(replicas[0](x).shape)

    async def main():
        await asyncio.gather(awaits(), computes())
        with mgpu.record():     # a block without one is as ever
            seen.append(replicas[0](x).shape)
        await awaits()          # no other task computes

    with mgpu.no_grad():        # and what holds outside holds in all tasks
        asyncio.run(main())
    assert seen == [(2, 3)] * 2 and not backend.is_recording()
    for function in (awaits, lambda: (yield)):
        with pytest.raises(TypeError, match="do not decorate coroutines"):
            mgpu.record()(function)
