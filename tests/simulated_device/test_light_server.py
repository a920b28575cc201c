"""Light engines under a real server: what it answers, what it is sent, and how it ends."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

import omni_simulated_device
from benchmarks.rigs import server_arms
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import differences, run_closed_loop
from benchmarks.rigs.server import Server
from omni_fastpath.tools.ab.capture import Request, speech_request
from omni_simulated_device import models
from tests.questions import of_each_kind
from tests.simulated_device import raw_outputs

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]

DEPLOY = Path(omni_simulated_device.__file__).parent / "deploy"
FAST = '{"stages": {"*": {"base_ms": 4, "max_frames": 60}, "talker": {"frames_per_token": 2}}}'

CHAT = of_each_kind()
SPEECH = [speech_request("A sentence."), speech_request("Another one, longer than that.", voice="ryan")]


def serve(folder: Path, kind: str, deploy: str, device: str, variables: Mapping[str, str | None]) -> Server:
    """A server on one of the simulated devices."""
    model = folder / kind
    if not model.exists():
        models.WRITERS[kind](model)
    environment = {
        omni_simulated_device.CONFIG_VARIABLE: FAST,
        omni_simulated_device.ENABLE_VARIABLE: device,
        **variables,
    }
    return Server(model, DEPLOY / deploy, environment=environment)


def recorded(
    folder: Path, kind: str, deploy: str, device: str, requests: Sequence[Request], arm: Arm
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The answers, and every raw output behind them."""
    variables = raw_outputs.plugin(folder / f"{kind}-{device}")
    with serve(folder, kind, deploy, device, {**variables, **server_arms.environment(arm)}) as server:
        captures = run_closed_loop(server.url, requests, 1)
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        found = server_arms.prove(server, arm, {"api", "engines" if device == "light" else "stage0_replica0"})
        server_arms.check_gate(arm, found, has_talker=kind == "qwen3_omni")
    assert all(capture.succeeded for capture in captures), [capture.error for capture in captures]
    return captures, raw_outputs.read(Path(variables[raw_outputs.VARIABLE]))


def entries(lines: Sequence[Mapping[str, Any]]) -> dict[int, list[list[dict[str, Any]]]]:
    """Each stage's requests in the order of their coming, each with its entries, their ids left out."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for output in line.get("raw", {}).get("outputs", ()):
            entry = dict(output)
            found[line["stage"]][entry.pop("request_id")].append(entry)
    return {stage: list(requests.values()) for stage, requests in found.items()}


def shapes(lines: Sequence[Mapping[str, Any]]) -> dict[int, tuple[set[tuple[str, ...]], set[tuple[str, ...]]]]:
    """Each stage's raw outputs by the fields that they have; statistics, which come with any, by themselves."""
    found: dict[int, tuple[set[tuple[str, ...]], set[tuple[str, ...]]]] = defaultdict(lambda: (set(), set()))
    for line in lines:
        raw = dict(line.get("raw", {}))
        raws, statistics = found[line["stage"]]
        if stats := raw.pop("scheduler_stats", None):
            statistics.add(tuple(sorted(stats)))
        if raw.get("outputs"):
            raws.add(tuple(sorted(raw)))
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "deploy", "requests", "arm"),
    [
        ("qwen3_omni", "qwen3_omni.yaml", CHAT, Arm("stock")),
        ("qwen3_omni", "qwen3_omni.yaml", CHAT, Arm("gated", {"OMNI_FASTPATH_FORWARD_GATE": "1"})),
        ("qwen3_tts", "qwen3_tts.yaml", SPEECH, Arm("stock")),
    ],
)
def test_light_engines_send_what_simulated_stages_send(
    tmp_path: Path, kind: str, deploy: str, requests: Sequence[Request], arm: Arm
) -> None:
    """The same requests one after the other: equal answers, entry by entry equal raw outputs, equal ready messages."""
    expected, theirs = recorded(tmp_path, kind, deploy, "1", requests, arm)
    captures, ours = recorded(tmp_path, kind, deploy, "light", requests, arm)
    assert differences(captures, expected) == []
    for stage, wanted in entries(theirs).items():
        for number, (mine, their) in enumerate(zip(entries(ours)[stage], wanted, strict=True)):
            assert mine == their, f"stage {stage}, request {number}"
    assert shapes(ours) == shapes(theirs)
    ready = [
        {line["stage"]: {**line["ready"], "instance_id": None} for line in lines if "ready" in line}
        for lines in (ours, theirs)
    ]
    assert ready[0] == ready[1]
