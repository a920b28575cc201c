"""A real server on another release than the installed one (`tests.matrix`): every patch, and stock's answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.declare import Process
from omni_fastpath.install import state_here
from omni_fastpath.patches import PATCHES
from tests.questions import of_each_kind
from tests.server.conftest import all_states, states

pytestmark = [pytest.mark.server, pytest.mark.every_release, pytest.mark.more, pytest.mark.timeout(600)]

EVERY_PATCH = {patch.env: "1" for patch in PATCHES}


def test_every_patch_serves_and_answers_are_stocks(server: Callable[..., Any]) -> None:
    """Each patch is in each process what its row says, and each answer is the one of a stock server."""
    import vllm_omni

    from benchmarks.rigs.captures import differences, run_closed_loop

    if Path(vllm_omni.__file__).is_relative_to(sys.prefix):
        pytest.skip("test_parity has the installed release")
    captures = []
    for environment in ({"OMNI_FASTPATH": "0"}, EVERY_PATCH):
        with server("qwen3_omni", "qwen3_omni.yaml", environment=environment) as running:
            captures.append(run_closed_loop(running.url, of_each_kind(), 3))
            time.sleep(3)  # state files are refreshed every two seconds
            of_server, of_stages = states(running), all_states(running, "stage")
    assert all(capture.succeeded for capture in captures[0])
    assert differences(captures[1], captures[0]) == []
    for patch in PATCHES:
        declared = state_here(patch).value
        if Process.SERVER in patch.processes:
            assert of_server[patch.name]["state"] == declared, of_server[patch.name]
        else:
            assert declared in {each[patch.name]["state"] for each in of_stages}, patch.name
