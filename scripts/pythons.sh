#!/usr/bin/env bash
# The tests that need no vLLM, on every Python that pyproject.toml declares, each in an environment of its own.
#
#     scripts/pythons.sh [PYTEST ARGUMENTS]
#     PYTHONS="3.10 3.13" scripts/pythons.sh
#
# An interpreter is what `python3.X` starts, else one of pyenv's, else what uv has or can fetch. The last lines say what
# ran on which one, and what had none here. Fails if tests fail or no interpreter was found at all.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source scripts/without_vllm.sh
read -ra versions <<<"${PYTHONS:-3.10 3.11 3.12 3.13}"
folder="$root/.cache/pythons"

# is_python VERSION COMMAND: whether it starts and is that version; pyenv's stand-in for one not chosen does not start.
is_python() {
    [[ "$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$1" ]]
}

# from_uv VERSION: uv's own interpreter of that version, fetched if need be. uv itself comes from pip's package source.
from_uv() {
    local uv=uv
    if ! command -v uv >/dev/null; then
        uv="$folder/uv/bin/uv"
        if [[ ! -x "$uv" ]]; then
            "${PYTHON:-python3.11}" -m venv "$folder/uv" &&
                "$folder/uv/bin/python" -m pip install --quiet uv || return 1
        fi
    fi
    "$uv" python find --no-project "$1" || {
        timeout 300 "$uv" python install "$1" >&2 && "$uv" python find --no-project "$1"
    }
}

find_python() {
    local each
    for each in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python"$1"; do
        if is_python "$1" "$each"; then
            printf '%s\n' "$each"
            return
        fi
    done
    from_uv "$1" 2>"$folder/uv.log" | tail -n 1
}

mkdir -p "$folder"
ran=0 failed=0 said=()
for version in "${versions[@]}"; do
    if ! python="$(find_python "$version")" || ! is_python "$version" "$python"; then
        said+=("Python $version: not run, there is none on this machine and uv could not fetch one ($folder/uv.log)")
        continue
    fi
    venv="$folder/$version"
    wanted="$(cat pyproject.toml scripts/pythons.sh scripts/without_vllm.sh | sha256sum | cut -d' ' -f1)"
    if [[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]]; then
        echo "pythons: an environment for $("$python" --version)"
        rm -rf "$venv"
        "$python" -m venv "$venv"
        install_into "$venv"
        printf '%s\n' "$wanted" >"$venv/stamp"
    fi
    echo "pythons: $("$venv/bin/python" --version)"
    log="$folder/$version.log"
    if test_with "$venv" "$@" 2>&1 | tee "$log"; then
        ran=$((ran + 1))
        result="passed"
    else
        failed=$((failed + 1))
        result="FAILED"
    fi
    said+=("$("$venv/bin/python" --version): $result; $(tail -n 1 "$log")")
done
printf 'pythons: %s\n' "${said[@]}"
((failed == 0 && ran > 0))
