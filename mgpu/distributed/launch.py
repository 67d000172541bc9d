"""Start the processes of a job on this machine, watch them, and say which
one failed: what ``mgpu launch`` does.

torchrun's agent is what starts and restarts them, and shows the output of rank
0 (`_torchrun`). Here is what it leaves open: which rank is the cause of a
failure.
"""
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mgpu import backends
from mgpu.utils import environment

#: lines of a traceback that are shown, and ranks besides the first
_LINES, _OTHERS = 25, 8
#: bytes at the end of a log in which a traceback is looked for
_TAIL = 1 << 16
#: errors with which a rank reports on others
_REPORTS = tuple(f"mgpu.errors.{name}" for name in (
    "WorkerError", "WorkerLost", "WorkerFailed", "UnevenWork",
    "ModelMismatch"))


def launch(script: str, arguments: Sequence[str] = (), *, processes: int,
           comm: str | None = None, backend: str | None = None,
           max_restarts: int = 0, machines: int = 1, rdzv: str | None = None,
           timeout: float | None = None, start_timeout: float = 300.0,
           log_dir: str | None = None, engine: str | None = None) -> int:
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
    comm, backend : str, optional
        ``MGPU_COMM`` and ``MGPU_BACKEND`` of the processes.
    max_restarts : int
        How often all are started again where one fails.
    machines : int
        How many machines run this command, each with its own `processes`.
    rdzv : str, optional
        "HOST:PORT", the same on all machines: an address of one of them, to
        which the others connect. Default: one machine, and all sockets of
        the job are bound to loopback.
    timeout : float, optional
        ``MGPU_TIMEOUT`` of the processes: seconds that one may be silent.
    start_timeout : float
        Seconds within which all machines have to be there.
    log_dir : path, optional
        The folder of the logs. Default: one that is named in the output, and
        removed where all processes end well.
    engine : str, optional
        The former name of `comm`, for one version.

    Returns
    -------
    int
        The status: 0 where all processes have ended well, 1 where one has
        not, 128 + the signal where SIGINT, SIGTERM, SIGHUP or SIGQUIT ended
        the job. No process is left.

    Raises
    ------
    ValueError, FileNotFoundError
        An address that is none, or no script. (The command line checks
        numbers and names.)
    ImportError
        PyTorch is missing.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"launch runs a Python file; {script!r} is "
                                "none. Name a script.")
    variables = {
        "MGPU_COMM": comm or engine or environment.comm(),
        "MGPU_BACKEND": backends.ALIASES.get(backend or "", backend),
        "MGPU_TIMEOUT": None if timeout is None else f"{timeout:g}"}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(
            max(1, environment.cpu_cores() // processes))
    job = Job(script, list(arguments), processes, max_restarts, machines,
              _address(rdzv, machines), start_timeout,
              {name: value for name, value in variables.items() if value})
    environment.package("torch", "mgpu launch, whose processes torchrun "
                        "starts,")
    agent = importlib.import_module("mgpu.distributed._torchrun")
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
    # The scripts may change their folder.
    job.folder = Path(log_dir or tempfile.mkdtemp(prefix="mgpu-launch-")
                      ).absolute()
    job.say(f"starts {job.processes} process{'es' * (job.processes > 1)}; "
            f"the output of each is in {job.folder}")
    status = 1
    try:
        status = agent.run(job)
    finally:
        for mark in job.unjoined:
            mark.unlink(missing_ok=True)
        if status:
            job.say(f"the output of each rank is kept in {job.folder}")
        elif log_dir is None:
            shutil.rmtree(job.folder, ignore_errors=True)
    return status


def _address(rdzv: str | None, machines: int) -> tuple[str, int] | None:
    if rdzv is None:
        if machines > 1:
            raise ValueError(
                "several machines require an address; received machines="
                f"{machines} without rdzv=. Pass all of them the same "
                "HOST:PORT, an address of one of them.")
        return None
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"rdzv must be HOST:PORT; received {rdzv!r}. For "
                         "example, 10.0.0.1:29400.")
    return host.strip("[]"), int(port)


@dataclass
class Job:
    """What runs. `variables`: what the processes have in their environment
    besides ours; `errors`: the file with the standard error of each rank of
    this machine; `unjoined`: the files that `init` removes, one a process."""

    script: str
    arguments: list[str]
    processes: int
    max_restarts: int
    machines: int
    rdzv: tuple[str, int] | None
    start_timeout: float
    variables: dict[str, str]
    folder: Path = Path()
    errors: dict[int, str] = field(default_factory=dict)
    unjoined: set[Path] = field(default_factory=set)

    @staticmethod
    def say(text: str) -> None:
        """A line of our own, on standard error."""
        print(f"mgpu: {text}", file=sys.stderr, flush=True)

    def joined(self) -> bool:
        """Whether all processes of this machine have called
        `mgpu.distributed.init`; if not, says so. All have ended well."""
        alone = [mark for mark in self.unjoined if mark.exists()]
        if alone:
            self.say(
                "the script has ended without mgpu.distributed.init(): "
                f"{len(alone)} processes have run it independently of each "
                "other. Call mgpu.distributed.init() before the first "
                "network.")
        return not alone


# -- which rank is the cause --------------------------------------------------

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
    found = [said for *_, said, _ in fates[:1 + _OTHERS]]
    if found:
        found[0] += fates[0][-1]
    if fates[len(found):]:
        found.append(f"and {len(fates) - len(found)} ranks more")
    return found


def _fate(rank: int, status: int | None, log: str
          ) -> tuple[int, int, str, str]:
    """0 where a rank failed by itself, 1 where it reports on others, 2 where
    it still ran; the rank; what became of it; and the end of its log."""
    if status is None:
        return 2, rank, f"rank {rank} still ran, and was ended", ""
    lines = _end_of(log)
    said, cause = f"rank {rank} ended with status {status}", 0
    if status < 0:
        said = f"rank {rank} was ended by {signal.Signals(-status).name}"
    elif lines and lines[0].startswith("Traceback"):
        error = next((x for x in lines[1:] if x[:1].strip()), "")
        said += f": {error}" * bool(error)
        cause = int(error.startswith(_REPORTS))
    # That of rank 0 has been shown.
    return cause, rank, said, "\n".join((f"; the end of {log}:", *lines)) \
        if lines and rank and not cause else ""


def _end_of(log: str) -> list[str]:
    """The last traceback in a log, else its last lines."""
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - _TAIL))
        text = file.read().decode(errors="replace")
    # torch writes the rank before each line of a traceback
    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", text.replace("\r", "\n"))
    _, begin, rest = text.rpartition("Traceback (most recent call last)")
    lines = (begin + rest).rstrip().splitlines()
    if begin and len(lines) > _LINES:
        # the error itself may have many lines
        lines[1:2 - _LINES] = ["  ..."]
    return lines if begin else lines[-5:]
