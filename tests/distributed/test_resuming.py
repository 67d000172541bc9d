"""Checkpoints of several processes: one file, whole for all or for none."""
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import mgpu
from conftest import BACKENDS
from distributed import jobs, resuming
from helpers import on

PROGRAM = jobs.ROOT / "tests" / "distributed" / "resuming.py"


def start(folder, backend, counts, *names):
    return jobs.start(folder, counts.count(",") + 1, PROGRAM, backend, counts,
                      folder, *names)


@pytest.fixture(scope="module", params=BACKENDS)
def killed(request, tmp_path_factory):
    """The backend, and the folder of a job of two processes with two devices
    each, whose runs were killed at every kind of step. In the end one rank
    could not save or load, which stopped both."""
    folder = tmp_path_factory.mktemp("killed")
    for text in start(folder, request.param, "2,2", "killed", "refused").said(
            600):
        assert "ended" in text, text
    return request.param, folder


def test_killed_runs_end_as_the_uninterrupted_one(killed):
    """The job has compared them, on both ranks; rank 0 alone has written."""
    _, folder = killed
    assert sorted(os.listdir(folder / "whole")) == [
        f"step-{n:08d}.safetensors" for n in (8, 10, 12)]
    for path in folder.rglob("*"):
        assert path.suffix in ("", ".safetensors", ".txt", ".npz"), path


@pytest.mark.parametrize("k", [1, 4])
def test_one_process_resumes_a_run_of_two(killed, k, tmp_path):
    """On the other backend and another number of devices, with new streams."""
    backend, folder = killed
    target = ({*BACKENDS} - {backend} or {backend}).pop()
    for path in (folder / "half").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with mgpu.using_backend(target):
        run = resuming.made(on(*range(k)), batch_norm="average",
                            plain=True)
        with pytest.raises(ValueError,
                           match="in 2 processes.*Pass resume_seed="):
            resuming.train(run, tmp_path)
        history = resuming.train(run, tmp_path, resume_seed=5)
    assert len(history.train_loss) == resuming.EPOCHS
    assert len(history.loss_per_step) == resuming.EPOCHS * resuming.STEPS
    assert np.isfinite(history.loss_per_step).all()


def test_device_statistics_resume_in_one_process(killed, tmp_path):
    """Four devices of two processes are four devices of one: those of each
    device are its own."""
    backend, folder = killed
    for path in (folder / "whole").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with mgpu.using_backend(backend):
        run = resuming.made(on(0, 1, 2, 3))
        resuming.train(run, tmp_path, resume_seed=5)
        found = run[0].export_numpy(all_devices=True)
    written = np.load(folder / "whole-0.npz"), np.load(folder / "whole-1.npz")
    for p in run[0].buffers():
        for i in range(4):
            want = written[i // 2][str((p.name, i % 2))]
            have = found[p.name][i] if found[p.name].ndim > want.ndim \
                else found[p.name]
            assert have.tobytes() == want.tobytes(), (p.name, i)


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
    name, = os.listdir(tmp_path / "stopped")
    assert Path(name).suffix == ".safetensors"
