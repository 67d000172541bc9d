"""Whole steps of training against networks written out in NumPy: a
multi-layer perceptron through `train_batch` and `train`, batch normalization
under its three policies, and the book's LeNet from scratch."""
import numpy as np
import pytest

import mgpu
import oracle
from helpers import convnet, mlp
from threeway import (EXACT, LOCKSTEP, agree, assert_equal_copies, compare,
                      covers, host, joined, split_state)

LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
DENSE = {"0.weight": (5, 6), "0.bias": (5,), "2.weight": (3, 5),
         "2.bias": (3,)}
DENSE_LAYERS = [(oracle.dense, ("0.weight", "0.bias")), (oracle.relu, ()),
                (oracle.dense, ("2.weight", "2.bias"))]
#: batch sizes: equal shards, uneven ones, fewer examples than devices
ROWS = (8, 7, 5, 3, 2, 1, 6, 4, 9, 3)


def values_of(shapes, seed=5):
    """Random, with variances above 0."""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.5, 2, shape) if name.endswith("var")
            else rng.normal(size=shape) for name, shape in shapes.items()}


def batches(rows, shape, classes=3, seed=6):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, *shape)), rng.integers(0, classes, n))
            for n in rows]


def stepwise(make, devices, data, values, optimizer, policy="per_device"):
    """A function of the backend: losses, summed gradients, weights and
    running statistics after each `train_batch`."""
    def run(backend):
        replicas = mgpu.initialize(make(backend), devices,
                                   "uniform", dtype="float64",
                                   batch_norm=policy)
        replicas.import_numpy(values)
        trainer = mgpu.Trainer(replicas, *optimizer)
        found = []
        for X, y in data:
            losses = mgpu.train_batch(X, y, replicas, LOSS, trainer)
            gradients = {p.name: mgpu.to_numpy(p.grad())
                         for p in replicas.params()}
            found.append([joined(losses), gradients, *split_state(replicas)])
        assert_equal_copies(replicas)
        return found
    return run


def written_out(layers, k, data, values, optimizer, policy="per_device"):
    """The same from the oracle."""
    net = oracle.Network(layers, values, k, policy)
    rule, found = oracle.Optimizer("gluon", *optimizer), []
    for X, y in data:
        losses, gradients = net.step(X, y, rule)
        found.append([losses, gradients, net.weights,
                      {n: r.copy() for n, r in net.running.items()}])
    return found


def without_statistics(steps):
    return [step[:3] for step in steps]


@pytest.mark.parametrize("optimizer", [
    ("sgd", {"learning_rate": 0.125, "momentum": 0.5, "wd": 2.0 ** -6}),
    ("adam", {"learning_rate": 2.0 ** -5})], ids=lambda o: o[0])
def test_mlp(optimizer, devices):
    """Losses, gradients and weights after each of ten steps of SGD and Adam;
    batches of 1 to 9 examples leave devices idle."""
    data, values = batches(ROWS, (6,)), values_of(DENSE)
    k = len(devices)
    wanted = without_statistics(written_out(DENSE_LAYERS, k, data, values,
                                            optimizer))
    agree(lambda backend: without_statistics(stepwise(
        mlp, devices, data, values, optimizer)(backend)), wanted, LOCKSTEP)
    # an example less, and examples in another order, are seen
    for X, y in ((data[3][0][:2], data[3][1][:2]), (data[3][0][::-1],
                                                    data[3][1])):
        other = without_statistics(written_out(
            DENSE_LAYERS, k, [*data[:3], (X, y), *data[4:]], values,
            optimizer))
        with pytest.raises(AssertionError):
            compare(other, wanted, 1e-3)


# -- batch normalization ------------------------------------------------------

def dense_batch_norm(backend):
    """Dense, batch norm over (n, c), ReLU, dense."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = nn.HybridSequential()
        net.add(nn.Dense(5, in_units=6), nn.BatchNorm(in_channels=5),
                nn.Activation("relu"), nn.Dense(3, in_units=5))
        return net
    from torch import nn
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(),
                         nn.Linear(5, 3))


def _bn(name, channels):
    return {f"{name}.{what}": (channels,) for what in
            ("gamma", "beta", "running_mean", "running_var")}


#: (network, its layers, the shapes of its values, that of a row)
NETWORKS = {
    "dense": (dense_batch_norm, [
        (oracle.dense, ("0.weight", "0.bias")),
        (oracle.batch_norm, ("1.gamma", "1.beta")), (oracle.relu, ()),
        (oracle.dense, ("3.weight", "3.bias"))],
        {"0.weight": (5, 6), "0.bias": (5,), **_bn("1", 5),
         "3.weight": (3, 5), "3.bias": (3,)}, (6,)),
    "pictures": (convnet, [
        (oracle.conv, ("0.weight", "0.bias"), {"padding": 1}),
        (oracle.batch_norm, ("1.gamma", "1.beta")), (oracle.relu, ()),
        (oracle.avg_pool, (), {"size": 2}),
        (oracle.conv, ("4.weight", "4.bias"), {"padding": 1}),
        (oracle.batch_norm, ("5.gamma", "5.beta")), (oracle.relu, ()),
        (oracle.global_mean, ()), (oracle.dense, ("9.weight", "9.bias"))],
        {"0.weight": (4, 2, 3, 3), "0.bias": (4,), **_bn("1", 4),
         "4.weight": (5, 4, 3, 3), "4.bias": (5,), **_bn("5", 5),
         "9.weight": (3, 5), "9.bias": (3,)}, (2, 6, 6)),
}
POLICIES = ("per_device", "average", "sync")
BN_OPTIMIZER = ("sgd", {"learning_rate": 2.0 ** -5, "momentum": 0.5})


#: 1e-11: where a shard has two rows, the batch norm divides by a spread that
#: may be small, and what six steps have rounded grows by that factor
BATCH_NORM = 1e-11


@covers(*(f"batch_norm.{policy}" for policy in POLICIES))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_batch_norm(network, policy, devices):
    """Losses, gradients, weights and running statistics of every device,
    over uneven shards and idle devices; then the prediction."""
    make, layers, shapes, shape = NETWORKS[network]
    k, values = len(devices), values_of(shapes)
    data = batches((8, 7, 11, 2, 9), shape)
    arguments = data, values, BN_OPTIMIZER
    wanted = written_out(layers, k, *arguments, policy)
    agree(stepwise(make, devices, *arguments, policy), wanted, BATCH_NORM)
    if k > 1:
        for other in POLICIES:
            if other != policy:     # differs by more than 1e-4
                with pytest.raises(AssertionError):
                    compare(written_out(layers, k, *arguments, other),
                            wanted, 1e-4)


@pytest.mark.parametrize("network", NETWORKS)
def test_batch_norm_predicts_from_the_running_statistics(network, devices):
    """Predictions of 7 examples, with random statistics, equal the
    oracle's."""
    make, layers, shapes, shape = NETWORKS[network]
    values = values_of(shapes)
    (X, _), = batches((7,), shape)

    def run(backend):
        replicas = mgpu.initialize(make(backend), devices,
                                   "uniform", dtype="float64")
        replicas.import_numpy(values)
        return joined(replicas(mgpu.split_and_load(X, devices,
                                                   even_split=False)))
    agree(run, oracle.Network(layers, values).predict(X), LOCKSTEP)


# -- the book's LeNet, from scratch -------------------------------------------

@covers("models.lenet_forward", "models.lenet_params")
def test_lenet_from_scratch(devices):
    """The book's loop: copies of the parameters, losses on every device,
    all-reduced gradients, `sgd`. Three steps of 8 rows (7 in one)."""
    params = mgpu.models.lenet_params(scale=0.1, dtype="float64")
    names = [name for name, _ in mgpu.models.LENET]
    for i, (name, shape) in enumerate(mgpu.models.LENET):
        compare(params[i], oracle.drawn("normal", shape, 0, i, sigma=0.1)
                if name[0] == "W" else np.zeros(shape), EXACT)
    data = batches((8, 7, 8), (1, 28, 28), 10)

    def run(backend):
        copies = [mgpu.get_params(params, d) for d in devices]
        found = []
        for X, y in data:
            Xs, ys = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                losses = mgpu.parallel(lambda x, label, own: LOSS(
                    mgpu.models.lenet_forward(x, own), label), Xs, ys, copies)
            mgpu.backward(losses)
            for column in zip(*copies):
                mgpu.allreduce([mgpu.grad(p) for p in column])
            gradients = [host(mgpu.grad(p)) for p in copies[-1]]
            for own in copies:
                mgpu.sgd(own, 0.25, len(X))
            for own in copies:
                compare(host(own), host(copies[0]), EXACT)
            found.append([joined(losses), gradients, host(copies[0])])
        return found

    net = oracle.Network(oracle.LENET, dict(zip(names, params)))
    rule, wanted = oracle.Optimizer("gluon", "sgd", {
        "learning_rate": 0.25}), []
    for X, y in data:
        losses, gradients = net.step(X, y, rule)
        wanted.append([losses, list(gradients.values()),
                       list(net.weights.values())])
    agree(run, wanted, LOCKSTEP)
