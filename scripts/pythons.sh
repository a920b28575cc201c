#!/usr/bin/env bash
# The tests on the other Pythons that pyproject.toml allows, as far as this machine has them: on 3.10, 3.12 and 3.13 those
# that need no vLLM, and on 3.12, which vLLM's own image has, those of the patches and of a pair of servers as well (8 GB of
# .cache). A Python that is missing is reported and does not fail the run.
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
    # Left out are exceptions at any line: on 3.12.1 `sys.settrace` in two threads stops for ever.
    wait "$setup" && "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile \
        --no-loadscope-reorder -m "not more" tests/patches tests/server --ignore=tests/patches/test_errors_of_ours.py
}

if scripts/python.sh python3.12 >/dev/null; then
    PYTHON=python3.12 bash scripts/setup.sh "$venv" & # minutes on one core, beside the other tests
    setup=$!
fi
for version in 3.10 3.13 3.12; do
    run_on "$version" bash scripts/without_vllm.sh "python$version"
done
run_on "3.12 with vLLM" with_vllm
printf 'pythons: %s\n' "${results[@]}"
exit "$failed"
