"""A real server on the simulated device answers, and answers the same request alike."""

from pathlib import Path

import pytest

pytest.importorskip("vllm_omni")

import omni_simulated_device
from benchmarks.rigs.server import Server, ServerError
from omni_fastpath.tools.ab.capture import chat_request, differences, run_closed_loop
from omni_simulated_device import models

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]

DEPLOY = Path(omni_simulated_device.__file__).parent / "deploy"
FAST = '{"stages": {"*": {"base_ms": 2, "max_frames": 60}}}'


def test_same_request_gets_the_same_bytes(tmp_path: Path) -> None:
    """Qwen3-Omni, one replica a stage: equal requests get equal text and audio, alone and side by side."""
    models.write_qwen3_omni(tmp_path / "model")
    requests = [chat_request("Hello"), chat_request("Hello"), chat_request("Good bye", max_tokens=8)]
    environment = {omni_simulated_device.CONFIG_VARIABLE: FAST}
    with Server(tmp_path / "model", DEPLOY / "qwen3_omni.yaml", environment=environment) as server:
        together = run_closed_loop(server.url, requests, 3)
        alone = run_closed_loop(server.url, requests, 1)
    assert all(capture.succeeded and capture.text and capture.audio for capture in together)
    assert differences(together, alone) == []
    assert together[0].answer() == together[1].answer()
    assert together[0].audio_sha256 != together[2].audio_sha256
    assert server.shutdown is not None
    assert server.shutdown.killed == ()


def test_failed_start_shows_the_log(tmp_path: Path) -> None:
    """A server that cannot start raises with its log's tail, and leaves no process behind."""
    (tmp_path / "model").mkdir()
    server = Server(tmp_path / "model", DEPLOY / "qwen3_omni.yaml", log_path=tmp_path / "log")
    with pytest.raises(ServerError, match="before it was ready; the end of"), server:
        pytest.fail("it started")
    assert server.processes() == {}


def test_misspelt_setting_refuses_to_start(tmp_path: Path) -> None:
    """A setting of the device that does not exist stops the server, and its error is in the log's tail."""
    models.write_qwen3_omni(tmp_path / "model")
    environment = {omni_simulated_device.CONFIG_VARIABLE: '{"stages": {"thinker": {"base_m": 1}}}'}
    server = Server(tmp_path / "model", DEPLOY / "qwen3_omni.yaml", environment=environment, log_path=tmp_path / "log")
    with pytest.raises(ServerError), server:
        pytest.fail("it started")
    assert "stages.thinker.base_m: unknown key" in server.log_text()
