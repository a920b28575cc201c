"""Clients that leave in the middle leave nothing in shared memory, on whole servers."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.rigs import whole_server
from benchmarks.rigs.arm import FASTPATH
from benchmarks.trust import storm

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]


def test_nothing_stays_of_clients_that_left() -> None:
    """No chunk or lock file is left, and every answer is the same, also under the id of those that left."""
    with whole_server.server(FASTPATH, "qwen3_omni", "qwen3_omni.yaml", storm.DEVICE) as server:
        seen = asyncio.run(storm.storm(server, 60))
    assert seen.is_well, seen
    assert seen.state == "applied"
    # At least the one of each answer in text alone, of which there are so many.
    assert seen.counters["chunks"] >= storm.PARITY, seen
