"""The lanes of a queue: threads that send, each with upstream's ``save_loop``, and what each has in hand."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .tasks import QueuedTask


@dataclass(slots=True, eq=False)
class Lane:
    """A thread that sends; only the thread itself and who has the queue's lock touch it.

    Attributes:
        reserved: What ``popleft`` will give it.
        sending: What it gave last and has not been sent.
    """

    thread: threading.Thread
    reserved: QueuedTask | None = None
    sending: QueuedTask | None = None


class Lanes:
    """The first is upstream's own save thread; the other, where there is one, is the helper."""

    def __init__(self) -> None:
        self.of: dict[int, Lane] = {}
        """By the thread's number."""
        self.first: Lane | None = None

    def add(self, thread: threading.Thread) -> None:
        """One more, which runs already."""
        assert thread.ident is not None, "a lane is known by its number, which it has once it runs"
        lane = self.of[thread.ident] = Lane(thread)
        self.first = self.first or lane

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads that send."""
        return tuple(lane.thread for lane in self.of.values())

    def end(self, queued: QueuedTask) -> None:
        """A task was sent, by whichever lane."""
        for lane in self.of.values():
            if lane.sending is queued:
                lane.sending = None

    def in_hand(self) -> frozenset[int]:
        """Identities of what the lanes have in hand."""
        lanes = self.of.values()
        return frozenset({id(lane.reserved) for lane in lanes} | {id(lane.sending) for lane in lanes})

    def is_busy(self) -> bool:
        """Whether a lane has been told of a task and has not got it yet, or another than the first is in a send."""
        return any(
            lane.reserved is not None or (lane.sending is not None and lane is not self.first)
            for lane in self.of.values()
        )
