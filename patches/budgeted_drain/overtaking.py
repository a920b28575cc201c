"""A request never overtakes itself: what ends it waits for what came before it and still waits elsewhere.

An order of stages can reach a request's last audio while its text still waits here. Upstream keeps a request whose
stages end in another order than they began (``pending_final_output`` in ``vllm_omni/engine/orchestrator.py``), but only
in some cases, and where only audio was asked for it then loses the message; an error, or a replica's death, ends a
request at once. So what ends a request is held until what arrived before it has been dispatched, first in, first out
for this request, as upstream's event-driven queue has it. The entry is taken out of its raw output, and the rest of
that goes on: nobody else's audio waits for it. What the same replica sends of the request behind an end that is held (a
session's next segment) is held behind it. Only what has been read from the sockets can be seen here; what has not
is as early or late as upstream would have it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import msgspec

from omni_fastpath.ledger import logger

from .replicas import QueuedReplica, Stage

Predecessors = dict[QueuedReplica, float]
"""For each replica, the number that it must have passed."""


@dataclass(eq=False)
class HeldEnd:
    """What ends requests, or follows such an end, and waits for what came before it.

    Attributes:
        number: When it came.
        request_ids: The requests that it ends: one, or those of a replica that died.
        dispatch: Dispatches it.
        source: The replica that it came from: nothing of a request overtakes what is held of it from there.
        more: What it waits for besides, asked when it could go.
        waits: How many replicas have not passed what it waits for there.
        released: Whether it was given out to be dispatched.
    """

    number: int
    request_ids: Collection[str]
    dispatch: Callable[[], Awaitable[None]]
    source: Any = None
    more: Callable[[], Predecessors] | None = None
    waits: int = field(default=0, init=False)
    released: bool = field(default=False, init=False)


class HeldEnds:
    """What is held, by the requests that it ends; of each request the earliest goes first."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[HeldEnd]] = {}
        self._ties = count()

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def any_before(self, number: int, request_ids: Iterable[str]) -> bool:
        """Whether something that came before is held of one of these requests, and does not wait for more itself."""
        return any(
            held.number < number and held.more is None
            for request_id in request_ids
            for held in self._by_request.get(request_id, ())
        )

    def any_from(self, source: Any, request_id: str) -> bool:
        """Whether something of a request that came from a replica is held."""
        return any(held.source == source for held in self._by_request.get(request_id, ()))

    def add(self, held: HeldEnd, predecessors: Predecessors) -> None:
        """Hold until every replica has passed what is waited for there, and what is held before it has gone."""
        for request_id in held.request_ids:
            of_request = self._by_request.setdefault(request_id, [])
            of_request.append(held)
            of_request.sort(key=_number)
        self._await(held, predecessors)

    def release_after(self, replica: QueuedReplica) -> list[HeldEnd]:
        """Give out what may go now that ``replica`` has come so far, in the order of arrival."""
        first = replica.arrivals.first_waiting()
        freed = []
        while replica.awaited_by and replica.awaited_by[0][0] < first:
            held = heapq.heappop(replica.awaited_by)[2]
            held.waits -= 1
            freed.append(held)
        return self._release(freed)

    def release_without(self, replica: QueuedReplica) -> list[HeldEnd]:
        """Give out what may go now that ``replica`` is gone with all that waits in it."""
        freed = [held for _, _, held in replica.awaited_by]
        replica.awaited_by.clear()
        for held in freed:
            held.waits -= 1
        return self._release(freed)

    def release_all(self) -> list[HeldEnd]:
        """Give out everything, because nothing waits anywhere, whatever became of what it waited for."""
        every = {held: None for of_request in self._by_request.values() for held in of_request}
        self._by_request.clear()
        for held in every:
            held.released = True
        return sorted(every, key=_number)

    def _await(self, held: HeldEnd, predecessors: Predecessors) -> None:
        held.waits = len(predecessors)
        for replica, number in predecessors.items():
            heapq.heappush(replica.awaited_by, (number, next(self._ties), held))

    def _release(self, freed: list[HeldEnd]) -> list[HeldEnd]:
        released: list[HeldEnd] = []
        while freed:
            held = freed.pop()
            if held.waits or held.released or any(self._by_request[each][0] is not held for each in held.request_ids):
                continue
            if held.more is not None and (predecessors := held.more()):
                self._await(held, predecessors)
                continue
            held.released = True
            released.append(held)
            for request_id in held.request_ids:
                of_request = self._by_request[request_id]
                of_request.remove(held)
                if of_request:
                    freed.append(of_request[0])  # it may have waited for this one alone
                else:
                    del self._by_request[request_id]
        return sorted(released, key=_number)


def _alone(raw_outputs: Any, entry: Any) -> Any:
    """A raw output with nothing but this entry; statistics and finished ids stay with what it came with."""
    return msgspec.structs.replace(raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None)


def _number(held: HeldEnd) -> int:
    return held.number


class Following(NamedTuple):
    """An entry that was taken out of its raw output because it must wait.

    Attributes:
        request_id: Whose it is.
        raw_outputs: A raw output with nothing but this entry.
        predecessors: What it waits for, besides what is held of the request before it.
        more: What it waits for when it has that.
    """

    request_id: str
    raw_outputs: Any
    predecessors: Predecessors
    more: Callable[[], Predecessors] | None


class Precedence:
    """Says what ends a request, and what must be dispatched before that.

    Args:
        request_states: The orchestrator's live requests by id.
        error: Upstream's ``FinishReason.ERROR``.
        overwrites: Whether later text would overwrite a request's last message (see ``_later_text``).
    """

    def __init__(self, request_states: Any, error: Any, *, overwrites: bool = True) -> None:
        self._request_states = request_states
        self._error = error
        self._overwrites = overwrites
        self._reported = False

    def before_end(
        self, stages: Sequence[Stage], stage_id: int, request_id: str, number: float, *, aborts: bool, failed: bool
    ) -> Predecessors:
        """What came of a request before ``number`` and waits at the other stages.

        Args:
            stages: The stages that there are.
            stage_id: The stage that ends it.
            request_id: The request.
            number: When its end came.
            aborts: At the stages behind as well, because this end is the request's whatever happens there; else only
                at those before.
            failed: It fails: of a stage that nobody sees only its end (the stage's statistics) is waited for.
        """
        try:
            return self._find(stages, stage_id, request_id, number, aborts=aborts, failed=failed)
        except Exception:
            self.report_unreadable()
            return {}

    def report_unreadable(self) -> None:
        """Something unreadable waits, which must not end the orchestrator: what ends a request does not wait for it."""
        if not self._reported:
            logger.exception("omni-fastpath: what waits of a request cannot be read; its end does not wait for it")
        self._reported = True

    def _find(
        self, stages: Sequence[Stage], stage_id: int, request_id: str, number: float, *, aborts: bool, failed: bool
    ) -> Predecessors:
        found: Predecessors = {}
        for stage in stages:
            if stage.stage_id == stage_id or (stage.stage_id > stage_id and not aborts):
                continue
            for replica in stage.replicas:
                if replica.waiting and replica.arrivals.first_waiting() < number:
                    last = replica.arrivals.last_of(request_id, ends=failed and not stage.final_output)
                    if last is not None:
                        found[replica] = min(last, number)
        return found

    def split(
        self, replica: QueuedReplica, raw_outputs: Any, stages: Sequence[Stage], held_ends: HeldEnds
    ) -> list[Following]:
        """Take out of a raw output the entries that must wait."""
        stage_id, number = replica.stage_id, replica.arrivals.taken
        found: list[tuple[Any, Following]] = []
        for entry in raw_outputs.outputs:
            follows = bool(held_ends) and held_ends.any_from(replica, entry.request_id)
            if entry.finish_reason is None or getattr(entry, "is_segment_finished", False):
                if follows:
                    found.append((entry, Following(entry.request_id, _alone(raw_outputs, entry), {}, None)))
                continue
            state = self._request_states.get(entry.request_id)
            if state is None:  # it has ended: upstream drops what is left of it
                continue
            failed = entry.finish_reason == self._error
            # A session is ended by whichever stage ends last, so that its stages' ends keep their order.
            aborts = failed or state.streaming.enabled
            predecessors = self.before_end(stages, stage_id, entry.request_id, number, aborts=aborts, failed=failed)
            if predecessors or follows or held_ends.any_before(number, (entry.request_id,)):
                more = None if aborts else self._later_text(stages, stage_id, entry.request_id)
                alone = _alone(raw_outputs, entry)
                found.append((entry, Following(entry.request_id, alone, predecessors, more)))
        if found:
            taken_out = {id(entry) for entry, _ in found}
            raw_outputs.outputs = [entry for entry in raw_outputs.outputs if id(entry) not in taken_out]
        return [following for _, following in found]

    def _later_text(self, stages: Sequence[Stage], stage_id: int, request_id: str) -> Callable[[], Predecessors] | None:
        """For an end that later text would overwrite: what waits of it by then.

        Upstream keeps the last message of a request that is done but for the stages before in one place, and puts into
        it whatever ends at a stage that gives users something, also where this user did not ask for it. Nobody waits
        longer for that: upstream sends the message when the stages before have ended.
        """
        if not self._overwrites:
            return None
        state = self._request_states[request_id]
        wanted = state.final_output_stage_ids or {state.final_stage_id}
        unasked = [s for s in stages if s.stage_id < stage_id and s.final_output and s.stage_id not in wanted]
        if not unasked:
            return None
        return lambda: self.before_end(unasked, stage_id, request_id, math.inf, aborts=False, failed=False)
