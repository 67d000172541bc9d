#!/usr/bin/env bash
# All tests, in an environment of their own: bash scripts/test.sh [pytest's
# options]. See setup_env.sh for what it makes and for PYTHON.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

if [ -z "${MGPU_DATA:-}" ] && [ -d ../shared/data/fashion-mnist ]; then
    export MGPU_DATA=$(cd ../shared/data/fashion-mnist && pwd)
fi
if [ "$engines" = torch ] && [ -z "${MGPU_TEST_BACKENDS:-}" ]; then
    export MGPU_TEST_BACKENDS=torch
fi
say "testing on ${MGPU_TEST_BACKENDS:-$engines}"
# Three processes: on two cores one often waits for what its test has started.
# A file's tests share what they start; tests/conftest.py orders the files.
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
    --max-worker-restart 1 "$@"
