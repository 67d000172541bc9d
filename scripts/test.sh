#!/usr/bin/env bash
# All tests, in an environment of their own: bash scripts/test.sh [pytest's
# options]. See setup_env.sh for what it makes and for PYTHON.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

if [ -z "${MGPU_DATA:-}" ] && [ -d ../shared/data/fashion-mnist ]; then
    export MGPU_DATA=$(cd ../shared/data/fashion-mnist && pwd)
fi
say "all tests on ${MGPU_TEST_BACKENDS:-$backends}: about 14 minutes on two" \
    "cores (a case of each test function: .venv/bin/python -m pytest)"
exec "$python" -m pytest -m "" -n 3 "$@"
