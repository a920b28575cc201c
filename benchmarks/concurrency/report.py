"""The table of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.concurrency.measure import ARMS, FIGURES, JUDGED, LEVELS, PRIMARY, STOCK, judge
from benchmarks.rigs.whole_server import Figures, widest
from omni_fastpath.compare import about, verdict


def show(found: Mapping[str, Sequence[Figures]]) -> None:
    """A row for each level and figure: medians, their ratio, how far two starts of one arm lie apart, and verdicts."""
    starts = len(found[STOCK.name])
    table = Table(title=f"Whole server, {starts} starts an arm: median; A/A: widest ratio within an arm")
    for column in ("concurrency", "figure", *(arm.name for arm in ARMS), "ratio", "A/A", "verdict"):
        table.add_column(column, justify="left" if column in ("figure", "verdict") else "right")
    verdicts = judge(found)
    for level in LEVELS:
        for name in FIGURES:
            runs = [[start[str(level)][name] for start in found[arm.name]] for arm in ARMS]
            stock, fast = (statistics.median(each) for each in runs)
            row = JUDGED.get((str(level), name))
            table.add_row(
                str(level),
                name,
                f"{stock:.1f}",
                f"{fast:.1f}",
                f"{fast / stock:.2f}",
                f"{widest(runs):.2f}",
                str(verdicts[row.name]) if row is not None else "",
                end_section=name == FIGURES[-1],
            )
    Console(width=150).print(table)
    print(verdict.legend(PRIMARY, len(JUDGED) - 1, starts), about.line(), sep="\n")
