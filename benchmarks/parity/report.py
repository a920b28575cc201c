"""The report: one HTML file that needs nothing else, and the raw numbers as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.parity import figures
from benchmarks.parity.figures import Start
from benchmarks.parity.load import Load
from benchmarks.parity.measure import Outcome
from benchmarks.parity.words import heading
from benchmarks.rigs.samples import times
from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.answers import parity_line
from omni_fastpath.tools.ab.page import Listing, Page, layout
from omni_fastpath.tools.ab.rows import ARMS, Row

_COLOURS = {"stock": ("#c2571a", "#e6a15c", "#8a3b0e"), "fastpath": ("#1f5fa8", "#6fa8dc", "#103a6b")}
_LATENCIES = {"ttfp": "TTFP", "e2e": "E2E", "ttft": "time to first text"}


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
) -> Page:
    """The report as `omni-fastpath ab`'s page has it, with the requests' own times and what the patches did."""
    starts = [outcome.start for outcome in outcomes]
    return Page(
        title="omni-fastpath: stock and fastpath, side by side",
        heading=[*heading(about), about["date"], *_configuration(about)],
        arms=ARMS,
        order=[start.arm for start in starts],
        rows=rows.plain(table),
        columns=rows.header(starts),
        cells=[rows.cells(row) for row in table],
        notes=[*rows.summary(table), figures.CLOSED_LOOP],
        answers=parity_line(parity),
        alarms=["THE ARMS DID NOT ANSWER ALIKE"] if parity["differences"] else [],
        listings=[_counters(outcomes), _states(outcomes)],
        figures=[_by_order(starts, load.concurrency), _distributions(starts)],
        commands=_commands(about, load),
    )


# ---- Pictures ----


def _series(starts: Sequence[Start]) -> Iterable[tuple[str, str, Start]]:
    counts = dict.fromkeys(ARMS, 0)
    for start in starts:
        shades = _COLOURS[start.arm]
        counts[start.arm] += 1
        yield f"{start.arm} {counts[start.arm]}", shades[(counts[start.arm] - 1) % len(shades)], start


def _by_order(starts: Sequence[Start], concurrency: int) -> dict[str, Any]:
    traces = []
    for name, colour, start in _series(starts):
        points = sorted((each.order, 1000 * each.ttfp) for each in start.samples if each.ttfp is not None)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [order for order, _ in points],
                "y": [ttfp for _, ttfp in points],
                "line": {"color": colour, "width": 1},
                "marker": {"size": 4},
            }
        )
    last = max(len(start.samples) for start in starts)
    line = {"color": "#888", "width": 1, "dash": "dot"}
    waves = [
        {"type": "line", "yref": "paper", "x0": edge - 0.5, "x1": edge - 0.5, "y0": 0, "y1": 1, "line": line}
        for edge in range(concurrency, last, concurrency)
    ]
    return {
        "data": traces,
        "layout": layout(
            "Time to first audio packet by request start order (dotted: waves)",
            xaxis={"title": {"text": "request, in start order"}},
            yaxis={"title": {"text": "TTFP, ms"}, "rangemode": "tozero"},
            shapes=waves,
            height=400,
        ),
    }


def _distributions(starts: Sequence[Start]) -> dict[str, Any]:
    traces, axes = [], {}
    for place, (field, title) in enumerate(_LATENCIES.items(), 1):
        number = "" if place == 1 else str(place)
        left = (place - 1) / len(_LATENCIES)
        domain = [left, left + 0.9 / len(_LATENCIES)]
        axes[f"xaxis{number}"] = {"title": {"text": f"{title}, ms"}, "domain": domain, "rangemode": "tozero"}
        for name, colour, start in _series(starts):
            values = sorted(1000 * value for value in times(start.samples, field))
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": place == 1,
                    "x": values,
                    "y": [(count + 1) / len(values) for count in range(len(values))],
                    "line": {"color": colour, "shape": "hv"},
                    "xaxis": f"x{number}",
                }
            )
    share = {"title": {"text": "share of requests"}, "range": [0, 1]}
    title = "Distribution of latencies over all requests"
    return {"data": traces, "layout": layout(title, yaxis=share, height=400, **axes)}


# ---- What was so ----


def _counters(outcomes: Sequence[Outcome]) -> Listing:
    columns = [outcome for outcome in outcomes if outcome.moved]
    names = [(patch, event) for patch, events in columns[0].moved.items() for event in events] if columns else []
    lines = []
    for patch, event in names:
        # A maximum does not add up: what it was, not how far it moved.
        read = "counters" if event.startswith("longest") else "moved"
        values = [
            str((outcome.proof.counters if read == "counters" else outcome.moved).get(patch, {}).get(event, 0))
            for outcome in columns
        ]
        lines.append([patch, event, *values])
    return Listing(
        "What the fastpath arm's patches did",
        ["patch", "counter", *(f"fastpath {place}" for place in range(1, len(columns) + 1))],
        lines,
        "API server process, during warm-up, bench and capture client together.",
    )


def _states(outcomes: Sequence[Outcome]) -> Listing:
    lines = []
    for place, outcome in enumerate(outcomes, 1):
        seen: dict[tuple[str, str, str], list[str]] = {}
        for role, patches in sorted(outcome.proof.processes.items()):
            for patch, record in patches.items():
                seen.setdefault((patch, record["state"], record["reason"]), []).append(role)
        for (patch, state, reason), roles in seen.items():
            lines.append([f"{place} {outcome.start.arm}", ", ".join(roles), patch, state, reason])
    return Listing("What each server said it was", ["start", "processes", "patch", "state", "reason"], lines)


def _configuration(about: Mapping[str, Any]) -> list[str]:
    machine = about["machine"]
    overlay = f"`omni-fastpath overlay {about['deploy']}` writes, {about['deploy']} with `fastpath: true` on top"
    cores = f"{machine['cores']} of the machine's {about['cores_of_machine']} cores ({machine['processor']})"
    return [
        f"Stock: OMNI_FASTPATH=0. Fastpath: no variable of ours; the deploy YAML is the overlay that {overlay}.",
        f"{cores} held the server's seven processes and the clients.",
        "Raw numbers are in parity.json beside this file, server logs in parity-logs/.",
    ]


def _commands(about: Mapping[str, Any], load: Load) -> list[str]:
    said = about["load"]
    command = f"--concurrency {said['concurrency']} --starts {len(about['order']) // 2}"
    return [
        f"bash scripts/setup.sh\n.venv/bin/python -m benchmarks.parity {command}",
        f"# what both arms' servers were told\nOMNI_SIMULATED_DEVICE=1\nOMNI_SIMULATED_DEVICE_CONFIG='{load.device}'",
    ]
