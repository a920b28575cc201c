"""One start of an arm's server under one of the two loads, and the rows of the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
from omni_fastpath.tools.ab.rows import ARMS
from omni_fastpath.tools.ab.verdict import Measure

ROLES = frozenset({"api", "engines"})
"""Which processes must have a state file."""

Name = Literal["waves", "paced"]
"""Of a load: the closed loop, and the open one."""

ROWS: Sequence[tuple[Name, Figure, str]] = (
    ("waves", Figure.LATER_TTFP, "first audio, median"),
    ("waves", Figure.LATER_TTFP_P99, "first audio, p99"),
    ("waves", Figure.FIRST_TEXT, "first text, median"),
    ("waves", Figure.E2E, "whole answer, median"),
    ("waves", Figure.DRY, "underrun, p99"),
    ("waves", Figure.THROUGHPUT, "requests per second"),
    ("paced", Figure.TTFP, "first audio, median"),
    ("paced", Figure.FIRST_TEXT, "first text, median"),
    ("paced", Figure.E2E, "whole answer, median"),
    ("paced", Figure.DRY, "underrun, p99"),
)
"""The table by load and figure, and in words. The first row is primary.

Each gets a verdict. More than ten could not, with six starts.
"""


@dataclass(frozen=True)
class Start:
    """What one start gave.

    Attributes:
        arm: ``stock`` or ``fastpath``.
        load: What it was asked.
        level: Of the load: requests at a time, or per second.
        figures: By name.
        requests: The times of each request.
        start_s: How long the server took to be ready.
        engines: How well the light engines kept time, by engine: one that was late measured itself.
        moved: Fastpath: how far its counters moved meanwhile.
    """

    arm: str
    load: Name
    level: float
    figures: Mapping[str, float]
    requests: Sequence[Mapping[str, Any]]
    start_s: float
    engines: Mapping[str, Mapping[str, float]]
    moved: user_arms.Counters


@dataclass(frozen=True)
class Both:
    """A start of each load, of one arm; of the open loop there may be none yet."""

    arm: str
    of: Mapping[Name, Start]


def run_start(
    title: str, arm: Arm, name: Name, load: Load, *, work: Path, log: Path, phases: Progress
) -> tuple[Start, Answers]:
    """Start the arm's server, prove that it is that arm, load it, prove it again, and stop it, whatever happens.

    Args:
        title: Of the start.
        arm: What the server should be.
        name: Of the load.
        load: What it is asked.
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
    server = user_arms.server_of(arm, load.deploy, load.stages, work, log, light=True)
    [level] = load.levels
    with served(server, title, "API server and light engines", phases):
        with phases.phase(f"{title}: proof of the arm, warm-up"):
            before = user_arms.prove(server, arm, ROLES)
            known = warmed(server, load)
        with phases.phase(f"{title}: {load.count(level)} requests, {how(name, level)}"):
            found, captures = run_level(server, known, load, level)
        with phases.phase(f"{title}: proof of the arm after the load"):
            moved = user_arms.prove_after(server, arm, ROLES, before, FEWEST + len(captures))
    assert server.start_s is not None
    figures = {figure: value for figure, value in found.items() if not math.isnan(value)}
    start = Start(arm.name, name, level, figures, by_request(captures), server.start_s, kept_time(log), moved)
    return start, [each.answer() for each in captures]


def sustained(starts: Sequence[Start]) -> list[float]:
    """The requests per second of all of stock's starts in the closed loop."""
    return [each.figures[Figure.THROUGHPUT] for each in starts if (each.arm, each.load) == (ARMS[0], "waves")]


def how(load: Name, level: float) -> str:
    """How a load's requests come, in words."""
    return f"{level:g} at a time" if load == "waves" else f"{level:g} per second"


def pairs(starts: Sequence[Start]) -> list[Both]:
    """The starts of each arm, one of each load together, in the order of running."""
    found: list[Both] = []
    for arm in ARMS:
        of_arm = [each for each in starts if each.arm == arm]
        waves, paced = ([each for each in of_arm if each.load == load] for load in ("waves", "paced"))
        both = itertools.zip_longest(waves, paced)
        found += [Both(arm, {start.load: start for start in each if start is not None}) for each in both]
    return found


def measures(starts: Sequence[Start]) -> list[Measure]:
    """The rows of the table in their order; with too few starts of an arm none gets a verdict."""
    arms = [each.arm for each in pairs(starts)]
    judged = min(map(arms.count, arms)) >= verdict.starts_for(0)
    level = {start.load: start.level for start in starts}
    rows = [(load, figure, f"{how(load, level[load])}: {said}") for load, figure, said in ROWS if load in level]
    found = [_measure(*row) for row in rows]
    return [replace(each, judged=judged, primary=judged and each is found[0]) for each in found]


def _measure(load: Name, figure: Figure, name: str) -> Measure:
    def read(both: Both) -> float:
        return both.of[load].figures.get(figure, math.nan) if load in both.of else math.nan

    if figure is Figure.THROUGHPUT:
        return Measure("", name, "", "higher", read, digits=1)
    return Measure("", name, "ms", "lower", read)
