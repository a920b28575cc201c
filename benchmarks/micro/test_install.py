"""The machinery: installing the patches of the arm, and taking them off again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from omni_fastpath.declare import Patch, Process
from omni_fastpath.install import install, is_installed, uninstall
from omni_fastpath.patches import PATCHES


@pytest.fixture
def patches(arm: str) -> Iterator[Sequence[Patch]]:
    """The patches that are on; they are on again afterwards."""
    if arm == "stock":
        pytest.skip("stock has nothing to install")
    on = [patch for patch in PATCHES if is_installed(patch.name)]
    yield on
    _redo(on)


def _undo(patches: Sequence[Patch]) -> None:
    for patch in reversed(patches):
        uninstall(patch)


def _redo(patches: Sequence[Patch]) -> None:
    for patch in patches:
        install(patch, Process.SERVER if Process.SERVER in patch.processes else Process.STAGE)


def test_install(benchmark: BenchmarkFixture, patches: Sequence[Patch]) -> None:
    """All of them: every seam is verified, then written. Upstream's modules are imported already."""
    benchmark.pedantic(lambda: _redo(patches), setup=lambda: _undo(patches), rounds=20, warmup_rounds=1)


def test_undo(benchmark: BenchmarkFixture, patches: Sequence[Patch]) -> None:
    """All of them: every slot is restored."""
    benchmark.pedantic(lambda: _undo(patches), setup=lambda: _redo(patches), rounds=20, warmup_rounds=1)
