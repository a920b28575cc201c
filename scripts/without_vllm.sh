#!/usr/bin/env bash
# To be sourced: the tests that need no vLLM, in environments of their own. `floors.sh` and `pythons.sh` run them.
# Source it in the repository's root, with `set -euo pipefail`.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10 PIP_TIMEOUT=60

# Not the whole of the development tools: some of them need newer versions than we do.
tools=('pytest>=9' 'pytest-asyncio>=1.5' 'pytest-benchmark>=5' 'pytest-timeout>=2.4')

# Left out: what runs vLLM, what stands on the benchmarks, which are no part of an installation, and what builds one.
leave_out=(tests/{patches,server,simulated_device,test_demo.py,test_parity_demo.py,test_replay.py,test_rigs.py,test_server_benchmark.py,test_packaging.py})

# install_into VENV [PIP ARGUMENTS]: this project, in place, and what its tests need.
install_into() {
    local venv="$1"
    shift
    "$venv/bin/python" -m pip install --quiet "$@" --editable '.[ab]' "${tools[@]}"
}

# test_with VENV [PYTEST ARGUMENTS]: the tests that need no vLLM.
test_with() {
    local venv="$1"
    shift
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "${leave_out[@]/#/--ignore=}" tests "$@"
}
