"""The replay: its check of content, and one short run on the real upstream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replay.load import CODE2WAV, SERVER, TALKER, THINKER, Load, Schedule
from benchmarks.replay.measure import Inbox, Stamps, out_of_order
from benchmarks.replay.subjects import ARMS

LOAD = Load(SERVER, replicas=2, rate=800.0, seconds=12.0)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """One cell's schedule."""
    return Schedule(LOAD)


# ---- The check of content ----


def test_a_replica_that_is_not_first_in_first_out_is_found(schedule: Schedule) -> None:
    """Stages and replicas may come in any order; a replica's own raw outputs may not. A held part may come late."""
    first, second = schedule.places[TALKER, 0][:2]
    other = schedule.places[CODE2WAV, 1][0]
    assert not list(out_of_order([first, other, second, first], schedule))
    assert len(list(out_of_order([other, second, first], schedule))) == 1


@pytest.mark.parametrize(
    ("tokens", "ends", "problem"),
    [
        ((0, 1), (False, True), None),
        ((0, 2), (False, True), "output 1 has the tokens"),
        ((0,), (True,), "not where it should end"),
    ],
)
async def test_lost_doubled_and_early_outputs_are_found(
    tokens: tuple[int, ...], ends: tuple[bool, ...], problem: str | None
) -> None:
    """Each output of the thinker carries its position."""
    stamps = Stamps(first_text=[-1], first_audio=[-1], final=[0])
    inbox = Inbox("one", 0, (2, 2, 0), SERVER, stamps)
    for token, end in zip(tokens, ends, strict=True):
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])], finished=end)
        await inbox.put(SimpleNamespace(stage_id=THINKER, engine_outputs=output, finished=end))
    await asyncio.wait_for(inbox.read(), 10)
    assert (problem is None) == (not stamps.errors)
    assert problem is None or any(problem in each for each in stamps.errors)
    assert inbox.done


# ---- On the real upstream ----


@pytest.mark.upstream
def test_a_short_run_delivers_everything_in_order_and_the_arm_is_on() -> None:
    """Far below saturation; the run itself asserts the content and the state of the patches."""
    from benchmarks.rigs.driver import run_arm

    arguments = ("--cell", "server-0.4", "--seconds", "2", "--capacity", "250")
    found: dict[str, Any] = run_arm("benchmarks.replay", ARMS["fastpath-event"], *arguments)
    assert found["content_checked"]
    assert found["unfinished_requests"] == found["unfinished_raw_outputs"] == 0
    assert found["routed"] == found["sent"] > 100
    assert found["first_audio"]["n"] == found["requests"]
    assert found["counters"]["budgeted_drain"]["items"] >= found["routed"]
    assert found["residence"].keys() == {"thinker", "talker", "code2wav"}
