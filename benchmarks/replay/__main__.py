"""Replay: real raw outputs through the real orchestrator, at a set utilisation, stock and fastpath in turn.

    python -m benchmarks.replay                                 everything, one round, some two hours
    python -m benchmarks.replay --cells dear-0.95 --rounds 3
    python -m benchmarks.replay --quick                         a few seconds a cell: does it run?

A cell's utilisation is that of fastpath's orchestrator: the cell's rate of raw outputs times what one costs when they
are sent as fast as they are taken (the calibration). All arms get the same rate, so each has a utilisation of its own,
which is printed. Cost is the greater of the orchestrator thread's processor time and
of wall time: both threads of the process share the interpreter's lock, so that the front end's work is the
orchestrator's waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.replay import report, subjects
from benchmarks.replay.load import CELLS, MIXES, NOMINAL, Load
from benchmarks.rigs import results
from benchmarks.rigs.driver import announced, run_arm
from omni_fastpath.tools.ab import about
from omni_fastpath.tools.ab.arm import Arm

SECONDS = 30.0
ROUNDS = 1
QUICK_SECONDS = 3.0
CALIBRATION_S = 5.0
CALIBRATIONS = 2
"""Runs of a calibration; the dearest counts."""

WALL_MARGIN = 1.05
"""Wall time a raw output that exceeds processor time by more than this is what utilisation is defined on."""


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    parser.add_argument(
        "--arms", help=f"of {' '.join(subjects.ARMS)}, ORDER,KEY=VALUE and fastpath+PATCH; spaces between"
    )
    parser.add_argument("--seconds", type=float, default=None, help=f"of load a cell and arm; {SECONDS:g}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all arms, forwards and backwards in turn")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals; round n has seed + n")
    parser.add_argument(
        "--work-us",
        type=float,
        help="processor time that the front end spends on each message after the hand-over, microseconds; by default "
        "what was measured on a real server (measure.WORK_US)",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s a cell and one short calibration")
    parser.add_argument("--reuse", action="store_true", help="take the last calibration of the same mix and replicas")
    inside = parser.add_argument_group("one run in this process, for the driver and for tests")
    inside.add_argument("--arm", type=subjects.named)
    inside.add_argument("--cell", choices=CELLS)
    inside.add_argument("--capacity", type=float, help="raw outputs a second at saturation")
    inside.add_argument("--calibrate", metavar="MIX:REPLICAS")
    found = parser.parse_args(argv)
    if found.seconds is None:
        found.seconds = QUICK_SECONDS if found.quick else SECONDS
    return found


# ---- In the arm's process ----


def _work_us(options: argparse.Namespace) -> float:
    from benchmarks.replay.measure import WORK_US

    found: float = WORK_US if options.work_us is None else options.work_us
    return found


def _run_cell(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.replay.figures import figures
    from benchmarks.replay.measure import run

    arm: Arm = options.arm
    subjects.prepare(arm)
    load = CELLS[options.cell].load(options.capacity, options.seconds, options.seed)
    stamps, schedule = run(arm, load, _work_us(options))
    counters = subjects.check(arm)
    cell = {"cell": options.cell, "arm": arm.name, "load": asdict(load), "content_checked": not stamps.cut}
    return {**cell, "counters": counters, **figures(stamps, schedule)}


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    """What one raw output costs at saturation, microseconds."""
    from benchmarks.replay.measure import run

    arm: Arm = options.arm
    subjects.prepare(arm)
    mix, replicas = options.calibrate.split(":")
    load = Load(MIXES[mix], int(replicas), NOMINAL[mix], options.seconds, seed=options.seed, closed=True)
    stamps, _ = run(arm, load, _work_us(options))
    subjects.check(arm)
    count = len(stamps.sent)
    return {
        "wall_us": (stamps.ended_ns - stamps.sent[0]) / count / 1e3,
        "cpu_us": stamps.cpu_ns[1] / count / 1e3,
        "front_cpu_us": stamps.front_cpu_ns[1] / count / 1e3,
        "waited_share": stamps.waited_ns / (stamps.ended_ns - stamps.started_ns),
        "raw_outputs": count,
        "cut_off": stamps.cut,
    }


# ---- The driver ----


def _passed_on(options: argparse.Namespace) -> tuple[str, ...]:
    return () if options.work_us is None else ("--work-us", str(options.work_us))


def _calibration(mix: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """The calibration of a mix; the dearest of several runs, each in a process of its own as an arm is.

    Runs one after another in one process would be dearer from the second on: more lives on the heap.
    """
    work = "" if options.work_us is None else f"-{options.work_us:g}us"
    kept = results.FOLDER / f"replay-calibration-{mix}-{replicas}{work}.json"
    if options.reuse and kept.exists():
        reused: dict[str, Any] = json.loads(kept.read_text())
        return reused
    seconds, count = (1.0, 1) if options.quick else (CALIBRATION_S, CALIBRATIONS)
    arguments = ("--calibrate", f"{mix}:{replicas}", "--seconds", str(seconds), "--seed", str(options.seed))
    runs = [
        run_arm("benchmarks.replay", subjects.ARMS["fastpath"], *arguments, *_passed_on(options)) for _ in range(count)
    ]
    # The dearest run, as a whole: a machine that slows down must not make an overload of a cell that is none.
    dearest = max(runs, key=lambda run: float(run["wall_us"]))
    found: dict[str, Any] = {key: value for key, value in dearest.items() if key.endswith("_us")}
    on_wall = found["wall_us"] > WALL_MARGIN * found["cpu_us"]
    cost_us = found["wall_us"] if on_wall else found["cpu_us"]
    found |= {
        "mix": mix,
        "replicas": replicas,
        "utilisation_on": "wall" if on_wall else "cpu",
        "cost_us": cost_us,
        "capacity": 1e6 / cost_us,
        "runs": runs,
    }
    results.FOLDER.mkdir(exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def _say_calibration(found: dict[str, Any]) -> None:
    costs = ", ".join(f"{run['wall_us']:.0f}" for run in found["runs"])
    print(
        f"calibration {found['mix']}, {found['replicas']} replica(s), fastpath at saturation, a raw output: "
        f"orchestrator CPU {found['cpu_us']:.0f} us, wall {found['wall_us']:.0f} us (runs: {costs}), "
        f"front end CPU {found['front_cpu_us']:.0f} us.\n"
        f"  utilisation is defined on {found['utilisation_on']} time: capacity {found['capacity']:.0f} raw outputs/s"
        + (
            " (wall is clearly greater than CPU: the front end shares the interpreter's lock)"
            if found["utilisation_on"] == "wall"
            else ""
        ),
        flush=True,
    )


def run_cell(name: str, arms: Sequence[Arm], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every arm of a cell in turn, in processes of their own; a line for each run, saved too."""
    cell = CELLS[name]
    run_id = time.strftime("%Y-%m-%dT%H:%M:%S")
    found: list[dict[str, Any]] = []
    calibration: dict[str, Any] = {}
    calibrated: int | None = None
    for number, arm in announced(arms, given.rounds):
        if number != calibrated:
            # Anew for each round: a shared machine's speed drifts by tens of percent within minutes, and all arms
            # of a round must have one rate.
            calibration, calibrated = _calibration(cell.mix.name, cell.replicas, given), number
            _say_calibration(calibration)
        arguments = {
            "--cell": name,
            "--seconds": given.seconds,
            "--capacity": calibration["capacity"],
            "--seed": given.seed + number,
        }
        line = run_arm(
            "benchmarks.replay",
            arm,
            *_passed_on(given),
            *(str(part) for pair in arguments.items() for part in pair),
        )
        line |= {"run": run_id, "round": number, "calibration": calibration}
        results.save("replay", line)
        found.append(line)
        results.progress(report.brief(line))
    return found


def main() -> None:
    """Run one arm here (``--arm``), or every arm of every cell in processes of their own, and report."""
    given = options()
    if given.arm:
        results.say(_calibrate(given) if given.calibrate else _run_cell(given))
        return
    names = given.arms.split() if given.arms else subjects.defaults()
    arms = [subjects.named(name) for name in names]
    results.FOLDER.mkdir(exist_ok=True)
    for name in given.cells.split(","):
        results.progress(f"cell {name}")
        found = run_cell(name, arms, given)
        report.show(name, found)
    print(about.line())


if __name__ == "__main__":
    main()
