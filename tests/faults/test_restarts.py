"""Jobs that lose a process, or their parameter server, resume or end."""
import random
import subprocess
import sys
import time

import pytest

from conftest import BACKENDS
from faults import restarts


def test_a_job_that_loses_a_process_ends_with_the_same_bits(tmp_path):
    pytest.importorskip("torch")
    found = restarts.killed("torch", "gloo", 1, tmp_path, random.Random(1))
    assert found["wrong"] == []
    assert len(found["seconds"]) == found["right"] == 1


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="about MXNet's KVStore")
def test_a_job_that_loses_its_parameter_server_ends_with_the_same_bits(
        tmp_path):
    found = restarts.without_roles(1, tmp_path, random.Random(1))
    assert found["wrong"] == [] and found["right"] == 1


def test_other_bits_and_processes_that_stay_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_TEST_JOB", str(tmp_path))
    stays = subprocess.Popen([sys.executable, "-c",
                              "import time; time.sleep(60)"])
    try:
        # until the child has its own environment, not this process's
        end = time.monotonic() + 60
        while stays.pid not in restarts.left(tmp_path, patience=0):
            assert time.monotonic() < end
        assert restarts.left(tmp_path / "other", patience=0) == []
    finally:
        stays.kill()
        stays.wait()
    for name, losses in (("a", [1.0]), ("b", [1.0 + 2 ** -52])):
        (tmp_path / name).mkdir()
        restarts.np.savez(tmp_path / name / "end.npz", losses=losses)
    assert restarts.bits(tmp_path / "a") == restarts.bits(tmp_path / "a")
    assert restarts.bits(tmp_path / "a") != restarts.bits(tmp_path / "b")
