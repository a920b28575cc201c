"""Slow streams among others, and nobody slow: one stage by itself, arms alternating run by run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rigs.results import progress
from benchmarks.save_queue.figures import FELT, LEGEND, Comparison, Run, compare
from benchmarks.save_queue.measure import Load
from benchmarks.save_queue.output import save
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import (
    ALONE,
    ALONE_AGAIN,
    FASTPATH,
    FIFO,
    STOCK,
    Arm,
    Subject,
    forking,
    subjects,
)
from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
from omni_fastpath.patches.save_queue_cap.credits import WIDE
from omni_fastpath.tools.ab.turns import turns

STEP_MS = {0: 15.0, 1: 12.0}
"""Of the thinker and the talker, as the simulated device's defaults."""
TOKENS = {0: 40, 1: 80}
"""Of a stream: text tokens, and codec frames, which make a first chunk of 4 and then one for each 25."""
RATE = 18.0
"""Arrivals a second: some 10 streams at a time at the thinker, which is far from what a core can do."""
SLOW = (1, 2, 4)
"""How many of the streams are slow, one after another."""
IDLE_STREAMS = (64, 128)
IDLE_TOKENS = 64
IDLE_ARRIVALS_S = 0.7
"""All streams are there before the first has ended."""
QUIET = (ALONE, ALONE_AGAIN, FASTPATH)
"""Arms when nobody is slow."""
WAITING = {"max_total": "most tasks seen waiting", "max_stream": "the same, one stream"}
CREDIT = SaveQueueOptions().per_stream_tasks or 0
"""Of the arms: the default."""


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        runs: Of each arm; of stock beside slow streams one, which takes long.
        streams: At a time, with slow ones.
        slow: How many of them are slow, one after another.
        idle_streams: With nobody slow, one after another.
        idle_runs: Of each arm with nobody slow.
        busy: Processes that do nothing but use a processor, in the row that counts holds beside them; none: no row.
        shorter: Streams are this many times shorter.
        device_type: Of `rig.Rig`.
        payloads: Of `rig.Rig`.
    """

    runs: int = 4
    streams: int = 64
    slow: Sequence[int] = SLOW
    idle_streams: Sequence[int] = IDLE_STREAMS
    idle_runs: int = 4
    busy: Sequence[int] = (1, 2)
    shorter: int = 1
    device_type: str = "cuda"
    payloads: str = "views"

    def load(self, stage: int, slow: int) -> Load:
        """The load with so many slow streams."""
        return Load(self.streams, TOKENS[stage] // self.shorter, self.streams / RATE, slow=slow)

    def idle(self, streams: int) -> Load:
        """The load with nobody slow."""
        return Load(streams, IDLE_TOKENS // self.shorter, IDLE_ARRIVALS_S)


QUICK = Plan(runs=1, streams=24, slow=(1, 2), idle_streams=(32,), idle_runs=1, busy=(1,), shorter=2)


def run(configs: dict[int, Path], plan: Plan, stages: Sequence[int] = tuple(STAGES)) -> None:
    """Run all of it, save the lines and print the tables."""
    for stage in stages:
        settings = {"step_ms": STEP_MS[stage], "device_type": plan.device_type, "payloads": plan.payloads}
        with subjects((ALONE, ALONE_AGAIN, FIFO, FASTPATH), stage, configs[stage], **settings) as found:
            by_arm = {subject.arm.name: subject for subject in found}
            by_arm[STOCK.name] = by_arm[ALONE.name]  # what differs is the load
            for subject in found:  # a short run that nobody counts
                subject.call("load", load=Load(4, 8, 0.1))
            for streams in plan.idle_streams:
                idle = _alternate(by_arm, QUIET, plan.idle(streams), plan.idle_runs)
                _check_content(idle)
                save("component-idle", stage=stage, settings=settings, load=plan.idle(streams), runs=idle)
                show_idle(f"{STAGES[stage]}, nobody slow", streams, idle)
            for neighbours in plan.busy:
                streams = plan.idle_streams[0]
                with busy(neighbours):
                    beside = _alternate(by_arm, QUIET, plan.idle(streams), max(1, plan.idle_runs // 2))
                _check_content(beside)
                save("component-busy", stage=stage, settings=settings, load=plan.idle(streams), runs=beside)
                show_idle(f"{STAGES[stage]}, nobody slow, beside {neighbours} busy process(es)", streams, beside)
            if plan.slow:
                slow_rows(stage, plan, by_arm, settings, _about(found))


def slow_rows(
    stage: int, plan: Plan, by_arm: Mapping[str, Subject], settings: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """One slow stream, and more of them."""
    alone = _alternate(by_arm, (ALONE, ALONE_AGAIN), plan.load(stage, 0), plan.runs)
    for slow in plan.slow:
        load = plan.load(stage, slow)
        arms = (STOCK, FIFO) if slow == 1 else (STOCK,)
        results = alone | _alternate(by_arm, arms, load, 1) | _alternate(by_arm, (FASTPATH,), load, plan.runs)
        _check_content(results)
        save("component", stage=stage, settings=settings, load=load, runs=results, about=about)
        show_slow(stage, load, results)
        _check_depth(results)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """That many neighbours that use a processor each."""
    processes = [forking().Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def _about(found: Sequence[Subject]) -> dict[str, Any]:
    return {subject.arm.name: subject.about for subject in found}


def _alternate(found: Mapping[str, Subject], arms: Sequence[Arm], load: Load, runs: int) -> dict[str, list[Run]]:
    """Runs of all arms in turn, forwards and backwards; only arms with a slow stream have the load's."""
    results: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for number, arm in turns(arms, runs):
        subject = found[arm.name]
        slow = load.slow if arm.slow else 0
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
    """No stream had more save tasks queued and in flight than the wide limit, and one task that ends it.

    At its value the limit holds only while sends are known to be slow, which the table shows.

    Raises:
        RuntimeError: One had.
    """
    deepest = {name: max(run["counters"].get("max_stream_tasks", 0) for run in runs) for name, runs in results.items()}
    if any(depth > WIDE * CREDIT + 1 for depth in deepest.values()):
        raise RuntimeError(f"with a credit of {CREDIT} a stream had more save tasks at a time: {deepest}")


# ---- Tables ----


def show_slow(stage: int, load: Load, results: dict[str, list[Run]]) -> None:
    """What the others felt beside slow streams."""
    streams = "one slow stream" if load.slow == 1 else f"{load.slow} slow streams"
    table = Table(
        title=f"{STAGES[stage]}, {streams} of {load.streams} ({load.slow_ms:.0f} ms a send): the others; "
        "in brackets the ratio to nobody slow"
    )
    table.add_column("")
    for name, runs in results.items():
        table.add_column(f"{name}, {len(runs)} run(s)", justify="right")
    table.add_column("A/A interval", justify="right")
    for figure in FELT:
        one, again = results[ALONE.name], results[ALONE_AGAIN.name]
        compared = [compare(figure, one, again, runs) for runs in results.values()]
        low, high = compared[0].interval
        table.add_row(figure, *map(_cell, compared), f"{low:.2f} to {high:.2f}", end_section=False)
    table.add_section()
    for name, label in WAITING.items():
        table.add_row(label, *(str(max(run[name] for run in runs)) for runs in results.values()))
    for name in ("max_queued_tasks", "max_stream_tasks", "holds", "held_steps", "expired_holds"):
        table.add_row(name, *(_most(runs, name) for runs in results.values()))
    table.add_row("cores of the stage", *(f"{_mean(runs, 'busy'):.2f}" for runs in results.values()))
    table.caption = LEGEND
    Console(width=170).print(table)


def show_idle(what: str, streams: int, results: dict[str, list[Run]]) -> None:
    """Nobody slow: fastpath beside stock."""
    table = Table(title=f"{what}, {streams} streams at a time, {len(results[ALONE.name])} run(s)")
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
        table.add_row(figure, *values, f"{ours.ratio:.2f}", f"{low:.2f} to {high:.2f}")
    table.add_row("cores of the stage", *(f"{_mean(runs, 'busy'):.2f}" for runs in (one, again, fast)))
    for name, label in WAITING.items():
        table.add_row(label, *(str(max(run[name] for run in runs)) for runs in (one, again, fast)))
    for name in ("holds", "copied_tensors"):
        table.add_row(name, "", "", _total(fast, name))
    table.caption = LEGEND
    Console(width=130).print(table)


def _cell(compared: Comparison) -> str:
    return f"{compared.value * 1e3:.0f} ms ({compared.ratio:.2f})"


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(sum(run[name] for run in runs)) / len(runs)


def _most(runs: Sequence[Run], name: str) -> str:
    return str(max(run["counters"][name] for run in runs)) if runs[0]["counters"].get("tasks") else ""


def _total(runs: Sequence[Run], name: str) -> str:
    return str(sum(run["counters"][name] for run in runs))
