"""Histograms and gauges of patches, as plain numbers. ``/metrics`` and the state file read them.

prometheus_client's metrics are not used, because they take a lock and look up labels at each observation, which costs
too much here. Also, the values of a stage must reach the API process through the state file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

Sample = dict[str, Any]
"""``labels``, and either ``counts`` per bucket with their ``sum``, or a ``value``."""


class Distribution:
    """A histogram. One thread writes it, and any thread reads it.

    Attributes:
        bounds: Inclusive upper bounds of all buckets but the last.
        counts: The number of values in each bucket.
        sum: The sum of all values.
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
        """The current values."""
        return {"labels": dict(labels), "counts": list(self.counts), "sum": self.sum}


class Recent(Distribution):
    """A histogram whose samples also contain the counts of five minutes ago, so that one sample shows recent values."""

    WINDOW_S, _EVERY_S = 300.0, 30.0

    __slots__ = ("_past",)

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._past = deque([(monotonic(), list(self.counts))], maxlen=int(self.WINDOW_S / self._EVERY_S) + 1)

    def sample(self, labels: Mapping[str, str]) -> Sample:
        """The current values, and in ``before`` the counts at the start of the window, ``window_s`` seconds ago."""
        now_s, now = monotonic(), super().sample(labels)
        if now_s - self._past[-1][0] >= self._EVERY_S:
            self._past.append((now_s, now["counts"]))
        since_s, before = self._past[0]
        return {**now, "bounds": list(self.bounds), "before": before, "window_s": now_s - since_s}


class Distributions:
    """The histograms of several metrics, one for each combination of labels.

    Args:
        bounds: The bounds of each metric.
        recent: The metrics whose histograms are ``Recent``.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]], recent: Sequence[str] = ()) -> None:
        self._bounds, self._recent = bounds, recent
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], Distribution] = {}

    def of(self, metric: str, **labels: str) -> Distribution:
        """The histogram with these labels. It is exported from this call on, so that a rate has a first value."""
        key, kind = (metric, tuple(labels.items())), Recent if metric in self._recent else Distribution
        return self._found.get(key) or self._found.setdefault(key, kind(self._bounds[metric]))

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """All histograms, as pairs of metric and sample."""
        for (metric, labels), distribution in self._found.copy().items():  # a copy, because another thread may add some
            yield metric, distribution.sample(dict(labels))

    def clear(self) -> None:
        """Forget all values."""
        self._found.clear()


def gauge(labels: Mapping[str, str], value: float) -> Sample:
    """The sample of a gauge."""
    return {"labels": dict(labels), "value": value}
