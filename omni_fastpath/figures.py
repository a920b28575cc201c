"""What a patch has for ``/metrics`` besides counters: plain numbers, which a scrape and the state file read.

Not prometheus_client's own metrics. Those take a lock and look labels up at each observation, which is more than what
is observed may cost; and what a stage has must come to the API process, through its state file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
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


class Recent(Distribution):
    """A distribution whose samples also have what it had five minutes ago, for those who look only once."""

    WINDOW_S, _EVERY_S = 300.0, 30.0

    __slots__ = ("_past",)

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._past = deque([(monotonic(), list(self.counts))], maxlen=int(self.WINDOW_S / self._EVERY_S) + 1)

    def sample(self, labels: Mapping[str, str]) -> Sample:
        """What it has now; ``before`` is what it had at the beginning of the window, which was ``window_s`` ago."""
        now_s, now = monotonic(), super().sample(labels)
        if now_s - self._past[-1][0] >= self._EVERY_S:
            self._past.append((now_s, now["counts"]))
        since_s, before = self._past[0]
        return {**now, "bounds": list(self.bounds), "before": before, "window_s": now_s - since_s}


class Distributions:
    """The distributions of several metrics, by labels.

    Args:
        bounds: By metric.
        recent: The metrics whose distributions are ``Recent``.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]], recent: Sequence[str] = ()) -> None:
        self._bounds, self._recent = bounds, recent
        self._found: dict[tuple[str, tuple[tuple[str, str], ...]], Distribution] = {}

    def of(self, metric: str, **labels: str) -> Distribution:
        """The one with these labels; it is shown from the first call on, else a rate would miss its first value."""
        key, kind = (metric, tuple(labels.items())), Recent if metric in self._recent else Distribution
        return self._found.get(key) or self._found.setdefault(key, kind(self._bounds[metric]))

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """All of them, each after its metric."""
        for (metric, labels), distribution in self._found.copy().items():  # in one step: another thread may add some
            yield metric, distribution.sample(dict(labels))

    def clear(self) -> None:
        """Begin again from nothing."""
        self._found.clear()


def gauge(labels: Mapping[str, str], value: float) -> Sample:
    """One value."""
    return {"labels": dict(labels), "value": value}
