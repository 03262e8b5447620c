#!/usr/bin/env bash
# Set up (once), then run: a local demo swarm, the tests, a benchmark or any opendiloco command.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$root/.venv
python=$venv/bin/python
stamp=$venv/installed.stamp

usage() {
    cat <<'END'
./launch.sh [--workers N] [--rounds N] [--out DIR] [options of every worker]
                                a local swarm that trains on the embedded corpus
                                (default: 3 workers, 8 outer rounds, runs/demo);
                                it replaces what an earlier one left in DIR.
                                Of every worker: --set SECTION.KEY=VALUE,
                                --peer PEER.toml, --run-id NAME, --debug
./launch.sh test [pytest args]  format, lint, types and all tests; with arguments only pytest
./launch.sh bench NAME [args]   one benchmark; without NAME: their names
./launch.sh COMMAND ...         opendiloco COMMAND: train, bootstrap, simulate, eval, generate, export, settings, version

The first call makes .venv and installs the project there, which takes some minutes.
PYTHON=/path/to/python chooses the interpreter.
END
}

fail() { # fail CODE LINE
    printf 'launch.sh: %s\n' "$2" >&2
    exit "$1"
}

is_usable() { # is_usable INTERPRETER: has the right version and can make environments
    command -v -- "$1" >/dev/null && "$1" -c '
import sys, ensurepip, venv
sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if is_usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail 1 "no Python 3.11, 3.12 or 3.13 with the venv module found: install one (Debian, Ubuntu: apt install python3 python3-venv) or name it with PYTHON=/path/to/python"
}

wanted_stamp() {
    printf '%s\n' "$root"
    cat -- "$root/pyproject.toml"
}

is_installed() {
    [[ -x $python && -f $stamp ]] && wanted_stamp | cmp -s -- - "$stamp"
}

install() {
    local base
    if ! is_usable "$python" || ! "$python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python)
        "$base" -m venv --clear -- "$venv" || fail 1 "cannot make $venv: see the lines above"
    fi
    printf 'launch.sh: installing opendiloco into %s (1.9 GB): some minutes without a word, the first time only\n' "$venv" >&2
    "$python" -m pip install --quiet --no-input --disable-pip-version-check --editable "${root}[dev]" >&2 ||
        fail 1 "the installation failed: see the lines above, check the network, then run the same command again"
    wanted_stamp >"$stamp"
}

set_up() {
    is_installed && return
    if ! command -v flock >/dev/null; then
        install
        return
    fi
    exec 9<"$root" # a second launch.sh waits here for the installation of the first
    flock 9
    is_installed || install
    exec 9<&-
}

run_tests() {
    cd -- "$root"
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile everything again
    if (($# == 0)); then
        "$python" -m ruff format --check .
        "$python" -m ruff check .
        "$python" -m mypy
        "$python" -m pytest -n 2 tests/unit
        "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not timing' tests/faults tests/swarm
        set -- -n 2 --dist loadfile --no-loadscope-reorder -m timing tests/faults tests/swarm
    fi
    exec "$python" -m pytest "$@"
}

run_benchmark() {
    local script=$root/benchmarks/bench_${1:-}.py
    if [[ ! -f $script ]]; then
        local file names=''
        for file in "$root"/benchmarks/bench_*.py; do
            [[ -e $file ]] || continue
            file=${file##*/bench_}
            names+=" ${file%.py}"
        done
        fail 64 "no benchmark ${1:-named}: ./launch.sh bench NAME, where NAME is one of:$names"
    fi
    set_up
    shift
    exec "$python" "$script" "$@"
}

case ${1:-} in
    -h | --help)
        usage
        ;;
    test)
        set_up
        run_tests "${@:2}"
        ;;
    bench)
        run_benchmark "${@:2}"
        ;;
    '' | -*)
        set_up
        exec "$python" -P -m opendiloco.demo "$@"
        ;;
    *)
        set_up
        exec "$python" -P -m opendiloco "$@"
        ;;
esac
