#!/usr/bin/env bash
# Prints the interpreter that a name such as python3.12 means: the one on PATH if it runs and can make environments,
# else the newest one that pyenv has (its python3.12 on PATH runs only where `pyenv global` or `local` names it).
# Exit status 1: there is none.
set -euo pipefail

name="${1:?which Python, for example python3.12}"
shopt -s nullglob
mapfile -t others < <(printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/${name#python}".*/bin/"$name" | sort -rV)
for candidate in "$name" "${others[@]}"; do
    if "$candidate" -c 'import ensurepip' >/dev/null 2>&1; then
        command -v "$candidate"
        exit 0
    fi
done
exit 1
