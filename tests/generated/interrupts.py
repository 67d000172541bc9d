"""Ctrl-C at random moments of a training: ``python -m
tests.generated.interrupts --count 1000``.

After each, the replicas are equal, and weights, the optimizer's slots and its
counts belong to the same step of an uninterrupted training. Then the training
continues. Half of the steps are `train_batch`, the others a custom loop; some
of these are tried again at once.
"""
import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import mgpu

from .networks import network
from .programs import Network, Program
from .runner import adapter_of

OPTIMIZERS = [("sgd", {"learning_rate": 0.0625, "momentum": 0.5}),
              ("adam", {"learning_rate": 0.0078125})]
LOSS = mgpu.losses.SoftmaxCrossEntropyLoss()


class Training:
    """Step n takes batch n, whatever came before."""

    def __init__(self, backend, k, optimizer):
        net = network(adapter_of(backend.name), Program(
            backend.name, (Network(("dense", "dense")),)), 0)
        self.replicas = mgpu.initialize(net, [mgpu.cpu(i) for i in range(k)])
        self.trainer = mgpu.Trainer(
            self.replicas, *optimizer,
            lr_scheduler=mgpu.lr_scheduler.FactorScheduler(50, 0.5, 2 ** -9))
        self.stepping = 0       # batch size of a custom step, while it runs

    def step(self):
        number = self.trainer.num_update
        rng = np.random.default_rng(number)
        rows = int(rng.integers(1, 8))      # sometimes fewer than devices
        X, y = rng.normal(size=(rows, 4)), rng.integers(0, 4, rows, "int32")
        if number % 2:
            mgpu.train_batch(X, y, self.replicas, LOSS, self.trainer)
            return
        shards, labels = mgpu.split_batch(X, y, self.replicas.devices)
        with mgpu.record():
            losses = [None if out is None else LOSS(out, label) for out, label
                      in zip(self.replicas(shards), labels)]
        mgpu.backward(losses)
        self.stepping = rows
        self.trainer.step(rows)
        self.stepping = 0

    def again(self):
        """What a user does whose `Trainer.step` was interrupted."""
        rows, self.stepping = self.stepping, 0
        with contextlib.suppress(RuntimeError):     # it was taken
            if rows:
                self.trainer.step(rows)

    def state(self):
        """All devices' weights, and the trainer's slots and counts."""
        states = self.trainer.export_states()
        return {"weights": [mgpu.to_numpy(x).tobytes() for p in
                            self.replicas.params() for x in p.list_data()],
                "slots": [x.tobytes() for _, x in sorted(
                    states.slots.items())],
                "counts": (states.num_update, sorted(states.counts.items()))}


class Presser:
    """Presses Ctrl-C once, some time after `go` is set."""

    def __init__(self, after):
        self.go, self.caught = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.press, args=(after,))
        self.thread.start()

    def press(self, after):
        self.go.wait()
        while not self.caught.wait(after):
            os.kill(os.getpid(), signal.SIGINT)
            after = 3   # lost in a finalizer of MXNet's: once more

    def end(self):
        self.caught.set()
        self.thread.join()


def interrupted(backend, count, seed):
    """Yield what is wrong after each of `count` interrupts, or None."""
    order, training = random.Random(seed), None
    for i in range(count):
        if i % 50 == 0:
            faulthandler.dump_traceback_later(300, exit=True)
            k, optimizer = 1 + i // 50 % 4, OPTIMIZERS[i // 50 % 2]
            k = k if count > 50 else 3
            training, plain = (Training(backend, k, optimizer)
                               for _ in range(2))
            began = time.perf_counter()
            for _ in range(5):
                training.step()
            a_step = (time.perf_counter() - began) / 5
        presser = Presser(order.uniform(0, 3 * a_step))
        try:
            presser.go.set()
            while True:
                training.step()
        except KeyboardInterrupt:
            pass
        presser.end()
        if order.random() < 0.5:
            training.again()
        training.stepping = 0
        number = training.trainer.num_update
        while plain.trainer.num_update < number:
            plain.step()
        found, wanted = training.state(), plain.state()
        wrong = [f"step {number}: {name} of another step" for name in found
                 if found[name] != wanted[name]]
        try:
            training.replicas.check_equal()
        except mgpu.ReplicaMismatchError as error:
            wrong.append(str(error))
        if backend.is_recording() or backend.is_training():
            # It came while the user's own record() ended, about once in 500.
            backend.scope(recording=False, training=False).__enter__()
        yield "; ".join(wrong) or None
        if wrong:       # continue with the expected values
            training.replicas.import_numpy(plain.replicas.export_numpy())
            training.trainer.import_states(plain.trainer.export_states())
    faulthandler.cancel_dump_traceback_later()


def main():
    parser = argparse.ArgumentParser("python -m tests.generated.interrupts")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--backend", choices=["mxnet", "torch"],
                        action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.backend or ["mxnet", "torch"]
    count, failed = options.count // (2 * len(names)), False
    for name, strict in itertools.product(names, (False, True)):
        with mgpu.using_backend(name) as backend, mgpu.strict_devices() \
                if strict else contextlib.nullcontext():
            what = f"{name}{', strict devices' * strict}"
            wrong = list(filter(None, interrupted(backend, count,
                                                  options.seed)))
        print(*(f"{what}: {found}" for found in wrong),
              f"{what}: {len(wrong)} of {count} wrong", sep="\n", flush=True)
        failed |= bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main())
