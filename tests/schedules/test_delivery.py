"""The order of ``delivery`` against a plain model, in any order of arrival, and its deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import janus
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm_omni")

import torch
from vllm_omni.engine.messages import ErrorMessage, OutputMessage

from omni_fastpath.declare import State
from omni_fastpath.guard import guard_wrapper
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.delivery import PATCH
from omni_fastpath.patches.delivery.order import Deadlines, QueuedMessages
from tests.patches.drive import silent
from tests.patches.lines import FailsAt, InjectedError, Line, fail, lines_of, traced

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

Message = tuple[str | None, float, int]
"""Request, deadline, number of arrival."""

of_requests = st.tuples(st.sampled_from("abcde"), st.integers(-20, 20).map(float))
arrivals = st.lists(of_requests | st.tuples(st.none(), st.sampled_from((math.inf, -math.inf))), max_size=40)
schedules = st.lists(st.one_of(arrivals, st.integers(0, 12)), max_size=12)
"""What arrives, and how many are taken then."""


def takes(schedule: list[Any], put: Callable[[Message], None]) -> Iterator[int]:
    """Let messages arrive as the schedule has it, and say how many are taken in between, at its end all."""
    numbers = itertools.count()
    for step in [*schedule, 10_000]:
        if isinstance(step, list):
            for each in step:
                put((*each, next(numbers)))
        else:
            yield step


def plain(waiting: list[Message]) -> Message:
    """The next message by the rules, found the slow way."""
    closed = next((n for n, (_, deadline, _) in enumerate(waiting) if deadline == math.inf), len(waiting))
    if not closed:
        return waiting[0]
    free = waiting[:closed]
    request = min(free, key=lambda each: each[1:])[0]
    return next(each for each in free if each[0] == request)


@given(schedules)
def test_the_next_message_is_the_models(schedule: list[Any]) -> None:
    """Earliest deadline first, in order within a request; nothing overtakes a fatal error; none is lost."""
    waiting, source = list[Message](), deque[Message]()
    ours = QueuedMessages(source, lambda message: message[:2], dict.fromkeys(("messages", "overtaken"), 0))
    for count in takes(schedule, source.append):
        for _ in range(min(count, len(ours))):
            ours.collect()
            waiting += [each for each in ours.queued.values() if each not in waiting]
            message = ours.take()
            assert message == plain(waiting)
            waiting.remove(message)
    assert not waiting
    assert not len(ours)
    assert not ours._requests
    assert not ours._due


@given(schedules, st.integers(1, 600))
def test_an_exception_at_any_line_loses_nothing(schedule: list[Any], line: int) -> None:
    """Through upstream's drain of a janus queue, queued messages come out once each, and each request's in order."""
    entry = LEDGER.entry(PATCH)
    from omni_fastpath.patches.delivery import wrappers

    left, taken = line, list[Message]()

    def at(_where: Line) -> None:
        nonlocal left
        left -= 1
        if not left:
            fail()

    async def play() -> None:
        engine = SimpleNamespace(output_queue=janus.Queue(), is_alive=lambda: True)
        source = engine.output_queue.sync_q

        async def upstreams() -> Any:
            return None if source.empty() else source.get_nowait()

        drain = guard_wrapper(entry, wrappers.wrapped_next, "the drain", lambda *_: True)
        for count in takes(schedule, source.put_nowait):
            for _ in range(count):
                with traced("delivery", at):
                    message = await drain(upstreams, engine, (), {})
                if message is None and source.empty():
                    break
                taken.append(message)

    with pytest.MonkeyPatch.context() as patched, silent():  # it logs a line for each example
        patched.setattr(wrappers, "Deadlines", lambda *_: SimpleNamespace(of=lambda message: message[:2]))
        patched.setattr(wrappers, "LIVENESS_INTERVAL_S", 0)
        patched.setattr(entry, "state", State.APPLIED)
        patched.setattr(entry, "step_aside", wrappers.step_aside)
        asyncio.run(play())
    arrived = sum(len(step) for step in schedule if isinstance(step, list))
    assert sorted(each[2] for each in taken) == list(range(arrived))
    for request in {each[0] for each in taken} - {None}:
        mine = [each[2] for each in taken if each[0] == request]
        assert mine == sorted(mine)


@pytest.mark.parametrize("line", range(1, 9))
def test_an_exception_while_messages_are_given_back_doubles_none(line: int) -> None:
    """Each is here or there, and the next call returns the rest, all in order of arrival."""
    source = deque[Message](("a", 0.0, number) for number in range(3))
    ours = QueuedMessages(source, lambda message: message[:2], {})
    ours.collect()
    source.append(("a", 0.0, 3))
    with contextlib.suppress(InjectedError), traced("delivery", FailsAt(lines_of("delivery"), line)):
        ours.give_back()
    assert len(ours) == 4
    ours.give_back()
    assert [number for _, _, number in source] == [0, 1, 2, 3]


# ---- What is due when ----


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def output(request: str, stage: int, *, seconds: float = 0.0, finished: bool = False) -> Any:
    """Upstream's message with text, or with so many seconds of audio."""
    payload = {"audio": torch.zeros(int(seconds * 24_000)), "sr": 24_000} if seconds else {}
    outputs = SimpleNamespace(multimodal_output=payload, outputs=[])
    return OutputMessage(request_id=request, stage_id=stage, engine_outputs=outputs, finished=finished)


def test_when_a_message_is_due_that_nobody_listens_to_yet() -> None:
    """The deadline of a request's first audio is ten seconds before its arrival, that of every text its arrival.

    So is that of a complete answer, an error, and audio of unknown rate. Of what belongs to no request, an
    acknowledgement is due at once, an engine's error after everything that arrived earlier.
    """
    due, unknown = Deadlines(None, _Clock()), output("b", 2)
    unknown.engine_outputs.multimodal_output = {"audio": torch.zeros(10)}
    for message, expected in (
        (output("a", 0), ("a", 100.0)),
        (output("a", 2, seconds=0.5), ("a", 90.0)),
        (output("a", 0), ("a", 100.0)),
        (output("whole", 0, finished=True), ("whole", 100.0)),
        (output("whole", 2, seconds=0.5, finished=True), ("whole", 100.0)),
        (ErrorMessage(error="lost", request_id="a"), ("a", 100.0)),
        (unknown, ("b", 100.0)),
        (unknown, ("b", 100.0)),
        ({"type": "ack"}, (None, -math.inf)),
        (ErrorMessage(error="dead", fatal=True), (None, math.inf)),
    ):
        assert due.of(message) == expected


def test_later_audio_is_due_when_its_listener_runs_out() -> None:
    """The deadline follows from the seconds of audio since the first packet, at most five seconds after arrival."""
    due: Any = Deadlines(None, clock := _Clock())
    due.of(output("a", 2, seconds=0.5))
    clock.now = 100.1
    assert due.of(output("a", 2, seconds=0.5)) == ("a", 100.5)
    assert due.of(output("a", 2, seconds=60.0)) == ("a", 101.0)
    assert due.of(output("a", 2, seconds=0.5)) == ("a", pytest.approx(105.1))
    clock.now = 170.0  # it plays until 161.5
    assert due.of(output("a", 2, seconds=0.5)) == ("a", 161.5)
    assert due.of(output("a", 2, seconds=0.5)) == ("a", 170.5)  # its listener has begun again


def test_what_is_kept_is_bounded() -> None:
    """A listener is forgotten at the end of the request, and if that was aborted a minute after its last audio."""
    due = Deadlines(None, clock := _Clock())
    due.of(output("ended", 2, seconds=0.5))
    due.of(output("ended", 0, finished=True))
    for number in range(100):
        due.of(output(f"aborted {number}", 2, seconds=0.5))
        clock.now += 1.0
    assert "ended" not in due._listeners
    assert len(due._listeners) <= 62
