"""Light engines under a real server: what it answers, what it is sent, and how it ends."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.ab.capture import Request, speech_request
from benchmarks.limit import limit_of
from benchmarks.rigs import server_arms, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import differences, run_closed_loop
from tests.questions import of_each_kind
from tests.simulated_device import raw_outputs

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]

FAST = {"*": {"base_ms": 4, "saturating_ms": 0, "max_frames": 60}, "talker": {"alone_ms": 0, "frames_per_token": 2}}

CHAT = of_each_kind()
SPEECH = [speech_request("A sentence."), speech_request("Another one, longer than that.", voice="ryan")]


def recorded(
    folder: Path, kind: str, deploy: str, device: str, requests: Sequence[Request], arm: Arm
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The answers, and every raw output behind them."""
    variables = raw_outputs.plugin(folder / f"{kind}-{device}")
    given: dict[str, Any] = {"light": device == "light", "variables": variables}
    with whole_server.server(arm, kind, deploy, {"stages": FAST}, **given) as server:
        captures = run_closed_loop(server.url, requests, 1)
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        found = server_arms.prove(server, arm, {"api", "engines" if device == "light" else "stage0_replica0"})
        server_arms.check_gate(arm, found, has_talker=kind == "qwen3_omni")
    assert all(capture.succeeded for capture in captures), [capture.error for capture in captures]
    return captures, raw_outputs.read(Path(variables[raw_outputs.VARIABLE]))


def entries(lines: Sequence[Mapping[str, Any]]) -> dict[int, list[list[dict[str, Any]]]]:
    """Each stage's requests in the order of their coming, each with its entries, their ids left out.

    Later entries without tokens have no prefill statistics: a real code2wav omits a chunk's that came during the step
    before.
    """
    found: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for output in line["raw"]["outputs"]:
            entry = dict(output)
            of_request = found[line["stage"]][entry.pop("request_id")]
            if of_request and not entry["new_token_ids"]:
                del entry["prefill_stats"]
            of_request.append(entry)
    return {stage: list(requests.values()) for stage, requests in found.items()}


def shapes(lines: Sequence[Mapping[str, Any]]) -> dict[int, set[frozenset[str]]]:
    """Which fields of each stage's raw outputs have values; statistics, which any of them may have, by themselves."""
    found: dict[int, set[frozenset[str]]] = defaultdict(set)
    for line in lines:
        fields = {name for name, value in line["raw"].items() if value}
        if "outputs" in fields:
            found[line["stage"]].add(frozenset(fields - {"scheduler_stats"}))
        found[line["stage"]].add(frozenset(fields & {"scheduler_stats"}))
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "deploy", "requests", "arm"),
    [
        ("qwen3_omni", "qwen3_omni.yaml", CHAT, Arm("stock")),
        ("qwen3_omni", "qwen3_omni.yaml", CHAT, Arm("gated", {"OMNI_FASTPATH_FORWARD_GATE": "1"})),
        ("qwen3_tts", "qwen3_tts.yaml", SPEECH, Arm("stock")),
    ],
)
def test_light_engines_are_alike(tmp_path: Path, kind: str, deploy: str, requests: Sequence[Request], arm: Arm) -> None:
    """Answers are equal, raw outputs entry by entry, and the limit has as much text and audio pieces as long."""
    expected, theirs = recorded(tmp_path, kind, deploy, "stages", requests, arm)
    captures, ours = recorded(tmp_path, kind, deploy, "light", requests, arm)
    assert differences(captures, expected) == []
    for stage, wanted in entries(theirs).items():
        for number, (mine, their) in enumerate(zip(entries(ours)[stage], wanted, strict=True)):
            assert mine == their, f"stage {stage}, request {number}"
    assert shapes(ours) == shapes(theirs)
    found = limit_of(requests, kind, deploy, {"stages": FAST}, streams=1)
    assert [len(each.text) for each in found] == [len(each.text) for each in captures]
    assert [len(each.audio) for each in found] == [len(each.audio) for each in captures]
