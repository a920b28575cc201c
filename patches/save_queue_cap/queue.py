"""One save queue per stream behind the four operations that upstream's ``save_loop`` uses.

``save_loop`` asks ``bool(queue)``, then calls ``popleft()``: the first reserves a task for the calling lane, the second
hands it over, so that several lanes can run the unchanged loop and no two ever have tasks of one stream.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_fastpath.patches.save_queue_cap.payload import give, keep, weigh
from omni_fastpath.patches.save_queue_cap.unfetched import Chunks

FIFO_FOR_BENCHMARKS = False
"""Serve in the order of arrival instead: what credits do without fairness. Only benchmarks set it."""

SLOW_S = 0.02
"""A send that lasts longer is slow. Shorter ones differ by who got the interpreter's lock more than by stream."""

FLAT_S = 0.001
"""What a send that is not slow costs its stream, so that streams without slow sends take turns."""

IDLE_S = 0.1
_SHORTEST_S = 0.0005

_CROWD = 1024
"""Streams from which on those that have nothing on its way are dropped."""


def stream_of(task: Mapping[str, Any]) -> str:
    """The external request id that a save task belongs to; a clean-up task names it in its key prefix."""
    cleanup = task.get("cleanup_shm")
    if cleanup is not None:
        prefix: str = cleanup[0]
        return prefix.rsplit("_", 1)[0]
    external_req_id: str = task["request"].external_req_id
    return external_req_id


class HelperCondition(threading.Condition):
    """What the helper lane sleeps on in upstream's ``save_loop``: until the first lane is in one send for too long."""

    def __init__(self, queue: SaveQueue) -> None:
        super().__init__()
        self._queue = queue

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep at most that long, and no longer than the queue lets the first lane try alone."""
        sleeps_s = self._queue.helper_sleeps_s()
        return super().wait(sleeps_s if timeout is None else min(timeout, sleeps_s))


@dataclass(slots=True)
class _Held:
    """A queued task with what it weighs."""

    task: dict[str, Any]
    number: int
    storage: dict[int, int]
    """What the payload keeps alive, some of it perhaps with other tasks: address, bytes."""
    is_waiting: bool = True
    is_kept: bool = False


@dataclass(slots=True)
class Stream:
    """What one stream has on its way. ``tasks`` counts those queued and the one in flight."""

    key: str
    waiting: deque[_Held] = field(default_factory=deque)
    in_flight: _Held | None = None
    tasks: int = 0
    last_nbytes: int = 0
    virtual_s: float = 0.0
    is_slow: bool = False
    unfetched: int = 0
    fetches: int = 0


class SaveQueue:
    """The queue of one adapter.

    Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996) with the measured time of a send as its cost: the
    stream that has had the least is next, and one that comes back starts where the others are. Sends that are not slow
    all cost the same.

    A helper lane sends only while the first lane is in a slow send: in one that has lasted ``SLOW_S``, or in one of a
    stream whose last send was slow. Two lanes that work all the time only fight for the interpreter's lock: at 64
    streams the second one cost a third of the throughput.

    Args:
        counters: The patch's counters; written under the queue's lock.
        chunks: What shared memory still holds of each stream; None where it cannot be known.
        keep_all: See ``payload.keep``.
        owns: Whether ``own_what_waits`` will be called before each step.
    """

    def __init__(
        self, counters: dict[str, int], *, chunks: Chunks | None = None, keep_all: bool = False, owns: bool = True
    ) -> None:
        self._streams: dict[str, Stream] = {}
        self._tasks = 0
        self.chunks = chunks
        self._counters = counters
        self._keep_all = keep_all
        self._owns = owns
        self._lock = threading.Lock()
        self._lanes: set[threading.Thread] = set()
        self._first_lane: threading.Thread | None = None
        self._sending_since_s: float | None = None  # the first lane's current send
        self._helper: HelperCondition | None = None
        self._is_helper_alert = False
        self._reserved = threading.local()
        self._inbox: deque[dict[str, Any]] = deque()
        self._queued = 0
        self._numbers = 0
        self._virtual_s = 0.0
        self._ready: list[tuple[float, int, str]] = []  # a heap: each stream with waiting tasks and none in flight
        self._bytes = 0
        self._storage: dict[int, list[int]] = {}  # address: uses, bytes
        self._others: list[tuple[Stream, _Held]] = []  # queued since the last step with payloads that are not ours
        self._fifo = FIFO_FOR_BENCHMARKS
        self._crowd = _CROWD

    def add_lane(self, thread: threading.Thread, helper: HelperCondition | None = None) -> None:
        """Let a thread reserve tasks; any other finds a plain queue.

        Args:
            thread: The lane. The first is upstream's own save thread.
            helper: What a further lane sleeps on. It takes tasks only while the first lane is stuck in a send.
        """
        if self._first_lane is None:
            self._first_lane = thread
        self._lanes.add(thread)
        self._helper = helper or self._helper

    @property
    def lanes(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return tuple(self._lanes)

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream that has something on its way, or had more than others lately."""
        self._sort_in_now()
        return self._streams

    @property
    def tasks(self) -> int:
        """Queued and in flight."""
        self._sort_in_now()
        return self._tasks

    @property
    def nbytes(self) -> int:
        """Bytes queued and in flight (unique storage) and not fetched."""
        self._sort_in_now()
        return self._all_bytes()

    def _all_bytes(self) -> int:
        return self._bytes + (self.chunks.nbytes if self.chunks is not None else 0)

    # ---- The producer: the scheduler's thread ----

    def append(self, task: dict[str, Any]) -> None:
        """Queue a task behind its stream's others. Waits for nobody, not even for the queue's lock.

        The scheduler's thread hands over a task for each stream in one go while a lane takes them: with a lock around
        each, both spend their time on it.
        """
        self._inbox.append(task)
        # Read without the lock: the helper looks into the inbox itself before it sleeps for long.
        if self._sending_since_s is not None and not self._is_helper_alert and self._helper is not None:
            self._is_helper_alert = True
            with self._helper:
                self._helper.notify()

    def _sort_in_now(self) -> None:
        if self._inbox:
            with self._lock:
                self._sort_in()

    def _sort_in(self) -> None:
        """Put what came since into its streams' queues; under the lock."""
        inbox, counters = self._inbox, self._counters
        while inbox:
            task = inbox.popleft()
            key = stream_of(task)
            storage, is_anothers = weigh(task.get("multimodal_output"), keep_all=self._keep_all)
            stream = self._streams.get(key) or self._open(key)
            held = _Held(task, self._numbers, storage)
            self._numbers += 1
            if not stream.waiting and stream.in_flight is None:
                stream.virtual_s = max(stream.virtual_s, self._virtual_s)
                self._offer(stream, held)
            stream.waiting.append(held)
            stream.tasks += 1
            self._tasks += 1
            self._queued += 1
            stream.last_nbytes = self._weigh(storage) or stream.last_nbytes
            if is_anothers and self._owns:
                self._others.append((stream, held))
            counters["tasks"] += 1
            counters["max_stream_tasks"] = max(counters["max_stream_tasks"], stream.tasks)
        counters["max_queued_tasks"] = max(counters["max_queued_tasks"], self._tasks)
        self._note_bytes()

    def own_what_waits(self) -> None:
        """Before the runner's next step: make what was queued since the last one, and still waits, the queue's own.

        Most was sent by then and need not be copied. What a lane has taken is upstream's to read, as it always was.
        """
        with self._lock:
            self._sort_in()
            others, self._others = self._others, []
        kept = []
        for stream, held in others:
            if held.is_waiting:
                payload, copies = keep(held.task["multimodal_output"], keep_all=self._keep_all)
                kept.append((stream, held, payload, weigh(payload)[0], copies))
        if not kept:
            return
        with self._lock:  # once: each time may be a wait for a lane, and for the interpreter's lock after it
            for stream, held, payload, storage, copies in kept:
                if held.is_waiting:
                    held.task["multimodal_output"], held.is_kept = payload, True
                    self._unweigh(held.storage)
                    held.storage = storage
                    stream.last_nbytes = self._weigh(storage)
                    self._counters["copied_tensors"] += copies

    def _open(self, key: str) -> Stream:
        if len(self._streams) >= self._crowd:
            # Streams that ended ahead of the others; one that comes back after all starts where the others are.
            for idle in [each for each in self._streams.values() if not each.tasks and not each.unfetched]:
                del self._streams[idle.key]
            self._crowd = max(_CROWD, 2 * len(self._streams))
        stream = self._streams[key] = Stream(key)
        return stream

    def _weigh(self, storage: Mapping[int, int]) -> int:
        """Count storage; the bytes that nobody else's task kept alive."""
        added = 0
        for address, size in storage.items():
            uses = self._storage.setdefault(address, [0, size])
            uses[0] += 1
            if uses[0] == 1:
                added += size
        self._bytes += added
        return added

    def _unweigh(self, storage: Mapping[int, int]) -> None:
        for address in storage:
            uses = self._storage[address]
            uses[0] -= 1
            if not uses[0]:
                del self._storage[address]
                self._bytes -= uses[1]

    def _note_bytes(self) -> None:
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], self._all_bytes())

    # ---- The lanes ----

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return self._queued + len(self._inbox)

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread; in a lane, reserve it."""
        lane = threading.current_thread()
        if lane not in self._lanes:
            return bool(self._ready or self._inbox) and self._is_something_ready()
        if getattr(self._reserved, "held", None) is not None:
            return True
        is_first = lane is self._first_lane
        if self.chunks is not None and is_first:
            self.chunks.look()
        with self._lock:
            if self._inbox:
                self._sort_in()
            held = self._take() if is_first or self._patience_s() <= 0 else None
            helper = None
            if is_first:
                self._sending_since_s = None if held is None else self._expected_start_s(held)
                helper = self._helper_to_alert() if self._ready else None
        if helper is not None:
            with helper:
                helper.notify()
        if held is None:
            return False
        self._reserved.held = held
        return True

    def _is_something_ready(self) -> bool:
        """Whether ``popleft()`` would give something: not what stands behind a task in flight."""
        with self._lock:
            self._sort_in()
            return bool(self._ready)

    def popleft(self) -> dict[str, Any]:
        """The reserved task; outside the lanes, the next one.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        held: _Held | None = getattr(self._reserved, "held", None)
        self._reserved.held = None
        if held is None:
            with self._lock:
                self._sort_in()
                held = self._take()
        if held is None:
            raise IndexError("no save task is waiting")
        if held.is_kept:
            held.task["multimodal_output"] = give(held.task["multimodal_output"])
        return held.task

    def _expected_start_s(self, held: _Held) -> float:
        """When the send that begins now is taken to have begun: long ago, if its stream is known to be slow."""
        return time.monotonic() - (SLOW_S if self._streams[stream_of(held.task)].is_slow else 0.0)

    def _patience_s(self) -> float:
        """How long the helper lets the first lane try alone; at most 0 when it should take tasks."""
        if self._sending_since_s is None:
            return IDLE_S
        return self._sending_since_s + SLOW_S - time.monotonic()

    def _helper_to_alert(self) -> HelperCondition | None:
        """The helper, when the first lane is busy and the helper does not know yet."""
        if self._sending_since_s is None or self._is_helper_alert:
            return None
        self._is_helper_alert = True
        return self._helper

    def helper_sleeps_s(self) -> float:
        """How long the helper may sleep now; after the longest sleep it must be alerted."""
        with self._lock:
            self._sort_in()
            self._is_helper_alert = bool(self._ready) and self._sending_since_s is not None
            return max(self._patience_s(), _SHORTEST_S) if self._is_helper_alert else IDLE_S

    def _offer(self, stream: Stream, first: _Held) -> None:
        heapq.heappush(self._ready, (0.0 if self._fifo else stream.virtual_s, first.number, stream.key))

    def _take(self) -> _Held | None:
        if not self._ready:
            return None
        _, _, key = heapq.heappop(self._ready)
        stream = self._streams[key]
        held = stream.in_flight = stream.waiting.popleft()
        held.is_waiting = False
        self._virtual_s = max(self._virtual_s, stream.virtual_s)
        self._queued -= 1
        return held

    def sent(self, task: Mapping[str, Any], seconds: float) -> None:
        """A send ended, well or not: its stream's next task may be taken."""
        with self._lock:
            stream = self._streams.get(stream_of(task))
            if stream is None or stream.in_flight is None or stream.in_flight.task is not task:
                return  # sent by somebody who did not take it from here
            self._unweigh(stream.in_flight.storage)
            stream.in_flight = None
            stream.tasks -= 1
            self._tasks -= 1
            stream.is_slow = seconds >= SLOW_S
            stream.virtual_s += seconds if stream.is_slow else FLAT_S
            if stream.waiting:
                self._offer(stream, stream.waiting[0])
            elif not stream.unfetched and stream.virtual_s <= self._virtual_s:
                del self._streams[stream.key]  # one that comes back starts where the others are anyhow

    def fetched(self, key: str, unfetched: int, gone: int) -> None:
        """How many of a stream's chunks shared memory still holds, and how many are gone since the last look."""
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                if not unfetched:
                    return
                stream = self._open(key)
            stream.unfetched = unfetched
            stream.fetches += gone
            if not unfetched and not stream.tasks and stream.virtual_s <= self._virtual_s:
                del self._streams[key]
            self._note_bytes()
