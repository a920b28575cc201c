"""Real servers in other modes: Qwen3-TTS event-driven, a bad block, a foreign environment, an untested release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import DEPLOY, all_states, as_declared, states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]


def _speech() -> list[Any]:
    from omni_fastpath.tools.ab.capture import speech_request

    return [speech_request(f"Sentence {n}. " + "More of it. " * (n % 4)) for n in range(12)]


def test_tts_answers_alike_on_the_event_driven_loop(server: Callable[..., Any]) -> None:
    """Two-stage Qwen3-TTS, which 0.30 runs event-driven without a variable: every sample is the same."""
    from omni_fastpath.tools.ab.capture import differences, run_closed_loop

    captures, found = [], {}
    for switch in ("0", "1"):
        with server("qwen3_tts", "qwen3_tts.yaml", environment={"OMNI_FASTPATH": switch}) as running:
            captures.append(run_closed_loop(running.url, _speech(), 6))
            found = states(running)
    assert all(capture.succeeded for capture in captures[0])
    assert differences(captures[1], captures[0]) == []
    assert {name: entry["state"] for name, entry in found.items()} == as_declared()
    assert found["budgeted_drain"]["counters"]["items"] > 0


def test_a_bad_block_refuses_the_start_before_a_stage(server: Callable[..., Any], tmp_path: Path) -> None:
    """The server ends with an error that names key, finding, choices and nearest spelling; no stage was spawned."""
    from benchmarks.rigs.server import ServerError

    path = tmp_path / "bad.yaml"
    path.write_text(
        f"base_config: {DEPLOY / 'qwen3_omni.yaml'}\n"
        "fastpath:\n  nonblocking_dequeue: true\n  budgeted_drain: {max_itmes: 4}\n"
    )
    running = server("qwen3_omni", path)
    with pytest.raises(ServerError), running:
        pass
    log = running.log_path.read_text()
    assert "fastpath.budgeted_drain.max_itmes" in log
    assert "did you mean 'max_items'" in log
    assert "StageEngineCoreProc" not in log


def test_a_service_of_our_name_and_a_file_of_upstreams_do_not_stop_a_server(
    server: Callable[..., Any], tmp_path: Path
) -> None:
    """Kubernetes' variables of a Service ``omni-fastpath``, YAML that only upstream reads: a stock server serves."""
    from omni_fastpath.tools.ab.capture import chat_request, run_closed_loop

    path = tmp_path / "odd.yaml"
    path.write_text(
        f"base_config: {DEPLOY / 'qwen3_omni.yaml'}\n"
        "notes: {1: a, 1: b, true: c, 'true': d, path: !!python/object/apply:pathlib.Path [e]}\n"
    )
    environment = {
        "OMNI_FASTPATH_SERVICE_HOST": "10.0.0.7",
        "OMNI_FASTPATH_SERVICE_PORT": "8091",
        "OMNI_FASTPATH_PORT": "tcp://10.0.0.7:8091",
        "OMNI_FASTPATH_PORT_8091_TCP_ADDR": "10.0.0.7",
    }
    with server("qwen3_omni", path, environment=environment) as running:
        (capture,) = run_closed_loop(running.url, [chat_request("Hello", max_tokens=8)])
        found = list(running.runtime_folder.glob("omni-fastpath/*.json"))
        log = running.log_path.read_text()
    assert capture.succeeded
    assert found == []
    assert "OMNI_FASTPATH" not in log


def test_an_untested_release_serves_as_stock(server: Callable[..., Any], tmp_path: Path) -> None:
    """With the metadata of a later vLLM-Omni everything is unsupported, said so, and requests are answered."""
    from omni_fastpath.tools.ab.capture import chat_request, run_closed_loop

    metadata = tmp_path / "later" / "vllm_omni-0.31.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.31.0\n")
    environment = {"OMNI_FASTPATH": "1", "PYTHONPATH": str(metadata.parent)}
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment) as running:
        (capture,) = run_closed_loop(running.url, [chat_request("Hello", max_tokens=8)])
        found, stages = states(running), all_states(running, "stage")
    assert capture.succeeded
    for name in ("nonblocking_dequeue", "budgeted_drain", "final_output_wakeup"):
        assert found[name]["state"] == "unsupported"
    assert [each["forward_gate"]["state"] for each in stages] == ["unsupported"] * 3
    reason = found["budgeted_drain"]["reason"]
    assert reason.startswith("vllm-omni 0.31.0 is not among the tested releases: ")
