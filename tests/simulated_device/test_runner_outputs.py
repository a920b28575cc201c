"""What the simulated worker gives a scheduler is what upstream's own runners give it, class by class."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks.rigs.server import OFFLINE
from tests.fakes.processes import process

pytestmark = [pytest.mark.upstream, pytest.mark.every_release, pytest.mark.timeout(300)]

OF_AR = {"no tokens", "prefill", "decode", "last token", "aborted"}
KINDS = {
    *(f"thinker, {kind}" for kind in OF_AR | {"partial prefill", "resumed"}),
    *(f"talker, {kind}" for kind in OF_AR),
    *(f"code2wav, {kind}" for kind in ("no tokens", "prefill", "last token")),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All different outputs by device, stage and kind of step."""
    from omni_simulated_device import models

    pytest.importorskip("vllm_omni.config.resolver", reason="stages are not put together by hand on 0.28")
    folder = tmp_path_factory.mktemp("runner_outputs")
    models.write_qwen3_omni_tiny(folder / "model")
    variables = {**OFFLINE, "OMNI_SIMULATED_DEVICE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = (sys.executable, "-m", "tests.simulated_device.runner_outputs")
    ran = process(*command, str(folder / "model"), str(folder / "seen"), **variables)
    assert ran.returncode == 0, ran.stderr[-8000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "seen").read_text())
    return found


def test_the_simulated_worker_returns_what_the_real_one_returns(seen: dict[str, dict[str, Any]]) -> None:
    """Classes, attributes that are set or missing, payloads and whether both lists are one, at every kind of step."""
    simulated, real = seen["1"], seen["real"]
    assert real.keys() == KINDS
    assert {kind: simulated.get(kind) for kind in KINDS} == real


def test_what_the_patches_rely_on(seen: dict[str, dict[str, Any]]) -> None:
    """A step without tokens has no payload fields at all, and a talker's two payload lists are the very same list."""
    for kind, outputs in seen["real"].items():
        empty = kind.endswith("no tokens")
        assert [each["the empty one"] for each in outputs] == [empty] * len(outputs), kind
        assert all(("multimodal_outputs" in each["missing"]) is empty for each in outputs), kind
        if kind.startswith("talker") and not empty:
            assert all(each["one list"] and each["to the client"] for each in outputs), kind
