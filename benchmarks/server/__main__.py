"""``python -m benchmarks.server``."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

import benchmarks.server
from benchmarks.rigs import overlays
from benchmarks.rigs.side_by_side import interrupted
from benchmarks.server import load as loads
from benchmarks.server.arms import ARMS, USUAL, named
from benchmarks.server.audio_in import AudioIn
from benchmarks.server.load import LEVELS, RATES, Load
from benchmarks.server.measure import Host, run
from benchmarks.server.report import show
from omni_fastpath.tools.ab import verdict


def main(argv: Sequence[str] | None = None) -> None:
    """Run the starts and print the table."""
    parser = _parser()
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, interrupted)
    model: loads.Model = options.model
    try:
        load = Load(
            levels=(options.rate or RATES) if options.loop == "open" else options.levels or LEVELS,
            api=options.api or loads.APIS[model][0],
            **{each.name: vars(options)[each.name] for each in fields(Load) if each.name not in ("levels", "api")},
        )
    except ValueError as error:
        parser.error(str(error))
    host = Host(options.release, options.engines == "stages")
    if host.release is not None:
        overlays.fetch(host.release)
    found = run("server", options.arms, options.starts, load, host)
    show(found, load, host)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server",
        description=benchmarks.server.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--starts", type=int, default=verdict.STARTS, help="of each arm")
    parser.add_argument("--arms", type=named, default=USUAL, help=f"of {', '.join(ARMS)}, with commas")
    parser.add_argument("--model", choices=get_args(loads.Model), default=Load.model)
    parser.add_argument("--api", choices=get_args(loads.Api), help="chat is the default, of qwen3_tts speech")
    parser.add_argument("--loop", choices=get_args(loads.Loop), default=Load.loop)
    parser.add_argument("--levels", "--level", type=_numbers, help="streams of a closed loop, with commas")
    parser.add_argument("--rate", type=_numbers, help="requests a second of an open loop, with commas")
    parser.add_argument("--arrivals", choices=get_args(loads.Arrivals), default=Load.arrivals, help="of an open loop")
    parser.add_argument("--waves", type=int, default=Load.waves, help="of a closed loop")
    parser.add_argument("--requests", type=int, help="at each level, whatever --waves says")
    parser.add_argument("--tokens", type=int, default=Load.tokens, help="text tokens of an answer, frames of speech")
    parser.add_argument("--vary", type=float, default=Load.vary, help="0.5: lengths from half to one and a half of it")
    parser.add_argument(
        "--answers", choices=get_args(loads.Answers), default=Load.answers, help="audio of chat; long as issue #4561's"
    )
    parser.add_argument(
        "--talker-us", type=float, default=Load.talker_us, help="by request of a talker's step; an H100: 800"
    )
    parser.add_argument("--audio-in", choices=get_args(AudioIn), help="what requests bring besides their text")
    parser.add_argument("--audio-every", type=int, default=Load.audio_every, help="one request in so many brings it")
    replicas = list(dict.fromkeys(replicas for _, replicas in loads.DEPLOYS))
    parser.add_argument("--replicas", choices=replicas, default=Load.replicas, help="of each stage, or stage by stage")
    parser.add_argument(
        "--engines", choices=("light", "stages"), default="light", help="stages: real ones, which cost more"
    )
    parser.add_argument("--release", choices=overlays.releases(), help="of vllm-omni; the installed one unless given")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


if __name__ == "__main__":
    main()
