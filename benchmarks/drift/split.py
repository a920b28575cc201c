"""A start's own noise, and what drifts from one start to the next."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Drift:
    """How a figure's logarithm varies over the starts of one arm.

    Attributes:
        apart: Its standard deviation over all starts.
        step: That of its step from one start to the next, about zero.
        noise: Of it, a start's own; NaN with fewer than three starts.
        walk: Of it, the step of what drifts; NaN with fewer than three starts.
    """

    apart: float
    step: float
    noise: float
    walk: float


def drift(values: Sequence[float]) -> Drift:
    """Split the variation of a figure, at least two starts in the order in which they ran; by moments.

    With noise of variance N and a walk whose step has variance W, steps have W + 2 N, and n starts
    N + W (n + 1) / 6. What comes out below zero is zero.
    """
    logarithms = [math.log(value) for value in values]
    count = len(values)
    apart = statistics.variance(logarithms)
    step = statistics.fmean((after - before) ** 2 for before, after in pairwise(logarithms))
    if count < 3:
        return Drift(math.sqrt(apart), math.sqrt(step), math.nan, math.nan)
    walk = min(max(0.0, (2 * apart - step) / ((count + 1) / 3 - 1)), step)
    noise = (step - walk) / 2
    return Drift(*(math.sqrt(variance) for variance in (apart, step, noise, walk)))
