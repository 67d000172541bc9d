"""Rank 1 does something else than rank 0: a part of `two_ranks`. Each case
trains a step, differs, and notes the error of the next one, and whether
parameters are as before."""
import itertools

import numpy as np

import mgpu
from distributed.equality import LOSS, data, made
from faults.program import different, late_failure

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def step(replicas, trainer, batch):
    mgpu.train_batch(*batch, replicas, LOSS, trainer)


@case
def rate(replicas, trainer, batch, differs):
    trainer.set_learning_rate(0.2 if differs else 0.1)
    step(replicas, trainer, batch)


@case
def schedule_that_fails(replicas, trainer, batch, differs):
    def rates(n):
        if differs:
            raise OSError("no such rate")
        return 0.1
    trainer.lr_scheduler = rates
    step(replicas, trainer, batch)


@case
def multiplier(replicas, trainer, batch, differs):
    replicas.params()[0].lr_mult = 3.0 if differs else 1.0
    step(replicas, trainer, batch)


@case
def clip_norm(replicas, trainer, batch, differs):
    mgpu.train_batch(*batch, replicas, LOSS, trainer,
                     clip_norm=0.001 if differs else 0.002)


@case
def group(replicas, trainer, batch, differs):
    """An option of torch's second group of parameters."""
    if mgpu.get_backend().name == "torch":
        import torch
        first, *others = replicas.net.parameters()
        optimizer = torch.optim.SGD([{"params": [first]},
                                     {"params": others}], 0.1)
        trainer = mgpu.Trainer(replicas, optimizer)
        if differs:
            optimizer.param_groups[1]["weight_decay"] = 0.1
    elif differs:
        trainer.optimizer.wd = 0.1
    step(replicas, trainer, batch)


@case
def frozen(replicas, trainer, batch, differs):
    if differs:
        replicas.params()[0].grad_req = "null"
    step(replicas, trainer, batch)


@case
def gradient(replicas, trainer, batch, differs):
    passes(replicas, batch)
    trainer.allreduce_grads()
    if differs:
        replicas.params()[0].list_grad()[0][...] = 1
    trainer.update(len(batch[0]))


@case
def weight(replicas, trainer, batch, differs):
    if differs:
        replicas.params()[0].set_data(replicas.params()[0].data() + 1)
    mgpu.evaluate_accuracy_gpus(replicas, data()[1])


@case
def order(replicas, trainer, batch, differs):
    rows = mgpu.datasets.BatchIterator(
        np.ones((16, 1, 8, 8)), np.arange(16) % 10, 8, seed=int(differs))
    step(replicas, trainer, next(iter(rows)))


@case
def labels_without_rows(replicas, trainer, batch, differs):
    X, y = batch
    step(replicas, trainer, (None if differs else X, y))


@case
def rows(replicas, trainer, batch, differs):
    X = np.ones((16, 1, 8, 8))
    X[5:] += differs
    batches = mgpu.datasets.BatchIterator(X, np.arange(16) % 10, 8)
    step(replicas, trainer, next(iter(batches)))


def alike(change=lambda x: x):
    """The first batch of a data set whose examples are alike."""
    pair = np.ones((1, 8, 8)), 1
    return next(iter(mgpu.datasets.IndexedIterator([change(pair)] * 16, 8)))


@case
def some_labels(replicas, trainer, batch, differs):
    step(replicas, trainer, alike(lambda x: (x[0], x[1] + differs)))


@case
def zeroed(replicas, trainer, batch, differs):
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0})
    for p in replicas.params():
        p.grad_req = "add"
    step(replicas, trainer, batch)
    if differs:
        replicas.zero_grad()
    step(replicas, trainer, batch)


@case
def no_size(replicas, trainer, batch, differs):
    passes(replicas, batch)
    trainer.step(0 if differs else 8)


@case
def no_sizes(replicas, trainer, batch, differs):
    """No row of a batch counts."""
    X_shards, y_shards = mgpu.split_batch(*batch, replicas.devices)
    with mgpu.record():
        losses = [LOSS(pred, y) * 0
                  for pred, y in zip(replicas(X_shards), y_shards)]
    mgpu.backward(losses)
    trainer.step(0)


def norm_layer(epsilon):
    if mgpu.get_backend().name == "torch":
        from torch import nn
        return nn.BatchNorm2d(1, eps=epsilon)
    from mxnet.gluon import nn
    return nn.BatchNorm(in_channels=1, epsilon=epsilon)


@case
def layer(replicas, trainer, batch, differs):
    made([mgpu.cpu(0)], net=norm_layer(1e-3 if differs else 1e-5))


@case
def evaluated(replicas, trainer, batch, differs):
    mgpu.train(replicas, data()[0], None, LOSS, mgpu.Trainer(
        replicas, "sgd", {"learning_rate": 0.0}), 1, progress=False,
        evaluate=lambda: float(differs))


@case
def evaluated_data(replicas, trainer, batch, differs):
    mgpu.evaluate_accuracy_gpus(replicas, mgpu.datasets.BatchIterator(
        np.ones((16, 1, 8, 8)), np.arange(16) % 10, 8, seed=int(differs)))


@case
def last_batch(replicas, trainer, batch, differs):
    mgpu.train(replicas, mgpu.datasets.BatchIterator(
        np.ones((15, 1, 8, 8)), np.arange(15) % 10, 8, drop_last=differs),
        None, LOSS, trainer, 1, progress=False)


@case
def loss(replicas, trainer, batch, differs):
    mgpu.train(replicas, data()[0], None, mgpu.losses.L2Loss()
               if differs else LOSS, trainer, 1, progress=False)


@case
def setting(replicas, trainer, batch, differs):
    net = norm_layer(1e-5)
    replicas, _ = made([mgpu.cpu(0)], net=net)
    if differs:
        vars(net).get("_kwargs", vars(net))["eps"] = 0.5
    mgpu.evaluate_accuracy_gpus(replicas, [])


@case
def no_pass(replicas, trainer, batch, differs):
    if not differs:
        passes(replicas, batch)
    trainer.step(8)


@case
def changing_labels(replicas, trainer, batch, differs):
    """As random targets are, where one rank happens to read the same."""
    reads = itertools.count()
    step(replicas, trainer, alike(lambda pair: Changing(
        pair, reads if differs else itertools.repeat(0))))


class Changing(tuple):
    """A pair whose label is another one at each look."""

    def __new__(cls, pair, reads):
        made = super().__new__(cls, pair)
        made.reads = reads
        return made

    def __getitem__(self, i):
        return super().__getitem__(i) + (
            next(self.reads) % 7 if i == 1 else 0)


@case
def label(replicas, trainer, batch, differs):
    X, y = batch
    step(replicas, trainer, (X, [10] * len(y) if differs else y))


@case
def two_trainers(replicas, trainer, batch, differs):
    order = [trainer, mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.1})]
    for one in order[::-1] if differs else order:
        step(replicas, one, batch)


@case
def device(replicas, trainer, batch, differs):
    """What was queued on MXNet's device fails later, when it is read."""
    mgpu.train_batch(*batch, replicas, lambda pred, y: LOSS(pred, y) * (
        late_failure(pred, 0) if differs else 1), trainer)


#: torch's work fails at once
device.on = "mxnet"


def other_network(what):
    def differing(replicas, trainer, batch, differs):
        replicas = mgpu.initialize(
            different(mgpu.get_backend(), what if differs else None),
            [mgpu.cpu(0)], init="xavier", seed=1)
        mgpu.Trainer(replicas, "sgd", {
            "learning_rate": 0.2 if differs and what == "option" else 0.1})
    return differing


OTHER = ("count", "shape", "dtype", "name", "order", "option")
CASES |= {f"other {what}": other_network(what) for what in OTHER}


def passes(replicas, batch):
    X_shards, y_shards = mgpu.split_batch(*batch, replicas.devices)
    with mgpu.record():
        losses = mgpu.parallel(LOSS, replicas(X_shards), y_shards)
    mgpu.backward(losses)


def report(rank):
    told = {}
    backend = mgpu.get_backend().name
    for name, function in CASES.items():
        if backend != getattr(function, "on", backend):
            continue
        replicas, trainer = made([mgpu.cpu(0)])
        batches = iter(data()[0])
        step(replicas, trainer, next(batches))
        before = [mgpu.to_numpy(p.data()) for p in replicas.params()]
        try:
            function(replicas, trainer, next(batches), rank == 1)
            told[name] = None
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        told[f"{name}: unchanged"] = all(
            np.array_equal(x, mgpu.to_numpy(p.data()))
            for x, p in zip(before, replicas.params()))
    return told
