"""Tests of the patches run on the real upstream, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_fastpath.hooks import HOOKS
from tests.fakes.recorder import Recorder
from tests.patches.upstream_calls import undeclared_calls


@pytest.fixture(autouse=True)
def _seams_alone_are_called(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--traced`` no patch calls an upstream function that it does not declare while a test runs."""
    if not request.config.getoption("traced"):
        yield
        return
    with undeclared_calls() as wrong:
        yield
    assert wrong == []


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder of what the hooks are told, registered meanwhile."""
    found = Recorder()
    HOOKS.register(found)
    yield found
    HOOKS.unregister(found)
