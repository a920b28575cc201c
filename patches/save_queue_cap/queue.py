"""What stands in the place of upstream's deque: that deque while all is calm, streams of their own when it is not.

Three modes, and `SaveQueue` is the same object in all of them, since ``save_loop`` asks it twice for each task:

- **Calm** (`PlainQueue`): one deque in the order of arrival and one lane, as upstream. Looked at once a step: whether
  the present send is slow, the age of the oldest task, and bytes. While all sends are quick a backlog is the
  processor's and everybody's alike: one deque in the order of arrival is fair, and sorting only makes the lane slower.
  So the age is a bound on memory, far above what holds a stream that is slow.
- **Managed** (`FairQueue`): from the first of these that is over. Calm again when nobody is slow, held or far behind,
  and it has been so for a while.
- **Stepped aside** (`Aside`): after an exception of ours, for ever: one deque in the order of arrival and one lane, and
  nothing that is queued is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_fastpath.ledger import logger

from .aside import Aside
from .calm import Calm, CalmBytes
from .fair import FairQueue
from .judge import Judge
from .plain import PlainQueue
from .receivers import Receivers
from .slow import Watch
from .tasks import Stream, stream_of
from .uncounted import UncountedChunks
from .unfetched import Book, Chunks


class SaveQueue:
    """The queue of one adapter.

    Args:
        fair: The managed queue; its lock and its inbox are this one's.
        counters: The patch's counters.
        calm: When plain order will do.
        book: Upstream's list of segments in shared memory; None where there is none.
        keep_all: Whether payloads are the runner's own memory, to be copied before each step.
        is_live: Whether more may be sent of a stream.
        receivers: Whose chunks somebody fetches.
        stepped_aside: Told in words why, once.
    """

    # Without them each look-up takes twice as long: CPython 3.11 does not specialise for a dict of shared keys.
    __slots__ = (
        "_aside", "_asked", "_bytes", "_counters", "_first", "_helpers_watch", "_inbox", "_keep_all", "_lock",
        "_stepped_aside", "_uncounted", "append", "fair", "is_aside", "is_calm", "judge", "plain", "receivers",
    )  # fmt: skip

    def __init__(
        self,
        fair: FairQueue,
        counters: dict[str, int],
        *,
        calm: Calm | None = None,
        book: Book | None = None,
        keep_all: bool = False,
        is_live: Callable[[str], bool] = lambda _stream: True,
        receivers: Receivers | None = None,
        stepped_aside: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.append: Callable[[dict[str, Any]], None] = fair.inbox.append  # no call of ours: it runs once a task
        self.fair = fair
        calm = calm or Calm()
        self.is_aside = False
        self.is_calm = calm.steps >= 1
        self.receivers = receivers or Receivers()
        self.plain = PlainQueue(fair.inbox, fair.lock, counters, calm.steps)
        self._asked = self.receivers.asked
        self._bytes = CalmBytes(calm, book, self.receivers.wanted)
        self.judge = Judge(calm, self._bytes, fair)
        self._aside = Aside(fair.inbox, fair)
        self._counters = counters
        self._keep_all = keep_all
        self._uncounted = UncountedChunks(fair, book, self.receivers, is_live)
        self._helpers_watch = Watch()  # of the first lane
        self._stepped_aside = stepped_aside
        self._lock = fair.lock
        self._inbox = fair.inbox
        fair.is_open = not self.is_calm
        self._first = -1  # the first lane's thread

    # ---- What others read ----

    @property
    def chunks(self) -> Chunks | None:
        """What shared memory holds of each stream; None where it cannot be known."""
        return self.fair.account.chunks

    @property
    def lanes(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return self.fair.lanes.threads

    @property
    def is_plain(self) -> bool:
        """Whether it is one deque with one lane."""
        return self.is_calm or self.is_aside

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream that has something on its way, and some that had. In a calm queue they are put together."""
        return self.fair.streams if not self.is_plain else self.plain.put_together().streams

    @property
    def tasks(self) -> int:
        """Queued and in flight."""
        if not self.is_plain:
            return self.fair.tasks
        with self._lock:
            return len(self._inbox) + (self.plain.in_hand is not None) + len(self._aside.sending)

    @property
    def nbytes(self) -> int:
        """Bytes queued and in flight (unique storage) and not fetched."""
        if not self.is_plain:
            return self.fair.nbytes
        return self.plain.put_together().nbytes + self._bytes.count_unfetched()

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return len(self._inbox) + (0 if self.is_plain else self.fair.waiting)

    # ---- The scheduler's thread ----

    def add_lane(self, thread: threading.Thread, helper: threading.Condition | None = None) -> None:
        """As `FairQueue.add_lane`."""
        self.fair.add_lane(thread, helper)
        first = self.fair.lanes.first
        if first is not None and first.thread is thread:
            self._first = thread.ident or -1

    def before_step(self) -> bool:
        """Once before each step: copy what must be, and see whether it is still calm, or again.

        Returns:
            Whether the queue is managed, so that streams may have to be held.
        """
        if self.is_aside:
            return False
        if self.is_calm:
            if self.judge.is_still_calm(self.plain):
                if self._keep_all and self._inbox:
                    self.plain.own_what_waits()
                return False
            self.manage()
        if self._keep_all:
            self.fair.own_what_waits()
        else:
            self.fair.sort_in()
        self.fair.helper.alert_if_first_is_stuck()
        return True

    def manage(self) -> None:
        """End the calm: every stream gets a queue of its own."""
        with self._lock:
            if not self.is_calm:
                return
            plain = self.plain
            self.is_calm = False
            in_hand = plain.in_hand  # after that: a lane that finds it calm still has said that it has none
            self._counters["managed"] += 1
            self._counters["tasks"] -= plain.note_come()  # sorting in counts those that wait
            self.judge.unrest_s = time.monotonic()
            self._uncounted.come()
            self.fair.take_over(in_hand)
            plain.in_hand = None
            self.fair.helper.first_since_s = plain.since_s

    def calm_down(self, *, is_holding: bool) -> None:
        """One plain queue again, if it has been quiet for long enough; once before each managed step."""
        now = time.monotonic()
        if self.is_plain or not self.judge.is_due(now) or self.judge.is_anybody_slow(now, is_holding=is_holding):
            return
        with self._lock:
            self.fair.sort_in_locked()
            deepest = self.fair.table.deepest()
            if self.judge.may_be_calm(now, deepest):
                self._be_calm(now, deepest)

    def _be_calm(self, now: float, deepest: int) -> None:
        """Under the lock. What waits stands in one place at least at any time, if in both for a moment."""
        fair = self.fair
        sending = fair.lanes.first.sending if fair.lanes.first is not None else None
        waiting = fair.table.waiting(fair.lanes.in_hand())
        tasks = [queued.task for queued in waiting if queued.task is not None]
        self.plain.begin(tasks, sending.task if sending is not None else None, now, deepest)
        fair.close()
        self._bytes.begin(fair.account.nbytes, len(self._inbox))
        self.is_calm = True

    # ---- The lanes ----

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread."""
        try:
            if self.is_calm and threading.get_ident() == self._first:
                self.plain.in_hand = None
                if self._inbox:
                    if self.is_calm:  # asked once more: from here on `manage` reserves a task for the lane
                        return True
                else:
                    self.plain.since_s = None
                    now = time.monotonic()
                    if now >= self._bytes.next_look_s:
                        self._look_at_bytes(now)
                    if self.is_calm:
                        return bool(self._inbox)
            return self._has_task()
        except Exception as error:
            self.step_aside(error)
            ident = threading.get_ident()
            return self._aside.has_task(ident, is_first=ident == self._first)

    def _has_task(self) -> bool:
        ident = threading.get_ident()
        is_first = ident == self._first
        if self.is_aside:
            return self._aside.has_task(ident, is_first=is_first)
        if self.is_calm:
            if ident not in self.fair.lanes.of:
                return bool(self._inbox)
            # A further lane has nothing to do, but to see that the first one is stuck.
            if is_first:  # calm again since it asked
                self.plain.in_hand = None  # it has sent that; from the next line on `manage` reserves a task for it
                if self.is_calm:
                    return bool(self._inbox)
            elif not self._helpers_watch.look(self.plain.since_s, time.monotonic()):
                self.fair.helper.is_alert = False
                return False
            self.manage()
        if is_first:
            self._end_plain_send()
        if self._uncounted.may_be and ident in self.fair.lanes.of:
            self._uncounted.count()
        return bool(self.fair)

    def _end_plain_send(self) -> None:
        """What the first lane had in hand when the calm ended, and has sent by now, for it asks for more."""
        first = self.fair.lanes.first
        queued = first.sending if first is not None else None  # once: another thread writes it
        task = queued.task if queued is not None else None
        if task is None:
            return
        since_s = self.plain.since_s
        self._uncounted.come()
        self.fair.sent(task, 0.0 if since_s is None else max(0.0, time.monotonic() - since_s), has_put=False)

    def popleft(self) -> dict[str, Any]:
        """The next task of the calling thread.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        ident = threading.get_ident()
        if self.is_calm and ident == self._first:
            now = time.monotonic()
            if now >= self._bytes.next_look_s:
                try:
                    self._look_at_bytes(now)
                except Exception as error:
                    self.step_aside(error)
            task = None
            plain = self.plain
            with self._lock:
                if self.is_calm:
                    task = self._inbox.popleft()
                    plain.in_hand = task
                    plain.taken += 1
                    plain.since_s = now
            if task is not None:
                request = task.get("request")
                if request is not None and request.external_req_id not in self._asked:
                    try:
                        self.receivers.ask(request)
                    except Exception as error:
                        self.step_aside(error)
                return task
        return self._pop_managed(ident)

    def _pop_managed(self, ident: int) -> dict[str, Any]:
        try:
            if not self.is_aside:
                self.manage()
                if ident == self._first:
                    self._end_plain_send()
                return self.fair.popleft()
        except Exception as error:
            if isinstance(error, IndexError) and not len(self):
                raise  # as a deque has it
            self.step_aside(error)
        return self._aside.popleft(ident)

    def sent(self, task: dict[str, Any], seconds: float, *, has_put: bool = True, is_unfetched: bool = False) -> None:
        """As `FairQueue.sent`."""
        if self.plain.in_hand is task:  # it began while all was calm
            self.plain.in_hand = None
            if is_unfetched:
                self.fair.table.came_unfetched(stream_of(task))
            return
        if self._aside.sending:
            self._aside.sending.pop(threading.get_ident(), None)
        if not self.is_aside:
            self.fair.sent(task, seconds, has_put=has_put, is_unfetched=is_unfetched)

    def _look_at_bytes(self, now: float) -> None:
        """What the first lane does between sends while all is calm, now and then."""
        with self._lock:
            self.plain.note_come()
            tasks = list(self._inbox)
        self._bytes.look(now, tasks)
        seen = self._bytes.seen_nbytes
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], seen)

    # ---- Stepping aside ----

    def step_aside(self, error: BaseException) -> None:
        """Be upstream's queue from here on: everything that waits stands in one deque, in the order of its arrival."""
        with self._lock:
            if self.is_aside:
                return
            self._aside.begin(self.plain, self._first, was_managed=not self.is_calm)
            self.is_aside = True
            self.is_calm = False
        logger.error("omni-fastpath: save_queue_cap failed and steps aside", exc_info=error)
        self._stepped_aside(f"{error!r}; chunks go out in the order of their arrival and nobody is held from here on")
