"""A request never overtakes itself: its end at one stage waits for what already waits of it at the stages before.

An order of stages can reach a request's last audio while its text still waits here. Upstream keeps a request whose
stages end in another order than they began (``pending_final_output`` in ``vllm_omni/engine/orchestrator.py``), but only
in some cases, and where only audio was asked for it then loses the message; an error ends a request at once. So the
entry that ends a request is taken out of its raw output, and is dispatched as one of its own as soon as nothing of the
request waits at a stage before. The rest of the raw output goes on: nobody else's audio waits for it. Only what has
been read from the sockets can be seen here; what has not is as early or late as upstream would have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_fastpath.patches.budgeted_drain.order import Lane, Stage


@dataclass(frozen=True)
class Held:
    """An entry that ends a request, waiting for what came before it.

    Attributes:
        lane: The replica that sent it.
        request_id: The request that it ends.
        raw_outputs: A raw output with nothing but this entry.
    """

    lane: Lane
    request_id: str
    raw_outputs: Any


class Holds:
    """The entries that are held, each by the last raw output that has something of its request.

    Args:
        request_states: The orchestrator's live requests by id.
    """

    def __init__(self, request_states: Mapping[str, Any]) -> None:
        self._states = request_states
        self._behind: dict[int, list[Held]] = {}

    def __bool__(self) -> bool:
        return bool(self._behind)

    def take_out(self, lane: Lane, raw_outputs: Any, stages: Sequence[Stage]) -> int:
        """Take the entries out of ``raw_outputs`` that must wait, and hold them; how many these are."""
        held = []
        for entry in raw_outputs.outputs:
            if entry.finish_reason is None or getattr(entry, "is_segment_finished", False):
                continue
            last = self._last_before(lane.stage.stage_id, entry.request_id, stages)
            if last is not None:
                alone = msgspec.structs.replace(
                    raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None
                )
                self._behind.setdefault(id(last), []).append(Held(lane, entry.request_id, alone))
                held.append(entry)
        if held:
            raw_outputs.outputs = [entry for entry in raw_outputs.outputs if not any(entry is each for each in held)]
        return len(held)

    def released(self, dispatched: Any, stages: Sequence[Stage]) -> list[Held]:
        """What no longer waits now that this raw output was dispatched, in the order of the stages."""
        return self._wait_again(self._behind.pop(id(dispatched), ()), stages)

    def released_by_change(self, stages: Sequence[Stage]) -> list[Held]:
        """What no longer waits now that other replicas are there: a raw output of one that left is never dispatched."""
        every = [held for each in self._behind.values() for held in each]
        self._behind.clear()
        return self._wait_again(every, stages)

    def released_from(self, lane: Lane) -> list[Held]:
        """What is held of a replica that died: it was sent before the death, and so it ends its requests before it."""
        freed = [held for each in self._behind.values() for held in each if held.lane is lane]
        left = {key: [held for held in each if held.lane is not lane] for key, each in self._behind.items()}
        self._behind = {key: each for key, each in left.items() if each}
        return freed

    def _wait_again(self, candidates: Sequence[Held], stages: Sequence[Stage]) -> list[Held]:
        """Hold again those of whose requests more has arrived meanwhile; the others, those of earlier stages first."""
        free = []
        for held in candidates:
            last = self._last_before(held.lane.stage.stage_id, held.request_id, stages)
            if last is None:
                free.append(held)
            else:
                self._behind.setdefault(id(last), []).append(held)
        # A request's end at a later stage may have been held first.
        free.sort(key=lambda held: held.lane.stage.stage_id)
        return free

    def _last_before(self, stage_id: int, request_id: str, stages: Sequence[Stage]) -> Any | None:
        """The last waiting raw output of a stage before ``stage_id`` that has something of the request."""
        state = self._states.get(request_id)
        if state is None:  # it has ended: upstream drops what is left of it
            return None
        for stage in stages:
            if stage.stage_id >= stage_id or stage.stage_id in state.finished_stage_ids or not stage.has_backlog():
                continue
            for lane in _bound(stage, request_id):
                for item in reversed(lane.waiting):
                    # An exception has no entries.
                    if any(entry.request_id == request_id for entry in getattr(item, "outputs", ())):
                        return item
        return None


def _bound(stage: Stage, request_id: str) -> Iterator[Lane]:
    """The replicas of ``stage`` that may have something of the request."""
    replica_id = stage.pool.get_bound_replica_id(request_id)
    for lane in stage.lanes:
        if replica_id is None or lane.replica_id == replica_id:
            yield lane
