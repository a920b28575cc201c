"""When the calm ends, and when it has been quiet for long enough to begin again."""

from __future__ import annotations

import time

from .calm import Calm, CalmBytes
from .fair import FairQueue
from .plain import PlainQueue

_JUDGE_S = 0.05


class Judge:
    """Judges once before each step, on the scheduler's thread.

    Args:
        calm: What ends it.
        nbytes: Bytes on their way while all is calm.
        fair: The managed queue; it knows which sends are slow in either mode.
    """

    def __init__(self, calm: Calm, nbytes: CalmBytes, fair: FairQueue) -> None:
        self.unrest_s = 0.0
        """When there was unrest last, monotonic seconds."""
        self.next_s = 0.0
        """When a managed queue is judged again."""
        self._calm = calm
        self._bytes = nbytes
        self._fair = fair

    def is_still_calm(self, plain: PlainQueue) -> bool:
        """Whether one deque does. A few comparisons: it runs in each step."""
        waiting, is_old = plain.step()
        if is_old or waiting >= self._calm.tasks:
            return False
        since_s = plain.since_s
        if since_s is not None and self._fair.slow.first.look(since_s, time.monotonic()):
            return False
        return self._bytes.is_light(plain.inbox, waiting)

    def is_due(self, now: float) -> bool:
        """Whether a managed queue is to be judged."""
        if self._calm.steps < 1 or now < self.next_s:
            return False
        self.next_s = now + min(_JUDGE_S, self._calm.quiet_s)
        return True

    def is_anybody_slow(self, now: float, *, is_holding: bool) -> bool:
        """Whether a send is slow, or a stream that waits, or one is held; not under the lock."""
        self._fair.look_at_lanes(now)
        if is_holding or self._fair.slow.is_anybody_slow:
            self.unrest_s = now
            return True
        return False

    def may_be_calm(self, now: float, deepest: int) -> bool:
        """Under the lock: whether one deque will do, no stream having more tasks than ``deepest``."""
        fair, calm = self._fair, self._calm
        if deepest >= calm.steps or fair.waiting >= calm.tasks or self._bytes.is_too_much_to_begin(fair.account.nbytes):
            self.unrest_s = now
            return False
        return now - self.unrest_s >= calm.quiet_s and not fair.lanes.is_busy()
