"""What a slow send is, and which lanes are in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .helper import Helper
    from .lanes import Lanes
    from .tasks import QueuedTask, Stream

SLOW_S = 0.02
"""A send that lasts longer is slow. Shorter ones differ by who got the interpreter's lock more than by stream."""

LOOK_S = SLOW_S / 2
"""What one look at a send counts at most: a pause of the whole process between two looks is no slow send."""


class Watch:
    """Whether a lane is in a slow send, judged from the scheduler's thread by looking at it before each step.

    How long a send lasts says little by itself: the process may have been paused, or the lane may have had no turn on
    the processor. So time counts only from look to look, `LOOK_S` each at most: that the scheduler's thread came round
    again and again shows that the lane had its chances too, and no single pause makes a send slow.
    """

    def __init__(self) -> None:
        self.is_slow = False
        """Whether the send of the last look is."""
        self._since_s: float | None = None
        self._seen_s = 0.0
        self._last_s = 0.0
        self._until_s = float("-inf")

    def look(self, since_s: float | None, now: float) -> bool:
        """Look at the send that began at ``since_s`` (monotonic seconds; None: there is none); whether it is slow."""
        if since_s != self._since_s:
            if self.is_slow and self._since_s is not None:
                self._until_s = now + self._last_s - self._since_s
            self.is_slow = False
            self._since_s, self._seen_s, self._last_s = since_s, 0.0, since_s or now
        if since_s is not None:
            self._seen_s += min(now - self._last_s, LOOK_S)
            self._last_s = now
            self.is_slow = self._seen_s >= SLOW_S
        return self.is_slow

    def is_dominated(self, now: float) -> bool:
        """Whether the lane is in a slow send, or was for longer than it has been out of it."""
        return self.is_slow or now < self._until_s


class SlowSends:
    """What slow sends do to a queue, as of the last look.

    Args:
        helper: When the lanes' present sends began.
    """

    def __init__(self, helper: Helper) -> None:
        self.first = Watch()
        """Of the first lane."""
        self.is_pressed = False
        """Whether slow sends keep every lane, so that the streams behind them cannot help having tasks."""
        self.is_anybody_slow = False
        """Whether there is a slow send, or a stream that waits whose sends are slow."""
        self._helper = helper
        self._other = Watch()  # of the helper
        self._sent_slowly: tuple[QueuedTask, ...] = ()

    def look(self, now: float, lanes: Lanes, streams: Mapping[str, Stream]) -> None:
        """See which lanes are in slow sends; the scheduler's thread does, once a step and more often at will."""
        first, other, helper = self.first, self._other, self._helper
        first.look(helper.first_since_s, now)
        if helper.condition is not None:
            other.look(helper.own_since_s, now)
        self.is_pressed = first.is_dominated(now) and (helper.condition is None or other.is_dominated(now))
        self._sent_slowly = tuple(
            lane.sending
            for lane in tuple(lanes.of.values())
            if (first if lane is lanes.first else other).is_slow and lane.sending is not None
        )
        self.is_anybody_slow = (
            first.is_dominated(now)
            or other.is_dominated(now)
            or any(stream.is_slow and stream.tasks for stream in list(streams.values()))
        )

    def is_slow(self, stream: Stream) -> bool:
        """Whether a stream's sends are slow: the one that goes on, or its last ones."""
        return stream.is_slow or any(queued.stream is stream for queued in self._sent_slowly)
