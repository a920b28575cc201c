"""How long the process stood still for each collection of Python's oldest generation.

Plain numbers, not a prometheus_client ``Histogram``: Python may call back on a thread that holds a metric's lock, which
would then wait for itself.
"""

from __future__ import annotations

import gc
from time import perf_counter_ns

from omni_fastpath.figures import Distribution

from .bounds import LAG_S

_OLDEST = 2


class Pauses:
    """Times collections of the oldest generation between ``start`` and ``stop``.

    Attributes:
        seen: How long they took, seconds.
    """

    def __init__(self) -> None:
        self.seen = Distribution(LAG_S)
        self._began_ns = 0

    @property
    def is_watching(self) -> bool:
        """Whether Python calls it."""
        return self in gc.callbacks

    def start(self) -> None:
        """Observe from now on; a second call changes nothing."""
        if not self.is_watching:
            gc.callbacks.append(self)

    def stop(self) -> None:
        """Observe no more, and forget what was seen."""
        if self.is_watching:
            gc.callbacks.remove(self)
        self.seen = Distribution(LAG_S)
        self._began_ns = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called by ``gc`` before and after a collection of any generation; one runs at a time in a process."""
        if info["generation"] != _OLDEST:
            return
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif self._began_ns:  # else it began before we observed
            self.seen.observe((perf_counter_ns() - self._began_ns) / 1e9)
            self._began_ns = 0
