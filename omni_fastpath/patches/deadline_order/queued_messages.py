"""Queued messages, by earliest deadline first and in order within a request.

The messages are in one dictionary, by number of arrival. All other structures only refer to it, so that after an error
the dictionary is enough to return the messages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Due = tuple[float, int]
"""A deadline and the number of the message that has it."""


class Deadlines(Protocol):
    """The part of ``deadlines.Deadlines`` that is used here."""

    def of(self, message: Any) -> tuple[str | None, float]:
        """The request of a message that has just arrived, and its deadline in seconds."""


class _Request:
    """The queued messages of one request.

    Attributes:
        numbers: Its messages, in order of arrival.
        earliest: Those that are due before every message after them, in order of arrival. The first one has the
            earliest deadline of all.
    """

    __slots__ = ("earliest", "numbers")

    def __init__(self) -> None:
        self.numbers: deque[int] = deque()
        self.earliest: deque[Due] = deque()

    def add(self, due: Due) -> None:
        """Add a message that has arrived."""
        self.numbers.append(due[1])
        while self.earliest and self.earliest[-1][0] > due[0]:
            self.earliest.pop()
        self.earliest.append(due)


class QueuedMessages:
    """Queued messages of one engine. All methods are called on the front end's event loop.

    Args:
        deadlines: The deadlines of its messages.
        counters: The patch's counters.

    Attributes:
        deadlines: The same.
        messages: The messages by number of arrival, in order of arrival.
        is_open: Whether more messages may be collected. A message with an infinite deadline prevents that until it is
            taken, so that nothing overtakes it.
    """

    def __init__(self, deadlines: Deadlines, counters: dict[str, int]) -> None:
        self.deadlines = deadlines
        self.messages: dict[int, Any] = {}
        self.is_open = True
        self._requests: dict[str | None, _Request] = {}
        self._turns: list[tuple[float, int, str | None]] = []
        self._arrived = 0
        self._latest = -1
        self._counters = counters

    def collect(self, get: Callable[[], Any], is_empty: Callable[[], bool]) -> None:
        """Take all messages from ``get``, until it has none or raises."""
        while self.is_open and not is_empty():
            try:
                self.messages[self._arrived] = get()
            except Exception:  # the queue is empty or closed, and upstream's next read reports that
                return
            self._arrived += 1
            self._index(self._arrived - 1)

    def _index(self, number: int) -> None:
        """Insert a new message of ``messages`` into the order."""
        request_id, deadline = self.deadlines.of(self.messages[number])
        self.is_open = deadline != math.inf
        queued = self._requests.setdefault(request_id, _Request())
        before = queued.earliest[0] if queued.earliest else None
        queued.add((deadline, number))
        if queued.earliest[0] != before:
            if before is not None:
                del self._turns[bisect_left(self._turns, (*before, request_id))]
            insort(self._turns, (*queued.earliest[0], request_id))

    def take(self) -> Any:
        """Take the next message. None if nothing is queued."""
        if not self._turns:
            return None
        deadline, due_number, request_id = self._turns[0]
        queued = self._requests[request_id]
        number = queued.numbers.popleft()
        self._counters["overtaken"] += number < self._latest
        self._latest = max(self._latest, number)
        if number == due_number:
            queued.earliest.popleft()
            del self._turns[0]
            if queued.numbers:
                insort(self._turns, (*queued.earliest[0], request_id))
            else:
                del self._requests[request_id]
            self.is_open = self.is_open or deadline == math.inf
        return self.messages.pop(number)
