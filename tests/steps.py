"""Helpers for tests of training: a batch, a small network in float64 on
devices, custom passes and steps, values on every device, and comparisons."""
import contextlib

import numpy as np
import pytest

import mgpu
from helpers import (assert_bit_equal, mlp, on, relative_difference,
                     using_engine)

#: rows of successive batches: even, uneven, fewer than the devices, one
ROWS = (8, 7, 3, 1, 6)
#: powers of two: MXNet's float32 ``1 / rows`` is exact
DYADIC = (8, 4, 2, 1, 8)
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def batch(rows, seed=0):
    """`rows` examples of 6 numbers, and their classes of 3."""
    rng = np.random.default_rng([rows, seed])
    return rng.normal(size=(rows, 6)), rng.integers(0, 3, rows)


def sides(*signs):
    """One row per sign, for the left (-1) or the right (1) layer of
    `nets.gated`."""
    X, y = batch(len(signs))
    X[:, 0] = signs
    return X, y


def initialize(net, devices, **options):
    return mgpu.initialize(net, devices, "xavier", seed=1, dtype="float64",
                           **options)


def sgd(engine, devices, net=None, rate=0.125, **options):
    """(replicas, trainer) of `net`, or of dense layers, on `devices`."""
    replicas = initialize(net or mlp(engine), devices)
    return replicas, mgpu.Trainer(replicas, "sgd", {
        "learning_rate": rate, **options})


def backward(replicas, X, y):
    """Forward and backward passes on all devices, no step."""
    Xs, ys = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = [None if out is None else LOSS(out, label)
                  for out, label in zip(replicas(Xs), ys)]
    mgpu.backward(losses)


def train(replicas, trainer, batches=ROWS, first=0):
    """A step for each batch of so many rows."""
    for seed, rows in enumerate(batches, first):
        backward(replicas, *batch(rows, seed))
        trainer.step(rows)


def values(replicas):
    """Name -> one array per device."""
    return {p.name: [mgpu.to_numpy(x) for x in p.list_data()]
            for p in replicas.params()}


def gradients(replicas):
    return {p.name: [mgpu.to_numpy(g) for g in p.list_grad()]
            for p in replicas.params() if p.grad_req != "null"}


def assert_replicas_equal(found):
    """All devices have the same bits."""
    for copies in found.values():
        for copy in copies:
            assert_bit_equal(copy, copies[0])


def assert_close(found, wanted, limit=1e-12):
    """The first device's arrays, tensor by tensor: float64 sums in another
    order."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        gap = relative_difference(found[name][0], wanted[name][0])
        assert gap < limit, (name, gap)


def assert_unchanged(found, before):
    """The same bits on every device."""
    assert found.keys() == before.keys(), found.keys() ^ before.keys()
    for name in before:
        for a, b in zip(found[name], before[name], strict=True):
            assert_bit_equal(a, b)


def check_as_on_one_device(engine, devices, go, make=sgd):
    """``go(replicas, trainer)``, on one device and on `devices`, leads to the
    same weights; those of `devices` are returned with their trainer."""
    found = []
    for places in (on(0), devices):
        replicas, trainer = make(engine, places)
        go(replicas, trainer)
        found.append(values(replicas))
        assert_replicas_equal(found[-1])
    assert_close(found[1], found[0])
    return replicas, trainer


# -- passes of the framework's own --------------------------------------------

def train_natively(replicas, X, y):
    """Passes of the framework's own: the network itself, on its device, and
    ``loss.backward()``."""
    X, y = (mgpu.put(a, replicas.devices[0]) for a in (X, y))
    with mgpu.record():
        losses = LOSS(replicas.net(X), y)
        losses = losses.sum() if hasattr(losses, "grad_fn") else losses
    losses.backward()


@contextlib.contextmanager
def double_states():
    """Inside, MXNet's optimizers create float64 states. Some create float32
    ones, which their kernels reject."""
    from mxnet import optimizer
    with pytest.MonkeyPatch.context() as patch:
        zeros = optimizer.optimizer.zeros
        patch.setattr(optimizer.optimizer, "zeros", lambda *a, **k: zeros(
            *a[:2], **{**k, "dtype": "float64"}))
        yield


def trained_by_gluon(make, between=lambda i: None, steps=None):
    """`values` of `mlp` on one device, trained by real Gluon trainers, on
    batches of `DYADIC` rows. `make(net)`: these; `steps(i)`: which of them
    take step i; `between(i)` is called after it."""
    with using_engine("mxnet-nd") as backend, double_states():
        from mxnet import autograd, gluon
        net = initialize(mlp(backend), on(0)).net
        trainers, loss = make(net), gluon.loss.SoftmaxCrossEntropyLoss()
        for i, rows in enumerate(DYADIC):
            X, y = (mgpu.put(a, mgpu.cpu(0)) for a in batch(rows, i))
            with autograd.record():
                losses = loss(net(X), y)
            losses.backward()
            for number in range(len(trainers)) if steps is None else steps(i):
                trainers[number].step(rows, ignore_stale_grad=True)
            between(i)
        return {name: [p.data().asnumpy()] for name, p
                in net._collect_params_with_prefix().items()}
