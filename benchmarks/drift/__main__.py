"""``python -m benchmarks.drift``."""

from __future__ import annotations

import argparse
import math
import statistics

from rich.console import Console
from rich.table import Table

import benchmarks.drift
from benchmarks.concurrency.measure import FIGURES, STOCK, run
from benchmarks.drift.split import drift
from omni_fastpath.compare import about

STARTS = 10
LEVEL = 4
"""Requests at a time: far from what the server can do, and all stages are at work."""


def main() -> None:
    """Run the starts and print a row for each figure."""
    parser = argparse.ArgumentParser(
        description=benchmarks.drift.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
