"""After an exception of ours, for good: one deque in the order of arrival, and one task at a time."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fair import FairQueue
    from .plain import PlainQueue


class Aside:
    """What upstream's loops find then.

    Args:
        inbox: The one deque.
        fair: The managed queue, whose lanes may have tasks in hand.
    """

    def __init__(self, inbox: deque[dict[str, Any]], fair: FairQueue) -> None:
        self.sending: dict[int, Any] = {}
        """What each lane has in hand, by thread."""
        self._inbox = inbox
        self._fair = fair

    def begin(self, plain: PlainQueue, first: int, *, was_managed: bool) -> None:
        """Under the lock: everything that waits into the deque, whatever the state of the books.

        Args:
            plain: The calm queue.
            first: The first lane's thread, by number.
            was_managed: Whether the managed queue has tasks.
        """
        if was_managed:
            self._take_back()
        if plain.in_hand is not None:
            self.sending[first] = plain.in_hand
        plain.in_hand = None
        self._fair.is_open = False

    def _take_back(self) -> None:
        fair, inbox = self._fair, self._inbox
        # What was being sorted in or given back stands in both. A copy made at once: others append.
        there = {id(task) for task in tuple(inbox)}
        waiting = [queued for queued in fair.table.waiting(fair.lanes.in_hand()) if id(queued.task) not in there]
        for ident, lane in fair.lanes.of.items():
            if lane.reserved is not None and id(lane.reserved.task) in there:
                lane.reserved = None
            if lane.reserved is not None or lane.sending is not None:
                self.sending[ident] = lane.reserved or lane.sending
        inbox.extendleft([queued.task for queued in reversed(waiting) if queued.task is not None])
        fair.forget_what_waits()

    def has_task(self, ident: int, *, is_first: bool) -> bool:
        """Whether there is a task for a thread."""
        lane = self._fair.lanes.of.get(ident)
        if lane is None:
            return bool(self._inbox)
        if lane.reserved is not None:
            return True
        self.sending.pop(ident, None)  # a lane that asks has sent what it had
        lane.sending = None
        # One at a time, as upstream: a send of another lane may be of the stream that comes next.
        return is_first and not self.sending and bool(self._inbox)

    def popleft(self, ident: int) -> dict[str, Any]:
        """The thread's next task.

        Raises:
            IndexError: There is none, as a deque has it.
        """
        lane = self._fair.lanes.of.get(ident)
        if lane is not None and lane.reserved is not None:
            queued, lane.reserved = lane.reserved, None
            if queued.task is not None:
                return queued.task
        task = self._inbox.popleft()
        if lane is not None:
            self.sending[ident] = task  # until it asks for more
        return task
