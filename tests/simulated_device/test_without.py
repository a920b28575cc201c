"""Parts of patches that benchmarks take out one by one."""

from __future__ import annotations

import importlib
from functools import reduce

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from omni_simulated_device import without

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("part", without.PARTS)
def test_a_part_is_there_and_its_replacement_can_be_told_from_it(part: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What is replaced exists under its name, and the word about it comes once."""
    module, path, replacement = without.PARTS[part]
    LEDGER.entry(next(patch for patch in PATCHES if module.startswith(patch.name)))  # as install does before the import
    loaded = importlib.import_module(f"omni_fastpath.patches.{module}")
    *owners, last = path.split(".")
    owner = reduce(getattr, owners, loaded)
    original = getattr(owner, last)
    try:
        for _ in range(2):
            without.take_out(part)
        assert getattr(owner, last) is replacement
    finally:
        setattr(owner, last, original)
    assert capfd.readouterr().err.count(f"goes without {part} ") == 1
