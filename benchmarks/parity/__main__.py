"""``python -m benchmarks.parity``: serve Qwen3-Omni on the simulated device, stock and fastpath, and compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from benchmarks.parity import arms, figures
from benchmarks.parity.figures import Row
from benchmarks.parity.load import QUICK, Load
from benchmarks.parity.measure import MeasureError, Outcome, run_start
from benchmarks.parity.progress import Phases
from benchmarks.parity.words import compare, describe, heading, parity_line, plan
from benchmarks.rigs.bench import BenchError
from benchmarks.rigs.server import ServerError
from omni_fastpath.compare.about import commit
from omni_fastpath.compare.arm import Arm, WrongArmError
from omni_fastpath.compare.turns import turns

ROOT = Path(__file__).resolve().parents[2]

_PHASES_A_START = 6
_PIPED_WIDTH = 200
_LONGEST_FOLDER = 60  # a Unix socket's path has 107 characters, of which upstream's own names take 37


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms and compare them.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
    """
    options = _parser().parse_args(argv)
    console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=_PIPED_WIDTH, no_color=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        return _run(options, console)
    except (KeyboardInterrupt, SystemExit):
        console.print("Interrupted; the server is stopped and its files are removed.")
        return 130
    except (WrongArmError, ServerError, BenchError, MeasureError, subprocess.CalledProcessError) as error:
        console.print("The parity run has no table to show.", style="bold red")
        detail = f"\n{error.output}" if isinstance(error, subprocess.CalledProcessError) else ""
        console.print(f"{type(error).__name__}: {error}{detail}", markup=False, highlight=False)
        return 1


def _interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--concurrency", type=_positive, metavar="N", help="requests in flight; a measurement has four times as many"
    )
    parser.add_argument(
        "--starts", type=_positive, metavar="N", help="starts an arm: stock, fastpath, fastpath, stock, ... (default 2)"
    )
    parser.add_argument("--quick", action="store_true", help="one start an arm and a small load: tries the program itself")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results", metavar="DIR", help="where the report goes (default results/)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: 1 or more")
    return number


def _run(options: argparse.Namespace, console: Console) -> int:
    commit()  # of the code that runs, whatever is committed meanwhile
    load = QUICK if options.quick else Load()
    if options.concurrency is not None:
        load = dataclasses.replace(load, concurrency=options.concurrency)
    starts = [arm for _, arm in turns(arms.ARMS, options.starts or (1 if options.quick else 2))]
    names = [arm.name for arm in starts]
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    phases = Phases(console, len(starts) * _PHASES_A_START + 2)
    for line in plan(names):
        console.print(line, highlight=False)
    with phases.running():
        outcomes = _measure(starts, load, output, phases)
        with phases.phase("report"):
            # matplotlib only now: it would otherwise sit in memory beside the measurements
            from benchmarks.parity import report

            parity = compare(outcomes)
            about = describe(load, names, phases.elapsed_s)
            table = figures.rows([outcome.start for outcome in outcomes], load.concurrency)
            data = report.plain(outcomes, table, parity, about)
            (output / "parity.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            page = report.page(outcomes, table, parity, about, load)
            (output / "parity.html").write_text(page, encoding="utf-8")
    _show(console, outcomes, table, parity, about)
    console.print(f"report  {output / 'parity.html'}\nnumbers {output / 'parity.json'}", highlight=False, soft_wrap=True)
    return 1 if parity["differences"] else 0


def _measure(starts: Sequence[Arm], load: Load, output: Path, phases: Phases) -> list[Outcome]:
    here = tempfile.gettempdir()
    outcomes: list[Outcome] = []
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="parity-", dir=here if len(here) <= _LONGEST_FOLDER else "/tmp") as folder:  # noqa: S108
        work = Path(folder)
        with phases.phase("model folder"):
            # In a process of its own, which takes the memory of what it imports with it.
            command = [sys.executable, "-m", "omni_simulated_device.models", "qwen3_omni", str(work / "model")]
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=work)
        for place, arm in enumerate(starts, 1):
            counts[arm.name] = counts.get(arm.name, 0) + 1
            outcomes.append(
                run_start(
                    f"{place}/{len(starts)} {arm.name} {counts[arm.name]}",
                    arm,
                    load,
                    model=work / "model",
                    base=arms.BASE,
                    work=work,
                    log=output / "parity-logs" / f"{place}-{arm.name}.log",
                    phases=phases,
                )
            )
    return outcomes


def _show(
    console: Console, outcomes: Sequence[Outcome], rows: Sequence[Row], parity: dict[str, Any], about: dict[str, Any]
) -> None:
    for line in heading(about):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=None if not console.is_terminal else Table().box, padding=(0, 1))
    for place, name in enumerate(figures.header([outcome.start for outcome in outcomes])):
        last = name == "verdict"
        table.add_column(name, justify="left" if place == 0 or last else "right", no_wrap=not console.is_terminal)
    group = ""
    for row in rows:
        if row.measure.group != group:
            group = row.measure.group
            table.add_section()
            table.add_row(group, style="bold")
        style = {"better": "green", "worse": "red"}.get(row.verdict.word) if row.verdict is not None else None
        table.add_row(
            *(f"  {cell}" if place == 0 else cell for place, cell in enumerate(figures.cells(row))), style=style
        )
    console.print(table)
    for line in (*figures.summary(rows), figures.CLOSED_LOOP):
        console.print(line, highlight=False)
    console.print(parity_line(parity), style="bold red" if parity["differences"] else None, highlight=False)
    console.print(f"Wall time {about['minutes']:.1f} minutes.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
