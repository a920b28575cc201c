"""Beside others, on the real upstream: a package that wraps what we wrap, allow-lists, plain vLLM.

Each case in a process of its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import isolated
from tests.fakes.registration import (
    ALL_ON,
    NOTHING,
    ON,
    asked,
    engine,
    holder,
    is_ours,
    ours,
    raw,
    state_files,
    take_off,
    written,
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


def wrap(key: tuple[str, str]) -> Any:
    """Somebody else's wrapper on a function, made as most are made."""
    function = raw(key)

    @functools.wraps(function)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(*holder(key), theirs)
    return theirs


@isolated("cold")
def test_somebody_elses_wrappers_stay(tmp_path: Path) -> None:
    """Ours calls theirs and comes off exactly; a patch whose wrapper would go past theirs is unsupported."""
    below, gone_past = wrap(WRAPPED), wrap(REPLACED)
    load_plugins()
    engine(yaml(tmp_path, **ALL_ON))
    assert asked() == {**ON, "final_output_wakeup": "unsupported"}
    assert ours() == NOTHING | written("budgeted_drain", "nonblocking_dequeue")
    assert (raw(WRAPPED).__wrapped__, raw(REPLACED)) == (below, gone_past)
    [shown] = state_files()
    reason = shown["patches"]["final_output_wakeup"]["reason"]
    assert reason.startswith(f"a seam has changed: {':'.join(REPLACED)}: ")
    take_off()
    assert (raw(WRAPPED), ours()) == (below, NOTHING)


@pytest.mark.parametrize("listed", [True, False])
@isolated("cold")
def test_an_allow_list_of_plugins(tmp_path: Path, listed: bool) -> None:
    """``VLLM_PLUGINS`` with our name is as without the variable; without it nothing of ours is in the process."""
    names = ["vllm_omni_register_models", *(["omni_fastpath"] if listed else [])]
    os.environ.update(VLLM_PLUGINS=",".join(names), OMNI_FASTPATH="1")
    load_plugins()
    engine(yaml(tmp_path, **ALL_ON))
    assert asked() == (ON if listed else {})
    assert ours() == (NOTHING | written(*ON) if listed else set())
    assert len(state_files()) == listed


@isolated("cold", "serve", "model")
def test_plain_vllm_is_plain() -> None:
    """``vllm serve`` without ``--omni``, whatever our variables say: vLLM's plugins are loaded, and nothing is ours."""
    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_LEAN_PROCESSING="1")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for module in (READER_SLOT[0], "vllm.v1.serial_utils", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)
    owner, _ = holder(READER_SLOT)
    assert not is_ours(raw(READER_SLOT))
    assert not hasattr(owner, "get_output_nowait")
    assert (asked(), state_files()) == ({}, [])
    assert "vllm_omni.engine.orchestrator" not in sys.modules
