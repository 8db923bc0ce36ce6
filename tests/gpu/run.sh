#!/usr/bin/env bash
# Tests and measures the GPU code of a checkout: tests/gpu/run.sh WHEELHOUSE OUT (docs/development.md).
#
# No package index is needed: WHEELHOUSE has the wheels of tests/gpu/wheels.txt. They are installed in a temporary
# folder; the checkout is used in place. Each part has its own time limit, and a part that fails does not stop the
# others. Exit code: 0 if all parts passed or were skipped, 1 if a part failed, 2 for wrong arguments.
#
# PYTHON                        the interpreter, default python3
# TEST_ARGS, BENCH_ARGS         options of pytest and of bench.gpu, instead of these tests and "--seconds 225"
# TEST_SECONDS, BENCH_SECONDS   the limits, default 200 and 245
set -uo pipefail

if [ $# -ne 2 ] || [ ! -d "$1" ]; then
    echo "usage: ${BASH_SOURCE[0]} WHEELHOUSE OUT: a folder with wheels, and one for the results" >&2
    exit 2
fi
mkdir -p "$2" || exit 2
wheelhouse=$(realpath "$1") out=$(realpath "$2")
python=${PYTHON:-python3}
read -ra test_args <<< "${TEST_ARGS:-tests/conformance/test_devices.py tests/gpu}"
read -ra bench_args <<< "${BENCH_ARGS:---seconds 225}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

for name in workers repo clients; do # a copy of a checkout may have lost its links
    [ -d "shmserve/$name" ] || ln -sfn "../$name" "shmserve/$name"
done
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
# Worker processes inherit PYTHONPATH, so they find the checkout and the wheels too.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}:$work/packages"
export COLUMNS=200 PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PYTEST_TIMEOUT=100 # of one test, with pytest-timeout
summary=$out/summary.txt
failed=0
: > "$summary"

# part NAME SECONDS COMMAND...: runs a command, appends its output to NAME.log, and its outcome to the summary.
part() {
    local name=$1 limit=$2 began=$SECONDS outcome
    shift 2
    # SIGINT first: pytest and bench.gpu then stop their servers and write their results.
    timeout --signal INT --kill-after 20 "$limit" "$@" >> "$out/$name.log" 2>&1
    case $? in
        0) outcome=ok ;;
        124 | 137) outcome="FAILED: it exceeded $limit s"; failed=1 ;;
        *) outcome="FAILED: $name.log"; failed=1 ;;
    esac
    printf '%-11s %4d s  %s\n' "$name" $((SECONDS - began)) "$outcome" | tee -a "$summary"
}

install_wheels() {
    mkdir "$work/packages"
    shopt -s nullglob
    local wheels=("$wheelhouse"/*.whl)
    if [ ${#wheels[@]} -eq 0 ]; then
        echo 'no wheels in the wheelhouse'
    elif "$python" -m pip --version; then
        "$python" -m pip install --no-index --no-deps --no-warn-script-location --target "$work/packages" "${wheels[@]}"
    else # a wheel is a zip file, and none of these has files for other places
        local wheel
        for wheel in "${wheels[@]}"; do "$python" -m zipfile -e "$wheel" "$work/packages" || return; done
    fi
}

describe_machine() {
    "$python" -VV
    "$python" -m pip list
    uname -sr
    lscpu
    free -m
    if command -v nvidia-smi; then
        nvidia-smi && nvidia-smi -q
    else
        echo 'no nvidia-smi'
    fi
}

rm -f "$out"/{machine,install,tests,bench}.log "$out"/tests.xml "$out"/results.{json,md}
export -f install_wheels describe_machine
export python work wheelhouse
part install 60 bash -c install_wheels
part machine 20 bash -c describe_machine
part tests "${TEST_SECONDS:-200}" "$python" -m pytest -m gpu -v -ra -p no:cacheprovider --durations 15 \
    -o junit_family=xunit1 --junit-xml "$out/tests.xml" "${test_args[@]}"
part bench "${BENCH_SECONDS:-245}" "$python" -m bench.gpu --out "$out" "${bench_args[@]}"

{
    echo
    grep -E '^(FAILED|ERROR) ' "$out/tests.log"
    tail -n 1 "$out/tests.log"
    echo
    sed -n '/^|/p' "$out/results.md"
} >> "$summary" 2> "$work/none"
exit $failed
