"""The streams of a managed queue: what each has on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Container
from typing import Any

from .tasks import QueuedTask, Stream, stream_of

CROWD = 1024
"""Streams from which on those that have nothing on its way are forgotten."""


class StreamTable:
    """Every stream that has something on its way, and some that had.

    Args:
        lock: The queue's; it is in the caller's hands where nothing else is said.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.found: dict[str, Stream] = {}
        self.tasks = 0
        """Of all streams, queued and in flight."""
        self.numbers = 0
        """Of the next task, in the order of arrival."""
        self.near_at = float("inf")
        """Tasks of a stream from which on it is among ``near``."""
        self.near: dict[str, Stream] = {}
        """Streams with that many tasks, as of the last sorting in."""
        self._crowd = CROWD
        self._lock = lock

    def open(self, key: str) -> Stream:
        """A stream that is not there."""
        if len(self.found) >= self._crowd:
            # Those that came first have ended most likely; one that comes back after all is new.
            idle = [each.key for each in self.found.values() if not each.tasks and not each.unfetched]
            for each in idle[: len(idle) // 2 + 1]:
                del self.found[each]
            self._crowd = len(self.found) + CROWD // 2
        stream = self.found[key] = Stream(key)
        return stream

    def adopt(self, task: dict[str, Any]) -> QueuedTask:
        """A task that is being sent already; before others of its stream are here."""
        key = stream_of(task)
        stream = self.found.get(key) or self.open(key)
        queued = stream.in_flight = QueuedTask(task, stream, self.numbers, time.monotonic(), is_waiting=False)
        self.numbers += 1
        stream.tasks += 1
        self.tasks += 1
        return queued

    def end(self, stream: Stream, queued: QueuedTask) -> None:
        """The task of a stream that was in flight is sent."""
        queued.task = None  # its payload lives no longer than it must
        queued.is_waiting = False
        stream.in_flight = None
        stream.tasks = tasks = stream.tasks - 1
        self.tasks -= 1
        if tasks < self.near_at:
            self.near.pop(stream.key, None)

    def came_unfetched(self, key: str) -> None:
        """A chunk of a stream that was put before anybody counted here; takes the lock."""
        with self._lock:
            (self.found.get(key) or self.open(key)).unfetched += 1

    def gone(self, key: str, count: int, *, fetched: bool) -> None:
        """So many chunks are in shared memory no longer, or are not waited for any more; takes the lock."""
        with self._lock:
            stream = self.found.get(key)
            if stream is None:
                return
            stream.unfetched -= count
            if fetched:
                stream.fetches += count
            else:  # of a request that is over; the next one of this name has a receiver of its own
                stream.given_up_at = None

    def deepest(self) -> int:
        """Tasks of the stream that has the most."""
        return max((each.tasks for each in self.found.values()), default=0)

    def trust_all(self) -> None:
        """Streams that have made no put here are quick until one says otherwise, but those that are being sent."""
        for stream in self.found.values():
            if stream.last_put_s is None and stream.in_flight is None:
                stream.is_quick = True

    def waiting(self, but: Container[int]) -> list[QueuedTask]:
        """Everything that waits, but what has one of these identities, in the order of its arrival."""
        found = [queued for stream in list(self.found.values()) for queued in stream.waiting]
        found = [queued for queued in found if id(queued) not in but and queued.task is not None]
        return sorted(found, key=lambda queued: queued.number)

    def forget_what_waits(self) -> None:
        """Keep no payload alive; who is about to copy one finds that it waits here no longer."""
        for stream in list(self.found.values()):
            for queued in stream.waiting:
                queued.is_waiting = False
            stream.waiting.clear()

    def forget_tasks(self) -> None:
        """What waited, and what was being sent, is somebody else's."""
        for stream in self.found.values():
            stream.in_flight = None
            stream.tasks = 0
        self.tasks = 0
        self.near.clear()
