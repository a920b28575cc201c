"""What is held, and when it may go: by number, by request, and by what it finds when it could. On stand-ins."""

from __future__ import annotations

from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")

from omni_fastpath.patches.budgeted_drain.overtaking import HeldEnd, HeldEnds
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica, Stage


async def _dispatch() -> None:
    """Nothing: these tests look at what is given out."""


def end(number: int, *request_ids: str, **more: Any) -> HeldEnd:
    """Something that came at this number and ends these requests."""
    return HeldEnd(number, request_ids, _dispatch, **more)


def replica(waiting: int) -> QueuedReplica:
    """A replica at which so many raw outputs wait, numbered from 0."""
    stage = Stage(0, SimpleNamespace(final_output=True))
    return QueuedReplica(stage, 0, None, deque(range(waiting)), count())


def take(found: QueuedReplica) -> None:
    """Somebody takes its next raw output."""
    found.waiting.popleft()
    found.arrivals.note_taken()


def test_end_goes_when_every_replica_has_passed_its_number() -> None:
    """Not before, and the replica that comes last gives it out."""
    first, second = replica(2), replica(1)
    held_ends = HeldEnds()
    held = end(9, "R")
    held_ends.add(held, {first: 0, second: 0})
    assert held_ends
    take(first)
    assert held_ends.release_after(first) == []
    take(second)
    assert held_ends.release_after(second) == [held]
    assert held.released
    assert not held_ends
    assert not first.awaited_by
    assert not second.awaited_by


def test_of_one_request_the_earliest_goes_first() -> None:
    """A later one waits for the earlier one, although it was held first; another request's is in its own order."""
    awaited = replica(1)
    held_ends = HeldEnds()
    early, late, other = end(5, "R"), end(6, "R"), end(7, "S")
    held_ends.add(late, {awaited: 0})
    held_ends.add(early, {awaited: 0})
    held_ends.add(other, {awaited: 0})
    assert held_ends.any_before(7, ["R"])
    assert not held_ends.any_before(5, ["R", "T"])
    take(awaited)
    assert held_ends.release_after(awaited) == [early, late, other]


def test_death_waits_for_every_request_that_it_strands() -> None:
    """It goes when nothing that came before is held of any of them."""
    slow, fast = replica(1), replica(1)
    held_ends = HeldEnds()
    held, death = end(3, "R"), end(4, "R", "S")
    held_ends.add(held, {slow: 0})
    held_ends.add(death, {fast: 0})
    take(fast)
    assert held_ends.release_after(fast) == []
    take(slow)
    assert held_ends.release_after(slow) == [held, death]


def test_replica_that_leaves_is_waited_for_no_longer() -> None:
    """What waits in it is lost with it."""
    leaving = replica(3)
    held_ends = HeldEnds()
    held = end(9, "R")
    held_ends.add(held, {leaving: 2})
    assert held_ends.release_without(leaving) == [held]
    assert not leaving.awaited_by


def test_more_is_asked_when_it_could_go() -> None:
    """What has come by then is waited for too; with nothing it goes. Others of the request do not wait for it."""
    awaited = replica(2)
    held_ends = HeldEnds()
    answers = [{awaited: 1.0}, {}]
    held = end(9, "R", more=lambda: answers.pop(0))
    held_ends.add(held, {awaited: 0})
    assert not held_ends.any_before(10, ["R"])
    take(awaited)
    assert held_ends.release_after(awaited) == []
    take(awaited)
    assert held_ends.release_after(awaited) == [held]
    assert answers == []


def test_source_is_remembered_while_it_is_held() -> None:
    """Nothing of a request overtakes what is held of it from the same replica."""
    awaited, source = replica(1), replica(0)
    held_ends = HeldEnds()
    held_ends.add(end(9, "R", source=source), {awaited: 0})
    assert held_ends.any_from(source, "R")
    assert not held_ends.any_from(source, "S")
    assert not held_ends.any_from(awaited, "R")
    take(awaited)
    held_ends.release_after(awaited)
    assert not held_ends.any_from(source, "R")


def test_all_are_given_out_once_in_the_order_of_arrival() -> None:
    """A death that is held for several requests is one, and a replica that is passed later gives it out no more."""
    awaited = replica(1)
    held_ends = HeldEnds()
    death, held = end(8, "R", "S"), end(7, "R")
    held_ends.add(death, {awaited: 0})
    held_ends.add(held, {awaited: 0})
    assert held_ends.release_all() == [held, death]
    assert not held_ends
    take(awaited)
    assert held_ends.release_after(awaited) == []
