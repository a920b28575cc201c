"""The stages and their replicas as the loop sees them, and what arrived at each replica in which order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from omni_fastpath.ledger import logger

if TYPE_CHECKING:
    from .held_ends import HeldEnd

Slot = tuple[int, int]
"""Stage and replica."""


class Replica:
    """One replica of a stage: the client that was in one slot of upstream's pool when it was looked at.

    Attributes:
        stage: Its stage.
        pool: Upstream's ``StagePool``.
        slot: Stage and replica.
        client: Upstream's client in that slot.
    """

    __slots__ = ("client", "pool", "slot", "stage")

    def __init__(self, stage: Stage, slot: Slot, client: Any) -> None:
        self.stage = stage
        self.pool = stage.pool
        self.slot = slot
        self.client = client

    def is_gone(self) -> bool:
        """Whether it was evicted, detached, replaced or marked unavailable meanwhile."""
        replica_id = self.slot[1]
        return self.pool.clients[replica_id] is not self.client or not self.pool.is_replica_available(replica_id)


class Arrival:
    """A raw output, or an exception, that waits in a client's queue.

    Its requests are read only when the end of a request asks for them: a queue that is empty by then, which is the
    rule, is never read.

    Attributes:
        number: Its place among the arrivals at all replicas.
        item: The raw output or the exception.
    """

    __slots__ = ("_ending", "_named", "item", "number")

    def __init__(self, number: int, item: Any) -> None:
        self.number = number
        self.item = item
        self._named: frozenset[str] | None = None
        self._ending: frozenset[str] = frozenset()

    def request_ids(self, *, ends: bool = False) -> frozenset[str]:
        """The requests that it has an entry of; with ``ends``, those of which it has an entry with a finish reason."""
        if self._named is None:
            self._named = frozenset()
            try:
                entries = getattr(self.item, "outputs", ())
                self._ending = frozenset(each.request_id for each in entries if each.finish_reason is not None)
                self._named = frozenset(each.request_id for each in entries)
            except Exception:  # an item of another make must not end the orchestrator
                logger.exception("omni-fastpath: a queued output cannot be read; ends of requests do not wait for it")
        return self._ending if ends else self._named


class QueuedReplica(Replica):
    """A replica whose client has an output queue, from which raw outputs are taken without waiting.

    Upstream's socket reader holds the queue object, so the queue is not replaced: its ``put_nowait`` gets an instance
    attribute in front, which ``stop_watching`` takes off.

    Args:
        stage: Its stage, whose replica it is from now on.
        slot: Stage and replica.
        client: Upstream's client, with the dequeue of ``nonblocking_dequeue``.
        waiting: What stands in that client's queue; read only.
        numbers: The count that numbers the arrivals at all replicas.

    Attributes:
        waiting: What stands in the queue; nothing once the replica has left.
        arrivals: The same, numbered, in the order of arrival.
        taken: Number of the last arrival that was taken; -1 before the first.
        awaited_by: The held ends that wait until ``HeldEnd.awaited`` has been passed here.
        first_audio: Number of the last arrival that brings a request's first audio from a stage that is not seen.
    """

    __slots__ = ("_dequeue", "_numbers", "_put", "arrivals", "awaited_by", "first_audio", "taken", "waiting")

    def __init__(self, stage: Stage, slot: Slot, client: Any, waiting: deque[Any], numbers: Iterator[int]) -> None:
        super().__init__(stage, slot, client)
        stage.join(self)
        self.waiting = waiting
        self.arrivals: deque[Arrival] = deque()
        self.awaited_by: list[HeldEnd] = []
        self.taken = self.first_audio = -1
        self._numbers = numbers
        # Bound once: a class that is changed later must not change a loop that runs.
        self._dequeue: Callable[[], Any] = client.get_output_nowait
        self._put: Callable[[Any], None] | None = None
        self.follow_queue()

    def watch(self, on_put: Callable[[], None]) -> None:
        """Number each arrival from now on, and call ``on_put`` after it."""
        queue = self.client.outputs_queue
        put = queue.put_nowait

        def put_and_notify(item: Any) -> None:
            put(item)
            self.follow_queue()
            on_put()

        self._put = vars(queue)["put_nowait"] = put_and_notify

    def stop_watching(self) -> None:
        """Give the queue its own ``put_nowait`` back, unless another wrapper stands in front of ours, and forget it."""
        attributes = vars(self.client.outputs_queue)
        if attributes.get("put_nowait") is self._put:
            del attributes["put_nowait"]
        self.waiting = deque()

    def take(self) -> Any:
        """The next raw output; None when the queue is empty.

        Raises:
            Exception: The one that stands in the queue in a raw output's place, as upstream formats it.
        """
        try:
            return self._dequeue()
        finally:
            self.follow_queue()

    def follow_queue(self) -> None:
        """Make ``arrivals`` agree with the queue after a put or a take, of whatever origin."""
        arrivals, waiting = self.arrivals, self.waiting
        while arrivals and (len(arrivals) > len(waiting) or arrivals[0].item is not waiting[0]):
            self.taken = arrivals.popleft().number
        while len(arrivals) < len(waiting):
            arrival = Arrival(next(self._numbers), waiting[len(arrivals)])
            arrivals.append(arrival)
            key = self.stage.first_audio_key
            if key is not None and not self.stage.final_output and _has_key(arrival.item, key):
                self.first_audio = arrival.number

    def first_waiting(self) -> float:
        """Number of the arrival that is next; infinity when nothing waits."""
        self.follow_queue()
        return self.arrivals[0].number if self.arrivals else math.inf

    def last_before(self, limit: float, request_ids: frozenset[str], *, ends: bool) -> int | None:
        """Number of the last arrival below ``limit`` that waits with an entry (``ends``: the end) of these requests."""
        if self.first_waiting() >= limit:
            return None
        for arrival in reversed(self.arrivals):
            if arrival.number < limit and not request_ids.isdisjoint(arrival.request_ids(ends=ends)):
                return arrival.number
        return None


class Stage:
    """One stage with its replicas that have output queues; it may have none yet, or none any more.

    Attributes:
        stage_id: The stage.
        pool: Upstream's ``StagePool``.
        final_output: Whether its outputs go to the user.
        replicas: The one whose turn it is first.
        due_ns: When it is due, on the clock of processing time.
        pause_ns: What must be spent for its floor to be worth a raw output such as its last one.
        first_audio_key: The name in a payload by which upstream knows first audio that it gives the user although its
            stage is not seen; None where there is no such thing.
    """

    __slots__ = ("due_ns", "final_output", "first_audio_key", "pause_ns", "pool", "replicas", "stage_id")

    def __init__(self, stage_id: int, pool: Any, first_audio_key: str | None = None) -> None:
        self.stage_id = stage_id
        self.pool = pool
        self.final_output = bool(pool.final_output)
        self.first_audio_key = first_audio_key
        self.replicas: deque[QueuedReplica] = deque()
        self.due_ns = self.pause_ns = 0.0

    def join(self, replica: QueuedReplica) -> None:
        """A replica is of this stage from now on. Without any client upstream's pool does not know what is seen."""
        self.final_output = bool(self.pool.final_output)
        self.replicas.append(replica)

    def take_turn(self) -> QueuedReplica | None:
        """The next replica in rotation that has a backlog; None when there is none."""
        replicas = self.replicas
        for _ in range(len(replicas)):
            replicas.rotate(-1)
            if replicas[-1].waiting:
                return replicas[-1]
        return None

    def has_backlog(self) -> bool:
        """Whether a raw output waits at any of its replicas."""
        for replica in self.replicas:  # noqa: SIM110 - a generator would cost more than the loop; it runs for each pass
            if replica.waiting:
                return True
        return False

    def has_first_audio(self) -> bool:
        """Whether first audio waits at any of its replicas."""
        return any(replica.first_audio > replica.taken for replica in self.replicas)

    def is_awaited(self) -> bool:
        """Whether a held end waits for one of its replicas."""
        for replica in self.replicas:  # noqa: SIM110 - as in has_backlog
            if replica.awaited_by:
                return True
        return False


def _has_key(raw_outputs: Any, key: str) -> bool:
    """Whether the payload of any entry has this key."""
    payloads = (getattr(entry, "multimodal_output", None) for entry in getattr(raw_outputs, "outputs", ()))
    return any(isinstance(payload, dict) and key in payload for payload in payloads)
