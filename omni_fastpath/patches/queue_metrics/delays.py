"""Delays of a whole process: late event loops, and garbage collections of Python's oldest generation.

These are plain numbers and not a prometheus_client ``Histogram``, because Python may call ``Pauses`` on a thread that
has locked a metric, and that thread would then wait for itself.
"""

from __future__ import annotations

import asyncio
from time import monotonic, perf_counter_ns
from weakref import WeakSet

from omni_fastpath.ledger import runtime

from .journey import SEEN

EVERY_S = 0.25
_OLDEST = 2
_guard = runtime("queue_metrics").guard("measuring a delay")

LOOPS: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""The measured event loops. A loop that is removed is no longer measured."""


def measure_lag(name: str) -> None:
    """Measure how late the running event loop runs a timer, four times per second, if it is not measured yet."""
    loop, lag = asyncio.get_running_loop(), SEEN.of("event_loop_lag_seconds", loop=name)

    def measure(due_s: float) -> None:
        with _guard:
            if loop in LOOPS:
                lag.observe(max(0.0, monotonic() - due_s))
                loop.call_later(EVERY_S, measure, monotonic() + EVERY_S)

    if loop not in LOOPS:
        LOOPS.add(loop)
        loop.call_later(EVERY_S, measure, monotonic() + EVERY_S)


class Pauses:
    """Measures how long collections of the oldest generation take, while it is one of ``gc.callbacks``."""

    def __init__(self) -> None:
        self._seen = SEEN.of("gc_pause_seconds")
        self._began_ns = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """``gc`` calls this before and after a collection of any generation. Only one runs at a time in a process."""
        with _guard:
            if info["generation"] != _OLDEST:
                return
            if phase == "start":
                self._began_ns = perf_counter_ns()
            elif self._began_ns:  # else it began before this was made
                self._seen.observe((perf_counter_ns() - self._began_ns) / 1e9)
