"""``python -m tests.gluon_io``: see the package."""
import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gluon_io.cases import CASES  # noqa: E402
from gluon_io.grid import FILE, by_mxnet  # noqa: E402
from gluon_io.mutations import judge  # noqa: E402


def write_grid() -> None:
    """What MXNet computes, for all cases."""
    import mgpu
    os.environ["MXNET_SUBGRAPH_VERBOSE"] = "0"      # a line for each case
    mgpu.set_backend("mxnet")
    lines = [f"{json.dumps(key)}: {json.dumps(by_mxnet(case))}"
             for key, case in sorted(CASES.items())]
    FILE.write_text("{" + ",\n".join(lines) + "}\n")
    print(f"{len(lines)} cases, {FILE.stat().st_size / 1e3:.0f} kB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gluon_io")
    parser.add_argument("--mutations", type=int, default=3000)
    parser.add_argument("--grid", action="store_true")
    given = parser.parse_args()
    if given.grid:
        write_grid()
        return 0
    count = given.mutations
    start = time.perf_counter()
    refused, read, memory = judge(count)
    wrong = [case for case in read if case[2] != case[3]]
    for name, number, ours, theirs in wrong:
        print(f"{name}, mutation {number}: read as {ours}, MXNet: {theirs}")
    print(f"{count} mutations: {refused} refused, {len(read) - len(wrong)} "
          f"read as MXNet reads them, {len(wrong)} not; memory at most "
          f"{memory:.1f} of a file and 16 kB; "
          f"{time.perf_counter() - start:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
