"""``python -m benchmarks.demo``: serve Qwen3-Omni on light engines, stock and fastpath in turn, and compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

import benchmarks.demo
from benchmarks.ab import verdict
from benchmarks.rigs.side_by_side import guarded, positive
from benchmarks.server.arms import USUAL
from benchmarks.server.load import Load
from benchmarks.server.measure import USUAL_HOST, run
from benchmarks.server.report import alike, show

STREAMS = 64
WHAT_IS_REAL = (
    "No GPU is needed: the stages are simulated (eight H100s, outputs on the clock). API server, HTTP, front end, "
    "orchestrator, output processing, metrics and logs are vLLM-Omni's own. poll and event are its two loops without "
    "the plugin, default is with it; limit is what the GPUs would allow. Underrun: the time without audio for a "
    "listener who plays from the first packet on."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
        130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=benchmarks.demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    count = f"starts of each server (default 1; {verdict.STARTS} for verdicts)"
    parser.add_argument("--starts", type=positive, default=1, metavar="N", help=count)
    parser.add_argument("--quick", action="store_true", help="a small load: tries the demo itself")
    options = parser.parse_args(argv)
    load = Load(levels=(4,), tokens=20) if options.quick else Load(levels=(STREAMS,))

    def body(console: Console) -> int:
        console.print(WHAT_IS_REAL, highlight=False)
        found = run("demo", USUAL, options.starts, load)
        show(found, load, USUAL_HOST)
        return int("DIFFER" in alike(found))

    return guarded("The demo", body)


if __name__ == "__main__":
    sys.exit(main())
