"""The front end's own loop over a real janus queue: who gets which message when, with ``deadline_order``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.drive import only
from tests.schedules.test_deadline_order import output

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

BESIDE: dict[str, tuple[str, ...]] = {"alone": (), "with_wakeup": ("final_output_wakeup",)}


@pytest.fixture(params=BESIDE)
def entry(request: pytest.FixtureRequest) -> Any:
    """The patch alone, and with the other patch on the same slots, on a release that has use for that."""
    with only(*BESIDE[request.param], "deadline_order") as found:
        yield found


async def received(messages: Sequence[Any], *, event_driven: bool) -> list[tuple[str, Any]]:
    """What upstream's loop hands to the requests' queues, of messages that are queued before it starts.

    The last message is the error that ends an engine, so that the loop ends by itself, after it has told each request.

    Args:
        messages: As the orchestrator puts them.
        event_driven: The mode.
    """
    from vllm_omni.engine.messages import ErrorMessage

    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    found: list[tuple[str, Any]] = []

    def queue_of(request_id: str) -> Any:
        async def put(message: Any) -> None:
            found.append((request_id, message))

        return SimpleNamespace(put=put)

    pipeline = without_orchestrator()
    for message in (*messages, ErrorMessage(error="the engine died", fatal=True)):
        pipeline.outputs.sync_q.put_nowait(message)
    queues = {each: queue_of(each) for each in dict.fromkeys(message.request_id for message in messages)}
    served = front_end(pipeline, queues, event_driven=event_driven)
    served._final_output_handler()
    await asyncio.wait_for(served.final_output_task, 30)
    told = found[len(messages) :]
    assert [(name, message.error) for name, message in told] == [(name, "the engine died") for name in queues]
    return found[: len(messages)]


def queued() -> list[Any]:
    """Two requests with much audio that nobody needs yet, then the first text and audio of a third, and its end."""
    busy = [output(name, 2, seconds=1.0) for _ in range(20) for name in ("b", "c")]
    late = [output("new", 0), output("new", 2, seconds=0.5), output("new", 2, finished=True)]
    return [*busy, *late]


async def test_first_audio_goes_first_and_nothing_overtakes_its_own(entry: Any, event_driven: bool) -> None:
    """Only others' first packets go before it; each request gets its very messages once, in order, and its error."""
    messages = queued()
    found = await received(messages, event_driven=event_driven)
    assert [name for name, _ in found][:5] == ["b", "c", "new", "new", "new"]
    for name in ("b", "c", "new"):
        got = [id(message) for request_id, message in found if request_id == name]
        assert got == [id(message) for message in messages if message.request_id == name]
    assert entry.counters["messages"] == len(messages) + 1
    assert entry.counters["overtaken"] == len(messages) - 5


async def test_after_an_error_of_ours_messages_go_as_they_arrived(
    entry: Any, event_driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenth that is taken fails: what was queued goes in order of arrival, and the patch is failed."""
    from omni_fastpath.patches.deadline_order.queued_messages import QueuedMessages

    take, left = QueuedMessages.take, 10

    def failing(self: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyError("a deadline")
        return take(self)

    monkeypatch.setattr(QueuedMessages, "take", failing)
    messages = queued()
    found = [id(message) for _, message in await received(messages, event_driven=event_driven)]
    before = found[:9]
    assert found[9:] == [id(message) for message in messages if id(message) not in before]
    assert entry.state.value == "failed"


async def test_a_plugin_orders_messages(event_driven: bool) -> None:
    """Its deadline takes the place of ours; one that is no number switches the plugin off, and ours is in force."""
    from omni_fastpath.hooks import HOOKS, hookimpl

    class LastFirst:
        @hookimpl
        def deadline(self, message: Any, arrived: float, deadline: float) -> float:
            del arrived, deadline
            return float("nan") if message.request_id == "c" else -ord(message.request_id)

    HOOKS.register(LastFirst())
    with only("deadline_order") as entry:
        found = await received([output(name, 0) for name in "abz"], event_driven=event_driven)
        assert [name for name, _ in found] == ["z", "b", "a"]
        found = await received([output(name, 0) for name in "acz"], event_driven=event_driven)
        assert [name for name, _ in found] == ["a", "c", "z"]
        assert entry.state.value == "applied"


async def test_an_empty_queue_is_upstreams(entry: Any, event_driven: bool) -> None:
    """Nothing queued: upstream waits and looks at the orchestrator, and gives what comes; another queue is its own."""
    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    pipeline, came = without_orchestrator(), asyncio.Event()

    async def put(_message: Any) -> None:
        came.set()

    served = front_end(pipeline, {"a": SimpleNamespace(put=put)}, event_driven=event_driven)
    served._final_output_handler()
    await asyncio.sleep(0.01)
    pipeline.writer.put_nowait(output("a", 0))
    await asyncio.wait_for(came.wait(), 30)
    assert entry.counters["overtaken"] == 0
    served.final_output_task.cancel()
    await asyncio.gather(served.final_output_task, return_exceptions=True)
