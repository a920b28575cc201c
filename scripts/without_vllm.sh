#!/usr/bin/env bash
# The tests that need no vLLM, in an environment of their own with nothing but what an installation brings:
#
#     scripts/without_vllm.sh python3.13            the newest versions of all dependencies
#     scripts/without_vllm.sh python3.11 floors     the oldest version of each that pyproject.toml allows
#
# Further arguments are passed to pytest.
#
# Needs that Python with pip, and pip's package source.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(scripts/python.sh "${1:?which Python, for example python3.13}")"
versions="${2:-newest}"
venv="$PWD/.cache/without-vllm/$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$versions"
constraints="$venv/constraints.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10 PIP_TIMEOUT=60

wanted="$(cat pyproject.toml scripts/without_vllm.sh | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" - "$versions" >"$constraints" <<'PYTHON'
import re
import sys
from pathlib import Path

project = Path("pyproject.toml").read_text().partition("[dependency-groups]")[0]
for name, floor in re.findall(r'"([a-z0-9-]+)>=([0-9.]+)(?:,<[0-9.]+)?"', project):
    if sys.argv[1] == "floors":
        print(f"{name}=={floor}")
PYTHON
    # Not all of the development tools, because some of them need newer versions than the floors.
    "$venv/bin/python" -m pip install --quiet --constraint "$constraints" --editable . \
        'hypothesis>=6.150' 'pytest>=9' 'pytest-asyncio>=1.5' 'pytest-timeout>=2.4' 'pytest-xdist>=3.6'
    printf '%s\n' "$wanted" >"$venv/stamp"
fi
"$venv/bin/python" --version
# Files that import the benchmarks, the simulated device or janus are left out: they are no part of an installation.
mapfile -t leave_out < <(grep -lrE '^(from|import) (benchmarks|omni_simulated_device|janus)' tests --include='test_*.py')
"$venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --ignore=tests/server --ignore=tests/patches \
    --ignore=tests/simulated_device "${leave_out[@]/#/--ignore=}" "${@:3}" -m "not more and not upstream and not server" tests
