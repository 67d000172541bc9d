"""``python -m tests.gluon_io``: see the package."""
import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gluon_io.mutations import judge  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gluon_io")
    parser.add_argument("--mutations", type=int, default=3000)
    count = parser.parse_args().mutations
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
