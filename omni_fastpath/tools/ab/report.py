"""The report of a series: as data, as a table on the terminal, and as Markdown for a pull request."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from omni_fastpath.tools.ab import answers, commands, measures, rows
from omni_fastpath.tools.ab.files import Series
from omni_fastpath.tools.ab.interrupts import INTERRUPTED
from omni_fastpath.tools.ab.rows import Row

SCHEMA = 4
"""The version of the JSON report. Adding a key does not change it."""

FINE, DIFFERENT, FAILED, UNDECIDED, ENDED_BY_SIGNAL = 0, 1, 3, 4, 130


@dataclass(frozen=True)
class Report:
    """A series with its verdicts.

    Attributes:
        series: The series.
        table: Its rows with their verdicts.
        answers: The result of ``answers.judge``.
    """

    series: Series
    table: Sequence[Row]
    answers: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        """The columns of the table."""
        a, b = self.series.arms
        return ["measure", a, b, f"{b} / {a}", "verdict"]

    @property
    def failed(self) -> dict[str, list[int]]:
        """The number of the client's requests that failed, by arm and start."""
        starts = self.series.starts
        return {arm: [start.failed for start in starts if start.arm == arm] or [0] for arm in self.series.arms}

    @property
    def lacking(self) -> list[tuple[str, list[float]]]:
        """The measures without a value in some starts, with the share of such starts in each arm."""
        found = []
        for row in self.table:
            shares = [statistics.fmean(map(math.isnan, values)) if values else 0.0 for values in row.values.values()]
            if any(shares):
                found.append((row.measure.title, shares))
        return found

    @property
    def exit_code(self) -> int:
        """0: no measure is worse and the answers agree. 1: otherwise. 4: there are too few starts. 3: it failed.

        130: it was interrupted.
        """
        if not self.series.is_whole:
            return ENDED_BY_SIGNAL if self.series.ended == INTERRUPTED else FAILED
        a, b = map(statistics.fmean, self.failed.values())
        lost = any(in_b > in_a for _, (in_a, in_b) in self.lacking)
        if b > a or lost or rows.named(self.table, "worse") or self.answers["differences"]:
            return DIFFERENT
        decided = any(rows.named(self.table, word) for word in ("better", "no difference shown"))
        return FINE if decided else UNDECIDED


def judge(series: Series) -> Report:
    """Judge a series."""
    starts = list(series.starts)
    table = rows.rows(measures.table(starts, primary=series.primary), starts, series.arms)
    asked = [(start.arm, [answer.model_dump() for answer in start.answers]) for start in starts]
    return Report(series, table, answers.judge(asked, series.arms))


# ---- Sentences ----


def heading(report: Report) -> list[str]:
    """Lines about the arms, the order, the machine, the versions and the date."""
    starts = report.series.starts
    lines = [f"{arm}: {words}" for arm, words in {start.arm: start.words for start in starts}.items()]
    lines.append(f"{len(starts)} starts, in the order {' '.join(start.arm for start in starts)}")
    found: dict[str, str] = {}
    for start in starts:
        machine = start.about.machine
        named = ", ".join(f"{name} {version}" for name, version in start.about.versions.items())
        where = f"{machine.get('processor')}, {machine.get('cores')} cores; {named}"
        found.setdefault(where, start.about.date)
    return [*lines, *(f"{where}; from {date} on" for where, date in found.items())]


def alarms(report: Report) -> list[str]:
    """Lines about problems."""
    series, found = report.series, []
    if not series.is_whole:
        found.append(f"INCOMPLETE: {len(series.starts)} of {series.wanted} starts were measured; {series.ended}")
    if report.answers["differences"]:
        found.append("THE ANSWERS DIFFER")
    if any(map(any, report.failed.values())):
        counts = ", ".join(f"{sum(each)} in {arm}" for arm, each in report.failed.items())
        found.append(f"Failed requests of the client: {counts}")
    for title, shares in report.lacking:
        parts = (f"{share:.0%} of the starts of {arm}" for arm, share in zip(series.arms, shares, strict=True))
        found.append(f"{' and '.join(parts)} have no {title}")
    found += dict.fromkeys(warning for start in series.starts for warning in commands.warnings(start.bench))
    if len({(*start.serve, "--", *start.bench) for start in series.starts}) > 1:
        found.append("The starts' commands differ")
    return found


def notes(report: Report) -> list[str]:
    """Lines about the verdicts and about the answers."""
    return [*rows.summary(report.table), answers.judged_line(report.answers)]


# ---- As data, on the terminal, as Markdown ----


def as_data(report: Report) -> dict[str, Any]:
    """The report and all values as plain data."""
    series = report.series
    return {
        "schema": SCHEMA,
        "complete": series.is_whole,
        "ended": series.ended,
        "exit_code": report.exit_code,
        "arms": {start.arm: start.words for start in series.starts},
        "order": [start.arm for start in series.starts],
        "wanted": series.wanted,
        **{word: rows.named(report.table, word) for word in ("better", "worse")},
        "failed": {arm: sum(each) for arm, each in report.failed.items()},
        "summary": notes(report),
        "answers": report.answers,
        "rows": rows.as_data(report.table),
        "states": {start.arm: start.states for start in series.starts},
        "starts": [
            start.model_dump(mode="json", by_alias=True, exclude={"answers", "states"}) for start in series.starts
        ],
    }


def show(report: Report, console: Console) -> None:
    """Print everything but the summary of the table, which is printed last."""
    for line in heading(report):
        console.print(line)
    rows.print_table(console, report.columns, report.table)
    for line in notes(report)[1:]:
        console.print(line)
    for line in alarms(report):
        console.print(line, style="bold red")


def markdown(report: Report) -> str:
    """Markdown for a pull request: a table of the measures with verdicts, and the rest folded."""
    a, b = report.series.arms
    judged = [row for row in report.table if row.verdict is not None]
    rest = [row for row in report.table if row.verdict is None]
    lines = [f"### {_cell(b)} against {_cell(a)}", ""]
    lines += [f"**{_cell(line)}**\n" for line in alarms(report)]
    lines += [f"- {_cell(line)}" for line in heading(report)]
    lines += ["", *_table(report, judged), ""]
    lines += [f"{_cell(line)}\n" for line in notes(report)]
    lines += _folded(f"{len(rest)} further measures, without a verdict", _table(report, rest))
    for start in report.series.starts[:1]:
        commands_ = (" ".join(shlex.join(words).splitlines()) for words in (start.serve, start.bench))
        lines += _folded("Commands", ["```", *commands_, "```"])
    return "\n".join(lines) + "\n"


def _table(report: Report, table: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(map(_cell, report.columns))} |", f"| --- |{' ---: |' * 3} --- |"]
    return lines + [f"| {' | '.join(map(_cell, rows.by_arm(row)))} |" for row in table]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").replace("\r", " ")


def write(report: Report, folder: Path) -> list[str]:
    """Write ``ab.json`` and ``ab.md`` into a folder. Returns lines with their paths."""
    numbers, page = folder / "ab.json", folder / "ab.md"
    texts = {numbers: json.dumps(as_data(report), indent=1) + "\n", page: markdown(report)}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return [f"numbers: {numbers}", f"for a pull request: {page}"]
