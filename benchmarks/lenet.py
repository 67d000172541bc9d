"""LeNet of the text, K logical devices against one, in one run.

    python benchmarks/lenet.py [--backend mxnet|torch|both] [--devices 2]
        [--batch-size 256] [--rounds 9] [--steps 8]

The contenders take turns, a round each; the first round is not counted. A
device computes on one thread. Printed are the median rates and the ratio of
each round: the machine's own drift cancels in it.
"""
import argparse
import statistics
import time

import numpy as np

import mgpu
from mgpu import chapters


def contender(k, batch_size):
    """A function that takes `steps` steps on k devices and waits."""
    devices = [mgpu.cpu(i) for i in range(k)]
    start = mgpu.models.lenet_params(0.1)
    params = [mgpu.get_params(start, d) for d in devices]
    rng = np.random.default_rng(0)
    X = rng.random((batch_size, 1, 28, 28), dtype="float32")
    y = rng.integers(0, 10, batch_size).astype("int32")

    def run(steps):
        before = None
        for _ in range(steps):
            losses = chapters.lenet_step(X, y, params, devices, 0.01)
            for loss in before or ():      # read one step late, as `train`
                mgpu.to_numpy(loss)
            before = losses
        mgpu.synchronize(devices)
    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="both")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    names = ["mxnet", "torch"] if options.backend == "both" \
        else [options.backend]
    for name in names:
        with mgpu.using_backend(name):
            runs = [contender(k, options.batch_size)
                    for k in (1, options.devices)]
            seconds = []
            for _ in range(options.rounds + 1):
                lap = []
                for run in runs:
                    begin = time.perf_counter()
                    run(options.steps)
                    lap.append(time.perf_counter() - begin)
                seconds.append(lap)
        one, many = zip(*seconds[1:])
        images = options.batch_size * options.steps
        ratios = sorted(a / b for a, b in zip(one, many))
        print(f"{name}: {images / statistics.median(one):.0f} images/s on 1 "
              f"device, {images / statistics.median(many):.0f} on "
              f"{options.devices}: {statistics.median(ratios):.2f}x "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
