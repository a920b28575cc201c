"""Upstream's engine and drain over a real janus queue, with a producer on another thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    """The patch alone."""
    with only("final_output_wakeup"):
        yield


def _engine(is_alive: Callable[[], bool] = lambda: True) -> Any:
    """Upstream's engine without stages; *is_alive* says whether its orchestrator lives."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    return front_end(without_orchestrator(is_alive), {}, event_driven=False).engine


def _counters() -> dict[str, int]:
    from omni_fastpath.ledger import LEDGER

    return LEDGER.named("final_output_wakeup").counters


each_drain = pytest.mark.parametrize("drain", ["try_get_output_async", "get_output_blocking_async"])
"""Upstream's in poll mode and in event-driven mode, which wait alike under the patch."""


@each_drain
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_put_wakes_the_front_end(drain: str, new_loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand messages, in bursts and singly, arrive once each and in order, and no thread waits for them."""
    from omni_fastpath.patches.final_output_wakeup import wrappers

    monkeypatch.setattr(wrappers, "_LIVENESS_INTERVAL_S", 60.0)  # only a message can end a wait
    engine, numbers = _engine(), range(10_000)

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
    assert _counters()["woken"] > 0
    assert _counters()["liveness_checks"] == 0
    assert engine._output_drain_executor is None


@each_drain
async def test_silence_ends_in_a_check_of_the_orchestrator(drain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without a message gives None; if the orchestrator died, upstream's error, after what is queued."""
    from omni_fastpath.patches.final_output_wakeup import wrappers

    monkeypatch.setattr(wrappers, "_LIVENESS_INTERVAL_S", 0.01)
    alive = [True]
    engine = _engine(lambda: bool(alive))
    assert await getattr(engine, drain)() is None
    assert _counters() == {"woken": 0, "liveness_checks": 1, "turns": 0}
    assert engine._output_drain_executor is None
    asyncio.get_running_loop().call_soon(alive.clear)
    for message in (None, "the last", None):
        if message is None:
            with pytest.raises(RuntimeError, match="Orchestrator died unexpectedly"):
                await getattr(engine, drain)()
        else:
            engine.output_queue.sync_q.put_nowait(message)
            assert await getattr(engine, drain)() == message


@each_drain
async def test_another_queue_than_januss_is_left_to_upstream(drain: str) -> None:
    """An engine whose queue is not janus's, as in upstream's own tests, is served by upstream alone."""
    engine = _engine()
    sync = queue.Queue[str]()
    engine.output_queue = SimpleNamespace(sync_q=sync)
    try:
        sync.put("ready")
        assert await getattr(engine, drain)() == "ready"
        given = {"timeout": 0.3} if "blocking" in drain else {}
        assert await getattr(engine, drain)(**given) is None
    finally:
        if engine._output_drain_executor is not None:
            engine._output_drain_executor.shutdown()
    assert _counters() == {"woken": 0, "liveness_checks": 0, "turns": 0}


async def test_a_message_between_the_check_and_the_arming_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is put after the first check and before the waiter is armed is found by the second check."""
    from omni_fastpath.patches.final_output_wakeup import wrappers

    engine = _engine()
    arm = wrappers.WakeOnPut.arm

    def late(self: Any) -> Any:
        engine.output_queue.sync_q.put_nowait("just now")
        return arm(self)

    monkeypatch.setattr(wrappers, "_LIVENESS_INTERVAL_S", 60.0)
    monkeypatch.setattr(wrappers.WakeOnPut, "arm", late)
    assert await asyncio.wait_for(engine.try_get_output_async(), 30) == "just now"


@pytest.mark.parametrize("in_a_turn", [False, True])
async def test_a_drain_that_is_cancelled_has_taken_nothing(in_a_turn: bool) -> None:
    """A cancelled wait leaves no waiter behind, and a turn of the event loop is taken before the message is."""
    from omni_fastpath.patches.final_output_wakeup.wrappers import WakeOnPut

    engine = _engine()
    if in_a_turn:
        engine.output_queue.sync_q.put_nowait("kept")
        WakeOnPut.of(engine.output_queue).left = 0
    task = asyncio.create_task(engine.try_get_output_async())
    await asyncio.sleep(0 if in_a_turn else 0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not in_a_turn:
        engine.output_queue.sync_q.put_nowait("kept")
    assert await engine.try_get_output_async() == "kept"


def test_a_closed_front_end_does_not_disturb_the_orchestrator() -> None:
    """A put after the waiter's event loop was closed succeeds."""
    from omni_fastpath.patches.final_output_wakeup.wrappers import WakeOnPut

    engine = _engine()
    loop = asyncio.new_event_loop()
    WakeOnPut.of(engine.output_queue)._waiter = loop.create_future()
    loop.close()
    engine.output_queue.sync_q.put_nowait("late")
    assert engine.output_queue.sync_q.get_nowait() == "late"


def test_taking_the_patch_off_gives_the_queue_back() -> None:
    """After an uninstall the janus queue has its own ``_put`` again."""
    from omni_fastpath.install import uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches.final_output_wakeup.wrappers import WakeOnPut

    engine = _engine()
    WakeOnPut.of(engine.output_queue)
    assert "_put" in vars(engine.output_queue)
    uninstall(LEDGER.named("final_output_wakeup").patch)
    assert "_put" not in vars(engine.output_queue)


# ---- Turns of the event loop ----


async def test_the_event_loop_gets_a_turn_after_a_batch() -> None:
    """After every eight of many queued messages, everything else on the event loop has a turn."""
    from omni_fastpath.patches.final_output_wakeup.wrappers import BATCH

    engine, loop = _engine(), asyncio.get_running_loop()
    for number in range(100):
        engine.output_queue.sync_q.put_nowait(number)
    taken, batches = list[int](), [0]
    for _ in range(100):
        taken.append(await engine.try_get_output_async())
        batches[-1] += 1
        if batches[-1] == 1:
            loop.call_soon(batches.append, 0)
    assert set(batches[1:-1]) == {BATCH}
    assert taken == list(range(100))
