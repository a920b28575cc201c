"""The table of two arms on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_fastpath.tools.ab.rows import Row


def print_table(
    console: Console, columns: Sequence[str], found: Sequence[Row], cells: Callable[[Row], Sequence[str]]
) -> None:
    """The rows in their groups, coloured by their verdicts; *cells* has one for each of the columns.

    Names are users' own: a square bracket in them is no markup.
    """
    table = Table(box=None if not console.is_terminal else Table().box, padding=(0, 1))
    for place, name in enumerate(columns):
        last = name == "verdict"
        table.add_column(Text(name), justify="left" if place == 0 or last else "right", no_wrap=not console.is_terminal)
    for group, rows in groupby(found, key=lambda row: row.measure.group):
        table.add_row(Text(group), style="bold")
        *_, last_row = of_group = list(rows)
        for row in of_group:
            style = {"better": "green", "worse": "red"}.get(row.verdict.word) if row.verdict is not None else None
            words = (Text(f"  {cell}" if place == 0 else cell) for place, cell in enumerate(cells(row)))
            table.add_row(*words, style=style, end_section=row is last_row)
    console.print(table)
