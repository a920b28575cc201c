"""The front end takes the same messages in both modes, and its event loop wakes for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvloop

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import State
from omni_fastpath.patches.delivery import wrappers
from tests.patches.drive import front_end_takes, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

each_taker = pytest.mark.parametrize("taker", ["try_get_output_async", "get_output_blocking_async"])
"""Upstream's in poll mode and in event-driven mode."""


def engine_of(is_alive: Callable[[], bool] = lambda: True) -> Any:
    """Upstream's engine without stages; *is_alive* says whether its orchestrator lives."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    return front_end(without_orchestrator(is_alive), {}, event_driven=True).engine


@pytest.mark.parametrize("event_driven", [True, False])
def test_messages_are_taken_once_and_in_order(event_driven: bool) -> None:
    """By upstream's loop of the front end: queued ones, and later ones, for which the event loop waits."""
    with only("delivery") as entry:
        assert asyncio.run(front_end_takes(20, event_driven=event_driven, later=10)) == [*range(30)]
        assert 1 <= entry.counters["waits"] <= 11


@each_taker
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_put_wakes_the_front_end(taker: str, new_loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand messages, in bursts and singly, arrive once each and in order, and no thread waits for them."""
    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 60.0)  # only a message can end a wait
    engine, numbers = engine_of(), range(10_000)
    timeout = {} if taker == "try_get_output_async" else {"timeout": 60.0}

    def produce() -> None:
        for number in numbers:
            if number % 97 == 0:
                time.sleep(0.0005)
            engine.output_queue.sync_q.put(number)

    async def consume() -> list[Any]:
        return [await getattr(engine, taker)(**timeout) for _ in numbers]

    producer = threading.Thread(target=produce)
    with only("delivery") as entry, contextlib.closing(new_loop()) as loop:
        loop.call_later(0.05, producer.start)
        assert loop.run_until_complete(asyncio.wait_for(consume(), 50)) == [*numbers]
        assert entry.counters["waits"] > 0
    producer.join()
    assert engine._output_drain_executor is None


@each_taker
async def test_silence_ends_in_a_check_of_the_orchestrator(taker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without a message gives None; if the orchestrator died, upstream's error, after what is queued."""
    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 0.01)
    timeout = () if taker == "try_get_output_async" else (0.01,)
    alive = [True]
    engine = engine_of(lambda: bool(alive))
    with only("delivery") as entry:
        take = partial(getattr(engine, taker), *timeout)
        assert await take() is None
        asyncio.get_running_loop().call_soon(alive.clear)
        with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
            await take()
        engine.output_queue.sync_q.put_nowait("the last")
        assert await take() == "the last"
        with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
            await take()
        assert not entry.has_failed
    if engine._output_drain_executor is not None:
        engine._output_drain_executor.shutdown()


@each_taker
async def test_handlers_have_turns_while_messages_are_queued(taker: str) -> None:
    """One turn in each batch, in which the event loop does what it has to do."""
    engine, seen, turns = engine_of(), range(3 * wrappers.BATCH), []
    for number in seen:
        engine.output_queue.sync_q.put_nowait(number)

    def turn() -> None:
        turns.append(engine.output_queue.sync_q.qsize())
        loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    loop.call_soon(turn)
    with only("delivery"):
        assert [await getattr(engine, taker)() for _ in seen] == [*seen]
    assert len(turns) == 3


async def test_a_message_between_the_check_and_the_arming_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is put after the first check and before the waiter is armed is found by the second check."""
    engine = engine_of()
    found = iter((True, False))

    def late() -> bool:
        is_empty = next(found)
        if is_empty:
            engine.output_queue.sync_q.put_nowait("just now")
        return is_empty

    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 60.0)
    monkeypatch.setattr(engine.output_queue.sync_q, "empty", late)
    with only("delivery"):
        assert await asyncio.wait_for(engine.try_get_output_async(), 30) == "just now"


@each_taker
async def test_a_wait_or_a_turn_that_is_cancelled_has_taken_nothing(
    taker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call gets the message."""
    monkeypatch.setattr(wrappers, "BATCH", 1)
    engine = engine_of()

    async def cancelled(after_s: float) -> None:
        task = asyncio.create_task(getattr(engine, taker)())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with only("delivery"):
        await cancelled(0.01)
        engine.output_queue.sync_q.put_nowait("kept")
        await cancelled(0)  # in its turn
        assert await getattr(engine, taker)() == "kept"


@each_taker
def test_an_event_loop_that_has_ended_is_not_woken(taker: str) -> None:
    """The orchestrator's next message is queued, and nothing of it is an error."""
    engine = engine_of()

    async def waited() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(getattr(engine, taker)(), 0.01)

    with only("delivery") as patch:
        asyncio.run(waited())
        engine.output_queue.sync_q.put_nowait("kept")
        assert engine.output_queue.sync_q.get_nowait() == "kept"
        assert patch.state is State.APPLIED
