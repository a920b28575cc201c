"""A held stream gets the tokens that it would have got, with real schedulers and runners and a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.rigs.server import OFFLINE
from tests.fakes.processes import process

pytestmark = [pytest.mark.upstream, pytest.mark.more, pytest.mark.timeout(600)]


def test_held_streams_come_out_as_without_the_patch(tmp_path: Path) -> None:
    """Tokens and frames are stock's although streams are left out of steps at random (see `real_stages`)."""
    from omni_simulated_device import models

    models.write_qwen3_omni_tiny(tmp_path / "model")
    variables = {**OFFLINE, "OMNI_SIMULATED_DEVICE": "real", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = (sys.executable, "-m", "tests.patches.real_stages", str(tmp_path / "model"))
    ran = process(*command, **variables)
    assert ran.returncode == 0, ran.stderr[-8000:]
