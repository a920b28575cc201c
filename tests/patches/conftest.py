"""Tests of the patches run on the real upstream, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_fastpath.patches import PATCHES
from tests.patches.upstream_calls import UpstreamCalls


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    """Counters are a process's; each test starts from zero."""
    from omni_fastpath.ledger import LEDGER

    for entry in LEDGER:
        for name in entry.counters:
            entry.counters[name] = 0


@pytest.fixture(autouse=True)
def _seams_alone_are_called(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--traced`` no patch calls a function of upstream's that it does not declare while a test runs."""
    if not request.config.getoption("traced"):
        yield
        return
    with UpstreamCalls(PATCHES) as calls:
        yield
    assert calls.undeclared() == []
