"""One start of an arm's server: waves of streams, and then the same arrivals for both arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.demo.load import SHARE, STAGES, paced
from benchmarks.demo.progress import Progress
from benchmarks.rigs import user_arms
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.side_by_side import served
from benchmarks.rigs.whole_server import FEWEST
from benchmarks.server.figures import Figure, by_request
from benchmarks.server.load import Load
from benchmarks.server.measure import kept_time, run_level, warmed
from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.answers import Answers
from omni_fastpath.tools.ab.capture import Capture
from omni_fastpath.tools.ab.verdict import Measure

ROLES = frozenset({"api", "engines"})
"""Which processes must have a state file."""

ROWS: Sequence[tuple[str, Figure, str]] = (
    ("waves", Figure.LATER_TTFP_P99, "first audio, slowest of 100"),
    ("waves", Figure.LATER_TTFP, "first audio, median"),
    ("waves", Figure.FIRST_TEXT, "first text, median"),
    ("waves", Figure.GAP, "largest gap, median"),
    ("waves", Figure.DRY, "silence, worst of 100"),
    ("waves", Figure.THROUGHPUT, "answers a second"),
    ("paced", Figure.TTFP, "first audio, median"),
    ("paced", Figure.FIRST_TEXT, "first text, median"),
    ("paced", Figure.E2E, "whole answer, median"),
    ("paced", Figure.GAP, "largest gap, median"),
)
"""The table by load and figure, and as people say it; the first row is primary.

Each gets a verdict: more than ten could not, with six starts.
"""


@dataclass(frozen=True)
class Start:
    """What one start gave.

    Attributes:
        arm: ``stock`` or ``fastpath``.
        rate: Requests a second of its open loop.
        figures: By load and name.
        requests: The times of each request, by load.
        start_s: How long the server took to be ready.
        engines: How well the light engines kept time, by engine: one that was late measured itself.
        moved: Fastpath: how far its counters moved meanwhile.
    """

    arm: str
    rate: float
    figures: Mapping[str, Mapping[str, float]]
    requests: Mapping[str, Sequence[Mapping[str, Any]]]
    start_s: float
    engines: Mapping[str, Mapping[str, float]]
    moved: user_arms.Counters


def run_start(
    title: str, arm: Arm, waves: Load, rate: float | None, *, work: Path, log: Path, phases: Progress
) -> tuple[Start, Answers]:
    """Start the arm's server, prove that it is that arm, load it, prove it again, and stop it, whatever happens.

    Args:
        title: Of the start.
        arm: What the server should be.
        waves: The closed loop that it is asked.
        rate: Of the open loop after that; None: a share of what this server bore in the closed one.
        work: A folder of `side_by_side.work_folder`.
        log: Where the server's log goes.
        phases: Where it is told how far this is.

    Returns:
        The start, and what its requests were answered.

    Raises:
        WrongArmError: The server is not what the arm says, or its patches did not take effect.
        ServerError: It did not start.
        MeasureError: A request failed, or the server ended.
    """
    server = user_arms.server_of(arm, waves.deploy, STAGES, work, log, light=True)
    figures: dict[str, Mapping[str, float]] = {}
    captures: dict[str, Sequence[Capture]] = {}

    def ask(name: str, load: Load, first_wave: int) -> None:
        [level] = load.levels
        with phases.phase(f"{title}: {load.count(level)} requests, {how(name, level)}"):
            found, captures[name] = run_level(server, known, load, level, first_wave)
        figures[name] = {figure: value for figure, value in found.items() if not math.isnan(value)}

    with served(server, title, "API server and light engines", phases):
        with phases.phase(f"{title}: proof of the arm, warm-up"):
            before = user_arms.prove(server, arm, ROLES)
            known = warmed(server, waves)
        ask("waves", waves, waves.first_wave(waves.levels[0]))
        rate = rate or round(SHARE * figures["waves"][Figure.THROUGHPUT], 1)
        ask("paced", paced(waves, rate), 0)
        with phases.phase(f"{title}: proof of the arm after the load"):
            sent = FEWEST + sum(map(len, captures.values()))
            moved = user_arms.prove_after(server, arm, ROLES, before, sent)
    assert server.start_s is not None
    requests = {name: by_request(each) for name, each in captures.items()}
    start = Start(arm.name, rate, figures, requests, server.start_s, kept_time(log), moved)
    return start, [each.answer() for name in figures for each in captures[name]]


def how(load: str, level: float) -> str:
    """How a load's requests come, in words."""
    return f"{level:g} at a time" if load == "waves" else f"{level:g} a second"


def measures(streams: float, starts: Sequence[Start]) -> list[Measure]:
    """The rows of the table in their order; with too few starts of an arm none gets a verdict."""
    arms = [start.arm for start in starts]
    judged = min(map(arms.count, arms)) >= verdict.starts_for(0)
    level = {"waves": streams, "paced": starts[0].rate}
    found = [_measure(load, figure, f"{how(load, level[load])}: {said}") for load, figure, said in ROWS]
    return [replace(each, judged=judged, primary=judged and each is found[0]) for each in found]


def _measure(load: str, figure: Figure, name: str) -> Measure:
    def read(start: Start) -> float:
        return start.figures[load].get(figure, math.nan)

    if figure is Figure.THROUGHPUT:
        return Measure("", name, "", "higher", read, digits=1)
    return Measure("", name, "ms", "lower", read)
