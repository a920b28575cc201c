"""How many requests there may be at once: those that the engine has, and those on their way to it."""

from __future__ import annotations

from collections.abc import Collection


class Ticket:
    """The places of one HTTP request, or of one web socket, until the application has ended.

    Attributes:
        is_socket: It asks for each of its requests, and nothing is kept for it: upstream tells nobody when one fails
            before the engine has it, while the socket lives on. An HTTP request asks once.
        reserved: Places that are kept for requests that the engine does not have yet.
        requests: Those that the engine has, or had.
        was_admitted: Whether it got places.
        may_come_back: Whether it was refused what could be had at another time.
    """

    __slots__ = ("is_socket", "may_come_back", "requests", "reserved", "was_admitted")

    def __init__(self, *, is_socket: bool = False) -> None:
        self.is_socket = is_socket
        self.reserved = 0
        self.requests: set[str] = set()
        self.was_admitted = self.may_come_back = False


class Places:
    """The places of one engine; used on its front end's event loop alone.

    A request that the engine has counts until the engine forgets it, but no longer than its connection lasts. Upstream
    may keep a request whose answer was not read to its end until Python collects the garbage.

    Args:
        counters: The patch's counters.

    Attributes:
        limit: Most places that may be taken; None: nobody is asked.
    """

    def __init__(self, counters: dict[str, int]) -> None:
        self.limit: int | None = None
        self._unfinished: Collection[str] = ()
        self._left: set[str] = set()  # what the engine still has of connections that have ended
        self._reserved = 0
        self._counters = counters

    def open(self, limit: int | None, unfinished: Collection[str] = ()) -> None:
        """From now on there are so many for these, the engine's unfinished requests; for None nobody is asked."""
        self.limit, self._unfinished = limit, unfinished

    def take(self, ticket: Ticket, wanted: int) -> bool:
        """Reserve as many places as are *wanted*, one at least, for who has not got any; whether that could be done."""
        if self.limit is None or ticket.was_admitted:
            return True
        wanted = max(wanted, 1)  # upstream checks n later
        self._left.intersection_update(self._unfinished)
        taken = len(self._unfinished) - len(self._left) + self._reserved + wanted
        if taken > self.limit:
            self._counters["refused"] += 1
            ticket.may_come_back = wanted <= self.limit
            return False
        self._counters["admitted"] += 1
        self._counters["most_at_once"] = max(self._counters["most_at_once"], taken)
        if not ticket.is_socket:
            self._reserved += wanted
            ticket.reserved = wanted
            ticket.was_admitted = True
        return True

    def hand_over(self, ticket: Ticket, request: str) -> None:
        """One place of it is a request that the engine counts now."""
        if request in self._unfinished and request not in ticket.requests:
            ticket.requests.intersection_update(self._unfinished)
            ticket.requests.add(request)
            if ticket.reserved:
                ticket.reserved -= 1
                self._reserved -= 1

    def give_back(self, ticket: Ticket) -> None:
        """Its connection has ended: nothing of it counts any more."""
        self._reserved -= ticket.reserved
        ticket.reserved = 0
        self._left |= ticket.requests
