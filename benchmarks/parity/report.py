"""The report: one HTML file that needs nothing else, and the raw numbers as JSON."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})

from matplotlib.axes import Axes  # noqa: E402 - after the backend
from matplotlib.figure import Figure  # noqa: E402

from benchmarks.parity import figures  # noqa: E402
from benchmarks.parity.figures import Start  # noqa: E402
from benchmarks.parity.load import Load  # noqa: E402
from benchmarks.parity.measure import Outcome  # noqa: E402
from benchmarks.parity.words import heading  # noqa: E402
from benchmarks.rigs.samples import times  # noqa: E402
from omni_fastpath.compare import rows  # noqa: E402
from omni_fastpath.compare.answers import parity_line  # noqa: E402
from omni_fastpath.compare.rows import Row  # noqa: E402

_COLOURS = {"stock": ("#c2571a", "#e6a15c", "#8a3b0e"), "fastpath": ("#1f5fa8", "#6fa8dc", "#103a6b")}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; vertical-align: bottom; }
th:first-child, td:first-child, td:last-child { text-align: left; }
tr.group td { font-weight: 600; background: #f3f3f3; text-align: left; }
.better { color: #17692b; font-weight: 600; } .worse { color: #a31515; font-weight: 600; }
.bad { color: #fff; background: #a31515; padding: .5em; }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 12px; }
svg { max-width: 100%; height: auto; }
"""


def plain(
    outcomes: Sequence[Outcome], table: Sequence[Row], parity: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that the report rests on, as plain data."""
    return {
        "schema": 2,
        "about": about,
        "parity": parity,
        "summary": rows.summary(table),
        "rows": rows.plain(table),
        "starts": [
            {
                **asdict(outcome.start),
                "bench": outcome.bench,
                "processes": outcome.proof.processes,
                "counters": outcome.proof.counters,
                "counters_moved": outcome.moved,
            }
            for outcome in outcomes
        ],
    }


def page(
    outcomes: Sequence[Outcome],
    table: Sequence[Row],
    parity: Mapping[str, Any],
    about: Mapping[str, Any],
    load: Load,
) -> str:
    """The report as HTML."""
    starts = [outcome.start for outcome in outcomes]
    parts = ["<h1>omni-fastpath: stock and fastpath, side by side</h1>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in (*heading(about), about["date"])]
    parts += _section("Result", [_result(starts, table, parity)])
    parts += _section("Plots", _plots(starts, load.concurrency))
    parts += _section("What the fastpath arm's patches did", [_counters(outcomes)])
    parts += _section("What each server said it was", [_states(outcomes)])
    parts += _section("Configuration", [_configuration(about, load)])
    parts += _section("How to reproduce", [_reproduce(about)])
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>omni-fastpath, parity</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, content: Iterable[str]) -> list[str]:
    return [f"<h2>{html.escape(title)}</h2>", *content]


def _result(starts: Sequence[Start], table: Sequence[Row], parity: Mapping[str, Any]) -> str:
    names = rows.header(starts)
    lines = [_line(names, "th")]
    group = ""
    for row in table:
        if row.measure.group != group:
            group = row.measure.group
            lines.append(f'<tr class="group"><td colspan="{len(names)}">{html.escape(group)}</td></tr>')
        kind = row.verdict.word if row.verdict is not None and row.verdict.word in ("better", "worse") else ""
        lines.append(_line(rows.cells(row), last_class=kind))
    alarm = ' class="bad"' if parity["differences"] else ""
    notes = [*rows.summary(table), figures.CLOSED_LOOP]
    return (
        f"<table>{''.join(lines)}</table>"
        + "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        + f"<p{alarm}>{html.escape(parity_line(parity))}</p>"
    )


def _line(cells: Sequence[str], tag: str = "td", last_class: str = "") -> str:
    attributes = ["" for _ in cells]
    if last_class:
        attributes[-1] = f' class="{last_class}"'
    return (
        "<tr>"
        + "".join(
            f"<{tag}{attribute}>{html.escape(cell)}</{tag}>" for cell, attribute in zip(cells, attributes, strict=True)
        )
        + "</tr>"
    )


# ---- Plots ----


def _plots(starts: Sequence[Start], concurrency: int) -> list[str]:
    series = list(_series(starts))
    return [
        _svg(
            "Time to first audio packet by request start order", lambda figure: _by_order(figure, series, concurrency)
        ),
        _svg("Distribution of latencies over all requests", lambda figure: _distributions(figure, series)),
        _svg("Throughput and processor time", lambda figure: _bars(figure, series), height=2.8),
    ]


def _series(starts: Sequence[Start]) -> Iterable[tuple[str, str, Start]]:
    counts = {"stock": 0, "fastpath": 0}
    for start in starts:
        shades = _COLOURS[start.arm]
        counts[start.arm] += 1
        yield f"{start.arm} {counts[start.arm]}", shades[(counts[start.arm] - 1) % len(shades)], start


def _svg(title: str, draw: Callable[[Figure], None], height: float = 3.4) -> str:
    figure = Figure(figsize=(10, height), layout="constrained")
    figure.suptitle(title)
    draw(figure)
    buffer = io.StringIO()
    # Without metadata nothing in the picture names an address.
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    picture = buffer.getvalue()
    picture = picture[picture.index("<svg") :]
    return f'<figure role="img" aria-label="{html.escape(title)}">{picture}</figure>'


def _by_order(figure: Figure, series: Sequence[tuple[str, str, Start]], concurrency: int) -> None:
    axes = figure.subplots()
    for name, colour, start in series:
        points = [(each.order, 1000 * each.ttfp) for each in start.samples if each.ttfp is not None]
        points.sort()
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=0.8, color=colour, label=name)
    last = max(len(start.samples) for _, _, start in series)
    for edge in range(concurrency, last, concurrency):
        axes.axvline(edge - 0.5, color="#888", linewidth=0.8, linestyle=":")
    axes.set(xlabel="request, in start order (dotted: waves)", ylabel="TTFP, ms", ylim=(0, None))
    axes.legend(ncols=len(series))


def _distributions(figure: Figure, series: Sequence[tuple[str, str, Start]]) -> None:
    names = {"ttfp": "TTFP", "e2e": "E2E", "ttft": "time to first text"}
    panels: Sequence[Axes] = figure.subplots(1, len(names), sharey=True)
    for axes, (field, title) in zip(panels, names.items(), strict=True):
        for name, colour, start in series:
            values = sorted(1000 * value for value in times(start.samples, field))
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", color=colour, label=name)
        axes.set(xlabel=f"{title}, ms", xlim=(0, None), ylim=(0, 1))
    panels[0].set_ylabel("share of requests")
    panels[-1].legend(loc="lower right")


def _bars(figure: Figure, series: Sequence[tuple[str, str, Start]]) -> None:
    reads: Mapping[str, Callable[[Start], float]] = {
        "throughput, req/s": lambda start: start.throughput,
        "server CPU, s": lambda start: start.cpu_total_s,
        "server CPU a second of load, cores": lambda start: start.cpu_total_s / start.duration_s,
    }
    panels: Sequence[Axes] = figure.subplots(1, len(reads))
    labels, colours = [name for name, _, _ in series], [colour for _, colour, _ in series]
    for axes, (title, read) in zip(panels, reads.items(), strict=True):
        axes.bar(labels, [read(start) for _, _, start in series], color=colours)
        axes.set_title(title, fontsize=9)
        axes.tick_params(axis="x", rotation=20)


# ---- What was so ----


def _counters(outcomes: Sequence[Outcome]) -> str:
    columns = [outcome for outcome in outcomes if outcome.moved]
    names = [(patch, event) for patch, events in columns[0].moved.items() for event in events] if columns else []
    lines = [_line(["patch", "counter", *(f"fastpath {place}" for place in range(1, len(columns) + 1))], "th")]
    for patch, event in names:
        # A maximum does not add up: what it was, not how far it moved.
        read = "counters" if event.startswith("longest") else "moved"
        values = [
            str((outcome.proof.counters if read == "counters" else outcome.moved).get(patch, {}).get(event, 0))
            for outcome in columns
        ]
        lines.append(_line([patch, event, *values]))
    requests = "during warm-up, bench and capture client together"
    return f"<p>API server process, {requests}.</p><table>{''.join(lines)}</table>"


def _states(outcomes: Sequence[Outcome]) -> str:
    lines = [_line(["start", "processes", "patch", "state", "reason"], "th")]
    for place, outcome in enumerate(outcomes, 1):
        seen: dict[tuple[str, str, str], list[str]] = {}
        for role, patches in sorted(outcome.proof.processes.items()):
            for patch, record in patches.items():
                seen.setdefault((patch, record["state"], record["reason"]), []).append(role)
        for (patch, state, reason), roles in seen.items():
            title = f"{place} {outcome.start.arm}"
            lines.append(_line([title, ", ".join(roles), patch, state, reason]))
    return f"<table>{''.join(lines)}</table>"


def _configuration(about: Mapping[str, Any], load: Load) -> str:
    machine = about["machine"]
    return (
        f"<p>Both arms: {html.escape(about['deploy'])} of the simulated device, and in the environment</p>"
        f"<pre>OMNI_SIMULATED_DEVICE=1\nOMNI_SIMULATED_DEVICE_CONFIG='{html.escape(load.device)}'</pre>"
        "<p>Stock: <code>OMNI_FASTPATH=0</code>. Fastpath: no variable of ours; the deploy YAML is the overlay that "
        f"<code>omni-fastpath overlay {html.escape(about['deploy'])}</code> writes, that is</p>"
        f"<pre>base_config: .../{html.escape(about['deploy'])}\nfastpath: true</pre>"
        f"<p>{machine['cores']} of the machine's {about['cores_of_machine']} cores "
        f"({html.escape(machine['processor'])}) held the server's seven processes and the clients.</p>"
    )


def _reproduce(about: Mapping[str, Any]) -> str:
    load = about["load"]
    command = f"--concurrency {load['concurrency']} --starts {len(about['order']) // 2}"
    return (
        "<p>From the repository's root; the first line makes .venv, and does nothing when it is there.</p>"
        f"<pre>bash scripts/setup.sh\n.venv/bin/python -m benchmarks.parity {command}</pre>"
        "<p>The same without a machine of four cores: put <code>taskset -c 0,1</code> before the second line. Raw "
        "numbers are in parity.json beside this file, server logs in parity-logs/.</p>"
    )
