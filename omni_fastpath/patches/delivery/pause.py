"""The pause of outputs while requests are on their way in: how long, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from time import perf_counter_ns

TICK_S = 0.001
"""How long the drain sleeps at a time. Rendering and tokenizing run in other threads and need the interpreter lock, and
a turn of the event loop without a sleep releases it only for an instant."""

LONGEST_NS = 5_000_000
"""Longest pause, apart from the rest of its last tick."""

LEAST_NS = 2_000_000
"""A shorter pause is not begun, because each ends a batch of outputs and small batches cost throughput."""

PRICE = 2
"""For each unit of time in a pause, outputs get this many, which is two thirds of all time."""


class Pause:
    """Lets one drain wait while requests are on their way.

    Pauses are paid from a budget that grows while outputs are delivered, up to one longest pause. So an endless stream
    of requests, served or refused, gets its share of the time and no more.

    Args:
        requests: The requests that are on their way.
        counters: The patch's counters.
        clock: In nanoseconds.
    """

    def __init__(
        self, requests: Collection[object], counters: dict[str, int], clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self._requests = requests
        self._counters = counters
        self._clock = clock
        self._budget_ns = LONGEST_NS
        self._ended_ns = clock()

    async def before_output(self) -> None:
        """Wait until no request is on its way, for as long as the budget allows."""
        if not self._requests:
            return
        began_ns = now_ns = self._clock()
        budget_ns = min(self._budget_ns + (began_ns - self._ended_ns) // PRICE, LONGEST_NS)
        if budget_ns < LEAST_NS:
            return
        while self._requests and now_ns - began_ns < budget_ns:
            await asyncio.sleep(TICK_S)
            now_ns = self._clock()
        waited_ns = now_ns - began_ns
        self._budget_ns, self._ended_ns = budget_ns - waited_ns, now_ns
        self._counters["waits"] += 1
        self._counters["waited_us"] += waited_ns // 1000
