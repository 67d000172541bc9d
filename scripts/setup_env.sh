# Sourced by the other scripts: makes the environment .venv in the
# checkout, with the checkout's own code (an editable install), once. Later
# calls need no network, until a file that says what to install changes.
# Installs with uv where it is there, else with pip.
#
# Environment: PYTHON, the interpreter to use (default: python3, else the
# first of python3.11, python3.12, python3.10 that is there); INSTALLER, "pip"
# or a path of uv (default: uv, where it is there).
# Afterwards: the working directory is the checkout, $python is the
# environment's interpreter, $backends the backends that are in it.

say() { printf '%s\n' "==> $*"; }
fail() { printf '%s\n' "error: $*" >&2; exit 1; }

# Tests and examples start hundreds of processes: each would compile mgpu anew.
unset PYTHONDONTWRITEBYTECODE

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
            fail "PYTHON=$PYTHON is not a Python 3.10 or newer; use 3.11."
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
    [ -n "$other" ] || fail "found no Python 3.10, 3.11 or 3.12. Install" \
        "Python 3.11, or name one: PYTHON=/path/to/python3.11."
    echo "$other"
}

# Makes .venv, and sets $uv: the command, or empty where pip installs.
make_venv() {
    local base key value
    # Not of .venv, where that is active: it is made anew.
    base=$("$1" -c 'import sys; print(sys._base_executable)')
    uv=${INSTALLER:-$(command -v uv || :)}
    [ "$uv" != pip ] || uv=
    rm -rf .venv
    if [ -z "$uv" ]; then
        "$base" -m venv .venv || fail "$base -m venv failed. On Debian and" \
            "Ubuntu: apt-get install python3-venv."
        return
    fi
    # --seed: pip too, for whoever installs more into .venv
    "$uv" venv --quiet --seed --python "$base" .venv ||
        fail "uv venv failed; its message is above. INSTALLER=pip works" \
            "without uv."
    # uv does not read pip's settings: a mirror, a folder of wheels. Hand them
    # on, with pip's way to choose among several indexes.
    while IFS== read -r key value; do
        value=${value//\'/}
        case $key in
        *.index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
        *.extra-index-url) export UV_INDEX="${UV_INDEX:-$value}" ;;
        *.find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-${value// /,}}" ;;
        esac
    done < <("$python" -m pip config list 2>/dev/null)
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
}

install() {
    if [ -n "$uv" ]; then
        "$uv" pip install --quiet --compile-bytecode --python "$python" "$@"
    else
        "$python" -m pip install -qq --disable-pip-version-check "$@"
    fi
}

# Whether there is an MXNet for this Python and platform: the installer knows.
install_mxnet() {
    local log=.venv/mxnet.log
    "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' ||
        return 1
    # Without --constraint, with which pip has another message for it.
    install --no-deps --only-binary=:all: \
        "$(grep '^mxnet==' scripts/constraints.txt)" 2>"$log" && return
    grep -Eq "No matching distribution|no version of|no wheels with a match" \
        "$log" && return 1
    cat "$log" >&2
    fail "MXNet could not be installed; the installer's message is above."
}

install_all() {
    local base extras=cli,plot,torch,test
    base=$(find_python)
    say "making .venv with $("$base" --version) (some minutes, once)"
    make_venv "$base"
    # On Linux PyPI's torch brings gigabytes of CUDA; torch's own index has a
    # build for CPUs, which is preferred ("+cpu" counts as newer). Without that
    # index, as behind a mirror, the installer takes what it finds.
    local index=() cpu=https://download.pytorch.org/whl/cpu
    if [ "$(uname -s)" = Linux ] && "$python" -c "import urllib.request
urllib.request.urlopen('$cpu/torch/', timeout=5)" 2>/dev/null; then
        index=(--extra-index-url "$cpu")
    fi
    say "installing torch"
    install --constraint scripts/constraints.txt --no-deps \
        ${index[@]+"${index[@]}"} torch ||
        fail "torch could not be installed; the installer's message is above."
    backends=torch
    say "installing mxnet"
    if install_mxnet; then
        backends=mxnet,torch extras=$extras,mxnet
    fi
    say "installing mgpu and what it needs"
    install --constraint scripts/constraints.txt --editable ".[$extras]" ||
        fail "mgpu could not be installed; the installer's message is above."
    printf '%s\n' "$backends" >.venv/backends
    printf '%s\n' "$stamp" >.venv/complete  # last: all of the above is there
}

stamp=$(cat scripts/constraints.txt scripts/setup_env.sh setup.cfg | cksum)
# Where the environment finds mgpu: elsewhere if the checkout was moved. It is
# not imported, for a mistake in its code needs no new environment.
found=$("$python" -I -c 'from importlib.util import find_spec
print(find_spec("mgpu").submodule_search_locations[0])' 2>/dev/null || :)
if [ "$(cat .venv/complete 2>/dev/null)" = "$stamp" ] &&
    [ "$found" = "$PWD/mgpu" ]; then
    say "using .venv, which is complete (remove it to make it anew)"
    backends=$(cat .venv/backends)
else
    install_all
fi

if [ "$backends" = torch ]; then
    echo "******************************************************************"
    echo "  NO MXNET HERE: no MXNet 1.9.1 exists for $("$python" --version) on"
    echo "  $(uname -s) $(uname -m). What follows runs on PyTorch ONLY."
    echo "  MXNet needs Python 3.10, 3.11 or 3.12 on Linux (x86-64, ARM) or on"
    echo "  macOS (Intel)."
    echo "******************************************************************"
fi
