"""How the loop lets others use the orchestrator's thread: it sleeps until it is woken, and yields after work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sized

YIELD_TURNS = 16
"""Most turns of the event loop in a yield, which ends as soon as no other task is ready. After three turns the data of
a socket is in the client's queue: in the first turn the selector finds it, in the second its handler runs, and in the
third vLLM's reader runs. From upstream's queue to a stage's socket a request takes a dozen."""

BLIND_TURNS = 3
"""Turns in a yield where the event loop does not tell what is ready."""


class Wakeup:
    """Sleeps and yields of one loop, on the event loop that runs when this is made."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # asyncio's own list of callbacks that are about to run. Other event loops have none.
        self._scheduled: Sized | None = getattr(self._loop, "_ready", None)

    async def sleep(self, seconds: float) -> None:
        """Sleep until ``wake`` is called, or for this many seconds."""
        self._woken.clear()
        timer = self._loop.call_later(seconds, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    def wake(self) -> None:
        """End a sleep. Call it on the event loop's thread."""
        self._woken.set()

    def wake_from_any_thread(self) -> None:
        """Do the same on any thread."""
        with contextlib.suppress(RuntimeError):  # another thread has closed the loop meanwhile
            self._loop.call_soon_threadsafe(self._woken.set)

    async def yield_turns(self) -> None:
        """Let the other tasks of the event loop run, so that upstream reads its sockets."""
        scheduled = self._scheduled
        for _ in range(BLIND_TURNS if scheduled is None else YIELD_TURNS):
            await asyncio.sleep(0)
            if scheduled is not None and not scheduled:
                break
