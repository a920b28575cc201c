"""The front end takes the same messages in event-driven mode, without a thread for each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.drive import front_end_takes, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.mark.parametrize(("event_driven", "counted"), [(True, 30), (False, 0)])
def test_messages_are_taken_once_and_in_order(event_driven: bool, counted: int) -> None:
    """Queued ones and later ones. In poll mode upstream takes them."""
    with only("delivery") as entry:
        assert asyncio.run(front_end_takes(20, event_driven=event_driven, later=10)) == [*range(30)]
        assert entry.counters["messages"] == counted


async def test_a_message_that_comes_within_the_timeout_is_returned() -> None:
    """The call waits for it, as upstream's own does."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    engine: Any = front_end(without_orchestrator(lambda: True), {}, event_driven=True).engine
    with only("delivery") as entry:
        asyncio.get_running_loop().call_later(0.05, engine.output_queue.sync_q.put_nowait, "late")
        assert await engine.get_output_blocking_async(timeout=60) == "late"
        assert entry.counters["messages"] == 1


async def test_silence_ends_in_a_check_of_the_orchestrator() -> None:
    """A wait without a message gives None, without a thread; if the orchestrator died, upstream's error, at the end."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    alive = [True]
    engine: Any = front_end(without_orchestrator(lambda: bool(alive)), {}, event_driven=True).engine
    with only("delivery") as entry:
        assert await engine.get_output_blocking_async(timeout=0.01) is None
        assert engine._output_drain_executor is None
        alive.clear()
        engine.output_queue.sync_q.put_nowait("the last")
        assert await engine.get_output_blocking_async(timeout=0.01) == "the last"
        with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
            await engine.get_output_blocking_async(timeout=0.01)
        assert not entry.has_failed
