"""One save queue per stream behind the four operations that upstream's ``save_loop`` uses.

``save_loop`` asks ``bool(queue)``, then calls ``popleft()``: the first reserves a task for the calling lane, the second
hands it over, so that several lanes can run the unchanged loop and no two ever have tasks of one stream.

Each change of the books is ordered so that an exception anywhere leaves every task in one of three places: `inbox`, a
stream's ``waiting``, a lane's hands. `SaveQueue` finds them there when it steps aside.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from .account import Account
from .helper import Helper
from .lanes import Lane, Lanes
from .slow import SlowSends
from .streams import StreamTable
from .tasks import QueuedTask, Stream, stream_of
from .turns import Turns
from .unfetched import Chunks


class FairQueue:
    """The managed queue of one adapter: takes tasks in, hands them to lanes, and says what is on its way.

    Where there is a helper lane, streams whose last two puts were slow are left to it. It may be in one send for ever:
    the first lane then takes the others of them when it has nothing else to do.

    Args:
        counters: The patch's counters; written under the queue's lock.
        chunks: What shared memory still holds of each stream; None where it cannot be known.
        keep_all: Whether payloads are the runner's own memory, to be copied by `own_what_waits` before each step.
    """

    def __init__(self, counters: dict[str, int], *, chunks: Chunks | None = None, keep_all: bool = False) -> None:
        self.lock = threading.Lock()
        self.inbox: deque[dict[str, Any]] = deque()
        """What came since the last `sort_in`: appending needs no lock."""
        self.is_open = True
        """False while the inbox is one plain queue: a lane that waited for the lock takes nothing out of it."""
        self.helper = Helper()
        self.slow = SlowSends(self.helper)
        self.account = Account(self.lock, counters, chunks)
        self.table = StreamTable(self.lock)
        self.turns = Turns()
        self.lanes = Lanes()
        self.waiting = 0
        """Tasks that were sorted in and no lane has in hand."""
        self._counters = counters
        self._keep_all = keep_all

    # ---- What others read ----

    def add_lane(self, thread: threading.Thread, helper: threading.Condition | None = None) -> None:
        """Let a thread that runs reserve tasks; any other finds a plain queue.

        Args:
            thread: The lane. The first is upstream's own save thread.
            helper: What a further lane sleeps on.
        """
        self.lanes.add(thread)
        if helper is not None:
            self.helper.condition = helper

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream that has something on its way, and some that had."""
        self.sort_in()
        return self.table.found

    @property
    def tasks(self) -> int:
        """Queued and in flight."""
        self.sort_in()
        return self.table.tasks

    @property
    def nbytes(self) -> int:
        """Bytes queued and in flight (unique storage) and not fetched; all of it is weighed for this."""
        with self.lock:
            self.sort_in_locked()
            self.account.weigh()
        return self.account.nbytes

    def nbytes_near(self, limit: float) -> int:
        """The same for a limit: what came lately is weighed only where it may matter, or has not been for a while."""
        with self.lock:
            self.sort_in_locked()
            self.account.weigh_near(limit)
        return self.account.nbytes

    def look_at_lanes(self, now: float) -> None:
        """See which lanes are in slow sends; the scheduler's thread does, once a step and more often at will."""
        self.slow.look(now, self.lanes, self.table.found)

    # ---- The producer: the scheduler's thread ----

    def append(self, task: dict[str, Any]) -> None:
        """Queue a task behind its stream's others, without the queue's lock."""
        self.inbox.append(task)
        self.helper.alert_if_first_is_stuck()

    def sort_in(self) -> None:
        """Count what was queued since the last time."""
        if self.inbox:
            with self.lock:
                self.sort_in_locked()
            self._alert_for_slow()

    def sort_in_locked(self) -> None:
        """Put what came since into its streams' queues; under the lock. It runs once a task: every line counts."""
        inbox, table, counters = self.inbox, self.table, self._counters
        if not inbox or not self.is_open:
            return
        streams, near_at, fresh = table.found, table.near_at, self.account.fresh
        has_helper = self.helper.condition is not None
        now = time.monotonic()
        came = 0
        most = counters["max_stream_tasks"]
        while inbox:
            task = inbox[0]  # taken when it stands in its stream's queue: nothing that fails in between loses it
            key = stream_of(task)
            stream = streams.get(key) or table.open(key)
            queued = QueuedTask(task, stream, table.numbers, now)
            table.numbers += 1
            if not stream.waiting and stream.in_flight is None:
                self.turns.come(stream)
                self.turns.offer(stream, queued.number, has_helper=has_helper)
            stream.waiting.append(queued)
            inbox.popleft()
            fresh.append(queued)
            stream.tasks = tasks = stream.tasks + 1
            table.tasks += 1
            self.waiting += 1
            came += 1
            most = max(most, tasks)
            if tasks >= near_at:
                table.near[key] = stream
        counters["tasks"] += came
        counters["max_stream_tasks"] = most
        counters["max_queued_tasks"] = max(counters["max_queued_tasks"], table.tasks)
        self.account.trim(self.waiting)

    def _alert_for_slow(self) -> None:
        """Wake the helper where something waits that only it takes. Not under the lock."""
        if self.turns.ready_slow:
            self.helper.alert()

    def own_what_waits(self) -> None:
        """Before the runner's next step, where payloads are its own memory: copy what waits and came since the last.

        Most was sent by then and need not be copied. What a lane has taken is upstream's to read, as it always was.
        """
        with self.lock:  # always: a lane may be about to sort in what it took from the inbox
            self.sort_in_locked()
            if not self._keep_all:
                return
            waiting = self.account.take_all_that_waits()
        self.account.replace([(queued, None) for queued in waiting])

    # ---- The lanes ----

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return self.waiting + len(self.inbox)

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread; in a lane, reserve it."""
        lane = self.lanes.of.get(threading.get_ident())
        if lane is None:
            return bool(self.waiting or self.inbox) and self._is_something_ready()
        if lane.reserved is not None:
            return True
        now = time.monotonic()
        is_first = lane is self.lanes.first
        takes_all = is_first or self.helper.may_take_all()
        self.account.look_between_sends(now)
        if not takes_all and not self.turns.ready_slow and not self.inbox:
            return False
        with self.lock:
            self.sort_in_locked()
            self.reserve(lane, now, takes_all=takes_all)
        if is_first:
            self._begin(lane.reserved, now)
        return lane.reserved is not None

    def reserve(self, lane: Lane, now: float, *, takes_all: bool) -> None:
        """The next task into the lane's hands, if there is one for it; under the lock."""
        # The end of the calm may have kept one for a lane that saw none and then waited for the lock: one put in its
        # place would leave that stream in flight for ever.
        if not self.is_open or lane.reserved is not None:
            return
        turns = self.turns
        if lane is not self.lanes.first:
            heap = turns.next_of_helper(takes_all=takes_all)
        else:
            heap = turns.ready
            if not heap and turns.ready_slow and (self.helper.condition is None or self.helper.is_hung(now)):
                heap = turns.ready_slow
        if not heap:
            return
        stream = heap[0][2]
        queued = stream.waiting[0]
        stream.in_flight = lane.reserved = queued
        queued.is_waiting = False
        stream.waiting.popleft()
        turns.taken(heap)
        self.waiting -= 1

    def _begin(self, queued: QueuedTask | None, now: float) -> None:
        """The first lane goes into a send, or to sleep."""
        if queued is None:
            self.helper.first_since_s = None
        elif self.helper.first_begins(now, is_quick=queued.stream.is_quick) and self.turns.ready:
            self.helper.alert()
        self._alert_for_slow()

    def _is_something_ready(self) -> bool:
        """Whether ``popleft()`` would give something: not what stands behind a task in flight."""
        with self.lock:
            self.sort_in_locked()
            return bool(self.turns.ready or self.turns.ready_slow)

    def popleft(self) -> dict[str, Any]:
        """The reserved task; outside the lanes, the next one.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        lane = self.lanes.of.get(threading.get_ident())
        outside = lane is None
        if lane is None:
            lane = Lane(threading.current_thread())
        if lane.reserved is None:
            with self.lock:
                self.sort_in_locked()
                self.reserve(lane, time.monotonic(), takes_all=True)
        queued = lane.reserved
        if queued is None or queued.task is None:
            raise IndexError("no save task is waiting")
        if not outside:
            lane.sending = queued
            self.helper.took(is_first=lane is self.lanes.first)
        lane.reserved = None
        return queued.task

    def sent(
        self, task: Mapping[str, Any], seconds: float, *, has_put: bool = True, is_unfetched: bool = False
    ) -> None:
        """A send ended, well or not: its stream's next task may be taken.

        Args:
            task: As ``popleft`` gave it.
            seconds: What it took.
            has_put: Whether the connector was given something; the talker's frames go in chunks of many tasks.
            is_unfetched: Whether that is a chunk that counts until `StreamTable.gone` says otherwise.
        """
        lane = self.lanes.of.get(threading.get_ident())
        if lane is not None and lane is not self.lanes.first:
            self.helper.own_since_s = None
        with self.lock:
            key = stream_of(task)
            stream = self.table.found.get(key)
            if is_unfetched:
                stream = stream or self.table.open(key)
                stream.unfetched += 1
                self.account.note_most()
            queued = None if stream is None else stream.in_flight
            if stream is None or queued is None or queued.task is not task:
                return  # sent by somebody who did not take it from here
            if queued.weight:
                self.account.storage.remove(queued.weight)
            self.table.end(stream, queued)
            if lane is not None and lane.sending is queued:
                lane.sending = None
            else:
                self.lanes.end(queued)
            self.turns.charge(stream, seconds, has_put=has_put)
            if stream.waiting:
                self.turns.offer(stream, stream.waiting[0].number, has_helper=self.helper.condition is not None)

    # ---- To and from a plain queue; under the lock ----

    def take_over(self, in_hand: dict[str, Any] | None) -> None:
        """Manage what stands in the inbox, and what the first lane is sending already."""
        first = self.lanes.first
        self.is_open = True
        if in_hand is not None and first is not None:
            first.sending = self.table.adopt(in_hand)
        self.sort_in_locked()
        self.table.trust_all()  # nobody was slow so far but who is being sent
        if in_hand is None and first is not None and first.thread.is_alive():
            # The first lane may have been told that there is something, and is about to take it: whosever turn it is.
            self.reserve(first, time.monotonic(), takes_all=True)
            if first.reserved is None and self.turns.ready_slow:
                self.turns.leave_none_to_helper()
                self.reserve(first, time.monotonic(), takes_all=True)

    def forget_what_waits(self) -> None:
        """What waits is somebody else's; a lane keeps what it has in hand."""
        self.table.forget_what_waits()
        self.turns.forget()
        self.account.forget()

    def close(self) -> None:
        """Forget all tasks: they are somebody else's."""
        self.is_open = False
        if self.lanes.first is not None:
            self.lanes.first.reserved = self.lanes.first.sending = None
        self.forget_what_waits()
        self.table.forget_tasks()
        self.waiting = 0
        self.account.close()
