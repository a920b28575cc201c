"""The ladder as a picture: what a user waits for at each number of streams, as SVG.

    python -m benchmarks.picture results/NAME.jsonl ... --out docs/ladder.svg

Reads what ``python -m benchmarks.server --resume NAME`` wrote. Beside it ``-cpu.svg``: CPU of the API process a
request. A point is filled where the verdict against the better of stock's loops is better, and hollow where not; a
level at which an engine or the client was late has none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs.whole_server import judge
from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Load
from benchmarks.server.measure import unfit
from benchmarks.server.report import judged

ARMS = {
    "poll": "stock, poll loop",
    "event": "stock, event-driven",
    "default": "omni-fastpath",
    "limit": "the GPUs' limit",
}
LADDER = {
    "audio": (Figure.TEXT_P99, Figure.AUDIO_P99, Figure.DRY_P99, Figure.RATE),
    "text": (Figure.TEXT_P99, Figure.TEXT_GAP_P99, Figure.RATE),
}
CPU = {"audio": (Figure.PROCESS_MS,), "text": (Figure.PROCESS_MS,)}
TITLES = {"audio": "text and audio", "text": "text alone"}
WIDE, HIGH, LEFT, TOP, PLOT_W, PLOT_H = 225, 230, 44, 40, 168, 145
STYLE = """<style>text{font:11px sans-serif;fill:#222}.poll{--c:#b35900}.event{--c:#7b3fb5}.default{--c:#0068c9}
.limit{--c:#888}path{fill:none;stroke:var(--c);stroke-width:2}.limit path{stroke-dasharray:5 4}
circle{stroke:var(--c);stroke-width:1.5;fill:var(--c)}circle.hollow{fill:#fff}line{stroke:#ddd}rect{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#333}rect,circle.hollow{fill:#0d1117}
.poll{--c:#ff9b45}.event{--c:#c79bff}.default{--c:#58a6ff}}</style>"""

Points = Mapping[str, Mapping[float, tuple[float, bool]]]
"""By arm and streams: the median, and whether it is shown better."""


def points(lines: Sequence[Mapping[str, Any]], kind: str, names: Sequence[Figure]) -> dict[Figure, Points]:
    """The points of each figure, from the starts of a closed loop of a kind."""
    mine = [each for each in lines if each["load"]["kind"] == kind and each["load"]["loop"] == "closed"]
    found: dict[Figure, dict[str, dict[float, tuple[float, bool]]]] = {
        name: {arm: {} for arm in ARMS} for name in names
    }
    for key in sorted({key for each in mine for key in each["figures"]}, key=float):
        starts = {arm: [each for each in mine if each["arm"] == arm and key in each["figures"]] for arm in ARMS}
        starts = {arm: each for arm, each in starts.items() if each}
        if any(unfit(each["figures"][key]) for some in starts.values() for each in some):
            continue
        level, load = float(key), Load(**mine[0]["load"])
        rows, limit = judged(load, level, starts), figures(load.limit(level))
        of = {arm: [each["figures"] for each in some] for arm, some in starts.items()}
        for name in names:
            medians = {arm: statistics.median(each[key][name] for each in some) for arm, some in of.items()}
            stock = [arm for arm in ("poll", "event") if arm in medians]
            best = (max if name is Figure.RATE else min)(stock, key=medians.__getitem__, default=None)
            title = rows[key, name].title if (key, name) in rows else ""
            said = judge(of[best], of["default"], rows) if best and "default" in of else {}
            medians["limit"] = limit.get(name, math.nan)
            for arm, value in medians.items():
                better = arm == "default" and title in said and said[title].word == "better"
                if not math.isnan(value):
                    found[name][arm][level] = value, better
    return dict(found)


def panel(x: float, y: float, title: str, of: Points) -> str:
    """One panel, its upper left corner at *x* and *y*: streams on a log2 axis, and a log axis upwards."""
    levels = sorted({level for each in of.values() for level in each})
    values = [max(1.0, value) for each in of.values() for value, _ in each.values()]
    if not levels:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) + 1e-9))
    high = max(high, low + 1)
    across = max(1e-9, math.log2(levels[-1] / levels[0]))

    def at(level: float, value: float) -> tuple[float, float]:
        up = (math.log10(max(1.0, value)) - low) / (high - low)
        return x + LEFT + PLOT_W * math.log2(level / levels[0]) / across, y + TOP + PLOT_H * (1 - up)

    out = [f'<text x="{x + 8}" y="{y + 22}" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        _, line = at(levels[0], 10.0**power)
        out.append(f'<line x1="{x + LEFT}" x2="{x + LEFT + PLOT_W}" y1="{line:.1f}" y2="{line:.1f}"/>')
        out.append(f'<text x="{x + LEFT - 4}" y="{line + 4:.1f}" text-anchor="end">{10**power:g}</text>')
    for level in levels:
        across_at, _ = at(level, 1)
        out.append(f'<text x="{across_at:.1f}" y="{y + TOP + PLOT_H + 16}" text-anchor="middle">{level:g}</text>')
    for arm, each in of.items():
        places = [(*at(level, value), better) for level, (value, better) in each.items()]
        path = " L".join(f"{px:.1f} {py:.1f}" for px, py, _ in places)
        dots = (
            ""
            if arm == "limit"
            else "".join(
                f'<circle class="{"" if better else "hollow"}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>'
                for px, py, better in places
            )
        )
        if places:
            out.append(f'<g class="{arm}"><path d="M{path}"/>{dots}</g>')
    return "\n".join(out)


def svg(lines: Sequence[Mapping[str, Any]], of: Mapping[str, Sequence[Figure]]) -> str:
    """A picture: a row of panels for each kind of load, and what the lines are below."""
    high, out = HIGH * len(of) + 40, []
    for row, (kind, names) in enumerate(of.items()):
        out.append(f'<text x="8" y="{HIGH * row + 14}">{TITLES[kind]}, by streams</text>')
        for column, (name, each) in enumerate(points(lines, kind, names).items()):
            out.append(panel(WIDE * column, HIGH * row + 10, name, each))
    for place, (arm, said) in enumerate(ARMS.items()):
        x = 8 + 165 * place
        out.append(
            f'<g class="{arm}"><path d="M{x} {high - 20} h24"/></g><text x="{x + 30}" y="{high - 16}">{said}</text>'
        )
    out.append(f'<text x="670" y="{high - 16}">filled point: shown better than stock</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {high}" width="900" height="{high}">'
    return "\n".join([head, STYLE, f'<rect width="900" height="{high}"/>', *out, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of benchmarks.server --resume")
    parser.add_argument("--out", type=Path, required=True, help="NAME.svg; NAME-cpu.svg is written beside it")
    options = parser.parse_args(argv)
    lines = [json.loads(line) for path in options.results for line in path.read_text().splitlines() if line.strip()]
    if len({json.dumps(each["host"]) + each["load"]["layout"] for each in lines}) > 1:
        parser.error("the files are of several releases, engines or layouts")
    options.out.write_text(svg(lines, LADDER))
    options.out.with_name(f"{options.out.stem}-cpu.svg").write_text(svg(lines, CPU))


if __name__ == "__main__":
    main()
