"""What stands in the place of upstream's deque: that deque while all is calm, streams of their own when it is not.

Three modes, and `SaveQueue` is the same object in all of them, since ``save_loop`` asks it twice for each task:

- **Calm**: one deque in the order of arrival and one lane, as upstream. A stream adds at most one task in a step that
  appends (a forced terminal and a clean-up besides), so that the age of the oldest unsent task, in such steps, bounds
  what any stream has queued. Looked at once a step: whether the present send is slow, that age, and bytes. While all
  sends are quick a backlog is the processor's and everybody's alike: one deque in the order of arrival is fair, and
  sorting only makes the lane slower. So the age is a bound on memory, far above what holds a stream that is slow.
- **Managed**: `FairQueue`, from the first of these that is over. Calm again when nobody is slow, held or far behind,
  and it has been so for a while.
- **Stepped aside**: after an exception of ours, for ever: one deque in the order of arrival and one lane, and nothing
  that is queued is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_fastpath.ledger import logger
from omni_fastpath.patches.save_queue_cap import helper as helpers
from omni_fastpath.patches.save_queue_cap.fair import FairQueue, Lane, Stream, stream_of
from omni_fastpath.patches.save_queue_cap.payload import keep, weigh
from omni_fastpath.patches.save_queue_cap.storage import Storage
from omni_fastpath.patches.save_queue_cap.unfetched import LOOK_S, NEAR_LOOK_S, Book, size_of

FIFO_FOR_BENCHMARKS = False
"""Serve in the order of arrival instead: what credits do without fairness. Only benchmarks set it."""

STEPS_UNLIMITED = 1000
"""Age at which the calm ends where ``per_stream_tasks`` is null."""

QUIET_S = 0.5
"""Without unrest for so long, a managed queue is calm again."""

AGAIN = 2 / 3
"""Share of the bytes that end the calm below which it may begin again: sorting thousands of tasks in takes a step."""

_CALM_LOOK_S = 0.25
_SAMPLE = 32
_JUDGE_S = 0.05
_MOST_DEAF = 4096

__all__ = ["FIFO_FOR_BENCHMARKS", "Calm", "SaveQueue", "stream_of"]


@dataclass(frozen=True)
class Calm:
    """Until when a queue is calm.

    Attributes:
        steps: Age of the oldest unsent task, in steps that appended. Below 1 the queue is managed always.
        tasks: Queued tasks of all streams.
        nbytes: Bytes queued and not fetched.
        most_nbytes: Bytes that may not be reached, whatever has been fetched of them since somebody looked.
        quiet_s: How long without unrest a managed queue must be.
    """

    steps: int = STEPS_UNLIMITED
    tasks: float = float("inf")
    nbytes: float = float("inf")
    most_nbytes: float = float("inf")
    quiet_s: float = QUIET_S


class SaveQueue:
    """The queue of one adapter.

    Args:
        fair: The managed queue; its lock and its inbox are this one's.
        counters: The patch's counters.
        calm: When plain order will do.
        book: Upstream's list of segments in shared memory; None where there is none.
        keep_all: Whether payloads are the runner's own memory, to be copied before each step.
        is_live: Whether more may be sent of a stream.
        is_deaf: Whether nobody will fetch a request's chunks.
        stepped_aside: Told in words why, once.
    """

    def __init__(
        self,
        fair: FairQueue,
        counters: dict[str, int],
        *,
        calm: Calm | None = None,
        book: Book | None = None,
        keep_all: bool = False,
        is_live: Callable[[str], bool] = lambda _stream: True,
        is_deaf: Callable[[Any], bool] = lambda _request: False,
        stepped_aside: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.fair = fair
        self.calm = calm or Calm()
        self.is_aside = False
        self.is_calm = self.calm.steps >= 1
        self.heard: set[str] = set()
        """Streams of which it was seen whether somebody fetches their chunks."""
        self.deaf: dict[str, None] = {}
        """Streams that end at this stage: nobody fetches their chunks."""
        self._counters = counters
        self._book = book
        self._keep_all = keep_all
        self._is_live = is_live
        self._is_deaf = is_deaf
        self._watch = helpers.Watch()  # the helper's own, of the first lane
        self._stepped_aside = stepped_aside
        self._lock = fair.lock
        self._inbox: deque[dict[str, Any]] = fair.inbox
        vars(self)["append"] = self._inbox.append  # no call of ours stands between: it runs once a task
        fair.is_open = not self.is_calm
        self._first = -1  # the first lane's thread
        # Calm: counted from when it began.
        self._in_hand: dict[str, Any] | None = None  # the first lane's task
        self._since_s: float | None = None  # when it was taken
        self._taken = 0
        self._come = 0
        self._noted = 0  # of those that came, in the counter
        self._marks: deque[int] = deque([0] * max(1, self.calm.steps), maxlen=max(1, self.calm.steps))
        self._fresh_from = 0  # what had come by the last step
        self._seen_nbytes = 0  # queued and unfetched, by the last look
        self._seen_tasks = 0  # queued then
        self._task_nbytes = 0.0  # of each of them
        self._seen_unfetched = 0  # bytes, by the last count
        self._seen_at = 0  # bytes put by then
        self._next_look_s = 0.0
        self._next_count_s = 0.0
        # Managed
        self._unrest_s = 0.0
        self._next_judging_s = 0.0
        self._has_unknown_chunks = False
        # Stepped aside: what each lane has in hand, by thread.
        self._sending: dict[int, Any] = {}

    # ---- What others read ----

    @property
    def chunks(self) -> Any:
        """What shared memory holds of each stream; None where it cannot be known."""
        return self.fair.chunks

    @property
    def lanes(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return self.fair.lanes

    @property
    def is_plain(self) -> bool:
        """Whether it is one deque with one lane."""
        return self.is_calm or self.is_aside

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Every stream that has something on its way, and some that had. In a calm queue they are put together."""
        if not self.is_plain:
            return self.fair.streams
        other = FairQueue(dict.fromkeys(self._counters, 0))
        with self._lock:
            other.inbox.extend(self._inbox)
            in_hand = self._in_hand
        if in_hand is not None:
            other.adopt(in_hand, _NOBODY)
        return other.streams

    @property
    def tasks(self) -> int:
        """Queued and in flight."""
        if not self.is_plain:
            return self.fair.tasks
        with self._lock:
            return len(self._inbox) + (self._in_hand is not None) + len(self._sending)

    @property
    def nbytes(self) -> int:
        """Bytes queued and in flight (unique storage) and not fetched."""
        if not self.is_plain:
            return self.fair.nbytes
        with self._lock:
            tasks = [*self._inbox, *([self._in_hand] if self._in_hand is not None else [])]
        return self._weigh(tasks) + sum(map(size_of, self._unfetched()))

    def __len__(self) -> int:
        """Tasks that nobody has taken."""
        return len(self._inbox) + (0 if self.is_plain else self.fair._queued)

    # ---- The scheduler's thread ----

    def append(self, task: dict[str, Any]) -> None:
        """Queue a task. An instance has the deque's own ``append`` in its place."""
        self._inbox.append(task)

    def add_lane(self, thread: threading.Thread, helper: threading.Condition | None = None) -> None:
        """As `FairQueue.add_lane`."""
        self.fair.add_lane(thread, helper)
        if self.fair.first_lane is not None and self.fair.first_lane.thread is thread:
            self._first = thread.ident or -1

    def before_step(self) -> bool:
        """Once before each step: copy what must be, and see whether it is still calm, or again.

        Returns:
            Whether the queue is managed, so that streams may have to be held.
        """
        if self.is_aside:
            return False
        if self.is_calm:
            if self._is_still_calm():
                if self._keep_all and self._inbox:
                    self._own_what_waits()
                return False
            self.manage()
        if self._keep_all:
            self.fair.own_what_waits()
        else:
            self.fair.sort_in()
        self.fair.help_if_stuck()
        return True

    def _is_still_calm(self) -> bool:
        while True:
            taken = self._taken
            queued = len(self._inbox)
            if taken == self._taken:
                break
        come = taken + queued
        if come != self._come:  # a step that appended
            self._come = come
            self._marks.append(come)
            self._counters["max_queued_tasks"] = max(self._counters["max_queued_tasks"], queued)
        if taken - (self._in_hand is not None) < self._marks[0] or queued >= self.calm.tasks:
            return False
        since_s = self._since_s
        if since_s is not None and self.fair.look_at_first(since_s, time.monotonic()):
            return False
        return self._is_light(queued)

    def _is_light(self, queued: int) -> bool:
        """Whether bytes are below what ends the calm: those of the last look, and what may have come since."""
        nbytes = self.calm.nbytes
        if self._seen_nbytes >= nbytes:
            return False
        most = self._seen_nbytes + max(0, queued - self._seen_tasks) * self._task_nbytes
        if self._book is not None:
            most += self._book.transferred - self._seen_at
        if most >= nbytes:
            if most >= self.calm.most_nbytes:
                return False
            self._next_look_s = self._next_count_s = 0.0  # the lane looks at once what of it is there
        return True

    def manage(self) -> None:
        """End the calm: every stream gets a queue of its own."""
        with self._lock:
            if not self.is_calm:
                return
            fair = self.fair
            first = fair.first_lane
            self.is_calm = False
            fair.is_open = True
            in_hand = self._in_hand  # after that: a lane that finds it calm still has said that it has none
            self._counters["managed"] += 1
            self._counters["tasks"] -= self._note_come()  # sorting in counts those that wait
            self._unrest_s = time.monotonic()
            self._has_unknown_chunks = self._book is not None
            if in_hand is not None and first is not None:
                fair.adopt(in_hand, first)
                self._in_hand = None
            fair._sort_in()
            fair.trust_all()  # nobody was slow so far but who is being sent
            if first is not None and in_hand is None and first.thread.is_alive():
                # The first lane may have been told that there is something, and is about to take it.
                fair.reserve_any(first)
            fair.helper.first_since_s = self._since_s

    def calm_down(self, *, is_holding: bool) -> None:
        """One plain queue again, if it has been quiet for long enough; once before each managed step."""
        if self.calm.steps < 1 or self.is_plain:
            return
        now = time.monotonic()
        if now < self._next_judging_s:
            return
        self._next_judging_s = now + min(_JUDGE_S, self.calm.quiet_s)
        fair = self.fair
        fair.look_at_lanes(now)
        if is_holding or fair.is_anybody_slow:
            self._unrest_s = now
            return
        with self._lock:
            fair._sort_in()
            deepest = fair.deepest()
            if self._is_heavy() or deepest >= self.calm.steps or fair._queued >= self.calm.tasks:
                self._unrest_s = now
            elif now - self._unrest_s >= self.calm.quiet_s and not self._is_a_lane_busy():
                self._be_calm(now, deepest)

    def _is_heavy(self) -> bool:
        return self.fair._all_bytes() >= AGAIN * self.calm.nbytes

    def _is_a_lane_busy(self) -> bool:
        """Whether a lane has been told of a task and has not got it yet, or another than the first is in a send."""
        first = self.fair.first_lane
        return any(
            lane.reserved is not None or (lane.sending is not None and lane is not first)
            for lane in self.fair.lane_of.values()
        )

    def _be_calm(self, now: float, deepest: int) -> None:
        """Under the lock. What waits stands in one place at least at any time, if in both for a moment."""
        fair = self.fair
        first = fair.first_lane
        tasks = fair.in_order()
        self._in_hand = first.sending.task if first is not None and first.sending is not None else None
        self._since_s = now if self._in_hand is not None else None
        self._inbox.extendleft(reversed(tasks))
        fair.is_open = False
        fair.close_books()
        self._taken = int(self._in_hand is not None)
        self._come = self._fresh_from = self._noted = self._taken + len(self._inbox)
        self._marks.extend([0] * self.calm.steps)
        self._marks.extend([self._come] * max(1, deepest))  # as old as the stream with the most may be
        self._seen_nbytes = self._seen_unfetched = fair._all_bytes()
        self._seen_tasks = len(self._inbox)
        self._seen_at = self._book.transferred if self._book is not None else 0
        self._next_look_s = self._next_count_s = 0.0
        self.is_calm = True

    def _note_come(self) -> int:
        """Count what came while all was calm, under the lock; how many of them wait."""
        waiting = len(self._inbox)
        come = self._taken + waiting
        self._counters["tasks"] += come - self._noted
        self._noted = come
        return waiting

    def _own_what_waits(self) -> None:
        """Where payloads are the runner's own memory: copy those that came since the last step."""
        with self._lock:
            tasks = list(self._inbox)  # at once: a lane may append a clean-up
            come = self._taken + len(tasks)
            count = min(come - self._fresh_from, len(tasks))
            self._fresh_from = come
            for task in tasks[len(tasks) - count :]:
                payload, copies = keep(task.get("multimodal_output"))
                if copies:
                    task["multimodal_output"] = payload
                    self._counters["copied_tensors"] += copies

    # ---- The lanes ----

    def __bool__(self) -> bool:
        """Whether there is a task for the calling thread."""
        try:
            if self.is_calm and threading.get_ident() == self._first:
                self._in_hand = None
                if self._inbox:
                    if self.is_calm:  # asked once more: from here on `manage` reserves a task for the lane
                        return True
                else:
                    self._since_s = None
                    self._look(time.monotonic())
                    if self.is_calm:
                        return bool(self._inbox)
            return self._ask()
        except Exception as error:
            self.step_aside(error)
            return self._ask_aside(threading.get_ident())

    def _ask(self) -> bool:
        ident = threading.get_ident()
        if self.is_aside:
            return self._ask_aside(ident)
        if self.is_calm:
            if ident not in self.fair.lane_of:
                return bool(self._inbox)
            # A further lane has nothing to do, but to see that the first one is stuck.
            if ident == self._first:  # calm again since it asked
                self._in_hand = None  # it has sent that; from the next line on `manage` reserves a task for it
                if self.is_calm:
                    return bool(self._inbox)
            elif not self._watch.look(self._since_s, time.monotonic()):
                self.fair.helper.is_alert = False
                return False
            self.manage()
        self._end_plain_send(ident)
        if self._has_unknown_chunks and ident in self.fair.lane_of:
            self._make_chunks_known()
        return bool(self.fair)

    def _end_plain_send(self, ident: int) -> None:
        """What the first lane had in hand when the calm ended, and has sent by now, for it asks for more."""
        first = self.fair.first_lane
        held = first.sending if first is not None and ident == self._first else None  # once: another thread writes it
        task = held.task if held is not None else None
        if task is None:
            return
        since_s = self._since_s
        self.has_chunks_unknown()
        self.fair.sent(task, 0.0 if since_s is None else max(0.0, time.monotonic() - since_s), has_put=False)

    def popleft(self) -> dict[str, Any]:
        """The next task of the calling thread.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        ident = threading.get_ident()
        if self.is_calm and ident == self._first:
            now = time.monotonic()
            if now >= self._next_look_s:
                try:
                    self._look(now)
                except Exception as error:
                    self.step_aside(error)
            task = None
            with self._lock:
                if self.is_calm:
                    task = self._inbox.popleft()
                    self._in_hand = task
                    self._taken += 1
                    self._since_s = now
            if task is not None:
                request = task.get("request")
                if request is not None and request.external_req_id not in self.heard:
                    try:
                        self._hear(request)
                    except Exception as error:
                        self.step_aside(error)
                return task
        return self._pop_managed(ident)

    def _pop_managed(self, ident: int) -> dict[str, Any]:
        try:
            if not self.is_aside:
                self.manage()
                self._end_plain_send(ident)
                return self.fair.popleft()
        except Exception as error:
            if isinstance(error, IndexError) and not len(self):
                raise  # as a deque has it
            self.step_aside(error)
        return self._pop_aside(ident)

    def calm_sent(self, task: dict[str, Any]) -> bool:
        """The end of a send that began while all was calm; False where it is not any more, and `sent` is to be told.

        Without the lock: should the calm end between the two lines, the lane is found to send no more when it asks.
        """
        if self._in_hand is task:
            self._in_hand = None
            return True
        return False

    def sent(self, task: dict[str, Any], seconds: float, *, has_put: bool = True, is_unfetched: bool = False) -> None:
        """As `FairQueue.sent`."""
        if self._in_hand is task and self.calm_sent(task):
            if is_unfetched:
                self.fair.came_unfetched(stream_of(task))
            return
        if self._sending:
            self._sending.pop(threading.get_ident(), None)
        if self.is_aside:
            return
        self.fair.sent(task, seconds, has_put=has_put, is_unfetched=is_unfetched)

    def _look(self, now: float) -> None:
        """What the first lane does between sends while all is calm: count bytes now and then, and what it sent."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + _CALM_LOOK_S
        with self._lock:
            self._note_come()
            tasks = list(self._inbox)
        queued = self._estimate(tasks)
        if self._book is not None and now >= self._next_count_s:
            at = self._book.transferred
            self._seen_unfetched = sum(map(size_of, self._unfetched()))
            self._seen_at = at
            near = queued + self._seen_unfetched >= self.calm.nbytes / 2
            self._next_count_s = now + (NEAR_LOOK_S if near else LOOK_S)
        self._seen_nbytes = queued + self._seen_unfetched
        self._seen_tasks = len(tasks)
        self._task_nbytes = queued / len(tasks) if tasks else 0.0
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], self._seen_nbytes)

    def _estimate(self, tasks: list[dict[str, Any]]) -> int:
        """Bytes that these keep alive, by a sample: one task of a step says what its whole batch is."""
        sample = tasks[:: max(1, len(tasks) // _SAMPLE)]
        shared = own = views = 0
        seen = set()
        for task in sample:
            try:
                weight = weigh(task.get("multimodal_output"))
            except Exception:  # noqa: S112 - a kind of tensor that cannot be looked at: it is sent all the same
                continue
            for address, (nbytes, viewed) in weight.items():
                views += viewed if viewed < nbytes else 0
                if address not in seen:
                    seen.add(address)
                    if viewed < nbytes:
                        shared += nbytes
                    else:
                        own += nbytes
        # Steps that no sampled task is of: at least what their tasks see of their batches.
        shared = max(shared, views * len(tasks) // max(1, len(sample)))
        return shared + own * len(tasks) // max(1, len(sample))

    def _weigh(self, tasks: list[dict[str, Any]]) -> int:
        storage = Storage()
        for task in tasks:
            storage.add(weigh(task.get("multimodal_output")))
        return storage.nbytes

    def _unfetched(self) -> list[str]:
        """Segments that may be there and for which somebody may come."""
        if self._book is None:
            return []
        return [name for name in self._book.names() if name.rsplit("_", 2)[0] not in self.deaf]

    def _make_chunks_known(self) -> None:
        """Count by stream what was put while all was calm."""
        self._has_unknown_chunks = False
        chunks = self.fair.chunks
        if chunks is None:
            return
        chunks.look_now()
        chunks.end_those_without(self._is_live)
        found = [(*name.rsplit("_", 2), name) for name in self._unfetched()]
        for stream, _, _, name in sorted(found, key=lambda each: (each[0], int(each[2]))):
            if chunks.knows(stream, name):
                continue
            size = size_of(name)
            if size and chunks.put(stream, name, size):
                self.fair.came_unfetched(stream)
                if not self._is_live(stream):
                    chunks.ended(stream)

    def _hear(self, request: Any) -> None:
        """A task is the first of its stream, or of one that was forgotten."""
        if len(self.heard) > _MOST_DEAF:
            self.heard.clear()
        self.heard.add(request.external_req_id)
        if self._is_deaf(request):
            self.note_deaf(request.external_req_id)

    def note_deaf(self, stream: str) -> None:
        """Nobody will fetch this stream's chunks."""
        self.deaf[stream] = None
        while len(self.deaf) > _MOST_DEAF:
            self.deaf.pop(next(iter(self.deaf)), None)

    def has_chunks_unknown(self) -> None:
        """A send that began while all was calm has ended since: its chunk is not counted yet."""
        self._has_unknown_chunks = self._book is not None

    # ---- Stepping aside ----

    def step_aside(self, error: BaseException) -> None:
        """Be upstream's queue from here on: everything that waits stands in one deque, in the order of its arrival."""
        with self._lock:
            if self.is_aside:
                return
            fair, inbox = self.fair, self._inbox
            if not self.is_calm:
                # What was being sorted in or given back stands in both. A copy made at once: others append.
                there = {id(task) for task in tuple(inbox)}
                waiting = [held.task for held in fair.all_waiting() if id(held.task) not in there]
                for ident, lane in fair.lane_of.items():
                    if lane.reserved is not None and id(lane.reserved.task) in there:
                        lane.reserved = None
                    if lane.reserved is not None or lane.sending is not None:
                        self._sending[ident] = lane.reserved or lane.sending
                inbox.extendleft([task for task in reversed(waiting) if task is not None])
                fair.forget_what_waits()
            if self._in_hand is not None:
                self._sending[self._first] = self._in_hand
            self._in_hand = None
            fair.is_open = False
            self.is_aside = True
            self.is_calm = False
        logger.error("omni-fastpath: save_queue_cap failed and steps aside", exc_info=error)
        self._stepped_aside(f"{error!r}; chunks go out in the order of their arrival and nobody is held from here on")

    def _ask_aside(self, ident: int) -> bool:
        lane = self.fair.lane_of.get(ident)
        if lane is None:
            return bool(self._inbox)
        if lane.reserved is not None:
            return True
        self._sending.pop(ident, None)  # a lane that asks has sent what it had
        lane.sending = None
        # One at a time, as upstream: a send of another lane may be of the stream that comes next.
        return ident == self._first and not self._sending and bool(self._inbox)

    def _pop_aside(self, ident: int) -> dict[str, Any]:
        lane = self.fair.lane_of.get(ident)
        if lane is not None and lane.reserved is not None:
            held, lane.reserved = lane.reserved, None
            if held.task is not None:
                return held.task
        task = self._inbox.popleft()
        if lane is not None:
            self._sending[ident] = task  # until it asks for more
        return task


_NOBODY = Lane(threading.current_thread())
