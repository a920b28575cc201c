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
from typing import Any

import msgspec

from omni_fastpath.ledger import logger
from omni_fastpath.patches.budgeted_drain.order import Lane, Stage

Needs = dict[Lane, float]
"""For each lane, the number that it must have passed."""


@dataclass(eq=False)
class Held:
    """What ends requests, waiting for what came before it.

    Attributes:
        number: When it came.
        request_ids: The requests that it ends: one, or those of a replica that died.
        go: Dispatches it.
        source: The replica that it came from: nothing of a request overtakes what is held of it from there.
        more: What it needs besides, asked when it could go.
        waits: How many lanes have not passed what it needs of them.
        gone: Whether it was let go.
    """

    number: int
    request_ids: Collection[str]
    go: Callable[[], Awaitable[None]]
    source: Any = None
    more: Callable[[], Needs] | None = None
    waits: int = field(default=0, init=False)
    gone: bool = field(default=False, init=False)


class Holds:
    """What is held, by the requests that it ends; of each request the earliest goes first."""

    def __init__(self) -> None:
        self._held: dict[str, list[Held]] = {}
        self._ties = count()

    def __bool__(self) -> bool:
        return bool(self._held)

    def before(self, number: int, request_ids: Iterable[str]) -> bool:
        """Whether something that came before is held of one of these requests, and does not wait for more itself."""
        return any(
            held.number < number and held.more is None
            for request_id in request_ids
            for held in self._held.get(request_id, ())
        )

    def of(self, source: Any, request_id: str) -> bool:
        """Whether something of a request that came from a replica is held."""
        return any(held.source == source for held in self._held.get(request_id, ()))

    def add(self, held: Held, needs: Needs) -> None:
        """Hold until every lane has passed what is needed of it, and what is held before it has gone."""
        for request_id in held.request_ids:
            mine = self._held.setdefault(request_id, [])
            mine.append(held)
            mine.sort(key=_number)
        self._await(held, needs)

    def passed(self, lane: Lane) -> list[Held]:
        """What may go now that ``lane`` has come so far, in the order of arrival."""
        first = lane.arrivals.first()
        freed = []
        while lane.awaited and lane.awaited[0][0] < first:
            held = heapq.heappop(lane.awaited)[2]
            held.waits -= 1
            freed.append(held)
        return self._ripe(freed)

    def left(self, lane: Lane) -> list[Held]:
        """What may go now that ``lane`` is gone with all that waits in it."""
        freed = [held for _, _, held in lane.awaited]
        lane.awaited.clear()
        for held in freed:
            held.waits -= 1
        return self._ripe(freed)

    def all(self) -> list[Held]:
        """Everything, because nothing waits anywhere, whatever became of what it waited for."""
        every = {held: None for mine in self._held.values() for held in mine}
        self._held.clear()
        for held in every:
            held.gone = True
        return sorted(every, key=_number)

    def _await(self, held: Held, needs: Needs) -> None:
        held.waits = len(needs)
        for lane, number in needs.items():
            heapq.heappush(lane.awaited, (number, next(self._ties), held))

    def _ripe(self, freed: list[Held]) -> list[Held]:
        ripe: list[Held] = []
        while freed:
            held = freed.pop()
            if held.waits or held.gone or any(self._held[each][0] is not held for each in held.request_ids):
                continue
            if held.more is not None and (needs := held.more()):
                self._await(held, needs)
                continue
            held.gone = True
            ripe.append(held)
            for request_id in held.request_ids:
                mine = self._held[request_id]
                mine.remove(held)
                if mine:
                    freed.append(mine[0])  # it may have waited for this one alone
                else:
                    del self._held[request_id]
        return sorted(ripe, key=_number)


def _alone(raw_outputs: Any, entry: Any) -> Any:
    """A raw output with nothing but this entry; statistics and finished ids stay with what it came with."""
    return msgspec.structs.replace(raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None)


def _number(held: Held) -> int:
    return held.number


class Ends:
    """Says what ends a request, and what it must wait for.

    Args:
        request_states: The orchestrator's live requests by id.
        error: Upstream's ``FinishReason.ERROR``.
    """

    def __init__(self, request_states: Any, error: Any) -> None:
        self._states = request_states
        self._error = error
        self._said = False

    def needs(
        self, stages: Sequence[Stage], stage_id: int, request_id: str, number: float, *, aborts: bool, failed: bool
    ) -> Needs:
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
            self.cannot_say()
            return {}

    def cannot_say(self) -> None:
        """Something unreadable waits, which must not end the orchestrator: what ends a request does not wait for it."""
        if not self._said:
            logger.exception("omni-fastpath: what waits of a request cannot be read; its end does not wait for it")
        self._said = True

    def _find(
        self, stages: Sequence[Stage], stage_id: int, request_id: str, number: float, *, aborts: bool, failed: bool
    ) -> Needs:
        found: Needs = {}
        for stage in stages:
            if stage.stage_id == stage_id or (stage.stage_id > stage_id and not aborts):
                continue
            for lane in stage.lanes:
                if lane.waiting and lane.arrivals.first() < number:
                    last = lane.arrivals.last_of(request_id, ends=failed and not stage.final_output)
                    if last is not None:
                        found[lane] = min(last, number)
        return found

    def split(
        self, lane: Lane, raw_outputs: Any, stages: Sequence[Stage], holds: Holds
    ) -> list[tuple[str, Any, Needs, Callable[[], Needs] | None]]:
        """Take out of a raw output the entries that must wait.

        Returns:
            For each of them the request, a raw output with nothing but this entry, what it needs (besides what is held
            of the request before it), and what it needs besides when it has that.
        """
        stage_id, number = lane.stage.stage_id, lane.arrivals.taken
        found: list[tuple[Any, tuple[str, Any, Needs, Callable[[], Needs] | None]]] = []
        for entry in raw_outputs.outputs:
            follows = bool(holds) and holds.of(lane, entry.request_id)
            if entry.finish_reason is None or getattr(entry, "is_segment_finished", False):
                if follows:
                    found.append((entry, (entry.request_id, _alone(raw_outputs, entry), {}, None)))
                continue
            state = self._states.get(entry.request_id)
            if state is None:  # it has ended: upstream drops what is left of it
                continue
            failed = entry.finish_reason == self._error
            # A session is ended by whichever stage ends last, so that its stages' ends keep their order.
            aborts = failed or state.streaming.enabled
            needs = self.needs(stages, stage_id, entry.request_id, number, aborts=aborts, failed=failed)
            if needs or follows or holds.before(number, (entry.request_id,)):
                more = None if aborts else self._later(stages, stage_id, entry.request_id)
                found.append((entry, (entry.request_id, _alone(raw_outputs, entry), needs, more)))
        if found:
            taken = {id(entry) for entry, _ in found}
            raw_outputs.outputs = [entry for entry in raw_outputs.outputs if id(entry) not in taken]
        return [each for _, each in found]

    def _later(self, stages: Sequence[Stage], stage_id: int, request_id: str) -> Callable[[], Needs] | None:
        """For an end that later text would overwrite: what waits of it by then.

        Upstream keeps the last message of a request that is done but for the stages before in one place, and puts into
        it whatever ends at a stage that gives users something, also where this user did not ask for it. Nobody waits
        longer for that: upstream sends the message when the stages before have ended.
        """
        state = self._states[request_id]
        wanted = state.final_output_stage_ids or {state.final_stage_id}
        unasked = [s for s in stages if s.stage_id < stage_id and s.final_output and s.stage_id not in wanted]
        if not unasked:
            return None
        return lambda: self.needs(unasked, stage_id, request_id, math.inf, aborts=False, failed=False)
