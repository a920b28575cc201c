"""Tests of the patches run on the real upstream, in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    """Counters are a process's; each test starts from zero."""
    from omni_fastpath.ledger import LEDGER

    for entry in LEDGER:
        for name in entry.counters:
            entry.counters[name] = 0
