"""What a held end waits for, where the state machine in ``tests/schedules`` does not show it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from omni_fastpath.patches.budgeted_drain.held_ends import HeldEnd, HeldEnds
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica, Stage
from omni_fastpath.patches.budgeted_drain.work import Work
from tests.patches.drive import queued_replica

SEEN = (True, False, True)


class _Stages:
    """Three stages with a replica each, and their held ends.

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
        """Hold an end if it has a blocker; whether it is held."""
        blocker = self.held_ends.blocker(end)
        if blocker is not None:
            self.held_ends.hold(end, blocker)
        return blocker is not None

    def take(self, stage_id: int) -> list[HeldEnd]:
        """Take the next raw output of a stage; the ends that are released then."""
        replica = self.replicas[stage_id]
        assert replica.dequeue() is not None
        replica.follow_queue()
        return list(self.held_ends.release(replica))


def of(*request_ids: str, finish: str | None = None) -> Any:
    """A raw output with an entry of each request."""
    return SimpleNamespace(outputs=[SimpleNamespace(request_id=each, finish_reason=finish) for each in request_ids])


def end(number: int, *request_ids: str, stage: int = 2, at: tuple[int, ...] = (0, 1), failed: bool = False) -> HeldEnd:
    """The end of requests at a stage, which arrived with this number and waits for these stages."""
    replica: Any = SimpleNamespace(slot=(stage, 0))
    limits = dict.fromkeys(at, float(number))
    return HeldEnd(Work(None, replica, number), frozenset(request_ids), limits, failed)


def test_a_stage_is_awaited_while_an_end_waits_for_its_arrivals() -> None:
    """Up to the last arrival of the request before its end; other requests and later arrivals are not waited for."""
    found = _Stages((0, of("R")), (0, of("S", "R")), (0, of("S")), (1, of("R")), (0, of("R")))
    held = end(4, "R")
    assert found.hold(held)
    assert not found.hold(end(4, "T"))
    for stage, released in ((0, []), (0, []), (1, [held])):
        assert [each.stage_id for each in found.stages if each.is_awaited()] == [stage]
        assert found.take(stage) == released
    assert not any(each.is_awaited() for each in found.stages)


def test_failure_waits_only_for_ends_at_a_stage_without_final_output() -> None:
    """That end carries the stage's statistics; at a final-output stage the failure waits for every output."""
    found = _Stages((1, of("R")), (0, of("R")))
    failure = end(2, "R", at=(0, 1, 2), failed=True)
    assert found.hold(failure)
    assert found.take(0) == [failure]
    assert _Stages((1, of("R", finish="stop"))).hold(end(1, "R", at=(0, 1, 2), failed=True))


def test_end_is_released_after_those_that_are_held_of_its_requests() -> None:
    """After that of an earlier stage; a death of several requests after each of theirs."""
    found = _Stages((0, of("R")), (1, of("R")))
    middle, last, death = end(2, "R", stage=1, at=(0,)), end(3, "R"), end(4, "S", "R", stage=0, at=(0, 1, 2))
    assert all(map(found.hold, (middle, last, death)))
    assert found.take(1) == []
    assert found.take(0) == [middle, last, death]


def test_what_follows_a_held_end_from_the_same_replica_stays_behind_it() -> None:
    """Also an entry that ends nothing; the same request's end at an earlier stage waits for neither."""
    found = _Stages((1, of("R")))
    held, follower = end(1, "R"), end(2, "R", at=())
    assert found.hold(held)
    assert found.hold(follower)
    assert not found.hold(end(3, "R", stage=0, at=()))
    assert found.take(1) == [held, follower]


def test_what_waits_is_read_once_whatever_the_backlog() -> None:
    """Each raw output is read once, when the first end asks, and forgotten when it has left the queue."""
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
    """What another reader takes counts as passed, and what it puts is numbered when it is noticed."""
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
