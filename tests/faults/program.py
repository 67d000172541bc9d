"""A small training in which something goes wrong: ``program.py PLAN``.

PLAN is JSON (see `driver.Case`). Each rank writes to its folder what its
parameters were after each step, when the fault came, and how it ended.
"""
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
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
        self.dtype = "float32" if plan["engine"] == "kvstore" else "float64"
        mgpu.set_backend(plan["backend"])
        self.backend = mgpu.get_backend()
        self.steps, self.replicas, self.trainers = [], None, []
        self.told = {}

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

    def make(self):
        plan = self.plan
        devices = [mgpu.cpu(i) for i in range(plan["devices"])]
        seed = 1
        for what in self.faults(0, "model"):
            if what == "seed":
                seed = 7
            else:
                devices = DEVICES[what]
        net = convnet(self.backend, channels=1, classes=10,
                      batch_norm=plan.get("batch_norm", True))
        mgpu.seed(5)
        self.replicas = mgpu.initialize(net, devices, init="xavier",
                                        seed=seed, dtype=self.dtype)
        for _ in range(plan["trainers"]):
            self.trainers.append(mgpu.Trainer(
                self.replicas, "sgd",
                {"learning_rate": 0.1, "momentum": 0.9},
                nonfinite=plan["nonfinite"]))

    def digest(self):
        digest = hashlib.sha256()
        for p in self.replicas.params():
            for x in p.list_data():
                digest.update(np.ascontiguousarray(
                    mgpu.to_numpy(x)).tobytes())
        return digest.hexdigest()[:16]

    def loss(self, step):
        """The loss of a step, with what happens in the passes of this
        rank."""
        found = list(self.faults(step, "pass"))

        def loss(pred, label):
            value = LOSS(pred, label)
            for what in found:
                if what == "device":
                    value = value * late_failure(
                        pred, self.plan["devices"] - 1)
                elif what == "nan":
                    value = value * float("nan")
                else:
                    DEEDS[what](self)
            return value
        return loss if found else LOSS

    def train(self):
        plan = self.plan
        train_iter, _ = mgpu.datasets.synthetic(
            BATCH, num_train=ROWS, num_test=8, shape=(1, 8, 8),
            dtype=self.dtype)
        step, count = 0, plan["steps"]
        done = self.resume() if plan["keep"] else 0
        for what in self.faults(0, "steps"):
            count -= int(what)
        delays = random.Random()
        while step < count:
            for X, y in train_iter:
                step += 1
                if step > count:
                    break
                if step <= done:
                    continue
                if plan["delay"]:
                    time.sleep(delays.random() * plan["delay"])
                if plan["pause"]:
                    time.sleep(plan["pause"])
                for what in self.faults(step, "labels"):
                    y = np.array(y)
                    y[0] = int(what)
                self.happen(step, "before")
                self.one_step(step, X, y)
                self.steps.append(self.digest())
                self.write("steps", self.steps)
                self.happen(step, "after")
                if plan["keep"]:
                    self.keep(step)

    def keep(self, step):
        """What a restarted job needs, by rank 0 (no checkpoint of mgpu's:
        these have tests of their own)."""
        if not mgpu.distributed.is_main():
            return
        file = Path(self.plan["keep"]) / "kept.npz"
        states = self.trainers[0].export_states()
        np.savez(file.with_suffix(".new.npz"), step=step, **{
            f"value {name}": x
            for name, x in self.replicas.export_numpy().items()}, **{
            f"state {slot} {name}": x
            for (name, slot), x in states.slots.items()})
        os.replace(file.with_suffix(".new.npz"), file)

    def resume(self):
        """The number of steps that were done before."""
        file = Path(self.plan["keep"]) / "kept.npz"
        # Rank 0 looks for all: it may write a newer one meanwhile.
        world = mgpu.distributed.current()
        if not world.gather("a kept state", file.exists())[0]:
            return 0
        with np.load(file) as kept:
            found = {name: kept[name] for name in kept.files}
        self.replicas.import_numpy({
            n.removeprefix("value "): x for n, x in found.items()
            if n.startswith("value ")})
        step = int(found["step"])
        slots = {}
        for name, x in found.items():
            if name.startswith("state "):
                _, slot, parameter = name.split(" ", 2)
                slots[parameter, slot] = x
        self.trainers[0].import_states(
            self.trainers[0].export_states()._replace(
                num_update=step, slots=slots,
                counts={parameter: step for parameter, _ in slots}))
        old = self.folder / f"steps-{self.rank}.json"
        self.steps = json.loads(old.read_text())[:step] \
            if old.exists() else []
        (self.folder / "resumed.json").write_text(json.dumps(step))
        world.gather("a kept state was read")
        return step

    def one_step(self, step, X, y):
        order = self.trainers
        for _ in self.faults(step, "order"):
            order = order[::-1]
        for trainer in order:
            if not self.plan["by_hand"]:
                mgpu.train_batch(X, y, self.replicas, self.loss(step),
                                 trainer)
                continue
            devices = self.replicas.devices
            shards, labels = mgpu.split_batch(X, y, devices)
            with mgpu.record():
                losses = [None if out is None else LOSS(out, label)
                          for out, label in zip(self.replicas(shards),
                                                labels)]
            mgpu.backward(losses)
            trainer.allreduce_grads()
            self.happen(step, "between")
            trainer.update(len(X))

    # -- what else ----------------------------------------------------------

    def models(self):
        """Networks and trainers that differ on rank 1: each is refused."""
        for name in ("count", "shape", "dtype", "name", "order", "option"):
            self.told[name] = "accepted"
            try:
                other = name if self.rank == 1 else None
                net = different(self.backend, other)
                replicas = mgpu.initialize(
                    net, [mgpu.cpu(0)], init="xavier", seed=1)
                mgpu.Trainer(replicas, "sgd", {
                    "learning_rate": 0.2 if other == "option" else 0.1})
            except mgpu.errors.ModelMismatch as error:
                self.told[name] = f"ModelMismatch: {error}"

    def sockets(self):
        """The addresses on which this process listens."""
        mine = set()
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(entry.path))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text(
                    ).splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                    self.told[words[1]] = table


def late_failure(pred, number):
    """On device `number`: what MXNet refuses when it comes to it."""
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


def orphan(rank):
    """A process that outlives this one."""
    import subprocess
    subprocess.Popen(["sleep", "600"])
    os._exit(0)


def in_thread(rank):
    thread = threading.Thread(target=lambda: refused("in a thread"))
    thread.start()
    thread.join()
    sys.exit(0)


DEEDS = {
    "raise": lambda rank: refused("on purpose"),
    "kill": lambda rank: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda rank: os.kill(os.getpid(), signal.SIGSTOP),
    "exit 0": lambda rank: sys.exit(0),
    "exit 3": lambda rank: sys.exit(3),
    "_exit": lambda rank: os._exit(0),
    "interrupt": lambda rank: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda rank: os.kill(os.getpid(), signal.SIGTERM),
    "thread": in_thread,
    "sleep": lambda rank: time.sleep(600),
    "orphan": orphan,
    "nothing": lambda rank: None,
}
DEVICES = {"twice": [mgpu.cpu(0), mgpu.cpu(0)], "none": []}


def main(plan):
    told = Rank(plan)
    ended = {"error": None}
    try:
        mgpu.distributed.init(timeout=plan["timeout"],
                              start_timeout=plan["start_timeout"],
                              engine=plan["engine"])
        if plan["work"] == "train":
            told.make()
            told.write("begun", told.digest())
            told.train()
        else:
            getattr(told, plan["work"])()
    except BaseException as error:
        ended = {"error": type(error).__name__, "message": str(error),
                 "family": isinstance(error, mgpu.errors.MgpuError)}
        raise
    finally:
        ended |= {"at": time.time(), "told": told.told, "skipped": sum(
            t.skipped_steps for t in told.trainers)}
        with contextlib.suppress(Exception):
            ended["digest"] = told.replicas and told.digest()
        told.write("end", ended)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
