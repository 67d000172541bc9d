"""`train` with a folder of checkpoints: killed and resumed it ends with the
bits of the uninterrupted run; signals end it between two steps."""
import os
import random
import signal
import threading
import warnings

import numpy as np
import pytest

import mgpu
from distributed import resuming
from distributed.resuming import (EPOCHS, LOSS, ROWS, STEPS, Killed,
                                  assert_same, everything, kill, made,
                                  stopping, train)
from helpers import mlp, on
from mgpu import datasets


def signalled(number):
    """An action of a step: a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def run_until(place, devices, step, action, kind, **options):
    """Train until `action` in a step ends it with `kind`."""
    run = made(devices)
    with pytest.raises(kind) as seen:
        train(run, place, stopping(run[1], step, action), **options)
    return run, seen.value


def names(folder):
    return sorted(os.listdir(folder))


def step(*numbers):
    return [f"step-{n:08d}.safetensors" for n in numbers]


def test_a_killed_run_ends_as_the_uninterrupted_one(engine, tmp_path):
    """At any step; each device has statistics of its own; dropout, noise of
    NumPy's and Python's streams, shuffled test data."""
    resuming.killed(on(0, 1), tmp_path)


@pytest.mark.parametrize("number, kind", [
    (signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_the_step_first(backend, tmp_path, number, kind):
    """The run resumes bit for bit from the checkpoint. (Step 7
    is the last of an epoch: on MXNet runs are equal that save at the same
    steps.)"""
    run = made(on(0, 1))
    whole = everything(run, train(run, tmp_path / "whole"))
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    at = 4 if (backend.name, number) == ("torch", signal.SIGINT) else 7
    place = tmp_path / str(at)
    run, error = run_until(place, on(0, 1), at, signalled(number), kind)
    assert run[1].num_update == at + 1
    assert getattr(error, "code", 143) == 143
    assert len(error.history.loss_per_step) == at + 1
    assert names(place)[-1:] == step(at + 1)
    assert before == {n: signal.getsignal(n) for n in before}
    run = made(on(0, 1), seed=9)
    assert_same(everything(run, train(run, place)), whole)


@pytest.mark.parametrize("where, at", [
    ("data", 6), ("data", 9), ("evaluation", 1), ("evaluation", 2)])
def test_what_a_signal_cuts_short_draws_the_same_again(
        backend, tmp_path, where, at):
    """A process stops in its data or evaluation at once. Numbers of NumPy's,
    of Python's and of torch's own stream; the other evaluations and batches
    have theirs too."""
    ended = []

    def go(folder, at=None, seed=1):
        resuming.disturb(backend)
        calls = []

        def draw():
            calls.append(np.random.random() + random.random())
            if backend.name == "torch":
                import torch
                calls[-1] += torch.rand(1).item()
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGTERM)
                ended.append(True)
            return calls[-1]
        replicas = mgpu.initialize(mlp(backend), on(0), seed=seed,
                                   init=mgpu.initializers.Xavier())
        trainer = mgpu.Trainer(replicas, "adam")
        data = datasets.BatchIterator(
            ROWS, resuming.LABELS, 7, 3, transform=None
            if where == "evaluation" else lambda X: X + np.float32(draw()))
        history = mgpu.train(
            replicas, data, None, LOSS, trainer, EPOCHS, progress=False,
            checkpoint_dir=folder, resume="auto",
            evaluate=draw if where == "evaluation" else lambda: 0.5)
        return everything((replicas, trainer, (data, data)), history)
    whole = go(tmp_path / "whole")
    with pytest.raises(SystemExit):
        go(tmp_path / "run", at)
    assert not ended and names(tmp_path / "run")[-1:] == step(
        at - 1 if where == "data" else STEPS * at)
    assert_same(go(tmp_path / "run", seed=9), whole)


def test_signals_without_a_folder(backend):
    """SIGTERM lets the step end; Ctrl-C ends it at once, as ever."""
    run, error = run_until(None, on(0), 3, signalled(signal.SIGTERM),
                           SystemExit, resume=None, checkpoint_every=None)
    assert error.code == 143 and run[1].num_update == 4
    run, error = run_until(None, on(0), 3, signalled(signal.SIGINT),
                           KeyboardInterrupt, resume=None,
                           checkpoint_every=None)
    assert run[1].num_update == 3 and len(error.history.loss_per_step) == 2


def test_signals_of_the_program_stay_with_it(backend, tmp_path):
    """A handler of its own, and trainings in other threads."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        run = made(on(0))
        train(run, tmp_path / "a",
              stopping(run[1], 3, signalled(signal.SIGTERM)))
        assert seen and run[1].num_update == EPOCHS * STEPS
        run = made(on(0))
        thread = threading.Thread(target=train, args=(run, tmp_path / "b"))
        thread.start()
        thread.join()
        assert run[1].num_update == EPOCHS * STEPS
    finally:
        signal.signal(signal.SIGTERM, before)


# -- the folder ---------------------------------------------------------------

def test_a_damaged_checkpoint_is_passed_over(backend, tmp_path):
    run = made(on(0, 1))
    whole = everything(run, train(run, tmp_path / "whole"))
    place = tmp_path / "run"
    run_until(place, on(0, 1), 7, kill, Killed)
    assert names(place) == step(2, 4, 6)
    newest = place / step(6)[0]
    newest.write_bytes(newest.read_bytes()[:-9])
    run = made(on(0, 1), seed=9)
    with pytest.warns(RuntimeWarning, match="step-00000006.* is damaged.* "
                      "Resuming from the previous checkpoint"):
        history = train(run, place)
    assert_same(everything(run, history), whole)
    for name in names(place):
        (place / name).write_bytes(b"damaged")
    run = made(on(0, 1), seed=9)
    with pytest.warns(RuntimeWarning), pytest.raises(
            mgpu.errors.CheckpointCorrupt):
        train(run, place)


def test_only_whole_checkpoints_count(backend, tmp_path):
    """One that was passed over does not push out the one just written."""
    run = made(on(0))
    whole = everything(run, train(run, tmp_path / "whole",
                                  checkpoint_every=1))
    place, options = tmp_path / "run", {"keep": 1, "checkpoint_every": 1}
    run_until(place, on(0), 6, kill, Killed, keep=2, checkpoint_every=1)
    assert names(place) == step(5, 6)
    (place / step(6)[0]).write_bytes(b"")
    (place / step(8)[0]).write_bytes(b"damaged")
    for at, left in ((6, (6, 8)), (7, (7, 8)), (8, (8,)), (9, (9,))):
        run = made(on(0), seed=9)
        with warnings.catch_warnings(), pytest.raises(Killed):
            warnings.simplefilter("ignore", RuntimeWarning)
            train(run, place, stopping(run[1], at, kill), **options)
        assert names(place) == step(*left)
    run = made(on(0), seed=9)
    assert_same(everything(run, train(run, place, **options)), whole)
    assert names(place) == step(12)


def test_two_runs_in_one_folder(backend, tmp_path):
    """The second raises while the first one runs, and writes nothing."""
    run, other = made(on(0)), made(on(0), seed=9)
    before = everything(other, mgpu.History())
    seen = []

    def second():
        streams = random.getstate(), np.random.get_state()
        with pytest.raises(BlockingIOError, match="another training runs now"):
            train(other, tmp_path)
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        seen.append(names(tmp_path))
        raise Killed
    with pytest.raises(Killed):
        train(run, tmp_path, stopping(run[1], 3, second))
    assert seen == [step(2)] and other[1].num_update == 0
    for name, x in other[0].export_numpy().items():
        assert x.tobytes() == before[str((name, 0))].tobytes()
    train(other, tmp_path)


def test_a_refused_checkpoint_changes_nothing(backend, tmp_path):
    """One of `save_checkpoint`, and one of a longer run."""
    run = made(on(0))
    train(run, tmp_path / "run")
    (tmp_path / "saved").mkdir()
    mgpu.save_checkpoint(tmp_path / "saved" / step(12)[0], *run[:2],
                         run[2][0])
    run = replicas, trainer, data = made(on(0), seed=9)
    before = everything(run, mgpu.History())
    for place, error, match in (
            ("saved", mgpu.errors.CheckpointCorrupt,
             "one of mgpu.save_checkpoint"),
            ("run", ValueError, "num_epochs=1 for a checkpoint after 3. Train "
             "further")):
        with pytest.raises(error, match=match):
            mgpu.train(replicas, data[0], data[1], LOSS, trainer, 1,
                       progress=False, checkpoint_dir=tmp_path / place,
                       resume="auto")
        assert_same(everything(run, mgpu.History()), before)


def test_a_folder_belongs_to_one_run(backend, tmp_path):
    place = tmp_path / "run"
    run = made(on(0))
    train(run, place, keep=2)
    assert names(place) == step(10, 12)
    with pytest.raises(FileExistsError, match="holds 2 checkpoints. Pass "
                       "resume='auto'"):
        train(run, place, resume=None)
    # parts that were left, and a person's files
    other = tmp_path / "other"
    other.mkdir()
    (other / ("a" * 16 + ".saving")).touch()
    (other / "step-1.safetensors").write_text("a person's")
    run = made(on(0))
    train(run, other, keep=9, resume=None)
    assert names(other) == [*step(2, 4, 6, 8, 10, 12), "step-1.safetensors"]


def test_a_folder_that_does_not_stay_is_not_mistaken(
        backend, tmp_path, monkeypatch):
    """Its name may be another run's by then."""
    place = tmp_path / "run"
    monkeypatch.chdir(tmp_path)

    def change():
        place.rename(tmp_path / "old")
        place.mkdir()
        for name in step(1, 99):
            (place / name).write_text("another run's")
    run = made(on(0))
    with pytest.raises(FileNotFoundError, match=f"'{place}' was moved or "
                       "removed"):
        train(run, "run", stopping(run[1], 3, change), keep=1)
    assert {name: (place / name).read_text() for name in names(place)
            } == dict.fromkeys(step(1, 99), "another run's")


@pytest.mark.parametrize("data", ["list", "prefetched", "ahead", "any"])
def test_other_data(backend, tmp_path, data):
    """A list of batches resumes within an epoch, prefetched batches too; any
    other iterable resumes at the start of an epoch."""
    batches = [(ROWS[i:i + 7], resuming.LABELS[i:i + 7])
               for i in range(0, 26, 7)]

    class Any:
        def __iter__(self):
            return iter(batches)

    def go(run, folder, loss=LOSS, every=2, batches=batches):
        source = datasets.BatchIterator(ROWS, resuming.LABELS, 7, 3)
        train_iter = {"list": batches, "ahead": source, "any": Any(),
                      "prefetched": mgpu.prefetch(source, 2)}[data]
        return mgpu.train(
            run[0], train_iter, None, loss, run[1], EPOCHS, progress=False,
            checkpoint_dir=folder, checkpoint_every=every, resume="auto",
            prefetch=2 if data == "ahead" else 0)
    every = None if data == "any" else 2
    if data == "any":
        with pytest.raises(ValueError, match="checkpoint_every takes a "
                           "BatchIterator.*received Any"):
            go(made(on(0)), tmp_path / "x")
    run = made(on(0, 1))
    whole = everything(run, go(run, tmp_path / "whole", every=every))
    for at, action, kind in ((7, kill, Killed), (
            6, signalled(signal.SIGTERM), SystemExit)):
        run = made(on(0, 1))
        place = tmp_path / str(at)
        with pytest.raises(kind):
            go(run, place, stopping(run[1], at, action), every)
        assert names(place)[-1:] == step(
            4 if data == "any" else 6 if at == 7 else 7)
        if at == 6 and backend.name == "mxnet" and data != "any":
            continue    # as said there
        run = made(on(0, 1), seed=9)
        if data == "list":
            with pytest.raises(ValueError,
                               match="batches=3 for a checkpoint with 4"):
                go(run, place, batches=batches[:-1])
        assert_same(everything(run, go(run, place, every=every)), whole)


def test_what_does_not_fit_is_refused(backend, tmp_path):
    replicas, trainer, (data, _) = made(on(0))

    def refused(match, kind=ValueError, **options):
        with pytest.raises(kind, match=match):
            mgpu.train(replicas, data, None, LOSS, trainer, 1,
                       progress=False, **options)
        assert trainer.num_update == 0
    refused("require checkpoint_dir", resume="auto")
    refused("unknown resume; received 'always'", resume="always",
            checkpoint_dir=tmp_path)
    refused("keep", keep=0, checkpoint_dir=tmp_path)
    refused("checkpoint_every", checkpoint_every=0, checkpoint_dir=tmp_path)
    refused("a path names a file", TypeError, checkpoint_dir=3)
    for ahead, drawn in ((2, mgpu.prefetch(data)),
                         (0, mgpu.prefetch(mgpu.prefetch(data)))):
        with pytest.raises(ValueError, match="one thread draws ahead.*"
                           f"received mgpu.prefetch of .*prefetch={ahead}"):
            mgpu.train(replicas, drawn, None, LOSS, trainer, 1,
                       progress=False, prefetch=ahead,
                       checkpoint_dir=tmp_path / "ahead")
    assert not (tmp_path / "ahead").exists() and trainer.num_update == 0


def test_the_curve_is_whole(backend, tmp_path):
    """An animator gets the epochs of earlier runs too."""
    class Curve(list):
        def add(self, x, y):
            self.append((x, y))
    run_until(tmp_path, on(0), 9, kill, Killed)
    curve, run = Curve(), made(on(0), seed=9)
    history = train(run, tmp_path, animator=curve)
    assert curve == [(i + 1, [history.train_loss[i], history.test_acc[i]])
                     for i in range(EPOCHS)]
