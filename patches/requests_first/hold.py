"""Outputs on their way out wait for requests on their way in: how long, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from time import perf_counter_ns

TICK_S = 0.001
"""How long the event loop is left to others at a time: whoever renders and tokenises in another thread needs the
interpreter's lock, which a turn without a wait gives away for an instant only."""

LONGEST_NS = 5_000_000
"""Longest wait of an output for requests, but for the end of a tick."""

LEAST_NS = 2_000_000
"""A wait of less is not begun: each ends a batch of outputs, and small batches cost throughput."""

PRICE = 2
"""Time that outputs have for each unit of time that they waited: two thirds of all time are theirs."""


class Hold:
    """Lets one drain wait while requests are on their way.

    Waits are paid from an account that fills while outputs are handed out, and holds one longest wait: what arrives
    endlessly, good or refused, gets its share of the time and no more.

    Args:
        requests: Those on their way.
        counters: The patch's counters.
        clock: In nanoseconds.
    """

    def __init__(
        self, requests: Collection[object], counters: dict[str, int], clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._account_ns = LONGEST_NS
        self._ended_ns = clock()

    async def before_output(self) -> None:
        """Wait until no request is on its way, as long as the account pays for it."""
        if not self._requests:
            return
        began_ns = now_ns = self._clock()
        account_ns = min(self._account_ns + (began_ns - self._ended_ns) // PRICE, LONGEST_NS)
        if account_ns < LEAST_NS:
            return
        while self._requests and now_ns - began_ns < account_ns:
            await asyncio.sleep(TICK_S)
            now_ns = self._clock()
        waited_ns = now_ns - began_ns
        self._account_ns, self._ended_ns = account_ns - waited_ns, now_ns
        self._counters["waits"] += 1
        self._counters["waited_us"] += waited_ns // 1000
        self._counters["cut_short"] += bool(self._requests)
