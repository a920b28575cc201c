"""``/metrics`` of a real server with two API processes: one scrape of either shows the whole tree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.trust import parity
from tests.server.conftest import all_states
from tests.tools.test_dashboard import families_in, queries

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]

SERVERS = {"ApiServer_0", "ApiServer_1"}
ENGINES = {f"StageEngineCoreProc_stage{stage}_replica0" for stage in range(3)}


def _ours(lines: list[str]) -> list[Any]:
    """The samples of this package."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families("\n".join(lines))
    return [each for family in families for each in family.samples if each.name.startswith("omni_fastpath_")]


def test_any_of_two_api_servers_shows_the_whole_tree(server: Callable[..., Any]) -> None:
    """Either of two API processes exports all processes, each patch with one state, and the dashboard's families."""
    from benchmarks.ab.capture import chat_request
    from benchmarks.rigs.captures import run_closed_loop

    requests = [chat_request(f"Question {n}", modalities=("text", "audio"), max_tokens=6) for n in range(8)]
    environment = {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_QUEUE_METRICS": "1"}
    two = ("--api-server-count", "2")
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment, arguments=two) as running:
        assert all(capture.succeeded for capture in run_closed_loop(running.url, requests, 4))
        time.sleep(5)  # state files are written, and collected, every two seconds
        texts = [parity.scrape(running.url) for _ in range(8)]  # the kernel deals connections out to both
        stages = all_states(running, "stage")
    families = {name for line in texts[0] if line[:1] != "#" for name in families_in(line.split("{")[0])}
    assert {name for query in queries() for name in families_in(query)} - families == set()
    named = [sorted((each.name, *sorted(each.labels.items())) for each in _ours(text)) for text in texts]
    assert all(each == named[0] for each in named)
    samples = _ours(texts[0])
    shown = [(each.labels["process"], each.labels["patch"]) for each in samples if "state" in each.name and each.value]
    assert len(set(shown)) == len(shown)
    assert {process for process, _ in shown} == {"server"} | SERVERS | ENGINES
    gated = [each.value for each in samples if each.labels.get("event") == "multimodal_outputs"]
    assert sum(gated) == sum(each["forward_gate"]["counters"]["multimodal_outputs"] for each in stages) > 0
