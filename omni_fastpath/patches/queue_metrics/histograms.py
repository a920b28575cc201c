"""The histograms, as plain numbers. ``/metrics`` and the state file read them.

prometheus_client's metrics are not used, because they take a lock and look up labels at each observation, which costs
too much here. Also, the values of a stage must reach the API process through the state file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

Sample = dict[str, Any]
"""A sample as ``omni_fastpath.declare.Metric`` describes it."""

WINDOW_S = 300.0


class Distribution:
    """A histogram. One thread writes it, and any thread reads it.

    Attributes:
        bounds: Inclusive upper bounds of all buckets but the last.
        counts: The number of values in each bucket.
        sum: The sum of all values.
    """

    __slots__ = ("_before", "_last", "_last_s", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._before = self._last = list(self.counts)
        self._last_s = monotonic()

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def sample(self, labels: Mapping[str, str]) -> Sample:
        """The current values, and in ``before`` the counts of five to ten minutes ago, if it is read that often."""
        counts = list(self.counts)
        if monotonic() - self._last_s >= WINDOW_S:
            self._before, self._last, self._last_s = self._last, counts, monotonic()
        return {"labels": dict(labels), "counts": counts, "sum": self.sum, "before": self._before}


class Distributions:
    """The histograms of several metrics, one for each combination of labels.

    Args:
        bounds: The bounds of each metric.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = bounds
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], Distribution] = {}

    def of(self, metric: str, **labels: str) -> Distribution:
        """The histogram with these labels. It is exported from this call on, so that a rate has a first value."""
        key = metric, tuple(labels.items())
        return self._found.get(key) or self._found.setdefault(key, Distribution(self._bounds[metric]))

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """All histograms, as pairs of metric and sample."""
        for (metric, labels), distribution in self._found.copy().items():  # a copy, because another thread may add some
            yield metric, distribution.sample(dict(labels))

    def clear(self) -> None:
        """Forget all values."""
        self._found.clear()
