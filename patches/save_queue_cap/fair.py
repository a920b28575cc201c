"""One save queue per stream behind the four operations that upstream's ``save_loop`` uses.

``save_loop`` asks ``bool(queue)``, then calls ``popleft()``: the first reserves a task for the calling lane, the second
hands it over, so that several lanes can run the unchanged loop and no two ever have tasks of one stream.

Each change of the books is ordered so that an exception anywhere leaves every task in one of three places: `inbox`, a
stream's ``waiting``, a lane's hands. `SaveQueue` finds them there when it steps aside.
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
from omni_fastpath.patches.save_queue_cap import helper as helpers
from omni_fastpath.patches.save_queue_cap.helper import Helper, Watch
from omni_fastpath.patches.save_queue_cap.payload import NOTHING, Weight, keep, weigh
from omni_fastpath.patches.save_queue_cap.storage import Storage
from omni_fastpath.patches.save_queue_cap.unfetched import Chunks

FLAT_S = 0.001
"""What a send that is not slow costs its stream, so that streams without slow sends take turns."""

CLEARLY_SLOW_S = 0.1
"""A send that lasts so long is no accident of the processor: its stream is left to the helper after one."""

WEIGH_S = 0.1
"""Between two times that what waits is weighed while its bytes are far from their limit."""

WAITED_S = 0.25
"""Time after which a task has really waited, and is looked at for a batch that it alone keeps alive."""

_AGAIN_S = 1.0
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


@dataclass(slots=True, eq=False)
class Held:
    """A queued task. ``weight`` is none until somebody has weighed it; most are sent before."""

    task: dict[str, Any] | None
    stream: Stream
    number: int
    since_s: float
    weight: Weight | None = None
    is_waiting: bool = True


@dataclass(slots=True, eq=False)
class Lane:
    """A thread that sends; only the thread itself and who has the queue's lock touch it.

    Attributes:
        reserved: What ``popleft`` will give it.
        sending: What it gave last and has not been sent.
    """

    thread: threading.Thread
    reserved: Held | None = None
    sending: Held | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """What one stream has on its way. ``tasks`` counts those queued and the one in flight."""

    key: str
    waiting: deque[Held] = field(default_factory=deque)
    in_flight: Held | None = None
    tasks: int = 0
    last_nbytes: int = 0
    virtual_s: float = 0.0
    last_put_s: float | None = None
    is_quick: bool = False
    is_slow: bool = False
    """Its last two puts were slow, or its last one clearly: left to the helper."""
    unfetched: int = 0
    fetches: int = 0
    given_up_at: int | None = None
    """Its ``fetches`` when a hold for unfetched chunks ended in which nobody had fetched any."""


class FairQueue:
    """The managed queue of one adapter.

    Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996) with the measured time of a send as its cost: the
    stream that has had the least is next, and one that comes back starts where the others are. Sends that are not slow
    all cost the same, and so does one that is slow by itself: charged is what two puts of a stream in a row took. A
    pause of the whole process (a garbage collection) hits whoever is being sent, and would hold that one back until
    each of the others has had as much.

    Where there is a helper lane, streams whose last two puts were slow are left to it. It may be in one send for ever:
    the first lane then takes the others of them when it has nothing else to do.

    Args:
        counters: The patch's counters; written under the queue's lock.
        chunks: What shared memory still holds of each stream; None where it cannot be known.
        keep_all: Whether payloads are the runner's own memory, to be copied by `own_what_waits` before each step.
        fifo: Serve in the order of arrival instead; only benchmarks do.
    """

    def __init__(
        self,
        counters: dict[str, int],
        *,
        chunks: Chunks | None = None,
        keep_all: bool = False,
        fifo: bool = False,
    ) -> None:
        self.lock = threading.Lock()
        self.inbox: deque[dict[str, Any]] = deque()
        """What came since the last `sort_in`: appending needs no lock."""
        self.chunks = chunks
        self.helper = Helper()
        self.near_at = float("inf")
        """Tasks of a stream from which on it is among ``near``."""
        self.near: dict[str, Stream] = {}
        """Streams with that many tasks, as of the last ``sort_in``."""
        self.is_open = True
        """False while the inbox is one plain queue: a lane that waited for the lock takes nothing out of it."""
        self.is_pressed = False
        """Whether slow sends keep every lane, so that the streams behind them cannot help having tasks."""
        self.is_anybody_slow = False
        """Whether there is a slow send, or a stream that waits whose sends are slow."""
        self.storage = Storage()
        self._watches = Watch(), Watch()  # of the first lane and the helper
        self._sent_slowly: tuple[Held | None, ...] = ()
        self._streams: dict[str, Stream] = {}
        self._tasks = 0
        self._counters = counters
        self._keep_all = keep_all
        self._fifo = fifo
        self.lane_of: dict[int, Lane] = {}  # by the thread's number
        self.first_lane: Lane | None = None
        self._queued = 0
        self._numbers = 0
        self._virtual_s = 0.0
        # Heaps: each stream with waiting tasks and none in flight, and of those the ones that are left to the helper.
        self._ready: list[tuple[float, int, Stream]] = []
        self._ready_slow: list[tuple[float, int, Stream]] = []
        self._fresh: list[Held] = []  # queued and not weighed, some of them sent since
        self._aging: deque[tuple[float, Held]] = deque()  # weighed, to be looked at again by then
        self._next_weighing_s = 0.0
        self._task_nbytes = float("inf")  # of those that were weighed last, each
        self._next_look_s = 0.0
        self._crowd = _CROWD

    def add_lane(self, thread: threading.Thread, helper: threading.Condition | None = None) -> None:
        """Let a thread that runs reserve tasks; any other finds a plain queue.

        Args:
            thread: The lane. The first is upstream's own save thread.
            helper: What a further lane sleeps on.
        """
        assert thread.ident is not None, "a lane is known by its number, which it has once it runs"
        lane = self.lane_of[thread.ident] = Lane(thread)
        self.first_lane = self.first_lane or lane
        if helper is not None:
            self.helper.condition = helper

    @property
    def lanes(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return tuple(lane.thread for lane in self.lane_of.values())

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
        """Bytes queued and in flight (unique storage) and not fetched; all of it is weighed for this."""
        with self.lock:
            self._sort_in()
            self._weigh()
        return self._all_bytes()

    def nbytes_near(self, limit: float) -> int:
        """The same for a limit: what came lately is weighed only where it may matter, or has not been for a while."""
        with self.lock:
            self._sort_in()
            fresh = len(self._fresh)
            if fresh:
                now = time.monotonic()
                if now >= self._next_weighing_s or self._all_bytes() + fresh * self._task_nbytes >= limit / 2:
                    self._next_weighing_s = now + WEIGH_S
                    self._weigh()
        return self._all_bytes()

    def look_at_lanes(self, now: float) -> None:
        """See which lanes are in slow sends; the scheduler's thread does, once a step and more often at will."""
        first, other = self._watches
        helper = self.helper
        self.look_at_first(helper.first_since_s, now)
        if helper.condition is not None:
            other.look(helper.own_since_s, now)
        self.is_pressed = first.is_dominated(now) and (helper.condition is None or other.is_dominated(now))
        self._sent_slowly = tuple(
            lane.sending
            for lane in tuple(self.lane_of.values())
            if (first if lane is self.first_lane else other).is_slow and lane.sending is not None
        )
        self.is_anybody_slow = (
            first.is_dominated(now)
            or other.is_dominated(now)
            or any(stream.is_slow and stream.tasks for stream in list(self._streams.values()))
        )

    def look_at_first(self, since_s: float | None, now: float) -> bool:
        """Whether the first lane is in a slow send, by this look and those before."""
        return self._watches[0].look(since_s, now)

    def is_slow(self, stream: Stream) -> bool:
        """Whether a stream's sends are slow, as of the last look: the one that goes on, or its last ones."""
        return stream.is_slow or any(held is not None and held.stream is stream for held in self._sent_slowly)

    def _all_bytes(self) -> int:
        return self.storage.nbytes + (self.chunks.nbytes if self.chunks is not None else 0)

    # ---- The producer: the scheduler's thread ----

    def append(self, task: dict[str, Any]) -> None:
        """Queue a task behind its stream's others, without the queue's lock."""
        self.inbox.append(task)
        self.help_if_stuck()

    def help_if_stuck(self) -> None:
        """Alert the helper if the first lane is in a slow send."""
        helper = self.helper
        if helper.condition is not None and not helper.is_alert and helper.is_first_stuck(time.monotonic()):
            helper.alert()

    def sort_in(self) -> None:
        """Count what was queued since the last time."""
        if self.inbox:
            with self.lock:
                self._sort_in()
            self._alert_for_slow()

    def _sort_in(self) -> None:
        """Put what came since into its streams' queues; under the lock. It runs once a task: every line counts."""
        inbox, streams, counters = self.inbox, self._streams, self._counters
        if not inbox or not self.is_open:
            return
        now = time.monotonic()
        came = 0
        most = counters["max_stream_tasks"]
        while inbox:
            task = inbox[0]  # taken when it stands in its stream's queue: nothing that fails in between loses it
            key = stream_of(task)
            stream = streams.get(key) or self._open(key)
            held = Held(task, stream, self._numbers, now)
            self._numbers += 1
            if not stream.waiting and stream.in_flight is None:
                stream.virtual_s = max(stream.virtual_s, self._virtual_s)
                self._offer(stream, held.number)
            stream.waiting.append(held)
            inbox.popleft()
            self._fresh.append(held)
            stream.tasks = tasks = stream.tasks + 1
            self._tasks += 1
            self._queued += 1
            came += 1
            most = max(most, tasks)
            if tasks >= self.near_at:
                self.near[key] = stream
        counters["tasks"] += came
        counters["max_stream_tasks"] = most
        counters["max_queued_tasks"] = max(counters["max_queued_tasks"], self._tasks)
        if len(self._fresh) > 2 * self._queued + _CROWD:
            self._fresh = [held for held in self._fresh if held.is_waiting]

    def _alert_for_slow(self) -> None:
        """Wake the helper where something waits that only it takes. Not under the lock."""
        if self._ready_slow:
            self.helper.alert()

    def _weigh(self) -> None:
        """Weigh what came since the last time and still waits; under the lock."""
        fresh, self._fresh = self._fresh, []
        count, before = 0, self.storage.nbytes
        for held in fresh:
            if held.is_waiting and held.task is not None:
                count += 1
                self._weigh_one(held, held.task)
                self._aging.append((held.since_s + WAITED_S, held))
        if count:
            self._task_nbytes = (self.storage.nbytes - before) / count
        self._note_bytes()

    def _weigh_one(self, held: Held, task: Mapping[str, Any]) -> None:
        try:
            weight = weigh(task.get("multimodal_output"))
        except Exception:  # a kind of tensor that cannot be looked at: it is sent all the same
            logger.exception("omni-fastpath: save_queue_cap could not weigh a payload of %s", held.stream.key)
            weight = NOTHING
        held.weight = weight
        held.stream.last_nbytes = self.storage.add(weight) or held.stream.last_nbytes

    def own_what_waits(self) -> None:
        """Before the runner's next step, where payloads are its own memory: copy what waits and came since the last.

        Most was sent by then and need not be copied. What a lane has taken is upstream's to read, as it always was.
        """
        with self.lock:  # always: a lane may be about to sort in what it took from the inbox
            self._sort_in()
            if not self._keep_all:
                return
            self._weigh()
            fresh = [held for _, held in self._aging if held.is_waiting]
            self._aging.clear()
        self._replace([(held, None) for held in fresh])

    def _replace(self, wanted: list[tuple[Held, Any]]) -> None:
        """Give tasks that wait a copy of their payloads, or of the parts that are wanted."""
        kept = []
        for held, which in wanted:
            task = held.task
            if held.is_waiting and task is not None:
                payload, copies = keep(task.get("multimodal_output"), which)  # a clean-up has none
                if copies:
                    kept.append((held, task, payload, weigh(payload), copies))
        if not kept:
            return
        with self.lock:  # once: each time may be a wait for a lane, and for the interpreter's lock after it
            for held, task, payload, weight, copies in kept:
                if held.is_waiting and held.weight is not None:
                    self.storage.remove(held.weight)
                    held.weight = weight
                    task["multimodal_output"] = payload
                    self.storage.add(weight)
                    self._counters["copied_tensors"] += copies

    def _let_batches_go(self, now: float) -> None:
        """Copy what has waited while most of the batch that it is a part of has left; on a lane's thread."""
        thin = []
        with self.lock:
            aging, is_thin = self._aging, self.storage.is_thin
            for _ in range(len(aging)):
                if aging[0][0] > now:
                    break
                _, held = aging.popleft()
                if held.is_waiting and held.weight:
                    if any(map(is_thin, held.weight)):
                        thin.append((held, frozenset(filter(is_thin, held.weight)).__contains__))
                    else:
                        aging.append((now + _AGAIN_S, held))
        self._replace(thin)

    def _open(self, key: str) -> Stream:
        if len(self._streams) >= self._crowd:
            # Those that came first have ended most likely; one that comes back after all is new.
            idle = [each.key for each in self._streams.values() if not each.tasks and not each.unfetched]
            for each in idle[: len(idle) // 2 + 1]:
                del self._streams[each]
            self._crowd = len(self._streams) + _CROWD // 2
        stream = self._streams[key] = Stream(key)
        return stream

    def _note_bytes(self) -> None:
        nbytes = self._all_bytes()
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], nbytes)

    # ---- The lanes ----

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return self._queued + len(self.inbox)

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread; in a lane, reserve it."""
        lane = self.lane_of.get(threading.get_ident())
        if lane is None:
            return bool(self._queued or self.inbox) and self._is_something_ready()
        if lane.reserved is not None:
            return True
        now = time.monotonic()
        is_first = lane is self.first_lane
        takes_all = is_first or self.helper.may_take_all()
        self._look(now)
        if not takes_all and not self._ready_slow and not self.inbox:
            return False
        with self.lock:
            self._sort_in()
            self._reserve(lane, now, takes_all=takes_all)
        if is_first:
            self._begin(lane.reserved, now)
        return lane.reserved is not None

    def _look(self, now: float) -> None:
        """What a lane does between sends: look at shared memory, and let batches go that a task or two keep alive."""
        if self.chunks is not None:
            self.chunks.look(now)
        if now >= self._next_look_s and (self._fresh or self._aging):
            self._next_look_s = now + WEIGH_S
            with self.lock:
                self._weigh()
            if self._aging and self._aging[0][0] <= now:
                self._let_batches_go(now)

    def _reserve(self, lane: Lane, now: float, *, takes_all: bool) -> None:
        """The next task into the lane's hands, if there is one for it; under the lock."""
        if not self.is_open:
            return
        is_first = lane is self.first_lane
        heap = self._ready
        if not is_first:
            slow = self._ready_slow
            if slow and (not takes_all or not heap or slow[0][:2] < heap[0][:2]):
                heap = slow
            elif not takes_all:
                return
        elif not heap and self._ready_slow and (self.helper.condition is None or self.helper.is_hung(now)):
            heap = self._ready_slow
        if not heap:
            return
        stream = heap[0][2]
        held = stream.waiting[0]
        stream.in_flight = lane.reserved = held
        held.is_waiting = False
        stream.waiting.popleft()
        heapq.heappop(heap)
        self._virtual_s = max(self._virtual_s, stream.virtual_s)
        self._queued -= 1

    def _begin(self, held: Held | None, now: float) -> None:
        """The first lane goes into a send, or to sleep."""
        helper = self.helper
        if held is None:
            helper.first_since_s = None
        elif held.stream.is_quick:
            helper.first_since_s = now
        else:
            helper.first_since_s = now - helpers.SLOW_S
            if self._ready:
                helper.alert()
        self._alert_for_slow()

    def _is_something_ready(self) -> bool:
        """Whether ``popleft()`` would give something: not what stands behind a task in flight."""
        with self.lock:
            self._sort_in()
            return bool(self._ready or self._ready_slow)

    def popleft(self) -> dict[str, Any]:
        """The reserved task; outside the lanes, the next one.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        lane = self.lane_of.get(threading.get_ident())
        outside = lane is None
        if lane is None:
            lane = Lane(threading.current_thread())
        if lane.reserved is None:
            with self.lock:
                self._sort_in()
                self._reserve(lane, time.monotonic(), takes_all=True)
        held = lane.reserved
        if held is None or held.task is None:
            raise IndexError("no save task is waiting")
        if not outside:
            lane.sending = held
            if lane is not self.first_lane:
                self.helper.own_since_s = time.monotonic()
            elif self.helper.first_since_s is None:  # what was reserved for it when the calm ended
                self.helper.first_since_s = time.monotonic()
        lane.reserved = None
        return held.task

    def _offer(self, stream: Stream, number: int) -> None:
        is_left = stream.is_slow and self.helper.condition is not None
        heap = self._ready_slow if is_left else self._ready
        heapq.heappush(heap, (0.0 if self._fifo else stream.virtual_s, number, stream))

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
        lane = self.lane_of.get(threading.get_ident())
        if lane is not None and lane is not self.first_lane:
            self.helper.own_since_s = None
        with self.lock:
            key = stream_of(task)
            stream = self._streams.get(key)
            if is_unfetched:
                stream = stream or self._open(key)
                stream.unfetched += 1
                self._note_bytes()
            held = None if stream is None else stream.in_flight
            if stream is None or held is None or held.task is not task:
                return  # sent by somebody who did not take it from here
            self._end(stream, held)
            cost_s = FLAT_S
            if has_put or seconds >= helpers.SLOW_S:
                before_s, stream.last_put_s = stream.last_put_s, seconds
                stream.is_quick = min(seconds, seconds if before_s is None else before_s) < helpers.SLOW_S
                stream.is_slow = (before_s is not None and not stream.is_quick) or seconds >= CLEARLY_SLOW_S
                if before_s is not None and not stream.is_quick:
                    cost_s = min(seconds, before_s)
            stream.virtual_s += cost_s
            if stream.waiting:
                self._offer(stream, stream.waiting[0].number)

    def _end(self, stream: Stream, held: Held) -> None:
        """Take a task off the books; under the lock."""
        if held.weight:
            self.storage.remove(held.weight)
        held.task = None  # its payload lives no longer than it must
        held.is_waiting = False
        stream.in_flight = None
        stream.tasks = tasks = stream.tasks - 1
        self._tasks -= 1
        if tasks < self.near_at:
            self.near.pop(stream.key, None)
        for lane in self.lane_of.values():
            if lane.sending is held:
                lane.sending = None

    def gone(self, key: str, count: int, *, fetched: bool) -> None:
        """So many of a stream's chunks are in shared memory no longer, or are not waited for any more."""
        with self.lock:
            stream = self._streams.get(key)
            if stream is None:
                return
            stream.unfetched -= count
            if fetched:
                stream.fetches += count
            else:  # of a request that is over; the next one of this name has a receiver of its own
                stream.given_up_at = None

    def came_unfetched(self, key: str) -> None:
        """A chunk of a stream that was put before anybody counted here."""
        with self.lock:
            (self._streams.get(key) or self._open(key)).unfetched += 1

    # ---- To and from a plain queue; all under the lock ----

    def adopt(self, task: dict[str, Any], lane: Lane) -> None:
        """Take over a task that a lane is sending already; before anything is sorted in."""
        stream = self._streams.get(stream_of(task)) or self._open(stream_of(task))
        held = Held(task, stream, self._numbers, time.monotonic(), is_waiting=False)
        self._numbers += 1
        stream.in_flight = lane.sending = held
        stream.tasks += 1
        self._tasks += 1

    def trust_all(self) -> None:
        """Streams that have made no put here are quick until one says otherwise, but those that are being sent."""
        for stream in self._streams.values():
            if stream.last_put_s is None and stream.in_flight is None:
                stream.is_quick = True

    def deepest(self) -> int:
        """Tasks of the stream that has the most."""
        return max((each.tasks for each in self._streams.values()), default=0)

    def reserve_any(self, lane: Lane) -> None:
        """A task for a lane that was told that there is one, whosever turn it is."""
        self._reserve(lane, time.monotonic(), takes_all=True)
        if lane.reserved is None and self._ready_slow:
            self._ready += self._ready_slow
            heapq.heapify(self._ready)
            self._ready_slow = []
            self._reserve(lane, time.monotonic(), takes_all=True)

    def in_order(self) -> list[dict[str, Any]]:
        """Everything that is not being sent, in the order of its arrival; only the first lane may have it in hand."""
        found = self.all_waiting()
        if self.first_lane is not None and self.first_lane.reserved is not None:
            found.append(self.first_lane.reserved)
        found.sort(key=lambda held: held.number)
        return [held.task for held in found if held.task is not None]

    def close_books(self) -> None:
        """Forget all tasks: they are somebody else's."""
        if self.first_lane is not None:
            self.first_lane.reserved = self.first_lane.sending = None
        self.forget_what_waits()
        for stream in self._streams.values():
            stream.in_flight = None
            stream.tasks = 0
        self._tasks = self._queued = 0
        self.storage = Storage()
        self.near.clear()

    def forget_what_waits(self) -> None:
        """Keep no payload alive; who is about to copy one finds that it waits here no longer."""
        for stream in list(self._streams.values()):
            for held in stream.waiting:
                held.is_waiting = False
            stream.waiting.clear()
        self._ready.clear()
        self._ready_slow.clear()
        self._fresh.clear()
        self._aging.clear()

    def all_waiting(self) -> list[Held]:
        """Everything that waits and no lane has in hand, in the order of its arrival; asks nothing of the books."""
        in_hand = {id(lane.reserved) for lane in self.lane_of.values()}
        in_hand |= {id(lane.sending) for lane in self.lane_of.values()}
        found = [held for stream in list(self._streams.values()) for held in stream.waiting]
        found = [held for held in found if id(held) not in in_hand and held.task is not None]
        return sorted(found, key=lambda held: held.number)
