"""In which order the front end's own loop hands out messages of a real janus queue with ``deadline_order``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.patches.drive import front_end_hands_out, only
from tests.schedules.test_deadline_order import output

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

BESIDE: dict[str, tuple[str, ...]] = {"alone": (), "with_wakeup": ("final_output_wakeup",)}


@pytest.fixture(params=BESIDE)
def entry(request: pytest.FixtureRequest) -> Any:
    """The patch alone, and with the other patch of the same slots where the release has it."""
    with only(*BESIDE[request.param], "deadline_order") as found:
        yield found


async def received(messages: Sequence[Any], *, event_driven: bool) -> list[tuple[str, Any]]:
    """Which request receives which of these messages, in order; then the engine ends, and each request is told."""
    from vllm_omni.engine.messages import ErrorMessage

    fatal = ErrorMessage(error="the engine died", fatal=True)
    found = await front_end_hands_out([*messages, fatal], event_driven=event_driven)
    requests = dict.fromkeys(message.request_id for message in messages)
    assert [(name, each.error) for name, each in found[len(messages) :]] == [(name, fatal.error) for name in requests]
    return found[: len(messages)]


def queued() -> list[Any]:
    """Two requests with audio that is not due yet, then the first text and audio of a third, and its end."""
    busy = [output(name, 2, seconds=1.0) for _ in range(20) for name in ("b", "c")]
    late = [output("new", 0), output("new", 2, seconds=0.5), output("new", 2, finished=True)]
    return [*busy, *late]


async def test_first_audio_goes_first_and_nothing_overtakes_its_own(entry: Any, event_driven: bool) -> None:
    """Only others' first packets precede it; each request gets its own messages once, in order, and its error."""
    messages = queued()
    found = await received(messages, event_driven=event_driven)
    assert [name for name, _ in found][:5] == ["b", "c", "new", "new", "new"]
    for name in ("b", "c", "new"):
        got = [id(message) for request_id, message in found if request_id == name]
        assert got == [id(message) for message in messages if message.request_id == name]
    assert entry.counters["messages"] == len(messages) + 1
    assert entry.counters["overtaken"] == len(messages) - 5


async def test_messages_keep_order_after_error(entry: Any, event_driven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the tenth take fails, the queued messages are handed out in order of arrival and the state is failed."""
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
    """A plugin's deadline replaces the built-in one unless it is None; NaN switches the plugin off."""
    from omni_fastpath.hooks import HOOKS, hookimpl

    class LastFirst:
        @hookimpl
        def deadline(self, message: Any, arrived: float, deadline: float) -> float | None:
            assert deadline == pytest.approx(arrived - 10.0)
            return {"c": float("nan"), "none": None}.get(message.request_id, -ord(message.request_id[0]))

    HOOKS.register(LastFirst())
    with only("deadline_order") as entry:
        found = await received([output(name, 0) for name in ("none", *"abz")], event_driven=event_driven)
        assert [name for name, _ in found] == ["z", "b", "a", "none"]
        found = await received([output(name, 0) for name in "acz"], event_driven=event_driven)
        assert [name for name, _ in found] == ["a", "c", "z"]
        assert entry.state.value == "applied"


async def test_an_empty_queue_is_upstreams(entry: Any, event_driven: bool) -> None:
    """While nothing is queued, upstream waits and checks the orchestrator, and hands out what arrives."""
    message = output("a", 0)
    assert await front_end_hands_out([], later=[message], event_driven=event_driven) == [("a", message)]
    assert entry.counters["overtaken"] == 0
