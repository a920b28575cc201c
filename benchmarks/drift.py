"""What a figure varies by when nothing is changed: starts of one arm, and what drifts from one to the next.

    python -m benchmarks.drift --starts 10

Stock at a light load, one server after another. A figure's logarithm is taken for the sum of a walk, which drifts from
start to start, and of noise that each start has by itself; the two deviations are what the simulation in
tests/compare/test_verdict.py assumes (DRIFT_SIGMA, START_SIGMA).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from benchmarks.concurrency import FIGURES, STOCK, run
from omni_fastpath.compare import about

STARTS = 10
LEVEL = 4
"""Requests at a time: far from what the server can do, and all stages are at work."""


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


def main() -> None:
    """Run the starts and print a row for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS)
    starts = parser.parse_args().starts
    if starts < 2:
        parser.error(f"--starts: found {starts}, allowed: 2 or more")
    found = run("drift", [STOCK], starts, [LEVEL])[STOCK.name]
    table = Table(title=f"{starts} starts of stock, {LEVEL} at a time: standard deviations of the logarithm")
    for column in ("figure", "median", "of starts", "of steps", "a start's own", "of the drift"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name in FIGURES:
        values = [start[str(LEVEL)][name] for start in found]
        split = drift(values)
        sigmas = (split.apart, split.step, split.noise, split.walk)
        table.add_row(
            name, f"{statistics.median(values):.1f}", *("-" if math.isnan(each) else f"{each:.3f}" for each in sigmas)
        )
    Console(width=110).print(table)
    print(about.line())


if __name__ == "__main__":
    main()
