"""`mgpu launch` of a script that does not join, and the former names of the
communication backend."""
import os
import subprocess

import pytest

import forked
import mgpu
from distributed import jobs
from mgpu.distributed import launch
from mgpu.utils import environment

PLAIN = "print('trained')\n"
NETWORK = """
import mgpu
mgpu.initialize(mgpu.models.lenet(), [mgpu.cpu(0)])
print('trained')
"""
JOINED = "import mgpu\nmgpu.distributed.init()\nprint('trained')\n"


def launched(folder, script, *options):
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [forked.python(), "-m", "mgpu", "launch", *options, "script.py"],
        capture_output=True, text=True, timeout=300, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "MGPU_ENGINE":
             "torch", "MGPU_BACKEND": "torch", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("script, words", [
    (PLAIN, "the script has ended without mgpu.distributed.init(): 2 "),
    (NETWORK, "RuntimeError: mgpu launch has started several processes")])
def test_a_script_that_never_joins_is_an_error(tmp_path, script, words):
    pytest.importorskip("torch")
    done = launched(tmp_path, script, "-n", "2", "--log-dir", "logs")
    assert done.returncode == 1 and words in done.stderr
    assert ("trained" in done.stdout) is (script == PLAIN)
    assert {path.suffix for path in (tmp_path / "logs").iterdir()} == {
        ".out", ".err"}


@pytest.mark.parametrize("script, options", [
    (JOINED, ["--processes", "2", "--engine", "torch"]),
    (NETWORK, ["-n", "1"])])
def test_a_script_that_joins_or_is_alone_ends_well(tmp_path, script, options):
    pytest.importorskip("torch")
    done = launched(tmp_path, script, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


def test_former_names_of_the_communication_backend(monkeypatch):
    monkeypatch.setenv("MGPU_ENGINE", "kvstore")
    assert environment.comm() == "kvstore"
    monkeypatch.setenv("MGPU_COMM", "gloo")
    assert environment.comm() == "gloo"
    for former in ({"engine": "torch"}, {"comm": "torch"}):
        assert mgpu.distributed.init(**former).size == 1


@pytest.mark.parametrize("name", ["MGPU_COMM", "MGPU_ENGINE"])
def test_a_wrong_communication_backend_is_refused(monkeypatch, tmp_path,
                                                  name):
    monkeypatch.setenv(name, "nccl")
    for start in (mgpu.distributed.init, lambda: launch.launch(
            __file__, processes=2, log_dir=tmp_path / "none")):
        with pytest.raises(ValueError, match=f"{name} must be gloo or "
                           "kvstore; received 'nccl'"):
            start()
    for keyword in ("comm", "engine"):
        with pytest.raises(ValueError, match="unknown comm; received 'mpi'. "
                           "Use one of 'gloo', 'kvstore'"):
            mgpu.distributed.init(**{keyword: "mpi"})
    assert not (tmp_path / "none").exists()
