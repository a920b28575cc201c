"""One HTML page that needs nothing else: the table of two arms, pictures of it, and whatever was told beside it.

The template is jinja2's, which vLLM brings. The pictures are plotly's, whose script is put into the page, so that it
shows them without a network; without plotly the page has the tables alone, and says so.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("page.html")
INSTALL = "pip install 'omni-fastpath[ab]'"

COLOURS = ("#c2571a", "#1f5fa8")
"""Of the first arm and of the second."""


@dataclass(frozen=True)
class Listing:
    """A further table.

    Attributes:
        title: Above it.
        columns: Their names.
        lines: Its cells.
        note: Beneath the title; empty for none.
    """

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        title: Of the page.
        heading: Lines beneath it: what was compared, where and when.
        arms: The second is judged against the first.
        order: The arm of each start, in the order of running.
        rows: As ``rows.plain`` gives them.
        columns: Names of the table's columns, for ``cells``.
        cells: One of text for each row and column.
        notes: Lines beneath the table.
        answers: What was found of the answers, in a sentence; empty: nothing.
        alarms: What must not be overlooked, above everything.
        listings: Further tables.
        figures: Further pictures, as plotly takes them: ``data`` and ``layout``.
        commands: What to run to get this again.
    """

    title: str
    heading: Sequence[str]
    arms: tuple[str, str]
    order: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    answers: str = ""
    alarms: Sequence[str] = ()
    listings: Sequence[Listing] = ()
    figures: Sequence[Mapping[str, Any]] = ()
    commands: Sequence[str] = field(default_factory=tuple)


def can_be_made() -> bool:
    """Whether jinja2 is installed."""
    return importlib.util.find_spec("jinja2") is not None


def has_pictures() -> bool:
    """Whether plotly is installed."""
    return importlib.util.find_spec("plotly") is not None


def render(page: Page, *, pictures: bool | None = None) -> str:
    """The page as HTML.

    Args:
        page: What it shows.
        pictures: With them or without; None: if they can be made.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2  # noqa: PLC0415 - an extra of ours, and nothing that a serving process needs

    drawn = _pictures(page) if (has_pictures() if pictures is None else pictures) else None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        page=page,
        table=list(zip(page.rows, page.cells, strict=True)),
        groups=list(dict.fromkeys(row["group"] for row in page.rows)),
        pictures=None if drawn is None else "\n".join(drawn),
        script=None if not drawn else _script(),
        install=INSTALL,
    )


def _script() -> str:
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - as above

    return f"<script>{get_plotlyjs()}</script>"


def figures(page: Page) -> list[Mapping[str, Any]]:
    """What there is to draw, as plotly takes it: ``data`` and ``layout``."""
    drawn = (_intervals(page), _ratios(page), _by_start(page), *page.figures)
    return [figure for figure in drawn if figure is not None]


def _pictures(page: Page) -> list[str]:
    """The figures as HTML, without the script; empty where there is nothing to draw."""
    import plotly.io  # noqa: PLC0415 - as above

    return [
        plotly.io.to_html(
            json.loads(json.dumps(figure)),
            full_html=False,
            include_plotlyjs=False,
            config={"displaylogo": False, "responsive": True},
            validate=False,
            div_id=f"picture-{place}",
        )
        for place, figure in enumerate(figures(page))
    ]


def layout(title: str, **more: Any) -> dict[str, Any]:
    """The layout that every picture of a page has, and what one of them has besides."""
    font = {"family": "system-ui, sans-serif", "size": 12}
    return {"title": {"text": title}, "font": font, "margin": {"l": 260, "r": 30, "t": 50}, **more}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['name']} ({row['group']})"


def _intervals(page: Page) -> dict[str, Any] | None:
    """Each verdict: the ratio, and those that the test does not reject."""
    judged = [row for row in page.rows if row["verdict"] and row["verdict"]["ratio"]]
    told = [row for row in judged if None not in row["verdict"]["interval"]]
    if not judged:
        return None
    colours = {"better": "#17692b", "worse": "#a31515"}
    ratios = [row["verdict"]["ratio"] for row in judged]
    bounds = {
        _name(row): (
            row["verdict"]["ratio"] - row["verdict"]["interval"][0],
            row["verdict"]["interval"][1] - row["verdict"]["ratio"],
        )
        for row in told
    }
    below, above = ([bounds.get(_name(row), (0.0, 0.0))[side] for row in judged] for side in (0, 1))
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": ratios,
        "y": [_name(row) for row in judged],
        "marker": {"size": 9, "color": [colours.get(row["verdict"]["word"], "#777") for row in judged]},
        "error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": "#999"},
        "text": [row["verdict"]["word"] for row in judged],
        "hovertemplate": "%{y}: %{x:.3f} %{text}<extra></extra>",
    }
    a, b = page.arms
    title = f"{b} / {a}, with the ratios that the test does not reject"
    return {
        "data": [trace],
        "layout": layout(
            title,
            xaxis=_ratio_axis(b, a),
            yaxis=_upside_down(len(judged)),
            shapes=[_one()],
            height=140 + 28 * len(judged),
        ),
    }


def _ratios(page: Page) -> dict[str, Any] | None:
    """Every start of every measure, over the median of the first arm's starts."""
    drawn = [row for row in page.rows if _half(row["values"][page.arms[0]])]
    if not drawn:
        return None
    traces = []
    for arm, colour in zip(page.arms, COLOURS, strict=True):
        points = [
            (value / _half(row["values"][page.arms[0]]), _name(row), value)
            for row in drawn
            for value in row["values"][arm]
            if value is not None
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm,
                "x": [point[0] for point in points],
                "y": [point[1] for point in points],
                "customdata": [point[2] for point in points],
                "marker": {"size": 8, "color": colour, "opacity": 0.6},
                "hovertemplate": "%{y}: %{customdata:.4g}<extra>" + _plain(arm) + "</extra>",
            }
        )
    title = f"Every start, over the median of {page.arms[0]}"
    return {
        "data": traces,
        "layout": layout(
            title,
            xaxis=_ratio_axis("start", f"median of {page.arms[0]}"),
            yaxis=_upside_down(len(drawn)),
            shapes=[_one()],
            height=160 + 22 * len(drawn),
        ),
    }


def _by_start(page: Page) -> dict[str, Any] | None:
    """The primary measure in the order of running: what drifts on the machine shows here."""
    row = next((row for row in page.rows if row.get("primary")), None)
    if row is None or not any(row["values"].values()):
        return None
    traces = []
    for arm, colour in zip(page.arms, COLOURS, strict=True):
        places = [place for place, name in enumerate(page.order, 1) if name == arm]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm,
                "x": places[: len(row["values"][arm])],
                "y": row["values"][arm],
                "marker": {"size": 10, "color": colour},
            }
        )
    unit = f", {row['unit']}" if row["unit"] else ""
    return {
        "data": traces,
        "layout": layout(
            f"{_name(row)} in the order of running",
            xaxis={"title": {"text": "start"}, "dtick": 1},
            yaxis={"title": {"text": f"{row['name']}{unit}"}, "rangemode": "tozero"},
            height=360,
        ),
    }


def _half(values: Sequence[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    if not known:
        return 0.0
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2


def _ratio_axis(over: str, under: str) -> dict[str, Any]:
    return {"type": "log", "title": {"text": f"{over} / {under}"}, "tickformat": ".2~f", "nticks": 8}


def _upside_down(rows: int) -> dict[str, Any]:
    return {"autorange": "reversed", "automargin": True, "range": [-1, rows]}


def _one() -> dict[str, Any]:
    line = {"color": "#222", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": line}


def _plain(text: str) -> str:
    return text.replace("<", "").replace(">", "").replace("%", "")
