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

from omni_fastpath.ledger import logger
from omni_fastpath.patches.save_queue_cap.payload import give, keep, weigh
from omni_fastpath.patches.save_queue_cap.unfetched import Chunks

FIFO_FOR_BENCHMARKS = False
"""Serve in the order of arrival instead: what credits do without fairness. Only benchmarks set it."""

SLOW_S = 0.02
"""A send that lasts longer is slow. Shorter ones differ by who got the interpreter's lock more than by stream."""

FLAT_S = 0.001
"""What a send that is not slow costs its stream, so that streams without slow sends take turns."""

_CROWD = 1024
"""Streams from which on those that have nothing on its way are forgotten."""


def stream_of(task: Mapping[str, Any]) -> str:
    """The external request id that a save task belongs to; a clean-up task names it in its key prefix."""
    request = task.get("request")
    if request is not None:
        external_req_id: str = request.external_req_id
        return external_req_id
    prefix: str = task["cleanup_shm"][0]
    return prefix.rsplit("_", 1)[0]


@dataclass(slots=True)
class _Held:
    """A queued task with what it weighs."""

    task: dict[str, Any]
    stream: Stream
    number: int
    storage: Mapping[int, int]
    """What the payload keeps alive, some of it perhaps with other tasks: address, bytes."""
    is_waiting: bool = True
    is_kept: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """A thread that sends. ``reserved``: the task that ``popleft`` will give it; only the thread itself looks at it."""

    thread: threading.Thread
    reserved: _Held | None = None


@dataclass(slots=True)
class Stream:
    """What one stream has on its way. ``tasks`` counts those queued and the one in flight."""

    key: str
    waiting: deque[_Held] = field(default_factory=deque)
    in_flight: _Held | None = None
    tasks: int = 0
    last_nbytes: int = 0
    virtual_s: float = 0.0
    last_put_s: float | None = None
    is_quick: bool = False
    unfetched: int = 0
    fetches: int = 0
    given_up_at: int | None = None
    """Its ``fetches`` when a hold for unfetched chunks ended in which nobody had fetched any."""


class SaveQueue:
    """The queue of one adapter.

    Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996) with the measured time of a send as its cost: the
    stream that has had the least is next, and one that comes back starts where the others are. Sends that are not slow
    all cost the same, and so does one that is slow by itself: charged is what two puts of a stream in a row took. A
    pause of the whole process (a garbage collection) hits whoever is being sent, and would hold that one back until
    each of the others has had as much.

    A helper lane sends only while the first lane sleeps, or is in a slow send: in one that has lasted ``SLOW_S``, or in
    one of a stream whose last two puts were slow, or the only one, or that has made none. Two lanes that work all the
    time only fight for the interpreter's lock. Who notices is the first lane where it knows, the next ``append`` where
    it does not, and at the latest the helper itself, which upstream's loop wakes every 0.1 s.

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
        self._lanes: dict[int, _Lane] = {}  # by the thread's number
        self._first_lane: _Lane | None = None
        self._sending_since_s: float | None = None  # the first lane's current send
        self._helper: threading.Condition | None = None
        self._is_helper_alert = False
        self._inbox: deque[dict[str, Any]] = deque()
        self._queued = 0
        self._numbers = 0
        self._virtual_s = 0.0
        self._ready: list[tuple[float, int, Stream]] = []  # a heap: each stream with waiting tasks and none in flight
        self._bytes = 0
        self._storage: dict[int, int] = {}  # address: bytes
        self._more_uses: dict[int, int] = {}  # address: tasks after the first that have it too
        self._others: list[_Held] = []  # queued since the last step with payloads that are not ours
        self._fifo = FIFO_FOR_BENCHMARKS
        self._crowd = _CROWD
        self.near_at = float("inf")
        """Tasks of a stream from which on it is among ``near``."""
        self.near: dict[str, Stream] = {}
        """Streams with that many tasks, as of the last ``sort_in``."""

    def add_lane(self, thread: threading.Thread, helper: threading.Condition | None = None) -> None:
        """Let a thread that runs reserve tasks; any other finds a plain queue.

        Args:
            thread: The lane. The first is upstream's own save thread.
            helper: What a further lane sleeps on. It takes tasks only while the first lane sleeps or is in a slow send.
        """
        assert thread.ident is not None, "a lane is known by its number, which it has once it runs"
        lane = self._lanes[thread.ident] = _Lane(thread)
        self._first_lane = self._first_lane or lane
        self._helper = helper or self._helper

    @property
    def lanes(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return tuple(lane.thread for lane in self._lanes.values())

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream that has something on its way, and some that had."""
        self.sort_in()
        return self._streams

    @property
    def tasks(self) -> int:
        """Queued and in flight."""
        self.sort_in()
        return self._tasks

    @property
    def nbytes(self) -> int:
        """Bytes queued and in flight (unique storage) and not fetched."""
        self.sort_in()
        return self._all_bytes()

    def _all_bytes(self) -> int:
        return self._bytes + (self.chunks.nbytes if self.chunks is not None else 0)

    # ---- The producer: the scheduler's thread ----

    def append(self, task: dict[str, Any]) -> None:
        """Queue a task behind its stream's others, without the queue's lock.

        The scheduler's thread hands over a task for each stream in one go while a lane takes them: with a lock around
        each, both spend their time on it. Only to alert the helper it may wait until that has fallen asleep.
        """
        self._inbox.append(task)
        if self._helper is not None and not self._is_helper_alert and self._is_first_stuck(time.monotonic()):
            self._alert(self._helper)

    def _alert(self, helper: threading.Condition) -> None:
        self._is_helper_alert = True  # until it asks for a task
        with helper:
            helper.notify()

    def wake_helper(self) -> bool:
        """Alert the helper if the first lane is stuck, and say whether it was."""
        if self._helper is None or not self._is_first_stuck(time.monotonic()):
            return False
        if not self._is_helper_alert:
            self._alert(self._helper)
        return True

    def _is_first_stuck(self, now: float) -> bool:
        """Whether the first lane is in a slow send. Without the lock: a moment too early or late does no harm."""
        since_s = self._sending_since_s
        return since_s is not None and now - since_s >= SLOW_S

    def sort_in(self) -> None:
        """Count what was queued since the last time."""
        if self._inbox:
            with self._lock:
                self._sort_in()

    def _sort_in(self) -> None:
        """Put what came since into its streams' queues; under the lock. It runs once a task: every line counts."""
        inbox, streams, counters, keep_all = self._inbox, self._streams, self._counters, self._keep_all
        before = number = self._numbers
        most = counters["max_stream_tasks"]
        while inbox:
            task = inbox.popleft()
            key = stream_of(task)
            try:
                storage, is_anothers = weigh(task.get("multimodal_output"), keep_all=keep_all)
            except Exception:  # a kind of tensor that cannot be looked at: it is sent all the same
                logger.exception("omni-fastpath: save_queue_cap could not weigh a payload of %s", key)
                storage, is_anothers = {}, False
            stream = streams.get(key) or self._open(key)
            held = _Held(task, stream, number, storage)
            number += 1
            if not stream.waiting and stream.in_flight is None:
                stream.virtual_s = max(stream.virtual_s, self._virtual_s)
                self._offer(stream, held)
            stream.waiting.append(held)
            stream.tasks = tasks = stream.tasks + 1
            most = max(most, tasks)
            if tasks >= self.near_at:
                self.near[key] = stream
            if storage:
                stream.last_nbytes = self._weigh(storage) or stream.last_nbytes
                if is_anothers and self._owns:
                    self._others.append(held)
        came = number - before
        self._numbers = number
        self._tasks += came
        self._queued += came
        counters["tasks"] += came
        counters["max_stream_tasks"] = most
        counters["max_queued_tasks"] = max(counters["max_queued_tasks"], self._tasks)
        self._note_bytes()

    def own_what_waits(self) -> None:
        """Before the runner's next step: make what was queued since the last one, and still waits, the queue's own.

        Most was sent by then and need not be copied. What a lane has taken is upstream's to read, as it always was.
        """
        with self._lock:  # always: a lane may be about to sort in what it took from the inbox
            self._sort_in()
            others, self._others = self._others, []
        kept = []
        for held in others:
            if held.is_waiting:
                payload, copies = keep(held.task["multimodal_output"], keep_all=self._keep_all)
                kept.append((held, payload, weigh(payload)[0], copies))
        if not kept:
            return
        with self._lock:  # once: each time may be a wait for a lane, and for the interpreter's lock after it
            for held, payload, storage, copies in kept:
                if held.is_waiting:
                    held.task["multimodal_output"], held.is_kept = payload, True
                    self._unweigh(held.storage)
                    held.storage = storage
                    held.stream.last_nbytes = self._weigh(storage)
                    self._counters["copied_tensors"] += copies

    def _open(self, key: str) -> Stream:
        if len(self._streams) >= self._crowd:
            # Those that came first have ended most likely; one that comes back after all is new.
            idle = [each.key for each in self._streams.values() if not each.tasks and not each.unfetched]
            for each in idle[: len(idle) // 2 + 1]:
                del self._streams[each]
            self._crowd = len(self._streams) + _CROWD // 2
        stream = self._streams[key] = Stream(key)
        return stream

    def _weigh(self, storage: Mapping[int, int]) -> int:
        """Count storage; the bytes that nobody else's task kept alive."""
        added = 0
        for address, size in storage.items():
            if address in self._storage:
                self._more_uses[address] = self._more_uses.get(address, 0) + 1
            else:
                self._storage[address] = size
                added += size
        self._bytes += added
        return added

    def _unweigh(self, storage: Mapping[int, int]) -> None:
        for address in storage:
            more_uses = self._more_uses.get(address) if self._more_uses else None
            if more_uses is None:
                self._bytes -= self._storage.pop(address)
            elif more_uses > 1:
                self._more_uses[address] = more_uses - 1
            else:
                del self._more_uses[address]

    def _note_bytes(self) -> None:
        nbytes = self._all_bytes()
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], nbytes)

    # ---- The lanes ----

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return self._queued + len(self._inbox)

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread; in a lane, reserve it."""
        lane = self._lanes.get(threading.get_ident())
        if lane is None:
            return bool(self._ready or self._inbox) and self._is_something_ready()
        if lane.reserved is not None:
            return True
        now = time.monotonic()
        is_first = lane is self._first_lane
        if not is_first and not self._may_help():
            return False
        if self.chunks is not None:
            self.chunks.look(now)
        with self._lock:
            if self._inbox:
                self._sort_in()
            held = lane.reserved = self._take()
        if is_first:
            self._begin(held, now)
        return held is not None

    def _may_help(self) -> bool:
        # Upstream's loop asks once more with the condition in its hands before it sleeps: an alert that came before is
        # seen then, the clock being read after the alert was taken back.
        self._is_helper_alert = False
        # Beside a first lane that sleeps too: what the end of the helper's own send made ready nobody else knows of.
        return self._sending_since_s is None or self._is_first_stuck(time.monotonic())

    def _begin(self, held: _Held | None, now: float) -> None:
        """The first lane goes into a send, or to sleep."""
        if held is None:
            self._sending_since_s = None
        elif held.stream.is_quick:
            self._sending_since_s = now
        else:
            self._sending_since_s = now - SLOW_S
            if self._ready and self._helper is not None and not self._is_helper_alert:
                self._alert(self._helper)

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
        lane = self._lanes.get(threading.get_ident())
        held = None
        if lane is not None:
            held, lane.reserved = lane.reserved, None
        if held is None:
            with self._lock:
                self._sort_in()
                held = self._take()
        if held is None:
            raise IndexError("no save task is waiting")
        if held.is_kept:
            held.task["multimodal_output"] = give(held.task["multimodal_output"])
        return held.task

    def _offer(self, stream: Stream, first: _Held) -> None:
        heapq.heappush(self._ready, (0.0 if self._fifo else stream.virtual_s, first.number, stream))

    def _take(self) -> _Held | None:
        if not self._ready:
            return None
        stream = heapq.heappop(self._ready)[2]
        held = stream.in_flight = stream.waiting.popleft()
        held.is_waiting = False
        self._virtual_s = max(self._virtual_s, stream.virtual_s)
        self._queued -= 1
        return held

    def sent(
        self, task: Mapping[str, Any], seconds: float, *, has_put: bool = True, is_unfetched: bool = False
    ) -> None:
        """A send ended, well or not: its stream's next task may be taken.

        Args:
            task: As ``popleft`` gave it.
            seconds: What it took.
            has_put: Whether the connector was given something; the talker's frames go in chunks of many tasks.
            is_unfetched: Whether that is a chunk that counts until ``gone`` says otherwise.
        """
        with self._lock:
            key = stream_of(task)
            stream = self._streams.get(key)
            if is_unfetched:
                stream = stream or self._open(key)
                stream.unfetched += 1
                self._note_bytes()
            held = None if stream is None else stream.in_flight
            if stream is None or held is None or held.task is not task:
                return  # sent by somebody who did not take it from here
            if held.storage:
                self._unweigh(held.storage)
            stream.in_flight = None
            stream.tasks = tasks = stream.tasks - 1
            self._tasks -= 1
            if tasks < self.near_at:
                self.near.pop(key, None)
            cost_s = FLAT_S
            if has_put or seconds >= SLOW_S:
                before_s, stream.last_put_s = stream.last_put_s, seconds
                stream.is_quick = min(seconds, seconds if before_s is None else before_s) < SLOW_S
                if before_s is not None and not stream.is_quick:
                    cost_s = min(seconds, before_s)
            stream.virtual_s += cost_s
            if stream.waiting:
                self._offer(stream, stream.waiting[0])

    def gone(self, key: str, count: int, *, fetched: bool) -> None:
        """So many of a stream's chunks are in shared memory no longer, or are not counted any more."""
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                return
            stream.unfetched -= count
            if fetched:
                stream.fetches += count
            else:  # of a request that is over; the next one of this name has a receiver of its own
                stream.given_up_at = None
