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
# Two processes: one alone leaves half of two cores idle. A file's tests share
# what they start.
exec "$python" -m pytest -n 2 --dist loadfile "$@"
