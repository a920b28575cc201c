"""Queued messages, by earliest deadline first and in order within a request.

The messages are in one dictionary, by number of arrival. All other structures only refer to it, so that after an error
the dictionary is enough to return the messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from queue import Empty
from typing import Any

import janus

_NOTHING = (Empty, IndexError, RuntimeError, getattr(janus, "SyncQueueShutDown", RuntimeError))
"""What reading an empty or a closed queue raises."""


class QueuedMessages:
    """Queued messages of one engine. All methods are called on the front end's event loop.

    Args:
        deadlines: Its ``of(message)`` gives the request and the deadline of each message that arrives.
        counters: The patch's counters.

    Attributes:
        queued: The messages by number of arrival, in order of arrival.
        is_open: Whether more messages may be collected. A message with an infinite deadline prevents that until it is
            taken, so that nothing overtakes it.
    """

    def __init__(self, deadlines: Any, counters: dict[str, int]) -> None:
        self.queued: dict[int, Any] = {}
        self.is_open = True
        self._deadlines = deadlines
        self._due: list[tuple[float, int, str | None]] = []  # a heap; of messages that went before they were due too
        self._requests: dict[str | None, deque[int]] = {}  # the numbers of each request's messages
        self._arrived = 0
        self._latest = -1
        self._counters = counters

    def collect(self, get: Callable[[], Any], is_empty: Callable[[], bool]) -> None:
        """Take all messages from ``get``, until it has none or is closed."""
        while self.is_open and not is_empty():
            number = self._arrived
            try:
                self.queued[number] = get()
            except _NOTHING:  # upstream's next read reports it
                return
            self._arrived = number + 1
            request_id, deadline = self._deadlines.of(self.queued[number])
            self.is_open = deadline != math.inf
            self._requests.setdefault(request_id, deque()).append(number)
            heappush(self._due, (deadline, number, request_id))

    def take(self, count: int) -> list[Any]:
        """Take up to *count* messages. If it raises, it has taken none."""
        numbers: list[int] = []
        while self._due and len(numbers) < count:
            deadline, due_number, request_id = self._due[0]
            own = self._requests.get(request_id)
            if own is None or due_number < own[0]:
                heappop(self._due)
                continue
            number = own.popleft()
            numbers.append(number)
            self._counters["overtaken"] += number < self._latest
            self._latest = max(self._latest, number)
            if not own:
                del self._requests[request_id]
                self.is_open = self.is_open or deadline == math.inf
        self._counters["messages"] += len(numbers)
        if not self._requests:
            self._due.clear()
        return list(map(self.queued.pop, numbers))
