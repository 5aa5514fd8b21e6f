#!/bin/sh
# Makes the virtual environment $1 and installs the project in it with the versions of constraints.txt.
# $PYTHON picks the interpreter. Each missing prerequisite is one line that says what to install.
set -eu

venv=$1

fail() {
    echo "install: $1" >&2
    exit 1
}

recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a program that can be run."
        recent "$PYTHON" || fail "PYTHON=$PYTHON is older than Python 3.11; name a newer one."
        python=$PYTHON
        return
    fi
    for python in python3 python3.13 python3.12 python3.11; do
        if command -v "$python" >/dev/null 2>&1 && recent "$python"; then
            return
        fi
    done
    fail "Python 3.11 or newer was not found; install it (Debian: apt install python3 python3-venv; macOS: brew install python@3.12) or set PYTHON=/path/to/python."
}

make_environment() {
    find_python
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || fail "$python cannot make virtual environments; install its venv module (Debian: apt install python3-venv)."
    echo "install: making $venv with $("$python" -c 'import platform; print("Python", platform.python_version())')"
    "$python" -m venv "$venv" || fail "the virtual environment $venv could not be made."
}

[ -x "$venv/bin/python" ] && [ -x "$venv/bin/pip" ] && recent "$venv/bin/python" || make_environment

log=$venv/install.log
echo "install: installing statemgr and its dependencies (a few minutes the first time; log: $log)"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e '.[demo,dev,docs]' \
    -c constraints.txt >"$log" 2>&1 </dev/null; then
    if grep -q -i -E 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Network is unreachable|Temporary failure in name resolution|\(from versions: none\)' "$log"; then
        fail "the Python package index could not be reached; check the network or pip's index and proxy settings (log: $log)."
    fi
    tail -n 5 "$log" >&2
    fail "pip could not install the dependencies (log: $log)."
fi
touch "$venv/.installed"
