"""Rows 6 and 8, many times: ``python -m studies.faults.restarts [N]`` runs
each job of tests/faults/restarts.py N times (default 20) and prints a line of
JSON for each backend and communication backend, which ``python -m
studies.faults --restarts FILE`` puts into its page.
"""
import json
import random
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from faults.restarts import killed, without_roles

COMBINATIONS = (("torch", "torch"), ("mxnet", "torch"), ("mxnet", "kvstore"))


def main(runs=20):
    draw, status = random.Random(0), 0
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    jobs = [(8, ", ".join(x), partial(killed, *x, runs, folder / "-".join(x)))
            for x in COMBINATIONS]
    jobs.append((6, "mxnet, kvstore",
                 partial(without_roles, runs, folder / "roles")))
    try:
        for row, name, job in jobs:
            found = job(draw)
            seconds = found.pop("seconds")
            status |= found["right"] != runs
            print(json.dumps({
                "row": row, "job": name, "runs": runs, **found,
                "median seconds": float(np.median(seconds or [np.nan])),
                "worst seconds": max(seconds, default=float("nan"))}),
                flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
