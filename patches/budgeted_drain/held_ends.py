"""What ends a request waits for what came of that request before it.

An order of stages can reach a request's last audio while its text still waits. An error, or a replica's death, ends a
request at once, and where only audio was asked for upstream loses a message whose text ends later. So an end is held
until what arrived before it, of its request, has been dispatched. Only what has been read from the sockets can be seen
here; the rest is as early or late as upstream would have it.

A held end waits for two things. *Arrivals* in the queues of other stages: each leaves its queue when the order reaches
it, and a stage that is awaited has a floor, so that this wait ends. *Held ends* of the same request with a smaller
number: so no two wait for each other. What an end waits for is looked up again whenever it might go; in between one
replica is awaited, up to one number.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Protocol

from .replicas import QueuedReplica, Slot, Stage

_AWAITED = attrgetter("awaited")

Extent = Literal["nowhere", "before", "everywhere"]
"""At which other stages an end waits: ``before``, an end of its stage, at the stages before. ``everywhere``, an end of
the whole request: an error, a death, and a session's end, which comes at whichever stage ends last. ``nowhere``, what
follows a held end from the same replica: it waits for that alone."""


Dispatch = Callable[[], Awaitable[object]]


class _Stages(Protocol):
    @property
    def stages(self) -> list[Stage]: ...


@dataclass(eq=False)
class HeldEnd:
    """What ends requests, or follows such an end.

    Attributes:
        number: Its place among the arrivals at all replicas.
        source: Stage and replica that it came from; nothing of a request overtakes what is held of it from there.
        request_ids: The requests that it ends: one, or those that a death strands.
        extent: At which other stages it waits.
        dispatch: Dispatches it.
        failed: It fails the requests: of a stage that is not seen only the end (the stage's statistics) goes first.
        overwritten_by: Stages whose later text would overwrite this message at upstream: what waits there goes first,
            whenever it came. Upstream sends the message when the stages before have ended, so that it is not later.
        awaited: Number up to which a replica must have come; None while none is awaited.
    """

    number: int
    source: Slot
    request_ids: frozenset[str]
    extent: Extent
    dispatch: Dispatch
    failed: bool = False
    overwritten_by: frozenset[int] = frozenset()
    awaited: int | None = field(default=None, init=False)

    def waits_at(self, stage_id: int) -> bool:
        """Whether what came before it at another stage goes first."""
        return self.extent == "everywhere" or (self.extent == "before" and stage_id < self.source[0])


class HeldEnds:
    """What is held, by request.

    Args:
        members: The stages that there are now.
    """

    def __init__(self, members: _Stages) -> None:
        self._members = members
        self._by_request: dict[str, list[HeldEnd]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def hold(self, end: HeldEnd) -> bool:
        """Hold an end if something goes before it; whether it is held."""
        if not self._waits(end):
            return False
        for request_id in end.request_ids:
            self._by_request.setdefault(request_id, []).append(end)
        return True

    def passed(self, replica: QueuedReplica, number: float) -> list[HeldEnd]:
        """Release the ends that may go when all arrivals below ``number`` at a replica are dispatched, or lost.

        Returns:
            Those ends; of one request in the order in which they must be dispatched.
        """
        count = bisect_left(replica.awaited_by, number, key=_AWAITED)
        candidates = replica.awaited_by[:count]
        del replica.awaited_by[:count]
        for end in candidates:
            end.awaited = None
        released = []
        while candidates:
            end = candidates.pop()
            if end.awaited is not None or end in released or self._waits(end):
                continue
            released.append(end)
            for request_id in end.request_ids:
                others = self._by_request[request_id]
                others.remove(end)
                candidates += others  # they may have waited for this one
                if not others:
                    del self._by_request[request_id]
        return released

    def _waits(self, end: HeldEnd) -> bool:
        """Whether something goes before an end; if that is an arrival, its replica is awaited from now on."""
        for request_id in end.request_ids:
            for other in self._by_request.get(request_id, ()):
                if other.number < end.number and (other.source == end.source or end.waits_at(other.source[0])):
                    return True
        if end.extent == "nowhere":
            return False
        for stage in self._members.stages:
            limit = self._limit(end, stage.stage_id)
            ends = end.failed and not stage.final_output
            for replica in stage.replicas:
                number = replica.last_before(limit, end.request_ids, ends=ends)
                if number is not None:
                    end.awaited = number
                    insort(replica.awaited_by, end, key=_AWAITED)
                    return True
        return False

    def _limit(self, end: HeldEnd, stage_id: int) -> float:
        """Number below which what waits at a stage goes before an end."""
        if stage_id in end.overwritten_by:
            return math.inf
        return end.number if stage_id != end.source[0] and end.waits_at(stage_id) else -math.inf
