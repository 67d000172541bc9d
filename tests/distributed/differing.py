"""A program in which rank 1 does something else than rank 0:
``differing.py BACKEND FOLDER``. Each case trains a step, differs, and notes
the error of the next one, and whether parameters are as before."""
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
def option(replicas, trainer, batch, differs):
    trainer.optimizer.wd = 0.1 if differs else 0.0
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
