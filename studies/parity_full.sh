#!/usr/bin/env bash
# bash studies/parity_full.sh [--data digits|fashion-mnist|FOLDER] [--steps N]
#     [--only lenet-float64|resnet18-float32|invariance|...] [--json FILE]
# The long proofs, in the environment of setup_env.sh; about an hour on two
# cores. LeNet for 60 epochs and ResNet-18 for 100 steps in lock-step (both
# backends get the same state before each step) on 2 devices, in float64 and
# float32, and 1 device against 2, 3, 4 and 8. Adds to
# studies/results/parity_full.json.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*)    # needs no environment
    sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}"
    exit ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup_env.sh"
data=digits
[ -d ../shared/data/fashion-mnist ] && data=../shared/data/fashion-mnist
exec "$python" studies/parity_full.py --data "$data" \
    --json studies/results/parity_full.json "$@"
