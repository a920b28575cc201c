"""Two servers, stock and fastpath, that answer alike: Qwen3-TTS, other releases, and one that no row names."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ab.capture import Request, speech_request
from benchmarks.rigs import overlays
from omni_fastpath.declare import Process
from omni_fastpath.install import state_here
from omni_fastpath.patches import PATCHES
from tests.questions import of_each_kind
from tests.server.conftest import all_states, as_declared

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]

EVERY_PATCH = {patch.env: "1" for patch in PATCHES}

Patches = dict[str, dict[str, Any]]


def alike(
    server: Callable[..., Any], model: str, requests: Sequence[Request], on: Mapping[str, str], **both: str
) -> tuple[Patches, list[Patches]]:
    """Compare the answers of two servers. The result is the second one's patches."""
    from benchmarks.rigs.captures import differences, run_closed_loop

    captures = []
    for environment in ({"OMNI_FASTPATH": "0"}, on):
        with server(model, f"{model}.yaml", environment={**environment, **both}) as running:
            captures.append(run_closed_loop(running.url, requests, 3))
            time.sleep(3)  # state files are refreshed every two seconds
            [of_server], of_stages = all_states(running, "server"), all_states(running, "stage")
    assert all(capture.succeeded for capture in captures[0])
    assert differences(captures[1], captures[0]) == []
    return of_server, of_stages


def test_tts_answers_alike_on_the_event_driven_loop(server: Callable[..., Any]) -> None:
    """Every sample is equal on two-stage Qwen3-TTS, which 0.30 runs event-driven by default."""
    speech = [speech_request(f"Sentence {n}. " + "More of it. " * (n % 4)) for n in range(12)]
    found, _ = alike(server, "qwen3_tts", speech, {"OMNI_FASTPATH": "1"})
    assert {name: entry["state"] for name, entry in found.items()} == as_declared()
    assert min(found["budgeted_drain"]["counters"]["items"], found["delivery"]["counters"]["waits"]) > 0


@pytest.mark.every_release
def test_every_patch_serves_on_another_release(server: Callable[..., Any]) -> None:
    """On the release that `tests.matrix` has put first, each patch has its declared state in each process."""
    import vllm_omni

    if Path(vllm_omni.__file__).is_relative_to(sys.prefix):
        pytest.skip("test_parity has the installed release")
    of_server, of_stages = alike(server, "qwen3_omni", of_each_kind(), EVERY_PATCH)
    for patch in PATCHES:
        declared = state_here(patch).value
        if Process.SERVER in patch.processes:
            assert of_server[patch.name]["state"] == declared, of_server[patch.name]
        else:
            assert declared in {each[patch.name]["state"] for each in of_stages}, patch.name


def test_a_release_that_nobody_has_read(server: Callable[..., Any]) -> None:
    """On 0.31.0rc1 the patches whose functions equal a tested release serve, and answers equal stock's."""
    try:
        overlays.fetch("0.31.0rc1")
    except RuntimeError as error:
        pytest.skip(str(error))
    light = {"PYTHONPATH": overlays.python_path("0.31.0rc1"), "OMNI_SIMULATED_DEVICE": "light"}
    asked = {**EVERY_PATCH, "OMNI_FASTPATH_ON_UNLISTED": "same_code"}
    found, _ = alike(server, "qwen3_omni", of_each_kind(), asked, **light)
    same = {name: each["same_as"] for name, each in found.items() if each["state"] == "applied"}
    assert same.keys() >= {"delivery", "lean_front_end"}
    assert set(same.values()) <= {"0.30.0", "0.32.0rc1"}
    assert found["budgeted_drain"]["state"] == "unsupported"
