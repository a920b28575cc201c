"""A speech request that cannot be encoded: stock's server ends with it, ours serves on."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(300)]


def _status(server: Any, path: str, **body: Any) -> int:
    request = urllib.request.Request(  # noqa: S310
        server.url + path, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("switch", "statuses"), [("0", [200, 500, 500, 503]), ("1", [200, 400, 200, 200])], ids=["stock", "fastpath"]
)
def test_a_lone_surrogate(server: Callable[..., Any], switch: str, statuses: list[int]) -> None:
    """What a good request, one with a lone surrogate, a good one and ``/health`` are answered."""
    import omni_simulated_device

    environment = {omni_simulated_device.ENABLE_VARIABLE: "light", "OMNI_FASTPATH": switch}
    with server("qwen3_tts", "qwen3_tts.yaml", environment=environment) as running:
        texts = ("Hello.", "\ud800", "Hello again.")
        found = [_status(running, "/v1/audio/speech", input=text, voice="vivian") for text in texts]
        assert [*found, _status(running, "/health")] == statuses
        if switch == "1":
            time.sleep(3)  # state files are refreshed every two seconds
            assert running.snapshots()["api"].patches["submission_errors"].counters == {"failed_alone": 1}
