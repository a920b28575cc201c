"""Whose turn it is: start-time fair queueing by measured cost. It knows no lanes and no locks."""

from __future__ import annotations

import heapq

from . import slow
from .tasks import Stream

FLAT_S = 0.001
"""What a send that is not slow costs its stream, so that streams without slow sends take turns."""

CLEARLY_SLOW_S = 0.1
"""A send that lasts so long is no accident of the processor: its stream is left to the helper after one."""

Ready = list[tuple[float, int, Stream]]


class Turns:
    """Streams that have a task waiting and none in flight, in the order of their turns.

    Fairness is start-time fair queueing (Goyal, Vin and Cheng 1996) with the measured time of a send as its cost: the
    stream that has had the least is next, and one that comes back starts where the others are. Sends that are not slow
    all cost the same, and so does one that is slow by itself: charged is what two puts of a stream in a row took. A
    pause of the whole process (a garbage collection) hits whoever is being sent, and would keep that one back until
    each of the others has had as much.
    """

    def __init__(self) -> None:
        self.ready: Ready = []
        """A heap: virtual time, number of the first task, stream."""
        self.ready_slow: Ready = []
        """The same of streams that are left to the helper."""
        self.now_s = 0.0
        """Virtual time: that of the stream which was served last."""

    def come(self, stream: Stream) -> None:
        """A stream that had nothing on its way is no further behind than the others."""
        stream.virtual_s = max(stream.virtual_s, self.now_s)

    def offer(self, stream: Stream, number: int, *, has_helper: bool) -> None:
        """A stream's first task, of this number in the order of arrival, may be sent."""
        heapq.heappush(
            self.ready_slow if stream.is_slow and has_helper else self.ready, (stream.virtual_s, number, stream)
        )

    def next_of_helper(self, *, takes_all: bool) -> Ready | None:
        """From where the helper takes next; streams that are slow always."""
        ready, ready_slow = self.ready, self.ready_slow
        if ready_slow and (not takes_all or not ready or ready_slow[0][:2] < ready[0][:2]):
            return ready_slow
        return ready if takes_all and ready else None

    def taken(self, heap: Ready) -> None:
        """The first of a heap is being served."""
        _, _, stream = heapq.heappop(heap)
        self.now_s = max(self.now_s, stream.virtual_s)

    def charge(self, stream: Stream, seconds: float, *, has_put: bool) -> None:
        """A send of this stream took so long; learn its pace of what was put."""
        cost_s = FLAT_S
        if has_put or seconds >= slow.SLOW_S:
            before_s, stream.last_put_s = stream.last_put_s, seconds
            stream.is_quick = min(seconds, seconds if before_s is None else before_s) < slow.SLOW_S
            stream.is_slow = (before_s is not None and not stream.is_quick) or seconds >= CLEARLY_SLOW_S
            if before_s is not None and not stream.is_quick:
                cost_s = min(seconds, before_s)
        stream.virtual_s += cost_s

    def leave_none_to_helper(self) -> None:
        """Whoever takes next takes whatever is next."""
        self.ready += self.ready_slow
        heapq.heapify(self.ready)
        self.ready_slow.clear()

    def forget(self) -> None:
        """Nobody is ready."""
        self.ready.clear()
        self.ready_slow.clear()
