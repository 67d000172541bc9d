"""``MGPU_DEBUG=1``: replicas are compared after each update."""
import numpy as np
import pytest

import mgpu
from helpers import convnet, on


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("MGPU_DEBUG", "1")


def made(backend, k=2, **options):
    replicas = mgpu.initialize(convnet(backend), on(*range(k)), "uniform",
                               **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1,
                                                    "momentum": 0.9})


def step(replicas, trainer, rows=5, seed=0, meanwhile=None):
    """One step; `meanwhile` is called between its passes and its update."""
    rng, loss = np.random.default_rng(seed), \
        mgpu.losses.SoftmaxCrossEntropyLoss()
    X = rng.standard_normal((rows, 2, 4, 4)).astype("float32")
    Xs, ys = mgpu.split_batch(X, rng.integers(0, 3, rows), replicas.devices)
    with mgpu.record():
        losses = [None if out is None else loss(out, label)
                  for out, label in zip(replicas(Xs), ys)]
    mgpu.backward(losses)
    if meanwhile is not None:
        with mgpu.no_grad():
            meanwhile()
    trainer.step(rows)


@pytest.mark.parametrize("batch_norm", ["per_device", "average", "sync"])
def test_correct_training_passes(backend, devices, debug, batch_norm):
    """Batches smaller than the number of devices too."""
    replicas, trainer = made(backend, len(devices), batch_norm=batch_norm)
    for seed, rows in enumerate((5, 2, 1, 4)):
        if batch_norm == "sync" and rows == 1:
            rows = 2
        step(replicas, trainer, rows, seed)
    replicas.check_equal()


def test_a_weight_that_one_device_alone_has(backend, debug):
    replicas, trainer = made(backend, 3)
    step(replicas, trainer)
    parameter = replicas.params()[3]

    def change():       # as no pass would leave it
        parameter.list_data()[2][1:2] += 0.25
    with pytest.raises(mgpu.ReplicaMismatchError) as raised:
        step(replicas, trainer, meanwhile=change)
    text = str(raised.value)
    assert f"{parameter.name!r} on cpu(0) and on cpu(2) does not: 1 of " in \
        text and "set_data" in text
    # float32 sums of values near 1: the gap is 0.25 to a few roundings
    gap = float(text.split("by ")[1].split(" at most")[0])
    assert abs(gap - 0.25) < 1e-5


def test_the_switch_is_read_when_it_is_used(backend, monkeypatch):
    def change():
        replicas.params()[0].list_data()[1][:] = 1.0
    for value in (None, "0", ""):
        replicas, trainer = made(backend)
        monkeypatch.delenv("MGPU_DEBUG", raising=False)
        if value is not None:
            monkeypatch.setenv("MGPU_DEBUG", value)
        step(replicas, trainer, meanwhile=change)
    replicas, trainer = made(backend)
    monkeypatch.setenv("MGPU_DEBUG", "1")
    with pytest.raises(mgpu.ReplicaMismatchError):
        step(replicas, trainer, meanwhile=change)
    replicas, trainer = made(backend)
    monkeypatch.setenv("MGPU_DEBUG", "yes")
    before = trainer.num_update
    with pytest.raises(ValueError, match="MGPU_DEBUG must be 0 or 1; received "
                       "'yes'"):
        step(replicas, trainer)
    assert trainer.num_update == before


@pytest.mark.parametrize("value, words", [
    (np.nan, "by inf at most"), (-0.0, "equal numbers with other bits")])
def test_values_that_numbers_cannot_compare(backend, value, words):
    replicas, _ = made(backend)
    bias = next(p for p in replicas.params() if p.kind == "bias")
    # an array: mx.nd writes the number -0.0 as 0.0
    value = np.full(bias.shape, value, "float32")
    with mgpu.no_grad():
        bias.list_data()[1][:] = mgpu.put(value, on(1)[0])
    with pytest.raises(mgpu.ReplicaMismatchError, match=words):
        replicas.check_equal()
    with mgpu.no_grad():
        bias.list_data()[0][:] = mgpu.put(value, on(0)[0])
    replicas.check_equal()      # the same NaN, the same zero


@pytest.mark.parametrize("batch_norm, promised", [
    ("per_device", False), ("average", True), ("sync", True)])
def test_statistics_where_the_policy_promises_them(backend, batch_norm,
                                                   promised):
    replicas, _ = made(backend, batch_norm=batch_norm)
    with mgpu.no_grad():
        replicas.statistics()[0].list_data()[1][:] = 0.5
    if promised:
        with pytest.raises(mgpu.ReplicaMismatchError, match="running_mean"):
            replicas.check_equal()
    else:
        replicas.check_equal()


@pytest.mark.parametrize("what", ["parameter", "statistic", "view"])
def test_replicas_that_share_memory(backend, debug, what):
    replicas, trainer = made(backend)
    step(replicas, trainer)
    shared = (replicas.statistics() if what == "statistic"
              else replicas.params())[0]
    first, _ = shared.list_data()
    if backend.name == "mxnet":
        parameter = replicas.network.entries[shared.number][1]
        parameter._data[1] = first[0:] if what == "view" else first
    else:
        owner, name = replicas.of_engine()[1]._owners[shared.number]
        if what == "view":      # another tensor, the same memory
            owner[name].data = first.data
        else:
            owner[name] = first
    with pytest.raises(mgpu.ReplicaMismatchError) as raised:
        replicas.check_equal()
    text = str(raised.value)
    assert shared.name in text and "cpu(0)" in text and "cpu(1)" in text
    assert "share" in text and "mgpu.put" in text


def test_gradients_that_share_memory(backend):
    replicas, trainer = made(backend)
    step(replicas, trainer)
    parameter = replicas.params()[0]
    first, second = parameter.list_data()
    if backend.name == "mxnet":
        import mxnet as mx
        mx.autograd.mark_variables(
            [second], [first.grad])
    else:
        second.grad = first.grad
    with pytest.raises(mgpu.ReplicaMismatchError,
                       match=f"the gradient of {parameter.name}"):
        replicas.check_equal()


@pytest.mark.parametrize("extents, shared", [
    ([(0, 4, 0), (4, 8, 1), (8, 9, 0)], False),
    ([(0, 4, 0), (3, 8, 1)], True),
    ([(0, 9, 0), (1, 2, 0), (3, 4, 1)], True),      # inside an earlier one
    ([(0, 3, 0), (2, 9, 0), (4, 5, 1)], True),      # inside the second
    ([(0, 9, 0), (1, 2, 0), (2, 9, 0)], False)])
def test_overlaps(extents, shared):
    from mgpu.replica_checks import Extent, check_apart
    found = [Extent("cpu", begin, end, mgpu.cpu(i), str(n))
             for n, (begin, end, i) in enumerate(extents)]
    check_apart([e._replace(space=str(e.device)) for e in found])
    if shared:
        with pytest.raises(mgpu.ReplicaMismatchError, match="memory of its "):
            check_apart(found[::-1])
    else:
        check_apart(found[::-1])


def test_shared_layers_are_no_aliases(backend):
    """One array under two names on one device."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        first = nn.Dense(3, in_units=3)
        net = nn.HybridSequential()
        net.add(first, nn.Dense(3, in_units=3, params=first.params))
    else:
        from torch import nn
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight, net[1].bias = net[0].weight, net[0].bias
    mgpu.initialize(net, on(0, 1), "uniform").check_equal()


def test_before_the_first_forward_pass(backend):
    replicas = mgpu.initialize(convnet(backend, deferred=True), on(0, 1),
                               "uniform")
    with pytest.raises(RuntimeError, match="no values yet"):
        replicas.check_equal()
