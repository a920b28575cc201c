"""What ``forward_gate`` takes off the wire and off the orchestrator's thread.

    python -m benchmarks.forward_gate

Two stages whose payload stock sends twice: 0.22's thinker, on that release's own scheduler, encoder, decoder and output
processor (put into .cache by scripts/release.sh), and 0.30's talker. 64 and 128 requests in flight, 900 tokens each, 32
at a time ending in one batch. Arms alternate, each in a process of its own; stock runs twice, as an A/A pair. What the
output processor makes for the user, without the payload, and its counts of tokens and ends are compared; tests compare
the orchestrator's own messages and stage metrics (tests/patches/test_forward_gate.py).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.forward_gate.component import ARMS
from benchmarks.forward_gate.stages import NEW, OLD
from benchmarks.rigs import overlays, results
from benchmarks.rigs.driver import announced, last_line, run_module
from omni_fastpath.tools.ab import about
from omni_fastpath.tools.ab.arm import Arm, clean

ROOT = Path(__file__).resolve().parents[2]
IN_FLIGHT = (64, 128)
WHO = {OLD: "0.22, thinker", NEW: "0.30, talker"}
FIGURES = {
    "bytes": "bytes on the wire, each output",
    "payload_bytes": "of them payload",
    "orchestrator_us": "orchestrator: decode and process, µs CPU each",
    "stall_ms": "orchestrator: batch in which 32 end, ms CPU",
    "scheduler_us": "stage: update_from_output, µs CPU each",
    "encode_us": "stage: encode, µs CPU each",
}


def environment(release: str) -> dict[str, str]:
    """Ours without what an arm alone says, and the release's own packages first."""
    found = {key: value for key, value in clean().items() if not key.startswith("OMNI_SIMULATED_DEVICE")}
    found["PYTHONPATH"] = overlays.python_path(release, ROOT)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return found | quiet | {"VLLM_NO_USAGE_STATS": "1"}


def run(release: str, module: str, *arguments: str) -> str:
    """Run a module of ours with the release's packages; its output."""
    return run_module(module, *arguments, environment=environment(release), folder=ROOT)


def measure(release: str, arm: Arm, configs: Path, in_flight: Sequence[int]) -> dict[str, Any]:
    """One process of one arm: figures by requests in flight."""
    counts = [str(count) for count in in_flight]
    arguments = ("--release", release, "--configs", str(configs), "--arm", arm.name, "--in-flight", *counts)
    found = last_line(run(release, "benchmarks.forward_gate.component", *arguments))
    results.save("forward_gate", {"release": release, "arm": arm.name, **found})
    return found


def main() -> None:
    """Run the arms and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    parser.add_argument("--rounds", type=int, default=1, help="of all arms, forwards and backwards")
    options = parser.parse_args()
    for release in options.releases:
        overlays.fetch(release)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            run(release, "benchmarks.forward_gate.stages", release, folder)
            for _, arm in announced(list(ARMS.values()), options.rounds, f"{WHO[release]}: "):
                found[arm.name].append(measure(release, arm, Path(folder), options.in_flight))
        for count in options.in_flight:
            show(f"{WHO[release]}, {count} in flight", {arm: [r[str(count)] for r in found[arm]] for arm in ARMS})
    print(about.line())


def show(title: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A row for each figure, and whether messages and counts are alike.

    Raises:
        AssertionError: The user would get something else, or a count differs.
    """
    table = Table(title=title)
    for column in ("figure", "stock", "fastpath", "stock / fastpath", "A/A"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, label in FIGURES.items():
        stock, fast, again = (statistics.median(each[name] for each in found[arm]) for arm in ARMS)
        ratio = f"{stock / fast:.1f}" if fast else "all of it"
        table.add_row(label, f"{stock:.1f}", f"{fast:.1f}", ratio, f"{again / stock:.2f}" if stock else "")
    Console(width=110).print(table)
    each = [(run["messages"], run["totals"]) for runs in found.values() for run in runs]
    assert all(one == each[0] for one in each), f"{title}: messages or counts differ between arms: {each}"
    print(f"messages and counts alike in all arms: {each[0][1]}\n")


if __name__ == "__main__":
    main()
