"""What the demo shows: sentences, the table, the picture, and the numbers that they rest on."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo.load import STAGES, paced
from benchmarks.demo.measure import Start, how
from benchmarks.rigs.about import about
from benchmarks.server.figures import Figure
from benchmarks.server.load import Load
from omni_fastpath.tools.ab import rows, verdict
from omni_fastpath.tools.ab.answers import parity_line
from omni_fastpath.tools.ab.rows import ARMS, Row

SCHEMA = 6
"""Of ``demo.json``."""

_TOO_FEW = (
    f"So few starts cannot tell a difference from luck: ratios, no verdict; `--starts {verdict.STARTS}` gives one."
)
_BESIDE = {"waves": " (dotted: next wave)", "paced": ", in both"}
COLOURS = {"stock": "#e08a3c", "fastpath": "#12457a"}
"""Told apart in grey too."""

WHAT_IS_REAL = (
    "No GPU is needed: the stages are simulated (outputs on the clock). API server, HTTP, front end, orchestrator, "
    "output processing, metrics and logs are vLLM-Omni's own."
)
NOTES = (
    "Gap: the longest time between two packets of an answer. It stands before the last one, which waits for all "
    "earlier outputs of its request, those that nobody sees too; forward_gate makes these cheap, but acts in real "
    "stages alone. Silence: how long a listener who plays from the first packet on has nothing to play. First audio in "
    "the closed loop: of the requests after the first wave, which starts at once."
)


def plain(
    load: Load, starts: Sequence[Start], table: Sequence[Row], parity: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Everything that is shown and what it rests on, as plain data.

    Its ``sentences`` say what stock did, what fastpath did, and whether they answered alike.
    """
    loads = {"waves": load, "paced": paced(load, starts[0].rate)}
    return {
        "schema": SCHEMA,
        "about": {**about(), "command": command, "what": WHAT_IS_REAL, "stages": STAGES},
        "loads": {name: {**asdict(each), "deploy": each.deploy} for name, each in loads.items()},
        "parity": parity,
        "sentences": [
            *(_did(arm, load, [each for each in starts if each.arm == arm]) for arm in ARMS),
            parity_line(parity),
        ],
        "rows": rows.as_data(table),
        "starts": [asdict(start) for start in starts],
    }


def _did(arm: str, load: Load, starts: Sequence[Start]) -> str:
    figures = (Figure.THROUGHPUT, Figure.FIRST_TEXT, Figure.LATER_TTFP, Figure.LATER_TTFP_P99, Figure.GAP)
    answers, text, audio, slowest, gap = (
        statistics.median(start.figures["waves"].get(name, math.nan) for start in starts) for name in figures
    )
    return (
        f"{arm.capitalize()}, with {load.levels[0]:g} requests at a time: {answers:.1f} answers a second, first text "
        f"after {text:,.0f} ms, first audio after {audio:,.0f} ms (slowest of 100: {slowest:,.0f} ms), largest gap "
        f"{gap:,.0f} ms."
    )


def show(console: Console, data: Mapping[str, Any], table: Sequence[Row]) -> None:
    """The sentences, then the table: its best row and its worst, and the others, the greatest change first."""
    alike = not data["parity"]["differences"]
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
    """First audio of each request, in start order: lines are medians of starts, bands all of them; a panel a load.

    Args:
        data: As ``plain`` makes it; the same data always give the same file.
        path: An SVG.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure as Picture

    arms = {arm: [start["requests"] for start in data["starts"] if start["arm"] == arm] for arm in ARMS}
    fewest = min(map(len, arms.values()))
    few = fewest < verdict.starts_for(0)
    said = f"ONLY {fewest} OF EACH: A FIRST LOOK, NO RESULT" if few else f"median and range of {fewest} starts of each"
    # Text stays text: it is smaller, and a reader's own letters are no wider than those that it is laid out with.
    with mpl.rc_context({"font.size": 13, "axes.titlesize": 13, "svg.fonttype": "none", "svg.hashsalt": "demo"}):
        picture = Picture(figsize=(7, 7), layout="constrained")
        for axes, (name, load) in zip(picture.subplots(2, 1), data["loads"].items(), strict=True):
            [level] = load["levels"]
            for (arm, starts), width in zip(arms.items(), (1.5, 2.5), strict=True):
                asked = zip(*(start[name] for start in starts), strict=True)
                times = [[1000 * each["first_audio_s"] for each in same] for same in asked]
                least, half, most = ([each(same) for same in times] for each in (min, statistics.median, max))
                axes.fill_between(range(len(times)), least, most, color=COLOURS[arm], alpha=0.25, linewidth=0)
                axes.plot(half, "--" if few else "-", color=COLOURS[arm], linewidth=width, label=arm)
            axes.set_title(f"{how(name, level)}{_BESIDE[name]}", loc="left")
            axes.set(xlim=(0, len(times) - 1), ylim=(0, None), ylabel="ms (\N{DOWNWARDS ARROW} is better)")
            axes.grid(alpha=0.3)
            for edge in range(int(level), len(times), int(level)) if name == "waves" else ():
                axes.axvline(edge - 0.5, color="#555555", linewidth=1, linestyle=":")
        axes.set_xlabel("request, in the order of their beginnings")
        picture.suptitle(f"Time to first audio, simulated stages\n{said}")
        picture.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        words = {"Title": "Time to first audio of each request", "Description": "\n".join(data["sentences"])}
        drawn = io.StringIO()
        picture.savefig(drawn, format="svg", metadata={**words, "Date": None, "Creator": None})
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", drawn.getvalue()), encoding="utf-8")  # hundredths of a point do
