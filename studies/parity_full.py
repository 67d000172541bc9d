"""The long proofs: whole trainings in lock-step, MXNet against PyTorch, and
one backend on several numbers of devices. See `parity_full.sh`."""
import argparse
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "port"))

import mgpu  # noqa: E402
from mgpu import parity  # noqa: E402


def lenet(engine):
    """Gluon's LeNet or its port, as examples/port has them."""
    with mgpu.using_backend(engine):
        module = __import__({"mxnet": "gluon_nets",
                             "torch": "torch_nets"}[engine])
        return module.lenet()


def resnet18(engine):
    with mgpu.using_backend(engine):
        return mgpu.models.resnet18()


def batches(data, size, steps, dtype, whole):
    """`steps` batches in the order of the training; ``whole``: no short
    ones."""
    train_iter, _ = mgpu.datasets.load(data, size, dtype=dtype)
    count = 0
    while True:
        for X, y in train_iter:
            if whole and len(y) < size:
                continue
            yield X, y
            count += 1
            if count == steps:
                return


# name: (network, batch size, steps, options)
PROOFS = {
    "lenet": (lenet, 256, 900, {
        "optimizer_params": {"learning_rate": 0.2}}, 0.01),
    "resnet18": (resnet18, 32, 100, {
        "optimizer_params": {"learning_rate": 2.0 ** -5}}, "xavier")}
COUNTS = (1, 2, 3, 4, 8)


def side(make, engine, init):
    rule = mgpu.initializers.Xavier() if init == "xavier" \
        else mgpu.initializers.Normal(init)
    return parity.Side(lambda: make(engine), init=rule)


def prove(name, dtype, devices, options):
    make, size, steps, settings, init = PROOFS[name]
    steps = options.steps or steps
    begin = time.time()

    def progress(done, of):
        if done % 10 == 0:
            print(f"\r{name} {dtype}: {done}/{of}", end="", flush=True,
                  file=sys.stderr)
    result = parity.compare(
        side(make, "mxnet", init), side(make, "torch", init),
        batches=batches(options.data, size, steps, dtype, name != "lenet"),
        steps=steps, devices=devices, dtype=dtype, progress=progress,
        **settings)
    losses = result.losses["a"]
    counts = {}
    for gap in result.gaps:
        counts[gap.status] = counts.get(gap.status, 0) + 1
    return {
        "proof": name, "dtype": dtype, "devices": devices, "steps": steps,
        "batch_size": size, "verdict": result.verdict,
        "first": str(result.first) if result.first else None,
        "worst": {stage: [g.relative, g.name, g.step, g.status]
                  for stage, g in result.worst.items()},
        "per_step": [max(g.relative for g in result.gaps if g.step == i + 1)
                     for i in range(0, steps)] if steps <= 100 else None,
        "median_of_steps": median_of_steps(result),
        "tensors": counts, "loss": [losses[0], losses[-1]],
        "notes": result.notes, "seconds": round(time.time() - begin)}


def median_of_steps(result):
    worst = {}
    for gap in result.gaps:
        worst[gap.step] = max(worst.get(gap.step, 0.0), gap.relative)
    values = sorted(worst.values())
    return values[len(values) // 2]


def invariance(name, engine, options):
    """The same step on several numbers of devices."""
    make, size, _, settings, init = PROOFS[name]
    begin, worst = time.time(), {}
    size = size if name == "lenet" else 16
    steps = options.steps or (10 if name == "lenet" else 2)
    for k in COUNTS[1:]:
        result = parity.compare(
            side(make, engine, init),
            side_on(side(make, engine, init), k),
            batches=batches(options.data, size, steps, "float64", True),
            steps=steps, batch_norm="sync", tolerance=1e-11, **settings)
        worst[k] = [max(g.relative for g in result.gaps), result.verdict,
                    str(max(result.gaps, key=lambda g: g.relative))]
        print(f"{name} on {engine}, {k} devices against 1: "
              f"{worst[k][0]:.1e}", flush=True)
    return {"proof": f"invariance {name}", "engine": engine, "worst": worst,
            "steps": steps, "batch_size": size,
            "seconds": round(time.time() - begin)}


def side_on(side, k):
    side.devices = k
    return side


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits",
                        help="digits, fashion-mnist or a folder")
    parser.add_argument("--steps", type=int, help="fewer, for a trial")
    parser.add_argument("--only", help="for example lenet-float64, "
                        "resnet18-float32, invariance")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    work = {f"{name}-{dtype}": (prove, name, dtype, 2, options)
            for name in PROOFS for dtype in ("float64", "float32")}
    work.update({f"invariance-{name}-{engine}":
                 (invariance, name, engine, options)
                 for name in PROOFS for engine in ("mxnet", "torch")})
    found = json.loads(options.json.read_text()) \
        if options.json and options.json.exists() else {}
    for key, (function, *arguments) in work.items():
        if options.only and not key.startswith(options.only):
            continue
        found[key] = function(*arguments)
        print("\n" + json.dumps({**found[key], "per_step": None}, indent=1),
              flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
