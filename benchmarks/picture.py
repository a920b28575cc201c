"""A ladder of streams, from result files of ``benchmarks.server`` to an SVG.

    python -m benchmarks.picture NAME... --out docs/ladder.svg

Each NAME is a file ``results/NAME.jsonl`` of runs with ``--resume NAME`` on one release, of text and audio, of text
alone, or of both, each level in one file. A point of fastpath is filled where the verdict of that level is better than
each loop of stock, and hollow where it is not. A level that measured this machine has no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.rigs import results, side_by_side
from benchmarks.rigs.whole_server import judge
from benchmarks.server.arms import STOCK
from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Kind, Load
from benchmarks.server.measure import Start
from benchmarks.server.report import judged, median_of, unfit_starts

OURS, LIMIT = "default", "limit"
LINES: Mapping[str, tuple[str, str, str]] = {
    "poll": ("vLLM-Omni, poll loop", "#d1730f", ""),
    "event": ("vLLM-Omni, event-driven loop", "#8250df", ""),
    OURS: ("omni-fastpath", "#1a7f37", ""),
    LIMIT: ("what the GPUs allow", "#8c959f", "5 4"),
}
"""Name, colour and dashes of each line."""
MARKS: Mapping[str, tuple[str, str]] = {
    "better": ("better than each of these loops (six starts)", LINES[OURS][1]),
    "": ("not shown better", ""),
    "worse": ("worse than one of them", "#cf222e"),
}
"""What a point of omni-fastpath says by its verdict, and the colour of its filling, if it has one."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.s{font-size:11px;fill:#59636e}.b{font-weight:600}"
    ".g{stroke:#d1d9e0}.f{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.g{stroke:#3d444d}.f{fill:#0d1117}}"
)
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y, LEGEND = 160, 140, 50, 26, 15, 52, 64


class Panel(NamedTuple):
    """One figure of one load, on an axis of milliseconds by powers of ten, or from zero."""

    kind: Kind
    figure: Figure
    title: str
    is_log: bool = True


PANELS = (
    (
        Panel("audio", Figure.TEXT_P99, "first text, p99"),
        Panel("audio", Figure.AUDIO_P99, "first audio, p99"),
        Panel("audio", Figure.DRY_P99, "underrun, p99"),
        Panel("audio", Figure.RATE, "requests per second", is_log=False),
    ),
    (
        Panel("text", Figure.TEXT_P99, "first text, p99"),
        Panel("text", Figure.TEXT_GAP_P99, "largest text gap, p99"),
        Panel("text", Figure.RATE, "requests per second", is_log=False),
        Panel("audio", Figure.PROCESS_MS, "CPU ms per request", is_log=False),
    ),
)
TITLES: Mapping[Kind, str] = {"audio": "text and audio", "text": "text alone"}


class Rung(NamedTuple):
    """One level of one load: the starts by arm, and figures better than each loop of stock, or worse than one."""

    starts: Mapping[str, Sequence[Start]]
    limit: Mapping[str, float]
    better: frozenset[str]
    worse: frozenset[str]
    is_fit: bool


def read(names: Sequence[str]) -> dict[Kind, dict[float, Rung]]:
    """The rungs of the files' loads, by kind and level."""
    found: dict[Kind, dict[float, dict[str, list[Start]]]] = {}
    loads: dict[tuple[Kind, float], Load] = {}
    for line in (line for name in names for line in results.read(name) if line["arm"] in (*STOCK, OURS)):
        load = Load(**{**line["load"], "levels": tuple(line["load"]["levels"])})
        for level in load.levels:
            loads[load.kind, level] = load
            found.setdefault(load.kind, {}).setdefault(level, {}).setdefault(line["arm"], []).append(line)
    return {
        kind: {level: _rung(loads[kind, level], level, arms) for level, arms in sorted(levels.items())}
        for kind, levels in found.items()
    }


def _rung(load: Load, level: float, arms: Mapping[str, Sequence[Start]]) -> Rung:
    stocks = [stock for stock in STOCK if {stock, OURS} <= arms.keys()]
    rows, better, worse = judged(load, level, arms), set[str](Figure if stocks else ()), set[str]()
    given = {arm: [start["figures"] for start in starts] for arm, starts in arms.items()}
    for stock in stocks:
        said = judge(given[stock], given[OURS], rows)
        words = {name: str(said.get(row.name, "")) for (_, name), row in rows.items()}
        better &= {name for name, word in words.items() if word.startswith("better")}
        worse |= {name for name, word in words.items() if word.startswith("worse")}
    is_fit = not unfit_starts(arms, level)
    return Rung(arms, figures(load.limit(level)), frozenset(better), frozenset(worse), is_fit)


def draw(found: Mapping[Kind, Mapping[float, Rung]]) -> Iterator[str]:
    """The lines of the SVG."""
    width = 4 * (WIDTH + LEFT + GAP_X)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {LEGEND + 2 * (HEIGHT + TOP + GAP_Y)}">'
    yield f"<style>{STYLE}</style>"
    drawn = {LIMIT, *(arm for rungs in found.values() for rung in rungs.values() for arm in rung.starts)}
    for place, (name, colour, dashes) in enumerate(line for arm, line in LINES.items() if arm in drawn):
        x = LEFT + place * 215
        yield f'<path d="M{x} 14h24" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
        yield f'<text x="{x + 30}" y="18">{escape(name)}</text>'
    for place, (verdict, (said, _)) in enumerate(MARKS.items()):
        x = LEFT + (0, 330, 545)[place]
        yield f'{_mark(x + 12, 36, verdict)}<text x="{x + 30}" y="40">{said}</text>'
    for row, panels in enumerate(PANELS):
        for column, panel in enumerate(panels):
            at = column * (WIDTH + LEFT + GAP_X) + LEFT, LEGEND + TOP + row * (HEIGHT + TOP + GAP_Y)
            if rungs := found.get(panel.kind):
                yield f'<g transform="translate({at[0]} {at[1]})">'
                yield from _panel(panel, rungs)
                yield "</g>"
    yield "</svg>"


def _panel(panel: Panel, rungs: Mapping[float, Rung]) -> Iterator[str]:
    lines: dict[str, dict[float, float]] = {name: {} for name in LINES}
    for level, rung in rungs.items():
        for arm, starts in rung.starts.items():
            lines[arm][level] = median_of(starts, level, panel.figure)
        if panel.figure in rung.limit:
            lines[LIMIT][level] = rung.limit[panel.figure]
    shown = [value for line in lines.values() for value in line.values() if value > 0]
    low = 10 ** math.floor(math.log10(min(shown))) if panel.is_log else 0.0
    high = 10 ** math.ceil(math.log10(max(shown))) if panel.is_log else 1.1 * max(shown)

    def x(level: float) -> float:
        first, last = (math.log2(each) for each in (min(rungs), max(rungs)))
        return round(WIDTH * (math.log2(level) - first) / ((last - first) or 1), 1)

    def y(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low) if panel.is_log else value / high
        return round(HEIGHT * (1 - share), 1)

    yield f'<text class="b" y="-10">{panel.title}</text><text class="s" y="-24">{TITLES[panel.kind]}</text>'
    if panel.is_log:
        yield f'<text class="s" x="{WIDTH}" y="-24" text-anchor="end">log axis</text>'
    for value in _ticks(low, high, is_log=panel.is_log):
        yield f'<path class="g" d="M0 {y(value)}h{WIDTH}"/>'
        label = f"{value:g}" if not panel.is_log else f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"
        yield f'<text class="s" x="-4" y="{y(value) + 4}" text-anchor="end">{label}</text>'
    for level in rungs:
        yield f'<text class="s" x="{x(level)}" y="{HEIGHT + 16}" text-anchor="middle">{level:g}</text>'
    yield f'<text class="s" x="{WIDTH / 2}" y="{HEIGHT + 30}" text-anchor="middle">streams</text>'
    for name, line in lines.items():
        _, colour, dashes = LINES[name]
        path = "L".join(f"{x(level)} {y(value)}" for level, value in line.items() if not math.isnan(value))
        if path:
            yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
    for level, value in lines[OURS].items():
        rung = rungs[level]
        if rung.is_fit and not math.isnan(value):
            verdict = "better" if panel.figure in rung.better else "worse" if panel.figure in rung.worse else ""
            yield _mark(x(level), y(value), verdict)


def _mark(x: float, y: float, verdict: str) -> str:
    colour = MARKS[verdict][1] or LINES[OURS][1]
    filled = f'fill="{colour}"' if verdict else 'class="f"'
    return f'<circle cx="{x}" cy="{y}" r="4.5" {filled} stroke="{colour}" stroke-width="2"/>'


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if is_log:
        return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200) if high / each <= 5)
    return [step * count for count in range(int(high / step) + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = side_by_side.parser("benchmarks.picture", __doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    options.out.write_text("\n".join(draw(read(options.names))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
