#!/usr/bin/env bash
# The first look: LeNet on real digits and a short ResNet-18, on both engines
# and on one and two devices. Makes the environment .venv (setup_env.sh); the
# results go to the folder out/. Fails if LeNet's accuracy is under 0.8.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

case $engines in
*,*) backend=both ;;
*) backend=$engines; export MGPU_BACKEND=$engines ;;
esac
mkdir -p out
mgpu() { "$python" -m mgpu "$@"; }

mgpu doctor

# float64, so that the curves of the engines lie on each other: in float32
# training amplifies the last bits. Larger weights at the start than the
# book's 0.01, with which training stays on a plateau for 250 steps.
say "LeNet from scratch, 1,797 digits, 1 and 2 devices"
mgpu reproduce lenet --backend "$backend" --devices 1,2 --data digits \
    --epochs 12 --batch-size 64 --lr 0.0625 --init-scale 0.1 \
    --dtype float64 --json out/demo-lenet.json --plot out/demo-lenet.png

# A start and a rate at which 12 steps stay the same to 1e-8 on both engines;
# too few steps for the test accuracy to move.
say "ResNet-18 with Replicas and Trainer, 2 epochs of 96 digits"
mgpu reproduce resnet18 --backend "$backend" --devices 1,2 --data digits \
    --epochs 2 --batch-size 16 --lr 0.03125 --init-scale 0.05 --limit 96 \
    --dtype float64 --json out/demo-resnet18.json

"$python" - <<'END'
import json
import sys

with open("out/demo-lenet.json") as file:
    runs = json.load(file)["runs"]
low = [f"{run['test_acc'][-1]:.3f} on {run['backend']}, {run['devices']}"
       for run in runs if not run["test_acc"][-1] >= 0.8]
if low or not runs:
    sys.exit("error: LeNet's test accuracy should be 0.8 or more; it is "
             + "; ".join(low))
END

say "Look at $PWD/out/demo-lenet.png (accuracy, loss and speed)."
say "All numbers: out/demo-lenet.json, out/demo-resnet18.json"
say "To use mgpu in this shell: . .venv/bin/activate"
