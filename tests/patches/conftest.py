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


_TRACED: set[tuple[str, object]] = set()
"""Tests that ran with the tracer, by name and mode of the orchestrator."""


@pytest.fixture(autouse=True)
def _seams_alone_are_called(request: pytest.FixtureRequest) -> Iterator[None]:
    """While a test runs, no patch calls a function of upstream's that it does not declare (`test_seams_called`).

    Of a test with parameters the first of each mode: a traced call costs several times an untraced one, and what
    differs between the others is what is said, not who is called.
    """
    name, parameters = request.node.originalname, getattr(request.node, "callspec", None)
    key = f"{request.module.__name__}.{name}", parameters and parameters.params.get("event_driven")
    if key in _TRACED or request.module.__name__.endswith("test_seams_called"):  # which has its own
        yield
        return
    _TRACED.add(key)
    with UpstreamCalls(PATCHES) as calls:
        yield
    assert calls.undeclared() == []
