"""The tables of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.ab import verdict
from benchmarks.rigs import about, results
from benchmarks.rigs.whole_server import Rows, judge, widest
from benchmarks.server.arms import STOCK
from benchmarks.server.figures import INSTRUMENT, Figure, better, figures
from benchmarks.server.load import Load
from benchmarks.server.measure import LADDER, MORE_DRY_MS, TIMES_AUDIO, Host, Start, unfit

Found = Mapping[str, Sequence[Start]]
"""The starts by arm."""

PARTS_FIGURES = (
    *(Figure.TEXT, Figure.TEXT_P99, Figure.AUDIO, Figure.AUDIO_P99, Figure.DRY_P99),
    *(Figure.GAP, Figure.TEXT_GAP_P99, Figure.E2E, Figure.RATE, Figure.PROCESS_MS),
)
"""Of the table of parts. At most nine besides the first get a verdict with six starts: also those of the main table."""


def show(found: Found, load: Load, host: Host) -> None:
    """A row for each level and figure: medians, the limit, the widest ratio of an arm's starts; verdicts."""
    rows: list[list[str]] = []
    last = "default" if "default" in found else list(found)[-1]
    for level in load.levels:
        limit = figures(load.limit(level))
        for name in Figure:
            values = [_values(each, level, name) for each in found.values()]
            if not any(values):
                continue
            ours, least = _median(_values(found[last], level, name)), limit.get(name, math.nan)
            share = f"{ours / least:.2f}" if least and not math.isnan(ours / least) else ""
            spread = f"{widest(values):.2f}" if name not in INSTRUMENT else ""
            rows.append([name, f"{level:g}", *(shown(_median(each)) for each in values), shown(least), share, spread])
        rows.append([])
    counts = ", ".join(f"{len(each)} of {arm}" for arm, each in found.items())
    results.show(
        f"Whole server on {host}: {load}; starts: {counts}: medians; A/A: widest ratio of two starts of one arm",
        ("figure", "rate" if load.loop == "open" else "streams", *found, "limit", f"{last} / limit", "A/A"),
        rows,
    )
    _show_verdicts(found, load)
    _say(found, load)


def _show_verdicts(found: Found, load: Load) -> None:
    stock = [name for name in found if name.removesuffix("-2api") in STOCK or "@" in name] or [*found][:1]
    compared = [(a, b) for b in found if b not in stock for a in stock]
    table: list[list[str]] = []
    for level in load.levels:
        rows = judged(load, level, found)
        if not compared or not rows or unfit_starts(found, level):
            continue
        arms = {arm: [start["figures"] for start in each] for arm, each in found.items()}
        verdicts = [judge(arms[a], arms[b], rows) for a, b in compared]
        for (_, name), row in rows.items():
            cells = [row.name]
            for (a, b), said in zip(compared, verdicts, strict=True):
                ratio = _median(_values(found[b], level, name)) / (_median(_values(found[a], level, name)) or math.nan)
                cells.append(f"{ratio:.2f} {said[row.name]}" if row.name in said else f"{ratio:.2f}")
            table.append(cells)
        table.append([])
    if table:
        title = "Ratios of medians, and verdicts, of each level by itself"
        results.show(title, ("row", *(f"{b} / {a}" for a, b in compared)), table)
        print(verdict.legend(next(iter(rows.values())), len(rows) - 1, min(map(len, found.values()))))


def judged(load: Load, level: float, found: Found) -> Rows:
    """The rows of a level that get a verdict, a family of its own whose first row is the primary one."""
    first = Figure.TEXT if load.kind == "text" else Figure.AUDIO
    names = [first, *(name for name in PARTS_FIGURES if name is not first)]
    names = [name for name in names if any(_values(each, level, name) for each in found.values())]
    if load.loop == "open":
        names.remove(Figure.RATE)
    titles = {name: f"{name.partition(', ')[0]} at {level:g}" for name in names}
    return {(f"{level:g}", name): verdict.Measure(title, better(name)) for name, title in titles.items()}


def show_parts(found: Found, load: Load, host: Host) -> None:
    """For each level a row for each arm: its figures as ratios to those of the first arm, the default set.

    A star: every start of the arm is beyond the first one's starts on the same side.
    """
    base, *others = found
    for level in load.levels:
        names = [name for name in PARTS_FIGURES if any(_values(found[base], level, name))]
        usual = {name: _values(found[base], level, name) for name in names}
        rows = [[f"{base}, {len(found[base])} starts", *(shown(_median(usual[name])) for name in names)]]
        rows.append(["its starts", *(f"{min(each):.4g} to {max(each):.4g}" for each in usual.values())])
        rows.append([])
        for arm in others:
            cells = [f"{arm}, {len(found[arm])}"]
            for name, given in usual.items():
                values = _values(found[arm], level, name)
                beyond = values and (min(values) > max(given) or max(values) < min(given))
                ratio = _median(values) / (_median(given) or math.nan)
                cells.append(f"{ratio:.2f}{'*' if beyond else ' '}")
            rows.append(cells)
        title = f"{host}: {load}, {level:g}: ratios to {base}; *: no start within its starts"
        results.show(title, ("arm, starts", *names), rows)
    _say(found, load)


def show_capacity(found: Found, load: Load, host: Host) -> None:
    """The most streams of each start, and what was tried."""
    rows = [
        [arm, " ".join(str(start["capacity"]) for start in starts), f"{_median([s['capacity'] for s in starts]):g}"]
        for arm, starts in found.items()
    ]
    title = (
        f"{host}: {load}: the most streams at which first audio p99 is at most {TIMES_AUDIO:g} times the limit's and "
        f"underrun p99 at most {MORE_DRY_MS:g} ms above it; steps: {LADDER}"
    )
    results.show(title, ("arm", "starts", "median"), rows)
    for arm, starts in found.items():
        for start in starts:
            for level, given in sorted(start["figures"].items(), key=lambda each: float(each[0])):
                dry, audio = shown(given[Figure.DRY_P99]), shown(given[Figure.AUDIO_P99])
                print(f"{arm} at {level}: first audio p99 {audio} ms, underrun p99 {dry} ms, {unfit(given) or 'fit'}")
    print(about.line())


def _say(found: Found, load: Load) -> None:
    """Under a table: levels that measured this machine, whether the answers are alike, and where it was."""
    for level in load.levels:
        if said := unfit_starts(found, level):
            print(f"{level:g} MEASURED THIS MACHINE and is not judged: {'; '.join(said)}.")
    print(alike(found), about.line(), sep="\n")


def unfit_starts(found: Found, level: float) -> list[str]:
    """Why starts of a level measured this machine."""
    starts = [(arm, start["figures"][f"{level:g}"]) for arm, each in found.items() for start in each]
    return [f"{arm}: {said}" for arm, given in starts if (said := unfit(given))]


def _values(starts: Iterable[Start], level: str | float, name: str) -> list[float]:
    key = level if isinstance(level, str) else f"{level:g}"
    values = (float(start["figures"][key].get(name, math.nan)) for start in starts)
    return [value for value in values if not math.isnan(value)]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def shown(value: float) -> str:
    """A number, to three digits or to one."""
    return "-" if math.isnan(value) else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def median_of(starts: Iterable[Start], level: str | float, name: str) -> float:
    """The median of a figure over starts."""
    return _median(_values(starts, level, name))


def alike(found: Found) -> str:
    """One line: whether every start answered as the first one did: text, tokens, audio, usage, ends."""
    starts = [(arm, start["answers"]) for arm, each in found.items() for start in each]
    if not starts:
        return "No start so far."
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
