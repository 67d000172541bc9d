"""The training of tests/faults/program.py, with all that can go wrong in it:
``program.py PLAN``."""
import contextlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mgpu
from faults import program
from faults.program import DEEDS, LOSS, different, late_failure, refused

#: what a plan says beside `driver.PLAN`
PLAN = {"by_hand": False, "delay": 0, "pause": 0, "keep": None}


class Rank(program.Rank):
    """What this process does, and what it writes down."""

    def __init__(self, plan):
        super().__init__({**PLAN, **plan})
        self.done = 0

    def first(self):
        seed, devices = super().first()
        for what in self.faults(0, "model"):
            if what == "seed":
                seed = 7
            else:
                devices = DEVICES[what]
        return seed, devices

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
        if self.plan["keep"]:
            self.done = self.resume()
        super().train()

    def work(self, step, X, y):
        if step <= self.done:
            return
        time.sleep(random.random() * self.plan["delay"] + self.plan["pause"])
        for what in self.faults(step, "labels"):
            y = np.array(y)
            y[0] = int(what)
        super().work(step, X, y)
        if self.plan["keep"]:
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
        """Networks and trainers that differ on rank 1: each raises."""
        for name in ("count", "shape", "dtype", "name", "order", "option"):
            self.found[name] = "accepted"
            try:
                other = name if self.rank == 1 else None
                net = different(self.backend, other)
                replicas = mgpu.initialize(
                    net, [mgpu.cpu(0)], init="xavier", seed=1)
                mgpu.Trainer(replicas, "sgd", {
                    "learning_rate": 0.2 if other == "option" else 0.1})
            except mgpu.errors.ModelMismatch as error:
                self.found[name] = f"ModelMismatch: {error}"

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
                    self.found[words[1]] = table


def in_thread(rank):
    thread = threading.Thread(target=lambda: refused("in a thread"))
    thread.start()
    thread.join()
    sys.exit(0)


DEEDS.update({
    "exit 0": lambda rank: sys.exit(0),
    "exit 3": lambda rank: sys.exit(3),
    "_exit": lambda rank: os._exit(0),
    "thread": in_thread,
})
DEVICES = {"twice": [mgpu.cpu(0), mgpu.cpu(0)], "none": []}


if __name__ == "__main__":
    program.main(json.loads(sys.argv[1]), Rank)
