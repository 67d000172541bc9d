"""`mgpu.Trainer`: gradients that are not finite, and work that fails on a
device."""
import pytest

import mgpu
from conftest import BACKENDS
from faults.program import late_failure
from nets import convnet


@pytest.fixture
def training(backend):
    """Replicas on two devices, and a batch."""
    rows = mgpu.datasets.synthetic(8, num_train=8, num_test=8,
                                   shape=(1, 8, 8), dtype="float64")[0]
    X, y = next(iter(rows))
    replicas = mgpu.initialize(
        convnet(backend, channels=1, classes=10), mgpu.list_devices(2),
        init="xavier", seed=1, dtype="float64")
    return replicas, X, y


def values(params):
    return [mgpu.to_numpy(x).copy() for p in params for x in p.list_data()]


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def spoilt(pred, label):
    return LOSS(pred, label) * float("nan")


@pytest.mark.parametrize("nonfinite", ["skip", "ignore", None])
def test_a_gradient_that_is_not_finite(training, nonfinite):
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1},
                           nonfinite=nonfinite)
    before, skips = values(replicas.params()), nonfinite == "skip"
    mgpu.train_batch(X, y, replicas, spoilt, trainer)
    assert same(before, values(replicas.params())) is skips
    assert trainer.num_update == int(not skips)
    assert trainer.skipped_steps == int(skips)
    assert trainer.loss_scale == 1


def test_a_gradient_that_is_not_finite_raises(training):
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1},
                           nonfinite="raise")
    before = values(replicas.params())
    with pytest.raises(mgpu.errors.NonFiniteGradient,
                       match="0.weight.*step 1"):
        mgpu.train_batch(X, y, replicas, spoilt, trainer)
    # These gradients are not applied later.
    with pytest.raises(RuntimeError, match="allreduce_grads"):
        trainer.update(8)
    assert same(before, values(replicas.params()))
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    assert (trainer.num_update, trainer.skipped_steps) == (1, 0)


def test_an_unknown_nonfinite_raises(training):
    with pytest.raises(ValueError, match="unknown nonfinite; .*'never'"):
        mgpu.Trainer(training[0], "sgd", nonfinite="never")


def test_a_dynamic_loss_scale_skips_nonfinite_steps(training):
    with pytest.raises(ValueError, match="a dynamic loss_scale skips .*"
                       "nonfinite='raise'"):
        mgpu.Trainer(training[0], "sgd", nonfinite="raise",
                     loss_scale="dynamic")


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="needs MXNet")
@pytest.mark.parametrize("backend", ["mxnet"], indirect=True)
def test_mxnet_work_that_fails_on_a_device(training):
    """MXNet reports it once, when the result is read."""
    replicas, X, y = training
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    before = values(replicas.params())

    def late(pred, label):
        return LOSS(pred, label) * late_failure(pred, 0)
    with pytest.raises(mgpu.errors.DeviceError,
                       match=r"cpu\(0\).*step 2") as caught:
        mgpu.train_batch(X, y, replicas, late, trainer)
    assert (caught.value.device, caught.value.step) == (mgpu.cpu(0), 2)
    assert same(before, values(replicas.params()))
    assert trainer.num_update == 1
    with pytest.raises(mgpu.errors.StaleGradientError):
        trainer.step(8)
    mgpu.train_batch(X, y, replicas, LOSS, trainer)     # continues
    assert trainer.num_update == 2
