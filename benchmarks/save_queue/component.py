"""One slow stream among others, and nobody slow: one stage by itself, arms alternating run by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.save_queue.figures import FELT, LEGEND, Comparison, Run, compare
from benchmarks.save_queue.measure import Load
from benchmarks.save_queue.output import progress, save
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import ALONE, ALONE_AGAIN, FASTPATH, FIFO, STOCK, WITH_SLOW, Arm, Subject, subjects
from omni_fastpath.patches.save_queue_cap import SaveQueueOptions

STEP_MS = {0: 15.0, 1: 12.0}
"""Of the thinker and the talker, as the simulated device's defaults."""
TOKENS = {0: 40, 1: 80}
"""Of a stream: text tokens, and codec frames, which make a first chunk of 4 and then one for each 25."""
RATE = 18.0
"""Arrivals a second: some 10 streams at a time at the thinker, which is far from what a core can do."""
IDLE_STREAMS = (64, 128)
IDLE_TOKENS = 64
IDLE_ARRIVALS_S = 0.7
"""All streams are there before the first has ended."""
QUIET = (ALONE, ALONE_AGAIN, FASTPATH)
"""Arms when nobody is slow."""
CREDIT = SaveQueueOptions().per_stream_tasks or 0
"""Of the arms: the default."""


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        runs: Of each arm.
        streams: With one slow stream.
        idle_streams: With nobody slow, one after another.
        shorter: Streams are this many times shorter.
        device_type: Of `rig.Rig`.
    """

    runs: int = 5
    streams: int = 64
    idle_streams: Sequence[int] = IDLE_STREAMS
    shorter: int = 1
    device_type: str = "cuda"

    def slow(self, stage: int) -> Load:
        """The load with one slow stream."""
        return Load(self.streams, TOKENS[stage] // self.shorter, self.streams / RATE, slow=min(4, self.streams - 1))

    def idle(self, streams: int) -> Load:
        """The load with nobody slow."""
        return Load(streams, IDLE_TOKENS // self.shorter, IDLE_ARRIVALS_S)


QUICK = Plan(runs=1, streams=24, idle_streams=(32,), shorter=2)


def run(configs: dict[int, Path], plan: Plan, stages: Sequence[int] = tuple(STAGES)) -> None:
    """Run all of it, save the lines and print the tables."""
    for stage in stages:
        settings = {"step_ms": STEP_MS[stage], "device_type": plan.device_type}
        with subjects((ALONE, ALONE_AGAIN, FIFO, FASTPATH), stage, configs[stage], **settings) as found:
            by_arm = {subject.arm.name: subject for subject in found}
            by_arm[STOCK.name] = by_arm[ALONE.name]  # what differs is the load
            for subject in found:  # a short run that nobody counts
                subject.call("load", load=Load(4, 8, 0.1))
            slow = _alternate(by_arm, WITH_SLOW, plan.slow(stage), plan.runs)
            _check_content(slow)
            save("component", stage=stage, settings=settings, load=plan.slow(stage), runs=slow, about=_about(found))
            show_slow(stage, plan, slow)
            for streams in plan.idle_streams:
                idle = _alternate(by_arm, QUIET, plan.idle(streams), plan.runs)
                _check_content(idle)
                save("component-idle", stage=stage, settings=settings, load=plan.idle(streams), runs=idle)
                show_idle(stage, streams, idle)
            _check_depth(slow)


def _about(found: Sequence[Subject]) -> dict[str, Any]:
    return {subject.arm.name: subject.about for subject in found}


def _alternate(found: Mapping[str, Subject], arms: Sequence[Arm], load: Load, runs: int) -> dict[str, list[Run]]:
    """Runs of all arms in turn, forwards and backwards; only arms with a slow stream have the load's."""
    results: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for number in range(runs):
        for arm in arms if number % 2 == 0 else reversed(arms):
            subject = found[arm.name]
            slow = load.slow if arm.slow else None
            progress(f"stage {subject.stage}, {load.streams} streams, run {number + 1} of {runs}: {arm.name}")
            result = subject.call("load", load=replace(load, slow=slow))
            _check_run(arm, result)
            results[arm.name].append(result)
    return results


def _check_run(arm: Arm, result: Run) -> None:
    """The patch's counters say what the arm did."""
    counters = result["counters"]
    if not arm.on:
        assert not counters.get("tasks"), f"{arm.name}: the patch counted {counters}"
        return
    assert counters["tasks"] > 0, f"{arm.name}: no task went through the queue"


def _check_content(results: dict[str, list[Run]]) -> None:
    """Each stream's chunks are the same in every run and arm, in content and order.

    Raises:
        RuntimeError: They are not.
    """
    seen = {
        tuple((stream["chunks"], stream["digest"]) for stream in result["streams"])
        for runs in results.values()
        for result in runs
    }
    if len(seen) != 1:
        raise RuntimeError("the chunks of a stream differ between runs")


def _check_depth(results: dict[str, list[Run]]) -> None:
    """No stream had more save tasks queued and in flight than its credit, and one task that ends it.

    Raises:
        RuntimeError: One had.
    """
    deepest = {name: max(run["counters"].get("max_stream_tasks", 0) for run in runs) for name, runs in results.items()}
    if any(depth > CREDIT + 1 for depth in deepest.values()):
        raise RuntimeError(f"with a credit of {CREDIT} a stream had more save tasks at a time: {deepest}")


# ---- Tables ----


def show_slow(stage: int, plan: Plan, results: dict[str, list[Run]]) -> None:
    """What the others felt beside one slow stream."""
    load = plan.slow(stage)
    table = Table(
        title=f"{STAGES[stage]}, one slow stream of {load.streams} ({load.slow_ms:.0f} ms a send): the others, "
        f"{plan.runs} runs pooled; in brackets the ratio to nobody slow"
    )
    table.add_column("")
    for arm in WITH_SLOW:
        table.add_column(arm.name, justify="right")
    table.add_column("A/A interval", justify="right")
    for figure in FELT:
        one, again = results[ALONE.name], results[ALONE_AGAIN.name]
        compared = [compare(figure, one, again, results[arm.name]) for arm in WITH_SLOW]
        low, high = compared[0].interval
        table.add_row(figure, *map(_cell, compared), f"{low:.2f} to {high:.2f}", end_section=False)
    table.add_section()
    for name in ("max_total", "max_stream"):
        label = {"max_total": "most tasks seen waiting", "max_stream": "the same, one stream"}[name]
        table.add_row(label, *(str(max(run[name] for run in results[arm.name])) for arm in WITH_SLOW))
    for name in ("max_queued_tasks", "max_stream_tasks", "holds", "held_steps", "expired_holds"):
        table.add_row(name, *(_most(results[arm.name], name) for arm in WITH_SLOW))
    table.add_row("cores of the stage", *(f"{_mean(results[arm.name], 'busy'):.2f}" for arm in WITH_SLOW))
    table.caption = LEGEND
    Console(width=150).print(table)


def show_idle(stage: int, streams: int, results: dict[str, list[Run]]) -> None:
    """Nobody slow: fastpath beside stock."""
    table = Table(title=f"{STAGES[stage]}, nobody slow, {streams} streams at a time, {len(results[ALONE.name])} runs")
    for column in ("", "stock", "stock again", "fastpath", "ratio", "A/A interval"):
        table.add_column(column, justify="left" if not column else "right")
    one, again, fast = (results[arm.name] for arm in (ALONE, ALONE_AGAIN, FASTPATH))
    rates = [_mean(runs, "chunks_per_s") for runs in (one, again, fast)]
    stock = (rates[0] + rates[1]) / 2
    apart = f"{min(rates[:2]) / stock:.3f} to {max(rates[:2]) / stock:.3f}"
    table.add_row("chunks a second", *(f"{rate:.0f}" for rate in rates), f"{rates[2] / stock:.3f}", apart)
    for figure in FELT:
        first, second, ours = (compare(figure, one, again, runs) for runs in (one, again, fast))
        low, high = ours.interval
        values = [f"{each.value * 1e3:.1f} ms" for each in (first, second, ours)]
        table.add_row(figure, *values, f"{ours.ratio:.2f} {ours.verdict}", f"{low:.2f} to {high:.2f}")
    table.add_row("cores of the stage", *(f"{_mean(runs, 'busy'):.2f}" for runs in (one, again, fast)))
    table.add_row("holds", "", "", _total(fast, "holds"))
    table.caption = LEGEND
    Console(width=130).print(table)


def _cell(compared: Comparison) -> str:
    return f"{compared.value * 1e3:.0f} ms ({compared.ratio:.2f} {compared.verdict})"


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(sum(run[name] for run in runs)) / len(runs)


def _most(runs: Sequence[Run], name: str) -> str:
    return str(max(run["counters"][name] for run in runs)) if runs[0]["counters"].get("tasks") else ""


def _total(runs: Sequence[Run], name: str) -> str:
    return str(sum(run["counters"][name] for run in runs))
