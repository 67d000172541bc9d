"""Start the processes of a job on this machine, watch them, and say which
one failed: what ``mgpu launch`` does.

torchrun's agent is what starts and restarts them (`_torchrun`). Here is what
it leaves open: logs by rank, and which rank is the cause of a failure.
"""
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mgpu import backends, environment, errors
from mgpu.arguments import integer, number, one_of

#: lines of a traceback that are shown, and ranks besides the first
_LINES, _OTHERS = 25, 8
#: bytes at the end of a log in which a traceback is looked for
_TAIL = 1 << 16


def launch(script: str, arguments: Sequence[str] = (), *, processes: int,
           engine: str | None = None, backend: str | None = None,
           max_restarts: int = 0, machines: int = 1, rdzv: str | None = None,
           timeout: float | None = None, start_timeout: float = 300.0,
           log_dir: str | None = None) -> int:
    """Run a script in several processes, and wait for them.

    The output of rank 0 is copied to standard output and standard error as
    it comes. That of each rank is kept in the files ``rank-N.out`` and
    ``rank-N.err``, with ``restart-K`` in their names from the first restart
    on.

    Parameters
    ----------
    script : path
        A Python file, run with `arguments`.
    processes : int
        How many on this machine.
    engine, backend : str, optional
        ``MGPU_ENGINE`` and ``MGPU_BACKEND`` of the processes.
    max_restarts : int
        How often all are started again where one fails.
    machines : int
        How many machines run this command, each with its own `processes`.
    rdzv : str, optional
        "HOST:PORT", the same on all machines: an address of one of them, at
        which they meet. Without it there is one machine, and all sockets of
        the job are bound to loopback.
    timeout : float, optional
        ``MGPU_TIMEOUT`` of the processes: seconds that one may be silent.
    start_timeout : float
        Seconds within which all machines have to be there.
    log_dir : path, optional
        The folder of the logs. Default: one that is named in the output, and
        removed where all processes end well.

    Returns
    -------
    int
        The status: 0 where all processes have ended well, 1 where one has
        not, 128 + the signal where SIGINT, SIGTERM, SIGHUP or SIGQUIT ended
        the job. No process is left.

    Raises
    ------
    ValueError, FileNotFoundError
        A wrong argument.
    ImportError
        PyTorch is missing.
    """
    if engine is not None:
        one_of("engine", engine, ("torch", "kvstore"))
    if not os.path.isfile(script):
        raise FileNotFoundError(f"launch runs a Python file; {script!r} is "
                                "none. Name a script.")
    job = Job(script, list(arguments), integer("processes", processes, 1),
              integer("max_restarts", max_restarts, 0),
              integer("machines", machines, 1), _address(rdzv, machines),
              number("start_timeout", start_timeout, 0), _variables(
                  processes, MGPU_ENGINE=engine,
                  MGPU_BACKEND=backends.ALIASES.get(backend or "", backend),
                  MGPU_TIMEOUT=None if timeout is None
                  else f"{number('timeout', timeout, 0):g}"))
    environment.package("torch", "mgpu launch, whose processes torchrun "
                        "starts,")
    agent = importlib.import_module("mgpu.distributed._torchrun")
    with _logs(job, log_dir):
        job.status = agent.run(job)
    return job.status


def _address(rdzv: str | None, machines: int) -> tuple[str, int] | None:
    if rdzv is None:
        if machines > 1:
            raise ValueError(
                "several machines meet at an address; received machines="
                f"{machines} without rdzv=. Give all of them the same "
                "HOST:PORT, an address of one of them.")
        return None
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"rdzv must be HOST:PORT; received {rdzv!r}. For "
                         "example, 10.0.0.1:29400.")
    return host.strip("[]"), int(port)


def _variables(processes: int, **given: str | None) -> dict[str, str]:
    """What the processes have in their environment besides ours."""
    found = {name: value for name, value in given.items() if value}
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(
            max(1, environment.cpu_cores() // processes))
    return found


@dataclass
class Job:
    """What runs, and what has become of it."""

    script: str
    arguments: list[str]
    processes: int
    max_restarts: int
    machines: int
    rdzv: tuple[str, int] | None
    start_timeout: float
    variables: dict[str, str]
    folder: Path = Path()
    status: int = 1
    #: of each rank of this machine: its two files
    files: dict[int, tuple[str, str]] = field(default_factory=dict)
    starts: int = 0
    _shown: list["_Shown"] = field(default_factory=list)

    def begin(self, ranks: Sequence[int]) -> None:
        """Processes with these ranks are about to start: name their files,
        and show those of rank 0."""
        self.end()
        if not self.starts:     # an earlier job may have had this folder
            for rank in ranks:
                for old in self.folder.glob(f"rank-{rank}.restart-*.*"):
                    old.unlink()
        more = f".restart-{self.starts}" if self.starts else ""
        self.starts += 1
        self.files = {rank: (
            str(self.folder / f"rank-{rank}{more}.out"),
            str(self.folder / f"rank-{rank}{more}.err")) for rank in ranks}
        for path, stream in zip(self.files.get(0, ()), (sys.stdout,
                                                        sys.stderr)):
            Path(path).touch()
            self._shown.append(_Shown(path, stream))

    def end(self) -> None:
        """All that rank 0 has written is shown."""
        for one in self._shown:
            one.end()
        self._shown.clear()

    def failed(self, statuses: Mapping[int, int | None]) -> None:
        """Say what became of each rank; None: it still ran."""
        self.end()
        for line in verdict(statuses, {
                rank: err for rank, (_, err) in self.files.items()}):
            self.say(line)

    @staticmethod
    def say(text: str) -> None:
        """A line of our own, on standard error."""
        print(f"mgpu: {text}", file=sys.stderr, flush=True)


class _Shown(threading.Thread):
    """Copies what is appended to a file to a stream."""

    def __init__(self, path: str, stream: Any) -> None:
        super().__init__(daemon=True)
        self._path, self._stream = path, stream
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        # A stream that nobody reads on stops this copy; the file has all.
        with open(self._path, "rb") as file, contextlib.suppress(
                BrokenPipeError, ValueError):
            last = False
            while not last:
                last = self._ended.wait(0.05)
                data = file.read()
                if not data:
                    continue
                if hasattr(self._stream, "buffer"):
                    self._stream.buffer.write(data)
                else:
                    self._stream.write(data.decode(errors="replace"))
                self._stream.flush()

    def end(self) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def _logs(job: Job, folder: str | None) -> Any:
    """The folder of the logs, while the job runs, and after it where it is
    wanted."""
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
    job.folder = Path(folder or tempfile.mkdtemp(prefix="mgpu-launch-"))
    job.say(f"starts {job.processes} process{'es' * (job.processes > 1)}; "
            f"the output of each is in {job.folder}")
    try:
        yield
    finally:
        job.end()
        if folder is None and job.status == 0:
            shutil.rmtree(job.folder, ignore_errors=True)
        elif job.status:
            job.say(f"the output of each rank is kept in {job.folder}")


# -- which rank is the cause --------------------------------------------------

class _Fate(NamedTuple):
    """What became of a rank. `cause`: 0 where it failed by itself, 1 where
    it reports on others, 2 where it still ran."""

    cause: int
    rank: int
    said: str               # in one line
    lines: list[str]        # of its traceback


def verdict(statuses: Mapping[int, int | None], logs: Mapping[int, str]
            ) -> list[str]:
    """What became of the ranks, the cause first.

    Parameters
    ----------
    statuses : dict
        The exit status of each rank, negative for a signal; None where the
        rank still ran.
    logs : dict
        The file with the standard error of each rank.
    """
    fates = sorted(_fate(rank, status, logs[rank])
                   for rank, status in statuses.items() if status != 0)
    if not fates:
        return []
    first, others = fates[0], fates[1:]
    found = [f"rank {first.rank} {first.said}"]
    # That of rank 0 has been shown.
    if first.lines and first.rank and not first.cause:
        found[0] += f"; the end of {logs[first.rank]}:\n" \
            + "\n".join(first.lines)
    found += [f"rank {fate.rank} {fate.said}" for fate in others[:_OTHERS]]
    if others[_OTHERS:]:
        found.append(f"and {len(others) - _OTHERS} ranks more")
    return found


def _fate(rank: int, status: int | None, log: str) -> _Fate:
    lines = _end_of(log)
    error = next((line for line in lines[1:] if line[:1].strip()), "") \
        if lines and lines[0].startswith("Traceback") else ""
    if status is None:
        return _Fate(2, rank, "still ran, and was ended", [])
    if status < 0:
        name = signal.Signals(-status).name
        return _Fate(0, rank, f"was ended by {name}", lines)
    said = f"ended with status {status}" + (f": {error}" if error else "")
    return _Fate(int(_of_others(error)), rank, said, lines)


def _of_others(error: str) -> bool:
    """Whether the last line of a traceback tells of another rank."""
    named = re.match(r"mgpu\.errors\.(\w+)", error)
    kind = getattr(errors, named[1], object) if named else object
    return isinstance(kind, type) and issubclass(kind, errors.WorkerError)


def _end_of(log: str) -> list[str]:
    """The last traceback in a log, else its last lines."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # torch writes the rank before each line of a traceback
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line)
             for line in text.replace("\r", "\n").rstrip().splitlines()]
    begins = [i for i, line in enumerate(lines)
              if line.startswith("Traceback (most recent call last)")]
    if not begins:
        return lines[-5:]
    lines = lines[begins[-1]:]
    if len(lines) > _LINES:
        # the error itself may have many lines
        lines = [lines[0], "  ...", *lines[2 - _LINES:]]
    return lines
