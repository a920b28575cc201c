"""What the patch costs the scheduler's thread in a step and a lane in a task, nobody slow, beside stock twice."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rigs.results import progress
from benchmarks.save_queue.component import STEP_MS
from benchmarks.save_queue.figures import Run
from benchmarks.save_queue.output import save
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import ALONE, ALONE_AGAIN, FASTPATH, subjects
from omni_fastpath.tools.ab.turns import turns

STREAMS = (64, 128)
STEPS = 100
RUNS = 6
ARMS = (ALONE, ALONE_AGAIN, FASTPATH)
WITH = {True: "sends", False: "no sends"}
"""Without sends the lanes' own cost is not hidden by what a send's costs drift."""
GOALS = {64: (30.0, 3.0), 128: (70.0, 3.0)}
"""Microseconds beyond stock's that are allowed: of the scheduler's thread a step, of the lanes a task."""


def run(
    configs: dict[int, Path],
    *,
    streams: Sequence[int],
    steps: int,
    runs: int,
    stage: int = 0,
    device_type: str = "cuda",
    payloads: str = "views",
) -> None:
    """Run every size in all arms in turn, save the lines and print the table."""
    results: dict[tuple[str, int, bool], list[Run]] = {}
    settings = {"step_ms": STEP_MS[stage], "device_type": device_type, "payloads": payloads}
    with subjects(ARMS, stage, configs[stage], **settings) as found:
        for subject in found:
            subject.call("overhead", streams=8, steps=10)  # nobody counts it
        for count, sends in itertools.product(streams, (True, False)):
            for number, subject in turns(found, runs):
                said = f"{count} streams, {WITH[sends]}, run {number + 1} of {runs}"
                progress(f"{STAGES[stage]}, {said}: {subject.arm.name}")
                result = subject.call("overhead", streams=count, steps=steps, sends=sends)
                results.setdefault((subject.arm.name, count, sends), []).append(result)
    save(
        "overhead",
        stage=stage,
        settings=settings,
        steps=steps,
        runs={f"{arm}, {count}, {WITH[sends]}": each for (arm, count, sends), each in results.items()},
    )
    show(stage, streams, steps, results)


def show(stage: int, streams: Sequence[int], steps: int, results: dict[tuple[str, int, bool], list[Run]]) -> None:
    """Microseconds a step and a task, with what two equal arms differ by."""
    table = Table(title=f"{STAGES[stage]}, nobody slow, {steps} steps a run: processor time, microseconds")
    for column in ("streams", "", "stock", "stock again", "fastpath", "beyond stock", "A/A", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for count, sends in itertools.product(streams, (True, False)):
        goals = GOALS.get(count)
        for name, figure, goal in (
            ("scheduler's thread, a step, mean", lambda run: _step(run, statistics.fmean), goals and goals[0]),
            ("the same, median", lambda run: _step(run, statistics.median), goals and goals[0]),
            ("of it around schedule(), mean", lambda run: statistics.fmean(run["around"]), None),
            ("lanes, a task", lambda run: run["lane_us"], goals and goals[1]),
            ("the whole process, a step", lambda run: run["process_us"], None),
        ):
            one, again, fast = (statistics.median(map(figure, results[arm.name, count, sends])) for arm in ARMS)
            beyond = fast - (one + again) / 2
            table.add_row(
                f"{count}, {WITH[sends]}",
                name,
                *(f"{each:.1f}" for each in (one, again, fast)),
                f"{beyond:+.1f}",
                f"{abs(one - again):.1f}",
                "" if goal is None else f"{goal:.0f} {'ok' if beyond <= goal else 'OVER'}",
            )
        counted = results[FASTPATH.name, count, sends][-1]["counters"]
        table.add_row("", "holds, copied tensors", "", "", f"{counted['holds']}, {counted['copied_tensors']}")
        table.add_section()
    table.caption = "median over runs"
    Console(width=150).print(table)


def _step(run: Run, mean: Callable[[Sequence[float]], float]) -> float:
    return mean([schedule + update for schedule, update in zip(run["schedule"], run["update"], strict=True)])
