"""What observing costs a raw output: ``queue_metrics`` on and off in turn, with stubs below what it stands in front of.

    python -m benchmarks.dispatch.observing

The two methods of a real orchestrator, with functions that do nothing in their place, are called as its loops call
them. The patch is installed and taken off again as in a server, all in one process: on, off, off, on. What two ``off``
lie apart is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from omni_fastpath import config
from omni_fastpath.declare import Process, State
from omni_fastpath.install import apply, uninstall
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.ab import about

CALLS = 5000
ROUNDS = 30
ENTRIES = (1, 32)
STAGE = 2
"""Of which somebody gets audio, so that whether there is a first is asked."""


async def once(orchestrator: Any, raw_outputs: Any) -> float:
    """Microseconds of processor time a raw output: nothing waits here, and nobody else's turn counts."""
    names: set[str] = set()
    processed: list[Any] = []
    process = orchestrator._process_llm_stage_outputs
    route = orchestrator._handle_processed_outputs
    started_ns = time.thread_time_ns()
    for _ in range(CALLS):
        await process(STAGE, 0, raw_outputs, names)
        await route(STAGE, 0, processed)
    return (time.thread_time_ns() - started_ns) / CALLS / 1000


def switch(orchestrator: Any, *, on: bool) -> None:
    """Install the patch and let it find the orchestrator, or take it off.

    Raises:
        RuntimeError: It is not what it should be.
    """
    [patch] = [each for each in PATCHES if each.name == "queue_metrics"]
    if not on:
        uninstall(patch)
    else:
        apply(config.resolve([], {patch.env: "1"}, PATCHES), Process.SERVER)
        orchestrator._orchestration_output_handler().close()
        if LEDGER.named(patch.name).state is not State.APPLIED:
            raise RuntimeError(LEDGER.named(patch.name).reason)


async def measure(entries: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each round: ``off``, ``on``, what ``on`` is over ``off``, and two ``off`` apart."""
    from benchmarks.dispatch.__main__ import stub
    from benchmarks.rigs.inprocess import Pipeline, audio, batch

    pipeline = Pipeline()
    orchestrator = pipeline.orchestrator
    for number in range(entries):
        pipeline.add_request(f"r{number}")
    stub(orchestrator, iter(lambda: None, 0), lambda _: None)
    raw_outputs = batch(*(audio(f"r{number}", 1.0) for number in range(entries)))
    found: dict[str, list[float]] = {"off": [], "on": [], "over": [], "noise": []}
    for number in range(rounds):
        taken: dict[bool, list[float]] = {True: [], False: []}
        for on in (True, False, False, True) if number % 2 else (False, True, True, False):
            switch(orchestrator, on=on)
            taken[on].append(await once(orchestrator, raw_outputs))
        off, on_ = (statistics.mean(taken[each]) for each in (False, True))
        found["off"].append(off)
        found["on"].append(on_)
        found["over"].append(on_ - off)
        found["noise"].append(taken[False][0] - taken[False][1])
    switch(orchestrator, on=False)
    return found


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Print a line for each number of entries."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = options.parse_args().rounds
    print("\nObserving, microseconds of processor time a raw output, median (and spread) of the rounds")
    print(f"{'entries':>10}" + "".join(f"{name:>24}" for name in ("off", "on", "on over off", "off over off")))
    for entries in ENTRIES:
        found = asyncio.run(measure(entries, rounds))
        print(f"{entries:>10}" + "".join(f"{_spread(values):>24}" for values in found.values()))
    print(about.line())


if __name__ == "__main__":
    main()
