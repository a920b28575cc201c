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

from benchmarks.demo.measure import ROWS, Name, Start, how
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
"""For the median and for p99; different in grey too."""
_BARS = ("median", "p99")
_LEGEND = (
    "Less is better, except in requests per second.\n"
    "Underrun: the time without audio for a listener who plays from the first packet on."
)

_HEADS: Mapping[str, str] = {"waves": "full server", "paced": "below capacity"}

PANELS: Sequence[tuple[str, Mapping[Name, tuple[Figure | None, Figure | None]]]] = (
    ("first text, ms", dict.fromkeys(("waves", "paced"), (Figure.FIRST_TEXT, Figure.FIRST_TEXT_P99))),
    (
        "first audio, ms",
        {"waves": (Figure.LATER_TTFP, Figure.LATER_TTFP_P99), "paced": (Figure.TTFP, Figure.TTFP_P99)},
    ),
    ("requests per second", {"waves": (Figure.THROUGHPUT, None), "paced": (None, None)}),
    ("underrun, ms", dict.fromkeys(("waves", "paced"), (None, Figure.DRY))),
)
"""Rows of the picture: what the dark bar shows of each load, and the light one. A paced load fixes its rate."""

WHAT_IS_REAL = (
    "No GPU is needed: the stages are simulated (outputs on the clock). API server, HTTP, front end, orchestrator, "
    "output processing, metrics and logs are vLLM-Omni's own."
)
NOTES = (
    "Underrun: the time without audio for a listener who plays from the first packet on. First audio in the closed "
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
    rate, text, audio, slowest, dry = (
        statistics.median(start.figures.get(name, math.nan) for start in of_arm) for name in figures
    )
    return (
        f"{arm.capitalize()}, {starts[0].level:g} requests at a time: {rate:.1f} requests per second, first text "
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
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    judged = (row for row in ROWS if row[0] in data["loads"])
    verdicts = {row[:2]: found["verdict"] for row, found in zip(judged, data["rows"], strict=True)}
    # Text stays text: it is smaller, and a reader's own letters are no wider than those that it is laid out with.
    with mpl.rc_context({"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "demo"}):
        picture = Picture(figsize=(9.5, 7), layout="constrained")
        grid = picture.subplots(len(PANELS), len(data["loads"]), sharex="row", squeeze=False)
        for row, (title, figures) in enumerate(PANELS):
            for axes, (name, load) in zip(grid[row], data["loads"].items(), strict=True):
                if not any(figures[name]):
                    axes.set_axis_off()
                    axes.set_title(f"{title}: the same", loc="left", fontsize=11, fontweight="bold")
                    continue
                _panel(axes, [start for start in data["starts"] if start["load"] == name], *figures[name])
                head = "" if row else f"{_HEADS[name]}, {how(name, *load['levels']).replace(' ', ' requests ', 1)}\n"
                axes.set_title(head + title, loc="left", fontsize=11, fontweight="bold")
                said = "\n".join(
                    f"{bar}: {verdicts[name, figure]['word']}"
                    for bar, figure in zip(_BARS, figures[name], strict=True)
                    if figure is not None and verdicts.get((name, figure))
                )
                axes.set_title(said, loc="right", fontsize=9)
        picture.suptitle("\n".join(_named(data)), fontsize=12)
        shown = (
            Patch(color=COLOURS["stock"][0], label=_BARS[0]),
            Patch(color=COLOURS["stock"][1], label=f"{_BARS[1]}: 1 request in 100 is worse"),
            Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label="one run of a server"),
        )
        picture.legend(handles=shown, loc="outside lower center", ncols=3, frameon=False, title=_LEGEND)
        words = {"Title": "Stock and omni-fastpath", "Description": "\n".join(data["sentences"])}
        drawn = io.StringIO()
        picture.savefig(drawn, format="svg", metadata={**words, "Date": None, "Creator": None})
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", drawn.getvalue()), encoding="utf-8")  # hundredths of a point do


def _named(data: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know who sees nothing but the picture."""
    load, here = data["loads"]["waves"], data["about"]
    least, most = (round(load["tokens"] * (1 + sign * load["vary"])) for sign in (-1, 1))
    fewest = min(sum((start["arm"], start["load"]) == (arm, "waves") for start in data["starts"]) for arm in ARMS)
    yield f"vLLM-Omni {here['versions'].get('vllm-omni', '')}, stock and with omni-fastpath; simulated stages, no GPU"
    yield f"Qwen3-Omni, {load['replicas']} replicas of each stage, answers of {least} to {most} text tokens with audio"
    runs = f"medians of {fewest} runs of each server"
    if fewest < verdict.starts_for(0):
        runs = f"ONLY {fewest} OF EACH: A FIRST LOOK, NO RESULT"
    yield f"{runs}; {here['date'][:10]}, {here['machine']['cores']} cores"


def _panel(axes: Any, starts: Sequence[Mapping[str, Any]], *figures: Figure | None) -> None:
    """For each arm a bar of each figure with its number, and a tick for each start."""
    for place, (arm, colours) in enumerate(COLOURS.items()):
        of_arm = [start["figures"] for start in starts if start["arm"] == arm]
        bars = [(colour, figure) for colour, figure in zip(colours, figures, strict=True) if figure is not None]
        values = [[each.get(figure, math.nan) for each in of_arm] for _, figure in bars]
        shown = [statistics.median(each) for each in values]
        axes.barh([place] * len(bars), shown[::-1], 0.62, color=[colour for colour, _ in bars][::-1])
        axes.plot(values[0], [place] * len(of_arm), "|", color="black", markersize=9)
        digits = 1 if Figure.THROUGHPUT in figures else 0
        said = " / ".join(f"{each:,.{digits}f}" for each in shown)
        axes.annotate(said, (max(*values[0], *shown), place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(COLOURS)), list(COLOURS))
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
