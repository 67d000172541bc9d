"""Kill a process while it saves, and damage files in every way:
``python studies/faults/kill_save.py [--kills 100] [--mutations 3000]``.

Prints, for each backend, how many checkpoints could not be read, how many
wrong values were loaded, and the peak of memory.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import mgpu  # noqa: E402
from conftest import BACKENDS  # noqa: E402
from faults.kill_save import LIMIT, kills, mutations  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=3000)
    options = parser.parse_args()
    failed = 0
    for name in BACKENDS:
        with tempfile.TemporaryDirectory() as folder, \
                mgpu.using_backend(name) as backend:
            begin = time.monotonic()
            unreadable, parts = kills(backend, options.kills, folder)
            print(f"{name}: {options.kills} kills while saving, {parts} left "
                  f"a part: {unreadable} unreadable "
                  f"({time.monotonic() - begin:.0f} s)", flush=True)
            begin = time.monotonic()
            loaded, crashed, grown = mutations(backend, options.mutations,
                                               folder)
            print(f"{name}: {options.mutations} mutated files: {loaded} "
                  f"wrong values, {crashed} crashes, peak of memory "
                  f"{grown / 2 ** 20:+.1f} MiB beside the file "
                  f"({time.monotonic() - begin:.0f} s)", flush=True)
            failed += unreadable + loaded + crashed + (grown > LIMIT)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
