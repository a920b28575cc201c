"""How late an event loop calls what is due: whatever it does meanwhile, everybody else waits as long."""

from __future__ import annotations

import asyncio
from time import monotonic

from omni_fastpath.figures import Distribution

from .bounds import LAG_S

EVERY_S = 0.25


class Lag:
    """Looks at one event loop four times a second, until it is stopped or the loop ends.

    Attributes:
        name: Whose event loop it is.
        seen: How late its looks were, seconds.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.seen = Distribution(LAG_S)
        self._loop: asyncio.AbstractEventLoop | None = loop
        self._due_s = 0.0
        self._wait()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it looks at this one."""
        return self._loop is loop

    def stop(self) -> None:
        """Look no more; what was seen stays."""
        self._loop = None

    def let_go(self) -> None:
        """Keep no event loop that is closed; it calls nothing any more."""
        loop = self._loop
        if loop is not None and loop.is_closed():
            self._loop = None

    def _wait(self) -> None:
        if self._loop is not None:
            self._due_s = monotonic() + EVERY_S
            self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        if self._loop is not None:
            self.seen.observe(max(0.0, monotonic() - self._due_s))
            self._wait()
