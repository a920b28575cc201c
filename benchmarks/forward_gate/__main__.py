"""``python -m benchmarks.forward_gate``: an arm (``--arm``), or all and the tables."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import benchmarks.forward_gate
from benchmarks.forward_gate.component import TOKENS, measure
from benchmarks.rigs import about, results
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.arms import STOCK, STOCK_AGAIN
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import check, switch_on
from omni_fastpath.declare import Process

GATED = Arm("fastpath", {"OMNI_FASTPATH_FORWARD_GATE": "1"})
ARMS = {arm.name: arm for arm in (STOCK, GATED, STOCK_AGAIN)}
IN_FLIGHT = (64, 128)
FIGURES = {
    "bytes": "bytes on the wire, each output",
    "payload_bytes": "of them payload",
    "orchestrator_us": "orchestrator: decode and process, µs CPU each",
    "stall_ms": "orchestrator: batch in which 32 end, ms CPU",
    "scheduler_us": "stage: update_from_output, µs CPU each",
    "encode_us": "stage: encode, µs CPU each",
}


def run_arm(arm: Arm, in_flight: Sequence[int]) -> None:
    """Be an arm, measure, and say the figures; the process ends."""
    switch_on(arm, Process.STAGE)
    found = {str(count): measure(count) for count in in_flight}
    counters = check(arm, Process.STAGE)
    if arm.on:
        assert counters["forward_gate"]["multimodal_outputs"] >= TOKENS * sum(in_flight), counters
    results.say(found)
    os._exit(0)  # threads of upstream's that are not joined can end the interpreter's own way out with SIGABRT


def show(title: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A row for each figure, and whether messages and counts are alike.

    Raises:
        AssertionError: The user would get something else, or a count differs.
    """
    rows = []
    for name, label in FIGURES.items():
        stock, fast, again = (statistics.median(each[name] for each in found[arm]) for arm in ARMS)
        ratio = f"{stock / fast:.1f}" if fast else "all of it"
        rows.append([label, f"{stock:.1f}", f"{fast:.1f}", ratio, f"{again / stock:.2f}" if stock else ""])
    results.show(title, ("figure", "stock", "fastpath", "stock / fastpath", "A/A"), rows)
    each = [(run["messages"], run["totals"]) for runs in found.values() for run in runs]
    assert all(one == each[0] for one in each), f"{title}: messages or counts differ between arms: {each}"
    print(f"messages and counts alike in all arms: {each[0][1]}\n")


def main() -> None:
    """Run one arm, or all and print the tables."""
    arguments = parser(benchmarks.forward_gate.__doc__, 1, ARMS)
    arguments.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    options = arguments.parse_args()
    if options.arm:
        run_arm(ARMS[options.arm], options.in_flight)
    counts = [str(count) for count in options.in_flight]
    found = alternate("benchmarks.forward_gate", list(ARMS.values()), options.rounds, "--in-flight", *counts)
    for count in counts:
        show(f"talker, {count} in flight", {arm: [line[count] for line in found[arm]] for arm in ARMS})
    print(about.line())


if __name__ == "__main__":
    main()
