"""Tests of the patches run on the real upstream, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from tests.fakes.recorder import Recorder
from tests.patches.small_stage import stage_config
from tests.patches.upstream_calls import undeclared_calls

for _patch in PATCHES:
    LEDGER.entry(_patch)  # without it the modules of a patch could be imported only after its installation


@pytest.fixture(autouse=True)
def _seams_alone_are_called(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--traced`` no patch calls an upstream function that it does not declare while a test runs."""
    if not request.config.getoption("traced"):
        yield
        return
    with undeclared_calls() as wrong:
        yield
    assert wrong == []


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The configuration of a small stage."""
    return stage_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder of what the hooks are told, registered meanwhile."""
    found = Recorder()
    HOOKS.register(found)
    yield found
    HOOKS.unregister(found)
