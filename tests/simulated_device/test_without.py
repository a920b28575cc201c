"""Parts of patches that benchmarks take out one by one."""

from __future__ import annotations

import importlib
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from omni_simulated_device import without

pytestmark = pytest.mark.upstream


def replica(*numbers: int) -> Any:
    """A replica with arrivals of these numbers in its queue."""
    return SimpleNamespace(waiting=numbers, arrivals=[SimpleNamespace(number=number) for number in numbers])


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


def test_in_order_of_arrival_the_oldest_output_of_any_replica_is_next() -> None:
    """One raw output at a time, at the replica whose turn it is made."""
    from collections import deque

    busy, idle = SimpleNamespace(replicas=deque([replica(), replica(7, 8), replica(5)])), SimpleNamespace(replicas=())
    other = SimpleNamespace(replicas=deque([replica(6)]))
    decided = without.PARTS["order"][2](SimpleNamespace(_stages=(idle, other, busy)))
    assert decided == (busy, True, False)
    assert [each.number for each in busy.replicas[0].arrivals] == [5]
    assert without.PARTS["order"][2](SimpleNamespace(_stages=(idle,))) is None
