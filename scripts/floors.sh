#!/usr/bin/env bash
# The tests that need no vLLM, in an environment of their own with the oldest version of every dependency that
# pyproject.toml allows. Needs python3.11 with pip and pip's package source.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source scripts/without_vllm.sh
venv="$root/.cache/floors"
floors="$venv/floors.txt"
base_python="${PYTHON:-python3.11}"

wanted="$(cat pyproject.toml scripts/floors.sh scripts/without_vllm.sh | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]]; then
    rm -rf "$venv"
    "$base_python" -m venv "$venv"
    "$venv/bin/python" - >"$floors" <<'PYTHON'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
    for dependency in [*project["dependencies"], *project["optional-dependencies"]["ab"]]:
        name, floor = re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+)(?:,<[0-9.]+)?", dependency).groups()
        print(f"{name}=={floor}")
PYTHON
    echo "floors: $(tr '\n' ' ' <"$floors")"
    install_into "$venv" --constraint "$floors"
    printf '%s\n' "$wanted" >"$venv/stamp"
fi
test_with "$venv" "$@"
