"""What a series found: as data, as a table on the terminal, as Markdown for a pull request."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from omni_fastpath.tools.ab import answers, measures, rows
from omni_fastpath.tools.ab.errors import INTERRUPTED
from omni_fastpath.tools.ab.files import Series
from omni_fastpath.tools.ab.rows import Row
from omni_fastpath.tools.ab.table import print_table

SCHEMA = 3
"""Of the JSON report; a key is only ever added under the same number."""

FINE, DIFFERENT, FAILED, ENDED_BY_SIGNAL = 0, 1, 3, 130


@dataclass(frozen=True)
class Report:
    """A series, judged.

    Attributes:
        series: What was measured.
        table: Its rows with their verdicts.
        answers: What ``answers.judge`` found.
    """

    series: Series
    table: Sequence[Row]
    answers: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        """Of the table."""
        a, b = self.series.arms
        return ["measure", a, b, f"{b} / {a}", "verdict"]

    def named(self, word: str) -> list[str]:
        """The measures whose verdict is this word."""
        return [row.measure.title for row in self.table if row.verdict is not None and row.verdict.word == word]

    @property
    def failures(self) -> dict[str, list[int]]:
        """Requests that failed under the client's load, by arm and start."""
        return {
            arm: [start.failed for start in self.series.starts if start.arm == arm] or [0] for arm in self.series.arms
        }

    @property
    def exit_code(self) -> int:
        """0: no measure is worse and the answers are alike. 1: one is, or they are not. 3, 130: failed, interrupted."""
        if not self.series.is_whole:
            return ENDED_BY_SIGNAL if self.series.ended == INTERRUPTED else FAILED
        a, b = map(statistics.fmean, self.failures.values())
        _, lost = measures.lacks(self.series.starts, self.series.arms)
        worse = b > a or lost or bool(self.named("worse"))
        return DIFFERENT if worse or self.answers["differences"] else FINE


def judge(series: Series) -> Report:
    """The series with everything that can be said of it.

    Raises:
        ConfigError: A measure was named that was not measured.
    """
    starts = list(series.starts)
    table = rows.rows(measures.table(starts, primary=series.primary, judged=series.judged), starts, series.arms)
    said = [(start.arm, start.answers) for start in starts]
    found = answers.judge(said, series.arms, simulated=bool(starts) and all(start.simulated for start in starts))
    unasked = dict.fromkeys(start.no_answers for start in starts if start.no_answers)
    if found["how"] == "nothing" and unasked:
        found["why"] = "; ".join(unasked)
    return Report(series, table, found)


# ---- Sentences ----


def heading(report: Report) -> list[str]:
    """What was compared, where and when."""
    series = report.series
    words = {start.arm: start.words for start in series.starts}
    lines = [f"{arm}: {words.get(arm, '')}" for arm in series.arms]
    lines.append(f"{len(series.starts)} starts, in the order {' '.join(start.arm for start in series.starts)}")
    found: dict[str, str] = {}
    for start in series.starts:
        machine, versions = start.about.get("machine") or {}, start.about.get("versions") or {}
        where = f"{machine.get('processor', 'unknown machine')}, {machine.get('cores')} cores"
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        found.setdefault(f"{where}; {named}", str(start.about.get("date", "")))
    return [*lines, *(f"{place}; from {date} on" for place, date in found.items())]


def alarms(report: Report) -> list[str]:
    """What must not be overlooked."""
    series, found = report.series, []
    if not series.is_whole:
        found.append(f"INCOMPLETE: {len(series.starts)} of {series.wanted} starts were measured; {series.ended}")
    if report.answers["differences"]:
        found.append("THE ARMS DID NOT ANSWER ALIKE")
    failed = {arm: sum(each) for arm, each in report.failures.items()}
    if any(failed.values()):
        counts = ", ".join(f"{count} in {arm}" for arm, count in failed.items())
        found.append(f"Requests failed under the client's load: {counts}")
    lacking, _ = measures.lacks(series.starts, series.arms)
    return [*found, *lacking, *series.alarms]


def notes(report: Report) -> list[str]:
    """What the table rests on, and what was found of the answers."""
    said = [answers.judged_line(report.answers), *report.answers["notes"]]
    if not report.table:
        return said
    if not any(row.measure.primary for row in report.table):
        return ["There is no verdict: no measure with a known direction was found.", *said]
    if not all(report.table[0].values.values()):
        return ["There is no verdict: one arm has no start that was measured to its end.", *said]
    return [*rows.summary(report.table), *said]


# ---- As data, on the terminal, as Markdown ----


def plain(report: Report) -> dict[str, Any]:
    """Everything that the table rests on, as plain data."""
    series = report.series
    states = {arm: [start.states for start in series.starts if start.arm == arm] for arm in series.arms}
    return {
        "schema": SCHEMA,
        "complete": series.is_whole,
        "ended": series.ended,
        "exit_code": report.exit_code,
        "arms": {start.arm: start.words for start in series.starts},
        "order": [start.arm for start in series.starts],
        "wanted": series.wanted,
        "better": report.named("better"),
        "worse": report.named("worse"),
        "failed": {arm: sum(each) for arm, each in report.failures.items()},
        "summary": notes(report),
        "answers": report.answers,
        "rows": rows.plain(report.table),
        "states": {arm: each[-1] if each else [] for arm, each in states.items()},
        "starts": [
            start.model_dump(mode="json", by_alias=True, exclude={"answers", "states"}) for start in series.starts
        ],
    }


def show(report: Report, console: Console) -> None:
    """The table, its sentences, what the answers came to."""
    for line in heading(report):
        console.print(line)
    if report.table:
        print_table(console, report.columns, report.table, rows.by_arm)
    for line in notes(report):
        console.print(line)
    for line in alarms(report):
        console.print(line, style="bold red")


def markdown(report: Report) -> str:
    """For a pull request: what was named beforehand in one table, everything else folded away."""
    a, b = report.series.arms
    judged = [row for row in report.table if row.verdict is not None]
    lines = [f"### {_cell(b)} against {_cell(a)}", ""]
    lines += [f"**{_cell(line)}**\n" for line in alarms(report)]
    lines += [f"- {_cell(line)}" for line in heading(report)]
    lines += ["", *_table(report, judged or report.table), ""]
    lines += [f"{_cell(line)}\n" for line in notes(report)]
    if judged and len(judged) < len(report.table):
        rest = [row for row in report.table if row.verdict is None]
        lines += _folded(f"{len(rest)} further measures, without a verdict", _table(report, rest))
    if report.series.starts:
        first = report.series.starts[0]
        lines += _folded("Commands", ["```", shlex.join(first.serve), shlex.join(first.bench), "```"])
    return "\n".join(lines) + "\n"


def _table(report: Report, table: Sequence[Row]) -> list[str]:
    if not table:
        return ["No start was measured to its end."]
    lines = [f"| {' | '.join(map(_cell, report.columns))} |", f"| --- |{' ---: |' * 3} --- |"]
    for row in table:
        cells = rows.by_arm(row)
        name = f"{cells[0]} ({row.measure.group})"
        lines.append(f"| {' | '.join(map(_cell, (name, *cells[1:])))} |")
    return lines


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def write(report: Report, folder: Path) -> list[str]:
    """Write ``ab.json`` and ``ab.md`` into a folder; what was written where, in words."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, told = folder / "ab.json", folder / "ab.md"
    numbers.write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")
    told.write_text(markdown(report), encoding="utf-8")
    return [f"numbers: {numbers}", f"for a pull request: {told}"]
