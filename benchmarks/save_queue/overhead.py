"""What the patch costs the scheduler's thread in a step, nobody slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.save_queue.figures import Run
from benchmarks.save_queue.output import progress, save
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import ALONE, IDLE, subjects

STREAMS = (1, 8, 32, 64, 128)
STEPS = 200
STEP_MS = 15.0
ARMS = (ALONE, IDLE)


def run(
    configs: dict[int, Path],
    *,
    streams: Sequence[int],
    steps: int,
    runs: int,
    stage: int = 0,
    device_type: str = "cuda",
) -> None:
    """Run every size in both arms in turn, save the lines and print the table."""
    results: dict[tuple[str, int], list[Run]] = {}
    with subjects(ARMS, stage, configs[stage], step_ms=STEP_MS, device_type=device_type) as found:
        for subject in found:
            subject.call("overhead", streams=2, steps=10)  # nobody counts it
        for number in range(runs):
            for count in streams:
                for subject in found if number % 2 == 0 else reversed(found):
                    progress(f"{count} streams, {steps} steps: {subject.arm.name}")
                    result = subject.call("overhead", streams=count, steps=steps)
                    results.setdefault((subject.arm.name, count), []).append(result)
    save(
        "overhead",
        stage=stage,
        device_type=device_type,
        steps=steps,
        runs={f"{arm}, {count}": each for (arm, count), each in results.items()},
    )
    show(stage, streams, steps, results)


def show(stage: int, streams: Sequence[int], steps: int, results: dict[tuple[str, int], list[Run]]) -> None:
    """Microseconds a step."""
    table = Table(title=f"{STAGES[stage]}: microseconds a step on the scheduler's thread, mean of {steps} steps (p50)")
    columns = (
        "streams",
        "schedule(), stock",
        "fastpath",
        "added by the wrapper",
        "update, stock",
        "fastpath",
        "appends",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for count in streams:
        stock, fast = results[ALONE.name, count], results[IDLE.name, count]
        # What upstream's body does outside of its first and last helper, and the clock: stock has it too.
        nothing = {kind: _figure(stock, f"around_{kind}_us") for kind in ("mean", "p50")}
        added = [f"{_figure(fast, f'around_{kind}_us') - nothing[kind]:.1f}" for kind in ("mean", "p50")]
        table.add_row(
            str(count),
            _both(stock, "schedule"),
            _both(fast, "schedule"),
            f"{added[0]} ({added[1]})",
            _both(stock, "update"),
            _both(fast, "update"),
            f"{_both(fast, 'append')}, {_figure(fast, 'appends_a_step'):.0f} of them",
        )
    Console(width=150).print(table)


def _figure(runs: Sequence[Run], name: str) -> float:
    return statistics.median(float(run[name]) for run in runs)


def _both(runs: Sequence[Run], name: str) -> str:
    return f"{_figure(runs, f'{name}_mean_us'):.1f} ({_figure(runs, f'{name}_p50_us'):.1f})"
