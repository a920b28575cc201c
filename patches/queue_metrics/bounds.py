"""The buckets of the histograms, seconds."""

from __future__ import annotations

RESIDENCE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""From a raw output that is routed at once to one behind all others of an overloaded server."""

DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Of an event loop's lag and a collection's pause."""
