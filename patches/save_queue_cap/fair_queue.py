"""Chooses the next task: one deque per stream, and start-time fair queueing by the time that their sends took.

Streams that are not behind are served in order of arrival. All streams are, while no send is slow. A stream whose send
was slow is behind until the others have had as much of the save thread as it had. Before that it is sent only when no
other stream has a task. There is no thread, lock or clock in here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
        waiting: Tasks that were not taken yet, in order of arrival.
        tasks: Number of these, plus the one that is being sent.
        nbytes: Size of their payloads, of those that were weighed.
        virtual_s: Earliest virtual time at which its next send begins.
        cost_s: What its last put was charged, which its next is expected to take.
        has_receiver: Whether the next stage takes its chunks. None until its first task is sent.
    """

    key: str
    waiting: deque[QueuedTask] = field(default_factory=deque)
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
        is_waiting: Whether it was not taken yet.
    """

    task: dict[str, Any]
    stream: Stream
    number: int
    nbytes: int = 0
    is_waiting: bool = True


class FairQueue:
    """The queued tasks of one save thread, which sends one at a time.

    A task is in its stream's ``waiting`` until it is in ``sending``, and for a moment in both.
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
        self._ready: list[tuple[int, Stream]] = []  # a heap of streams that are not behind, by their first task
        self._behind: list[tuple[float, int, Stream]] = []  # a heap of the others, by the virtual end of a send

    def push(self, key: str, task: dict[str, Any]) -> QueuedTask:
        """Queue a task behind its stream's others."""
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = Stream(key)
        queued = QueuedTask(task, stream, self._numbers)
        self._numbers += 1
        stream.waiting.append(queued)
        stream.tasks += 1
        self.waiting += 1
        if stream.tasks == 1:
            self._offer(stream)
        return queued

    def pop(self) -> QueuedTask:
        """Take the next task. `sent` must be called before another one is taken.

        Raises:
            IndexError: There is none.
        """
        while self._behind and self._behind[0][0] <= self._virtual_s:
            _, number, caught_up = heapq.heappop(self._behind)
            heapq.heappush(self._ready, (number, caught_up))
        if self._ready:
            stream = heapq.heappop(self._ready)[-1]
        else:
            stream = heapq.heappop(self._behind)[-1]
            self._virtual_s = max(self._virtual_s, stream.virtual_s)
        queued = self.sending = stream.waiting[0]
        queued.is_waiting = False
        stream.waiting.popleft()
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
        stream.tasks -= 1
        stream.nbytes -= queued.nbytes
        self.nbytes -= queued.nbytes
        queued.nbytes, queued.task = 0, {}  # releases its payload
        self._charge(stream, seconds, has_put=has_put)
        if stream.waiting:
            self._offer(stream)

    def weighed(self, queued: QueuedTask, nbytes: int) -> None:
        """Set the size of a task's payload."""
        more = nbytes - queued.nbytes
        queued.nbytes += more
        queued.stream.nbytes += more
        self.nbytes += more

    def is_behind(self, stream: Stream) -> bool:
        """Whether tasks of other streams that arrive later are sent before a task of this one."""
        return stream.virtual_s + stream.cost_s > self._virtual_s

    def forget_idle(self, is_live: Callable[[str], bool]) -> None:
        """Forget the streams that have no task and will get none."""
        for stream in [each for each in self.streams.values() if not each.tasks and not is_live(each.key)]:
            del self.streams[stream.key]

    def all_waiting(self) -> list[dict[str, Any]]:
        """Every task that was not taken, in order of arrival, even after an exception at any line."""
        found = [queued for each in self.streams.values() for queued in each.waiting if queued is not self.sending]
        return [queued.task for queued in sorted(found, key=lambda each: each.number)]

    def _offer(self, stream: Stream) -> None:
        """Let the first task of a stream be taken."""
        number = stream.waiting[0].number
        stream.virtual_s = max(stream.virtual_s, self._virtual_s)
        if self.is_behind(stream):
            heapq.heappush(self._behind, (stream.virtual_s + stream.cost_s, number, stream))
        else:
            heapq.heappush(self._ready, (number, stream))

    def _charge(self, stream: Stream, seconds: float, *, has_put: bool) -> None:
        """Let virtual time pass, for this stream alone if its send was slow, otherwise for all that have a task."""
        if seconds >= SLOW_S:
            stream.cost_s = min(seconds, MOST_CHARGED_S)
            stream.virtual_s += stream.cost_s
            return
        if has_put:
            stream.cost_s = 0.0
        self._virtual_s += seconds / (1 + len(self._ready) + len(self._behind))
