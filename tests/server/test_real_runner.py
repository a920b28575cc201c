"""Every patch on upstream's own model runners and schedulers, with a tiny model on the processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ab.capture import chat_request
from omni_fastpath.patches import PATCHES
from tests.fakes.registration import declared
from tests.server.conftest import DEPLOY, all_states, as_declared, states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]

TALKER, REAL = "stage 1", {"OMNI_SIMULATED_DEVICE": "real"}


def _deploy(folder: Path, talker: str) -> Path:
    """The tiny model's deploy YAML with this executor of the talker: in the stage's process, or in one of its own."""
    deploy = yaml.safe_load((DEPLOY / "qwen3_omni_tiny.yaml").read_text())
    for stage, device in zip(deploy["stages"], "567", strict=True):
        # Upstream locks a device for the start of a stage, and others start on the first ones.
        stage["devices"] = device
    deploy["stages"][1]["distributed_executor_backend"] = talker
    deploy["stages"][1]["default_sampling_params"]["ignore_eos"] = True  # 80 frames in five chunks
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy))
    return path


def _questions(count: int) -> list[Any]:
    kinds = [*3 * [("text", "audio")], ("text",)]
    return [chat_request(f"Question {number}", modalities=kinds[number % 4]) for number in range(count)]


def _served(running: Any) -> list[str]:
    """The texts at 1 and at 8 streams, between which clients leave."""
    from benchmarks.rigs.captures import run_closed_loop

    kinds = 2 * [("audio",), ("text", "audio")]
    left = [chat_request(f"I leave {each}", modalities=each, abort_after=2) for each in kinds]
    alone = run_closed_loop(running.url, _questions(2), 1)
    assert all(capture.aborted for capture in run_closed_loop(running.url, left, 2))
    together = run_closed_loop(running.url, _questions(16), 8)
    answers = [*alone, *together]
    assert all(capture.succeeded for capture in answers), [capture.error for capture in answers]
    assert all(bool(each.audio) == ("audio" in each.request.body["modalities"]) for each in answers)
    return [capture.text for capture in answers]


@pytest.fixture(scope="module")
def expected(server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What stock serves."""
    deploy = _deploy(tmp_path_factory.mktemp("stock"), "uni")
    with server("qwen3_omni_tiny", deploy, environment={**REAL, "OMNI_FASTPATH": "0"}) as running:
        return _served(running)


@pytest.mark.parametrize("talker", ["mp", "uni"])
def test_every_patch_on_upstreams_own_runners(
    server: Callable[..., Any], expected: list[str], tmp_path: Path, talker: str
) -> None:
    """States are as declared, patches of stages have counted, and texts are stock's."""
    deploy = _deploy(tmp_path, talker)
    every = {patch.env: "1" for patch in PATCHES}
    with server("qwen3_omni_tiny", deploy, environment={**REAL, **every}) as running:
        assert _served(running) == expected
        time.sleep(4)  # state files are refreshed every two seconds
        of_server, of_stages = states(running), all_states(running, "stage")
        log = running.log_path.read_text(errors="replace")
    assert {name: entry["state"] for name, entry in of_server.items()} == as_declared(every=True)
    assert len(of_stages) == 3
    [gate] = [each["forward_gate"] for each in of_stages if TALKER in each["forward_gate"]["reason"]]
    assert gate["state"] == declared("stage", every=True)["forward_gate"], gate
    assert gate["counters"]["multimodal_outputs"] > 100
    assert sorted(bool(each["save_queue_cap"]["counters"]["tasks"]) for each in of_stages) == [False, True, True]
    assert of_server["queue_metrics"]["counters"]["observed"] > 100
    assert "failed" not in {entry["state"] for each in of_stages for entry in each.values()}
    assert "omni_fastpath" not in "".join(line for line in log.splitlines() if "ERROR" in line)
