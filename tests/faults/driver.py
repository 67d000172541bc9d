"""What goes wrong in a job, and what must come of it.

A `Case` says what happens to which rank in which step, and what each rank
then has to do. `run` starts the job, and `problems` compares: no hang beyond
the limit, no wrong number, no process left behind, the error of the right
class that names the right rank, and a message that says where and what to do.
"""
import contextlib
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import forked
from distributed import jobs

PROGRAM = Path(__file__).with_name("program.py")
#: seconds beyond a case's limit after which a rank counts as hung
PATIENCE = 20
#: what a message has as its remedy: a sentence that begins like this
REMEDY = re.compile(
    r"(^|[.;:] )(start|look|give|correct|call|use|make|lower|leave|set|shard|"
    r"check|let|pass)\b", re.IGNORECASE)
PLACE = re.compile(r"step \d|exchange \d|'mgpu\.\w|'the \w|:\d+ within|start "
                   r"within|connect within|WORLD_SIZE|RANK \d")


@dataclass(frozen=True)
class Case:
    """One way in which a job goes wrong.

    Attributes
    ----------
    row : int
        Of the table in docs/reliability.md.
    faults : tuple of (rank or "all", step, place, what)
        See `program.Rank`.
    expect : dict of int -> str or None
        The class of the error with which each rank ends; None: without an
        error; "-": it has no time to say.
    culprit : int or None
        The rank that the messages of the others name.
    limit : float
        Seconds from the fault until the last error is raised. Only
        scripts/faults.sh checks it (`problems` with `late`). In a test, whose
        machine has other work, a rank fails as hung after `PATIENCE` more.
    environment : dict of int -> dict
        What a rank finds otherwise in its environment; None: it is not
        started.
    right : bool
        Whether parameters follow the reference all the way.
    status : dict of int -> int
        Exit statuses that matter.
    """

    row: int
    name: str
    faults: tuple = ()
    expect: dict = field(default_factory=dict)
    culprit: int | None = None
    size: int = 2
    limit: float = 10.0
    work: str = "train"
    environment: dict = field(default_factory=dict)
    status: dict = field(default_factory=dict)
    right: bool = True
    backends: tuple = ("torch", "mxnet")
    options: dict = field(default_factory=dict)
    check: object = None    # a function of the Outcome: a list of errors
    signal: tuple = ()      # (rank or "all", number): sent from outside


PLAN = {"steps": 6, "devices": 1, "trainers": 1,
        "timeout": 5, "start_timeout": 20, "nonfinite": None,
        "batch_norm": True}


@dataclass
class Outcome:
    """What became of a run."""

    statuses: list
    ends: list          # what each rank wrote at its end, or None
    steps: list         # digests of each rank, by step
    begun: list
    texts: list
    hung: list
    left: list          # processes that were left behind
    seconds: float      # from the fault to the last end
    raised: float       # from the fault to the last error


def survivors(sessions):
    """Processes of these sessions that still run."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(OSError):      # it has ended
            if os.getsid(process.pid) in sessions \
                    and process.info["status"] not in ("zombie", "dead"):
                found.append(process.pid)
    return found


def read(folder, name, size):
    """What each rank has written under `name`; None: nothing."""
    return [json.loads(file.read_text()) if (
        file := Path(folder) / f"{name}-{rank}.json").exists() else None
        for rank in range(size)]


def run(case, backend, comm, folder, program=PROGRAM, patience=PATIENCE):
    """Start the job of `case`, and watch it to its end."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = {**PLAN, **case.options, "faults": case.faults, "work": case.work,
            "backend": backend, "comm": comm, "folder": str(folder)}
    port, processes, files = jobs.free_port(), {}, []
    with contextlib.ExitStack() as stack:
        begin = time.time()
        for rank in range(case.size):
            files.append(folder / f"rank-{rank}.txt")
            files[-1].touch()
            own = case.environment.get(rank, {})
            if own is None:
                continue
            if own.get("MASTER_PORT") in ("taken", "silent"):
                taken = stack.enter_context(socket.socket())
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                own = {**own, "MASTER_PORT": str(taken.getsockname()[1])}
                port = int(own["MASTER_PORT"])  # for the ranks after it too
            elif own.get("MASTER_PORT") == "closed":
                own = {**own, "MASTER_PORT": str(jobs.free_port())}
            with open(files[-1], "w") as out:
                processes[rank] = forked.Process(
                    ["-W", "ignore", program, json.dumps(plan)], out, folder,
                    jobs.environment(rank, case.size, port, **own))
        return _watched(case, folder, processes, files, begin, patience, plan)


def _watched(case, folder, processes, files, begin, patience, plan):
    stopped = {rank for rank, _, _, what in case.faults if what == "stop"}
    fault, signalled, ended = None, not case.signal, {}
    # before the fault: imports, and the steps until then
    latest = begin + 60 + plan["start_timeout"] + patience
    while len(ended) < len(processes.keys() - stopped):
        now = time.time()
        if fault is None:
            times = [t for t in read(folder, "fault", case.size) if t]
            if times:
                fault = max(times) if any(
                    f[0] == "all" for f in case.faults) else min(times)
                latest = fault + case.limit + patience
        if not signalled and any(read(folder, "steps", case.size)):
            signalled, fault = True, now
            latest = now + case.limit + patience
            for rank, process in processes.items():
                if case.signal[0] in ("all", rank):
                    process.send_signal(case.signal[1])
        for rank, process in processes.items():
            if rank not in ended and process.poll() is not None:
                ended[rank] = now
        if now > latest:
            break
        time.sleep(0.02)
    hung = [rank for rank in processes
            if rank not in ended and rank not in stopped]
    times = [t for t in read(folder, "fault", case.size) if t]
    if fault is None and times:
        fault = min(times)
    for rank in stopped | set(hung):
        if rank in processes and processes[rank].poll() is None:
            processes[rank].kill()
    for process in processes.values():
        process.wait()
    sessions = {p.pid for p in processes.values()}
    time.sleep(0.05)
    left = survivors(sessions)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    last = max((t for r, t in ended.items() if r not in stopped),
               default=time.time())
    since = fault if fault is not None else begin
    ends = read(folder, "end", case.size)
    return Outcome(
        [processes[r].returncode if r in processes else None
         for r in range(case.size)],
        ends, read(folder, "steps", case.size),
        read(folder, "begun", case.size),
        [file.read_text(errors="replace") for file in files], hung, left,
        max(0.0, last - since), max(
            (end["at"] - since for end in ends if end and end["error"]),
            default=0.0))


def problems(case, outcome, reference, late=False):
    """What is not as it must be, in words; `reference`: the digests of a
    training without a fault, from before the first step on. `late`: whether
    the limit itself is asked for, on a machine without other work."""
    found = [f"hung: rank {rank}" for rank in outcome.hung]
    found += [f"left behind: process {pid}" for pid in outcome.left]
    if late and not outcome.hung and outcome.raised > case.limit:
        found.append(f"late: {outcome.raised:.1f} s, limit {case.limit:g}")
    for rank, digests in enumerate(outcome.steps):
        if case.right and reference and digests is not None:
            if digests != reference[1:][:len(digests)]:
                found.append(f"wrong number: rank {rank}, its steps")
        end = outcome.ends[rank] or {}
        if case.work == "train" and end.get("digest") \
                and rank not in outcome.hung:
            known = [outcome.begun[rank], *(digests or ())]
            if end["digest"] != known[-1] and end["digest"] != (
                    # Ctrl-C ends a step that had begun.
                    reference[len(known)] if reference
                    and len(known) < len(reference)
                    and end["error"] == "KeyboardInterrupt" else None):
                found.append(f"wrong number: rank {rank}, after the error")
    for rank, expected in case.expect.items():
        found += _of_rank(case, rank, expected, outcome)
    for rank, status in case.status.items():
        if outcome.statuses[rank] != status:
            found.append(f"wrong status: {outcome.statuses[rank]} of rank "
                         f"{rank}, not {status}")
    if any(case.expect.values()) and not any(outcome.statuses):
        found.append("wrong status: the whole job says 0")
    if case.check is not None and not outcome.hung:
        found += case.check(outcome)
    return found


def _of_rank(case, rank, expected, outcome):
    end = outcome.ends[rank]
    if expected == "-":
        return []
    if end is None:
        return [f"wrong class: rank {rank} has not said how it ended: "
                + outcome.texts[rank][-300:]]
    if end["error"] not in (expected if isinstance(expected, tuple)
                            else (expected,)):
        return [f"wrong class: {end['error']} on rank {rank}, not "
                f"{expected}: {end.get('message')}"]
    found, message = [], end.get("message", "")
    if not end["error"] or not end["family"]:
        return []
    if case.culprit is not None and rank != case.culprit and not re.search(
            rf"\branks? (\d+, )*{case.culprit}\b", message):
        found.append(f"wrong culprit: rank {rank} does not name rank "
                     f"{case.culprit}: {message}")
    if case.size > 1 and rank != case.culprit and "rank" not in message:
        found.append(f"poor message: no rank: {message}")
    if rank != case.culprit and not PLACE.search(message):
        found.append(f"poor message: not where: {message}")
    if not REMEDY.search(message):
        found.append(f"poor message: no remedy: {message}")
    return found
