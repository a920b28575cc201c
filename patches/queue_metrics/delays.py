"""What delays a whole process: event loops that are late, and collections of Python's oldest generation.

Plain numbers, not a prometheus_client ``Histogram``: Python may call ``Pauses`` on a thread that holds a metric's lock,
which would then wait for itself.
"""

from __future__ import annotations

import asyncio
import gc
from time import monotonic, perf_counter_ns

from omni_fastpath.figures import Distribution
from omni_fastpath.ledger import runtime

from . import DELAY_S

EVERY_S = 0.25
_measuring = runtime("queue_metrics").guard("measuring an event loop's lag")
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
        with _measuring:
            if not self._is_stopped:
                self.seen.observe(max(0.0, monotonic() - due_s))
                self._wait(loop)


class Pauses:
    """Measures how long collections of the oldest generation take, until it is stopped."""

    metric = "gc_pause_seconds"

    def __init__(self) -> None:
        self.labels = dict[str, str]()
        self._seen = Distribution(DELAY_S)
        self._error: Exception | None = None
        self._began_ns = 0
        gc.callbacks.append(self)

    @property
    def seen(self) -> Distribution:
        """How long they took, seconds.

        Raises:
            Exception: What the measurement ended with.
        """
        if self._error is not None:
            raise self._error
        return self._seen

    def stop(self) -> None:
        """Measure no more; a second call changes nothing."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called by ``gc`` before and after a collection of any generation; one runs at a time in a process.

        It may interrupt code that has a lock, so that an exception ends the measurement and is raised by ``seen``.
        """
        try:
            if info["generation"] == _OLDEST and not self._error:
                self._time(phase)
        except Exception as error:
            self._error = error

    def _time(self, phase: str) -> None:
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif self._began_ns:  # else it began before this was made
            self._seen.observe((perf_counter_ns() - self._began_ns) / 1e9)
