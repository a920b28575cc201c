"""What ends a request waits for what came of that request before it.

An order of stages can reach a request's last audio while its text still waits. An error, or a replica's death, ends a
request at once, and where only audio was asked for upstream loses a message whose text ends later. So an end is held
until what arrived before it, of its request, has been dispatched. Only what has been read from the sockets can be seen
here; the rest is as early or late as upstream would have it.

A held end waits for two things. *Arrivals* in the queues of stages: each leaves its queue when the order reaches
it, and a stage that is awaited has a floor, so that this wait ends. *Held ends* of the same request with a smaller
number: so no two wait for each other. What an end waits for is looked up again whenever it might go; in between one
replica is awaited, up to one number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from .membership import Membership
from .replicas import QueuedReplica, Slot

Dispatch = Callable[[], Awaitable[object]]


@dataclass(eq=False)
class HeldEnd:
    """What ends requests, or follows such an end.

    Attributes:
        number: Its place among the arrivals at all replicas.
        source: Stage and replica that it came from; nothing of a request overtakes what is held of it from there.
        request_ids: The requests that it ends: one, or those that a death strands.
        limits: At which stages it waits: the number below which what arrived there goes first. None for what follows a
            held end from the same replica: it waits for that alone.
        dispatch: Dispatches it.
        failed: It fails the requests: of a stage that is not seen only the end (the stage's statistics) goes first.
        awaited: Number up to which a replica must have come; -1 while none is awaited.
    """

    number: int
    source: Slot
    request_ids: frozenset[str]
    limits: Mapping[int, float]
    dispatch: Dispatch
    failed: bool = False
    awaited: int = field(default=-1, init=False)


class HeldEnds(dict[str, list[HeldEnd]]):
    """What is held, by request.

    Args:
        members: The stages that there are now.
    """

    def __init__(self, members: Membership) -> None:
        super().__init__()
        self._members = members

    def hold(self, end: HeldEnd) -> bool:
        """Hold an end if something goes before it; whether it is held."""
        if not self._waits(end):
            return False
        for request_id in end.request_ids:
            self.setdefault(request_id, []).append(end)
        return True

    def passed(self, replica: QueuedReplica) -> list[HeldEnd]:
        """Release the ends that may go now that what came before what waits at a replica is dispatched, or lost.

        Returns:
            Those ends; of one request in the order in which they must be dispatched.
        """
        waiting, number = replica.awaited_by, replica.first_waiting()
        candidates = [end for end in waiting if end.awaited < number]
        replica.awaited_by = [end for end in waiting if end.awaited >= number]
        for end in candidates:
            end.awaited = -1
        released = []
        while candidates:
            end = candidates.pop()
            if end.awaited >= 0 or end in released or self._waits(end):
                continue
            released.append(end)
            for request_id in end.request_ids:
                others = self[request_id]
                others.remove(end)
                candidates += others  # they may have waited for this one
                if not others:
                    del self[request_id]
        return released

    def _waits(self, end: HeldEnd) -> bool:
        """Whether something goes before an end; if that is an arrival, its replica is awaited from now on."""
        for request_id in end.request_ids:
            for other in self.get(request_id, ()):
                if other.number < end.number and (other.source == end.source or other.source[0] in end.limits):
                    return True
        for stage in self._members.stages:
            limit = end.limits.get(stage.stage_id, 0)
            ends = end.failed and not stage.final_output
            for replica in stage.replicas:
                number = replica.last_before(limit, end.request_ids, ends=ends)
                if number is not None:
                    end.awaited = number
                    replica.awaited_by.append(end)
                    return True
        return False
