"""The histograms of ``queue_metrics``."""

from __future__ import annotations

import pytest

from omni_fastpath.patches.queue_metrics import histograms
from omni_fastpath.patches.queue_metrics.histograms import Distribution


def test_a_sample_has_what_was_counted_and_what_was_there_some_minutes_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that equals a bound is in its bucket. ``before`` is five to ten minutes old, however often it is read."""
    now = [0.0]
    monkeypatch.setattr(histograms, "monotonic", lambda: now[0])
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        found.observe(value)
    assert found.sample({"loop": "one"}) == {
        "labels": {"loop": "one"},
        "counts": [2, 2, 1],
        "sum": 7.5,
        "before": [0] * 3,
    }
    ages = []
    for _ in range(400):
        now[0] += 4
        ages.append(now[0] / 4 + 5 - sum(found.sample({})["before"]))
        found.observe(0.5)
    assert all(75 <= age <= 151 for age in ages[151:])
