"""From runs to figures: pooled quantiles of what the streams felt, ratios, and what two equal arms differ by."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_fastpath.tools.ab.quantiles import quantile

FELT = {"TTFP p99": ("ttfp_s", 0.99), "E2E p99": ("e2e_s", 0.99), "largest gap p99": ("gap_s", 0.99)}
"""Figures of latency by name: which of a stream's values, and the quantile over all streams but the slow one."""
LEGEND = (
    "ratios are to the baseline, both equal arms together; A/A: of the equal arms' own ratio 95 %, runs drawn with "
    "repetition. They describe: an arm is one process, and its runs share its luck"
)
_DRAWS = 1000

Run = dict[str, Any]


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
