"""Checkpoints of several processes: one file, whole for all or for none."""
import os
import re
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import mgpu
from conftest import BACKENDS
from distributed import jobs, resuming
from helpers import assert_all_equal, assert_bit_equal, on

PROGRAM = jobs.ROOT / "tests" / "distributed" / "resuming.py"


def start(folder, backend, counts, *names):
    return jobs.start(folder, counts.count(",") + 1, PROGRAM, backend, counts,
                      folder, *names)


@pytest.fixture(scope="module", params=BACKENDS)
def killed(request, tmp_path_factory):
    """The backend, the folder and the ends of a job of two processes with two
    devices each, whose runs were killed at every kind of step. Last comes
    what one rank cannot save or load."""
    folder = tmp_path_factory.mktemp("killed")
    ends = start(folder, request.param, "2,2", "killed", "rejected").wait(600)
    for _, text in ends:
        assert "killed ended" in text, text
    return request.param, folder, ends


def test_killed_runs_end_as_the_uninterrupted_one(killed):
    """On both ranks, bit for bit; rank 0 alone writes checkpoints."""
    _, folder, _ = killed
    names = [f"killed-{steps}" for steps in resuming.KILLS]
    for rank in range(2):
        whole, *others = (dict(np.load(folder / f"{name}-{rank}.npz"))
                          for name in ("whole", *names, "finished"))
        for found in others:
            assert_all_equal(found, whole)
    for name in ("whole", *names):
        assert sorted(os.listdir(folder / name)) == [
            f"step-{n:08d}.safetensors" for n in (8, 10, 12)]
    for path in folder.rglob("*"):
        assert path.suffix in ("", ".safetensors", ".txt", ".npz"), path


def test_a_rank_that_cannot_save_or_load_stops_both(killed):
    for status, text in killed[-1]:
        assert status == 0 and "rejected ended" in text, text


@pytest.mark.parametrize("k", [1, 4])
def test_one_process_resumes_a_run_of_two(killed, k, tmp_path):
    """On the other backend and another number of devices, with new streams."""
    backend, folder, _ = killed
    target = ({*BACKENDS} - {backend} or {backend}).pop()
    for path in (folder / "half").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    loaded = {}
    with mgpu.using_backend(target):
        run = resuming.made(on(*range(k)), batch_norm="average",
                            plain=True)
        with pytest.raises(ValueError,
                           match="in 2 processes.*Pass resume_seed="):
            resuming.train(run, tmp_path)
        # The first loss is computed before any weight changes.
        history = resuming.train(run, tmp_path, resuming.stopping(
            run[1], 6, lambda: loaded.update(run[0].export_numpy())),
            resume_seed=5)
    written = load_file(folder / "half" / "step-00000006.safetensors")
    for p in run[0].params():
        assert_bit_equal(loaded[p.name], written[f"value:{p.name}"])
    assert len(history.train_loss) == resuming.EPOCHS
    assert len(history.loss_per_step) == resuming.EPOCHS * resuming.STEPS
    assert np.isfinite(history.loss_per_step).all()


def test_device_statistics_load_in_one_process(killed, tmp_path):
    """Four devices of two processes are four devices of one: those of each
    device are its own. The run was finished: no step follows."""
    backend, folder, _ = killed
    for path in (folder / "whole").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with mgpu.using_backend(backend):
        run = resuming.made(on(0, 1, 2, 3))
        resuming.train(run, tmp_path, resume_seed=5)
        found = run[0].export_numpy(all_devices=True)
    written = load_file(tmp_path / "step-00000012.safetensors")
    ranks = [np.load(folder / f"whole-{rank}.npz") for rank in range(2)]
    names = [p.name for p in run[0].buffers()]
    assert {"1.running_mean", "1.running_var"} <= {
        name.removeprefix("body.") for name in names}
    for name in names:
        assert_bit_equal(found[name], written[f"value:{name}"])
        for i in range(4):
            each = ranks[i // 2][str((name, i % 2))]
            assert_bit_equal(found[name][i] if found[name].ndim > each.ndim
                             else found[name], each)


@pytest.mark.parametrize("number, ranks", [
    (signal.SIGTERM, [0, 1]), (signal.SIGINT, [1])])
def test_a_signal_stops_all_ranks_after_the_same_step(number, ranks,
                                                      tmp_path):
    job = start(tmp_path, BACKENDS[-1], "1,1", "forever")
    end = time.monotonic() + 200
    while len(list(tmp_path.glob("begun-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    for rank in ranks:
        job.processes[rank].send_signal(number)
    for status, text in job.wait(60):
        assert status == (143 if number == signal.SIGTERM else -number), text
        assert number == signal.SIGTERM or "KeyboardInterrupt" in text
        assert not re.search("WorkerFailed|WorkerLost|UnevenWork", text), text
    first, second = (int((tmp_path / f"ended-{rank}").read_text())
                     for rank in range(2))
    assert first == second > 2
    assert os.listdir(tmp_path / "stopped") == [
        f"step-{first:08d}.safetensors"]
