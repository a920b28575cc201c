"""When a refused client should ask again."""

from __future__ import annotations

import math
from collections.abc import Callable

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
