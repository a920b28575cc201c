"""``python -m benchmarks.ab`` on real servers with light engines: one start an arm, upstream's own client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import DEPLOY, FAST_STEPS

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]

METRICS = "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf,audio_underrun"


def test_two_real_servers(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's client measures text, audio and throughput, answers end alike, and one start gives no verdict."""
    import omni_simulated_device
    from benchmarks.ab.__main__ import JUDGED
    from benchmarks.rigs.overlays import ROOT
    from benchmarks.rigs.server import DEFAULT_ENVIRONMENT, vllm_command

    variables = {
        **DEFAULT_ENVIRONMENT,
        omni_simulated_device.ENABLE_VARIABLE: "light",
        omni_simulated_device.CONFIG_VARIABLE: json.dumps(FAST_STEPS),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    tmp_path.chmod(0o700)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    model, vllm = str(models("qwen3_omni")), vllm_command()
    serve = [*vllm, "serve", model, "--omni", "--deploy-config", str(DEPLOY / "qwen3_omni.yaml"), "--port", "{port}"]
    bench = [*vllm, "bench", "serve", "--omni", "--model", model, "--host", "127.0.0.1", "--port", "{port}"]
    bench += ["--backend", "openai-chat-omni", "--endpoint", "/v1/chat/completions", "--dataset-name", "random"]
    bench += ["--random-input-len", "32", "--random-output-len", "20", "--num-prompts", "8", "--max-concurrency", "4"]
    bench += ["--extra-body", '{"modalities": ["text", "audio"]}', "--percentile-metrics", METRICS, "--disable-tqdm"]
    bench += ["--save-result", "--result-filename", "{result}"]
    arms = ["--starts", "1", "--a", "OMNI_FASTPATH=0", "--b", "OMNI_FASTPATH=1"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ab", *arms, "--", *serve, "--", *bench]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("too few starts") >= len(JUDGED), done.stdout
    assert "alike. 8 requests" in " ".join(done.stdout.split())
    assert "Failed requests of the client: 0 and 0." in done.stdout
    found = [json.loads(line) for line in (tmp_path / "results/ab.jsonl").read_text().splitlines()]
    assert [start["arm"][0] for start in found] == [*"AB"]
    assert found[0]["answers"][0]["audio_bytes"] > 0
    assert any(one["budgeted_drain"].get("items", 0) > 0 for one in found[1]["counters"].values())
