"""What samples of a process's memory come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """How memory went, MiB.

    Attributes:
        after_quarter: Median of the third eighth of the samples.
        end: Median of the last eighth.
        most: Greatest sample.
        per_hour: Slope of a straight line through the samples after the first quarter, MiB an hour.
    """

    after_quarter: float
    end: float
    most: float
    per_hour: float


def growth(samples: Sequence[tuple[float, float]]) -> Growth:
    """Sum up samples of (seconds, MiB), in order of time.

    Raises:
        ValueError: Fewer than eight samples.
    """
    if len(samples) < 8:
        raise ValueError(f"samples: found {len(samples)}, allowed: 8 or more")
    eighth = len(samples) // 8
    later = samples[2 * eighth :]
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope
    values = [value for _, value in samples]
    return Growth(
        after_quarter=statistics.median(values[2 * eighth : 3 * eighth]),
        end=statistics.median(values[-eighth:]),
        most=max(values),
        per_hour=slope * 3600,
    )
