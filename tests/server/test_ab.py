"""``omni-fastpath ab`` on real servers with light engines: two starts an arm, upstream's own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_fastpath.tools import cli
from tests.server.conftest import DEPLOY, FAST_STEPS

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]

METRICS = "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf"


def test_two_real_servers(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's client measures text, audio and throughput, answers are equal, and two starts give no verdict."""
    import omni_simulated_device
    from benchmarks.rigs.server import DEFAULT_ENVIRONMENT, vllm_command

    variables = {
        **DEFAULT_ENVIRONMENT,
        omni_simulated_device.ENABLE_VARIABLE: "light",
        omni_simulated_device.CONFIG_VARIABLE: json.dumps(FAST_STEPS),
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # not the repository: its folders must not shadow installed modules
    model, vllm = str(models("qwen3_omni")), vllm_command()
    serve = [*vllm, "serve", model, "--omni", "--deploy-config", str(DEPLOY / "qwen3_omni.yaml"), "--port", "{port}"]
    bench = [*vllm, "bench", "serve", "--omni", "--model", model, "--host", "127.0.0.1", "--port", "{port}"]
    bench += ["--backend", "openai-chat-omni", "--endpoint", "/v1/chat/completions", "--dataset-name", "random"]
    bench += ["--random-input-len", "32", "--random-output-len", "20", "--num-prompts", "8", "--max-concurrency", "4"]
    bench += ["--extra-body", '{"modalities": ["text", "audio"]}', "--percentile-metrics", METRICS, "--disable-tqdm"]
    bench += ["--save-result", "--result-filename", "{result}"]
    arms = ["--a", "OMNI_FASTPATH=0", "--b", "OMNI_FASTPATH=1"]
    code = cli.main(["ab", "--starts", "2", *arms, "--out", "out", "--", *serve, "--", *bench])
    found = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert (code, found["complete"], found["order"]) == (4, True, ["A", "B", "B", "A"])
    assert (found["answers"]["how"], found["answers"]["audio_bytes"] > 0) == ("bytes", True)
    assert found["failed"] == {"A": 0, "B": 0}
    assert [row["name"] for row in found["rows"] if row["primary"]] == ["first audio (TTFP), median"]
    judged = {row["name"] for row in found["rows"] if row["verdict"]}
    assert {"first text (TTFT), median", "whole answer (E2EL), p99", "requests served", "audio made"} <= judged
    assert "time for a second of audio (RTF), median" in judged
    assert {patch["state"] for process in found["states"]["A"] for patch in process["patches"].values()} == {"off"}
    assert found["states"]["B"][0]["patches"]["budgeted_drain"]["counters"]["items"] > 0
