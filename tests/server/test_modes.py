"""Real servers in another mode: Qwen3-TTS, event-driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import as_declared, states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]


def _speech() -> list[Any]:
    from omni_fastpath.tools.ab.capture import speech_request

    return [speech_request(f"Sentence {n}. " + "More of it. " * (n % 4)) for n in range(12)]


def test_tts_answers_alike_on_the_event_driven_loop(server: Callable[..., Any]) -> None:
    """Two-stage Qwen3-TTS, which 0.30 runs event-driven without a variable: every sample is the same."""
    from benchmarks.rigs.captures import differences, run_closed_loop

    captures, found = [], {}
    for switch in ("0", "1"):
        with server("qwen3_tts", "qwen3_tts.yaml", environment={"OMNI_FASTPATH": switch}) as running:
            captures.append(run_closed_loop(running.url, _speech(), 6))
            found = states(running)
    assert all(capture.succeeded for capture in captures[0])
    assert differences(captures[1], captures[0]) == []
    assert {name: entry["state"] for name, entry in found.items()} == as_declared()
    assert found["budgeted_drain"]["counters"]["items"] > 0
