"""A held stream gets the tokens that it would have got, with real schedulers and runners and a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.more, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMNI_SIMULATED_DEVICE": "real",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # sums in one order only
}


def test_held_streams_come_out_as_without_the_patch(tmp_path: Path) -> None:
    """Tokens and frames are stock's although streams are left out of steps at random (see `real_stages`)."""
    from omni_simulated_device import models

    models.write_qwen3_omni_tiny(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_FASTPATH")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.patches.real_stages", str(tmp_path / "model")],
        cwd=REPOSITORY,
        env={**environment, **ENVIRONMENT, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
