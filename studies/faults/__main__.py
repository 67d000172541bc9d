"""All cases: ``python -m studies.faults [N] [--backend B] [--comm C]
[--row R] [--restarts FILE] [--write]``; see scripts/faults.sh.

Runs each case N times (default 1), a kill at another step each time, and
prints for each row: runs, detected, hung, worst seconds. `--write` writes
docs/reliability.md, with the output of `studies.faults.restarts` in FILE. Exit
status 1 where a guarantee did not hold.
"""
import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from faults import driver
from faults.cases import reference
from studies.faults import cases, hosts

RESTARTS = {
    6: "the server or the scheduler of a KVStore is killed or stands still; "
       "all ranks raise WorkerLost, the job is started again and ends with "
       "the same bits, and no process stays",
    8: "a process is killed in a step drawn at random, and the job is started "
       "again; it resumes from a checkpoint and ends with the same bits"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


@dataclass
class Row:
    runs: int = 0
    right: int = 0
    hung: int = 0
    seconds: list = field(default_factory=list)
    wrong: list = field(default_factory=list)
    notes: set = field(default_factory=set)

    def add(self, name, found, seconds, ended):
        self.runs += 1
        self.right += not found
        self.hung += any(x.startswith("hung") for x in found)
        if seconds is not None:
            self.seconds.append((seconds, ended))
        self.wrong += [f"{name}: {x}" for x in found]

    def cells(self):
        return (str(self.runs), str(self.right), str(self.hung),
                *(f"{max(x):.1f}" for x in zip(*self.seconds)),
                *("-" for _ in range(0 if self.seconds else 2)))


def moved(case, number):
    """The same case, at another step."""
    if not number or case.row not in (1, 2, 3):
        return case
    step = 2 + number % 4
    return replace(case, faults=tuple(
        (rank, step, place, what) for rank, _, place, what in case.faults))


def measured(case, outcome):
    """Seconds from the fault to the last error, and to the end of the last
    process, where it ends them."""
    return (outcome.raised, outcome.seconds) if any(
        isinstance(e, str) for e in case.expect.values()) else (None, None)


def main():
    parser = argparse.ArgumentParser(prog="faults")
    parser.add_argument("runs", nargs="?", type=int, default=1)
    parser.add_argument("--backend", action="append")
    parser.add_argument("--comm", default="gloo")
    parser.add_argument("--row", action="append", type=int)
    parser.add_argument("--restarts", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    backends = given.backend or ["torch", "mxnet"]
    folder, rows = Path(tempfile.mkdtemp(prefix="faults-")), defaultdict(Row)
    begin = time.time()
    try:
        for backend in backends:
            everything(given, backend, folder / backend, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print()
    for row in sorted(rows):
        print(f"{row:3} {cases.ROWS[row][0]:60} "
              + " ".join(f"{x:>6}" for x in rows[row].cells()))
    print("    (runs, detected, hung, worst seconds to the error, to the end)")
    wrong = [x for row in rows.values() for x in row.wrong]
    # row 30 looks at the messages of all other runs
    print(f"{sum(rows[row].runs for row in rows if row != 30)} runs in "
          f"{time.time() - begin:.0f} s; {len(wrong)} complaints")
    if given.write:
        PAGE.write_text(page(rows, backends, given))
    return bool(wrong)


def everything(given, backend, folder, rows):
    references = {}
    for number in range(given.runs):
        for case in cases.CASES:
            if backend not in case.backends \
                    or given.row and case.row not in given.row:
                continue
            expected, place = None, folder / f"{len(rows)}-{time.time()}"
            key = case.size, case.options.get("devices", 1)
            if case.work == "train":
                if key not in references:
                    references[key] = reference(
                        backend, *key, given.comm, folder / f"{key}")
                expected = references[key]
            case = moved(case, number)
            if given.comm == "kvstore" and case.size > 2:
                case = replace(case, right=False)   # adds as parts arrive
            outcome = driver.run(case, backend, given.comm, place,
                                 hosts.PROGRAM)
            found = driver.problems(case, outcome, expected, late=True)
            report(rows, case.row, f"{backend}, {case.name}", found,
                   *measured(case, outcome))
        if not given.row or 9 in given.row:
            for name, found, seconds, real in hosts.run(
                    backend, folder / f"hosts-{number}"):
                rows[9].notes.add("two network namespaces" if real
                                  else "two jobs on loopback")
                if found and found[0].startswith("not done"):
                    print(f"{backend}, {name}: {found[0]}", flush=True)
                    continue
                report(rows, 9, f"{backend}, {name.replace('_', ' ')}",
                       found, seconds, seconds)


def report(rows, row, name, found, seconds, ended):
    rows[row].add(name, found, seconds, ended)
    rows[30].add(name, [x for x in found if x.startswith("poor message")],
                 None, None)
    print(f"{row:3} {name}: " + ("" if seconds is None else
                                 f"{seconds:.1f} s ")
          + ("as guaranteed" if not found else "; ".join(found)), flush=True)


def page(rows, backends, given):
    table = "\n".join(
        f"| {row} | {what} | {promise} | " + " | ".join(
            rows[row].cells() if row in rows else ("-",) * 5) + " |"
        for row, (what, promise) in cases.ROWS.items())
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "mxnet", "numpy"))
    wrong = [x for row in rows.values() for x in row.wrong]
    restarted = [json.loads(line) for line in
                 given.restarts.read_text().splitlines()] \
        if given.restarts else []
    wrong += [f"row {x['row']}, {x['job']}: {text}"
              for x in restarted for text in x["wrong"]]
    return Path(__file__).with_name("page.md").read_text().format(
        table=table, restarts="\n".join(
            f"| {x['row']} | {RESTARTS[x['row']]} | {x['job']} | {x['runs']} "
            f"| {x['right']} | {x['median seconds']:.1f} | "
            f"{x['worst seconds']:.1f} |" for x in restarted)
        or "| 6, 8 | not run | | | | | |", runs=given.runs,
        backends=" and ".join(backends),
        comm=given.comm, cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(), versions=versions,
        hosts=" and ".join(sorted(rows[9].notes)) or "not run",
        wrong="All runs were as guaranteed." if not wrong else
        "Not as guaranteed:\n\n" + "\n".join(f"- {x}" for x in wrong))


if __name__ == "__main__":
    sys.exit(main())
