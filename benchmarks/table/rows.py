"""One function a row: run another benchmark's arms in turn, and say what they gave."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.concurrency import measure as calm_server
from benchmarks.replay import __main__ as replay
from benchmarks.replay import report, subjects
from benchmarks.rigs.results import progress
from benchmarks.rigs.whole_server import model_folder
from benchmarks.save_queue import whole_server
from benchmarks.save_queue.figures import pooled
from benchmarks.save_queue.subjects import ON, STOCK, Arm
from omni_fastpath.compare.turns import turns

BUSY_CELL = "server-0.8"
BUSY_ARMS = ("stock-event", "fastpath", "stock-poll", "fastpath-2", "stock-event-2")
BUSY_FIGURE = "user_first_audio.p99"
"""Until the front end has handled it: what a user waits for."""

FASTPATH = Arm("fastpath", ON, slow=True)
"""The patch with its own defaults; `benchmarks.save_queue` measures it with ``holds: always``."""
SLOW_ARMS = (STOCK, FASTPATH)
SLOW_KIND = "slow at the thinker"
SLOW_FIGURE = "TTFP p99"

CALM_LEVELS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Effort:
    """How long the rows run.

    Attributes:
        busy_s: Of load, an arm's run.
        busy_rounds: Of all arms.
        slow_runs: Batches of each kind on one server.
        starts: Servers an arm, where the row is one of servers.
    """

    busy_s: float
    busy_rounds: int
    slow_runs: int
    starts: int


SHORT = Effort(busy_s=10.0, busy_rounds=1, slow_runs=1, starts=2)
FULL = Effort(busy_s=30.0, busy_rounds=2, slow_runs=5, starts=6)


@dataclass(frozen=True)
class Cells:
    """A row's cells, and what the README has no room for.

    Attributes:
        stock: As the table shows it.
        fastpath: The same.
        command: The benchmark that has the rest.
        details: More, in lines.
    """

    stock: str
    fastpath: str
    command: str
    details: tuple[str, ...] = ()


def busy(effort: Effort) -> Cells:
    """Raw outputs at 80 % of what fastpath's orchestrator takes, through real client, orchestrator and front end."""
    arguments = ["--seconds", f"{effort.busy_s:g}", "--rounds", str(effort.busy_rounds)]
    options = replay.options([*arguments, "--cells", BUSY_CELL])
    lines = replay.run_cell(BUSY_CELL, [subjects.named(name) for name in BUSY_ARMS], options)
    by_arm = {name: [_figure(line) for line in lines if line["arm"] == name] for name in BUSY_ARMS}
    stock, fastpath = (
        [value for name, values in by_arm.items() if name.startswith(arm) for value in values]
        for arm in ("stock", "fastpath")
    )
    return Cells(
        span(stock),
        span(fastpath),
        f"python -m benchmarks.replay --cells {BUSY_CELL}",
        tuple(f"{name}: {span(values)}" for name, values in by_arm.items())
        + tuple(f"cut off while its queue grew: {line['arm']}" for line in lines if line["cut_off"]),
    )


def _figure(line: Mapping[str, Any]) -> float:
    value = report.value(dict(line), BUSY_FIGURE)
    if value is None:
        raise RuntimeError(f"{line['arm']}: nobody got audio")
    return value / 1000


def slow_receiver(effort: Effort) -> Cells:
    """The whole server on the simulated device: 16 streams, the sends of one of them take 200 ms; the other 15."""
    plan = whole_server.Plan(runs=effort.slow_runs, levels=(), kinds=("alone", SLOW_KIND))
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in SLOW_ARMS}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder("qwen3_omni")
        for place, (_, arm) in enumerate(turns(SLOW_ARMS, effort.starts)):
            progress(f"server {place + 1} of {len(SLOW_ARMS) * effort.starts}: {arm.name}")
            found[arm.name].append(whole_server.measure(arm, plan, model, Path(folder) / f"{place}.log"))
    whole_server.check_content(start for starts in found.values() for start in starts)
    slow, alone = (
        {name: [pooled(start["kinds"][kind], SLOW_FIGURE) for start in starts] for name, starts in found.items()}
        for kind in (SLOW_KIND, "alone")
    )
    return Cells(
        span(slow[STOCK.name]),
        span(slow[FASTPATH.name]),
        "python -m benchmarks.save_queue server",
        tuple(f"{name}, nobody slow: {span(values)}" for name, values in alone.items()),
    )


def calm(effort: Effort) -> Cells:
    """The whole server with steps of a large model, where nothing queues: first audio, median, at each concurrency."""
    found = calm_server.run("table-calm", calm_server.ARMS, effort.starts, CALM_LEVELS)
    ratios: list[float] = []
    widest = 1.0
    medians: dict[str, list[float]] = {arm.name: [] for arm in calm_server.ARMS}
    details = []
    for level in CALM_LEVELS:
        runs = {
            name: [start[str(level)][calm_server.TTFP] / 1000 for start in starts] for name, starts in found.items()
        }
        stock, fastpath = (statistics.median(runs[arm.name]) for arm in calm_server.ARMS)
        apart = max(max(each) / min(each) for each in runs.values())
        for name, each in zip(medians, (stock, fastpath), strict=True):
            medians[name].append(each)
        ratios.append(fastpath / stock)
        widest = max(widest, apart)
        details.append(f"{level}: {fastpath / stock:.2f} times stock's; two starts of one arm up to {apart:.2f} times")
    return Cells(
        span(medians[calm_server.STOCK.name]),
        f"{span(medians[calm_server.FASTPATH.name])}: {min(ratios):.2f} to {max(ratios):.2f} times "
        f"(two starts of one arm: up to {widest:.2f})",
        "python -m benchmarks.concurrency",
        tuple(details),
    )


def span(seconds: Iterable[float]) -> str:
    """The least and the most of an arm's runs, as the README writes them."""
    low, high = min(found := list(seconds)), max(found)
    unit, scale = ("s", 1.0) if high >= 1 else ("ms", 1000.0)
    shown = [f"{value * scale:.2g}" if value * scale < 10 else f"{value * scale:.0f}" for value in (low, high)]
    if unit == "s" and low < 0.1:  # 0.03 s beside 2 s would hide the ratio
        return f"{low * 1000:.0f} ms to {shown[1]} s"
    return f"{shown[0]} {unit}" if shown[0] == shown[1] else f"{shown[0]} to {shown[1]} {unit}"


MEASURES: dict[str, Callable[[Effort], Cells]] = {"busy": busy, "slow-receiver": slow_receiver, "calm": calm}
