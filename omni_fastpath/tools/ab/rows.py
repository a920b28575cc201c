"""A table of measures over the starts of two arms, with the verdicts.

This module knows nothing about servers. A start is any object that has an arm and that the measures can read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.verdict import Measure, Verdict

ARMS = ("stock", "fastpath")
"""The default baseline and the default other arm."""


class AStart(Protocol):
    """The measurements of one start of a server."""

    @property
    def arm(self) -> str:
        """The name of its arm."""


@dataclass(frozen=True)
class Row:
    """One measure over all starts.

    Attributes:
        measure: The measure.
        values: A value per start, for the baseline and then for the other arm.
        verdict: The verdict. None if the measure was not chosen for one, or a start has no value.
    """

    measure: Measure
    values: dict[str, list[float]]
    verdict: Verdict | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio of the other arm to the baseline, as in a verdict. None for a zero baseline or a missing value."""
        return verdict.ratio(*self.values.values())


def rows(measures: Sequence[Measure], starts: Sequence[AStart], arms: tuple[str, str] = ARMS) -> list[Row]:
    """The table of the starts, with verdicts for the second arm."""
    values = {
        each.title: {arm: [each.read(start) for start in starts if start.arm == arm] for arm in arms}
        for each in measures
    }
    named = sorted((each for each in measures if each.primary or each.judged), key=lambda each: not each.primary)
    a, b = ({each.title: values[each.title][arm] for each in named} for arm in arms)
    verdicts = verdict.verdicts(named, a, b)
    return [Row(each, values[each.title], verdicts.get(each.title)) for each in measures]


def shown(value: float | None, digits: int) -> str:
    """A number in the table."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def by_arm(row: Row) -> list[str]:
    """The cells of a row: for each arm the median, minimum and maximum of its starts, then the ratio and the verdict.

    If only some starts have a value, the cell has their number.
    """
    arms = [_spread(values, row.measure.digits) for values in row.values.values()]
    title = f"{row.measure.name}, {row.measure.unit}" if row.measure.unit else row.measure.name
    return [title, *arms, shown(row.ratio, 2), str(row.verdict or "")]


def _spread(values: Sequence[float], digits: int) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return shown(None, digits)
    least, half, most = (shown(each, digits) for each in (min(known), statistics.median(known), max(known)))
    of_some = f", {len(known)} of {len(values)} starts" if len(known) < len(values) else ""
    return f"{half if len(known) == 1 else f'{half} ({least} to {most})'}{of_some}"


def named(table: Sequence[Row], word: str) -> list[str]:
    """The measures with this verdict."""
    return [row.measure.title for row in table if row.verdict is not None and row.verdict.word == word]


def summary(table: Sequence[Row]) -> list[str]:
    """Sentences about the verdicts and how they were made."""
    words = [row.verdict.word for row in table if row.verdict is not None]
    if not words:
        return ["There is no verdict, because the primary measure has no value in a start, or an arm has no start."]
    [primary] = [row for row in table if row.measure.primary]
    first, second = primary.values
    parts = ["too few starts for a verdict, so the table only describes these starts"]
    if set(words) != {"too few starts"}:
        parts = [f"{word} in {_counted(named(table, word))}" for word in ("better", "worse")]
        parts += [f"{word} in {words.count(word)}" for word in sorted({*words} - {"better", "worse"})]
    return [
        f"{second} compared with {first} in {len(words)} measures chosen in advance: {', '.join(parts)}.",
        verdict.legend(primary.measure, len(words) - 1, min(map(len, primary.values.values()))),
    ]


def _counted(titles: Sequence[str]) -> str:
    return f"{len(titles)} ({'; '.join(titles)})" if titles else "none"


def as_data(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [
        {
            **{key: getattr(row.measure, key) for key in ("group", "name", "unit", "better", "primary")},
            "values": {arm: [None if math.isnan(each) else each for each in row.values[arm]] for arm in row.values},
            "ratio": row.ratio,
            "verdict": None if row.verdict is None else asdict(row.verdict),
        }
        for row in table
    ]


def print_table(console: Console, columns: Sequence[str], found: Sequence[Row]) -> None:
    """Print the rows in groups, coloured by verdict. The columns are those of ``by_arm``.

    Square brackets in names are not markup.
    """
    table = Table(box=None if not console.is_terminal else Table().box, padding=(0, 1))
    for place, name in enumerate(columns):
        is_text = place == 0 or name == "verdict"
        table.add_column(Text(name.replace(" / ", " /\n")), justify="left" if is_text else "right")
    for group, of_group in groupby(found, key=lambda row: row.measure.group):
        if group:
            table.add_row(Text(group), style="bold")
        *_, last = shown_rows = list(of_group)
        for row in shown_rows:
            style = {"better": "green", "worse": "red"}.get(row.verdict.word) if row.verdict is not None else None
            words = (Text(f"  {cell}" if group and not place else cell) for place, cell in enumerate(by_arm(row)))
            table.add_row(*words, style=style, end_section=row is last)
    console.print(table)
