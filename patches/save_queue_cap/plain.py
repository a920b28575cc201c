"""The queue while all is calm: upstream's one deque, and what the first lane has of it in hand."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .fair import FairQueue
from .payload import keep
from .upstream import PAYLOAD


class PlainQueue:
    """One deque in the order of arrival and one lane.

    A stream adds at most one task in a step that appends (a forced terminal and a clean-up besides), so that the age of
    the oldest unsent task, in such steps, bounds what any stream has queued.

    Args:
        inbox: The deque, which others append to at any time.
        lock: The queue's.
        counters: The patch's counters.
        steps: The age at which a task is old.
    """

    def __init__(
        self, inbox: deque[dict[str, Any]], lock: threading.Lock, counters: dict[str, int], steps: int
    ) -> None:
        self.inbox = inbox
        self.in_hand: dict[str, Any] | None = None
        """The first lane's task."""
        self.since_s: float | None = None
        """When it was taken, monotonic seconds."""
        self.taken = 0
        """Tasks that the first lane has taken since the calm began."""
        self._lock = lock
        self._counters = counters
        self._come = 0
        self._noted = 0  # of those that came, in the counter
        self._fresh_from = 0  # what had come by the last step
        # What had come by each of the last steps that appended.
        self._marks: deque[int] = deque([0] * max(1, steps), maxlen=max(1, steps))

    def step(self) -> tuple[int, bool]:
        """Once before each step: tasks that wait, and whether the oldest unsent one is old."""
        while True:
            taken = self.taken
            waiting = len(self.inbox)
            if taken == self.taken:
                break
        come = taken + waiting
        if come != self._come:  # a step that appended
            self._come = come
            self._marks.append(come)
            self._counters["max_queued_tasks"] = max(self._counters["max_queued_tasks"], waiting)
        return waiting, taken - (self.in_hand is not None) < self._marks[0]

    def note_come(self) -> int:
        """Count what came since the calm began, under the lock; how many of them wait."""
        waiting = len(self.inbox)
        come = self.taken + waiting
        self._counters["tasks"] += come - self._noted
        self._noted = come
        return waiting

    def begin(self, tasks: list[dict[str, Any]], in_hand: dict[str, Any] | None, now: float, deepest: int) -> None:
        """All is calm again, under the lock: these wait, in order, and no stream has more tasks than ``deepest``."""
        self.in_hand = in_hand
        self.since_s = now if in_hand is not None else None
        self.inbox.extendleft(reversed(tasks))
        self.taken = int(in_hand is not None)
        self._come = self._fresh_from = self._noted = self.taken + len(self.inbox)
        self._marks.extend([0] * (self._marks.maxlen or 1))
        self._marks.extend([self._come] * max(1, deepest))  # as old as the stream with the most may be

    def own_what_waits(self) -> None:
        """Where payloads are the runner's own memory: copy those that came since the last step."""
        with self._lock:
            tasks = list(self.inbox)  # at once: a lane may append a clean-up
            come = self.taken + len(tasks)
            count = min(come - self._fresh_from, len(tasks))
            self._fresh_from = come
            for task in tasks[len(tasks) - count :]:
                payload, copies = keep(task.get(PAYLOAD))
                if copies:
                    task[PAYLOAD] = payload
                    self._counters["copied_tensors"] += copies

    def put_together(self) -> FairQueue:
        """What a managed queue would be."""
        other = FairQueue(dict.fromkeys(self._counters, 0))
        with self._lock:
            if self.in_hand is not None:
                other.inbox.append(self.in_hand)
            other.inbox.extend(self.inbox)
        return other
