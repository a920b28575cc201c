"""Which replicas the orchestrator's pools have: those with an output queue, and those that can only be polled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .replicas import QueuedReplica, Replica, Slot, Stage

LOOK_EVERY_NS = 500_000_000
"""Longest between two looks, half a second, as upstream's event-driven loop has it. An attach is told, and a replica
that is gone is noticed before each raw output; both ask for a look at once."""


class Membership:
    """The replicas that upstream's pools have, and the stages that these make.

    A look reads upstream's pools and writes nothing but what notices a put into a client's queue.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``, of which ``num_stages`` and ``stage_pools`` are read.
        can_dequeue: Whether raw outputs can be taken from a client without waiting; any other client is polled.
        on_put: Called after each put into a client's output queue.
        numbers: The count that numbers the arrivals at all replicas.
        first_audio_key: See ``Stage``.

    Attributes:
        queued: The replicas with an output queue.
        polled: The others: diffusion stages, and clients without such a queue.
        stages: The stages of the queued ones.
        stale: Something has changed: look now.
        look_ns: When to look next.
    """

    def __init__(
        self,
        orchestrator: Any,
        can_dequeue: Callable[[Any], bool],
        on_put: Callable[[], None],
        numbers: Iterator[int],
        first_audio_key: str | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._can_dequeue = can_dequeue
        self._on_put = on_put
        self._numbers = numbers
        self._first_audio_key = first_audio_key
        self.queued: dict[Slot, QueuedReplica] = {}
        self.polled: list[Replica] = []
        self.stages: list[Stage] = []
        self.stale = True
        self.look_ns = 0

    def has_backlog(self) -> bool:
        """Whether a raw output waits anywhere."""
        return any(stage.has_backlog() for stage in self.stages)

    def look(self, now_ns: int) -> tuple[list[QueuedReplica], list[QueuedReplica]]:
        """Take note of the replicas that there are now; those with a queue that joined, and those that left."""
        self.stale = False  # first: an attach on another thread may set it meanwhile
        self.look_ns = now_ns + LOOK_EVERY_NS
        stages = {stage.stage_id: stage for stage in self.stages}
        before, queued, polled = self.queued, dict[Slot, QueuedReplica](), list[Replica]()
        for stage_id in range(self._orchestrator.num_stages):
            pool = self._orchestrator.stage_pools[stage_id]
            for replica_id in pool.available_replica_ids():
                slot, client = (stage_id, replica_id), pool.clients[replica_id]
                known = before.get(slot)
                if known is not None and known.client is client:
                    queued[slot] = known
                elif pool.stage_type == "diffusion" or (waiting := self._waiting(client)) is None:
                    polled.append(Replica(pool, slot, client))
                else:
                    stage = stages.setdefault(stage_id, Stage(stage_id, pool, self._first_audio_key))
                    queued[slot] = QueuedReplica(stage, slot, client, waiting, self._numbers)
        joined = [replica for slot, replica in queued.items() if before.get(slot) is not replica]
        left = [replica for slot, replica in before.items() if queued.get(slot) is not replica]
        self.queued, self.polled = queued, polled
        for replica in left:
            replica.stop_watching()
        for replica in joined:
            replica.watch(self._on_put)
        if joined or left:
            for stage in stages.values():
                stage.replicas = deque(replica for replica in queued.values() if replica.stage is stage)
            self.stages = [stage for stage in stages.values() if stage.replicas]
        return joined, left

    def close(self) -> None:
        """Give all queues back to upstream."""
        for replica in self.queued.values():
            replica.stop_watching()
        self.queued.clear()

    def _waiting(self, client: Any) -> deque[Any] | None:
        """What stands in a client's output queue; None for a client that can only be polled."""
        queue = getattr(client, "outputs_queue", None)
        if not isinstance(queue, asyncio.Queue) or not self._can_dequeue(client):
            return None
        waiting = getattr(queue, "_queue", None)
        return waiting if type(waiting) is deque else None  # another Python's queue may have something else
