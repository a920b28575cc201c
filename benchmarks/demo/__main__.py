"""``python -m benchmarks.demo``: serve Qwen3-Omni on light engines, stock and fastpath in turn, and compare."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

import benchmarks.demo
from benchmarks.demo import report
from benchmarks.demo.load import SHARE, paced, waves
from benchmarks.demo.measure import Name, Start, measures, pairs, run_start, sustained
from benchmarks.demo.progress import Progress
from benchmarks.rigs import about
from benchmarks.rigs.arm import turns
from benchmarks.rigs.side_by_side import guarded, positive, work_folder
from benchmarks.rigs.user_arms import ARMS
from benchmarks.rigs.whole_server import model_folder
from benchmarks.server.load import Load
from benchmarks.server.report import kept
from omni_fastpath.tools.ab import rows, verdict
from omni_fastpath.tools.ab.answers import Answers, compare

ROOT = Path(__file__).resolve().parents[2]

_STARTS = 2
_MINUTES_A_START = 0.7
"""On two cores."""
_NUMBERS, _PICTURE = "demo.json", "demo.svg"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
        130: interrupted.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.picture is not None:
        return _draw(options.output / _NUMBERS, options.picture, parser)
    command = shlex.join(["python", "-m", "benchmarks.demo", *(sys.argv[1:] if argv is None else argv)])
    return guarded("The demo", lambda console: _run(options, command, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description=benchmarks.demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    count = f"starts of each server and load (default {_STARTS}; {verdict.STARTS} for verdicts)"
    parser.add_argument("--starts", type=positive, metavar="N", help=count)
    parser.add_argument("--quick", action="store_true", help="one start of each, a small load: tries the demo itself")
    parser.add_argument("--output", type=Path, default=ROOT / "results", metavar="DIR", help="default results/")
    what = "start nothing; draw what the last run with this --output measured"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=what)
    return parser


def _draw(numbers: Path, picture: Path, parser: argparse.ArgumentParser) -> int:
    """Draw a run that is over; anything that is wrong is a usage error."""
    try:
        data = json.loads(numbers.read_text(encoding="utf-8"))
        if data["schema"] != report.SCHEMA:
            parser.error(f"{numbers}: found schema {data['schema']}, allowed: {report.SCHEMA}; run the demo again")
        report.draw(data, picture)
    except OSError as error:
        parser.error(f"{error}; --picture needs a run of the demo before it, and a folder to write to")
    return 0


def _run(options: argparse.Namespace, command: str, console: Console) -> int:
    about.commit()  # of the code that runs, whatever is committed meanwhile
    loads: dict[Name, Load] = {"waves": waves(quick=options.quick)}
    arms = [arm for _, arm in turns(ARMS, options.starts or (1 if options.quick else _STARTS))]
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for line in (*_plan([arm.name for arm in arms], loads["waves"]), report.WHAT_IS_REAL):
        console.print(line, highlight=False)
    starts: list[Start] = []
    answers: dict[Name, list[tuple[str, Answers]]] = {"waves": [], "paced": []}
    progress = Progress(console, 2 * len(arms), 60 * _MINUTES_A_START)

    def show() -> bool:
        """Write and print what there is so far; whether all starts answered alike."""
        parity = [compare(each) for each in answers.values() if each]
        table = rows.rows(measures(starts), pairs(starts))
        data = report.plain(loads, starts, table, parity, command)
        (output / _NUMBERS).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        report.draw(data, output / _PICTURE)
        report.show(console, data, table)
        console.print(f"Picture: {output / _PICTURE}", highlight=False, soft_wrap=True)
        return not any(each["differences"] for each in parity)

    with progress.live, work_folder("demo-") as work:
        with progress.phase("model folder"):
            model_folder("qwen3_omni")
        for place, (name, arm) in enumerate(itertools.product(answers, arms), 1):
            if name == "paced" and name not in loads:
                console.print("The closed loop:", style="bold")
                show()
                loads[name] = paced(loads["waves"], sustained(starts))
            title = f"{place}/{2 * len(arms)} {arm.name}"
            log = output / "demo-logs" / f"{place}-{arm.name}.log"
            start, answered = run_start(title, arm, name, loads[name], work=work, log=log, phases=progress)
            progress.start_is_over()
            starts.append(start)
            answers[name].append((arm.name, answered))
    alike = show()
    for line in (report.NOTES, kept(each.engines for each in starts), about.line()):
        console.print(line, highlight=False)
    console.print(f"Numbers: {output / _NUMBERS}. {progress.elapsed_s / 60:.1f} minutes.", highlight=False)
    return 0 if alike else 1


def _plan(arms: Sequence[str], load: Load) -> Iterator[str]:
    """What is about to run, how long it takes, and whether it can decide anything."""
    [streams], servers = load.levels, 2 * len(arms)
    yield (
        f"The demo starts {servers} servers, one after another. {', '.join(arms)} get {load.count(streams)} requests "
        f"each, {streams:g} at a time. Then the same again, at {SHARE:g} of the rate that stock sustained in the "
        f"median of its starts. On two cores it takes about {servers * _MINUTES_A_START:.0f} minutes."
    )
    if arms.count(arms[0]) < verdict.starts_for(0):
        yield (
            "So few starts cannot tell a difference from luck. "
            f"`python -m benchmarks.demo --starts {verdict.STARTS}` can, in some "
            f"{4 * verdict.STARTS * _MINUTES_A_START:.0f} minutes."
        )


if __name__ == "__main__":
    sys.exit(main())
