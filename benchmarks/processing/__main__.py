"""``python -m benchmarks.processing``."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import benchmarks.processing
from benchmarks.rigs import about
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.arms import ARMS, LEAN_PROCESSING, STOCK, STOCK_AGAIN
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import check, switch_on
from benchmarks.rigs.results import say, show, spread
from omni_fastpath.declare import Process

REQUESTS = 16
LENGTHS = (50, 450, 900, 1950)
AROUND = 40
"""Raw outputs on each side of a length."""
ROUNDS = 3

SUBJECTS = (STOCK, LEAN_PROCESSING, STOCK_AGAIN)

ENTRIES = ("thinker", "talker", "talker, codes", "code2wav")
"""The thinker gives a token that a user gets. Nothing receives what the talker gives: a token, and without
``forward_gate`` a payload with it. Code2wav gives ten samples of audio."""


def _entries() -> dict[str, tuple[int, Callable[[str], Any]]]:
    from vllm_omni.engine import OmniEngineCoreOutput

    from benchmarks.rigs.inprocess import audio, codes, text

    samples = [0.5] * 10
    counted = {"num_generation_tokens": 1}  # as a scheduler's entries are
    return {
        "thinker": (0, lambda name: text(name, 1, **counted)),
        "talker": (1, lambda name: OmniEngineCoreOutput(name, [7], **counted)),
        "talker, codes": (1, lambda name: codes(name, **counted)),
        "code2wav": (2, lambda name: audio(name, *samples)),
    }


class Unlogged:
    """Stands in the place of the Prometheus logger, so that upstream makes statistics; recording is not processing."""

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""


def measure(stage_id: int, entry: Callable[[str], Any]) -> dict[int, float]:
    """Microseconds an entry, by the length of its request."""
    from benchmarks.rigs.inprocess import Pipeline, batch

    pipeline = Pipeline()
    orchestrator = pipeline.orchestrator
    orchestrator._stat_logger = Unlogged()
    names = [f"r{number}-{'0' * 32}" for number in range(REQUESTS)]  # as long as a server's
    for name in names:
        pipeline.add_request(name)
    costs: list[float] = []

    async def run() -> None:
        for _ in range(max(LENGTHS) + AROUND):
            raw = batch(*(entry(name) for name in names))
            began_ns = time.thread_time_ns()
            await orchestrator._process_llm_stage_outputs(stage_id, 0, raw, set())
            costs.append((time.thread_time_ns() - began_ns) / 1000 / REQUESTS)

    gc.collect()
    gc.disable()  # what a collection costs depends on everything else in the process
    try:
        asyncio.run(run())
    finally:
        gc.enable()
    return {length: statistics.median(costs[length - AROUND : length + AROUND]) for length in LENGTHS}


def _run(arm: Arm) -> dict[str, float]:
    switch_on(arm, Process.SERVER)
    found = {
        f"{name}, {length}": cost
        for name, (stage_id, entry) in _entries().items()
        for length, cost in measure(stage_id, entry).items()
    }
    counters = check(arm, Process.SERVER)
    if arm is LEAN_PROCESSING:
        not_built = counters["lean_processing"]["not_built"]
        assert not_built >= REQUESTS * max(LENGTHS), not_built
    return found


def main() -> None:
    """Run one arm (``--arm``), or all of them and print the table."""
    options = parser(benchmarks.processing.__doc__, ROUNDS).parse_args()
    if options.arm:
        say(_run(ARMS[options.arm]))
        return
    results = alternate("benchmarks.processing", SUBJECTS, options.rounds)
    rows: list[list[str]] = []
    for entry in ENTRIES:
        middle: dict[str, list[float]] = {}
        for name, runs in results.items():
            values = [[each[f"{entry}, {length}"] for each in runs] for length in LENGTHS]
            middle[name] = [statistics.median(each) for each in values]
            rows.append([f"{entry}, {name}", *map(spread, values), f"{middle[name][-1] / middle[name][0]:.2f}"])
        ratios = (one / ours for one, ours in zip(middle[STOCK.name], middle[LEAN_PROCESSING.name], strict=True))
        rows += [[f"{entry}, stock / lean_processing", *(f"{ratio:.2f}" for ratio in ratios)], []]
    title = f"Processing, microseconds an entry ({REQUESTS} requests, statistics on), by steps of the request so far"
    show(title, ("", *map(str, LENGTHS), f"{LENGTHS[-1]} / {LENGTHS[0]}"), rows)
    print(about.line())


if __name__ == "__main__":
    main()
