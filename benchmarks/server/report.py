"""The table of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.rigs import about, results
from benchmarks.rigs.whole_server import judge, widest
from benchmarks.server.figures import Figure
from benchmarks.server.load import Load
from benchmarks.server.measure import Host, Start, judged
from omni_fastpath.tools.ab import verdict

LATE_MS = 1.0
"""Where 99 of 100 steps of an engine are not within this, the table says so."""


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Which arms are compared: each that has something of ours with each stock one, else all with the first."""
    stock = [name for name in names if name in ("stock", "event")] or [names[0]]
    ours = [name for name in names if name.startswith(("fastpath", "only-")) and name not in stock]
    return [(a, b) for b in ours or [name for name in names if name != stock[0]] for a in stock if a != b]


def show(found: Mapping[str, Sequence[Start]], load: Load, host: Host) -> None:
    """A row for each level and figure: medians, the widest ratio of an arm's starts; verdicts, given two arms."""
    starts = max(len(each) for each in found.values())
    rows: list[list[str]] = []
    for level in load.levels:
        for name in Figure:
            values = [_values(each, level, name) for each in found.values()]
            if any(values):
                medians = [f"{statistics.median(each):.1f}" if each else "-" for each in values]
                rows.append([name, f"{level:g}", *medians, f"{widest(values):.2f}" if starts > 1 else ""])
        rows.append([])
    results.show(
        f"Whole server on {host}: {load}; {starts} starts an arm: median; A/A: widest ratio of two starts of one arm",
        ("figure", "rate" if load.loop == "open" else "streams", *found, "A/A"),
        rows,
    )
    if pairs(list(found)):
        _show_verdicts(found, load)
    print(alike(found), kept(start["engines"] for each in found.values() for start in each), about.line(), sep="\n")


def _values(starts: Iterable[Start], level: float, name: str) -> list[float]:
    values = (_read(level, name, start) for start in starts)
    return [value for value in values if not math.isnan(value)]


def _read(level: float, name: str, start: Start) -> float:
    return float(start["figures"][f"{level:g}"].get(name, math.nan))


def _show_verdicts(found: Mapping[str, Sequence[Start]], load: Load) -> None:
    compared = pairs(list(found))
    figures = {arm: [start["figures"] for start in each] for arm, each in found.items()}
    table: list[list[str]] = []
    for rows in judged(load):
        verdicts = [judge(figures[a], figures[b], rows) for a, b in compared]
        for (level, name), row in rows.items():
            cells = [row.title]
            for (a, b), said in zip(compared, verdicts, strict=True):
                one, other = (_values(found[arm], float(level), name) for arm in (a, b))
                base = statistics.median(one) if one else 0.0
                ratio = statistics.median(other) / base if base and other else math.nan
                cells.append(f"{ratio:.2f} {said[row.title]}" if row.title in said else "-")
            table.append(cells)
        table.append([])
    title = "Ratios of medians, and verdicts, of each level by itself"
    results.show(title, ("row", *(f"{b} / {a}" for a, b in compared)), table)
    starts = min(len(each) for each in found.values())
    print(verdict.legend(next(iter(rows.values())), len(rows) - 1, starts))


def alike(found: Mapping[str, Sequence[Start]]) -> str:
    """One line: whether every start answered as the first one did: text, tokens, audio, usage, ends."""
    starts = [(arm, start["answers"]) for arm, each in found.items() for start in each]
    (first_arm, first), *others = starts
    compared = 0
    for arm, answers in others:
        for level, digests in answers.items():
            compared += len(digests)
            unequal = [n for n, pair in enumerate(zip(digests, first[level], strict=True)) if len(set(pair)) > 1]
            if unequal:
                where = f"{len(unequal)} of {len(digests)} at {level}, the first is request {unequal[0]}"
                return f"THE ANSWERS DIFFER: {arm} against {first_arm}: {where}."
    return f"Answers: all starts alike, byte by byte, in {compared} comparisons with the first start."


def kept(starts: Iterable[Mapping[str, Mapping[str, float]]]) -> str:
    """One line: how late the light engines were at worst, over what they said in all starts."""
    engines = [engine for start in starts for engine in start.values()]
    if not engines:
        return "The light engines said nothing of their time."
    half, most = (max(engine[name] for engine in engines) for name in ("late_p50_ms", "late_p99_ms"))
    said = f"Light engines late by {half:.2f} ms (half of the steps, worst engine), {most:.2f} ms (99 of 100)"
    return f"{said}: more than {LATE_MS:g} ms, which is in the figures above." if most > LATE_MS else f"{said}."
