#!/usr/bin/env bash
# The long proofs of docs/parity.md, in the environment of setup_env.sh:
#   bash studies/parity_full.sh [--data FOLDER] [--only lenet-float64] ...
# LeNet for 60 epochs and ResNet-18 for 100 steps in lock-step on 2 devices,
# float64 and float32, and 1 device against 2, 3, 4 and 8. About an hour on two
# cores.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup_env.sh"
data=digits
[ -d ../shared/data/fashion-mnist ] && data=../shared/data/fashion-mnist
exec "$python" studies/parity_full.py --data "$data" \
    --json docs/internals/parity_full.json "$@"
