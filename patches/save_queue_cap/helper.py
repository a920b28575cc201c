"""When the helper lane works: upstream's second ``save_loop``, on a thread of ours.

Two lanes that work all the time only fight for the interpreter's lock. So the helper takes tasks while the first lane
sleeps or is in a slow send, and always those of streams whose sends are known to be slow, which the first lane leaves
to it. Who wakes it is the first lane where it knows, the scheduler's thread where it does not, and at the latest the
helper itself, which upstream's loop wakes every 0.1 s.
"""

from __future__ import annotations

import threading
import time

from . import slow

HUNG_S = 1.0
"""The helper's send that lasts longer may last for ever: the first lane serves slow streams too, where it has nothing
else to do."""


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
        return since_s is not None and now - since_s >= slow.SLOW_S

    def first_begins(self, now: float, *, is_quick: bool) -> bool:
        """The first lane begins a send; whether it may be slow, and what else is ready should not wait for it."""
        self.first_since_s = now if is_quick else now - slow.SLOW_S
        return not is_quick

    def took(self, *, is_first: bool) -> None:
        """A lane has taken its task."""
        if not is_first:
            self.own_since_s = time.monotonic()
        elif self.first_since_s is None:  # what was reserved for it when the calm ended
            self.first_since_s = time.monotonic()

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

    def alert_if_first_is_stuck(self) -> None:
        """On the scheduler's thread, where tasks come: alert the helper if the first lane is in a slow send."""
        if self.condition is not None and not self.is_alert and self.is_first_stuck(time.monotonic()):
            self.alert()

    def wake(self) -> bool:
        """Alert the helper if the first lane is stuck, and say whether it was."""
        if self.condition is None or not self.is_first_stuck(time.monotonic()):
            return False
        self.alert()
        return True
