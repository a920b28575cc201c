"""An end of a request is processed only after the outputs of that request that arrived earlier.

An order of stages can reach the last audio of a request while its text is still queued. An error, or the death of a
replica, ends a request at once. If only audio was requested, upstream loses a message whose text ends later. So an end
is held until everything of its request that arrived earlier has been dispatched. Only outputs that were read from the
sockets are known here. For all others the order is upstream's.

A held end is parked behind one *blocker*, which must be dispatched first. The blocker is an *arrival* in the queue of a
replica, which is then awaited and served first, so that the arrival soon leaves its queue. Or it is a *held end* of the
same request with a smaller number, so that no two ends wait for each other. When the blocker has been dispatched or was
lost, the end is parked behind the next blocker, or is dispatched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .membership import Membership
from .replicas import Arrival, QueuedReplica
from .work import Work


@dataclass(eq=False, slots=True)
class HeldEnd:
    """An end of requests, or an output that follows a held end of its request.

    Attributes:
        work: The work to be dispatched.
        request_ids: The requests that it ends, which is one, or all those that a dead replica leaves behind.
        limits: By stage, the number below which arrivals are dispatched first. Empty for an output that follows a held
            end from the same replica, because it waits only for that end.
        failed: Whether it fails the requests. Then, at a stage without final output, it waits only for the end of the
            request, which has the stage's statistics.
        behind: The held ends that are parked behind this one.
    """

    work: Work
    request_ids: frozenset[str]
    limits: Mapping[int, float]
    failed: bool = False
    behind: list[HeldEnd] = field(default_factory=list)


class HeldEnds(dict[str, list[HeldEnd]]):
    """The held ends by request.

    Args:
        members: The current stages.
    """

    def __init__(self, members: Membership) -> None:
        super().__init__()
        self._members = members

    def blocker(self, end: HeldEnd) -> Arrival | HeldEnd | None:
        """Return what must be dispatched before an end, or None if the end may be dispatched now."""
        number, slot = end.work.number, end.work.replica.slot
        for request_id in end.request_ids:
            for other in self.get(request_id, ()):
                source = other.work.replica.slot  # no output of a request overtakes a held one from the same replica
                if other.work.number < number and (source == slot or source[0] in end.limits):
                    return other
        for stage in self._members.stages:
            limit = end.limits.get(stage.stage_id, 0)
            ends = end.failed and not stage.final_output
            for replica in stage.replicas if limit else ():
                if arrival := replica.last_before(limit, end.request_ids, ends=ends):
                    return arrival
        return None

    def hold(self, end: HeldEnd, blocker: Arrival | HeldEnd) -> None:
        """Hold an end and park it behind its blocker."""
        for request_id in end.request_ids:
            self.setdefault(request_id, []).append(end)
        self._park(end, blocker)

    def release(self, replica: QueuedReplica) -> Iterator[HeldEnd]:
        """Yield the ends that have no blocker left, after an arrival of a replica was dispatched or lost.

        They are in the order in which they must be dispatched. An end is held until the next one is requested.
        """
        ready, replica.passed = deque(replica.passed), []
        while ready:
            end = ready.popleft()
            if blocker := self.blocker(end):
                self._park(end, blocker)
                continue
            yield end
            for request_id in end.request_ids:
                self[request_id].remove(end)
                if not self[request_id]:
                    del self[request_id]
            ready += end.behind

    def _park(self, end: HeldEnd, blocker: Arrival | HeldEnd) -> None:
        blocker.behind.append(end)
        if isinstance(blocker, Arrival):
            blocker.replica.awaited = max(blocker.replica.awaited, blocker.number)
