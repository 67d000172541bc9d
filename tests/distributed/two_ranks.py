"""What two processes do, all in one job: ``two_ranks.py BACKEND FOLDER``.
Each part writes what came of it to ``PART-RANK.json``. In the end rank 1 stops
in the middle of a pass."""
import json
import sys
from pathlib import Path

import mgpu
from distributed import copies, differing, logs, reduction, sync_faults


def main(backend, folder):
    mgpu.set_backend(backend)
    mgpu.distributed.init(timeout=30)
    rank = mgpu.distributed.rank()
    for part in (copies, reduction, logs, differing, sync_faults):
        name = part.__name__.rpartition(".")[2]
        (Path(folder) / f"{name}-{rank}.json").write_text(
            json.dumps(part.report(rank)))
    sync_faults.end_in_a_pass(rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
