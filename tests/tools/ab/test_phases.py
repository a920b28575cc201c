"""What a run prints about its phases."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from omni_fastpath.tools.ab import phases


def test_a_phase_is_printed_with_its_duration_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line when it begins and one when it ends."""
    now = 0.0
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now))
    out = io.StringIO()
    with phases.Phases(Console(file=out, width=40, _environ={}), 2).phase("the client"):
        now = 65.0
    first, last = out.getvalue().splitlines()
    assert first.endswith("... the client")
    assert last.endswith("done the client: 65.0 s; about 1.1 min left")
