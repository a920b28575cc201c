"""Who is there: the replicas of all stages, those with an output queue and those that can only be polled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .replicas import NotifyOnPut, QueuedReplica, Replica, Stage

LOOK_AFTER_NS = 1_000_000
"""Time after which a busy loop looks at membership again, a millisecond: the pace of upstream's poll loop. A replica
that is gone is noticed before each raw output, and an attach wakes the loop, so that one that was woken works first."""

LOOK_AT_LEAST_NS = 500_000_000
"""Longest that a loop that is woken all the time goes without a look, half a second: as often as it wakes when idle."""

Slot = tuple[int, int]
"""Stage and replica."""


class Changes(NamedTuple):
    """What a look at the pools found different."""

    joined: list[QueuedReplica]
    left: list[QueuedReplica]


class Membership:
    """The replicas that upstream's pools have, and the stages that these make.

    A look only reads upstream's pools and writes nothing but the notifiers on the clients' queues: what follows from
    it is the caller's.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``, of which ``num_stages`` and ``stage_pools`` are read.
        can_dequeue: Whether raw outputs can be taken from a client without waiting; any other is polled.
        clock: The count that numbers all arrivals.
        on_put: Called after each put into a client's output queue.
        first_audio_key: By what a first audio is known that a stage sends although the user gets nothing else of it.

    Attributes:
        queued: The replicas with an output queue.
        polled: The others: diffusion stages, and clients without such a queue.
        stages: The stages of the queued ones.
        stale: Something says that it has changed: look now.
        look_ns: When to look next.
    """

    def __init__(
        self,
        orchestrator: Any,
        can_dequeue: Callable[[Any], bool],
        clock: Iterator[int],
        on_put: Callable[[], None],
        *,
        first_audio_key: str | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._can_dequeue = can_dequeue
        self._clock = clock
        self._on_put = on_put
        self._first_audio_key = first_audio_key
        self._notifiers: dict[Slot, NotifyOnPut] = {}
        self._looked_ns = 0
        self.queued: dict[Slot, QueuedReplica] = {}
        self.polled: list[Replica] = []
        self.stages: list[Stage] = []
        self.stale = True
        self.look_ns = 0

    def serves(self, pool: Any) -> bool:
        """Whether ``pool`` is one of this orchestrator's."""
        return any(each is pool for each in self._orchestrator.stage_pools)

    def has_backlog(self) -> bool:
        """Whether a raw output waits anywhere."""
        return any(stage.has_backlog() for stage in self.stages)

    def look(self, now_ns: int) -> Changes:
        """Take note of who is there now."""
        self.stale = False  # first: an attach on another thread may say otherwise meanwhile
        self._looked_ns = now_ns
        self.look_ns = now_ns + LOOK_AFTER_NS
        before, queued = self.queued, dict[Slot, QueuedReplica]()
        polled: list[Replica] = []
        joined: list[QueuedReplica] = []
        for stage_id in range(self._orchestrator.num_stages):
            pool = self._orchestrator.stage_pools[stage_id]
            diffusion = pool.stage_type == "diffusion"
            for replica_id in pool.available_replica_ids():
                slot, client = (stage_id, replica_id), pool.clients[replica_id]
                replica = before.get(slot)
                if replica is None or replica.client is not client:
                    replica = None if diffusion else self._watch(stage_id, pool, replica_id, client)
                    if replica is not None:
                        joined.append(replica)
                if replica is not None:
                    queued[slot] = replica
                else:
                    polled.append(Replica(stage_id, pool, replica_id, client))
        # Evicted, detached, unavailable, or another client is in its slot.
        left = [replica for slot, replica in before.items() if queued.get(slot) is not replica]
        for replica in left:
            slot = replica.stage_id, replica.replica_id
            if slot not in queued:
                self._unwatch(slot)
        self.queued, self.polled = queued, polled
        if joined or left:
            self._group()
        return Changes(joined, left)

    def put_off(self, now_ns: int) -> None:
        """Work first, look later: the loop was woken, and what is new would have made the membership stale."""
        self.look_ns = max(self.look_ns, min(now_ns + LOOK_AFTER_NS, self._looked_ns + LOOK_AT_LEAST_NS))

    def close(self) -> None:
        """Give all queues back to upstream."""
        for notifier in self._notifiers.values():
            notifier.remove()
        self._notifiers.clear()
        self.queued.clear()

    def _watch(self, stage_id: int, pool: Any, replica_id: int, client: Any) -> QueuedReplica | None:
        """Be notified of what is put into a new client's queue; None for a client that can only be polled."""
        slot = stage_id, replica_id
        self._unwatch(slot)  # another client was in it
        queue = getattr(client, "outputs_queue", None)
        if not isinstance(queue, asyncio.Queue) or not self._can_dequeue(client):
            return None
        waiting = getattr(queue, "_queue", None)
        if type(waiting) is not deque:  # some other kind of queue, or another Python's
            return None
        stage = next((each for each in self.stages if each.stage_id == stage_id and each.pool is pool), None)
        stage = stage or Stage(stage_id, pool, self._first_audio_key)
        replica = QueuedReplica(stage, replica_id, client, waiting, self._clock)
        note_put = replica.arrivals.note_put
        if stage.first_audio_key is not None:
            note_put = replica.note_put
            for raw_outputs in waiting:  # as if the last came last: all of them go first
                replica.look_for_first_audio(raw_outputs)
        self._notifiers[slot] = NotifyOnPut(queue, note_put, self._on_put)
        return replica

    def _unwatch(self, slot: Slot) -> None:
        if slot in self._notifiers:
            self._notifiers.pop(slot).remove()

    def _group(self) -> None:
        """Group the replicas by stage."""
        stages: dict[int, Stage] = {}
        for replica in self.queued.values():
            replica.stage = stages.setdefault(replica.stage_id, replica.stage)
        for stage in stages.values():
            stage.replicas = deque(replica for replica in self.queued.values() if replica.stage is stage)
        self.stages = list(stages.values())
