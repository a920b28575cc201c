"""What the demo shows: the table's columns, the words around it, the picture and the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.demo.load import SILENT, STAGES
from benchmarks.demo.measure import Start
from benchmarks.rigs.about import about
from benchmarks.server.load import Load
from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.rows import ARMS, Row

COLUMNS = ("measure", *ARMS, "fastpath / stock", "verdict")
COLOURS = {"stock": "#c2571a", "fastpath": "#1f5fa8"}

WHAT_IS_REAL = (
    "Simulated: the stage engines (light engines: outputs on the clock, no GPU, no scheduler). Real, upstream's own: "
    "API server, HTTP and server-sent events, front end, orchestrator, output processing, metrics, logs."
)

CLOSED_LOOP = (
    "In the closed loop the arm that answers sooner has more requests to serve in the same time: read its TTFP beside "
    "its throughput. In the open loop both arms have the same to serve. The largest gap is before a request's last "
    "packet, which waits until all of the request's earlier outputs are dispatched, those that nobody sees too; "
    "forward_gate, which makes these cheap, works in real stages alone and is not in these figures."
)


def describe(loads: Mapping[str, Load], starts: Sequence[str], command: str, elapsed_s: float) -> dict[str, Any]:
    """What was asked of which software on which machine."""
    return {
        **about(),
        "command": command,
        "what": WHAT_IS_REAL,
        "loads": {name: {**asdict(load), "deploy": load.deploy} for name, load in loads.items()},
        "lengths": loads["waves"].lengths,
        "stages": STAGES,
        "order": list(starts),
        "minutes": elapsed_s / 60,
    }


def heading(told: Mapping[str, Any]) -> list[str]:
    """That in lines of text."""
    load, machine = told["loads"]["waves"], told["machine"]
    steps = ", ".join(f"{stage} {settings['base_ms']:g} ms" for stage, settings in told["stages"].items())
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    least, most = told["lengths"]
    asked = (
        f"Qwen3-Omni, {load['replicas']} replicas a stage ({load['deploy']}), poll loop; steps: {steps}; "
        f"{SILENT} outputs without audio before each one with; {least} to {most} text tokens an answer"
    )
    return [
        told["what"],
        asked,
        f"{machine['processor']}, {machine['cores']} cores; commit {told['commit'] or 'none'}, {versions}",
        f"{told['date']}: {told['command']}; starts in the order {', '.join(told['order'])}",
    ]


def plain(
    starts: Sequence[Start], table: Sequence[Row], parity: Mapping[str, Any], told: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that the table and the picture rest on, as plain data."""
    return {
        "schema": 5,
        "about": told,
        "parity": parity,
        "summary": rows.summary(table),
        "rows": rows.as_data(table),
        "starts": [asdict(start) for start in starts],
    }


def draw(starts: Sequence[Start], loads: Mapping[str, Load], told: Mapping[str, Any], path: Path) -> None:
    """TTFP of each request, in start order: one panel a loop, thin lines the starts, a thick one their median."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    [streams], [rate] = loads["waves"].levels, loads["paced"].levels
    titles = (f"{streams:g} at a time (dotted: waves)", f"{rate:g} a second, the same arrivals for both arms")
    for axes, title, name in zip(panels, titles, ("waves", "paced"), strict=True):
        for arm in ARMS:
            lines = [_ttfp(start.requests[name]) for start in starts if start.arm == arm]
            for line in lines:
                axes.plot(line, color=COLOURS[arm], linewidth=0.6, alpha=0.35)
            middle = [statistics.median(each) for each in zip(*lines, strict=True)]
            axes.plot(middle, color=COLOURS[arm], linewidth=2, label=f"{arm}, median of {len(lines)} starts")
        axes.set(title=title, xlabel="request, in start order")
        axes.grid(alpha=0.3)
    for edge in range(int(streams), loads["waves"].count(streams), int(streams)):
        panels[0].axvline(edge - 0.5, color="#888", linewidth=0.8, linestyle=":")
    panels[0].set(ylabel="time to first audio packet (TTFP), ms")
    panels[0].set_ylim(bottom=0)  # of both, once both are drawn: it ends their scaling
    panels[0].legend()
    figure.suptitle("\n".join(heading(told)), fontsize=7)
    figure.savefig(path, dpi=120)


def _ttfp(requests: Sequence[Mapping[str, Any]]) -> list[float]:
    times_s = (each["first_audio_s"] for each in requests)
    return [float("nan") if time_s is None else 1000 * time_s for time_s in times_s]
