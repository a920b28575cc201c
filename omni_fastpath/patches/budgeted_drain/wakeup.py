"""How the loop lets others use the orchestrator's thread: it sleeps until it is woken, and yields after work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sized
from time import perf_counter_ns

YIELD_TURNS = 16
"""Most turns of the event loop in a yield, which ends as soon as no other task is ready. After three turns the data of
a socket is in the client's queue: in the first turn the selector finds it, in the second its handler runs, and in the
third vLLM's reader runs. From upstream's queue to a stage's socket a request takes a dozen."""

BLIND_TURNS = 3
"""Turns in a yield where the event loop does not tell what is ready."""


class Wakeup:
    """Sleeps and yields of one loop.

    Args:
        counters: The patch's counters.

    Attributes:
        ended_ns: When the last sleep or yield ended.
    """

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled: Sized | None = None
        self.ended_ns = 0

    def begin(self) -> None:
        """Begin on the running event loop."""
        self._loop = asyncio.get_running_loop()
        # asyncio's own list of callbacks that are about to run. Other event loops have none.
        self._scheduled = getattr(self._loop, "_ready", None)
        self.ended_ns = perf_counter_ns()

    async def sleep(self, seconds: float) -> None:
        """Sleep until ``wake`` is called, or for this many seconds."""
        self._note_stretch(perf_counter_ns())
        self._woken.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
        self._counters["wakeups"] += 1
        self.ended_ns = perf_counter_ns()

    def wake(self) -> None:
        """End a sleep. Call it on the event loop's thread."""
        self._woken.set()

    def wake_from_any_thread(self) -> None:
        """Do the same on any thread. It has no effect before the loop has begun."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # another thread has closed the loop meanwhile
                self._loop.call_soon_threadsafe(self._woken.set)

    async def yield_turns(self) -> None:
        """Let the other tasks of the event loop run, so that upstream reads its sockets."""
        began_ns = perf_counter_ns()
        self._note_stretch(began_ns)
        scheduled = self._scheduled
        for _ in range(BLIND_TURNS if scheduled is None else YIELD_TURNS):
            await asyncio.sleep(0)
            if scheduled is not None and not scheduled:
                break
        self.ended_ns = perf_counter_ns()
        away_us = (self.ended_ns - began_ns) // 1000
        self._counters["longest_away_us"] = max(self._counters["longest_away_us"], away_us)

    def _note_stretch(self, now_ns: int) -> None:
        stretch_us = (now_ns - self.ended_ns) // 1000
        self._counters["longest_stretch_us"] = max(self._counters["longest_stretch_us"], stretch_us)
