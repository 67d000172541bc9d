"""Rows 6 and 8: jobs of `mgpu launch` that lose a process at a random step and
are started again, and jobs whose parameter server ends.

As a program it is what a rank runs.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

import forked

STEPS, EPOCHS, EVERY, LIMIT = 6, 4, 3, 10
ROLES = ("scheduler", "server")


# -- what a rank runs ---------------------------------------------------------

def rank_program(folder, at, who, how):
    """Trains, and in step `at` of the first attempt loses `who`: a rank, or a
    role of the parameter server."""
    import mgpu
    from nets import convnet
    mgpu.set_backend(os.environ["MGPU_BACKEND"])
    world = mgpu.distributed.init(timeout=LIMIT)
    folder, batches = Path(folder), [0]

    def counting(X):
        batches[0] += 1
        if world.restarts and batches[0] == 1:
            note(folder, "resumed", world.rank)
        if batches[0] == int(at) and not world.restarts:
            lose(world, folder, who, how)
        return X
    rng = np.random.default_rng(0)
    data = mgpu.datasets.BatchIterator(
        rng.normal(size=(8 * STEPS, 1, 8, 8)).astype("float32"),
        rng.integers(0, 5, 8 * STEPS).astype("int32"), 8, transform=counting)
    replicas = mgpu.initialize(
        convnet(mgpu.get_backend(), channels=1, classes=5),
        [mgpu.cpu(0), mgpu.cpu(1)], init="xavier", seed=3)
    trainer = mgpu.Trainer(replicas, "sgd", {"learning_rate": 0.05,
                                             "momentum": 0.9})
    history = mgpu.train(replicas, data, None,
                         mgpu.losses.SoftmaxCrossEntropyLoss(), trainer,
                         EPOCHS, progress=False, checkpoint_every=EVERY,
                         checkpoint_dir=folder / "run", resume="auto")
    values = replicas.export_numpy(all_devices=True)
    if world.is_main:
        np.savez(folder / "end.npz", losses=history.loss_per_step, **values)


def lose(world, folder, who, how):
    number = getattr(signal, how)
    if who == str(world.rank):
        note(folder, "lost", world.rank)
        os.kill(os.getpid(), number)
    elif who in ROLES and world.is_main:
        note(folder, "lost", who)
        world.engine._roles[who].send_signal(number)


def note(folder, what, who):
    with open(Path(folder) / f"{what}-{who}", "w") as file:
        file.write(repr(time.time()))


# -- what starts it -----------------------------------------------------------

def launch(folder, backend, comm, at=0, who="nobody", how="SIGKILL",
           restarts=2, seconds=600):
    """Exit status, seconds and output of a job."""
    folder.mkdir(parents=True)
    root = Path(__file__).resolve().parents[2]
    begin = time.time()
    done = subprocess.run(
        [forked.python(), "-m", "mgpu", "launch", "-n", "2", "--backend",
         backend, "--engine", comm,
         "--max-restarts", str(restarts), "--log-dir", folder / "logs",
         __file__, folder, str(at), who, how],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=seconds, cwd=folder, env={
            **os.environ, "OMP_NUM_THREADS": "1",
            "MGPU_TEST_JOB": str(folder),
            "PYTHONPATH": f"{root}:{root / 'tests'}"})
    return done.returncode, time.time() - begin, done.stdout


def bits(folder):
    return {name: x.tobytes() for name, x in
            np.load(folder / "end.npz").items()}


def seconds_between(folder):
    """From the loss of a process to the first batch of the next attempt."""
    at = {kind: [float(f.read_text()) for f in folder.glob(f"{kind}-*")]
          for kind in ("lost", "resumed")}
    return max(at["resumed"]) - min(at["lost"])


def killed(backend, comm, runs, folder, draw):
    """Each run loses one process at a random step."""
    status, _, text = launch(folder / "whole", backend, comm)
    assert status == 0, text
    expected, equal, seconds, wrong = bits(folder / "whole"), 0, [], []
    for number in range(runs):
        place = folder / f"killed-{number}"
        at, who = draw.randint(1, STEPS * EPOCHS), str(draw.randint(0, 1))
        status, _, text = launch(place, backend, comm, at, who)
        if status or left(place) or not list(place.glob("resumed-*")):
            wrong.append(f"step {at}, rank {who}: status {status}: "
                         + text[-2000:])
            continue
        equal += bits(place) == expected
        seconds.append(seconds_between(place))
        shutil.rmtree(place)
    return {"right": equal, "seconds": seconds, "wrong": wrong}


def left(folder, patience=2.0):
    """Processes of the job that still run, some seconds after its end."""
    end = time.time() + patience
    while True:
        found = [x.pid for x in psutil.process_iter(["environ"]) if (
            x.info["environ"] or {}).get("MGPU_TEST_JOB") == str(folder)]
        if not found or time.time() > end:
            return found
        time.sleep(0.1)


def without_roles(runs, folder, draw):
    """Each run loses a role of the parameter server, ends, starts again, and
    ends with the bits of one that loses none."""
    found, seconds, wrong = 0, [], []
    status, _, text = launch(folder / "whole", "mxnet", "kvstore")
    assert status == 0, text
    expected = bits(folder / "whole")
    for number in range(runs):
        place = folder / f"role-{number}"
        who = ROLES[number % 2]
        how = "SIGSTOP" if who == "server" and number % 4 == 1 else "SIGKILL"
        at = draw.randint(2, STEPS)
        status, _, text = launch(place, "mxnet", "kvstore", at, who, how, 1)
        stay = left(place)
        good = status == 0 and "WorkerLost" in text and not stay \
            and bits(place) == expected
        found += good
        if list(place.glob("resumed-*")):
            seconds.append(seconds_between(place))
        if not good:
            wrong.append(f"{who} {how}: status {status}, left {stay}: "
                         + text[-2000:])
    return {"right": found, "seconds": seconds, "wrong": wrong}


if __name__ == "__main__":
    rank_program(*sys.argv[1:])
