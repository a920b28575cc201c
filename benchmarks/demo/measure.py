"""One start of an arm's server: a stream alone, waves of streams, and the same arrivals for both arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.load import STAGES
from benchmarks.rigs import user_arms
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import run_closed_loop
from benchmarks.rigs.quantiles import quantile
from benchmarks.rigs.side_by_side import served
from benchmarks.rigs.whole_server import FEWEST, checked
from benchmarks.server.figures import Figure, by_request
from benchmarks.server.load import Load
from benchmarks.server.measure import kept_time, run_level
from omni_fastpath.tools.ab.answers import Answers
from omni_fastpath.tools.ab.capture import Capture
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.verdict import Measure

ROLES = frozenset({"api"})
"""Who must have a state file: light engines hold nothing that could be patched."""

TTFP_P90 = "TTFP p90, ms"

_FELT = (Figure.FIRST_TEXT, Figure.E2E, Figure.GAP, Figure.DRY)
ROWS: Mapping[str, Sequence[str]] = {
    "alone": (Figure.TTFP, Figure.FIRST_TEXT, Figure.E2E),
    "waves": (
        *(Figure.FIRST_TTFP, Figure.LATER_TTFP, Figure.LATER_TTFP_P99),
        *(*_FELT, Figure.THROUGHPUT, Figure.PROCESS_A_SECOND),
    ),
    "paced": (Figure.TTFP, TTFP_P90, *_FELT),
}
"""Every row of the table, in its order: figures by load."""

PRIMARY = ("waves", Figure.LATER_TTFP_P99)
JUDGED = frozenset({Figure.TTFP, TTFP_P90, Figure.LATER_TTFP, Figure.E2E, Figure.THROUGHPUT})


@dataclass(frozen=True)
class Start:
    """What one start gave.

    Attributes:
        arm: ``stock`` or ``fastpath``.
        figures: By load and name.
        requests: The times of each request, by load.
        start_s: How long the server took to be ready.
        engines: How well the light engines kept time, by engine: one that was late measured itself.
        moved: Fastpath: how far its counters moved meanwhile.
    """

    arm: str
    figures: Mapping[str, Mapping[str, float]]
    requests: Mapping[str, Sequence[Mapping[str, Any]]]
    start_s: float
    engines: Mapping[str, Mapping[str, float]]
    moved: user_arms.Counters


def run_start(
    title: str, arm: Arm, loads: Mapping[str, Load], *, work: Path, log: Path, phases: Phases
) -> tuple[Start, Answers]:
    """Start the arm's server, prove that it is that arm, load it, prove it again, and stop it, whatever happens.

    Returns:
        The start, and what its requests were answered.

    Raises:
        WrongArmError: The server is not what the arm says, or its patches did not take effect.
        ServerError: It did not start.
        MeasureError: A request failed, or the server ended.
    """
    server = user_arms.server_of(arm, loads["waves"].deploy, STAGES, work, log, light=True)
    figures: dict[str, dict[str, float]] = {}
    captures: dict[str, Sequence[Capture]] = {}
    with served(server, title, "API server and light engines", phases):
        with phases.phase(f"{title}: proof of the arm, warm-up"):
            before = user_arms.prove(server, arm, ROLES)
            checked(run_closed_loop(server.url, loads["waves"].asked("warming up", FEWEST), FEWEST))
        for name, load in loads.items():
            [level] = load.levels
            with phases.phase(f"{title}: {name}, {load.count(level)} requests"):
                first_wave = load.first_wave(level) if name == "waves" else 0
                found, captures[name] = run_level(server, load, level, first_wave)
                figures[name] = {figure: value for figure, value in found.items() if not math.isnan(value)}
        with phases.phase(f"{title}: proof of the arm after the load"):
            sent = FEWEST + sum(map(len, captures.values()))
            moved = user_arms.prove_after(server, arm, ROLES, before, sent)
    assert server.start_s is not None
    requests = {name: by_request(each) for name, each in captures.items()}
    first_audio_s = [each["first_audio_s"] for each in requests["paced"]]
    figures["paced"][TTFP_P90] = 1000 * quantile([each for each in first_audio_s if each is not None], 0.9)
    start = Start(arm.name, figures, requests, server.start_s, kept_time(log), moved)
    return start, [each.answer() for name in loads for each in captures[name]]


def measures(loads: Mapping[str, Load]) -> list[Measure]:
    """Every row of the table, in its order."""
    [streams], [rate] = loads["waves"].levels, loads["paced"].levels
    groups = {
        "alone": "one stream alone",
        "waves": f"{streams:g} streams, {loads['waves'].waves} waves (closed loop)",
        "paced": f"the same arrivals for both, {rate:g} requests a second (open loop)",
    }
    return [_measure(groups[load], load, figure) for load, figures in ROWS.items() for figure in figures]


def _measure(group: str, load: str, figure: str) -> Measure:
    name, _, unit = figure.partition(", ")
    higher = figure == Figure.THROUGHPUT
    return Measure(
        group,
        name,
        unit,
        "higher" if higher else "lower",
        lambda start: start.figures[load].get(figure, math.nan),
        digits=int(higher),
        judged=figure in JUDGED,
        primary=(load, figure) == PRIMARY,
    )
