"""Chooses the next task: in order of arrival, and for slow streams start-time fair queueing by the time of their sends.

A stream whose send was slow is behind until the others have had as much of the save thread as it had. Until then it is
sent only when the others have no task, and its tasks are in a deque of its own. The tasks of all other streams are in
one deque. There is no thread, lock or clock in here.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SLOW_S = 0.02
"""A send that takes this long is slow. With 0.1, sends of 60 ms to two of 16 streams delayed all others as on stock. A
shorter one depends on which thread got the interpreter lock rather than on its stream. So does a longer pause of the
process, which is charged to the stream whose send it was in: three sends in four runs of 128 streams."""

MOST_CHARGED_S = 1.0
"""The most that one send is charged. A send that hung once must not keep its stream back for long while the others have
tasks all the time."""


@dataclass(slots=True, eq=False)
class Stream:
    """The tasks of one external request id.

    Attributes:
        behind: While it is behind, its tasks that were not taken yet, in order of arrival, otherwise None.
        tasks: Number of tasks that were not taken yet, plus the one that is being sent.
        nbytes: Size of their payloads, of those that were weighed.
        virtual_s: Earliest virtual time at which its next send begins.
        cost_s: What its last put was charged, which its next is expected to take.
        has_receiver: Whether the next stage takes its chunks. None until its first task is sent.
    """

    key: str
    behind: deque[QueuedTask] | None = None
    tasks: int = 0
    nbytes: int = 0
    virtual_s: float = 0.0
    cost_s: float = 0.0
    has_receiver: bool | None = None


@dataclass(slots=True, eq=False)
class QueuedTask:
    """One task.

    Attributes:
        task: Upstream's task.
        stream: Its stream.
        number: Its place in the order of arrival.
        nbytes: Size of its payload, 0 until it was weighed.
    """

    task: dict[str, Any]
    stream: Stream
    number: int
    nbytes: int = 0


class FairQueue:
    """The queued tasks of one save thread, which sends one at a time.

    A task is in a deque until it is in another one or in ``sending``, and for a moment in both.
    """

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.waiting = 0
        """Tasks of all streams that were not taken yet."""
        self.nbytes = 0
        """Size of the payloads of all streams, queued and being sent, of those that were weighed."""
        self.sending: QueuedTask | None = None
        """The task that was taken last, until it was sent."""
        self._virtual_s = 0.0
        self._numbers = 0
        self._busy = 0  # streams that have a task
        self._ready: deque[QueuedTask] = deque()  # of the streams that are not behind, in order of arrival
        # A heap of the others that have a task: virtual end of its send, its number, virtual begin, all tasks.
        self._behind: list[tuple[float, int, float, deque[QueuedTask]]] = []

    def push(self, key: str, task: dict[str, Any]) -> QueuedTask:
        """Queue a task behind its stream's others."""
        stream = self.streams.get(key) or self.streams.setdefault(key, Stream(key))
        queued = QueuedTask(task, stream, self._numbers)
        self._numbers += 1
        self.waiting += 1
        stream.tasks += 1
        self._busy += stream.tasks == 1
        (self._ready if stream.behind is None else stream.behind).append(queued)
        if stream.tasks == 1:
            self._offer(stream)
        return queued

    def pop(self) -> QueuedTask:
        """Take the next task. `sent` must be called before another one is taken.

        Raises:
            IndexError: There is none.
        """
        while self._behind and self._behind[0][0] <= self._virtual_s:
            tasks = heapq.heappop(self._behind)[-1]
            insort(self._ready, tasks[0], key=lambda each: each.number)
            tasks.popleft()
        tasks = self._ready
        if not tasks:
            _, _, begin_s, tasks = heapq.heappop(self._behind)
            self._virtual_s = max(self._virtual_s, begin_s)
        queued = self.sending = tasks[0]
        tasks.popleft()
        self.waiting -= 1
        return queued

    def sent(self, seconds: float, *, has_put: bool) -> None:
        """Note that the task in ``sending`` was sent, successfully or not.

        Args:
            seconds: How long it took.
            has_put: Whether a chunk was put. The frames of a talker are put many tasks at a time.
        """
        queued, self.sending = self.sending, None
        if queued is None:
            return
        stream = queued.stream
        if seconds >= SLOW_S:  # virtual time passes for this stream alone
            stream.cost_s = min(seconds, MOST_CHARGED_S)
            stream.virtual_s = max(stream.virtual_s, self._virtual_s) + stream.cost_s
            if stream.behind is None:
                stream.behind = deque(each for each in self._ready if each.stream is stream)
                self._ready = deque(each for each in self._ready if each.stream is not stream)
        else:  # for all that have a task
            self._virtual_s += seconds / self._busy
            stream.cost_s = 0.0 if has_put else stream.cost_s
        stream.tasks -= 1
        self._busy -= not stream.tasks
        stream.nbytes -= queued.nbytes
        self.nbytes -= queued.nbytes
        queued.nbytes, queued.task = 0, {}  # releases its payload
        self._offer(stream)

    def weighed(self, queued: QueuedTask, nbytes: int) -> None:
        """Set the size of a task's payload, which was not weighed yet."""
        queued.nbytes = nbytes
        queued.stream.nbytes += nbytes
        self.nbytes += nbytes

    def forget_idle(self, is_live: Callable[[str], bool]) -> None:
        """Forget the streams that have no task and will get none."""
        for stream in [each for each in self.streams.values() if not each.tasks and not is_live(each.key)]:
            del self.streams[stream.key]

    def all_waiting(self) -> list[dict[str, Any]]:
        """Every task that was not taken, in order of arrival, even after an exception at any line."""
        deques = (self._ready, *(each.behind or () for each in self.streams.values()))
        found = {queued.number: queued.task for each in deques for queued in each if queued is not self.sending}
        return [found[number] for number in sorted(found)]

    def _offer(self, stream: Stream) -> None:
        """Let the first task of a stream that was behind be taken, or all of them if it is no longer behind."""
        if stream.behind:
            begin_s = stream.virtual_s = max(stream.virtual_s, self._virtual_s)
            if begin_s + stream.cost_s > self._virtual_s:
                heapq.heappush(self._behind, (begin_s + stream.cost_s, stream.behind[0].number, begin_s, stream.behind))
            else:
                self._ready = deque(sorted((*self._ready, *stream.behind), key=lambda each: each.number))
                stream.behind = None
