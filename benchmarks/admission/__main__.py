"""``python -m benchmarks.admission``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks.admission
from benchmarks.ab.capture import Capture
from benchmarks.ab.serving import MeasureError
from benchmarks.rigs import about, results, server_arms, whole_server
from benchmarks.rigs.captures import run_closed_loop, ttfp_s
from benchmarks.rigs.open_loop import run_open_loop
from benchmarks.rigs.quantiles import quantile
from benchmarks.server.arms import ARMS, ServerArm
from benchmarks.server.load import Load
from benchmarks.server.measure import serving

LIMIT, BURST = 8, 200


def figures(captures: Sequence[Capture]) -> dict[str, float]:
    """The figures of one load, with times in milliseconds.

    Raises:
        MeasureError: A request was neither served nor refused.
    """
    served = [ttfp_s(capture) or 0.0 for capture in captures if capture.succeeded and capture.audio]
    refused = [capture.e2e_s for capture in captures if capture.status == 503]
    if len(served) + len(refused) != len(captures):
        raise MeasureError(f"{len(captures)} requests: {len(served)} were served and {len(refused)} refused")
    times = {"TTFP p50": (served, 0.5), "TTFP p99": (served, 0.99), "refusal p99": (refused, 0.99)}
    found = {name: 1000 * quantile(*given) for name, given in times.items()}
    return {"served": len(served), "refused": len(refused), **found}


def measure(load: Load, arm: ServerArm, model: Path, log: Path) -> dict[str, Any]:
    """One start of the arm's server: its figures by load, and its counters."""
    with serving(arm, load, model, log) as server:
        captures = {"below": run_closed_loop(server.url, load.asked("below the limit", 8 * LIMIT), LIMIT - 1)}
        captures |= {f"{rate:g} per second": load.run(server.url, rate) for rate in load.levels}
        captures["burst"] = run_open_loop(server.url, load.asked("a burst", BURST), [0.0] * BURST)
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        counters = server.snapshots()["api"].patches["admission_limit"].counters
    return {"counters": counters, "figures": {name: figures(each) for name, each in captures.items()}}


def main() -> None:
    """Run the starts and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description=benchmarks.admission.__doc__)
    parser.add_argument("--starts", type=int, default=3, help="of each arm")
    parser.add_argument("--capacity", type=float, required=True, help="of stock, requests per second")
    parser.add_argument("--requests", type=int, default=240, help="of an open loop")
    options = parser.parse_args()
    rates = (0.5 * options.capacity, 3 * options.capacity)
    load = Load(rates, layout="pair", loop="open", requests=options.requests)
    limited = ("--max-num-queued-reqs", str(LIMIT))
    arms = [dataclasses.replace(ARMS[name], arguments=limited) for name in ("poll", "default")]
    found = whole_server.run_starts("admission", arms, options.starts, load.model, functools.partial(measure, load))
    rows = []
    for place, names in found["poll"][0]["figures"].items():
        for name in names:
            values = [[each["figures"][place][name] for each in starts] for starts in found.values()]
            rows.append([f"{place}: {name}", *(f"{statistics.median(each):.0f}" for each in values)])
    results.show(f"Limit of {LIMIT}: medians of starts, times in ms", ("load: figure", *found), rows)
    print([(arm, each["counters"]) for arm, starts in found.items() for each in starts], about.line())


if __name__ == "__main__":
    main()
