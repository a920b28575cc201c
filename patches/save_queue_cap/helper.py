"""When the helper lane works: upstream's second ``save_loop``, on a thread of ours.

Two lanes that work all the time only fight for the interpreter's lock. So the helper takes tasks while the first lane
sleeps or is in a slow send, and always those of streams whose sends are known to be slow, which the first lane leaves
to it. Who wakes it is the first lane where it knows, the scheduler's thread where it does not, and at the latest the
helper itself, which upstream's loop wakes every 0.1 s.
"""

from __future__ import annotations

import threading
import time

SLOW_S = 0.02
"""A send that lasts longer is slow. Shorter ones differ by who got the interpreter's lock more than by stream."""

HUNG_S = 1.0
"""The helper's send that lasts longer may last for ever: the first lane serves slow streams too, where it has nothing
else to do."""


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


class Helper:
    """The policy; it knows no streams and no tasks.

    Args:
        condition: What the helper's loop sleeps on; None where there is no helper.
    """

    def __init__(self, condition: threading.Condition | None = None) -> None:
        self.condition = condition
        self.first_since_s: float | None = None
        """When the first lane's present send began; None while it has none."""
        self.own_since_s: float | None = None
        """The same of the helper."""
        self.is_alert = False

    def is_first_stuck(self, now: float) -> bool:
        """Whether the first lane is in a slow send. Without a lock: a moment too early or late does no harm."""
        since_s = self.first_since_s
        return since_s is not None and now - since_s >= SLOW_S

    def is_hung(self, now: float) -> bool:
        """Whether the helper itself is in a send that may last for ever."""
        since_s = self.own_since_s
        return since_s is not None and now - since_s >= HUNG_S

    def may_take_all(self) -> bool:
        """Whether the helper may take whatever is next, and not slow streams alone; asked by the helper itself."""
        # Upstream's loop asks once more with the condition in its hands before it sleeps: an alert that came before is
        # seen then, the clock being read after the alert was taken back.
        self.is_alert = False
        # Beside a first lane that sleeps too: what the end of the helper's own send made ready nobody else knows of.
        return self.first_since_s is None or self.is_first_stuck(time.monotonic())

    def alert(self) -> None:
        """Wake the helper, once until it asks for a task. Never with the queue's lock in hand."""
        if self.condition is None or self.is_alert:
            return
        self.is_alert = True
        with self.condition:
            self.condition.notify()

    def wake(self) -> bool:
        """Alert the helper if the first lane is stuck, and say whether it was."""
        if self.condition is None or not self.is_first_stuck(time.monotonic()):
            return False
        self.alert()
        return True
