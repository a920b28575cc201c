"""Beside others, on the real upstream: packages that wrap what we wrap, allow-lists, plain vLLM.

Each case in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import foreign
from tests.fakes.processes import isolated
from tests.fakes.registration import (
    ALL_ON,
    DEQUEUE,
    DRAIN,
    EVERYTHING,
    WAKEUP,
    asked,
    engine,
    holder,
    is_ours,
    ours,
    raw,
    state_files,
    states,
    yaml,
)

pytestmark = pytest.mark.upstream

WRAPPED = ("vllm_omni.engine.stage_pool", "StagePool.add_client")
"""Of ``budgeted_drain``, whose wrapper calls what it wraps."""

REPLACED = ("vllm_omni.engine.omni_engine_base", "OmniEngineBase.get_output_blocking_async")
"""Of ``final_output_wakeup``, whose wrapper does not."""

READER_SLOT = ("vllm.v1.engine.core_client", "AsyncMPClient._ensure_output_queue_task")
"""Of ``lean_processing``, in a module of vLLM's that vLLM without Omni has too."""


def load_plugins() -> None:
    """As a server does: vLLM's loader, by way of vLLM-Omni's."""
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()


def theirs(folder: Path, *slots: tuple[str, str], late: bool = False) -> Any:
    """Somebody else's package on this process's path, before everything."""
    made = foreign.package(folder / "theirs", "theirs", [":".join(slot) for slot in slots], late=late)
    sys.path.insert(0, str(made))
    return importlib.import_module("theirs")


def take_off() -> None:
    """Undo every patch, the last one first."""
    from omni_fastpath.install import uninstall
    from omni_fastpath.patches import PATCHES

    for patch in reversed(PATCHES):
        uninstall(patch)


def is_theirs(value: Any) -> bool:
    """Whether a slot holds their wrapper itself."""
    return type(value).__name__ == "function" and value.__code__.co_name == "theirs"


# ---- Somebody else's wrappers ----


@isolated("cold")
def test_a_wrapper_below_ours_stays(tmp_path: Path) -> None:
    """Theirs is there before a deploy YAML is read; ours calls it, and comes off exactly."""
    theirs(tmp_path, WRAPPED)
    load_plugins()
    found = raw(*WRAPPED)
    assert is_theirs(found)
    engine(yaml(tmp_path, **ALL_ON))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")
    assert raw(*WRAPPED).__wrapped__ is found
    take_off()
    assert raw(*WRAPPED) is found
    assert ours() == {"resolve_deploy_yaml"}


@isolated("cold")
def test_a_wrapper_that_we_would_go_past_is_not_silenced(tmp_path: Path) -> None:
    """Where ours does not call what it wraps, that patch is unsupported, and the others are on."""
    theirs(tmp_path, REPLACED)
    load_plugins()
    engine(yaml(tmp_path, **ALL_ON))
    assert asked() == {**dict.fromkeys(ALL_ON["fastpath"], "applied"), "final_output_wakeup": "unsupported"}
    assert ours() == {"resolve_deploy_yaml"} | DRAIN | DEQUEUE
    assert is_theirs(raw(*REPLACED))
    [shown] = state_files()
    reason = shown["patches"]["final_output_wakeup"]["reason"]
    assert reason.startswith(f"a seam moved: {':'.join(REPLACED)}: ")


@isolated("cold")
def test_a_wrapper_on_top_of_ours_keeps_ours(tmp_path: Path) -> None:
    """What stands on ours cannot be taken away from under it: the patch stays applied, with all its slots."""
    package = theirs(tmp_path, WRAPPED, REPLACED, late=True)
    load_plugins()
    engine(yaml(tmp_path, **ALL_ON))
    package.wrap_all()
    take_off()
    assert states()["budgeted_drain"] == states()["final_output_wakeup"] == "applied"
    for slot in (WRAPPED, REPLACED):
        assert is_theirs(raw(*slot))
        assert type(raw(*slot).__wrapped__).__name__ == "BoundFunctionWrapper"  # ours, as they found it
    assert ours() >= (DRAIN | WAKEUP) - {slot for _, slot in (WRAPPED, REPLACED)}


# ---- VLLM_PLUGINS ----


@pytest.mark.parametrize("listed", [True, False])
@isolated("cold")
def test_an_allow_list_of_plugins(tmp_path: Path, listed: bool) -> None:
    """``VLLM_PLUGINS`` with our name is as without the variable; without it nothing of ours is in the process."""
    from omni_fastpath.tools.status import status_report

    names = ["vllm_omni_register_models", *(["omni_fastpath"] if listed else [])]
    os.environ.update(VLLM_PLUGINS=",".join(names), OMNI_FASTPATH="1")
    theirs(tmp_path, WRAPPED)
    load_plugins()
    engine(yaml(tmp_path, **ALL_ON))
    assert asked() == (dict.fromkeys(ALL_ON["fastpath"], "applied") if listed else {})
    assert ours() == ({"resolve_deploy_yaml"} | EVERYTHING if listed else set())
    assert len(state_files()) == listed
    assert not is_theirs(getattr(raw(*WRAPPED), "__wrapped__", raw(*WRAPPED)))
    from omni_fastpath.patches import PATCHES

    found = status_report(os.environ, PATCHES)
    assert found["installation"]["excluded_by_vllm_plugins"] is not listed
    assert any(each["id"] == "plugins-leave-us-out" for each in found["findings"]) is not listed


# ---- vLLM without Omni ----


@isolated("cold", "serve", "model")
def test_plain_vllm_is_plain() -> None:
    """``vllm serve`` without ``--omni``, whatever our variables say: vLLM's plugins are loaded, and nothing is ours."""
    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_LEAN_PROCESSING="1")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for module in (READER_SLOT[0], "vllm.v1.serial_utils", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)
    owner, name = holder(*READER_SLOT)
    assert not is_ours(vars(owner)[name])
    assert not hasattr(owner, "get_output_nowait")
    assert (asked(), state_files()) == ({}, [])
    assert "vllm_omni.engine.orchestrator" not in sys.modules
