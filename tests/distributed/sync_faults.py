"""``batch_norm="sync"`` on two ranks, of which rank 1 does what it must not: a
part of `two_ranks`. After each case both ranks train a step, and then they
hold the same bits.
"""
import hashlib
import os

import numpy as np

import mgpu

PLAN = {"case": ""}
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
CASES = {}


def network(backend):
    """Convolution, two batch norms that `PLAN` changes, dense."""
    def order(net, x):
        if PLAN["case"] == "other order":
            return net.first(net.second(x))
        if PLAN["case"] == "fewer layers":
            return net.first(x)
        x = net.first(x)
        if PLAN["case"] == "end":
            os._exit(3)
        if PLAN["case"] == "error between layers":
            raise ValueError("a layer rejects its input")
        return net.second(x)

    if backend == "mxnet":
        import mxnet as mx
        from mxnet.gluon import nn

        class Failing(mx.autograd.Function):
            def forward(self, x):
                return x + 0

            def backward(self, _):
                fail()

        class Two(nn.Block):
            def __init__(self):
                super().__init__()
                self.first = nn.BatchNorm(in_channels=4)
                self.second = nn.BatchNorm(in_channels=4)

            def forward(self, x):
                x = order(self, x)
                return Failing()(x) if PLAN["case"] == "error in backward" \
                    and mx.autograd.is_recording() else x
        net = nn.Sequential()
        net.add(nn.Conv2D(4, 3, in_channels=1), Two(), nn.GlobalAvgPool2D(),
                nn.Flatten(), nn.Dense(10, in_units=4))
        return net
    from torch import nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x):
            x = order(self, x)
            if PLAN["case"] == "error in backward" and x.requires_grad:
                x.register_hook(fail)
            return x
    return nn.Sequential(nn.Conv2d(1, 4, 3), Two(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(4, 10))


def fail(*_):
    raise ValueError("an error on one rank")


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def step(X, y, replicas, trainer, loss=LOSS):
    mgpu.train_batch(X, y, replicas, loss, trainer)


def custom_step(X, y, replicas, trainer):
    X_shards, y_shards = mgpu.split_batch(X, y, replicas.devices)
    with mgpu.record():
        losses = [LOSS(out, label) for out, label in zip(
            replicas(X_shards), y_shards)]
    mgpu.backward(losses)
    trainer.step(len(X))


@case
def error_between_layers(*given):
    step(*given)


@case
def error_in_the_loss(*given):
    step(*given, loss=fail if PLAN["case"] else LOSS)


@case
def error_in_backward(*given):
    step(*given)


@case
def other_order(*given):
    step(*given)


@case
def fewer_layers(*given):
    step(*given)


@case
def other_loop(*given):
    """All other errors come from a custom loop."""
    if PLAN["case"]:
        PLAN["case"] = "error between layers"
    custom_step(*given)


@case
def no_rows_in_a_custom_loop(X, y, replicas, trainer):
    with mgpu.record():
        replicas([None, None] if PLAN["case"] else mgpu.split_batch(
            X, y, replicas.devices)[0])
    trainer.step(len(X))


@case
def one_replica(X, y, replicas, trainer):
    """On both ranks."""
    with mgpu.record():
        replicas[0](mgpu.put(X, replicas.devices[0]))


def training(rank):
    """A batch, replicas on one device more than the rank, their trainer."""
    devices = [mgpu.cpu(i) for i in range(rank + 1)]
    replicas = mgpu.initialize(
        network(mgpu.get_backend().name), devices, init="xavier", seed=1,
        dtype="float64", batch_norm="sync")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})
    X, y = next(iter(mgpu.datasets.synthetic(
        9, num_train=9, num_test=9, shape=(1, 8, 8), dtype="float64")[0]))
    return X, y, replicas, trainer


def report(rank):
    """The error of each case, and whether it has changed something."""
    given, found = training(rank), {}
    replicas = given[2]

    def values(*more):
        return [mgpu.to_numpy(x) for p in (*replicas.params(), *more)
                for x in p.list_data()]

    def attempt(name, function):
        PLAN["case"] = name if rank == 1 else ""
        found[name] = None
        try:
            function(*given)
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        PLAN["case"] = ""
    for name, function in CASES.items():
        before = values()
        attempt(name, function)
        found["changed by " + name] = not all(map(
            np.array_equal, before, values()))
        step(*given)
    digests = {hashlib.sha256(p.tobytes()).hexdigest()
               for p in values(*replicas.statistics())}
    told = mgpu.distributed.current().gather("values", sorted(digests))
    # As many arrays on each device, whatever their number.
    found["equal"] = told[0] == told[1]
    return found


def end_in_a_pass(rank):
    given = training(rank)
    PLAN["case"] = "end" if rank == 1 else ""
    step(*given)
