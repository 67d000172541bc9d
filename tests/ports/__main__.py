"""``python -m tests.ports COUNT``: see the package."""
import argparse
import collections

from mgpu.parity.result import FLOAT32

from .nets import FAMILIES
from .pairs import draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ports")
    parser.add_argument("count", type=int, help="of pairs")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    verdicts: collections.Counter[str] = collections.Counter()
    names = list(FAMILIES)
    for seed in range(options.seed, options.seed + options.count):
        family = names[seed % len(names)]
        p, done = draw(family, seed)
        result, _ = p.compare()
        verdicts[result.verdict] += 1
        if result.verdict not in ("same", FLOAT32):
            print(family, seed, p.backends, p.options, done, result, sep="\n")
    print(*(f"{n} {verdict}" for verdict, n in verdicts.items()), sep=", ")
    return int(bool(verdicts.keys() - {"same", FLOAT32}))


if __name__ == "__main__":
    raise SystemExit(main())
