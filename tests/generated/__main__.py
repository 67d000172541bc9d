"""``python -m tests.generated``: see the package."""
import argparse
import collections
import faulthandler
import sys
import time

from . import Case, Failure, draw, run
from .cases import legal, shrink


def outcome(case: Case) -> Failure | list[str]:
    """The failure, or what was refused."""
    faulthandler.dump_traceback_later(120, exit=True)   # a case that hangs
    try:
        return run(case)
    except Failure as failure:
        return failure
    finally:
        faulthandler.cancel_dump_traceback_later()


def report(engine: str, seed: int, case: Case, failure: Failure) -> None:
    def fails(less: Case) -> bool:
        if not legal(less):
            return False
        found = outcome(less)
        return isinstance(found, Failure) and found.kind == failure.kind
    small = shrink(case, fails)
    print(f"\n{engine}, seed {seed}: {outcome(small)}\n\n"
          "from tests.generated import Case, Step, run\n"
          f"run({small!r})\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated")
    parser.add_argument("--cases", type=int, default=300,
                        help="of all engines together")
    parser.add_argument("--engine", choices=["mxnet", "torch"],
                        action="append")
    parser.add_argument("--seed", type=int, help="of one case; or the first")
    options = parser.parse_args()
    engines = options.engine or ["mxnet", "torch"]
    first, count = options.seed or 0, options.cases // len(engines)
    if options.seed is not None and "--cases" not in " ".join(sys.argv):
        count = 1
    failed, refused, began = 0, collections.Counter(), time.time()
    for engine in engines:
        for seed in range(first, first + count):
            case = draw(engine, seed)
            if sys.stderr.isatty():     # to know which one hangs
                print(f"{engine} {seed}", end="\r", file=sys.stderr)
            found = outcome(case)
            if isinstance(found, Failure):
                failed += 1
                report(engine, seed, case, found)
            else:
                refused.update(found[:1])
    print(f"{count * len(engines)} cases, {failed} failed, "
          f"{sum(refused.values())} refused by name {dict(refused)}, "
          f"{time.time() - began:.0f} s")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
