"""What a patch has for ``/metrics`` besides counters: plain numbers, which a scrape and the state file read.

Not prometheus_client's own metrics. Those take a lock and look labels up at each observation, which is more than what
is observed may cost; and what a stage has must come to the API process, through its state file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

Sample = dict[str, Any]
"""``labels``, and ``counts`` by bucket with their ``sum``, or a ``value``."""


class Distribution:
    """How many values fell into each bucket; one thread observes, and any reads.

    Attributes:
        bounds: Upper ends of the buckets but the last; a value that is one belongs below it.
        counts: Of each bucket.
        sum: Of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def sample(self, labels: Mapping[str, str]) -> Sample:
        """What it has now."""
        return {"labels": dict(labels), "counts": list(self.counts), "sum": self.sum}


def gauge(labels: Mapping[str, str], value: float) -> Sample:
    """One value."""
    return {"labels": dict(labels), "value": value}
