"""What samples of a process's memory come to."""

from __future__ import annotations

import pytest

from benchmarks.memory.growth import growth


def test_growth_is_told_after_the_first_quarter() -> None:
    """A steep start and then 12 MiB an hour: the slope is that of what comes after."""
    samples = [(60.0 * minute, 500 + 20 * min(minute, 10) + 0.2 * max(0, minute - 10)) for minute in range(64)]
    grown = growth(samples)
    assert grown.per_hour == pytest.approx(12)
    assert grown.most == samples[-1][1]
    assert grown.after_quarter == pytest.approx(700 + 0.2 * (19.5 - 10))
    assert grown.end == pytest.approx(700 + 0.2 * (59.5 - 10))


def test_too_few_samples_are_refused() -> None:
    """Seven say nothing of a slope."""
    with pytest.raises(ValueError, match="samples: found 7, allowed: 8 or more"):
        growth([(float(second), 1.0) for second in range(7)])
