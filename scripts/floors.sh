#!/usr/bin/env bash
# The tests that need no vLLM, in an environment of their own with the oldest version of every dependency that
# pyproject.toml allows. Needs python3.11 with pip and pip's package source.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/.cache/floors"
python="$venv/bin/python"
floors="$venv/floors.txt"
base_python="${PYTHON:-python3.11}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

wanted="$(cat pyproject.toml scripts/floors.sh | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]]; then
    rm -rf "$venv"
    "$base_python" -m venv "$venv"
    "$python" - >"$floors" <<'END'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
    for dependency in [*project["dependencies"], *project["optional-dependencies"]["compare"]]:
        name, floor = re.fullmatch(r"([a-z-]+)>=([0-9.]+)(?:,<[0-9.]+)?", dependency).groups()
        print(f"{name}=={floor}")
END
    echo "floors: $(tr '\n' ' ' <"$floors")"
    # Not the whole of the development tools: some of them need newer versions than we do.
    "$python" -m pip install --quiet --constraint "$floors" --editable '.[compare]' \
        'pytest>=9' 'pytest-asyncio>=1.5' 'pytest-benchmark>=5' 'pytest-timeout>=2.4'
    printf '%s\n' "$wanted" >"$venv/stamp"
fi
# Left out: what runs vLLM, what stands on the benchmarks, which are no part of an installation, and what builds one.
leave_out=(tests/{patches,server,simulated_device,test_demo.py,test_replay.py,test_rigs.py,test_packaging.py})
"$python" -m pytest -q -p no:cacheprovider "${leave_out[@]/#/--ignore=}" tests "$@"
