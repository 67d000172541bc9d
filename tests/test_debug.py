"""`Replicas.check_equal`; ``MGPU_DEBUG=1`` calls it after each update."""
import numpy as np
import pytest

import mgpu
from batches import pictures
from helpers import convnet, on
from nets import shards_of


def made(backend, k=2, **options):
    replicas = mgpu.initialize(convnet(backend), on(*range(k)), "uniform",
                               **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})


def step(replicas, trainer, meanwhile=None):
    """One step; `meanwhile` is called between its passes and its update."""
    with mgpu.record():
        losses = [(out * out).sum() for out
                  in replicas(shards_of(pictures(5), replicas))]
    mgpu.backward(losses)
    if meanwhile is not None:
        with mgpu.no_grad():
            meanwhile()
    trainer.step(5)


def test_a_weight_that_one_device_alone_has(backend, monkeypatch):
    monkeypatch.setenv("MGPU_DEBUG", "1")
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


@pytest.mark.parametrize("value, error", [
    (None, None), ("0", None), ("", None), ("1", mgpu.ReplicaMismatchError),
    ("yes", ValueError)])
def test_the_switch_is_read_when_it_is_used(backend, value, error,
                                            monkeypatch):
    replicas, trainer = made(backend)
    monkeypatch.delenv("MGPU_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("MGPU_DEBUG", value)

    def change():
        replicas.params()[0].list_data()[1][:] = 1.0
    if error is None:
        step(replicas, trainer, meanwhile=change)
        assert trainer.num_update == 1
    else:
        with pytest.raises(error, match="'0.weight'" if value == "1" else
                           "MGPU_DEBUG must be 0 or 1; received 'yes'"):
            step(replicas, trainer, meanwhile=change)


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


def test_statistics_where_the_policy_promises_them(backend):
    for batch_norm in ("per_device", "average", "sync"):
        replicas, _ = made(backend, batch_norm=batch_norm)
        with mgpu.no_grad():
            replicas.statistics()[0].list_data()[1][:] = 0.5
        if batch_norm == "per_device":
            replicas.check_equal()
        else:
            with pytest.raises(mgpu.ReplicaMismatchError,
                               match="running_mean"):
                replicas.check_equal()


def test_before_the_first_forward_pass(backend):
    replicas = mgpu.initialize(convnet(backend, deferred=True), on(0, 1),
                               "uniform")
    with pytest.raises(RuntimeError, match="no values yet"):
        replicas.check_equal()
