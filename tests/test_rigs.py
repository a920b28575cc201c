"""What several benchmarks stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import server
from benchmarks.rigs.server import Server


@pytest.mark.parametrize("lives", [True, False])
def test_chunks_stay_while_another_servers_stage_lives(
    lives: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A chunk does not say whose it is; one that a test's own stage has made stays in any case."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(server, "_SHARED_MEMORY", folder)
    monkeypatch.setattr(server, "_a_stage_lives", lambda: lives)
    for name in ("chatcmpl-1_0_0", "shm_sq-1-a_0_0_lockfile.lock"):
        (folder / name).touch()
    assert Server("model", "deploy")._remove_shared_memory() == (() if lives else ("chatcmpl-1_0_0",))
    assert len(list(folder.iterdir())) == (2 if lives else 1)
