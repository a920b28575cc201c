"""What waits at one replica, in the order of arrival at the orchestrator, and what of a request is in it.

Each raw output gets a number when it is put into its client's queue, from one count for all replicas: who came before
whom is one comparison, also between replicas. That is all that a raw output pays. Which requests it has entries of is
read only when an end asks for it (``overtaking.py``), and of each raw output once: a queue that is empty by then, which
is the rule, is never read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

_REMEMBERED = 64
"""Requests that are remembered before those that are past are looked for."""


class Arrivals:
    """The numbers of the raw outputs in one client's queue.

    Args:
        waiting: The raw outputs, or exceptions, in that queue; read only.
        clock: The count of all replicas.

    Attributes:
        taken: Number of the last one that was taken.
    """

    __slots__ = ("_clock", "_last_end", "_last_number", "_numbers", "_read_up_to", "_room", "_waiting", "taken")

    def __init__(self, waiting: deque[Any], clock: Iterator[int]) -> None:
        self._waiting = waiting
        self._clock = clock
        self._numbers: deque[int] = deque(next(clock) for _ in waiting)
        self._last_number: dict[str, int] = {}
        self._last_end: dict[str, int] = {}
        self._read_up_to = self.taken = -1
        self._room = _REMEMBERED

    def note_put(self) -> None:
        """A raw output, or an exception, was put into the queue."""
        self._numbers.append(next(self._clock))

    def note_taken(self) -> None:
        """One was taken out of it."""
        numbers = self._numbers
        if numbers:
            self.taken = numbers.popleft()
        if len(numbers) != len(self._waiting):
            self._reconcile()

    def first_waiting(self) -> float:
        """Number of the one that is next; infinity when nothing waits."""
        self._reconcile()
        return self._numbers[0] if self._numbers else math.inf

    def last_number(self) -> int:
        """Number of the one that came last; -1 when nothing waits."""
        return self._numbers[-1] if self._numbers else -1

    def last_of(self, request_id: str, *, ends: bool = False) -> int | None:
        """Number of the last that waits with something of a request (``ends``: with an end of it); None without one."""
        first = self.first_waiting()
        self._read_new()
        found = (self._last_end if ends else self._last_number).get(request_id, -1)
        return found if found >= first else None

    def _reconcile(self) -> None:
        """Make numbers and queue agree, whoever else has put or taken something."""
        for _ in range(len(self._numbers) - len(self._waiting)):
            self.taken = self._numbers.popleft()
        for _ in range(len(self._waiting) - len(self._numbers)):
            self.note_put()

    def _read_new(self) -> None:
        """Read those that came since the last time."""
        numbers = self._numbers
        if not numbers or numbers[-1] <= self._read_up_to:
            return
        fresh = 0
        for number in reversed(numbers):
            if number <= self._read_up_to:
                break
            fresh += 1
        # From the right: a deque finds its middle slowly.
        newest = zip(islice(reversed(numbers), fresh), islice(reversed(self._waiting), fresh), strict=True)
        for number, item in reversed(list(newest)):
            for entry in getattr(item, "outputs", ()):
                self._last_number[entry.request_id] = number
                if entry.finish_reason is not None:
                    self._last_end[entry.request_id] = number
        self._read_up_to = numbers[-1]
        if len(self._last_number) > self._room:
            first = numbers[0]
            self._last_number = {key: number for key, number in self._last_number.items() if number >= first}
            self._last_end = {key: number for key, number in self._last_end.items() if number >= first}
            self._room = 2 * len(self._last_number) + _REMEMBERED
