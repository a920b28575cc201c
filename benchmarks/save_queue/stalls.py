"""A receiver that is stopped, and a put that blocks: what is on its way meanwhile, stock and under ``total_bytes``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rigs.results import progress
from benchmarks.save_queue.figures import Run
from benchmarks.save_queue.measure import Stall
from benchmarks.save_queue.output import save
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import ALONE, ALWAYS, Arm, subjects

STEP_MS = 15.0
SECONDS = 10.0
STREAMS = 16
CAP_BYTES = 4 * 2**20
LANES = 2
STEPS_IN_FLIGHT = 2
"""Of each stream, with async scheduling."""

_VALUES = {"PER_STREAM_TASKS": "null", "UNFETCHED_CHUNKS": "null", "TOTAL_TASKS": "null", "TOTAL_BYTES": str(CAP_BYTES)}
CAPPED = Arm(
    f"fastpath, {CAP_BYTES // 2**20} MiB",
    {**ALWAYS, **{f"OMNI_FASTPATH_SAVE_QUEUE_CAP__{key}": value for key, value in _VALUES.items()}},
)
ARMS = (ALONE, CAPPED)
HOW = {"receiver": "receiver stopped", "put": "every put blocks"}


def run(configs: dict[int, Path], *, seconds: float, streams: int, arms: Sequence[Arm] = ARMS, stage: int = 0) -> None:
    """Run both stalls in each arm, save the lines and print the table."""
    stall = Stall("", seconds, streams, tokens=0)
    # In stock the streams go on for as long as it lasts, and a little longer.
    stall = replace(stall, tokens=int((stall.before_s + 1.05 * seconds) / (STEP_MS * 1e-3)))
    results: dict[tuple[str, str], Run] = {}
    with subjects(arms, stage, configs[stage], step_ms=STEP_MS, device_type="cuda") as found:
        for (how, said), subject in itertools.product(HOW.items(), found):
            arm = subject.arm
            progress(f"{said} for {seconds:g} s: {arm.name}")
            result = results[how, arm.name] = subject.call("stall", stall=replace(stall, how=how))
            save("stall", stage=stage, arm=arm.name, load=replace(stall, how=how), run=result)
            assert result["completed"] == streams, f"{arm.name}: {result['completed']} of {streams} requests completed"
    show(stage, seconds, streams, arms, results)
    contents = {tuple(result["digests"]) for result in results.values()}
    if len(contents) != 1:
        raise RuntimeError("the chunks of a stream differ between arms")
    for how in HOW:
        _check_cap(results[how, CAPPED.name], streams)


def bound(result: Run, streams: int) -> int:
    """Bytes that the cap allows: itself, what is in flight, one step for each stream and each expired hold."""
    step = max(result["task_bytes"], result["chunk_bytes"])
    steps = LANES + streams * STEPS_IN_FLIGHT + result["counters"]["expired_holds"]
    return int(CAP_BYTES + steps * step)


def _check_cap(result: Run, streams: int) -> None:
    most, allowed = _most(result), bound(result, streams)
    if most > allowed:
        raise RuntimeError(f"{most} bytes were on their way, {allowed} are allowed")


def _most(result: Run) -> int:
    return int(max(queued + unfetched for _, queued, unfetched, _ in result["samples"]))


def _at(result: Run, second: float) -> tuple[float, int, int, int]:
    """The last sample before a time."""
    found = [sample for sample in result["samples"] if sample[0] <= second]
    at, queued, unfetched, tasks = (found or result["samples"])[-1 if found else 0]
    return at, queued, unfetched, tasks


def show(stage: int, seconds: float, streams: int, arms: Sequence[Arm], results: dict[tuple[str, str], Run]) -> None:
    """Bytes over time and what became of the requests."""
    table = Table(title=f"{STAGES[stage]}, {streams} streams, {seconds:g} s: queued + not fetched, MiB")
    for column in ("", "arm", *(f"after {share * seconds:.3g} s" for share in (0.1, 0.5, 1.0)), "most", "allowed"):
        table.add_column(column, justify="right" if "arm" not in column and column else "left")
    for column in ("completed", "after the end", "holds", "expired"):
        table.add_column(column, justify="right")
    for how, said in HOW.items():
        for arm in arms:
            result = results[how, arm.name]
            found = [_at(result, share * seconds) for share in (0.1, 0.5, 1.0)]
            counters = result["counters"]
            table.add_row(
                said,
                arm.name,
                *(f"{queued / 2**20:.1f} + {unfetched / 2**20:.1f}" for _, queued, unfetched, _ in found),
                f"{_most(result) / 2**20:.2f}",
                f"{bound(result, streams) / 2**20:.2f}" if arm is CAPPED else "",
                f"{result['completed']} of {streams}",
                f"{result['after_s']:.1f} s",
                str(counters["holds"]) if arm.on else "",
                str(counters["expired_holds"]) if arm.on else "",
            )
        table.add_section()
    Console(width=150).print(table)
