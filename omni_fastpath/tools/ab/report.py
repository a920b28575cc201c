"""What a series found: as data, as a table on the terminal, as Markdown for a pull request, as a page."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from omni_fastpath.tools.ab import answers, measures, page, rows
from omni_fastpath.tools.ab.errors import INTERRUPTED
from omni_fastpath.tools.ab.files import Series, Start
from omni_fastpath.tools.ab.rows import Row
from omni_fastpath.tools.ab.table import print_table

SCHEMA = 1
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
    def failures(self) -> dict[str, int]:
        """Requests that failed under the client's load, by arm."""
        starts = self.series.starts
        return {arm: sum(start.failed for start in starts if start.arm == arm) for arm in self.series.arms}

    @property
    def lacks(self) -> list[measures.Lack]:
        """The measures that some starts have no value of."""
        return measures.lacks(self.series.starts, self.series.arms)

    @property
    def fails_more(self) -> bool:
        """Whether more requests failed in the second arm, by the start, or it has no value of what the first has."""
        if any(lack.is_worse for lack in self.lacks):
            return True
        a, b = ([start.failed for start in self.series.starts if start.arm == arm] or [0] for arm in self.series.arms)
        return statistics.fmean(b) > statistics.fmean(a)

    @property
    def exit_code(self) -> int:
        """0: no measure is worse and the answers are alike. 1: one is, or they are not. 3, 130: failed, interrupted."""
        if not self.series.is_whole:
            return ENDED_BY_SIGNAL if self.series.ended == INTERRUPTED else FAILED
        return DIFFERENT if self.named("worse") or self.answers["differences"] or self.fails_more else FINE


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
    a, b = series.arms
    counts = ", ".join(f"{sum(start.arm == arm for start in series.starts)} of {arm}" for arm in series.arms)
    lines = [f"{arm}: {series.arm_words.get(arm, '')}" for arm in (a, b)]
    lines.append(
        f"{len(series.starts)} starts ({counts}), in the order {' '.join(start.arm for start in series.starts)}"
    )
    if series.starts:
        lines += _places(series.starts)
    return lines


def _places(starts: Sequence[Start]) -> list[str]:
    """Where and when; a line for each place, where there are several."""
    found: dict[str, str] = {}
    for start in starts:
        machine, versions = start.about.get("machine") or {}, start.about.get("versions") or {}
        where = f"{machine.get('processor', 'unknown machine')}, {machine.get('cores')} cores"
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        found.setdefault(f"{where}; {named}", str(start.about.get("date", "")))
    return [f"{place}; from {date} on" for place, date in found.items()]


def alarms(report: Report) -> list[str]:
    """What must not be overlooked."""
    series = report.series
    found = []
    if not series.is_whole:
        found.append(f"INCOMPLETE: {len(series.starts)} of {series.wanted} starts were measured; {series.ended}")
    if report.answers["differences"]:
        found.append("THE ARMS DID NOT ANSWER ALIKE")
    if any(report.failures.values()):
        a, b = series.arms
        found.append(
            f"Requests failed under the client's load: {report.failures[a]} in {a}, {report.failures[b]} in {b}"
        )
    return [*found, *(lack.told(series.arms) for lack in report.lacks), *series.alarms]


def notes(report: Report) -> list[str]:
    """What the table rests on."""
    if not report.table:
        return []
    if not any(row.measure.primary for row in report.table):
        return ["There is no verdict: no measure with a known direction was found."]
    said = rows.summary(report.table)
    few = min(len(values) for values in report.table[0].values.values())
    return said if few else ["There is no verdict: one arm has no start that was measured to its end.", *said[1:]]


def answers_said(report: Report) -> list[str]:
    """What was found of the answers, in sentences."""
    return [answers.judged_line(report.answers), *report.answers["notes"]]


# ---- Data ----


def plain(report: Report) -> dict[str, Any]:
    """Everything that table and page rest on, as plain data."""
    series = report.series
    return {
        "schema": SCHEMA,
        "complete": series.is_whole,
        "ended": series.ended,
        "exit_code": report.exit_code,
        "command": series.command,
        "arms": {arm: series.arm_words.get(arm, "") for arm in series.arms},
        "order": [start.arm for start in series.starts],
        "wanted": series.wanted,
        "better": report.named("better"),
        "worse": report.named("worse"),
        "failed": report.failures,
        "summary": notes(report),
        "answers": report.answers,
        "rows": rows.plain(report.table),
        "states": {arm: _states_of(series.starts, arm) for arm in series.arms},
        "starts": [
            start.model_dump(mode="json", by_alias=True, exclude={"answers", "states"}) for start in series.starts
        ],
    }


def _states_of(starts: Sequence[Start], arm: str) -> list[dict[str, Any]]:
    """What the last start of an arm said: process by process."""
    said = [start.states for start in starts if start.arm == arm and start.states]
    return said[-1] if said else []


# ---- Terminal ----


def show(report: Report, console: Console) -> None:
    """The table, its sentences, what the answers came to."""
    for line in heading(report):
        console.print(line, highlight=False, markup=False)
    if report.table:
        print_table(console, report.columns, report.table, rows.by_arm)
    for line in notes(report):
        console.print(line, highlight=False, markup=False)
    for line in answers_said(report):
        style = "bold red" if report.answers["differences"] else None
        console.print(line, style=style, highlight=False, markup=False)
    for line in alarms(report):
        console.print(line, style="bold red", highlight=False, markup=False)


# ---- Markdown ----


def markdown(report: Report) -> str:
    """For a pull request: what was named beforehand in one table, everything else folded away."""
    series = report.series
    a, b = series.arms
    judged = [row for row in report.table if row.verdict is not None]
    lines = [f"### {_cell(b)} against {_cell(a)}", ""]
    lines += [f"**{_cell(line)}**\n" for line in alarms(report)]
    lines += [f"- {_cell(line)}" for line in heading(report)]
    lines += ["", *_table(report, judged or report.table), ""]
    lines += [f"{_cell(line)}\n" for line in (*notes(report), *answers_said(report))]
    if judged and len(judged) < len(report.table):
        rest = [row for row in report.table if row.verdict is None]
        lines += _folded(f"{len(rest)} further measures, without a verdict", _table(report, rest))
    if series.command:
        lines += _folded("Command", ["```", *_commands(series), "```"])
    lines += _folded("What each server said it was", _markdown_listing(_states(report)))
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


def _markdown_listing(listing: page.Listing) -> list[str]:
    if not listing.lines:
        return [listing.note or "Nothing."]
    lines = [f"| {' | '.join(listing.columns)} |", f"|{' --- |' * len(listing.columns)}"]
    return [*lines, *(f"| {' | '.join(map(_cell, line))} |" for line in listing.lines)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _commands(series: Series) -> list[str]:
    return [series.command]


# ---- Page ----


def as_page(report: Report) -> page.Page:
    """The report as the page takes it."""
    series = report.series
    a, b = series.arms
    said = answers_said(report)
    differences = [[line] for line in report.answers["differences"][:50]]
    listings = [page.Listing("Where the answers differ", ["difference"], differences)] if differences else []
    listings += [_states(report), _starts(series)]
    return page.Page(
        title=f"omni-fastpath ab: {b} against {a}",
        heading=heading(report),
        arms=series.arms,
        order=[start.arm for start in series.starts],
        rows=rows.plain(report.table),
        columns=report.columns,
        cells=[rows.by_arm(row) for row in report.table],
        notes=notes(report),
        answers=" ".join(said),
        alarms=alarms(report),
        listings=listings,
        commands=[series.command] if series.command else [],
    )


def _states(report: Report) -> page.Listing:
    """Each arm's patches: where in which state, with the counters that moved."""
    lines = []
    for arm in report.series.arms:
        found: dict[tuple[str, str, str], list[str]] = {}
        for process in _states_of(report.series.starts, arm):
            for patch, record in process["patches"].items():
                moved = ", ".join(f"{count} {name}" for name, count in record["counters"].items() if count)
                key = (patch, record["state"], record["reason"] or moved)
                found.setdefault(key, []).append(process["process"])
        lines += [[arm, patch, state, words, ", ".join(where)] for (patch, state, words), where in found.items()]
    unseen = [start.arm for start in report.series.starts if not start.states_seen]
    note = "By the state files of each server's own processes, after the load."
    if unseen:
        arms = ", ".join(dict.fromkeys(unseen))
        note = f"No state file of {arms} was found: nothing was asked of omni-fastpath there, or it lies elsewhere."
    elif not lines:
        note = "No process left a state file: nothing was asked of omni-fastpath."
    return page.Listing(
        "What each server said it was", ["arm", "patch", "state", "reason or counters", "processes"], lines, note
    )


def _starts(series: Series) -> page.Listing:
    lines = [
        [
            str(start.place),
            start.arm,
            str(start.about.get("date", "")),
            "-" if start.start_s is None else f"{start.start_s:.1f} s",
            shlex.join(start.serve) or "-",
            shlex.join(start.bench) or "-",
        ]
        for start in series.starts
    ]
    return page.Listing("Starts", ["place", "arm", "ended", "ready after", "server", "client"], lines)


# ---- Files ----


def write(report: Report, folder: Path) -> list[str]:
    """Write all of it into a folder; what was written where, in words, and why something was not."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, told, drawn = (folder / f"ab.{kind}" for kind in ("json", "md", "html"))
    numbers.write_text(json.dumps(plain(report), indent=1) + "\n", encoding="utf-8")
    told.write_text(markdown(report), encoding="utf-8")
    said = [f"numbers: {numbers}", f"for a pull request: {told}"]
    if not page.can_be_made():
        return [*said, f"There is no page: jinja2 is not installed; {page.INSTALL}"]
    try:
        drawn.write_text(page.render(as_page(report)), encoding="utf-8")
    except Exception as error:  # a picture is worth less than what it is of
        return [*said, f"The page could not be made: {error!r}"]
    if not page.has_pictures():
        said.append(f"The page has no pictures: plotly is not installed; {page.INSTALL}")
    return [*said, f"page: {drawn}"]
