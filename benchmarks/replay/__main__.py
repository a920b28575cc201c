"""``python -m benchmarks.replay``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import benchmarks.replay
from benchmarks.replay import report, subjects
from benchmarks.replay.load import CELLS, USUAL, Cell
from benchmarks.rigs import about, process_arms, results
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.driver import announced, run_arm
from omni_fastpath.declare import Process

SECONDS = 30.0
CALIBRATION_S = 5.0
CALIBRATIONS = 2
"""Runs of a calibration; the slowest counts: a machine that slows down must not make an overload of a cell."""


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's values."""
    parser = argparse.ArgumentParser(
        description=benchmarks.replay.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default=",".join(USUAL), help=f"of {', '.join(CELLS)}")
    parser.add_argument(
        "--arms",
        type=lambda text: [subjects.named(name) for name in text.split()],
        default=" ".join(subjects.USUAL),
        help=f"of {' '.join(subjects.ARMS)} and fastpath+PATCH; spaces between",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of load a cell and arm; {SECONDS:g}")
    parser.add_argument("--rounds", type=int, default=1, help="of all arms, forwards and backwards in turn")
    parser.add_argument("--quick", action="store_true", help="three seconds a cell and one short calibration")
    inside = parser.add_argument_group("one run in this process, for the driver and for tests")
    inside.add_argument("--arm", type=subjects.named)
    inside.add_argument("--cell", choices=CELLS)
    inside.add_argument("--capacity", type=float, help="raw outputs a second at saturation")
    inside.add_argument("--seed", type=int, default=1, help="of arrivals; round n has n + 1")
    return parser.parse_args(argv)


def _run_cell(options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm of one cell in this process, which is checked to be that arm, before and after."""
    from benchmarks.replay.figures import figures
    from benchmarks.replay.measure import run

    arm: Arm = options.arm
    process_arms.switch_on(arm, Process.SERVER)
    load = CELLS[options.cell].load(options.capacity, options.seconds, options.seed)
    stamps, schedule = run(arm, load)
    counters = process_arms.check(arm, Process.SERVER)
    drain = counters.get("budgeted_drain")
    assert drain is None or drain["items"] > 0, drain
    cell = {"cell": options.cell, "arm": arm.name, "load": asdict(load), "content_checked": not stamps.cut}
    return {**cell, "counters": counters, **figures(stamps, schedule)}


def _run(arm: Arm, cell: Cell, capacity: float, seconds: float, seed: int = 1) -> dict[str, Any]:
    """The same in a process of its own: runs in one process would get dearer with what lives on the heap."""
    arguments = {"--cell": cell.name, "--capacity": capacity, "--seconds": seconds, "--seed": seed}
    return run_arm("benchmarks.replay", arm, *(str(part) for pair in arguments.items() for part in pair))


def _capacity(cell: Cell, *, quick: bool) -> float:
    """Raw outputs a second that fastpath bears of a cell's mix with as many replicas."""
    saturated = Cell(cell.mix, cell.replicas, None)
    seconds, count = (1.0, 1) if quick else (CALIBRATION_S, CALIBRATIONS)
    runs = [_run(subjects.ARMS["fastpath"], saturated, cell.mix.nominal, seconds) for _ in range(count)]
    found = min(float(run["raw_outputs_per_s"]) for run in runs)
    results.progress(f"fastpath bears {found:.0f} raw outputs a second of {saturated.name}")
    return found


def run_cell(cell: Cell, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every arm of a cell in turn; a line for each run, saved too."""
    found: list[dict[str, Any]] = []
    capacities: dict[int, float] = {}
    for number, arm in announced(given.arms, given.rounds):
        if number not in capacities:
            capacities[number] = _capacity(cell, quick=given.quick)
        line = _run(arm, cell, capacities[number], 3.0 if given.quick else given.seconds, 1 + number)
        line |= {"round": number, "capacity": capacities[number]}
        results.save("replay", line)
        found.append(line)
    return found


def main() -> None:
    """Run one arm here (``--arm``), or every arm of every cell in processes of their own, and report."""
    given = options()
    if given.arm:
        results.say(_run_cell(given))
        return
    for name in given.cells.split(","):
        results.progress(f"cell {name}")
        report.show(name, run_cell(CELLS[name], given))
    print(about.line())


if __name__ == "__main__":
    main()
