"""A program that trains with checkpoints, is stopped, and resumes:
``resuming.py BACKEND COUNTS FOLDER JOB ...``, where COUNTS has the number of
devices of each rank and each JOB is a function below."""
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import mgpu
from test_checkpoint import (LOSS, TRAINERS, disturb, layers, network,
                             noisy)
from test_checkpoint import everything as of_run
from mgpu import datasets

EPOCHS, EVERY = 3, 2
#: steps of an epoch
STEPS = 4
#: the steps in which each run of `killed` is killed
KILLS = (1,), (4,), (5, 10)

rng = np.random.default_rng(0)
ROWS = rng.normal(size=(26, 6)).astype("float32")
LABELS = rng.integers(0, 3, 26).astype("int32")


class Killed(BaseException):
    """As a kill: nothing is tidied up by `train`."""


def made(devices, seed=1, kind=1, plain=False, **options):
    """What a program makes at its begin; all streams are at theirs."""
    disturb(mgpu.get_backend())
    make = layers if plain else network     # that both backends have
    replicas = mgpu.initialize(
        make(mgpu.get_backend()), devices,
        init=mgpu.initializers.Xavier(), seed=seed, **options)
    name, params, others = TRAINERS[kind]
    trainer = mgpu.Trainer(replicas, name, params, **others)
    data = [datasets.BatchIterator(ROWS, LABELS, 7, 3, transform=noisy),
            datasets.BatchIterator(ROWS[:11], LABELS[:11], 5, 4)]
    return replicas, trainer, data


def train(run, folder, loss=LOSS, **options):
    replicas, trainer, (train_iter, test_iter) = run
    options = {"checkpoint_dir": folder, "resume": "auto",
               "checkpoint_every": EVERY, "progress": False, **options}
    return mgpu.train(replicas, train_iter, test_iter, loss, trainer, EPOCHS,
                      **options)


def stopping(trainer, step, action):
    """A loss that calls `action` in a step, from 0."""
    def loss(pred, label):
        if trainer.num_update == step:
            action()
        return LOSS(pred, label)
    return loss


def kill():
    raise Killed


def everything(run, history):
    """Arrays by name; numbers as one JSON text."""
    arrays, numbers = of_run((run[0], run[1], run[2][0]))
    times = "seconds", "images_per_second"
    return {**{str(key): x for key, x in arrays.items()},
            "numbers": np.array(json.dumps([
                numbers, run[2][1].epoch,
                {k: v for k, v in vars(history).items() if k not in times},
                ]))}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for key, x in wanted.items():
        assert x.tobytes() == found[key].tobytes(), (key, x, found[key])


# -- jobs ---------------------------------------------------------------------

def killed(devices, folder):
    """An uninterrupted run, and runs killed in the steps of `KILLS` and
    resumed. Each rank writes the arrays of each run, for the test."""
    def finish(run, place, name):
        history = train(run, place)
        np.savez(Path(folder, f"{name}-{mgpu.distributed.rank()}.npz"),
                 **everything(run, history))
    finish(made(devices), Path(folder, "whole"), "whole")
    for steps in KILLS:
        place = Path(folder, f"killed-{steps}")
        for step in steps:
            run = made(devices, 1 if step == steps[0] else step)
            try:
                train(run, place, stopping(run[1], step, kill))
            except Killed:
                assert run[1].num_update == step
            else:
                raise AssertionError("not killed")
        if mgpu.distributed.is_main():      # what a kill in a save leaves
            (place / ("a" * 16 + ".saving")).touch()
        # Other weights; where nothing was saved, the program's own.
        finish(made(devices, 9 if step >= EVERY else 1), place, place.name)
    # A finished run stays as it is.
    finish(made(devices, seed=9), place, "finished")
    half(devices, folder)


def half(devices, folder):
    """Batch norm that is the same on all devices, stopped in an epoch."""
    run = made(devices, batch_norm="average", plain=True)
    try:
        train(run, Path(folder, "half"), stopping(run[1], 6, kill))
    except Killed:
        pass


def forever(devices, folder):
    """Train until stopped; files say when training has begun, and after how
    many steps it ends."""
    run = made(devices)

    def loss(pred, label):
        if run[1].num_update == 2:
            Path(folder, f"begun-{mgpu.distributed.rank()}").touch()
        time.sleep(0.05)
        return LOSS(pred, label)
    replicas, trainer, (train_iter, _) = run
    try:
        mgpu.train(replicas, train_iter, None, loss, trainer, 1000,
                   progress=False, checkpoint_dir=Path(folder, "stopped"),
                   resume="auto", keep=2)
    finally:
        Path(folder, f"ended-{mgpu.distributed.rank()}").write_text(
            str(trainer.num_update))


def rejected(devices, folder):
    """One rank cannot: all raise, and nothing hangs."""
    world = mgpu.distributed.current()
    run = replicas, trainer, _ = made(devices)
    file = Path(folder) / "saved"
    mgpu.save_checkpoint(file, replicas, trainer)
    whole = file.read_bytes()
    before = everything(run, mgpu.History())

    def raises(kind, text, call, *arguments):
        try:
            call(*arguments)
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no {kind}")
        mgpu.distributed.barrier()
    missing = Path(folder) / "none" / "saved"
    main = mgpu.distributed.is_main()
    failed = mgpu.distributed.WorkerFailed
    raises(FileNotFoundError if main else failed, "the folder of a file must",
           mgpu.save_checkpoint, missing, replicas, trainer)
    raises(FileNotFoundError if main else failed, "No such file",
           mgpu.load_checkpoint, missing, replicas, trainer)
    if main:
        file.write_bytes(whole[:-50])
    mgpu.distributed.barrier()
    raises(mgpu.errors.CheckpointCorrupt if main else failed, "is damaged",
           mgpu.load_checkpoint, file, replicas, trainer)
    # a rank whose weights have gone elsewhere
    if not main:
        value = mgpu.to_numpy(replicas.params()[0].data()) + 1
        replicas.import_numpy({**replicas.export_numpy(all_devices=True),
                               replicas.params()[0].name: value})
    raises(mgpu.errors.ModelMismatch,
           f"value:{replicas.params()[0].name}", mgpu.save_checkpoint, file,
           replicas, trainer)
    if main:
        assert file.read_bytes() == whole[:-50]
        file.write_bytes(whole)
    mgpu.distributed.barrier()
    mgpu.load_checkpoint(file, replicas, trainer)
    after = everything(run, mgpu.History())
    assert_same(after, before)
    # a rank that is in the middle of a step
    if not main:
        trainer._summed = []
    raises(failed if main else RuntimeError, "holds no summed gradients",
           mgpu.save_checkpoint, file, replicas, trainer)
    assert world.size > 1


JOBS = {f.__name__: f for f in (killed, forever, rejected)}


def main(backend, counts, folder, *jobs):
    warnings.simplefilter("error", RuntimeWarning)
    mgpu.set_backend(backend)
    mgpu.distributed.init(timeout=30)
    counts = [int(n) for n in counts.split(",")]
    devices = [mgpu.cpu(i) for i in range(counts[mgpu.distributed.rank()])]
    for job in jobs:
        JOBS[job](devices, folder)
        print(job, "ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
