"""The whole server on the simulated device: one slow stream of 16 at the thinker and at the talker, and nobody slow.

Every server can make sends slow, but does so only for streams whose request id says so: the batches without a slow
stream and those with one run on the same server in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rigs import server_arms as arms
from benchmarks.rigs.results import progress
from benchmarks.rigs.server import Server
from benchmarks.rigs.whole_server import FEWEST, STEP_MS, checked, deploy, model_folder
from benchmarks.rigs.whole_server import environment as environment_of
from benchmarks.save_queue.figures import FELT, LEGEND, Run, compare
from benchmarks.save_queue.output import save
from benchmarks.save_queue.subjects import FASTPATH, FIFO, PATCH, STOCK, Arm
from omni_fastpath.tools.ab.arm import WrongArmError
from omni_fastpath.tools.ab.capture import Capture, Client, Request, chat_request

SLOW_MS = 200.0
OUTPUT_TOKENS = 32
RATE = 5.0
"""Arrivals a second in the batches of 16."""
STREAMS = 16
LEVELS = (1, 8, 32)
WAVES = 3
"""Requests at a level, in blocks of its concurrency."""
KINDS = {"alone": None, "slow at the thinker": 0, "slow at the talker": 1}
"""Batches of 16: which stage's sends are slow for one of them."""
STOCK_AGAIN = Arm("stock again", slow=True)
ARMS = (STOCK, FIFO, FASTPATH, STOCK_AGAIN)
"""One server start each; the second stock is the A/A pair."""
STATE_S = 3.0
"""A state file is not older than two seconds."""


@dataclass(frozen=True)
class Plan:
    """How much to run on each server: batches of each kind, and levels of concurrency with nobody slow."""

    runs: int = 5
    levels: Sequence[int] = LEVELS
    kinds: Sequence[str] = tuple(KINDS)


QUICK = Plan(runs=1, levels=(1, 8))


def run(plan: Plan) -> None:
    """Start the servers one after another, save the lines and print the tables."""
    model = model_folder("qwen3_omni")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, arm in enumerate(ARMS):
            progress(f"server {number + 1} of {len(ARMS)}: {arm.name}")
            found[arm.name] = measure(arm, plan, model, Path(folder) / f"{number}.log")
            save("server", arm=arm.name, **found[arm.name])
    check_content(found.values())
    for kind, stage in KINDS.items():
        if stage is not None:
            show_slow(kind, plan, found)
    show_idle(plan, found)


def measure(arm: Arm, plan: Plan, model: Path, log: Path) -> dict[str, Any]:
    """One start of an arm's server.

    Returns:
        ``kinds`` and ``levels`` (runs of each), ``stages`` (the patch's account of each stage process at the end),
        ``stages_idle`` (the same before anybody was slow), and how the server began and ended.
    """
    import omni_simulated_device

    injections: list[dict[str, Any]] = [
        {"stage": stage, "match": f"slow{stage}", "ms": SLOW_MS} for stage in KINDS.values() if stage is not None
    ]
    injections += [{"fifo": True}] if arm.fifo else []
    environment = {
        **environment_of(arm),
        omni_simulated_device.SLOW_SENDS_VARIABLE: json.dumps(injections),
    }
    kinds: dict[str, list[Run]] = {kind: [] for kind in plan.kinds}
    levels: dict[str, list[Run]] = {}
    with Server(model, deploy("qwen3_omni.yaml"), environment=environment, log_path=log) as server:
        checked(asyncio.run(_batch(server.url, None, RATE)), audio=True)
        for level in plan.levels:
            progress(f"{arm.name}: {level} at a time")
            levels[str(level)] = [_measured(server, _level(server.url, level))]
        time.sleep(STATE_S)
        idle = _check_arm(server, arm)
        for number, kind in itertools.product(range(plan.runs), plan.kinds):
            progress(f"{arm.name}: run {number + 1} of {plan.runs}, {kind}")
            kinds[kind].append(_measured(server, _batch(server.url, KINDS[kind], RATE)))
        time.sleep(STATE_S)
        stages = _check_arm(server, arm)
    assert server.shutdown is not None
    return {
        "kinds": kinds,
        "levels": levels,
        "stages": stages,
        "stages_idle": idle,
        "start_s": server.start_s,
        "killed": server.shutdown.killed,
        "left_in_shared_memory": len(server.shutdown.leftovers),
    }


# ---- Requests ----


def _request(number: int, request_id: str) -> Request:
    return chat_request(f"Question {number}", max_tokens=OUTPUT_TOKENS, ignore_eos=True, request_id=request_id)


async def _batch(url: str, slow_stage: int | None, rate: float) -> list[Capture]:
    """16 requests, evenly spaced; the fourth is slow where one is."""
    names = [f"other-{time.monotonic_ns()}-{number}" for number in range(STREAMS)]
    if slow_stage is not None:
        names[3] = f"slow{slow_stage}-{names[3]}"
    async with Client(url) as client:
        return await client.run_open_loop([_request(number, name) for number, name in enumerate(names)], rate)


async def _level(url: str, concurrency: int) -> list[Capture]:
    count = max(FEWEST, WAVES * concurrency)
    requests = [_request(number, f"other-{time.monotonic_ns()}-{number}") for number in range(count)]
    async with Client(url) as client:
        return await client.run_closed_loop(requests, concurrency)


def _measured(server: Server, load: Any) -> Run:
    before = server.cpu_seconds()
    begun = time.monotonic()
    captures = checked(asyncio.run(load), audio=True)
    seconds = time.monotonic() - begun
    used = {role: value - before.get(role, 0.0) for role, value in server.cpu_seconds().items()}
    return {
        "streams": [
            {
                "slow": "slow" in str(capture.request.body["request_id"]),
                "ttfp_s": capture.ttfp_s,
                "e2e_s": capture.e2e_s,
                "gap_s": max(capture.audio_gaps_s, default=0.0),
                "digest": capture.digest(),
            }
            for capture in captures
        ],
        "throughput": len(captures) / seconds,
        "cores": {role: value / seconds for role, value in used.items()},
    }


# ---- Checks ----


def _check_arm(server: Server, arm: Arm) -> dict[str, Mapping[str, Any]]:
    """What the state files of the two sending stages say of the patch; the arm must be what it says.

    Raises:
        WrongArmError: It is not.
    """
    found = arms.prove(server, arm, arms.roles(len(STEP_MS)))
    stages = {role: found[role].patches[PATCH] for role in sorted(arms.roles(len(STEP_MS) - 1) - {"api"})}
    for role, entry in stages.items():
        is_helped = entry.counters.get("helpers", 0) > 0
        if arm.on and (is_helped is arm.fifo or not entry.counters.get("tasks")):
            raise WrongArmError(f"{arm.name}: {role}: {entry.reason}, {entry.counters}")
    return {role: entry.model_dump(mode="json") for role, entry in stages.items()}


def check_content(starts: Iterable[Mapping[str, Any]]) -> None:
    """Each question has the same answer in every run of every start.

    Raises:
        RuntimeError: It has not.
    """
    answers: dict[int, set[str]] = {}
    for start in starts:
        for measured in itertools.chain(*start["kinds"].values(), *start["levels"].values()):
            for number, stream in enumerate(measured["streams"]):
                answers.setdefault(number, set()).add(stream["digest"])
    if any(len(digests) != 1 for digests in answers.values()):
        raise RuntimeError("an answer differs between runs or arms")


# ---- Tables ----


def show_slow(kind: str, plan: Plan, found: Mapping[str, Mapping[str, Any]]) -> None:
    """What the others felt beside one slow stream, each arm beside stock with nobody slow."""
    table = Table(
        title=f"Whole server, {kind} ({SLOW_MS:.0f} ms a send), one of {STREAMS}: the others, {plan.runs} runs pooled. "
        "In brackets: ratio to nobody slow"
    )
    shown = (STOCK, FIFO, FASTPATH)
    table.add_column("")
    table.add_column("nobody slow", justify="right")
    for arm in shown:
        table.add_column(arm.name, justify="right")
    table.add_column("A/A interval", justify="right")
    one, again = (found[arm.name]["kinds"]["alone"] for arm in (STOCK, STOCK_AGAIN))
    for figure in FELT:
        compared = [compare(figure, one, again, found[arm.name]["kinds"][kind]) for arm in shown]
        low, high = compared[0].interval
        cells = [f"{each.value * 1e3:.0f} ms ({each.ratio:.2f})" for each in compared]
        table.add_row(figure, f"{compared[0].baseline * 1e3:.0f} ms", *cells, f"{low:.2f} to {high:.2f}")
    for name in ("max_queued_tasks", "max_stream_tasks", "holds", "expired_holds"):
        counts = ["/".join(str(each["counters"][name]) for each in _in_order(found[arm.name])) for arm in shown[1:]]
        table.add_row(f"counted, both stages, whole start: {name}", "", "", *counts)
    busiest = [max(max(run["cores"].values()) for run in found[arm.name]["kinds"][kind]) for arm in shown]
    table.add_row("cores of the busiest process", "", *(f"{each:.2f}" for each in busiest))
    table.caption = LEGEND
    Console(width=150).print(table)


def show_idle(plan: Plan, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Nobody slow: fastpath beside stock."""
    table = Table(title="Whole server, nobody slow: fastpath beside two starts of stock")
    for column in ("at a time", "figure", "stock", "stock again", "fastpath", "ratio"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for level in map(str, plan.levels):
        one, again, fast = (found[arm.name]["levels"][level] for arm in (STOCK, STOCK_AGAIN, FASTPATH))
        rates = [float(runs[0]["throughput"]) for runs in (one, again, fast)]
        ratio = 2 * rates[2] / (rates[0] + rates[1])
        table.add_row(level, "requests a second", *(f"{rate:.2f}" for rate in rates), f"{ratio:.2f}")
        for figure in FELT:
            compared = [compare(figure, one, again, runs) for runs in (one, again, fast)]
            values = [f"{each.value * 1e3:.0f} ms" for each in compared]
            table.add_row("", figure, *values, f"{compared[2].ratio:.2f}")
        table.add_section()
    stages = found[FASTPATH.name]["stages_idle"]
    holds = "/".join(str(stages[name]["counters"]["holds"]) for name in sorted(stages))
    table.caption = f"Holds of fastpath in all of this, thinker/talker: {holds}"
    Console(width=120).print(table)


def _in_order(start: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [start["stages"][name] for name in sorted(start["stages"])]
