"""The queue that replaces upstream's deque of save tasks.

Upstream's ``save_loop`` asks ``bool(queue)``, calls ``popleft()``, sends, and asks again, so that its question means
that the send is over. Two threads change the queue. The scheduler's thread appends tasks to `_inbox`, which needs no
lock, and once before each step it sorts them in and weighs the payloads that wait (`before_step`). The save thread,
which alone takes tasks, sorts in too. ``_lock`` protects `_fair` and is not held during any call of upstream.

The payloads of a step are parts of the same memory, which is kept while one of them waits. In order of arrival they are
sent together. Those of a stream that is behind wait longer, so they are copied. The payloads of a step are also copied
if they are less than half of its memory, which a prompt of a request for text alone may fill. So what waits keeps about
twice its size at most, and the memory of one step.

A task is in `_inbox`, in a deque of `_fair` or taken by the save thread, for a moment in two of them and never in none.
So an exception of the patch, at any line, loses nothing and sends nothing twice (`step_aside`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from omni_fastpath.ledger import state_of

from .fair_queue import SLOW_S, FairQueue, QueuedTask
from .holds import Holds
from .payload import own, weigh
from .unfetched import Unfetched

_patch = state_of("save_queue_cap")
_counters = _patch.counters

PAYLOAD = "multimodal_output"
"""The key of a save task under which its payload is. A clean-up task has none."""

CHECK_S = 0.1
"""Between two checks of what was fetched and which streams have ended, if no task waits. Upstream's idle save thread
wakes as often."""

BUSY_CHECK_S = 1.0
"""The same while tasks wait, because the save thread releases the interpreter lock in each system call of a check and
then waits for it."""


def stream_of(task: Mapping[str, Any]) -> str:
    """The external request id of a save task. A clean-up task has it in its key prefix.

    Raises:
        KeyError: The task has an unknown shape.
    """
    request = task.get("request")
    if request is not None:
        return str(request.external_req_id)
    # 0.32 releases all segments of a prefix, which earlier releases counted.
    prefix: str = task["cleanup_shm"][0] if "cleanup_shm" in task else task["release_shm"].removesuffix("_")
    return prefix.rsplit("_", 1)[0]


def has_receiver(request: Any, stage_id: int) -> bool:
    """Whether the next stage takes part in this request. Chunks of a request for text alone are never fetched."""
    info = getattr(request, "additional_information", None)
    if info is None:
        return True
    if not isinstance(info, Mapping):  # a packed payload
        entry = info.entries.get("omni_final_stage_id")
        final = None if entry is None else entry.scalar_data
    else:
        final = info.get("omni_final_stage_id")
    return final is None or int(final) > stage_id


class SaveQueue:
    """The queue of one adapter.

    Args:
        adapter: Upstream's adapter, in which nothing is queued yet.
        holds: The holds of its stage, or None if no stream is held.
        unfetched: Chunks in shared memory, or None if they are not counted.
        copies_all: Whether payloads are the runner's own memory. Then each one that waits is copied.
    """

    def __init__(self, adapter: Any, *, holds: Holds | None, unfetched: Unfetched | None, copies_all: bool) -> None:
        self._inbox: deque[dict[str, Any]] = deque()
        self.append: Callable[[dict[str, Any]], None] = self._inbox.append  # not a method, which would cost more
        self.is_aside, self.holds = False, holds
        self._adapter = adapter
        self._save_thread = adapter.save_thread.ident
        self._unfetched = unfetched
        self._copies_all = copies_all
        self._lock = threading.RLock()  # `_sort_in` steps aside while it holds it
        self._fair = FairQueue()
        self._fresh: list[QueuedTask] = []  # sorted in since the last step
        self._checked_s = 0.0
        # When the current task was taken, and its stream's next chunk and the connector's figures at that time.
        self._since_s, self._number, self._put_before = 0.0, 0, (0, 0)

    # ---- Figures ----

    def __len__(self) -> int:
        """Tasks that were not taken."""
        return len(self._inbox) + self._fair.waiting

    @property
    def tasks(self) -> int:
        """Tasks that are queued or being sent."""
        return len(self) + (self._fair.sending is not None)

    @property
    def nbytes(self) -> int:
        """Bytes queued and being sent, as of the last step, and put and not fetched, as of the last check."""
        return self._fair.nbytes + (self._unfetched.nbytes if self._unfetched is not None else 0)

    def of(self, key: str) -> tuple[int, int]:
        """Bytes and tasks of one stream, as above."""
        stream = self._fair.streams.get(key)
        nbytes, tasks = (0, 0) if stream is None else (stream.nbytes, stream.tasks)
        return nbytes + (self._unfetched.of(key) if self._unfetched is not None else 0), tasks

    # ---- The scheduler's thread ----

    def before_step(self) -> None:
        """Called before each step. Sorts in the new tasks, and weighs and copies the payloads of those that wait."""
        if self.is_aside or not (self._inbox or self._fresh):
            return
        with self._lock:
            if self.is_aside:
                return
            self._sort_in()
            step, self._fresh = self._fresh, []
            for queued in step:
                self._fair.weighed(queued, weigh(queued.task.get(PAYLOAD)))  # 0 if it was sent
            if waiting := [each for each in step if each.nbytes and each is not self._fair.sending]:
                # The smallest keeps the memory of the step. Those that were sent had as much of it as the others.
                kept = weigh(min(waiting, key=lambda each: each.nbytes).task[PAYLOAD], kept=True)
                parts = sum(each.nbytes for each in waiting) / len(waiting) * len(step)
                for queued in waiting:
                    if self._copies_all or kept > 2 * parts or queued.stream.behind is not None:
                        self._copy(queued)
            _counters["max_queued_tasks"] = max(_counters["max_queued_tasks"], self.tasks)
            _counters["max_outstanding_bytes"] = max(_counters["max_outstanding_bytes"], self.nbytes)

    def _copy(self, queued: QueuedTask) -> None:
        """Copy the payload of a task that waits, under the lock."""
        if payload := queued.task.get(PAYLOAD):
            queued.task[PAYLOAD] = own(payload, all_tensors=self._copies_all)

    def _sort_in(self) -> None:
        """Move new tasks into `_fair`, under the lock."""
        inbox, push, fresh, before = self._inbox, self._fair.push, self._fresh, len(self._fresh)
        try:
            while inbox:
                task = inbox[0]  # removed when it is in `_fair`, so that an exception in between loses nothing
                fresh.append(push(stream_of(task), task))
                inbox.popleft()
        except BaseException:
            self.step_aside()  # at once, under the lock: the other thread would sort the task in again, to go twice
            raise
        _counters["tasks"] += len(fresh) - before

    # ---- The save thread ----

    def __bool__(self) -> bool:
        """Whether there is a task. When the save thread asks, its last task has been sent."""
        try:
            if not self.is_aside and threading.get_ident() == self._save_thread:
                self._between_sends(time.monotonic())
        except Exception as error:
            _patch.fail("accounting for a send", error)
            self.step_aside()
        return bool(self._inbox or self._fair.waiting)

    def popleft(self) -> dict[str, Any]:
        """The next task.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        try:
            fair = self._fair
            if (self._inbox or fair.waiting) and not self.is_aside:
                with self._lock:
                    if not self.is_aside:
                        return self._take()
        except Exception as error:
            _patch.fail("taking a task", error)
            self.step_aside()
            # The first line may have failed, before the name was bound.
            before: FairQueue = locals().get("fair", self._fair)
            if before.sending is not None:
                return before.sending.task
        return self._inbox.popleft()

    def _take(self) -> dict[str, Any]:
        """Take the next task, under the lock."""
        if self._inbox:
            self._sort_in()
        queued = self._fair.pop()
        key, connector = queued.stream.key, self._adapter.connector
        self._number = self._adapter.put_req_chunk.get(key, 0)
        if self._unfetched is not None:
            self._put_before = (connector._metrics["puts"], connector._metrics["bytes_transferred"])
            request = queued.task.get("request")
            if request is not None and queued.stream.has_receiver is None:
                queued.stream.has_receiver = has_receiver(request, connector.stage_id)
        self._since_s = time.monotonic()
        return queued.task

    def _between_sends(self, now: float) -> None:
        """Charge the send that is over, and check now and then what was fetched and which streams have ended."""
        queued = self._fair.sending
        if queued is not None:
            key, connector = queued.stream.key, self._adapter.connector
            # The end of a request clears upstream's count of its chunks.
            has_put = self._adapter.put_req_chunk.get(key, 0) != self._number
            if self._unfetched is not None and queued.stream.has_receiver:
                # Counted by the connector's own figures, which do not count a put that failed.
                puts, nbytes = connector._metrics["puts"], connector._metrics["bytes_transferred"]
                if puts > self._put_before[0]:
                    nbytes -= self._put_before[1]
                    self._unfetched.put(key, connector.stage_id, self._number, nbytes, now)
                else:
                    self._unfetched.sent(key, now)
            seconds = now - self._since_s
            with self._lock:
                was_behind = queued.stream.behind is not None
                self._fair.sent(seconds, has_put=has_put)
                if seconds >= SLOW_S:
                    _counters["slow_sends"] += 1
                    if not (was_behind or self._copies_all):
                        for waiting in queued.stream.behind or ():
                            self._copy(waiting)
        if now - self._checked_s >= (BUSY_CHECK_S if len(self) else CHECK_S):
            self._checked_s = now
            is_live = self._adapter._sender_tokens.__contains__
            if self._unfetched is not None:
                self._unfetched.check(now)
            with self._lock:
                self._fair.forget_idle(is_live)

    # ---- Stepping aside ----

    def step_aside(self) -> None:
        """Work as upstream's queue from here on, with all tasks in one deque in order of arrival."""
        with self._lock:
            if not self.is_aside:
                inbox = self._inbox
                there = {id(task) for task in tuple(inbox)}  # a task that was being sorted in is in both
                inbox.extendleft(reversed([task for task in self._fair.all_waiting() if id(task) not in there]))
                self._fair, self._fresh, self.is_aside = FairQueue(), [], True
