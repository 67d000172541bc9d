"""A program that loops: ``looping.py BACKEND`` on two ranks, with two devices
and one. Metrics, accumulated and clipped steps, callbacks, predictions."""
import json
import sys

import numpy as np

import mgpu
from helpers import mlp, on
from mgpu import datasets
from mgpu.nn import metrics
from mgpu.training import callbacks

rng = np.random.default_rng(0)
#: the last batch of an epoch has rows on the first rank alone
X, LABELS = rng.normal(size=(13, 6)), rng.integers(0, 3, 13).astype("int32")
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


def fails_late(replicas, trainer):
    """What a rank raises where the last one fails in the second part of a
    step."""
    world = mgpu.distributed.current()
    calls = []

    def loss(output, y):
        calls.append(len(y))
        if len(calls) == 2 and world.rank == world.size - 1:
            raise KeyError("mine")
        return LOSS(output, y)
    rows = slice(world.rank * 6, world.rank * 6 + 2)
    devices = replicas.devices[:1] + [None] * (len(replicas) - 1)
    try:
        mgpu.train_batch(
            X[rows], LABELS[rows], replicas, loss, trainer, accumulate=2,
            split_f=lambda X, y, _: [
                [mgpu.put(x, devices[0])] + devices[1:] for x in (X, y)])
    except Exception as error:
        return type(error).__name__
    return "nothing"


def work(devices):
    replicas = mgpu.initialize(mlp(mgpu.get_backend(), units=(6, 4, 3)),
                               devices, "uniform", seed=2, dtype="float64")
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.5,
                                             "momentum": 0.5})
    world = mgpu.distributed.current()
    measures = metrics.create(["acc", metrics.TopK(2)])
    measured = [mgpu.evaluate(
        replicas, datasets.IndexedIterator(
            [(x, y) for x, y in zip(X, LABELS)], 4, 0, shuffle=False),
        *more, **options) for more, options in (
            ((measures,), {}), (("loss",), {"loss": LOSS}))]
    ema = callbacks.EMA(0.5)

    def halt(event):
        if event.step == 3 and world.rank == world.size - 1:
            event.stop()
    failed = fails_late(replicas, trainer)
    history = mgpu.train(
        replicas, datasets.IndexedIterator(
            [(x, y) for x, y in zip(X, LABELS)], 4, 0), None, LOSS, trainer,
        5, progress=False, accumulate=4, clip_norm=0.25,
        callbacks=[ema, callbacks.each_step(halt)])
    share = slice(0, 13) if world.size == 1 else slice(
        *((0, 7), (7, 13))[world.rank])
    return {"metrics": measured, "failed": failed,
            "stopped": len(history.loss_per_step),
            "accumulated": [x.tolist() for x
                            in replicas.export_numpy().values()],
            "averages": [x.tolist() for x in ema.averages().values()],
            "predicted": replicas.predict(X[share]).tolist()}


if __name__ == "__main__":
    mgpu.set_backend(sys.argv[1])
    rank = mgpu.distributed.init().rank
    print(json.dumps(work(on(0, 1) if rank == 0 else on(0))))
