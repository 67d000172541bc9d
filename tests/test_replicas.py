"""Calls of `Replicas` and of one replica: inputs, devices without rows, modes,
dropout; unused networks are freed."""
import contextlib
import gc
import types
import weakref

import numpy as np
import pytest

import mgpu
from batches import pictures, rows
from helpers import (assert_all_equal, assert_bit_equal, bricks,
                     convnet, foreign_array, mlp, on, on_torch,
                     refusal_of_foreign, relative_difference)
from nets import on_each, shards_of, train


# -- inputs -------------------------------------------------------------------

def two_inputs(engine):
    """``dense(a) + b``, also of one dict {"a": a, "b": b}; b may be
    None."""
    base, dense = bricks(engine)

    class Net(base):
        def __init__(self):
            super().__init__()
            self.dense = dense(6, 3)

        def forward(self, a, b=None):
            if isinstance(a, dict):
                a, b = a["a"], a["b"]
            return self.dense(a) if b is None else self.dense(a) + b
    return Net()


def host(outputs):
    """As NumPy arrays; None stays."""
    return [None if out is None else mgpu.to_numpy(out) for out in outputs]


def test_several_inputs(engine, devices):
    """As a tuple, a list or a dict, and as arguments."""
    replicas = mgpu.initialize(two_inputs(engine), devices, "xavier")
    a, b = rows(5), rows(5, 3, seed=1)
    values = replicas.export_numpy()
    want = a @ values["dense.weight"].T + values["dense.bias"] + b
    apart = host(replicas(shards_of(a, replicas), shards_of(b, replicas)))
    # float32, sums of six products
    assert relative_difference(np.concatenate(apart), want) < 1e-6
    for form in ((a, b), [a, b], {"a": a, "b": b}):
        shards = shards_of(form, replicas)
        assert type(shards[0]) is type(form)
        for i, out in enumerate(host(replicas(shards))):
            assert_bit_equal(out, apart[i])
            assert_bit_equal(mgpu.to_numpy(replicas[i](shards[i])), apart[i])
        assert mgpu.evaluate_accuracy_gpus(
            replicas, [(form, np.concatenate(apart).argmax(1))]) == 1


def test_an_optional_input(engine, devices):
    replicas = mgpu.initialize(two_inputs(engine), devices, "xavier")
    a, zeros = rows(5), np.zeros((5, 3), "float32")
    want = host(replicas(shards_of((a, zeros), replicas)))
    for form in ((a, None), [a, None]):
        shards = shards_of(form, replicas)
        for i, out in enumerate(host(replicas(shards))):
            assert_bit_equal(out, want[i])
            assert_bit_equal(
                mgpu.to_numpy(replicas[i](shards[i][0], None)), want[i])


def test_replicas_without_rows_do_not_run(engine, devices):
    replicas = mgpu.initialize(convnet(engine), devices, "uniform")
    k = len(devices)
    for shards in (shards_of(pictures(1), replicas),
                   [mgpu.put(pictures(1), devices[0])] + [None] * (k - 1),
                   [mgpu.put(pictures(1), devices[0])] + [[]] * (k - 1),
                   [None] * (k - 1) + [mgpu.put(pictures(1), devices[-1])]):
        with mgpu.record():
            outputs = replicas(shards)
        for shard, out in zip(shards, outputs):
            runs = shard is not None and len(shard) > 0
            assert (out is not None) == runs
            assert out is None or tuple(out.shape) == (1, 3)


def test_a_first_input_without_rows_and_a_second_with_some(engine):
    """Of a text without words and where its sentences begin, perhaps."""
    replicas = mgpu.initialize(two_inputs(engine), on(0, 1), "xavier")
    first, (a, b) = shards_of((rows(8), rows(8, 3)), replicas)
    for call in (lambda: replicas([first, (a[:0], b)]),
                 lambda: replicas([first, ([], b)]),
                 lambda: replicas[1](a[:0], b)):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == (
            "the first array of a device's inputs determines the number of "
            "examples; received an empty one, and (4, 3) after it, on cpu(1). "
            "Pass an array with a batch dimension first, or None for a device "
            "without examples.")
    assert replicas([first, (None, b)])[1] is None


def test_one_input_that_is_a_tuple_is_named(backend):
    """Tuples and lists are several inputs; ``((a, b),)`` is one."""
    base, _ = bricks(backend)
    for deferred in (False, True):
        layer = mlp(backend, (6, 3), deferred)

        class Net(base):
            def __init__(self, layer=layer):
                super().__init__()
                self.layer = layer

            def forward(self, pair):
                a, b = pair
                return self.layer(a) - self.layer(b)
        replicas = mgpu.initialize(Net(), on(0, 1))
        pair = rows(4), rows(4, seed=1)
        with pytest.raises(TypeError, match=r"forward\(\) takes 2 "):
            replicas(shards_of(pair, replicas))
        replicas(shards_of((pair,), replicas))


def test_wrong_calls_are_refused(backend):
    replicas = mgpu.initialize(mlp(backend), on(0, 1), "uniform")
    x = mgpu.put(rows(4), mgpu.cpu(0))

    def refused(error, text, call):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text
    for bare in (x, rows(4), 3.0):
        refused(TypeError, "replicas expect a list with one shard per device; "
                f"received {type(bare).__name__}. Use replicas(split_and_load("
                "x, replicas.devices)), or replicas[i](x) for the replica on "
                "device i.", lambda: replicas(bare))
    for shards in ([None, None], [x[:0], None]):
        refused(ValueError, "a network needs at least one example; received "
                "none on [cpu(0), cpu(1)]. Skip empty batches.",
                lambda: replicas(shards))
    arrays = f"expects arrays of the {backend.name} backend; received"
    refused(TypeError, f"replica 1 on cpu(1) {arrays} ndarray. Use "
            "mgpu.put(x, cpu(1)).", lambda: replicas[1](rows(4)))
    for nothing in ((), (None,), ({},), (x[:0],)):
        with pytest.raises(ValueError, match="at least one example; received"):
            replicas[1](*nothing)
    graph = types.SimpleNamespace(x=x)
    refused(TypeError, f"replica 0 on cpu(0) {arrays} SimpleNamespace. Use "
            "mgpu.put(x, cpu(0)).", lambda: replicas([graph, graph]))


def test_the_other_frameworks_arrays_are_refused(engine):
    foreign, name = foreign_array(engine)
    replicas = mgpu.initialize(mlp(engine), on(0, 1), "uniform")
    own = mgpu.put(rows(4), mgpu.cpu(0))
    for call in (lambda: replicas(foreign),
                 lambda: replicas([own, own], [own, {"x": foreign}]),
                 lambda: replicas[0](foreign),
                 lambda: replicas.params()[3].set_data(foreign),
                 lambda: mgpu.initialize(mlp(engine, deferred=True), on(0),
                                         "uniform", sample=foreign),
                 lambda: mgpu.get_params([foreign], mgpu.cpu(0))):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == refusal_of_foreign(engine, name)


# -- modes --------------------------------------------------------------------

def test_outside_of_record_a_replica_predicts(engine, devices):
    """Whatever the user's own flags say, and whatever ran before."""
    replicas = mgpu.initialize(convnet(engine), devices, "xavier",
                               dtype="float64")
    x = pictures(6, dtype="float64")
    train(replicas, x)
    before = on_each(replicas)

    def outputs(*scopes):
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope())
            return replicas([mgpu.put(x, d) for d in devices])

    def not_training():
        return mgpu.record(train_mode=False)
    predicted = host(outputs())
    for outs in (outputs(mgpu.no_grad), outputs(mgpu.record, mgpu.no_grad),
                 outputs(not_training)):
        for a, b in zip(host(outs), predicted):
            assert_bit_equal(a, b)
    assert_all_equal(on_each(replicas), before)
    # Training normalizes by the batch instead.
    assert (host(outputs(mgpu.record))[0] != predicted[0]).any()
    mgpu.backward(outputs(not_training))    # a prediction with a graph


@on_torch
def test_no_graph_where_the_user_wants_none(engine, devices):
    """The target of a consistency loss, inside `record`."""
    import torch
    x, z = (torch.from_numpy(rows(8, dtype="float64", seed=seed))
            for seed in (0, 1))
    net = torch.nn.Linear(6, 3).double()
    weight = net.weight.detach().clone().requires_grad_()
    target = (x @ weight.T + net.bias).detach()
    ((z @ weight.T + net.bias.detach() - target) ** 2).sum().backward()
    replicas = mgpu.initialize(net, devices)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.125})
    before = net.weight.detach().clone()
    for each in (lambda xs: replicas(xs), lambda xs: [
            replica(shard) for replica, shard in zip(replicas, xs)]):
        with mgpu.record():
            with torch.no_grad():
                targets = each(shards_of(x, replicas))
            assert not any(t.requires_grad for t in targets)
            losses = [((a - b) ** 2).sum(1) for a, b in zip(
                replicas(shards_of(z, replicas)), targets)]
        mgpu.backward(losses)
    trainer.step(8)
    assert relative_difference(net.weight.detach(),
                               before - 0.125 * weight.grad / 8) < 1e-12


# -- dropout ------------------------------------------------------------------

def masks(replicas, seed, passes=2, rows=200):
    """What dropout makes of ones: an array per pass and device."""
    mgpu.seed(seed)
    found = []
    for _ in range(passes):
        x = [mgpu.put(np.ones((rows, 10), "float32"), d)
             for d in replicas.devices]
        with mgpu.record():
            found += [mgpu.to_numpy(out) for out in replicas(x)]
    return found


@pytest.mark.parametrize("batch_norm", ["per_device", "sync"])
@on_torch
def test_functional_dropout_is_reproducible_too(engine, batch_norm):
    """It draws from the one stream that all of torch's threads share; joint
    statistics let the replicas wait for each other in between."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(10)

        def forward(self, x):
            for _ in range(2):
                x = self.norm(torch.nn.functional.dropout(
                    x, 0.5, self.training))
            return x
    replicas = mgpu.initialize(Net(), on(0, 1, 2, 3), "uniform",
                               batch_norm=batch_norm)
    first = masks(replicas, 2)
    assert all((a != b).any() for i, a in enumerate(first)
               for b in first[:i])
    for _ in range(20):
        torch.rand(3)       # what the user draws in between
        for a, b in zip(first, masks(replicas, 2)):
            assert_bit_equal(a, b)


@on_torch
def test_channel_dropout_drops_channels(engine):
    from torch import nn
    replicas = mgpu.initialize(nn.Dropout2d(0.5), on(0, 1), "uniform")
    mgpu.seed(0)
    with mgpu.record():
        outputs = replicas(shards_of(np.ones((8, 16, 3, 3), "float32"),
                                     replicas))
    for out in map(mgpu.to_numpy, outputs):
        assert (out == out[:, :, :1, :1]).all()
        assert set(np.unique(out)) == {0, 2}


# -- the object ---------------------------------------------------------------

def test_an_unused_network_is_freed(backend, devices):
    """mgpu's own tables keep none, nor its memory."""
    replicas = mgpu.initialize(mlp(backend), devices)
    trainer = mgpu.Trainer(replicas, "sgd")
    mgpu.train_batch(np.ones((4, 6), "float32"), np.zeros(4, "int32"),
                     replicas, mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    alive = weakref.ref(replicas), weakref.ref(replicas.net)
    del replicas, trainer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
