#!/usr/bin/env bash
# The checks that run nothing: ruff, mypy and import-linter (their settings are
# in pyproject.toml and setup.cfg), and the strict build of the site into
# out/site. In the environment of setup_env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

status=0
# Each of the two slow ones has a core.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m mypy >"$log" 2>&1 &
say "ruff"
"$python" -m ruff check . || status=1
say "imports"
.venv/bin/lint-imports --no-logo || status=1
say "vocabulary"
"$python" scripts/words.py || status=1
say "the site, strictly"
# without its advertisement about MkDocs 2
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict || status=1
say "mypy"
wait $! || status=1
cat "$log"
exit $status
