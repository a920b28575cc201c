"""``/metrics`` of a real server with two API processes: one scrape of either shows the whole tree."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.dashboard import families_in, queries
from tests.server.conftest import all_states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]

SERVERS = {"ApiServer_0", "ApiServer_1"}
ENGINES = {f"StageEngineCoreProc_stage{stage}_replica0" for stage in range(3)}


def _text(server: Any) -> str:
    found: str = urllib.request.urlopen(server.url + "/metrics", timeout=30).read().decode()  # noqa: S310
    return found


def _ours(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Our samples, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("omni_fastpath_")
    ]
    assert [key for key, times in Counter(key for key, _ in samples).items() if times > 1] == []
    return dict(samples)


def test_any_of_two_api_servers_shows_the_whole_tree(server: Callable[..., Any]) -> None:
    """Both API processes, their parent and every stage, each patch with one state; what the dashboard asks is there."""
    from benchmarks.rigs.captures import run_closed_loop
    from omni_fastpath.tools.ab.capture import chat_request

    requests = [chat_request(f"Question {n}", modalities=("text", "audio"), max_tokens=6) for n in range(8)]
    environment = {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_QUEUE_METRICS": "1"}
    two = ("--api-server-count", "2")
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment, arguments=two) as running:
        assert all(capture.succeeded for capture in run_closed_loop(running.url, requests, 4))
        time.sleep(5)  # state files are written, and collected, every two seconds
        texts = [_text(running) for _ in range(8)]  # the kernel deals connections out to both
        stages = all_states(running, "stage")
    families = {name for line in texts[0].splitlines() if line[:1] != "#" for name in families_in(line.split("{")[0])}
    assert {name for query in queries() for name in families_in(query)} - families == set()
    scrapes = [_ours(text) for text in texts]
    assert len({frozenset(scrape) for scrape in scrapes}) == 1  # the same samples, by name and labels
    samples = [(name, dict(labels), value) for (name, labels), value in scrapes[0].items()]
    on = [labels for name, labels, value in samples if name == "omni_fastpath_patch_state" and value]
    shown = {(labels["process"], labels["patch"]): labels for labels in on}
    assert len(shown) == len(on)
    assert {process for process, _ in shown} == {"server"} | SERVERS | ENGINES
    events = {
        (labels["process"], labels["event"]): value
        for name, labels, value in samples
        if name == "omni_fastpath_events_total"
    }
    counted = [each["forward_gate"]["counters"]["multimodal_outputs"] for each in stages]
    assert sum(events[engine, "multimodal_outputs"] for engine in ENGINES) == sum(counted) > 0
