"""A small training in which something goes wrong: ``program.py PLAN``.

PLAN is JSON (see `driver.Case`). Each rank writes to its folder what its
parameters were after each step, when the fault came, and how it ended.
"""
import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import mgpu
from nets import convnet

LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()
ROWS, BATCH = 40, 8


class Rank:
    """What this process does, and what it writes down."""

    def __init__(self, plan):
        self.plan, self.rank = plan, int(os.environ.get("RANK", "0"))
        self.folder = Path(plan["folder"])
        # A KVStore adds up in no other.
        self.dtype = "float32" if plan["comm"] == "kvstore" else "float64"
        mgpu.set_backend(plan["backend"])
        self.backend = mgpu.get_backend()
        self.steps, self.replicas, self.trainers = [], None, []
        self.found = {}

    def write(self, name, value):
        file = self.folder / f"{name}-{self.rank}.json"
        file.with_suffix(".new").write_text(json.dumps(value))
        os.replace(file.with_suffix(".new"), file)

    def faults(self, step, place):
        """What happens to this rank in `step`, at `place`."""
        for rank, at, where, what in self.plan["faults"]:
            if rank in (self.rank, "all") and (at, where) == (step, place):
                self.write("fault", time.time())
                yield what

    def happen(self, step, place):
        for what in self.faults(step, place):
            DEEDS[what](self)

    # -- a training ---------------------------------------------------------

    def first(self):
        """The seed and the devices of the network."""
        return 1, [mgpu.cpu(i) for i in range(self.plan["devices"])]

    def make(self):
        seed, devices = self.first()
        net = convnet(self.backend, channels=1, classes=10,
                      batch_norm=self.plan["batch_norm"])
        mgpu.seed(5)
        self.replicas = mgpu.initialize(net, devices, init="xavier",
                                        seed=seed, dtype=self.dtype)
        self.trainers = [mgpu.Trainer(
            self.replicas, "sgd", {"learning_rate": 0.1, "momentum": 0.9},
            nonfinite=self.plan["nonfinite"])
            for _ in range(self.plan["trainers"])]

    def digest(self):
        digest = hashlib.sha256()
        for p in self.replicas.params():
            for x in p.list_data():
                digest.update(np.ascontiguousarray(
                    mgpu.to_numpy(x)).tobytes())
        return digest.hexdigest()[:16]


    def train(self):
        rows, _ = mgpu.datasets.synthetic(
            BATCH, num_train=ROWS, num_test=8, shape=(1, 8, 8),
            dtype=self.dtype)
        count = self.plan["steps"] - sum(
            int(what) for what in self.faults(0, "steps"))
        for step, (X, y) in zip(
                range(1, count + 1),
                itertools.chain.from_iterable(itertools.repeat(rows))):
            self.work(step, X, y)

    def work(self, step, X, y):
        self.happen(step, "before")
        self.one_step(step, X, y)
        self.steps.append(self.digest())
        self.write("steps", self.steps)

    def one_step(self, step, X, y):
        for trainer in self.trainers:
            mgpu.train_batch(X, y, self.replicas, LOSS, trainer)


def late_failure(pred, number):
    """On device `number`: an operation that fails when MXNet runs it."""
    if pred.ctx.device_id != number:
        return 1.0
    from mxnet import autograd, nd
    with autograd.pause():
        x = nd.random.normal(0, -1, (1,), ctx=pred.ctx, dtype="float64")
    return x.as_np_ndarray() if "numpy" in type(pred).__module__ else x


def different(backend, what):
    """A network of two layers that differs in `what`."""
    sizes = {"shape": (6, 7, 3)}.get(what, (6, 8, 3))
    if backend.name == "torch":
        import torch
        from torch import nn
        layers = [("a", nn.Linear(*sizes[:2])), ("b", nn.Linear(*sizes[1:]))]
        if what == "count":
            layers[1:1] = [("c", nn.Linear(sizes[1], sizes[1]))]
        if what == "name":
            layers[0] = ("z", layers[0][1])
        if what == "order":     # of registration: the same in a pass
            layers = [("a", nn.Linear(8, 8)), ("b", nn.Linear(8, 8))][::-1]
        net = nn.Sequential()
        for name, layer in layers:
            net.add_module(name, layer)
        return net.to(torch.float64) if what == "dtype" else net
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    for n_in, n_out in zip(sizes, sizes[1:]):
        net.add(nn.Dense(n_out, in_units=n_in,
                         use_bias=not (what == "count" and n_out == 3)))
    if what == "name":
        net = nn.HybridSequential()
        inner = nn.HybridSequential()
        inner.add(nn.Dense(8, in_units=6), nn.Dense(3, in_units=8))
        net.add(inner)
    if what == "order":
        net = nn.HybridSequential()
        net.add(nn.Dense(8, in_units=8), nn.Dense(6, in_units=8))
    if what == "dtype":
        net.cast("float64")
    return net


def refused(why):
    raise ValueError(why)


DEEDS = {
    "raise": lambda rank: refused("on purpose"),
    "kill": lambda rank: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda rank: os.kill(os.getpid(), signal.SIGSTOP),
}


def main(plan, kind=Rank):
    rank = kind(plan)
    ended = {"error": None}
    try:
        mgpu.distributed.init(timeout=plan["timeout"],
                              start_timeout=plan["start_timeout"],
                              comm=plan["comm"])
        if plan["work"] == "train":
            rank.make()
            rank.write("begun", rank.digest())
            rank.train()
        else:
            getattr(rank, plan["work"])()
    except BaseException as error:
        ended = {"error": type(error).__name__, "message": str(error),
                 "family": isinstance(error, mgpu.errors.MgpuError)}
        raise
    finally:
        ended |= {"at": time.time(), "found": rank.found, "skipped": sum(
            t.skipped_steps for t in rank.trainers)}
        with contextlib.suppress(Exception):
            ended["digest"] = rank.replicas and rank.digest()
        rank.write("end", ended)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
