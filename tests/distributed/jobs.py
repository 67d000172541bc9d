"""Jobs of several processes: start one, and read what each rank says.

`start` starts the processes without torchrun, which takes seconds.
A job runs a file as ``python FILE BACKEND ARGUMENTS``; `Job.wait` has the
output of each rank.
"""
import os
import socket
import subprocess
import time
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Job:
    """Processes that were started together."""

    def __init__(self, processes, files):
        self.processes, self._files = processes, files

    def wait(self, seconds=120):
        """The exit status and the output of each rank. AssertionError where
        one has not ended within `seconds`; all are ended then."""
        end, hung = time.monotonic() + seconds, []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        texts = [file.read_text(errors="replace") for file in self._files]
        assert not hung, f"ranks {hung} did not end: " + "\n".join(texts)
        return [(process.returncode, text) for process, text in zip(
            self.processes, texts, strict=True)]

    def said(self, seconds=120):
        """The output of each rank, all of which end well."""
        ends = self.wait(seconds)
        for status, text in ends:
            assert status == 0, text
        return [text for _, text in ends]


def environment(rank, size, port, **more):
    """The environment of one rank, as torchrun makes it."""
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **more}


def start(folder, size, file, backend, *arguments, **more):
    """A `Job` of `size` ranks that run `file`; their output goes to files in
    `folder`. `more`: further variables of the environment. The tests' modules
    load no other backend there, which takes seconds."""
    port, processes, files = free_port(), [], []
    for rank in range(size):
        files.append(Path(folder) / f"rank-{rank}.txt")
        with open(files[-1], "w") as out:
            processes.append(forked.Process(
                [file, backend, *arguments], out, folder, environment(
                    rank, size, port, MGPU_TEST_BACKENDS=backend, **more)))
    return Job(processes, files)
