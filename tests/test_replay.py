"""The replay: its schedule, its figures, and one short run on the real upstream."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replay import figures
from benchmarks.replay.load import CELLS, CODE2WAV, SERVER, STAGES, STEP_MS, TALKER, THINKER, Load, Schedule
from benchmarks.replay.measure import Inbox, Stamps, out_of_order
from benchmarks.replay.subjects import ARMS

LOAD = Load(SERVER, replicas=2, rate=800.0, seconds=12.0)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """One cell's schedule."""
    return Schedule(LOAD)


# ---- The schedule ----


def test_the_schedule_is_the_same_again_and_another_for_another_seed(schedule: Schedule) -> None:
    """All arms of a round get the same raw outputs at the same times."""
    again, other = Schedule(LOAD), Schedule(dataclasses.replace(LOAD, seed=2))
    assert again.order == schedule.order == sorted(schedule.order)
    assert list(again.entries(CODE2WAV, 1)) == list(schedule.entries(CODE2WAV, 1))
    assert other.order != schedule.order


def test_the_rate_is_that_of_the_cell_with_the_ratios_of_the_stages(schedule: Schedule) -> None:
    """Counts of a Poisson process are within five deviations."""
    assert CELLS["dear-0.95"].load(1000, 30, 1).rate == pytest.approx(950)
    for stage, step in enumerate(STEP_MS):
        expected = 800.0 * (1 / step) / sum(1 / each for each in STEP_MS) * 12.0
        found = sum(len(schedule.times[stage, replica]) for replica in range(2))
        fill = LOAD.lag_s(CODE2WAV) / 12.0
        assert expected * (1 - fill) - 5 * expected**0.5 < found < expected + 5 * expected**0.5


def test_each_request_has_its_outputs_in_order_and_ends_once_a_stage(schedule: Schedule) -> None:
    """The load is stationary, with an entry for each slot; positions count up, and the last one alone ends."""
    for stage in STAGES:
        seen: dict[str, int] = {}
        ended: set[str] = set()
        for replica in range(2):
            for raw in schedule.entries(stage, replica):
                assert len(raw) == SERVER.entries
                for entry in raw:
                    assert entry.request_id not in ended
                    assert entry.position == seen.get(entry.request_id, 0)
                    seen[entry.request_id] = entry.position + 1
                    if entry.finished:
                        ended.add(entry.request_id)
        assert ended == set(seen) == {each.id for each in schedule.requests}
        assert [seen[each.id] for each in schedule.requests] == [each.total for each in schedule.steps[stage]]


# ---- The figures ----


def _ideal(schedule: Schedule) -> Stamps:
    """A run in which every raw output is taken 500 ns after it was sent, and routed 1000 ns later."""
    stamps = Stamps(started_ns=0, fed_ns=int(schedule.load.seconds * 1e9), ended_ns=int(schedule.load.seconds * 1e9))
    for number, (due_ns, _, _) in enumerate(schedule.order):
        stamps.sent.append(due_ns)
        stamps.numbers.append(number)
        stamps.began.append(due_ns + 500)
        stamps.routed.append(due_ns + 1500)
    stamps.final = [each.end_ns for each in schedule.requests]
    stamps.first_audio = [-1] * len(schedule.requests)
    return stamps


def test_residence_is_from_sent_to_routed_or_so_far(schedule: Schedule) -> None:
    """The same for all in the ideal run; a run that was cut off must not look better for it."""
    stamps = _ideal(schedule)
    found = figures.figures(stamps, schedule)
    for name in ("thinker", "talker", "code2wav"):
        assert found["residence"][name]["p50"] == found["residence"][name]["max"] == pytest.approx(0.0015)
    assert found["first_audio"]["n"] == len(schedule.requests)
    assert found["first_audio"]["mean"] == pytest.approx(0.0015)
    assert found["unfinished_raw_outputs"] == 0
    for each in (stamps.numbers, stamps.began, stamps.routed):
        del each[len(stamps.sent) // 2 :]
    found = figures.figures(stamps, schedule)
    assert found["unfinished_raw_outputs"] == len(stamps.sent) - len(stamps.sent) // 2
    assert found["residence"]["thinker"]["max"] == pytest.approx(6000, rel=0.1)


def test_a_raw_output_in_parts_is_one_and_entries_ahead_are_those_taken_meanwhile(schedule: Schedule) -> None:
    """Three raw outputs, of which the first is taken last and in two parts; the user waits for its main part."""
    stamps = Stamps(ended_ns=1000)
    stamps.sent = [0, 10, 20]
    for number, began in ((1, 30), (2, 40), (0, 50), (0, 70)):
        stamps.numbers.append(number)
        stamps.began.append(began)
        stamps.routed.append(began + 5)
    dispatches = figures.Dispatches(stamps, schedule)
    assert [dispatches.ahead(number) for number in range(3)] == [2, 0, 1]
    assert (dispatches.main_routed[0], dispatches.routed[0]) == (55, 75)


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
