"""A program in which rank 1 does something else than rank 0:
``differing.py BACKEND FOLDER``. Each case trains a step, differs, and notes
the error of the next one, and whether parameters are as before."""
import itertools
import json
import sys
from pathlib import Path

import numpy as np

import mgpu
from distributed.equality import LOSS, data, made

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
def schedule(replicas, trainer, batch, differs):
    trainer.lr_scheduler = lambda n: 0.2 if differs else 0.1
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
def accumulate(replicas, trainer, batch, differs):
    mgpu.train_batch(*batch, replicas, LOSS, trainer,
                     accumulate=3 if differs else 2)


@case
def option(replicas, trainer, batch, differs):
    trainer.optimizer.wd = 0.1 if differs else 0.0
    step(replicas, trainer, batch)


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
def norm(replicas, trainer, batch, differs):
    passes(replicas, batch)
    trainer.allreduce_grads()
    trainer.clip_global_norm(1e-3 if differs else 2e-3)
    trainer.update(len(batch[0]))


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


class Subset:
    """As ``torch.utils.data.random_split`` makes them."""

    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        return self.dataset[self.indices[i]]


def of_subset(indices, change=lambda x: x):
    """The first batch of a part of a data set whose examples are alike."""
    pair = np.ones((1, 8, 8)), 1
    return next(iter(mgpu.datasets.IndexedIterator(
        Subset([change(pair)] * 32, indices), 8)))


@case
def subset(replicas, trainer, batch, differs):
    step(replicas, trainer, of_subset(range(16, 32) if differs
                                      else range(16)))


@case
def some_labels(replicas, trainer, batch, differs):
    step(replicas, trainer, of_subset(
        range(16), lambda pair: (pair[0], pair[1] + differs)))


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
def no_size_added(replicas, trainer, batch, differs):
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.0})
    for p in replicas.params():
        p.grad_req = "add"
    step(replicas, trainer, batch)
    no_size(replicas, trainer, batch, differs)


@case
def no_sizes(replicas, trainer, batch, differs):
    """No row of a batch counts."""
    X_shards, y_shards = mgpu.split_batch(*batch, replicas.devices)
    with mgpu.record():
        losses = [LOSS(pred, y) * 0
                  for pred, y in zip(replicas(X_shards), y_shards)]
    mgpu.backward(losses)
    trainer.step(0)


@case
def no_size_of_sums(replicas, trainer, batch, differs):
    passes(replicas, batch)
    trainer.allreduce_grads()
    trainer.update(0 if differs else 8)


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
def fewer_tests(replicas, trainer, batch, differs):
    mgpu.evaluate_accuracy_gpus(replicas, mgpu.datasets.BatchIterator(
        np.ones((16 - differs, 1, 8, 8)), np.arange(16 - differs) % 10, 8))


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
def mode(replicas, trainer, batch, differs):
    """Gluon's layers have none: there an option of another layer."""
    if hasattr(replicas.net, "eval"):
        if differs:
            replicas.net.eval()
        mgpu.evaluate_accuracy_gpus(replicas, data()[1])
    else:
        setting(replicas, trainer, batch, differs)


@case
def no_pass(replicas, trainer, batch, differs):
    if not differs:
        passes(replicas, batch)
    trainer.step(8)


@case
def changing_labels(replicas, trainer, batch, differs):
    """As random targets are, where one rank happens to read the same."""
    reads = itertools.count()
    step(replicas, trainer, of_subset(range(16), lambda pair: Changing(
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


def passes(replicas, batch):
    X_shards, y_shards = mgpu.split_batch(*batch, replicas.devices)
    with mgpu.record():
        losses = mgpu.parallel(LOSS, replicas(X_shards), y_shards)
    mgpu.backward(losses)


def main(backend, folder):
    mgpu.set_backend(backend)
    mgpu.distributed.init(timeout=30)
    rank, told = mgpu.distributed.rank(), {}
    for name, function in CASES.items():
        replicas, trainer = made([mgpu.cpu(0)])
        batches = iter(data()[0])
        step(replicas, trainer, next(batches))
        before = [mgpu.to_numpy(p.data()) for p in replicas.params()]
        try:
            function(replicas, trainer, next(batches), rank == 1)
            told[name] = None
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        same = all(np.array_equal(x, mgpu.to_numpy(p.data()))
                   for x, p in zip(before, replicas.params()))
        told[f"{name}: unchanged"] = same
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
