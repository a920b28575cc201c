"""The table of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.server.figures import FIGURES
from benchmarks.server.measure import EVENT, FASTPATH, STOCK, Figures, Load, judge, judged
from omni_fastpath.compare import about, verdict

PAIRS = ((STOCK, FASTPATH), (EVENT, FASTPATH))


def show(found: Mapping[str, Sequence[Figures]], load: Load) -> None:
    """A row for each level and figure: each arm's median, the widest ratio of two of its starts, and verdicts."""
    rows = judged(load.levels)
    starts = max(len(each) for each in found.values())
    pairs = [(a, b) for a, b in PAIRS if a.name in found and b.name in found]
    verdicts = [judge(found, a, b, rows) for a, b in pairs]
    table = Table(
        title=f"Whole server on light engines, {load.replicas} replicas a stage, {load.tokens} text tokens, "
        f"{starts} starts an arm: median; A/A: widest ratio within an arm"
    )
    columns = ["streams", "figure", *found, "A/A", *(f"{b.name} / {a.name}" for a, b in pairs)]
    for column in columns:
        table.add_column(column, justify="left" if column == "figure" else "right")
    for level in load.levels:
        for name in FIGURES:
            values = {arm: [start[str(level)][name] for start in each] for arm, each in found.items()}
            medians = {arm: statistics.median(each) for arm, each in values.items()}
            widest = max(max(each) / min(each) if min(each) > 0 else 1.0 for each in values.values())
            cells = []
            for (a, b), said in zip(pairs, verdicts, strict=True):
                ratio = medians[b.name] / medians[a.name] if medians[a.name] else float("nan")
                row = rows.get((level, name))
                cells.append(f"{ratio:.2f}" + (f" {said[row.name]}" if row is not None else ""))
            shown = [f"{medians[arm]:.1f}" for arm in found]
            table.add_row(str(level), name, *shown, f"{widest:.2f}", *cells, end_section=name == FIGURES[-1])
    Console(width=190).print(table)
    print(verdict.legend(next(iter(rows.values())), len(rows) - 1, starts), about.line(), sep="\n")
