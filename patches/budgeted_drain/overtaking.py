"""A request never overtakes itself: its end at one stage waits for what already waits of it at the stages before.

An order of stages can reach a request's last audio while its text still waits here. Upstream keeps a request whose
stages end in another order than they began (``pending_final_output`` in ``vllm_omni/engine/orchestrator.py``), but only
in some cases, and where only audio was asked for it then loses the message; an error ends a request at once. So the
entry that ends a request is taken out of its raw output, and is dispatched as one of its own as soon as nothing of the
request waits at a stage before. The rest of the raw output goes on: nobody else's audio waits for it. Only what has
been read from the sockets can be seen here; what has not is as early or late as upstream would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_fastpath.patches.budgeted_drain.order import Lane, Stage


@dataclass(frozen=True, eq=False)
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
    """The entries that are held, by the request that they end.

    Args:
        request_states: The orchestrator's live requests by id.
    """

    def __init__(self, request_states: Mapping[str, Any]) -> None:
        self._states = request_states
        self._held: dict[str, list[Held]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def take_out(self, lane: Lane, raw_outputs: Any, stages: Sequence[Stage]) -> int:
        """Take the entries out of ``raw_outputs`` that must wait, and hold them; how many these are."""
        taken = []
        for entry in raw_outputs.outputs:
            if entry.finish_reason is None or getattr(entry, "is_segment_finished", False):
                continue
            if self._waits_before(lane.stage.stage_id, entry.request_id, stages):
                alone = msgspec.structs.replace(
                    raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None
                )
                self._held.setdefault(entry.request_id, []).append(Held(lane, entry.request_id, alone))
                taken.append(entry)
        if taken:
            raw_outputs.outputs = [entry for entry in raw_outputs.outputs if not any(entry is each for each in taken)]
        return len(taken)

    def held_of(self, raw_outputs: Any) -> list[str]:
        """The requests in a raw output of which something is held."""
        return [entry.request_id for entry in raw_outputs.outputs if entry.request_id in self._held]

    def released(self, request_ids: Iterable[str], stages: Sequence[Stage]) -> list[Held]:
        """What no longer waits of these requests, the ends of earlier stages first."""
        free = []
        for request_id in request_ids:
            held = self._held.pop(request_id, [])
            waiting = [each for each in held if self._waits_before(each.lane.stage.stage_id, request_id, stages)]
            if waiting:
                self._held[request_id] = waiting
            free += [each for each in held if each not in waiting]
        # A request's end at a later stage may have been held first.
        free.sort(key=lambda held: held.lane.stage.stage_id)
        return free

    def released_by_change(self, stages: Sequence[Stage]) -> list[Held]:
        """What no longer waits though nothing of it was dispatched: the replica that had it left, or all is empty."""
        return self.released(list(self._held), stages)

    def released_from(self, lane: Lane) -> list[Held]:
        """What is held of a replica that died: it was sent before the death, and so it ends its requests before it."""
        freed = [held for each in self._held.values() for held in each if held.lane is lane]
        left = {key: [held for held in each if held.lane is not lane] for key, each in self._held.items()}
        self._held = {key: each for key, each in left.items() if each}
        return freed

    def _waits_before(self, stage_id: int, request_id: str, stages: Sequence[Stage]) -> bool:
        """Whether something of the request waits at a stage before."""
        state = self._states.get(request_id)
        if state is None:  # it has ended: upstream drops what is left of it
            return False
        return any(
            request_id in lane.requests and lane.waiting
            for stage in stages
            if stage.stage_id < stage_id and stage.stage_id not in state.finished_stage_ids
            for lane in stage.lanes
        )
