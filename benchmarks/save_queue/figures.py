"""From runs to figures: pooled quantiles of what the streams felt, ratios, and what two equal arms differ by."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FELT = {"TTFP p99": ("ttfp_s", 0.99), "E2E p99": ("e2e_s", 0.99), "largest gap p99": ("gap_s", 0.99)}
"""Figures of latency by name: which of a stream's values, and the quantile over all streams but the slow one."""
TOLERANCE = 1.05
"""A ratio up to this passes whatever two equal arms differ by."""
LEGEND = "ok: at most 1.05 times the baseline, which is both equal arms together; in A/A: no worse than they differ"
_DRAWS = 1000

Run = dict[str, Any]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1))]


def pooled(runs: Iterable[Run], figure: str) -> float:
    """A figure of `FELT` over the streams of all runs that are not slow, seconds."""
    value, share = FELT[figure]
    return quantile((stream[value] for run in runs for stream in run["streams"] if not stream["slow"]), share)


@dataclass(frozen=True)
class Comparison:
    """One figure of one arm beside the baseline, which is two equal arms together."""

    figure: str
    baseline: float
    value: float
    again: float
    """Ratio of the two equal arms, the greater to the smaller."""
    interval: tuple[float, float]
    """95 % interval of that ratio, runs drawn with repetition."""

    @property
    def ratio(self) -> float:
        """Value to baseline."""
        return self.value / self.baseline

    @property
    def verdict(self) -> str:
        """Whether the arm is no worse than what may be told apart."""
        if self.ratio <= TOLERANCE:
            return "ok"
        if self.ratio <= max(self.again, self.interval[1]):
            return "in A/A"
        return "WORSE"


def compare(figure: str, one: Sequence[Run], again: Sequence[Run], runs: Sequence[Run]) -> Comparison:
    """A figure of *runs* beside two equal arms."""
    first, second = pooled(one, figure), pooled(again, figure)
    return Comparison(
        figure,
        baseline=pooled([*one, *again], figure),
        value=pooled(runs, figure),
        again=max(first, second) / min(first, second),
        interval=_interval(figure, one, again),
    )


def _interval(figure: str, one: Sequence[Run], again: Sequence[Run]) -> tuple[float, float]:
    value, share = FELT[figure]
    draws = random.Random(1)
    columns = [
        [[stream[value] for stream in run["streams"] if not stream["slow"]] for run in runs] for runs in (one, again)
    ]
    ratios = []
    for _ in range(_DRAWS):
        first, second = (
            quantile((each for run in draws.choices(runs, k=len(runs)) for each in run), share) for runs in columns
        )
        ratios.append(second / first)
    return quantile(ratios, 0.025), quantile(ratios, 0.975)
