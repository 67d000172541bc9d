"""Kill a process while it saves, and damage files in every way."""
import os
import random
import signal
import time
from pathlib import Path

import numpy as np

import mgpu
from nets import rows_gluon, rows_torch

LIMIT = 64 << 20


def training(backend, width=None):
    """Replicas and their trainer; `width`: of a large network."""
    if backend.name == "mxnet":
        from mxnet.gluon import nn
        net = rows_gluon()
        if width:
            net = nn.HybridSequential()
            net.add(nn.Dense(width, in_units=width), nn.Dense(3))
    else:
        import torch
        net = rows_torch()
        if width:
            net = torch.nn.Sequential(torch.nn.Linear(width, width),
                                      torch.nn.Linear(width, 3))
    replicas = mgpu.initialize(net, [mgpu.cpu(0)], sample=np.zeros(
        (2, width or 6), "float32"))
    trainer = mgpu.Trainer(replicas, "adam")
    X = np.ones((2, width or 6), "float32")
    mgpu.train_batch(X, np.zeros(2, "int32"), replicas,
                     mgpu.losses.SoftmaxCrossEntropyLoss(), trainer)
    return replicas, trainer


def fill(replicas, number):
    """Every value of the network is `number`."""
    replicas.import_numpy({name: np.full_like(x, number) for name, x
                           in replicas.export_numpy().items()})


def kills(backend, count, folder, width=900):
    """Kill a process at random moments of its saves. Returns how many
    checkpoints could not be read, or hold two saves, and how many kills have
    left a part; all parts are swept."""
    chance, unreadable, parts = random.Random(1), 0, 0
    replicas, trainer = training(backend, width)
    file = Path(folder) / f"saved-{backend.name}"
    mgpu.save_checkpoint(file, replicas, trainer)
    for _ in range(count):
        child = os.fork()
        if child == 0:
            if backend.name == "torch":     # its pool stays with the parent
                import torch
                torch.set_num_threads(1)
            number = 1
            while True:
                number += 1
                fill(replicas, number)
                mgpu.save_checkpoint(file, replicas, trainer)
        before = file.stat().st_mtime_ns
        end = time.monotonic() + 60
        while file.stat().st_mtime_ns == before and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(0.15 * chance.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        parts += len(os.listdir(folder)) - 1
        try:
            mgpu.load_checkpoint(file, replicas, trainer)
            found = {float(x) for value in replicas.export_numpy().values()
                     for x in (value.min(), value.max())}
            unreadable += len(found) != 1
        except ValueError as error:
            print(error)
            unreadable += 1
        mgpu.save_checkpoint(file, replicas, trainer)
        assert os.listdir(folder) == [file.name], os.listdir(folder)
    file.unlink()
    return unreadable, parts


def mutated(whole, chance):
    """A file that is `whole` no longer, and what was done to it."""
    size = len(whole)
    at, n = chance.randrange(size), chance.randint(1, 64)
    # Half of the changes are in the header, where numbers and names are.
    if chance.random() < 0.5:
        at = chance.randrange(8 + int.from_bytes(whole[:8], "little"))
    kind = chance.choice(["bit", "byte", "cut", "zeros", "twice", "longer",
                          "moved", "gone"])
    return kind, {
        "bit": lambda: whole[:at] + bytes(
            [whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1:],
        "byte": lambda: whole[:at] + bytes(
            [chance.randrange(256)]) + whole[at + 1:],
        "cut": lambda: whole[:at],
        "zeros": lambda: whole[:at] + bytes(len(whole[at:at + n]))
        + whole[at + n:],
        "twice": lambda: whole[:at + n] + whole[at:],
        "longer": lambda: whole + chance.randbytes(n),
        "moved": lambda: whole[:at] + whole[at + n:at + 2 * n]
        + whole[at:at + n] + whole[at + 2 * n:],
        "gone": lambda: whole[:at] + whole[at + n:],
    }[kind]()


def mutations(backend, count, folder):
    """Load `count` files with changes at random. Returns how many loaded,
    how many raised something else than CheckpointCorrupt, and by how much
    the peak of memory has grown."""
    chance, loaded, crashed = random.Random(2), 0, 0
    replicas, trainer = training(backend)
    file = Path(folder) / f"mutated-{backend.name}"
    mgpu.save_checkpoint(file, replicas, trainer)
    mgpu.load_checkpoint(file, replicas, trainer)
    whole = file.read_bytes()
    fill(replicas, 1.0)
    _begin_peak()
    before, tried = _memory("VmRSS"), 0
    while tried < count:
        kind, data = mutated(whole, chance)
        if data == whole:
            continue
        tried += 1
        file.write_bytes(data)
        try:
            mgpu.load_checkpoint(file, replicas, trainer)
            print("loaded", kind)
            loaded += 1
            fill(replicas, 1.0)
        except mgpu.errors.CheckpointCorrupt:
            pass
        except Exception as error:
            print("crash", kind, repr(error))
            crashed += 1
    loaded += any((x != 1).any() for x in replicas.export_numpy().values())
    file.unlink()
    return loaded, crashed, _memory("VmHWM") - before - len(whole)


def _memory(line):
    """VmRSS: bytes now; VmHWM: the most since `_begin_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(line + ":")[2].split()[0]) << 10


def _begin_peak():
    Path("/proc/self/clear_refs").write_text("5")
