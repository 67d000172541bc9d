#!/usr/bin/env bash
# The wheel as a user has it: bash scripts/check_wheel.sh PYTHON BACKEND
# for example: bash scripts/check_wheel.sh python3.12 mxnet
# Builds the wheel, installs it with one backend and the command line into a new
# environment outside of the checkout, and runs `mgpu doctor`, README's script for
# both backends and commands that need other packages. BACKEND: mxnet or torch. On
# Linux PyPI's torch brings gigabytes of CUDA; with
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu it does not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# = 2 ] || { sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
base=$1 backend=$2 checkout=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
say() { printf '%s\n' "==> $*"; }

say "building the wheel, installing it with $backend on $("$base" --version)"
"$base" -m venv "$folder/venv"
python=$folder/venv/bin/python
rm -rf build    # of an earlier build, whose files would go into the wheel
"$python" -m pip wheel -qq --no-deps --wheel-dir "$folder" .
rm -rf build
"$python" -m pip install -qq --constraint scripts/constraints.txt \
    "$(echo "$folder"/*.whl)[$backend,cli]"

cd "$folder"
"$python" - "$checkout/README.md" "$backend" >first.py <<'END'
import re
import sys

text = open(sys.argv[1], encoding="utf-8").read()
script = re.search(r"```python\n(mgpu.set_backend.*?)```", text,
                   re.DOTALL).group(1)
print("import mgpu")
print(re.sub(r'set_backend\("\w+"\)', f'set_backend("{sys.argv[2]}")', script))
END
say "mgpu doctor"
venv/bin/mgpu doctor
say "README's script"
MGPU_BACKEND=$backend "$python" first.py
say "mgpu trace record and parity --report, whose packages the extra cli brings"
case $backend in torch) nets=torch_nets.py ;; *) nets=gluon_nets.py ;; esac
net=$checkout/examples/port/$nets:lenet
venv/bin/mgpu trace record "$net" --input 1x28x28 --classes 10 --steps 2 \
    -o a.trace
venv/bin/mgpu parity a.trace "$net" --report page.html
other=$([ "$backend" = torch ] && echo mxnet || echo torch)
"$python" -I -c "import importlib.util, mgpu, sys
assert mgpu.__file__.startswith(sys.prefix), mgpu.__file__
assert importlib.util.find_spec('$other') is None"
say "mgpu works from its wheel, with $backend only, on $("$python" --version)"
