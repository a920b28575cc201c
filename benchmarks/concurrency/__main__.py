"""``python -m benchmarks.concurrency``."""

from __future__ import annotations

import argparse

import benchmarks.concurrency
from benchmarks.concurrency.measure import ARMS, run
from benchmarks.concurrency.report import show
from omni_fastpath.compare import verdict


def main() -> None:
    """Run the starts and print the table."""
    parser = argparse.ArgumentParser(
        description=benchmarks.concurrency.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=verdict.STARTS, help="of each arm")
    show(run("concurrency", ARMS, parser.parse_args().starts))


if __name__ == "__main__":
    main()
