#!/usr/bin/env bash
# The tests on the other Pythons that pyproject.toml allows, as far as this machine has them: without vLLM on 3.10 and 3.13,
# and with it on 3.12, which vLLM's own image has (three minutes and 8 GB of .cache the first time). A Python that is
# missing is reported and does not fail the run.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=()
failed=0

run_on() { # a version, and the command that tests it
    local version="$1" began="$SECONDS" result=passed
    if ! scripts/python.sh "python$version" >/dev/null; then
        results+=("$version NOT RUN: neither PATH nor pyenv has a python$version")
        return
    fi
    if ! "${@:2}"; then
        failed=1
        result=FAILED
    fi
    results+=("$version $result in $((SECONDS - began)) s")
}

with_vllm() {
    PYTHON=python3.12 bash scripts/setup.sh .cache/with-vllm/3.12 &&
        .cache/with-vllm/3.12/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder \
            -m "not more and not server or every_release" tests
}

run_on 3.10 bash scripts/without_vllm.sh python3.10
run_on 3.13 bash scripts/without_vllm.sh python3.13
run_on 3.12 with_vllm
printf 'pythons: %s\n' "${results[@]}"
exit "$failed"
