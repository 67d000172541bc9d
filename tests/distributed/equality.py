"""Scenarios for one process, and for several with as many devices in all:
``equality.py BACKEND COUNTS FOLDER [DTYPE SCENARIO ...]``, where COUNTS has
the number of devices of each rank, such as 1,2,1.

Each scenario is a function that is given this rank's devices and returns
arrays by name, which must not depend on how many processes there are.
"""
import sys
from pathlib import Path

import numpy as np

import mgpu
from nets import branched, convnet

SCENARIOS = {}
DTYPE = "float64"


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def data(batch_size=8, rows=35):
    """The last batch has 3 rows, so the last of four devices has none."""
    return mgpu.datasets.synthetic(batch_size, num_train=rows, num_test=21,
                                   shape=(1, 8, 8), dtype=DTYPE)


def made(devices, batch_norm="per_device", seed=1, dropout=False, net=None,
         wd=0.0, **options):
    net = net or convnet(mgpu.get_backend(), channels=1, classes=10)
    if dropout:
        from torch import nn
        net.insert(-1, nn.Dropout(0.5))
    replicas = mgpu.initialize(net, devices, init="xavier", seed=seed,
                               dtype=DTYPE, batch_norm=batch_norm)
    return replicas, mgpu.Trainer(replicas, "sgd", {
        "learning_rate": 0.1, "momentum": 0.9, "wd": wd}, **options)


LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def values(replicas, statistics=False):
    found = {f"value {p.name}": mgpu.to_numpy(p.data())
             for p in replicas.params()}
    if statistics:      # the same on all devices
        found |= {f"value {p.name}": mgpu.to_numpy(p.data())
                  for p in replicas.statistics()}
    return found


def trained(devices, batch_norm="per_device", epochs=1, **options):
    replicas, trainer = made(devices, batch_norm, **options)
    history = mgpu.train(replicas, *data(), LOSS, trainer, epochs,
                         progress=False)
    return {**values(replicas, batch_norm != "per_device"),
            "losses": history.loss_per_step, "means": history.train_loss,
            "accuracy": history.test_acc}


@scenario
def per_device(devices):
    return trained(devices, epochs=2)


class _Dicts:
    def __init__(self, pairs):
        self.pairs, self.name = pairs, {"torch": "input", "mxnet": "x"}[
            mgpu.get_backend().name]

    def __iter__(self):
        return ({self.name: X, "label": y} for X, y in self.pairs)


@scenario
def dicts(devices):
    """Batches that are dicts; the last device has no row of the last."""
    replicas, trainer = made(devices)
    history = mgpu.train(
        replicas, *map(_Dicts, data()),
        lambda output, batch: LOSS(output, batch["label"]), trainer, 1,
        progress=False)
    return {**values(replicas), "losses": history.loss_per_step,
            "means": history.train_loss, "accuracy": history.test_acc}


@scenario
def average(devices):
    return trained(devices, "average")


@scenario
def sync(devices):
    """The last device, or the last rank, has no row of the last batch."""
    return trained(devices, "sync")


@scenario
def sync_in_branches(devices):
    """Sums of a backward pass are ready in another order on each rank."""
    return trained(devices, "sync", net=branched(mgpu.get_backend(), 9))


@scenario
def sync_with_a_branch_that_no_loss_uses(devices):
    replicas, trainer = made(devices, "sync", net=branched(
        mgpu.get_backend(), unused=True), wd=0.1)
    for X, y in data()[0]:
        mgpu.train_batch(X, y, replicas, lambda both, y: LOSS(both[0], y),
                         trainer, ignore_stale_grad=True)
    return values(replicas, True)


@scenario
def sync_in_a_custom_loop(devices):
    """Two passes, whose losses have one backward pass."""
    replicas, trainer = made(devices, "sync")
    for X, y in data(rows=32)[0]:
        X_shards, y_shards = mgpu.split_batch(X, y, devices)
        with mgpu.record():
            losses = [LOSS(output, label) for factor in (1, 2)
                      for output, label in zip(
                          replicas([factor * x for x in X_shards]), y_shards)]
        mgpu.backward(losses)
        trainer.step(len(X))
    return values(replicas, True)


@scenario
def sync_after_a_pass_without_a_step(devices):
    """The last rank has moved its statistics, and has no row of the batch
    that is trained then."""
    replicas, trainer = made(devices, "sync")
    first, *_, (X, y) = data()[0]
    X_shards, y_shards = mgpu.split_batch(*first, devices)
    with mgpu.record():
        losses = list(map(LOSS, replicas(X_shards), y_shards))
    mgpu.backward(losses)
    mgpu.train_batch(X, y, replicas, LOSS, trainer)
    return {**values(replicas, True), **{
        f"value {i} {p.name}": mgpu.to_numpy(p.list_data()[-i])
        for p in replicas.statistics() for i in (0, 1)}}


@scenario
def dynamic_scale(devices):
    """A row of the second batch is infinite: all ranks skip that step."""
    replicas, trainer = made(devices, loss_scale="dynamic")
    train_iter, _ = data()
    for number, (X, y) in enumerate(train_iter):
        if number == 1 and mgpu.distributed.is_main():
            X[0] = np.inf
        mgpu.train_batch(X, y, replicas, LOSS, trainer)
    return {**values(replicas), "skipped": [trainer.skipped_steps],
            "scale": [trainer.loss_scale]}


@scenario
def clipped_in_a_custom_loop(devices):
    replicas, trainer = made(devices)
    train_iter, test_iter = data(batch_size=7)
    norms = []
    for X, y in train_iter:
        if len(X):
            X_shards, y_shards = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                outputs = replicas(X_shards)
                losses = [None if output is None else LOSS(output, label)
                          for output, label in zip(outputs, y_shards)]
            mgpu.backward(losses)
        trainer.allreduce_grads()
        norms.append(trainer.clip_global_norm(0.5, batch_size=len(X)))
        trainer.update(len(X))
    return {**values(replicas), "norms": norms, "accuracy": [
        mgpu.evaluate_accuracy_gpus(replicas, test_iter)]}


@scenario
def added_up(devices):
    """Gradients of all steps, without `zero_grad`."""
    replicas, trainer = made(devices)
    for p in replicas.params():
        p.grad_req = "add"
    for X, y in data(batch_size=7)[0]:
        mgpu.train_batch(X, y, replicas, LOSS, trainer)
    return {**values(replicas), **{
        f"gradient {p.name}": mgpu.to_numpy(p.list_grad()[0])
        for p in replicas.params()}}


@scenario
def as_the_guide_writes_it(devices):
    """A custom loop need not check whether this process has examples."""
    replicas, trainer = made(devices)
    for X, y in data()[0]:
        X_shards, y_shards = mgpu.split_batch(X, y, devices)
        with mgpu.record():
            losses = mgpu.parallel(LOSS, replicas(X_shards), y_shards)
        mgpu.backward(losses)
        trainer.step(len(X))
    return values(replicas)


@scenario
def other_seeds(devices):
    """Rank 0's values are those of all."""
    return trained(devices, seed=1 + mgpu.distributed.rank())


@scenario
def shapes_from_the_first_batch(devices):
    net = convnet(mgpu.get_backend(), channels=1, classes=10, deferred=True)
    replicas = mgpu.initialize(net, devices, init="xavier", seed=1,
                               dtype=DTYPE)
    trainer = mgpu.Trainer(replicas, "nag", {"learning_rate": 0.1})
    for X, y in data()[0]:
        mgpu.train_batch(X, y, replicas, LOSS, trainer)
    return values(replicas)


@scenario
def dropout(devices):
    return trained(devices, dropout=True)


#: MXNet has one stream of random numbers for all CPU devices of a process
dropout.on = ["torch"]


def found_by(devices, dtype="float64", only=()):
    """(Name, arrays) of each scenario that the backend has."""
    global DTYPE
    DTYPE = dtype
    for name in only or SCENARIOS:
        function = SCENARIOS[name]
        if mgpu.get_backend().name in getattr(
                function, "on", ("torch", "mxnet")):
            mgpu.seed(5)
            yield name, function(devices)


def main(backend, counts, folder, dtype="float64", *only):
    mgpu.set_backend(backend)
    mgpu.distributed.init(timeout=30)
    rank, folder = mgpu.distributed.rank(), Path(folder)
    devices = [mgpu.cpu(i) for i in range(int(counts.split(",")[rank]))]
    for name, found in found_by(devices, dtype, only):
        np.savez(folder / f"{name}-{rank}.npz", **found)
    if dtype == "float32":
        (_, found), = found_by(devices, only=["per_device"])
        np.savez(folder / f"float64-{rank}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
