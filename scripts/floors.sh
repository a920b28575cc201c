#!/usr/bin/env bash
# The tests that need no vLLM, in an environment of their own with the oldest version of every dependency that
# pyproject.toml allows. Needs python3.11, or what PYTHON names, with pip and pip's package source.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
base_python="${PYTHON:-python3.11}"
venv="$PWD/.cache/floors-$("$base_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
floors="$venv/floors.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10 PIP_TIMEOUT=60

wanted="$(cat pyproject.toml scripts/floors.sh | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]]; then
    rm -rf "$venv"
    "$base_python" -m venv "$venv"
    # Not the whole of the development tools: some of them need newer versions than we do.
    "$venv/bin/python" - >"$floors" <<'PYTHON'
import re
from pathlib import Path

project = Path("pyproject.toml").read_text().partition("[dependency-groups]")[0]
for name, floor in re.findall(r'"([a-z0-9-]+)>=([0-9.]+)(?:,<[0-9.]+)?"', project):
    print(f"{name}=={floor}")
PYTHON
    echo "floors: $(tr '\n' ' ' <"$floors")"
    "$venv/bin/python" -m pip install --quiet --constraint "$floors" --editable '.[ab]' \
        'hypothesis>=6.150' 'pytest>=9' 'pytest-asyncio>=1.5' 'pytest-timeout>=2.4'
    printf '%s\n' "$wanted" >"$venv/stamp"
fi
# What stands on the benchmarks and the simulated device is left out: they are no part of an installation.
mapfile -t leave_out < <(grep -lrE '^(from|import) (benchmarks|omni_simulated_device)' tests --include='test_*.py')
"$venv/bin/python" -m pytest -q -p no:cacheprovider --ignore=tests/server --ignore=tests/patches \
    --ignore=tests/simulated_device "${leave_out[@]/#/--ignore=}" -m "not more and not upstream and not server" tests
