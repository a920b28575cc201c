"""Real servers beside others: packages that wrap what we wrap, and a vLLM-Omni that somebody altered on disk.

On light engines, which leave the API processes as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.patches import PATCHES
from tests.fakes import foreign
from tests.fakes.installation import MODULE, PARAMETER, STATEMENT, Altered
from tests.server.conftest import all_states, as_declared

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]

LIGHT = {"OMNI_SIMULATED_DEVICE": "light"}
TWO = ("--api-server-count", "2")
EVERY_PATCH = {patch.env: "1" for patch in PATCHES}

BELOW = "vllm_omni.engine.orchestrator:OrchestratorBase._process_llm_stage_outputs"
"""Of ``lean_processing``, whose wrapper calls what it wraps."""
REPLACED = "vllm_omni.engine.omni_engine_base:OmniEngineBase.get_output_blocking_async"
"""Of ``final_output_wakeup``, whose wrapper does not."""
ON_TOP = "vllm_omni.entrypoints.omni_base:OmniBase._log_summary_and_cleanup"
"""Of ``gc_pacing``."""


def _requests() -> list[Any]:
    from omni_fastpath.tools.ab.capture import chat_request
    from tests.questions import of_each_kind

    return [*of_each_kind(), *(chat_request("Hello") for _ in range(12))]


def _answers(running: Any) -> list[Any]:
    from omni_fastpath.tools.ab.capture import run_closed_loop

    captures = run_closed_loop(running.url, _requests(), 4)
    assert all(capture.succeeded for capture in captures), [capture.error for capture in captures]
    return captures


@pytest.fixture(scope="module")
def stock(server: Callable[..., Any]) -> list[Any]:
    """What a stock server with two API processes answers."""
    with server("qwen3_omni", "qwen3_omni.yaml", environment={**LIGHT, "OMNI_FASTPATH": "0"}, arguments=TWO) as running:
        captures = _answers(running)
    assert running.shutdown.killed == ()
    return captures


def test_two_api_servers_share_the_light_engines(stock: list[Any]) -> None:
    """``--api-server-count 2``: each gets what it asked for, and the same from either."""
    assert len({capture.digest() for capture in stock[-12:]}) == 1


def test_somebody_elses_wrappers(server: Callable[..., Any], stock: list[Any], tmp_path: Path) -> None:
    """Two API processes, every patch, packages that wrap before and after us, an allow-list with all of our names.

    Each answer is stock's, theirs are called, ours are applied, and the one that would go past theirs is unsupported.
    """
    from omni_fastpath.tools.ab.capture import differences

    folders = [
        foreign.package(tmp_path / "early", "early", [BELOW, REPLACED]),
        foreign.package(tmp_path / "late", "late", [ON_TOP], late=True),
    ]
    calls = tmp_path / "calls"
    environment = {
        **LIGHT,
        **EVERY_PATCH,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "VLLM_PLUGINS": "omni_simulated_device,vllm_omni_register_models,omni_fastpath,early,late",
        foreign.CALLED: str(calls),
    }
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment, arguments=TWO) as running:
        assert differences(_answers(running), stock) == []
        time.sleep(3)  # state files are refreshed every two seconds
        processes = all_states(running, "server")
        called = {slot for _, slot in foreign.called(calls)}
    assert running.shutdown.killed == ()
    expected = {**as_declared(every=True), "final_output_wakeup": "unsupported"}
    for states in processes:
        assert {name: entry["state"] for name, entry in states.items()} == expected
        assert f"a seam moved: {REPLACED}: holds somebody else's" in states["final_output_wakeup"]["reason"]
        assert f"on somebody else's wrapper of {BELOW}" in states["lean_processing"]["reason"]
    assert len(processes) == 3  # both, and their parent
    assert sum(each["budgeted_drain"]["counters"]["items"] for each in processes) > 0
    assert called >= {BELOW, ON_TOP}


def test_an_altered_installation(server: Callable[..., Any], stock: list[Any], tmp_path: Path) -> None:
    """Three patches do not fit a vLLM-Omni altered on disk: each names its seam; the others are on, and it serves."""
    from omni_fastpath.tools.ab.capture import differences

    installation = Altered(tmp_path / "altered")
    alterations = (STATEMENT, PARAMETER, MODULE)
    for each in alterations:
        each.make(installation)
    environment = {**LIGHT, **EVERY_PATCH, "PYTHONPATH": str(installation.folder)}
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment) as running:
        assert differences(_answers(running), stock) == []
        [states] = all_states(running, "server")
    expected = as_declared(every=True) | dict.fromkeys((each.patch for each in alterations), "unsupported")
    assert {name: entry["state"] for name, entry in states.items()} == expected
    for each in alterations:
        assert states[each.patch]["reason"].startswith(f"a seam moved: {each.told}")
