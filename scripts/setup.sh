#!/bin/sh
# Makes .venv ready to train and test on a CPU: torch, the locked packages, this project.
#
# A second call is instant: the stamp, written last, holds the digest of what .venv was made from.
# Knobs: PYTHON names the interpreter to build with. pip reads its own settings as it always does.
set -eu
cd "$(dirname "$0")/.."

LOCK=requirements/cpu.lock
TORCH=$(sed -n 's/^torch==//p' "$LOCK")
STAMP=.venv/ratchet-setup
# -qq keeps errors and drops pip's warnings, which are many and none of them ours.
PIP=".venv/bin/python -m pip --disable-pip-version-check install -qq"

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

digest() { cat "$LOCK" pyproject.toml | "$1" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

is_ready() {
    [ -f "$STAMP" ] && [ -x .venv/bin/python ] && [ "$(cat "$STAMP")" = "$(digest .venv/bin/python)" ]
}

make_venv() {
    .venv/bin/python -m pip --version >/dev/null 2>&1 && return
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv ||
        die "$python cannot make a virtual environment; on Debian, install python3-venv"
}

# Before the rest, so that no other package's range chooses a torch for us.
install_torch() {
    say "installing torch $TORCH"
    if $PIP --no-deps "torch==$TORCH+cpu" 2>/dev/null; then
        say "took the CPU build, torch $TORCH+cpu"
        return
    fi
    $PIP "torch==$TORCH" || die "torch $TORCH could not be installed; pip's reason is above"
    say "pip finds no torch $TORCH+cpu (PIP_EXTRA_INDEX_URL can name an index), so took the default build"
}

# --no-deps: the lock is the whole set. It leaves out, on purpose, what requirements/left-out.txt names.
install_lock() {
    say "installing $(grep -c '^[^#]' "$LOCK") packages at the versions of $LOCK (minutes, the first time)"
    $PIP --no-deps -r "$LOCK" || die "$LOCK could not be installed; pip's reason is above"
}

install_project() {
    say "installing this project, editable"
    $PIP --no-deps --no-build-isolation -e . || die "the project could not be installed; pip's reason is above"
}

mention_gpu() {
    if nvidia-smi >/dev/null 2>&1; then
        say "this machine has an NVIDIA GPU; make uses the CPU build, the GPU extra is: pip install -e '.[gpu,s3]'"
    fi
}

is_ready && exit 0
started=$(date +%s)
mention_gpu
make_venv
rm -f "$STAMP"
install_torch
install_lock
install_project
digest .venv/bin/python >"$STAMP"
say "done in $(($(date +%s) - started)) seconds"
