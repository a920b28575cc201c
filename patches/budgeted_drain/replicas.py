"""The stages and their replicas as the loop sees them, and how it learns that something arrived at one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .arrivals import Arrivals


class Replica:
    """One replica of a stage: the client that was in one slot of upstream's pool when it was looked at.

    Attributes:
        stage_id: Its stage.
        pool: Upstream's ``StagePool``.
        replica_id: The slot.
        client: Upstream's client in that slot.
    """

    __slots__ = ("client", "pool", "replica_id", "stage_id")

    def __init__(self, stage_id: int, pool: Any, replica_id: int, client: Any) -> None:
        self.stage_id = stage_id
        self.pool = pool
        self.replica_id = replica_id
        self.client = client

    def is_gone(self) -> bool:
        """Whether it was evicted, detached, replaced or marked unavailable meanwhile."""
        return self.pool.clients[self.replica_id] is not self.client or not self.pool.is_replica_available(self.replica_id)


class QueuedReplica(Replica):
    """A replica whose client has an output queue from which raw outputs are taken.

    Attributes:
        stage: Its stage, with what the order knows of it.
        waiting: The raw outputs in that queue; read only, the queue is upstream's.
        arrivals: When these came, and of which requests they are.
        awaited_by: The ends that are held until it has passed a number: a heap of number, tie breaker, ``HeldEnd``.
        first_audio: Number of the last that brought somebody's first audio.
    """

    __slots__ = ("arrivals", "awaited_by", "first_audio", "stage", "waiting")

    def __init__(
        self,
        stage: Stage,
        replica_id: int,
        client: Any,
        waiting: deque[Any],
        clock: Iterator[int],
    ) -> None:
        super().__init__(stage.stage_id, stage.pool, replica_id, client)
        self.stage = stage
        self.waiting = waiting
        self.arrivals = Arrivals(waiting, clock)
        self.awaited_by: list[tuple[float, int, Any]] = []
        self.first_audio = -1

    def note_put(self) -> None:
        """A raw output was put into the queue of a stage that may send first audio."""
        self.arrivals.note_put()
        self.look_for_first_audio(self.waiting[-1])

    def look_for_first_audio(self, raw_outputs: Any) -> None:
        """Note whether the raw output that came last brings first audio."""
        key = self.stage.first_audio_key
        for entry in getattr(raw_outputs, "outputs", ()):
            payload = getattr(entry, "multimodal_output", None)
            if isinstance(payload, dict) and key in payload:
                self.first_audio = self.arrivals.last_number()
                return


class Stage:
    """One stage with its replicas that have output queues.

    Attributes:
        stage_id: The stage.
        pool: Upstream's ``StagePool``.
        final_output: Whether its outputs go to the user.
        replicas: The one whose turn it is first.
        due_ns: When it is due, on the clock of processing time.
        pause_ns: What must be spent for its floor to be worth a raw output such as its last one.
        first_audio_key: By what first audio is known that upstream gives the user although the stage is none that is
            seen; None where there is no such thing.
    """

    __slots__ = ("due_ns", "final_output", "first_audio_key", "pause_ns", "pool", "replicas", "stage_id")

    def __init__(self, stage_id: int, pool: Any, first_audio_key: str | None = None) -> None:
        self.stage_id = stage_id
        self.pool = pool
        self.final_output = bool(pool.final_output)
        self.first_audio_key = None if self.final_output else first_audio_key
        self.replicas: deque[QueuedReplica] = deque()
        self.due_ns = self.pause_ns = 0.0

    def take_turn(self) -> QueuedReplica | None:
        """The next replica in rotation that has a backlog; None when there is none."""
        replicas = self.replicas
        for _ in range(len(replicas)):
            replica = replicas[0]
            replicas.rotate(-1)
            if replica.waiting:
                return replica
        return None

    def has_backlog(self) -> bool:
        """Whether a raw output waits at any of its replicas."""
        for replica in self.replicas:  # noqa: SIM110 - a generator would cost more than the loop; it runs for each pass
            if replica.waiting:
                return True
        return False

    def has_first_audio(self) -> bool:
        """Whether first audio waits at any of its replicas."""
        return any(replica.first_audio > replica.arrivals.taken for replica in self.replicas)

    def is_awaited(self) -> bool:
        """Whether an end is held until one of its replicas has come further."""
        for replica in self.replicas:  # noqa: SIM110 - as in has_backlog
            if replica.awaited_by:
                return True
        return False


class NotifyOnPut:
    """Calls back whenever something is put into one client's queue.

    Upstream's socket reader holds the queue object itself, so the queue is not replaced: its ``put_nowait`` gets an
    instance attribute in front, which ``remove`` takes off.

    Args:
        queue: The client's output queue.
        number: Called first: gives the arrival its number.
        wake: Called then: wakes the loop.
    """

    def __init__(self, queue: asyncio.Queue[Any], number: Callable[[], None], wake: Callable[[], None]) -> None:
        self.queue = queue
        put = queue.put_nowait

        def put_and_notify(item: Any) -> None:
            put(item)
            number()
            wake()

        self._ours = put_and_notify
        vars(queue)["put_nowait"] = put_and_notify

    def remove(self) -> None:
        """Give the queue its own ``put_nowait`` back, unless somebody else has put one in front of ours."""
        if vars(self.queue).get("put_nowait") is self._ours:
            del vars(self.queue)["put_nowait"]
