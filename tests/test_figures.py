"""Plain numbers for ``/metrics``."""

from __future__ import annotations

import pytest

from omni_fastpath import figures
from omni_fastpath.figures import Distribution, Recent


def test_a_value_that_is_a_bound_is_below_it() -> None:
    """A value that equals a bound is in its bucket, and larger values than the last bound have their own bucket."""
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        found.observe(value)
    assert found.sample({"loop": "one"}) == {"labels": {"loop": "one"}, "counts": [2, 2, 1], "sum": 7.5}


def test_a_recent_sample_has_what_was_there_five_minutes_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample has the counts of five minutes ago, however often it is read, and none while it is younger."""
    now = [0.0]
    monkeypatch.setattr(figures, "monotonic", lambda: now[0])
    found = Recent((1.0,))
    ages, before = [], []
    for _ in range(200):
        now[0] += 4
        sample = found.sample({})
        ages.append(sample["window_s"])
        before.append(sum(sample["before"]))
        found.observe(0.5)
    assert ages[:70] == [4.0 * n for n in range(1, 71)]
    assert before[:70] == [0] * 70
    assert all(300 <= age <= 360 for age in ages[90:])
    assert [now - age / 4 for now, age in zip(range(91, 201), ages[90:], strict=True)] == [n + 1 for n in before[90:]]
    assert found.sample({"loop": "one"})["labels"] == {"loop": "one"}
    assert sample["bounds"] == [1.0]
