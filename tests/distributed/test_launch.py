"""`mgpu launch`: the status, whose output is shown, which rank is named, what
is left, and which sockets listen."""
import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

import forked
from distributed import jobs
from mgpu import cli
from mgpu.distributed import launch
from mgpu.utils import environment

PROGRAM = jobs.ROOT / "tests" / "distributed" / "launched.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux ends the "
                           "processes of a launcher that is killed")


def command(*options, program=PROGRAM, python=sys.executable):
    return [python, "-m", "mgpu", "launch", *map(str, options), str(program)]


def own_environment(folder, **more):
    """The logs' default folder is inside `folder`."""
    return {**os.environ, "PYTHONPATH": str(jobs.ROOT), "TMPDIR": str(folder),
            **more}


def run(folder, *arguments, options=("-n", 2), python=None, **more):
    done = subprocess.run(
        [*command(*options, python=python or forked.python()),
         *map(str, arguments)],
        capture_output=True, text=True, timeout=300, cwd=folder,
        env=own_environment(folder, **more))
    said = [line.removeprefix("mgpu: ") for line in done.stderr.splitlines()
            if line.startswith("mgpu: ")]
    return done, said


def test_a_job_that_ends_well(tmp_path):
    own = ["a $b $$c ${local_rank}", "--n", "-n"]
    done, said = run(tmp_path, "ends well", 3, *own, options=(
        "-n", 2, "--backend", "gluon", "--comm", "gloo", "--timeout", 40),
        python=sys.executable, OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    # Only rank 0 is shown; it has the arguments as they were.
    assert done.stdout == f"rank 0 of 2 {own} mxnet gloo 40 3\nthe end\n"
    assert len(said) == 1 and re.match("starts 2 processes", said[0])
    assert not list(tmp_path.iterdir())


def test_the_rank_that_fails_is_named_first(tmp_path):
    """It raises, then ends early, then is killed; a job starts again as often
    as it may, and shows the log of the last failure."""
    (tmp_path / "logs").mkdir()         # of an earlier job
    (tmp_path / "logs/rank-1.restart-7.out").touch()
    done, said = run(tmp_path, "raises,ends early,killed", 5, options=(
        "-n", 2, "--max-restarts", 2, "--log-dir", tmp_path / "logs"))
    assert done.returncode == 1
    assert said[0].startswith("starts 2 processes")
    starts = [k for k, line in enumerate(said) if line.startswith(
        "all processes start again, restart ")]
    assert len(starts) == 2
    raised, left, killed = (said[a + 1:b] for a, b in zip(
        (0, *starts), (*starts, -1)))
    assert raised[0].startswith(
        "rank 1 ended with status 1: ValueError: rank 1 has a fault; the end")
    assert left[0].startswith("rank 1 ended with status 1; the end of")
    assert left[1].startswith("rank 1 has ended while other ranks continue")
    assert killed[0].startswith("rank 1 was ended by SIGKILL")
    for lines, error in ((raised, "WorkerFailed"), (left, "UnevenWork"),
                         (killed, "WorkerLost")):
        # A slow machine ends rank 0 before it has ended by itself.
        assert lines[-1].startswith((
            f"rank 0 ended with status 1: mgpu.errors.{error}",
            "rank 0 still ran"))
    trace = done.stderr.split("the end of ")[1]
    assert "launched.py" in trace and "\nValueError: rank 1 has" in trace
    assert str(tmp_path / "logs") in said[-1]
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {f"rank-{rank}{restart}.{end}" for rank in (0, 1)
                     for restart in ("", ".restart-1", ".restart-2")
                     for end in ("out", "err")}


# -- what is left, and what listens -------------------------------------------

def runs(process):
    """Whether a process is there, and not only waits to be forgotten."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != "zombie"
    return False


@linux
@pytest.mark.parametrize("how, status", [
    (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes(tmp_path, how, status):
    with open(tmp_path / "out", "w+") as out:
        process = subprocess.Popen(
            [*command("-n", 2), "waits", "10000"], stdout=out,
            stderr=subprocess.STDOUT, env=own_environment(tmp_path))
        try:
            end = time.monotonic() + 200
            while (tmp_path / "out").read_text().count("here") < 2:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            first = psutil.Process(process.pid)
            everyone = [first, *first.children(recursive=True)]
            assert len(everyone) == 3
            pids = {one.pid for one in everyone}
            assert {x.laddr.ip for x in psutil.net_connections("tcp")
                    if x.pid in pids and x.status == "LISTEN"} \
                == {"127.0.0.1"}
            process.send_signal(how)
            assert process.wait(60) == status
            end = time.monotonic() + 60
            while any(map(runs, everyone)) and time.monotonic() < end:
                time.sleep(0.05)
            assert not any(map(runs, everyone))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        assert how == signal.SIGKILL or f"ended by {how.name}" in out.read()


# -- several machines, and torchrun itself ------------------------------------

def test_two_machines_with_different_numbers_of_processes(tmp_path):
    """Two of them on one machine, connected by loopback."""
    address, started = f"127.0.0.1:{jobs.free_port()}", []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        started.append(subprocess.Popen(
            [*command("-n", n, "--nnodes", 2, "--rdzv-endpoint", address,
                      "--max-restarts", 1, python=forked.python()),
             "killed", "5"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=own_environment(tmp_path / str(n))))
    try:
        texts = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], texts
    text, other = texts if "rank 0 of 3" in texts[0] else texts[::-1]
    assert text.endswith("the end\n") and "the end\n" not in other
    assert sum("all processes start again" in text for text in texts)


@pytest.mark.parametrize("others_leave", [True, False])
def test_the_machine_with_the_store_leaves_last(monkeypatch, others_leave):
    """Else the others find their store gone, and print where in C++."""
    agent = importlib.import_module("mgpu.distributed._torchrun")
    monkeypatch.setattr(agent, "_LEAVE", 60 if others_leave else 0.4)
    job = launch.Job("script.py", [], 1, 0, 2,
                     ("127.0.0.1", jobs.free_port()), 30.0, {})
    first, other = agent._rendezvous(job), agent._rendezvous(job)
    leaving = threading.Thread(target=first.shutdown, daemon=True)
    leaving.start()
    if others_leave:
        leaving.join(0.3)
        assert leaving.is_alive()       # it waits 60 s for the other one
        assert other.shutdown()
    leaving.join(50)
    assert not leaving.is_alive()


def test_a_missing_machine_is_an_error(tmp_path):
    done, said = run(tmp_path, "ends well", 3, options=(
        "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{jobs.free_port()}",
        "--start-timeout", 2))
    assert done.returncode == 1
    assert said[1].startswith("2 machines must connect at 127.0.0.1:") \
        and "within 2 s" in said[1]


def test_torchrun_itself(tmp_path):
    done = subprocess.run(
        [forked.python(), "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", PROGRAM, "ends well", "3"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=own_environment(tmp_path, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2


def test_a_question_without_an_answer_is_known_at_the_end(monkeypatch):
    """Its thread is in the library, and comes back while the interpreter
    ends, which aborts the process: it has to be left at once."""
    pytest.importorskip("torch")
    from mgpu.distributed import _gloo
    for answered in (True, False):
        monkeypatch.setattr(_gloo, "_ANSWER", 0.1)
        comm, free = object.__new__(_gloo.Gloo), threading.Event()
        comm._asking, comm.pending = None, False
        comm._serves = False
        assert comm._ask(lambda: free.wait(20), "none") == "none"
        if answered:
            free.set()
            monkeypatch.setattr(_gloo, "_ANSWER", 60)
        comm.close(True)
        assert comm.pending is not answered
        free.set()


# -- the example --------------------------------------------------------------

def test_the_example_ends_with_the_weights_of_one_process(tmp_path):
    """The second batch has one example: one of two processes has none."""
    pytest.importorskip("torch")
    example = jobs.ROOT / "examples" / "multiple_gpus_concise.py"
    own = ("--backend", "torch", "--dtype", "float64", "--epochs", "1",
           "--limit", "3", "--batch-size", "1", "--lr", "0.01")
    kept = {}
    python = forked.python()
    for devices, begin in (
            ("2", [python, str(example)]),
            ("1:1", command("-n", 2, program=example, python=python))):
        done = subprocess.run(
            [*begin, *own, "--devices", devices, "--weights", "kept.npz"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env=own_environment(tmp_path, OMP_NUM_THREADS="1"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("over 2 steps an epoch") == 1
        kept[devices] = dict(np.load(tmp_path / "kept.npz"))
        curve, = (tmp_path / "out").glob("*-2.png")
        curve.unlink()
    one, two = kept.values()
    assert one.keys() == two.keys() and len(one) == 76
    largest = max(np.abs(x).max() for x in one.values())
    for name, x in one.items():
        assert x.dtype == np.float64
        assert np.abs(x - two[name]).max() <= 1e-12 * largest, name


# -- without a job ------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    (["nothing.py"], "nothing.py"),
    (["-n", "0", "x.py"], "--nproc-per-node"),
    (["--nnodes", "2", str(PROGRAM)], "without --rdzv-endpoint. Pass"),
    (["--rdzv-endpoint", "here", str(PROGRAM)],
     "--rdzv-endpoint must be HOST:PORT"),
    (["--comm", "mpi", str(PROGRAM)], "--comm"),
    ([], "SCRIPT")])
def test_a_wrong_argument_is_one_line(arguments, words):
    result = CliRunner().invoke(cli.cli, ["launch", *arguments])
    assert result.exit_code == 2
    line, = result.stderr.splitlines()
    assert line.startswith("Error: ") and words in line


def test_an_unknown_host_raises(tmp_path):
    with pytest.raises(ValueError, match="not known here"):
        launch.launch(str(PROGRAM), ["ends well", "1"], processes=1,
                      machines=2, rdzv="no.such.host.invalid:1",
                      start_timeout=1, log_dir=str(tmp_path))
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("text, words", [
    ("", "ended with status 3"),
    ("no traceback\n", "ended with status 3; the end of"),
    ("[rank1]: Traceback (most recent call last):\n[rank1]:   File\n"
     "[rank1]: ValueError: first\n[rank1]: second\n",
     "ended with status 3: ValueError: first; the end of"),
    ("Traceback (most recent call last):\n  File\nmgpu.errors.WorkerLost: x",
     "ended with status 3: mgpu.errors.WorkerLost: x")])
def test_the_end_of_a_log(tmp_path, text, words):
    log = tmp_path / "rank-1.err"
    log.write_text(text)
    said = launch.verdict({0: 0, 1: 3}, {0: "", 1: str(log)})
    assert len(said) == 1 and said[0].startswith(f"rank 1 {words}")


def test_causes_come_before_consequences(tmp_path):
    trace = "Traceback (most recent call last):\n  File\n{}: x\n"
    logs, kinds = {}, ["mgpu.errors.WorkerLost", "KeyError",
                       "mgpu.errors.ModelMismatch", "KeyError"]
    for rank, kind in enumerate(kinds):
        logs[rank] = str(tmp_path / str(rank))
        Path(logs[rank]).write_text(trace.format(kind))
    said = launch.verdict({0: 1, 1: None, 2: 1, 3: -11}, logs)
    assert [line.split(" e")[0].split(" still")[0].split(" was")[0]
            for line in said] == ["rank 3", "rank 0", "rank 2", "rank 1"]
    assert "SIGSEGV" in said[0] and "still ran" in said[3]


@pytest.mark.parametrize("name, texts, rule", [
    ("MGPU_TIMEOUT", "0 -1 soon inf nan", "a number above 0"),
    ("MGPU_THREADS_PER_DEVICE", "0 many 2.5", "a whole number, 1 or more"),
    ("MGPU_DEBUG", "2 yes", "0 or 1")])
def test_a_wrong_value_of_a_variable_is_refused(monkeypatch, name, texts,
                                                rule):
    variable, = (x for x in environment.VARIABLES if x.name == name)
    for text in texts.split():
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name} must be {rule}; "
                           f"received '{text}'"):
            variable.read()
