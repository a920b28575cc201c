"""A table of two arms over starts: measures, rows, spreads, and the verdict where one was named for it.

Nothing here knows of servers: a start is whatever a measure can read, and says which arm it was of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.verdict import Measure, Verdict

ARMS = ("stock", "fastpath")
"""Unless told otherwise; the second is judged against the first."""


class AStart(Protocol):
    """What one start of a server gave."""

    @property
    def arm(self) -> str:
        """Its arm's name, one of the table's arms."""


@dataclass(frozen=True)
class Row:
    """One measure over all starts.

    Attributes:
        measure: What it is.
        values: A value per start, by arm, in the order of the starts; two arms, the one that is judged last.
        verdict: Of the second arm against the first; None where none was named beforehand, or a start has no value.
    """

    measure: Measure
    values: dict[str, list[float]]
    verdict: Verdict | None = None

    @property
    def ratio(self) -> float | None:
        """The second arm over the first, as a verdict has it; None over a zero, or where a start has no value.

        Not of the means: one cold start would say of them what neither the medians beside it nor the verdict say.
        """
        first, second = self.values.values()
        return verdict.ratio(first, second) if self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Whether each arm has starts, and every start has a value."""
        return all(values and not any(map(math.isnan, values)) for values in self.values.values())


def rows(measures: Sequence[Measure], starts: Sequence[AStart], arms: tuple[str, str] = ARMS) -> list[Row]:
    """The table of the starts, with its verdicts: the second arm against the first."""
    table = []
    for measure in measures:
        values: dict[str, list[float]] = {arm: [] for arm in arms}
        for start in starts:
            values[start.arm].append(measure.read(start))
        table.append(Row(measure, values))
    return judge(table)


def judge(table: Sequence[Row]) -> list[Row]:
    """The rows with their verdicts; without any where the primary measure has no value in some start."""
    judged = {row.measure.title: row for row in table if (row.measure.judged or row.measure.primary) and row.is_whole}
    primary = next((row.measure for row in judged.values() if row.measure.primary), None)
    if primary is None:
        return list(table)
    arms = next(iter(judged.values())).values
    a, b = ({title: row.values[arm] for title, row in judged.items()} for arm in arms)
    found = verdict.verdicts(primary, [row.measure for row in judged.values()], a, b)
    return [replace(row, verdict=found.get(row.measure.title)) for row in table]


def shown(value: float | None, digits: int) -> str:
    """A number as the table shows it."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def by_arm(row: Row) -> list[str]:
    """Each arm's median in one cell, with the least and most of its starts, then the ratio and the verdict.

    Where only some starts have a value the cell says how many.
    """
    arms = [_spread(values, row.measure.digits) for values in row.values.values()]
    return [titled(row.measure), *arms, shown(row.ratio, 2), str(row.verdict or "")]


def _spread(values: Sequence[float], digits: int) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return shown(None, digits)
    least, half, most = (shown(each, digits) for each in (min(known), statistics.median(known), max(known)))
    of_some = f", {len(known)} of {len(values)} starts" if len(known) < len(values) else ""
    return f"{half if len(known) == 1 else f'{half} ({least} to {most})'}{of_some}"


def titled(measure: Measure) -> str:
    """Its name and unit, for a table's first column."""
    return f"{measure.name}, {measure.unit}" if measure.unit else measure.name


def _counted(words: Sequence[str]) -> str:
    if set(words) == {"too few starts"}:
        return "too few starts for a verdict on any of them, so that the table describes these starts and no others"
    return ", ".join(f"{word} in {words.count(word)}" for word in dict.fromkeys(words))


def summary(table: Sequence[Row]) -> list[str]:
    """What the table says, in sentences: the verdicts, and what they rest on."""
    words = [row.verdict.word for row in table if row.verdict is not None]
    [primary] = [row.measure for row in table if row.measure.primary]
    lines = []
    if words:
        starts = min(len(values) for values in table[0].values.values())
        first, second = table[0].values
        against = f"{second[:1].upper()}{second[1:]} against {first}"
        lines += [f"{against}, {len(words)} rows that were named beforehand: {_counted(words)}."]
        lines += [verdict.legend(primary, len(words) - 1, starts)]
    else:
        lines += [f"There is no verdict: {primary.title} has no value in some start."]
    return lines


def plain(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [
        {
            "group": row.measure.group,
            "name": row.measure.name,
            "unit": row.measure.unit,
            "better": row.measure.better,
            "primary": row.measure.primary,
            "values": {
                arm: [None if math.isnan(value) else value for value in values] for arm, values in row.values.items()
            },
            "ratio": row.ratio,
            "verdict": None if row.verdict is None else asdict(row.verdict),
        }
        for row in table
    ]
