"""The one definition of a quantile that figures of ours have."""

from __future__ import annotations

import math
from collections.abc import Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linear between neighbours; NaN of nothing.

    Definition 7 of Hyndman and Fan (The American Statistician, 1996), which is numpy's default.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    if ordered[above] == ordered[below]:  # infinities too, whose difference is no number
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
