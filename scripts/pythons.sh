#!/usr/bin/env bash
# Tests on the other Pythons that pyproject.toml allows and this machine has: those that need no vLLM on the oldest
# dependencies (`make floors`) and on 3.13, then on 3.12, which vLLM's own image has, the patches and one pair of servers
# (8 GB of .cache). A missing Python is reported and does not fail the run.
#
#     scripts/pythons.sh [COMMAND...]
#
# COMMAND runs beside what comes before the tests on 3.12, which waits as long as it computes. If it fails, so does this.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.cache/with-vllm/3.12
floors="$(scripts/python.sh python3.10 >/dev/null && echo 3.10 || echo 3.11)"
said="$(mktemp)"
results="$(mktemp)"
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$said" "$results"' EXIT

run_on() { # a version, and the command that tests it
    local version="$1" began="$SECONDS" result=passed
    if ! scripts/python.sh "python${version%% *}" >/dev/null; then
        result="NOT RUN: neither PATH nor pyenv has a python${version%% *}"
    elif ! "${@:2}"; then
        result=FAILED
    fi
    echo "pythons: $version $result in $((SECONDS - began)) s" >>"$results"
}

with_vllm() {
    # test_errors_of_ours.py is left out because `sys.settrace` in two threads deadlocks on 3.12.1.
    wait "$setup" && "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile \
        --no-loadscope-reorder -m "not more or server" --ignore=tests/patches/test_errors_of_ours.py tests/patches \
        tests/server/test_alike.py::test_tts_answers_alike_on_the_event_driven_loop
}

if scripts/python.sh python3.12 >/dev/null; then
    PYTHON=python3.12 nice -n 19 bash scripts/setup.sh "$venv" & # minutes on one core
    setup=$!
fi
{
    run_on "$floors floors" nice -n 5 bash scripts/without_vllm.sh "python$floors" floors
    run_on 3.13 nice -n 5 bash scripts/without_vllm.sh python3.13 newest
} >"$said" 2>&1 &
without_vllm=$!
(($# == 0)) || "$@" || exit
wait "$without_vllm"
cat "$said"
run_on "3.12 with vLLM" with_vllm
cat "$results"
! grep -q FAILED "$results"
