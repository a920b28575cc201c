"""Plain numbers for ``/metrics``."""

from __future__ import annotations

from omni_fastpath.figures import Distribution, gauge


def test_a_value_that_is_a_bound_is_below_it() -> None:
    """As Prometheus' ``le`` has it; what is above the last has a bucket of its own."""
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        found.observe(value)
    assert found.sample({"loop": "one"}) == {"labels": {"loop": "one"}, "counts": [2, 2, 1], "sum": 7.5}


def test_a_sample_does_not_change() -> None:
    """What was read stays as it was read."""
    found, labels = Distribution((1.0,)), {"stage": "0"}
    sample = found.sample(labels)
    found.observe(0.0)
    labels["stage"] = "1"
    assert sample == {"labels": {"stage": "0"}, "counts": [0, 0], "sum": 0.0}
    assert gauge({"stage": "0"}, 3) == {"labels": {"stage": "0"}, "value": 3}
