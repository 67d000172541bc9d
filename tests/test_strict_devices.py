"""`mgpu.strict_devices`: what raises on GPUs raises on logical CPU devices,
what they allow is allowed, and bytes are counted."""
import contextlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import mgpu
from batches import classes, pictures
from helpers import assert_all_equal, convnet, mlp, on, using_engine

pytestmark = pytest.mark.crosses_devices(
    "turns the mode on by itself, and shows what happens without it")

A, B = on(0, 1)
ROW = np.float32([1, 2, 3])


def two(value=ROW):
    return [mgpu.put(value, A), mgpu.put(value, B)]


def refused(*words):
    return pytest.raises(
        mgpu.CrossDeviceError,
        match=r"an operation takes arrays of one device.*" + ".*".join(words)
        + r".*cpu\(\d\) and cpu\(\d\).*mgpu\.put\(x, cpu\(\d\)\)")


def foreign_sum(x, y):
    """The mistake of most tests: no copy."""
    return x + y


# -- planted mistakes ---------------------------------------------------------

MISTAKES = [
    foreign_sum, lambda x, y: y * x, lambda x, y: mgpu.functional.concat(
        [x, y]), lambda x, y: mgpu.functional.maximum(x, y),
    lambda x, y: mgpu.functional.dot(x.reshape((1, 3)), y.reshape((3, 1))),
    lambda x, y: x[1:] + y[1:], lambda x, y: (x * 2.0) - abs(y),
    lambda x, y: x.__iadd__(y), lambda x, y: x.__imul__(y[0:1])]


def test_a_foreign_array_in_an_operation(engine):
    for mistake in MISTAKES:
        mistake(*two())     # a logical device says nothing
        with mgpu.strict_devices():
            x, y = two()
            mistake(mgpu.put(x, A), mgpu.put(y, x))
            with refused():
                mistake(x, y)
            assert mgpu.to_numpy(x).tolist() == ROW.tolist()


def test_a_result_belongs_to_the_device_of_its_inputs(engine):
    """Through views, functions and gradients."""
    with mgpu.strict_devices():
        x, y = two()
        for array in (x, y):
            mgpu.attach_grad(array)
        with mgpu.record():
            z = mgpu.functional.sum(mgpu.functional.exp(x[1:].reshape(
                (2, 1)) * 2.0), axis=0)
        mgpu.backward(z)
        for here in (z, mgpu.grad(x), mgpu.functional.zeros_like(x)):
            here + x[:1]
            with refused():
                here + y[:1]


def test_a_forgotten_copy(backend):
    """Device 1 is handed the very array of device 0."""
    with mgpu.strict_devices():
        replicas = mgpu.initialize(mlp(backend), [A, B], "uniform")
        x = mgpu.put(np.ones((2, 6), "f"), A)
        for call in (lambda: replicas([x, x]), lambda: replicas[1](x)):
            with pytest.raises(ValueError, match=(
                    r"the replica on cpu\(1\) takes arrays on cpu\(1\); "
                    r"received one on cpu\(0\)")):
                call()
        params = mgpu.get_params([np.ones((6, 2), "f")], B)
        with refused():
            mgpu.functional.dot(x, params[0])


def test_mxnet_results_written_elsewhere():
    with mgpu.using_backend("mxnet"), mgpu.strict_devices():
        import mxnet as mx
        x, y = two()
        mx.nd.square(x, out=x)
        with refused("square"):
            mx.nd.square(x, out=y)


def test_mxnet_functions_behind_its_function_interface():
    """Not all of `mx.np` goes the way of the operators."""
    with using_engine("mxnet-np"), mgpu.strict_devices():
        import mxnet as mx
        x, y = two()
        assert float(mx.np.tensordot(x, x, 1)) == 14
        with refused("a function of mx.np"):
            mx.np.tensordot(x, y, 1)


# -- what is legal ------------------------------------------------------------

def test_copies_between_devices(engine):
    with mgpu.strict_devices() as ledger:
        x, y = two()
        ledger.copied.clear()
        x[:] = y * 2.0
        z = mgpu.put(x, B)
        z + y
        x[:] = x + 1.0
        x[:] = 0
        assert mgpu.to_numpy(z).tolist() == [2, 4, 6]
    assert ledger.copied == {(B, A): 12, (A, B): 12, (B, "host"): 12}


def test_torch_constants_belong_where_they_are_first_used():
    """A forward pass makes them with ``device=x.device``, which says cpu."""
    with mgpu.using_backend("torch"), mgpu.strict_devices() as ledger:
        import torch
        x, y = two()
        for array in (x, y):
            ones = torch.ones(3, device=array.device)
            assert (array + ones).tolist() == [2, 3, 4]
        with refused():
            x + ones        # it was used with y
        mask = torch.empty(3)
        mask.copy_(x)       # filled from x, on its device
        with refused():
            mask * y
        assert mask.tolist() == ROW.tolist()
    assert set(ledger.copied) == {("host", A), ("host", B)}


def test_torch_host_numbers_and_indices_go_with_any_device():
    """CUDA's rule: 0-dim CPU tensors, and CPU index tensors."""
    with mgpu.using_backend("torch"), mgpu.strict_devices():
        import torch
        x, y = two()
        factor, index = torch.tensor(2.0), torch.tensor([2, 0])
        for array in (x, y):
            assert (array * factor)[index].tolist() == [6, 2]
        with refused():     # 0-dim, but of a device
            x * y.sum()
        with refused():
            x[(y * 0).long()]


def test_torch_lists_of_many_devices_go_row_by_row():
    """What torch's own optimizers do with the parameters of all devices."""
    with mgpu.using_backend("torch"), mgpu.strict_devices():
        import torch
        arrays = two()
        torch._foreach_add_(arrays, [x * 2.0 for x in arrays], alpha=1)
        assert [x.tolist() for x in arrays] == [[3, 6, 9]] * 2
        for total, x in zip(torch._foreach_mul(arrays, 2.0), arrays):
            total + x
        with refused():
            torch._foreach_add_(arrays, arrays[::-1])


# -- what cannot be seen ------------------------------------------------------

def test_torch_cpu_is_no_copy_on_a_logical_device():
    """`to_numpy` is."""
    with mgpu.using_backend("torch"), mgpu.strict_devices():
        x, y = two()
        with refused():
            x.cpu() + y.cpu()
        assert (mgpu.to_numpy(x) + mgpu.to_numpy(y)).tolist() == [2, 4, 6]


def test_the_backward_pass_of_a_copy(backend):
    """Runs inside MXNet's library, where no Python sees its copies."""
    with mgpu.strict_devices() as ledger:
        x = mgpu.put(ROW, A)
        mgpu.attach_grad(x)
        with mgpu.record():
            y = mgpu.put(x, B) * 2.0
        ledger.copied.clear()
        mgpu.backward(y)
        mgpu.synchronize([A, B])
        seen = {(B, A): 12} if backend.name == "torch" else {}
        assert ledger.copied == seen
        mgpu.grad(x) + x        # it is back
        assert mgpu.to_numpy(mgpu.grad(x)).tolist() == [2, 2, 2]


# -- bytes --------------------------------------------------------------------

def test_bytes_of_a_split(engine, devices):
    X = {"a": np.zeros((7, 2), "float64"), "b": np.zeros(7, "uint8")}
    with mgpu.strict_devices() as ledger:
        mgpu.split_and_load(X, devices, even_split=False)
    k = len(devices)
    assert ledger.copied == {
        ("host", d): 17 * (7 // k + (i < 7 % k))
        for i, d in enumerate(devices)}


def test_bytes_of_allreduce(engine, devices):
    a, b, c = devices
    for algorithm, wanted in (
            ("naive", {(a, b): 96, (b, a): 96, (c, b): 96, (b, c): 96}),
            # each device sends 2 (K - 1) chunks of a K-th to the next one
            ("ring", {(a, b): 128, (b, c): 128, (c, a): 128})):
        with mgpu.strict_devices() as ledger:
            data = [mgpu.put(np.ones(24, "f"), d) for d in devices]
            ledger.copied.clear()
            mgpu.allreduce(data, algorithm=algorithm, **(
                {"root": 1} if algorithm == "naive" else {}))
        assert ledger.copied == wanted


# -- where and when it holds --------------------------------------------------

@pytest.mark.parametrize("error", [None, ZeroDivisionError,
                                   mgpu.CrossDeviceError])
def test_it_is_gone_after_the_block(backend, error):
    x, y = two()
    with contextlib.suppress(error or ()), mgpu.strict_devices() as ledger:
        if error is mgpu.CrossDeviceError:
            foreign_sum(*two())
        elif error:
            raise error
    counted = dict(ledger.copied)
    foreign_sum(*two())
    foreign_sum(x, y)
    assert ledger.copied == counted


def test_blocks_inside_blocks(backend):
    with mgpu.strict_devices() as outer:
        x, y = two()
        with mgpu.strict_devices() as inner:
            x[:] = y
            with refused():     # known from the outer block
                x + y
        assert inner.copied == {(B, A): 12}
        with refused():
            x + y
        mgpu.put(x, B)
    assert inner.copied == {(B, A): 12}
    assert outer.copied == {("host", A): 12, ("host", B): 12, (B, A): 12,
                            (A, B): 12}
    x + y


def test_it_reaches_the_devices_threads(backend):
    with mgpu.strict_devices() as ledger:
        arrays = two()
        with refused():
            mgpu.parallel(lambda x: x + arrays[0], arrays)
        ledger.copied.clear()
        mgpu.parallel(lambda x: [mgpu.put(x, d) for d in (A, B)] * 100,
                      arrays)
        assert ledger.copied == {(A, B): 12, (B, A): 12}
    mgpu.parallel(lambda x: x + arrays[0], arrays)      # gone there too


def test_other_threads_are_left_alone(backend):
    """Started by the user: not covered, neither by a block elsewhere."""
    found, name = [], backend.name

    def other():
        with mgpu.using_backend(name):
            found.append(mgpu.to_numpy(foreign_sum(*two())).tolist())
    with mgpu.strict_devices() as ledger:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [[2, 4, 6]] and not ledger.copied


def test_the_environment_variable(backend):
    """For the whole of a process."""
    code = f"""
import numpy as np, mgpu
mgpu.set_backend({backend.name!r})
x, y = (mgpu.put(np.ones(3), mgpu.cpu(i)) for i in range(2))
for call in lambda: x + y, lambda: mgpu.parallel(lambda a: a + x, [x, y]):
    try:
        call()
    except mgpu.CrossDeviceError:
        print("raised")
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "MGPU_STRICT_DEVICES": "1"}, timeout=300)
    assert out.stdout.split() == ["raised"] * 2, out.stderr
    assert out.returncode == 0 and not out.stderr


# -- a whole run --------------------------------------------------------------

@pytest.mark.parametrize("batch_norm", ["average", "sync"])
def test_training_gives_the_same_numbers(backend, batch_norm):
    """Uneven batches, the last one smaller than the number of devices:
    bit-equal weights, statistics and losses."""
    X, y = pictures(7, (2, 4, 4)), classes(7)
    batches = [(X[:5], y[:5]), (X[5:], y[5:])]

    def run():
        replicas = mgpu.initialize(convnet(backend), on(0, 1, 2), "uniform",
                                   batch_norm=batch_norm)
        # no root: torch's and NumPy's differ in the last bit
        trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.01,
                                                 "momentum": 0.9})
        history = mgpu.train(
            replicas, batches, batches, mgpu.losses.SoftmaxCrossEntropyLoss(),
            trainer, 1, progress=False)
        return replicas.export_numpy(all_devices=True), \
            history.loss_per_step, history.test_acc
    plain = run()
    with mgpu.strict_devices() as ledger:
        strict = run()
    assert strict[1:] == plain[1:]
    assert_all_equal(strict[0], plain[0])
    first, *others = on(0, 1, 2)    # where the network is
    assert {(first, d) for d in others} < set(ledger.copied)
