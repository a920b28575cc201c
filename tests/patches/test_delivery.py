"""How upstream's front end waits for the orchestrator's messages, gives way, and hands them out, with ``delivery``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import State
from omni_fastpath.patches.delivery import incoming, wrappers
from tests.patches.drive import front_end_hands_out, only
from tests.schedules.test_delivery import output

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.fixture(params=[{}, {"by_deadline": False}], ids=["by deadline", "by arrival"])
def entry(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The patch alone."""
    with only("delivery", **request.param) as found:
        yield found


def engine_of(is_alive: Callable[[], bool] = lambda: True) -> Any:
    """Upstream's engine without stages; *is_alive* says whether its orchestrator lives."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    return front_end(without_orchestrator(is_alive), {}, event_driven=False).engine


def delivery_of(engine: Any) -> Any:
    """The patch's object for an engine's queue."""
    return wrappers.Delivery.of(engine.output_queue)


# ---- Waiting ----


each_drain = pytest.mark.parametrize("drain", ["try_get_output_async", "get_output_blocking_async"])
"""Upstream's in poll mode and in event-driven mode, which wait alike under the patch."""


@each_drain
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_put_wakes_the_front_end(
    entry: Any, drain: str, new_loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand messages, in bursts and singly, arrive once each and in order, and no thread waits for them."""
    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 60.0)  # only a message can end a wait
    engine, numbers = engine_of(), range(10_000)

    def produce() -> None:
        for number in numbers:
            if number % 97 == 0:
                time.sleep(0.0005)
            engine.output_queue.sync_q.put(number)

    async def consume() -> list[Any]:
        return [await getattr(engine, drain)() for _ in numbers]

    producer = threading.Thread(target=produce)
    loop = new_loop()
    loop.call_later(0.05, producer.start)
    found = loop.run_until_complete(asyncio.wait_for(consume(), 60))
    loop.close()
    producer.join()
    assert found == [*numbers]
    assert entry.counters["woken"] > 0
    assert entry.counters["messages"] == len(numbers)
    assert engine._output_drain_executor is None


@each_drain
async def test_silence_ends_in_a_check_of_the_orchestrator(
    entry: Any, drain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait without a message gives None; if the orchestrator died, upstream's error, after what is queued."""
    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 0.01)
    alive = [True]
    engine = engine_of(lambda: bool(alive))
    assert await getattr(engine, drain)() is None
    asyncio.get_running_loop().call_soon(alive.clear)
    for message in (None, "the last", None):
        if message is None:
            with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
                await getattr(engine, drain)()
        else:
            engine.output_queue.sync_q.put_nowait(message)
            assert await getattr(engine, drain)() == message
    assert not entry.has_failed


async def test_a_message_between_the_check_and_the_arming_is_not_missed(
    entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is put after the first check and before the waiter is armed is found by the second check."""
    engine = engine_of()
    found = iter((True, False, False))

    def late() -> bool:
        is_empty = next(found)
        if is_empty:
            engine.output_queue.sync_q.put_nowait("just now")
        return is_empty

    monkeypatch.setattr(wrappers, "LIVENESS_INTERVAL_S", 60.0)
    monkeypatch.setattr(engine.output_queue.sync_q, "empty", late)
    assert await asyncio.wait_for(engine.try_get_output_async(), 30) == "just now"
    assert entry.counters["woken"] == 0


@pytest.mark.parametrize("at", ["a wait", "a turn", "a pause"])
async def test_a_drain_that_is_cancelled_has_taken_nothing(entry: Any, at: str) -> None:
    """A cancelled wait leaves no waiter behind; a turn and a pause come before the message is taken."""
    engine = engine_of()
    if at != "a wait":
        engine.output_queue.sync_q.put_nowait("kept")
    if at == "a turn":
        delivery_of(engine)._left = 0
    if at == "a pause":
        incoming.ON_THEIR_WAY.add(object())  # type: ignore[arg-type]
    task = asyncio.create_task(engine.try_get_output_async())
    await asyncio.sleep(0.01 if at == "a wait" else 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    incoming.ON_THEIR_WAY.clear()
    if at == "a wait":
        engine.output_queue.sync_q.put_nowait("kept")
    assert await engine.try_get_output_async() == "kept"


async def test_the_event_loop_gets_a_turn_after_a_batch(entry: Any) -> None:
    """After every eight of many queued messages, everything else on the event loop has a turn."""
    engine, loop = engine_of(), asyncio.get_running_loop()
    for number in range(100):
        engine.output_queue.sync_q.put_nowait(number)
    taken, batches = list[int](), [0]
    for _ in range(100):
        taken.append(await engine.try_get_output_async())
        batches[-1] += 1
        if batches[-1] == 1:
            loop.call_soon(batches.append, 0)
    assert set(batches[1:-1]) == {8}
    assert taken == list(range(100))


# ---- The order ----


async def received(messages: Sequence[Any], *, event_driven: bool) -> list[tuple[str, Any]]:
    """Which request receives which of these messages, in order; then the engine ends, and each request is told."""
    from vllm_omni.engine.messages import ErrorMessage

    fatal = ErrorMessage(error="the engine died", fatal=True)
    found = await front_end_hands_out([*messages, fatal], event_driven=event_driven)
    requests = dict.fromkeys(message.request_id for message in messages)
    assert [(name, each.error) for name, each in found[len(messages) :]] == [(name, fatal.error) for name in requests]
    return found[: len(messages)]


async def test_first_audio_goes_first_and_nothing_overtakes_its_own(entry: Any, event_driven: bool) -> None:
    """Only first packets of busy requests precede it, or all that arrived; each request gets its own once, in order."""
    busy = [output(name, 2, seconds=1.0) for _ in range(20) for name in ("b", "c")]
    messages = [*busy, output("new", 0), output("new", 2, seconds=0.5), output("new", 2, finished=True)]
    found = await received(messages, event_driven=event_driven)
    is_first = [name for name, _ in found][:5] == ["b", "c", "new", "new", "new"]
    assert is_first is entry.options.by_deadline
    for name in ("b", "c", "new"):
        got = [id(message) for request_id, message in found if request_id == name]
        assert got == [id(message) for message in messages if message.request_id == name]
    assert entry.counters["messages"] == len(messages) + 1
    assert entry.counters["overtaken"] == (len(messages) - 5 if is_first else 0)


async def test_a_failure_on_another_thread_reorders_nothing(
    entry: Any, event_driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a drain that runs nor a new one, when another engine's thread has only set the state."""
    engine = engine_of()
    for each in ("a", "b"):
        for message in (output(each, 0), output(each, 2, seconds=0.5), output(each, 2, seconds=1.0)):
            engine.output_queue.sync_q.put_nowait(message)
    arrived, late = [*engine.output_queue._queue], output("c", 0)
    drain = engine.get_output_blocking_async if event_driven else engine.try_get_output_async
    assert await drain() is arrived[0]
    delivery_of(engine)._left = 0  # the one that runs gives the event loop a turn
    running = asyncio.create_task(drain())
    await asyncio.sleep(0)
    engine.output_queue.sync_q.put_nowait(late)
    monkeypatch.setattr(entry, "state", State.FAILED)
    found = [await drain(), await running, *[await drain() for _ in range(4)]]
    assert [each is expected for each, expected in zip(found, [*arrived[1:], late], strict=True)] == [True] * 6


async def test_a_plugin_orders_messages(event_driven: bool) -> None:
    """A plugin's deadline replaces the built-in one unless it is None; NaN switches the plugin off."""
    from omni_fastpath.hooks import HOOKS, hookimpl

    class LastFirst:
        @hookimpl
        def deadline(self, message: Any, arrived: float, deadline: float) -> float | None:
            assert deadline == arrived
            return {"c": float("nan"), "none": None}.get(message.request_id, -ord(message.request_id[0]))

    HOOKS.register(LastFirst())
    with only("delivery") as entry:
        found = await received([output(name, 0) for name in ("none", *"abz")], event_driven=event_driven)
        assert [name for name, _ in found] == ["z", "b", "a", "none"]
        found = await received([output(name, 0) for name in "acz"], event_driven=event_driven)
        assert [name for name, _ in found] == ["a", "c", "z"]
        assert entry.state.value == "applied"
