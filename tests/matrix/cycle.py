"""One life cycle of all patches in a fresh process: ``python -m tests.matrix.cycle`` prints what it found as JSON.

Install everything, undo everything: what stands in vLLM's and vLLM-Omni's modules and classes afterwards are the very
objects that stood there before.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

ALWAYS = ("vllm.v1.engine.core_client", "vllm_omni.engine.orchestrator", "vllm_omni.entrypoints.async_omni")
"""Looked at even where no patch has a seam."""

Slots = Mapping[tuple[str, str], Any]
"""What stands where: by module, and by name in it or by class and name in that."""


def slots() -> dict[tuple[str, str], Any]:
    """Everything in the modules of vLLM and vLLM-Omni that are imported, and in the classes that they define."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in {"vllm", "vllm_omni"}:
            continue
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, f"{attribute}.{inner}"): slot for inner, slot in vars(value).items()}
    return found


def changed(before: Slots, after: Slots) -> list[str]:
    """Where code does not stand as it did, and where something of ours stands that was not there."""
    nothing = object()
    moved = {key for key, value in before.items() if _is_code(value) and after.get(key, nothing) is not value}
    ours = {key for key, value in after.items() if key not in before and _is_ours(value)}
    return sorted(f"{module}:{name}" for module, name in moved | ours)


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def _is_ours(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    made_by = getattr(function, "_self_wrapper", function)  # wrapt's
    return str(getattr(made_by, "__module__", "")).startswith("omni_fastpath")


def cycle() -> dict[str, Any]:
    """Install and undo; what was there meanwhile and afterwards."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process
    from omni_fastpath.install import apply, modules_of, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.releases import vllm_omni_release, vllm_release

    for name in (*ALWAYS, *sorted(module for patch in PATCHES for module in modules_of(patch))):
        with contextlib.suppress(ImportError):  # a seam that moved is what the states say
            importlib.import_module(name)
    before = slots()
    resolved = config.resolve([], {patch.env: "1" for patch in PATCHES}, PATCHES)
    for process in (Process.SERVER, Process.STAGE):  # in one process, which no real one does
        apply(resolved, process, [patch for patch in PATCHES if process in patch.processes])
    states = {entry.patch.name: {"state": entry.state.value, "reason": entry.reason} for entry in LEDGER}
    meanwhile = changed(before, slots())
    for patch in reversed(PATCHES):
        uninstall(patch)
    return {
        "vllm_omni": str(vllm_omni_release()),
        "vllm": str(vllm_release()),
        "where": {name: sys.modules[name].__file__ for name in ("vllm_omni", "vllm", "omni_fastpath")},
        "states": states,
        "held": meanwhile,
        "left": changed(before, slots()),
    }


def main() -> None:
    """Print what `cycle` found as the last line."""
    with contextlib.redirect_stdout(sys.stderr):
        found = cycle()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
