"""The replicas in the orchestrator's pools: those with an output queue, and those that can only be polled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from .replicas import QueuedReplica, Replica, Stage

REFRESH_EVERY_NS = 500_000_000
"""Longest time between two refreshes, half a second, as in upstream's event-driven loop. An attach causes one at once,
and so does a replica that is gone. Each raw output is preceded by that check."""


class Membership:
    """The stages of an orchestrator, and the replicas in upstream's pools.

    A refresh reads the pools. The only thing that it writes is the wrapper that notices a put into a client's queue.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``. Its ``num_stages`` and ``stage_pools`` are read.
        can_dequeue: Whether raw outputs can be taken from a client without waiting. Any other client is polled.
        on_put: Called after each put into a client's output queue. It must not raise.
        first_audio_key: See ``Stage``.

    Attributes:
        numbers: The count that numbers the arrivals at all replicas, polled outputs and deaths.
        stages: The stages, with their replicas that have an output queue.
        polled: The other replicas, which are those of diffusion stages and those without such a queue.
        stale: Whether something has changed, so that a refresh is due now.
        refresh_ns: When the next refresh is due.
    """

    def __init__(
        self,
        orchestrator: Any,
        can_dequeue: Callable[[Any], bool],
        on_put: Callable[[QueuedReplica], None],
        first_audio_key: str | None = None,
    ) -> None:
        self._can_dequeue = can_dequeue
        self._on_put = on_put
        self.numbers = count()
        self.stages = [
            Stage(stage_id, orchestrator.stage_pools[stage_id], first_audio_key)
            for stage_id in range(orchestrator.num_stages)
        ]
        self.polled: list[Replica] = []
        self.stale = True
        self.refresh_ns = 0

    def queued(self) -> list[QueuedReplica]:
        """The replicas with an output queue."""
        return [replica for stage in self.stages for replica in stage.replicas]

    def has_backlog(self) -> bool:
        """Whether a raw output is queued at any replica."""
        return any(stage.has_backlog() for stage in self.stages)

    def refresh(self, now_ns: int) -> tuple[list[QueuedReplica], list[QueuedReplica]]:
        """Update the replicas. Return those with an output queue that joined, and those that left."""
        self.stale = False  # first, because an attach on another thread may set it meanwhile
        self.refresh_ns = now_ns + REFRESH_EVERY_NS
        left = [replica for replica in self.queued() if replica.is_gone()]
        for replica in left:
            replica.stop_watching()
            replica.stage.replicas.remove(replica)
        for replica in (*left, *self.queued()):
            replica.follow_queue()
        known = {replica.slot for replica in self.queued()}
        joined: list[QueuedReplica] = []
        self.polled = []
        for stage in self.stages:
            for replica_id in stage.pool.available_replica_ids():
                slot, client = (stage.stage_id, replica_id), stage.pool.clients[replica_id]
                if slot in known:
                    continue
                waiting = None if stage.pool.stage_type == "diffusion" else self._waiting(client)
                if waiting is None:
                    self.polled.append(Replica(stage, slot, client))
                else:
                    joined.append(QueuedReplica(stage, slot, client, waiting, self.numbers))
                    joined[-1].watch(self._on_put)
        return joined, left

    def close(self) -> None:
        """Stop watching all queues."""
        for replica in self.queued():
            replica.stop_watching()

    def _waiting(self, client: Any) -> deque[Any] | None:
        """The content of a client's output queue. None for a client that can only be polled."""
        queue = getattr(client, "outputs_queue", None)
        if not isinstance(queue, asyncio.Queue) or not self._can_dequeue(client):
            return None
        waiting = getattr(queue, "_queue", None)
        return waiting if type(waiting) is deque else None  # another Python's queue may have something else
