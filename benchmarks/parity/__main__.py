"""``python -m benchmarks.parity``: serve Qwen3-Omni on the simulated device, stock and fastpath, and compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.parity import figures, report
from benchmarks.parity.load import QUICK, Load
from benchmarks.parity.measure import Outcome, run_start
from benchmarks.parity.words import describe, heading
from benchmarks.rigs.side_by_side import (
    guarded,
    plan,
    positive,
    work_folder,
    write_model,
)
from benchmarks.rigs.user_arms import ARMS
from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.about import commit
from omni_fastpath.tools.ab.answers import compare, parity_line
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.page import render
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.rows import Row
from omni_fastpath.tools.ab.table import print_table
from omni_fastpath.tools.ab.turns import turns

ROOT = Path(__file__).resolve().parents[2]

_PHASES_A_START = 6
_MINUTES_A_START = 1.7
"""On two cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms and compare them.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
        130: interrupted.
    """
    options = _parser().parse_args(argv)
    return guarded("The parity run", lambda console: _run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--concurrency", type=positive, metavar="N", help="requests in flight; a measurement has four times as many"
    )
    parser.add_argument(
        "--starts", type=positive, metavar="N", help="starts an arm: stock, fastpath, fastpath, stock, ... (default 2)"
    )
    parser.add_argument("--quick", action="store_true", help="one start an arm and a small load: tries this itself")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results", metavar="DIR", help="where the report goes (default results/)"
    )
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    commit()  # of the code that runs, whatever is committed meanwhile
    load = QUICK if options.quick else Load()
    if options.concurrency is not None:
        load = dataclasses.replace(load, concurrency=options.concurrency)
    starts = [arm for _, arm in turns(ARMS, options.starts or (1 if options.quick else 2))]
    names = [arm.name for arm in starts]
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    phases = Phases(console, len(starts) * _PHASES_A_START + 2)
    for line in plan("This", "python -m benchmarks.parity", names, _MINUTES_A_START):
        console.print(line, highlight=False)
    with phases.running():
        outcomes = _measure(starts, load, output, phases)
        with phases.phase("report"):
            parity = compare([(each.start.arm, [one.answer() for one in each.captures]) for each in outcomes])
            about = describe(load, names, phases.elapsed_s)
            table = figures.table([outcome.start for outcome in outcomes], load.concurrency)
            data = report.plain(outcomes, table, parity, about)
            (output / "parity.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            page = report.page(outcomes, table, parity, about, load)
            (output / "parity.html").write_text(render(page), encoding="utf-8")
    _show(console, outcomes, table, parity, about)
    for what, name in (("report ", "parity.html"), ("numbers", "parity.json")):
        console.print(f"{what} {output / name}", highlight=False, soft_wrap=True)
    return 1 if parity["differences"] else 0


def _measure(starts: Sequence[Arm], load: Load, output: Path, phases: Phases) -> list[Outcome]:
    outcomes: list[Outcome] = []
    counts: dict[str, int] = {}
    with work_folder("parity-") as work:
        with phases.phase("model folder"):
            model = write_model(work)
        for place, arm in enumerate(starts, 1):
            counts[arm.name] = counts.get(arm.name, 0) + 1
            title = f"{place}/{len(starts)} {arm.name} {counts[arm.name]}"
            log = output / "parity-logs" / f"{place}-{arm.name}.log"
            with phases.turn(place, len(starts)):
                outcomes.append(run_start(title, arm, load, model=model, work=work, log=log, phases=phases))
    return outcomes


def _show(
    console: Console, outcomes: Sequence[Outcome], table: Sequence[Row], parity: dict[str, Any], about: dict[str, Any]
) -> None:
    for line in heading(about):
        console.print(line, highlight=False, soft_wrap=True)
    print_table(console, rows.header([outcome.start for outcome in outcomes]), table, rows.cells)
    for line in (*rows.summary(table), figures.CLOSED_LOOP):
        console.print(line, highlight=False)
    console.print(parity_line(parity), style="bold red" if parity["differences"] else None, highlight=False)
    console.print(f"Wall time {about['minutes']:.1f} minutes.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
