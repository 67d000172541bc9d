# Sourced by demo.sh and test.sh: makes the environment .venv in the checkout,
# with the checkout's own code (an editable install), once. Later calls need
# no network, until a file that says what to install changes.
#
# Environment: PYTHON, the interpreter to use (default: python3, else the
# first of python3.11, python3.12, python3.10 that is there).
# Afterwards: the working directory is the checkout, $python is the
# environment's interpreter, $engines the engines that are in it.

say() { printf '%s\n' "==> $*"; }
fail() { printf '%s\n' "error: $*" >&2; exit 1; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python

# version_of COMMAND: "3.11" if that is a Python which mgpu runs on.
version_of() {
    "$1" -c 'import sys
if sys.version_info < (3, 10): sys.exit(1)
print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
    local candidate version other=
    if [ -n "${PYTHON:-}" ]; then
        version_of "$PYTHON" >/dev/null ||
            fail "PYTHON=$PYTHON is no Python 3.10 or newer; use 3.11."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.10; do
        version=$(version_of "$candidate") || continue
        case $version in
        3.10 | 3.11 | 3.12) echo "$candidate"; return ;;
        *) other=$candidate ;;
        esac
    done
    [ -n "$other" ] || fail "no Python 3.10, 3.11 or 3.12 here. Install" \
        "Python 3.11, or name one: PYTHON=/path/to/python3.11."
    echo "$other"
}

pip_install() {
    "$python" -m pip install -qq --disable-pip-version-check "$@"
}

# Whether there is an MXNet for this Python and platform: pip knows.
install_mxnet() {
    local log=.venv/mxnet.log
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
        return 1
    # Without --constraint, with which pip has other words for it.
    pip_install --no-deps --only-binary=:all: \
        "$(grep '^mxnet==' scripts/constraints.txt)" 2>"$log" && return
    grep -q "No matching distribution" "$log" && return 1
    cat "$log" >&2
    fail "MXNet could not be installed; pip's words are above."
}

install_all() {
    local base extras=cli,plot,torch,test
    base=$(find_python)
    say "making .venv with $("$base" --version) (some minutes, once)"
    rm -rf .venv
    "$base" -m venv .venv || fail "$base -m venv failed. On Debian and" \
        "Ubuntu: apt-get install python3-venv."
    # On Linux PyPI's torch brings gigabytes of CUDA; torch's own index has a
    # build for CPUs, which pip prefers ("+cpu" counts as newer). Without that
    # index, as behind a mirror, pip takes what it finds.
    local index=() cpu=https://download.pytorch.org/whl/cpu
    if [ "$(uname -s)" = Linux ] && "$python" -c "import urllib.request
urllib.request.urlopen('$cpu/torch/', timeout=5)" 2>/dev/null; then
        index=(--extra-index-url "$cpu")
    fi
    say "installing torch"
    pip_install --constraint scripts/constraints.txt --no-deps \
        ${index[@]+"${index[@]}"} torch ||
        fail "torch could not be installed; pip's words are above."
    engines=torch
    say "installing mxnet"
    if install_mxnet; then
        engines=mxnet,torch extras=$extras,mxnet
    fi
    say "installing mgpu and what it needs"
    pip_install --constraint scripts/constraints.txt \
        --editable ".[$extras]" ||
        fail "mgpu could not be installed; pip's words are above."
    printf '%s\n' "$engines" >.venv/engines
    printf '%s\n' "$stamp" >.venv/complete  # last: all of the above is there
}

stamp=$(cat scripts/constraints.txt scripts/setup_env.sh setup.cfg \
    pyproject.toml | cksum)
if [ "$(cat .venv/complete 2>/dev/null)" = "$stamp" ] &&
    [ "$("$python" -c 'import mgpu; print(mgpu.__path__[0])' 2>/dev/null)" \
        = "$PWD/mgpu" ]; then
    say "using .venv, which is complete (remove it to make it anew)"
    engines=$(cat .venv/engines)
else
    install_all
fi

if [ "$engines" = torch ]; then
    echo "******************************************************************"
    echo "  NO MXNET HERE: no MXNet 1.9.1 exists for $("$python" --version) on"
    echo "  $(uname -s) $(uname -m). What follows runs on PyTorch ALONE."
    echo "  MXNet wants Python 3.10, 3.11 or 3.12 on Linux (x86-64, ARM) or on"
    echo "  macOS (Intel)."
    echo "******************************************************************"
fi
