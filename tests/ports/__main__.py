"""``python -m tests.ports``: see the package."""
import argparse
import collections
import json
import sys
import time

from . import equal, judge
from .mistakes import MISTAKES, kinds
from .nets import FAMILIES


def table(rows: list) -> None:
    """What was said of each kind."""
    by_kind = collections.defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(row)
    columns = ("pairs", "same", "refused", "layer", "right", "missing",
               "wrong")
    print(f"{'kind':42s}", *(f"{name:>8s}" for name in columns))
    total = collections.Counter()
    for kind, found in [*by_kind.items(), ("all", ())]:
        mine = collections.Counter(row.cause for row in found)
        mine.update(pairs=len(found), same=sum(
            row.verdict not in ("different", "refused") for row in found),
            refused=sum(row.verdict == "refused" for row in found),
            layer=sum(row.layer is True for row in found))
        total.update(mine)
        print(f"{kind:42s}", *(f"{(mine if found else total)[name]:8d}"
                               for name in columns))
    named = [row for row in rows if MISTAKES[row.kind].causes]
    placed = [row for row in rows if row.layer is not None]
    for what, right, of in (
            ("right layer", total["layer"], len(placed)),
            ("right cause first, of the kinds that have one", sum(
                row.cause == "right" for row in named), len(named)),
            ("wrong cause", total["wrong"], len(rows))):
        print(f"{what}: {right} of {of}, {100 * right / max(of, 1):.1f} %")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ports")
    parser.add_argument("--mistakes", action="store_true")
    parser.add_argument("--equal", type=int, metavar="N", default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--networks", default="all",
                        choices=["tuned", "other", "all"])
    parser.add_argument("--family", action="append", choices=list(FAMILIES))
    parser.add_argument("--kind", action="append", choices=list(MISTAKES),
                        metavar="NAME")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--verbose", action="store_true",
                        help="the whole answer for each wrong row")
    options = parser.parse_args()
    families = options.family or [
        name for name, (tuned, _) in FAMILIES.items()
        if options.networks in ("all", "tuned" if tuned else "other")]
    began, rows = time.time(), []
    if options.equal:
        rows = equal.run(range(options.seed, options.seed + options.equal),
                         families)
        equal.table(rows)
    if options.mistakes:
        for kind in kinds(options.kind or ()):
            for family in families:
                for seed in range(options.seed,
                                  options.seed + options.seeds):
                    row = judge.judge(kind, family, seed)
                    if row is not None:
                        rows.append(row)
        table(rows)
    for row in rows:
        if row.cause in ("missing", "wrong") or row.layer is False \
                or options.verbose:
            lines = row.text.splitlines()
            print(f"\n{row.kind} / {row.family} / {row.seed} "
                  f"({row.engines}): {row.verdict}; layer {row.layer}; "
                  f"cause {row.cause} {row.causes}")
            print("\n".join("    " + line[:300] for line in (
                lines if options.verbose else lines[:4])))
    print(f"\n{len(rows)} pairs, {time.time() - began:.0f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([row.to_dict() for row in rows], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
