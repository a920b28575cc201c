"""What delays a whole process: event loops that are late, and collections of Python's oldest generation.

Plain numbers, not a prometheus_client ``Histogram``: Python may call ``Pauses`` on a thread that holds a metric's lock,
which would then wait for itself.
"""

from __future__ import annotations

import asyncio
import gc
from time import monotonic, perf_counter_ns

from omni_fastpath.figures import Distribution

from . import DELAY_S

EVERY_S = 0.25
_OLDEST = 2


class Lag:
    """Measures how late one event loop calls what is due, four times a second, until it is stopped.

    Args:
        name: Of the event loop, for the label.
        loop: The event loop; nothing but its own timer keeps this object's reference to it.

    Attributes:
        seen: How late its timer was, seconds.
    """

    metric = "event_loop_lag_seconds"

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.labels = {"loop": name}
        self.seen = Distribution(DELAY_S)
        self._is_stopped = False
        self._wait(loop)

    def stop(self) -> None:
        """Measure no more."""
        self._is_stopped = True

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(EVERY_S, self._look, loop, monotonic() + EVERY_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if not self._is_stopped:
            self.seen.observe(max(0.0, monotonic() - due_s))
            self._wait(loop)


class Pauses:
    """Measures how long collections of the oldest generation take, until it is stopped.

    Attributes:
        seen: How long they took, seconds.
    """

    metric = "gc_pause_seconds"

    def __init__(self) -> None:
        self.labels = dict[str, str]()
        self.seen = Distribution(DELAY_S)
        self._began_ns = 0
        gc.callbacks.append(self)

    def stop(self) -> None:
        """Measure no more; a second call changes nothing."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called by ``gc`` before and after a collection of any generation; one runs at a time in a process."""
        if info["generation"] != _OLDEST:
            return
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif self._began_ns:  # else it began before this was made
            self.seen.observe((perf_counter_ns() - self._began_ns) / 1e9)
