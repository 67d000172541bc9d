"""ResNet-18 of the text in float64, MXNet against PyTorch: lock-step and free.

    python scripts/parity_resnet18.py [--steps 10] [--batch-size 32]
        [--devices 1,2] [--data digits|fashion-mnist|FOLDER]

Prints, for each number of devices, the worst relative difference of every
stage in lock-step, and the difference of the losses of two free runs.
"""
import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import numpy as np  # noqa: E402

import lockstep  # noqa: E402
import mgpu  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--lr", type=float, default=2.0 ** -5)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--mode", default="lockstep,free")
    options = parser.parse_args()
    train_iter, _ = mgpu.datasets.load(options.data, options.batch_size,
                                       dtype="float64")
    batches = []
    while len(batches) < options.steps:
        batches += [b for b in train_iter
                    if len(b[0]) == options.batch_size]
    batches = batches[:options.steps]
    for k in map(int, options.devices.split(",")):
        def sides():
            return [lockstep.Side(
                name, mgpu.models.resnet18, k,
                options={"learning_rate": options.lr},
                init=mgpu.initializers.Xavier()) for name in ("mxnet",
                                                              "torch")]
        if "lockstep" in options.mode:
            a, b = sides()
            overall = {}
            for i, (X, y) in enumerate(batches):
                gaps, mean = lockstep.compare_step(a, b, X, y)
                for stage, (gap, _) in gaps.items():
                    overall[stage] = max(overall.get(stage, 0.0), gap)
                print(f"K={k} step {i + 1}: loss {mean:.4f} " + " ".join(
                    f"{s} {g:.1e} {w}" for s, (g, w) in gaps.items()),
                    flush=True)
            print(f"K={k} lock-step, worst of {len(batches)} steps: "
                  + ", ".join(f"{s} {g:.1e}" for s, g in overall.items()),
                  flush=True)
        if "free" in options.mode:
            means = [[float(side.step(X, y)[0].mean()) for X, y in batches]
                     for side in sides()]
            gap = np.abs(np.subtract(*means))
            print(f"K={k} free-running, {len(batches)} steps: loss "
                  f"{means[0][0]:.4f} -> {means[0][-1]:.4f}, largest "
                  f"difference of a loss {gap.max():.1e}", flush=True)


if __name__ == "__main__":
    main()
