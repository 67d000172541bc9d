"""``python -m tests.generated``: see the package."""
import argparse
import collections
import faulthandler
import sys
import time
import warnings

from . import Failure, Program, programs, run, search


def explore(backend: str, several: bool, count: int, first: int) -> bool:
    """Run programs and print what happened; whether there was a failure."""
    outcomes: dict[str, Failure | list[str]] = {}

    def kind(program: Program) -> str | None:
        """Of the failure; each program runs once."""
        text = repr(program)
        if text not in outcomes:
            # A program that hangs ends the process.
            faulthandler.dump_traceback_later(300, exit=True)
            try:
                outcomes[text] = run(program)
            except Failure as failure:
                outcomes[text] = failure.with_traceback(None)
            faulthandler.cancel_dump_traceback_later()
        return getattr(outcomes[text], "kind", None)
    strategy = programs(backend, several)
    search(strategy, lambda program: kind(program) and None, count, first)
    failed = collections.Counter(x.kind for x in outcomes.values()
                                 if isinstance(x, Failure))
    refused = collections.Counter(why for x in outcomes.values()
                                  if isinstance(x, list) for why in set(x))
    print(f"{backend}, {'two networks' if several else 'one network'}: "
          f"{len(outcomes)} programs, {sum(failed.values())} failed "
          f"{dict(failed)}, errors {dict(refused)}", flush=True)
    for name in failed:
        small = search(strategy, lambda program, name=name:
                       kind(program) == name, count, first)
        print(f"\n{outcomes[repr(small)]}\n\nfrom tests.generated import "
              f"Action, Network, Program, run\nrun({small!r})\n", flush=True)
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated")
    parser.add_argument("--cases", type=int, default=200,
                        help="programs of all kinds together")
    parser.add_argument("--backend", choices=["mxnet", "torch"],
                        action="append")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the first ten programs; the next ten have "
                        "the next one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")     # of what users do
    backends, began = options.backend or ["mxnet", "torch"], time.time()
    failed = [explore(backend, several, options.cases // (2 * len(backends)),
                      options.seed)
              for backend in backends for several in (False, True)]
    print(f"{time.time() - began:.0f} s")
    return any(failed)


if __name__ == "__main__":
    sys.exit(main())
