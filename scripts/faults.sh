#!/usr/bin/env bash
# Everything that can go wrong in a job of several processes, N times each:
# bash scripts/faults.sh [N, default 1] [--backend torch] [--row 9].
# Prints runs, detected, hung and worst seconds for each row, and writes
# docs/reliability.md where no row or backend was picked. Row 9 uses two
# network namespaces as root, else loopback. See setup_env.sh for PYTHON.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

write=yes
for word in "$@"; do
    case $word in --*) write= ;; esac
done
say "faults on $backends"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD:$PWD/tests
status=0
if [ -n "$write" ]; then
    restarts=$(mktemp)
    trap 'rm -f "$restarts"' EXIT
    "$python" -m studies.faults.restarts "${1:-1}" | tee "$restarts" || status=$?
    "$python" -m studies.faults "$@" --restarts "$restarts" --write || status=$?
else
    "$python" -m studies.faults "$@" || status=$?
fi
exit $status
