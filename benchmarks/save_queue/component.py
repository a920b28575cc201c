"""One stage by itself, arms alternating run by run: nobody slow, a stream that is not fetched, a put that hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs import results
from benchmarks.rigs.arm import Arm, turns
from benchmarks.rigs.arms import STOCK, STOCK_AGAIN
from benchmarks.rigs.quantiles import quantile
from benchmarks.rigs.results import progress
from benchmarks.save_queue.loads import Hang, Load
from benchmarks.save_queue.rig import STAGES
from benchmarks.save_queue.subjects import CAPPED, FASTPATH, subjects

STEP_MS = {0: 15.0, 1: 12.0}
"""Of the thinker and the talker, as the simulated device's defaults."""
IDLE_TOKENS = 64
IDLE_ARRIVALS_S = 0.7
"""All streams are there before the first has ended."""
QUIET = (STOCK, STOCK_AGAIN, FASTPATH)

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def idle(configs: Mapping[int, Path], streams: Sequence[int], runs: int, stages: Sequence[int]) -> None:
    """Nobody slow: chunks a second, and what the streams felt.

    Raises:
        RuntimeError: A stream's chunks differ between arms.
    """
    for stage in stages:
        with subjects(QUIET, stage, configs[stage], step_ms=STEP_MS[stage], device_type="cuda") as found:
            for subject in found:  # a short run that is not counted
                subject.call("load", load=Load(4, 8, 0.1))
            by_name = {subject.arm.name: subject for subject in found}
            for count in streams:
                load = Load(count, IDLE_TOKENS, IDLE_ARRIVALS_S)
                measured: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in QUIET}
                for number, arm in turns(QUIET, runs):
                    progress(f"{STAGES[stage]}, {count} streams, run {number + 1} of {runs}: {arm.name}")
                    measured[arm.name].append(by_name[arm.name].call("load", load=load))
                if len({tuple(run["digests"]) for each in measured.values() for run in each}) != 1:
                    raise RuntimeError("the chunks of a stream differ between runs")
                results.save("save_queue", {"what": "idle", "stage": stage, "load": load, "runs": measured})
                _show_idle(f"{STAGES[stage]}, nobody slow, {count} streams, {runs} run(s)", measured)


def _show_idle(title: str, measured: Runs) -> None:
    columns = ("", "chunks/s", "to stock", "first p50", "first p99", "largest gap p99", "cores", "holds", "copied")
    rates = {name: sum(run["chunks_per_s"] for run in runs) / len(runs) for name, runs in measured.items()}
    stock = (rates[STOCK.name] + rates[STOCK_AGAIN.name]) / 2
    rows = []
    for name, runs in measured.items():
        felt = [stream for run in runs for stream in run["streams"]]
        cells = [name, f"{rates[name]:.0f}", f"{rates[name] / stock:.3f}"]
        cells += [f"{quantile((each['first_s'] for each in felt), share) * 1e3:.0f} ms" for share in (0.5, 0.99)]
        cells += [f"{quantile((each['gap_s'] for each in felt), 0.99) * 1e3:.0f} ms"]
        cells += [f"{sum(run['cores'] for run in runs) / len(runs):.2f}"]
        cells += [str(sum(run["counters"].get(key, 0) for run in runs)) for key in ("holds", "owned_payloads")]
        rows.append(cells)
    results.show(title, columns, rows)


def hang(configs: Mapping[int, Path], how: str, seconds: float) -> None:
    """One stream of 16 hangs at the thinker: the others' text and its own, and bytes in shared memory."""
    arms: Sequence[Arm] = (STOCK, FASTPATH, CAPPED)
    load, measured = Hang(how, seconds=seconds), {}
    with subjects(arms, 0, configs[0], step_ms=STEP_MS[0], device_type="cuda") as found:
        for subject in found:
            progress(f"{how}: {subject.arm.name}")
            measured[subject.arm.name] = subject.call("hang", hang=load)
    results.save("save_queue", {"what": how, "load": load, "runs": measured})
    rows = []
    for name, run in measured.items():
        others = run["others"]
        cells = [name, *(f"{value:.1f}" for value in (sum(others) / len(others), min(others), run["hung"]))]
        cells += [f"{run['bytes'] / 2**20:.1f} MiB"]
        rows.append(cells + [str(run["counters"].get(key, "")) for key in ("holds", "expired_holds")])
    results.show(
        f"Thinker, one of {load.streams + 1} streams hangs ({how}) for {seconds:g} s: tokens a second",
        ("", "others, each", "the slowest", "the one", "in shared memory", "holds", "expired"),
        rows,
    )
