"""The limit of requests: those that the engine has, and admitted ones that have not reached it; when to ask again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

LONGEST_S = 30
"""SDKs obey a value of at most a minute."""

_FIRST_GUESS_S = 8.0
_SHARE = 1 / 16
"""Of the newest answer in the mean, so that about the last sixteen count."""


class RetryAfter:
    """The values of ``Retry-After``: the time at which a place is expected to be free for each refusal, in their order.

    A place is free every *t/limit* seconds, where t is the mean time for which a request has its places. The next
    refusal is told the next such time. Nothing is reserved: the first to ask gets the place. The time is spread at
    random by half, because clients obey to the second and would all come back at once.

    Args:
        clock: Seconds, monotonic.
        spread: Returns a random number between its two arguments.
    """

    def __init__(self, clock: Callable[[], float], spread: Callable[[float, float], float]) -> None:
        self.clock, self._spread = clock, spread
        self._mean_s, self._told = _FIRST_GUESS_S, -math.inf

    def ended(self, taken_at: float) -> None:
        """Note that a request that got its places at this time has none any more."""
        self._mean_s += (self.clock() - taken_at - self._mean_s) * _SHARE

    def seconds(self, wanted: int, limit: int) -> int:
        """The value for a refused request that needs *wanted* of *limit* places: 1 to ``LONGEST_S`` seconds."""
        now = self.clock()
        self._told = min(max(self._told, now) + self._mean_s * wanted / limit, now + LONGEST_S)
        return min(max(math.ceil((self._told - now) * self._spread(0.5, 1.5)), 1), LONGEST_S)


@dataclass(slots=True)
class Ticket:
    """The places of one HTTP request, or of one web socket, until the application has ended.

    Attributes:
        is_socket: Whether it is of a web socket. Then each request is checked and no place is reserved, because
            upstream reports nothing if a request fails before the engine has it and the socket stays open. An HTTP
            request is checked once.
        reserved: Places for requests that the engine does not have yet.
        requests: Requests that the engine has or had.
        was_admitted: Whether it got places.
        taken_at: When it got places. None once they are given back.
        retry_after_s: When to ask again, if it was refused and may be admitted later. Else 0.
    """

    is_socket: bool = False
    reserved: int = 0
    requests: set[str] = field(default_factory=set)
    was_admitted: bool = False
    taken_at: float | None = None
    retry_after_s: int = 0


class Places:
    """The places of one engine. Used only on its front end's event loop.

    A request counts until the engine forgets it or its connection ends. Upstream may keep a request whose answer was
    not read to its end until Python collects the garbage.

    Args:
        counters: The patch's counters.
        retry_after: When refused clients should ask again.

    Attributes:
        limit: The maximum number of taken places. None admits every request.
        of: The state of the application whose limit was read last.
    """

    def __init__(self, counters: dict[str, int], retry_after: RetryAfter | None = None) -> None:
        self._retry_after = retry_after or RetryAfter(time.monotonic, random.uniform)
        self.limit: int | None = None
        self.of: Any = None
        self._unfinished: Collection[str] = ()
        self._left: set[str] = set()  # requests of ended connections that the engine still has
        self._reserved = 0
        self._counters = counters

    def open(self, limit: int | None, unfinished: Collection[str] = ()) -> None:
        """Limit the engine's unfinished requests from now on. With None, every request is admitted."""
        self.limit, self._unfinished = limit, unfinished

    def take(self, ticket: Ticket, wanted: int) -> bool:
        """Admit a ticket that has no places yet, and reserve *wanted* ones, at least one. False if too few are free."""
        if self.limit is None or ticket.was_admitted:
            return True
        wanted = max(wanted, 1)  # upstream checks n later
        self._left.intersection_update(self._unfinished)
        taken = len(self._unfinished) - len(self._left) + self._reserved + wanted
        if taken > self.limit:
            self._counters["refused"] += 1
            if wanted <= self.limit and not ticket.is_socket:
                ticket.retry_after_s = self._retry_after.seconds(wanted, self.limit)
            return False
        self._counters["admitted"] += 1
        self._counters["most_at_once"] = max(self._counters["most_at_once"], taken)
        if not ticket.is_socket:
            self._reserved += wanted
            ticket.reserved, ticket.was_admitted, ticket.taken_at = wanted, True, self._retry_after.clock()
        return True

    def hand_over(self, ticket: Ticket, request: str) -> None:
        """Note that the engine counts a request now, so that its place is no longer reserved."""
        if request in self._unfinished and request not in ticket.requests:
            ticket.requests.intersection_update(self._unfinished)
            ticket.requests.add(request)
            if ticket.reserved:
                ticket.reserved -= 1
                self._reserved -= 1

    def give_back(self, ticket: Ticket) -> None:
        """Free the places of a ticket, because its client has left or its application has ended."""
        self._reserved -= ticket.reserved
        ticket.reserved = 0
        self._left |= ticket.requests
        self._left.intersection_update(self._unfinished)  # here too, as some servers never take
        if ticket.taken_at is not None:
            self._retry_after.ended(ticket.taken_at)
            ticket.taken_at = None
