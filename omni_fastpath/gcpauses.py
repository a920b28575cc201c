"""How long this process stood still while Python looked through its oldest generation, as the metrics show it.

prometheus_client counts collections (``python_gc_collections_total``) and says nothing about how long they took. Such a
collection holds the interpreter's lock from beginning to end: nobody's audio moves meanwhile.

Its own ``Histogram`` cannot be used here. Python may call us while that very thread holds a metric's lock, for all
metrics one in multiprocess mode, and would wait for itself for ever. Hence plain numbers, which a scrape reads.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from time import perf_counter_ns
from typing import Any

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the histogram's buckets but the last, seconds."""

_OLDEST = 2


class Pauses:
    """Watches the collections of the oldest generation; start-up's, from the first look on, are among them.

    Called by ``gc.callbacks`` before and after each collection of any generation, on whichever thread it happens: one
    runs at a time in a process.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_ns = 0
        self._began_ns = 0
        self._watching = False

    def watch(self) -> None:
        """Begin; a second call does nothing."""
        if not self._watching:
            self._watching = True
            gc.callbacks.append(self)

    def stop(self) -> None:
        """Look no more; what was seen stays."""
        if self._watching:
            self._watching = False
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Hundreds of young ones a second come by here; the pause is measured for the oldest alone."""
        if info["generation"] != _OLDEST:
            return
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif self._began_ns:  # it did not begin before we looked
            took_ns, self._began_ns = perf_counter_ns() - self._began_ns, 0
            self._counts[bisect_left(BOUNDS_S, took_ns / 1e9)] += 1
            self._total_ns += took_ns

    def snapshot(self) -> dict[str, Any] | None:
        """``counts`` by bucket, those of longer pauses last, and ``seconds`` in all; None before the first look."""
        if not self._watching:
            return None
        return {"counts": list(self._counts), "seconds": self._total_ns / 1e9}


PAUSES = Pauses()
"""This process's."""
