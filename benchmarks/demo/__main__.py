"""``python -m benchmarks.demo``: serve Qwen3-Omni on light engines, stock and fastpath in turn, and compare."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

import benchmarks.demo
from benchmarks.demo import report
from benchmarks.demo.load import REPLICAS, STREAMS, loads
from benchmarks.demo.measure import Start, measures, run_start
from benchmarks.rigs.about import commit
from benchmarks.rigs.arm import Arm, turns
from benchmarks.rigs.side_by_side import guarded, plan, positive, work_folder
from benchmarks.rigs.user_arms import ARMS
from benchmarks.rigs.whole_server import model_folder
from benchmarks.server.load import Load
from benchmarks.server.report import kept
from omni_fastpath.tools.ab import rows, verdict
from omni_fastpath.tools.ab.answers import Answers, compare, parity_line
from omni_fastpath.tools.ab.phases import Phases

ROOT = Path(__file__).resolve().parents[2]

_PHASES_A_START = 6
_MINUTES_A_START = 0.75
"""On two cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
        130: interrupted.
    """
    options = _parser().parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.demo", *(sys.argv[1:] if argv is None else argv)])
    return guarded("The demo", lambda console: _run(options, command, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=benchmarks.demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--streams", type=positive, metavar="N", help=f"in the waves (default {STREAMS})")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 4), default=REPLICAS, help="of each stage (default 4)")
    parser.add_argument(
        "--starts",
        type=positive,
        metavar="N",
        help=f"starts an arm: stock, fastpath, fastpath, stock, ... (default {verdict.STARTS})",
    )
    parser.add_argument("--quick", action="store_true", help="one start an arm and a small load: tries the demo itself")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results", metavar="DIR", help="where the report goes (default results/)"
    )
    return parser


def _run(options: argparse.Namespace, command: str, console: Console) -> int:
    commit()  # of the code that runs, whatever is committed meanwhile
    streams = options.streams or (4 if options.quick else STREAMS)
    asked = loads(streams, options.replicas, quick=options.quick)
    arms = [arm for _, arm in turns(ARMS, options.starts or (1 if options.quick else verdict.STARTS))]
    names = [arm.name for arm in arms]
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    phases = Phases(console, len(arms) * _PHASES_A_START + 2)
    for line in plan("The demo", "python -m benchmarks.demo", names, _MINUTES_A_START):
        console.print(line, highlight=False)
    starts, answers = _measure(arms, asked, output, phases)
    with phases.phase("report"):
        parity = compare(list(zip(names, answers, strict=True)))
        table = rows.rows(measures(asked), starts)
        told = report.describe(asked, names, command, phases.elapsed_s)
        data = report.plain(starts, table, parity, told)
        (output / "demo.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        report.draw(starts, asked, told, output / "demo.png")
    for line in report.heading(told):
        console.print(line, highlight=False)
    rows.print_table(console, report.COLUMNS, table)
    for line in (*rows.summary(table), report.CLOSED_LOOP, kept(start.engines for start in starts)):
        console.print(line, highlight=False)
    console.print(parity_line(parity), style="bold red" if parity["differences"] else None, highlight=False)
    for what, name in (("picture", "demo.png"), ("numbers", "demo.json")):
        console.print(f"{what} {output / name}", highlight=False, soft_wrap=True)
    console.print(f"Wall time {told['minutes']:.1f} minutes.", highlight=False)
    return 1 if parity["differences"] else 0


def _measure(
    arms: Sequence[Arm], asked: Mapping[str, Load], output: Path, phases: Phases
) -> tuple[list[Start], list[Answers]]:
    starts, answers = [], []
    with work_folder("demo-") as work:
        with phases.phase("model folder"):
            model_folder("qwen3_omni")
        for place, arm in enumerate(arms, 1):
            title = f"{place}/{len(arms)} {arm.name}"
            log = output / "demo-logs" / f"{place}-{arm.name}.log"
            start, answered = run_start(title, arm, asked, work=work, log=log, phases=phases)
            starts.append(start)
            answers.append(answered)
    return starts, answers


if __name__ == "__main__":
    sys.exit(main())
