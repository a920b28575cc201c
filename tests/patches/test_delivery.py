"""The front end takes the same messages in event-driven mode, without a thread for each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.drive import front_end_takes, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.mark.parametrize("event_driven", [True, False])
def test_messages_are_taken_once_and_in_order(event_driven: bool) -> None:
    """Queued ones, and later ones, for which upstream waits. In poll mode upstream takes them all."""
    with only("delivery") as entry:
        assert asyncio.run(front_end_takes(20, event_driven=event_driven, later=10)) == [*range(30)]
        assert (20 <= entry.counters["messages"] <= 30) if event_driven else not entry.counters["messages"]


async def test_without_a_message_upstream_waits() -> None:
    """Its thread is made then. A wait ends with None, or with its error if the orchestrator died, after the last."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    alive = [True]
    engine: Any = front_end(without_orchestrator(lambda: bool(alive)), {}, event_driven=True).engine
    with only("delivery") as entry:
        engine.output_queue.sync_q.put_nowait("queued")
        assert await engine.get_output_blocking_async(timeout=0.01) == "queued"
        assert vars(engine)["_output_drain_executor"] is None
        assert await engine.get_output_blocking_async(timeout=0.01) is None
        alive.clear()
        engine.output_queue.sync_q.put_nowait("the last")
        assert await engine.get_output_blocking_async(timeout=0.01) == "the last"
        with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
            await engine.get_output_blocking_async(timeout=0.01)
        assert entry.counters["messages"] == 2
        assert not entry.has_failed
    engine._output_drain_executor.shutdown()
