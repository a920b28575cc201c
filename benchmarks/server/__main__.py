"""``python -m benchmarks.server``."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Sequence
from typing import get_args

import benchmarks.server
from benchmarks.ab import verdict
from benchmarks.rigs import overlays, side_by_side
from benchmarks.server.arms import ARMS, USUAL, named, parts
from benchmarks.server.load import LAYOUTS, LEVELS, Kind, Load
from benchmarks.server.measure import Host, capacity, measure, run
from benchmarks.server.report import show, show_capacity, show_parts

PARTS_STARTS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run the starts and print the table."""
    parser = _parser()
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, side_by_side.interrupted)
    try:
        load = Load(
            levels=options.rate or options.levels or LEVELS,
            layout=options.layout,
            kind=options.load,
            prompt=options.prompt,
            tokens=options.tokens,
            vary=options.vary,
            loop="open" if options.rate else "closed",
            waves=options.waves,
            requests=options.requests,
            pace=options.pace,
        )
    except ValueError as error:
        parser.error(str(error))
    host = Host(options.release, options.engines == "stages")
    if host.release is not None:
        overlays.fetch(host.release)
    arms, starts, of_start, shown = options.arms or USUAL, options.starts or verdict.STARTS, measure, show
    if options.capacity:
        starts, of_start, shown = options.starts or 1, capacity, show_capacity
    elif options.parts:
        [base] = options.parts  # first and last in each turn, so that its own starts tell how much starts differ
        arms, starts, shown = (base, *(options.arms or parts()), base), options.starts or PARTS_STARTS, show_parts
    name, goes_on = options.resume or "server", options.resume is not None
    found = run(name, arms, starts, load, host, goes_on=goes_on, minutes=options.minutes, of_start=of_start)
    if found := {arm: each for arm, each in found.items() if each}:
        shown(found, load, host)


def _parser() -> argparse.ArgumentParser:
    parser = side_by_side.parser("benchmarks.server", benchmarks.server.__doc__)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default=Load.layout)
    parser.add_argument(
        "--load", choices=get_args(Kind), default=Load.kind, help="of chat: text and audio, or text alone"
    )
    parser.add_argument("--prompt", type=int, help="tokens of a chat prompt; a short question unless given")
    parser.add_argument("--tokens", type=int, help="text tokens of an answer (100; text alone: 200), frames of speech")
    parser.add_argument("--vary", type=float, default=Load.vary, help="0.5: lengths from half to one and a half of it")
    parser.add_argument("--levels", "--level", type=_numbers, help="streams of a closed loop, with commas")
    parser.add_argument("--waves", type=int, default=Load.waves, help="of a closed loop")
    parser.add_argument("--rate", type=_numbers, help="an open loop in its place: requests a second, with commas")
    parser.add_argument("--requests", type=int, help="at each level, whatever --waves says")
    parser.add_argument("--arms", type=named, help="with commas; a+b is both; --help-arms names them")
    parser.add_argument("--help-arms", action="version", version="\n".join(ARMS))
    parser.add_argument(
        "--pace", type=float, default=Load.pace, help="2: for a machine at half speed, the device at half speed too"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--parts",
        type=named,
        nargs="?",
        const=(ARMS["default"],),
        metavar="ARM",
        help="the default set, or this arm, against itself with one part out, or against --arms",
    )
    what.add_argument("--capacity", action="store_true", help="the most streams that each arm bears")
    parser.add_argument(
        "--starts", type=int, help=f"of each arm: {verdict.STARTS}, with --parts {PARTS_STARTS}, with --capacity 1"
    )
    parser.add_argument("--resume", metavar="NAME", help="results/NAME.jsonl: what is there of the same load counts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no start begins that would end later")
    parser.add_argument(
        "--engines", choices=("light", "stages"), default="light", help="stages: real ones, which cost more"
    )
    parser.add_argument("--release", choices=overlays.releases(), help="of vllm-omni; the installed one unless given")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


if __name__ == "__main__":
    main()
