"""``python -m benchmarks.parity``: stock and fastpath on real stage engines, and whether they answer alike.

Qwen3-Omni on the simulated device, two replicas a stage: API server, orchestrator, schedulers, connectors and stage
processes are real; only the device is a clock. Each start of either arm gets the same requests of every kind; its
answers are compared byte by byte. How fast the arms are is `benchmarks.server`'s question.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.rigs import server_arms, user_arms, whole_server
from benchmarks.rigs.about import about, commit
from benchmarks.rigs.arm import Arm, turns
from benchmarks.rigs.captures import run_closed_loop
from benchmarks.rigs.side_by_side import guarded, plan, positive, served, work_folder
from omni_fastpath.tools.ab.answers import Answers, compare, parity_line
from omni_fastpath.tools.ab.capture import Request, chat_request
from omni_fastpath.tools.ab.phases import Phases

REPLICAS, STAGES = 2, 3
DEPLOY = "qwen3_omni_2x.yaml"
STREAMS = 8
STEP_MS = {"thinker": 2.0, "talker": 2.0, "code2wav": 1.0}
"""Fixed part of a step, milliseconds: short, so that raw outputs queue in both arms on two cores."""

_MODALITIES = (("text", "audio"), ("text", "audio"), ("audio",), ("text",))
_PHASES_A_START = 4
_MINUTES_A_START = 1.0


def requests(count: int) -> list[Request]:
    """So many, the same whenever they are asked for: each mix of modalities, streamed and whole, of any length."""
    chance = random.Random(0)
    found = []
    for number in range(count):
        prompt = "".join(chance.choices(string.ascii_lowercase + " ", k=chance.randint(5, 80)))
        extra: dict[str, Any] = {"stop": ["z"]} if number % 7 == 3 else {}
        found.append(
            chat_request(
                prompt,
                modalities=_MODALITIES[number % 4],
                stream=number % 5 != 4,
                max_tokens=chance.randint(5, 120),
                ignore_eos=number % 3 == 0,
                **extra,
            )
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms and compare what they answered.

    Returns:
        0: alike. 1: not alike, or it could not be measured. 2: usage. 130: interrupted.
    """
    options = _parser().parse_args(argv)
    return guarded("The parity run", lambda console: _run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument("--requests", type=positive, default=96, metavar="N", help="a start (default 96)")
    parser.add_argument("--starts", type=positive, default=2, metavar="N", help="an arm (default 2)")
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="default results/")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    commit()  # of the code that runs, whatever is committed meanwhile
    arms = [arm for _, arm in turns(user_arms.ARMS, options.starts)]
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    phases = Phases(console, len(arms) * _PHASES_A_START + 1)
    for line in plan("This", "python -m benchmarks.parity", [arm.name for arm in arms], _MINUTES_A_START):
        console.print(line, highlight=False)
    asked = requests(options.requests)
    answers: list[tuple[str, Answers]] = []
    with work_folder("parity-") as work:
        with phases.phase("model folder"):
            whole_server.model_folder("qwen3_omni")
        for place, arm in enumerate(arms, 1):
            log = output / "parity-logs" / f"{place}-{arm.name}.log"
            title = f"{place}/{len(arms)} {arm.name}"
            answers.append((arm.name, run_start(title, arm, asked, work, log, phases)))
    parity = compare(answers)
    said = {"about": about(), "parity": parity}
    (output / "parity.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    console.print(parity_line(parity), style="bold red" if parity["differences"] else None, highlight=False)
    return 1 if parity["differences"] else 0


def run_start(title: str, arm: Arm, asked: Sequence[Request], work: Path, log: Path, phases: Phases) -> Answers:
    """What a start of the arm's server answered; it is proved to be the arm before the requests and after them.

    Raises:
        WrongArmError: The server is not what its arm says, or its patches did not take effect.
        ServerError: It did not start, or ended early.
    """
    server = user_arms.server_of(arm, DEPLOY, {stage: {"base_ms": step} for stage, step in STEP_MS.items()}, work, log)
    roles = server_arms.roles(STAGES, REPLICAS)
    with served(server, title, "seven processes", phases):
        before = user_arms.prove(server, arm, roles)
        with phases.phase(f"{title}: {len(asked)} requests, {STREAMS} at a time"):
            captures = run_closed_loop(server.url, asked, STREAMS)
        with phases.phase(f"{title}: proof of the arm after the load"):
            user_arms.prove_after(server, arm, roles, before, len(asked))
    return [each.answer() for each in captures]


if __name__ == "__main__":
    sys.exit(main())
