"""The rule of what may not be overtaken: what an end waits for, and when it goes. Without threads or upstream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.patches.budgeted_drain.held_ends import HeldEnd, HeldEnds
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica, Stage
from omni_fastpath.patches.budgeted_drain.work import Work
from tests.patches.drive import queued_replica

SEEN = (True, False, True)


class _Stages:
    """Three stages with a replica each, and what is held of them.

    Args:
        arrivals: Stage and raw output of each arrival, in order; numbered from 0.
    """

    def __init__(self, *arrivals: tuple[int, Any]) -> None:
        clock = count()
        self.stages = [Stage(n, SimpleNamespace(final_output=seen)) for n, seen in enumerate(SEEN)]
        self.replicas: list[QueuedReplica] = [queued_replica(stage, clock=clock) for stage in self.stages]
        members: Any = self
        self.held_ends = HeldEnds(members)
        for stage_id, raw_output in arrivals:
            self.replicas[stage_id].waiting.append(raw_output)
            self.replicas[stage_id].follow_queue()

    def hold(self, end: HeldEnd) -> bool:
        """Hold an end if something goes before it; whether it is held."""
        blocker = self.held_ends.blocker(end)
        if blocker is not None:
            self.held_ends.hold(end, blocker)
        return blocker is not None

    def take(self, stage_id: int) -> list[HeldEnd]:
        """Take and dispatch the next raw output of a stage; the ends that may go then."""
        replica = self.replicas[stage_id]
        assert replica.dequeue() is not None
        replica.follow_queue()
        return list(self.held_ends.release(replica))


def of(*request_ids: str, finish: str | None = None) -> Any:
    """A raw output with an entry of each request."""
    return SimpleNamespace(outputs=[SimpleNamespace(request_id=each, finish_reason=finish) for each in request_ids])


def end(number: int, *request_ids: str, stage: int = 2, at: Iterable[int] | None = None, **more: Any) -> HeldEnd:
    """What ends these requests at a stage, and arrived with this number; it waits at these stages, or those before."""
    replica: Any = SimpleNamespace(slot=(stage, 0))
    limits = dict.fromkeys(range(stage) if at is None else at, float(number))
    return HeldEnd(Work(None, replica, number), frozenset(request_ids), limits, **more)


def test_end_waits_for_what_arrived_before_it_of_its_request() -> None:
    """At the stages before, up to the last such arrival; neither another request's nor what came later."""
    found = _Stages((0, of("R")), (0, of("S", "R")), (0, of("S")), (1, of("R")), (0, of("R")))
    held = end(4, "R")
    assert found.hold(held)
    assert "R" in found.held_ends
    assert not found.hold(end(4, "T"))
    assert [found.take(stage) for stage in (0, 0, 1)] == [[], [], [held]]
    assert not found.held_ends
    assert not any(stage.is_awaited() for stage in found.stages)


@pytest.mark.parametrize(("at", "waits"), [((), False), ((0,), False), ((1,), True), (range(3), True)])
def test_where_an_end_waits(at: Iterable[int], waits: bool) -> None:
    """At the stages of which it has a limit."""
    found = _Stages((1, of("R")))
    assert found.hold(end(1, "R", at=at)) is waits
    assert found.stages[1].is_awaited() is waits


def test_failure_waits_for_ends_alone_where_nothing_is_seen() -> None:
    """Of a stage that is not seen the end carries the stage's statistics; what the user sees goes first in any case."""
    found = _Stages((1, of("R")), (0, of("R")))
    failure = end(2, "R", at=range(3), failed=True)
    assert found.hold(failure)
    assert found.take(0) == [failure]
    assert _Stages((1, of("R", finish="stop"))).hold(end(1, "R", at=range(3), failed=True))


def test_end_goes_behind_those_that_are_held_of_its_request() -> None:
    """An end behind that of the stage before; a death of several requests behind each of theirs."""
    found = _Stages((0, of("R")), (1, of("R")))
    middle, last, death = end(2, "R", stage=1), end(3, "R"), end(4, "S", "R", stage=0, at=range(3))
    for each in (middle, last, death):
        assert found.hold(each)
    assert found.take(1) == []
    assert found.take(0) == [middle, last, death]


def test_what_follows_a_held_end_from_the_same_replica_stays_behind_it() -> None:
    """Also what ends nothing; the same request's end at an earlier stage does not wait for either."""
    found = _Stages((1, of("R")))
    held, follower, other = end(1, "R"), end(2, "R", at=()), end(3, "R", stage=0)
    assert found.hold(held)
    assert found.hold(follower)
    assert not found.hold(other)
    assert found.take(1) == [held, follower]


def test_message_that_later_text_would_overwrite_waits_for_it() -> None:
    """What waits at such a stage goes first whenever it came; an error there that came later waits for the message."""
    found = _Stages((0, of("R")))
    held, error = end(1, "R"), end(3, "R", stage=0, at=range(3), failed=True)
    held.limits = {0: math.inf, 1: 1}
    assert found.hold(held)
    found.replicas[0].waiting.append(of("R"))
    assert found.take(0) == []
    assert found.hold(error)
    assert found.take(0) == [held, error]


def test_what_an_end_waits_for_may_be_asked_twice() -> None:
    """Asking changes nothing: the same blocker, nothing awaited, nothing parked."""
    found = _Stages((0, of("R")), (0, of("R")))
    asked = [found.held_ends.blocker(end(2, "R")) for _ in range(2)]
    assert asked == [found.replicas[0].arrivals[1]] * 2
    assert not found.held_ends
    assert not found.stages[0].is_awaited()
    assert not any(arrival.behind for arrival in found.replicas[0].arrivals)


def test_what_waits_is_read_once_whatever_the_backlog() -> None:
    """Each raw output is read when the first end asks, and not for each end; what has left is forgotten."""
    reads: list[str] = []

    class Read:
        def __init__(self, name: str) -> None:
            self.name, self.finish_reason = name, None

        @property
        def request_id(self) -> str:
            reads.append(self.name)
            return self.name

    names = [f"R{n % 10}" for n in range(100)]
    found = _Stages(*((0, SimpleNamespace(outputs=[Read(name)])) for name in names))
    assert reads == []
    held = [end(100, f"R{n}") for n in range(10)]
    assert all(found.hold(each) for each in held)
    assert reads == names
    assert [len(found.take(0)) for _ in names] == [0] * 90 + [1] * 10
    assert len(reads) == 100
    assert not found.replicas[0]._by_request


def test_arrivals_follow_the_queue_whatever_puts_and_takes() -> None:
    """What another reader took is past, and what it put is numbered when it is noticed."""
    found = _Stages((0, "a"), (0, "b"), (1, "c"))
    replica = found.replicas[0]

    def numbers() -> tuple[list[int], int]:
        replica.follow_queue()
        return [arrival.number for arrival in replica.arrivals], replica.last_taken

    assert numbers() == ([0, 1], -1)
    replica.waiting.popleft()
    assert numbers() == ([1], 0)
    replica.waiting.append("d")
    replica.dequeue()
    assert numbers() == ([3], 1)
    replica.waiting.clear()
    assert numbers() == ([], 3)


def test_an_exception_in_a_queue_is_waited_for_by_none() -> None:
    """It is no request's."""
    assert not _Stages((0, EOFError())).hold(end(2, "R"))
