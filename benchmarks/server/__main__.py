"""``python -m benchmarks.server``."""

from __future__ import annotations

import argparse
import signal
from types import FrameType
from typing import NoReturn

import benchmarks.server
from benchmarks.server.measure import ARMS, LEVELS, Load, run
from benchmarks.server.report import show
from omni_fastpath.compare import verdict


def main() -> None:
    """Run the starts and print the table."""
    parser = argparse.ArgumentParser(
        description=benchmarks.server.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=verdict.STARTS, help="of each arm")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 4), default=1, help="of each stage")
    parser.add_argument("--levels", type=_levels, default=LEVELS, help="streams, with commas")
    parser.add_argument("--tokens", type=int, default=Load.tokens, help="text tokens of an answer")
    parser.add_argument("--arms", type=_arms, default=tuple(ARMS.values()), help=f"of {', '.join(ARMS)}, with commas")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    load = Load(levels=options.levels, replicas=options.replicas, tokens=options.tokens)
    show(run("server", options.arms, options.starts, load), load)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave through the servers' context managers, so that none is left running."""
    raise SystemExit(128 + number)


def _levels(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _arms(text: str) -> tuple[object, ...]:
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, allowed: {', '.join(ARMS)}")
    return tuple(ARMS[name] for name in text.split(","))


if __name__ == "__main__":
    main()
