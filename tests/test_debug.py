"""`Replicas.check_equal`; ``MGPU_DEBUG=1`` calls it after each update."""
import contextlib

import pytest

import mgpu
from batches import pictures
from helpers import convnet, on
from nets import shards_of


def made(backend, k=2, **options):
    replicas = mgpu.initialize(convnet(backend), on(*range(k)), "uniform",
                               **options)
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})


def step(replicas, trainer):
    with mgpu.record():
        losses = [(out * out).sum() for out
                  in replicas(shards_of(pictures(5), replicas))]
    mgpu.backward(losses)
    trainer.step(5)


@pytest.mark.parametrize("value", [None, "0", "", "1", "yes"])
def test_the_switch_is_read_when_it_is_used(backend, value, monkeypatch):
    replicas, trainer = made(backend)
    monkeypatch.delenv("MGPU_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("MGPU_DEBUG", value)
    with contextlib.nullcontext() if value != "yes" else pytest.raises(
            ValueError, match="MGPU_DEBUG must be 0 or 1; received 'yes'"):
        step(replicas, trainer)
        assert trainer.num_update == 1


def test_before_the_first_forward_pass(backend):
    replicas = mgpu.initialize(convnet(backend, deferred=True), on(0, 1),
                               "uniform")
    with pytest.raises(RuntimeError, match="no values yet"):
        replicas.check_equal()
