"""The stages and their replicas, and the numbered arrivals at each replica."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .held_ends import HeldEnd

Slot = tuple[int, int]
"""Stage and replica."""


class Replica:
    """One replica of a stage, which is a client that is or was in a slot of upstream's pool.

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

    def is_in_slot(self) -> bool:
        """Whether it is still in its slot, because it was not evicted, detached or replaced."""
        return self.pool.clients[self.slot[1]] is self.client

    def is_gone(self) -> bool:
        """Whether it was evicted, detached, replaced or marked unavailable."""
        return not (self.is_in_slot() and self.pool.is_replica_available(self.slot[1]))


class Arrival:
    """A raw output or an exception in a client's queue.

    Attributes:
        replica: The replica whose queue it is.
        number: Its place among the arrivals at all replicas.
        item: The raw output or the exception.
        entries: Its requests, and for each whether it has an entry with a finish reason. None until it is needed.
        behind: The held ends that wait until it has been dispatched.
    """

    __slots__ = ("behind", "entries", "item", "number", "replica")

    def __init__(self, replica: QueuedReplica, number: int, item: Any) -> None:
        self.replica = replica
        self.number = number
        self.item = item
        self.entries: dict[str, bool] | None = None
        self.behind: list[HeldEnd] = []


class QueuedReplica(Replica):
    """A replica whose client has an output queue, from which raw outputs are taken without waiting.

    Upstream's socket reader keeps a reference to the queue object, so the queue is not replaced. Instead, an instance
    attribute overrides its ``put_nowait``, and ``stop_watching`` removes that attribute.

    Args:
        stage: Its stage, to which it is added.
        slot: Stage and replica.
        client: Upstream's client, with the dequeue of ``nonblocking_dequeue``.
        waiting: The content of that client's queue. Read only.
        numbers: The count that numbers the arrivals at all replicas.

    Attributes:
        waiting: The content of the queue. Empty after the replica has left.
        arrivals: The same content with numbers, in the order of arrival.
        dequeue: Takes the next raw output. Returns None if the queue is empty. Raises an exception that is in the
            queue, as upstream formats it.
        last_taken: Number of the last arrival that has left the queue. -1 before the first.
        awaited: Number of the last arrival that a held end waits for.
        passed: The held ends whose arrival has left the queue. They are released when it has been dispatched.
        first_audio: Number of the last arrival with a request's first audio from a stage without final output.
    """

    __slots__ = (
        *("_by_request", "_numbers", "_put", "arrivals", "awaited", "dequeue", "first_audio", "last_taken"),
        *("passed", "waiting"),
    )

    def __init__(self, stage: Stage, slot: Slot, client: Any, waiting: deque[Any], numbers: Iterator[int]) -> None:
        super().__init__(stage, slot, client)
        self.waiting = waiting
        self.arrivals: deque[Arrival] = deque()
        self.passed: list[HeldEnd] = []
        self.last_taken = self.first_audio = self.awaited = -1
        self._by_request: defaultdict[str, deque[Arrival]] = defaultdict(deque)
        self._numbers = numbers
        # Bound once, so that a later change of the class does not change a running loop.
        self.dequeue: Callable[[], Any] = client.get_output_nowait
        self._put: Callable[[Any], None] | None = None
        self.follow_queue()
        stage.join(self)

    def watch(self, on_put: Callable[[QueuedReplica], None]) -> None:
        """Call ``on_put`` after each put. It must not raise."""
        queue = self.client.outputs_queue
        put = queue.put_nowait

        def put_and_notify(item: Any) -> None:
            put(item)
            on_put(self)

        self._put = vars(queue)["put_nowait"] = put_and_notify

    def stop_watching(self) -> None:
        """Restore the queue's own ``put_nowait``, unless another wrapper covers this one, and forget the queue."""
        attributes = vars(self.client.outputs_queue)
        if attributes.get("put_nowait") is self._put:
            attributes.pop("put_nowait", None)
        self.waiting = deque()

    def follow_queue(self) -> None:
        """Make ``arrivals`` equal to the queue, also if other code has put or taken items."""
        arrivals, waiting = self.arrivals, self.waiting
        while arrivals and (len(arrivals) > len(waiting) or arrivals[0].item is not waiting[0]):
            self.pass_first()
        while len(arrivals) < len(waiting):
            arrival = Arrival(self, next(self._numbers), waiting[len(arrivals)])
            arrivals.append(arrival)
            key = self.stage.first_audio_key
            if key is not None and not self.stage.final_output and _has_key(arrival.item, key):
                self.first_audio = arrival.number

    def pass_first(self) -> None:
        """Note that the first arrival has left the queue."""
        arrival = self.arrivals.popleft()
        self.last_taken = arrival.number
        self.passed += arrival.behind
        for request_id in arrival.entries or ():
            line = self._by_request[request_id]
            line.popleft()
            if not line:
                del self._by_request[request_id]

    def last_before(self, limit: float, request_ids: frozenset[str], *, ends: bool) -> Arrival | None:
        """The last queued arrival below ``limit`` with an entry (``ends``: the end) of any of these requests.

        The queue is indexed by request when this is first called, because usually no end waits.
        """
        unread: list[Arrival] = []
        for arrival in reversed(self.arrivals):
            if arrival.entries is not None:
                break
            unread.append(arrival)
        for arrival in reversed(unread):
            outputs = getattr(arrival.item, "outputs", ())  # an exception has none
            arrival.entries = {each.request_id: each.finish_reason is not None for each in outputs}
            for request_id in arrival.entries:
                self._by_request[request_id].append(arrival)
        found: Arrival | None = None
        for request_id in request_ids:
            for arrival in reversed(self._by_request.get(request_id, ())):
                if arrival.number < limit and arrival.entries and (arrival.entries[request_id] or not ends):
                    found = arrival if found is None or found.number < arrival.number else found
                    break
        return found

    def is_awaited(self) -> bool:
        """Whether a held end waits for an arrival in the queue."""
        return self.awaited > self.last_taken and bool(self.waiting)


class Stage:
    """One stage with its replicas that have output queues. It may have none.

    Attributes:
        stage_id: The stage.
        pool: Upstream's ``StagePool``.
        final_output: Whether users receive its outputs.
        replicas: Its replicas, the one whose turn it is first.
        due_ns: When it is due, on the clock of processing time.
        pause_ns: The processing time after which its floor allows another raw output that costs as much as its last.
        first_audio_key: The key in a payload by which upstream recognizes first audio that it sends to the user from a
            stage without final output. None if upstream has no such key.
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
        """Add a replica. Upstream's pool does not know its ``final_output`` before it has a client."""
        self.final_output = bool(self.pool.final_output)
        self.replicas.append(replica)

    def take_turn(self) -> QueuedReplica | None:
        """The next replica in rotation that has a backlog, an awaited one before others. None if there is none."""
        replicas, is_awaited = self.replicas, self.is_awaited()
        for _ in range(len(replicas)):
            replicas.rotate(-1)
            if replicas[-1].waiting and (replicas[-1].is_awaited() or not is_awaited):
                return replicas[-1]
        return None

    def has_backlog(self) -> bool:
        """Whether a raw output is queued at any of its replicas."""
        for replica in self.replicas:  # noqa: SIM110 - a generator would cost more than the loop; it runs for each pass
            if replica.waiting:
                return True
        return False

    def has_first_audio(self) -> bool:
        """Whether first audio is queued at any of its replicas."""
        return any(replica.first_audio > replica.last_taken for replica in self.replicas)

    def is_awaited(self) -> bool:
        """Whether a held end waits for one of its replicas."""
        for replica in self.replicas:  # noqa: SIM110 - as in has_backlog
            if replica.is_awaited():
                return True
        return False


def _has_key(raw_outputs: Any, key: str) -> bool:
    """Whether the payload of any entry has this key."""
    payloads = (getattr(entry, "multimodal_output", None) for entry in getattr(raw_outputs, "outputs", ()))
    return any(isinstance(payload, dict) and key in payload for payload in payloads)
