#!/usr/bin/env bash
# The first look: makes the environment .venv (setup_env.sh), then runs
# `mgpu demo`. Options go to it: bash scripts/demo.sh --full
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

"$python" -m mgpu doctor
"$python" -m mgpu demo "$@"
say "Look at $PWD/out/demo-lenet.png (accuracy, loss and speed)."
say "To use mgpu in this shell: . .venv/bin/activate"
