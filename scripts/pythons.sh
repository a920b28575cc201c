#!/usr/bin/env bash
# Tests on the other Pythons that pyproject.toml allows and this machine has: those that need no vLLM on 3.13, and on 3.12,
# which vLLM's own image has, the patches and one pair of servers (8 GB of .cache). `make floors` is on 3.10. A missing
# Python is reported and does not fail the run.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.cache/with-vllm/3.12
results=()
failed=0

run_on() { # a version, and the command that tests it
    local version="$1" began="$SECONDS" result=passed
    if ! scripts/python.sh "python${version%% *}" >/dev/null; then
        results+=("$version NOT RUN: neither PATH nor pyenv has a python${version%% *}")
        return
    fi
    if ! "${@:2}"; then
        failed=1
        result=FAILED
    fi
    results+=("$version $result in $((SECONDS - began)) s")
}

with_vllm() {
    # test_errors_of_ours.py is left out because `sys.settrace` in two threads deadlocks on 3.12.1.
    wait "$setup" && "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile \
        --no-loadscope-reorder -m "not more or server" --ignore=tests/patches/test_errors_of_ours.py tests/patches \
        tests/server/test_alike.py::test_tts_answers_alike_on_the_event_driven_loop
}

if scripts/python.sh python3.12 >/dev/null; then
    PYTHON=python3.12 bash scripts/setup.sh "$venv" & # minutes on one core, beside the other tests
    setup=$!
fi
run_on 3.13 bash scripts/without_vllm.sh python3.13 newest
run_on "3.12 with vLLM" with_vllm
printf 'pythons: %s\n' "${results[@]}"
exit "$failed"
