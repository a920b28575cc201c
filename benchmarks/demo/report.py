"""What the demo shows: sentences, the table, the picture, and the numbers that they rest on."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo.measure import Name, Start, how
from benchmarks.rigs.about import about
from benchmarks.server.figures import Figure
from benchmarks.server.load import Load
from omni_fastpath.tools.ab import rows, verdict
from omni_fastpath.tools.ab.answers import parity_line
from omni_fastpath.tools.ab.rows import ARMS, Row

SCHEMA = 7
"""Of ``demo.json``."""

_TOO_FEW = (
    f"So few starts cannot tell a difference from luck: ratios, no verdict; `--starts {verdict.STARTS}` gives one."
)
COLOURS = {"stock": ("#e08a3c", "#f3d0ae"), "fastpath": ("#12457a", "#a3b9cf")}
"""For medians and for p99; told apart in grey too."""

_ARRIVE: Mapping[str, str] = {"waves": "full server", "paced": "below capacity"}

PANELS: Sequence[tuple[str, Mapping[Name, tuple[Figure, Figure | None]]]] = (
    ("first text, ms", dict.fromkeys(("waves", "paced"), (Figure.FIRST_TEXT, Figure.FIRST_TEXT_P99))),
    (
        "first audio, ms",
        {"waves": (Figure.LATER_TTFP, Figure.LATER_TTFP_P99), "paced": (Figure.TTFP, Figure.TTFP_P99)},
    ),
    ("underrun (p99), ms", dict.fromkeys(("waves", "paced"), (Figure.DRY, None))),
    ("answers per second", dict.fromkeys(("waves", "paced"), (Figure.THROUGHPUT, None))),
)
"""Rows of the picture: what the dark bar shows of each load, and the light one."""

WHAT_IS_REAL = (
    "No GPU is needed: the stages are simulated (outputs on the clock). API server, HTTP, front end, orchestrator, "
    "output processing, metrics and logs are vLLM-Omni's own."
)
NOTES = (
    "Underrun: how long a listener who plays from the first packet on has nothing to play. First audio in the closed "
    "loop is that of the requests after the first wave, which starts at once."
)


def plain(
    loads: Mapping[Name, Load], starts: Sequence[Start], table: Sequence[Row], parity: Sequence[Any], command: str
) -> dict[str, Any]:
    """Everything that is shown and what it rests on, as plain data.

    Its ``sentences`` say what stock did, what fastpath did, and whether they answered alike.

    Args:
        loads: The closed loop, and the open one once its rate is known.
        starts: All of them so far.
        table: Their rows.
        parity: Of each load, whether the starts answered alike.
        command: That runs it again.
    """
    return {
        "schema": SCHEMA,
        "about": {**about(), "command": command, "what": WHAT_IS_REAL, "stages": loads["waves"].stages},
        "loads": {name: {**asdict(each), "deploy": each.deploy, "words": str(each)} for name, each in loads.items()},
        "parity": parity,
        "sentences": [*(_did(arm, starts) for arm in ARMS), *map(parity_line, parity)],
        "rows": rows.as_data(table),
        "starts": [asdict(start) for start in starts],
    }


def _did(arm: str, starts: Sequence[Start]) -> str:
    of_arm = [each for each in starts if (each.arm, each.load) == (arm, "waves")]
    figures = (Figure.THROUGHPUT, Figure.FIRST_TEXT, Figure.LATER_TTFP, Figure.LATER_TTFP_P99, Figure.DRY)
    answers, text, audio, slowest, dry = (
        statistics.median(start.figures.get(name, math.nan) for start in of_arm) for name in figures
    )
    return (
        f"{arm.capitalize()}, {starts[0].level:g} requests at a time: {answers:.1f} answers per second, first text "
        f"after {text:,.0f} ms, first audio after {audio:,.0f} ms (p99 {slowest:,.0f} ms), "
        f"underrun (p99) {dry:,.0f} ms."
    )


def show(console: Console, data: Mapping[str, Any], table: Sequence[Row]) -> None:
    """The sentences, then the table: its best row and its worst, and the others, the greatest change first."""
    alike = not any(each["differences"] for each in data["parity"])
    for sentence in data["sentences"]:
        console.print(sentence, style=None if alike else "bold red", highlight=False)
    best, *rest, worst = sorted(table, key=_worse)
    rest.sort(key=lambda row: -abs(_worse(row)))
    groups = [*["the best row, and the worst"] * 2, *["the others, the greatest change first"] * len(rest)]
    pairs = zip(groups, (best, worst, *rest), strict=True)
    ranked = [replace(row, measure=replace(row.measure, group=group)) for group, row in pairs]
    judged = table[0].measure.judged
    rows.print_table(console, ("measure", *ARMS, "fastpath / stock", "verdict" if judged else ""), ranked)
    for line in rows.summary(table) if judged else [_TOO_FEW]:
        console.print(line, highlight=False)


def _worse(row: Row) -> float:
    """By how much fastpath is worse, as a logarithm or, beside a zero, in the row's unit; better is below zero."""
    stock, fastpath = map(statistics.median, row.values.values())
    change = math.log(row.ratio) if row.ratio else fastpath - stock
    return 0.0 if math.isnan(change) else -change if row.measure.better == "higher" else change


def draw(data: Mapping[str, Any], path: Path) -> None:
    """A column for each load and a row for each figure, with one scale a row: bars are medians of starts.

    Args:
        data: As ``plain`` makes it; the same data always give the same file.
        path: An SVG.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    fewest = min(sum((start["arm"], start["load"]) == (arm, "waves") for start in data["starts"]) for arm in ARMS)
    few = fewest < verdict.starts_for(0)
    # Text stays text: it is smaller, and a reader's own letters are no wider than those that it is laid out with.
    with mpl.rc_context({"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "demo"}):
        picture = Picture(figsize=(9, 6.5), layout="constrained")
        grid = picture.subplots(len(PANELS), len(data["loads"]), sharex="row", squeeze=False)
        for row, (title, figures) in enumerate(PANELS):
            for axes, (name, load) in zip(grid[row], data["loads"].items(), strict=True):
                _panel(axes, [start for start in data["starts"] if start["load"] == name], *figures[name])
                head = f"{_ARRIVE[name]}, {how(name, *load['levels'])}\n" if row == 0 else ""
                axes.set_title(head + title, loc="left", fontsize=11, fontweight="bold")
        picture.suptitle("\n".join(_named(data, few, fewest)), fontsize=12)
        dark, light = COLOURS["stock"]
        shown = (
            Patch(color=dark, label="median request"),
            Patch(color=light, label="p99: 1 in 100 is worse"),
        )
        picture.legend(handles=shown, loc="outside lower center", ncols=2, frameon=False)
        words = {"Title": "Stock and omni-fastpath", "Description": "\n".join(data["sentences"])}
        drawn = io.StringIO()
        picture.savefig(drawn, format="svg", metadata={**words, "Date": None, "Creator": None})
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", drawn.getvalue()), encoding="utf-8")  # hundredths of a point do


def _named(data: Mapping[str, Any], few: bool, fewest: int) -> Iterator[str]:
    """What a reader must know who sees nothing but the picture."""
    load, here = data["loads"]["waves"], data["about"]
    least, most = (round(load["tokens"] * (1 + sign * load["vary"])) for sign in (-1, 1))
    yield f"vLLM-Omni {here['versions'].get('vllm-omni', '')}, stock and with omni-fastpath, on simulated stages"
    yield f"Qwen3-Omni, {load['replicas']} replicas of each stage, answers of {least} to {most} text tokens with audio"
    said = f"ONLY {fewest} OF EACH: A FIRST LOOK, NO RESULT" if few else f"median of {fewest} starts, each a tick"
    yield f"{said}; {here['date'][:10]}, {here['machine']['cores']} cores"


def _panel(axes: Any, starts: Sequence[Mapping[str, Any]], half: Figure, most: Figure | None) -> None:
    """A bar for each arm, with its number, and a tick for each start."""
    for place, (arm, (dark, light)) in enumerate(COLOURS.items()):
        values = [start["figures"].get(half, math.nan) for start in starts if start["arm"] == arm]
        slow = [start["figures"].get(most, math.nan) for start in starts if start["arm"] == arm and most]
        shown = [statistics.median(each) for each in (values, slow) if each]
        axes.barh([place] * len(shown), shown[::-1], 0.62, color=(dark, light)[: len(shown)][::-1])
        axes.plot(values, [place] * len(values), "|", color="black", markersize=9)
        said = " / ".join(f"{each:,.{1 if half is Figure.THROUGHPUT else 0}f}" for each in shown)
        axes.annotate(said, (max(*values, *shown), place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(COLOURS)), list(COLOURS))
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
