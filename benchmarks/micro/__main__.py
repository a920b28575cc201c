"""``python -m benchmarks.micro``: pytest once per arm, then the arms side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_benchmark.logger import Logger
from pytest_benchmark.storage.file import FileStorage
from pytest_benchmark.utils import get_machine_id

import benchmarks.micro
from benchmarks.micro.conftest import ARMS
from benchmarks.rigs import about, results, side_by_side
from benchmarks.rigs.arm import clean

FOLDER = Path(__file__).parent
STORAGE = FOLDER.parents[1] / ".benchmarks"


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON of both arms, merged into one run; exits if a benchmark failed."""
    at_once = "--benchmark-disable" in arguments
    # pytest-benchmark's own tables show one arm, which is useful only beside a saved run.
    quiet = [] if any("--benchmark-compare" in each for each in arguments) else ["--benchmark-quiet"]
    found: dict[str, Any] = {"benchmarks": []}
    with tempfile.TemporaryDirectory() as folder:
        files = {arm: Path(folder) / f"{arm}.json" for arm in ARMS}
        processes = []
        for arm, file in files.items():
            options = ["--arm", arm, "--benchmark-json", str(file), "--benchmark-columns=min,median,iqr,rounds"]
            command = [sys.executable, "-W", "ignore", "-m", "pytest", str(FOLDER), "-q", *options, *quiet, *arguments]
            processes.append(subprocess.Popen(command, env=clean()))
            if not at_once:
                processes[-1].wait()
        if failed := [code for process in processes if (code := process.wait())]:
            sys.exit(failed[0])
        # With --benchmark-disable nothing is measured, and no file is written.
        for text in (file.read_text(encoding="utf-8") for file in files.values() if file.exists()):
            of_arm: dict[str, Any] = json.loads(text or '{"benchmarks": []}')
            for each in of_arm["benchmarks"]:
                del each["stats"]["data"]
            found = {**of_arm, "benchmarks": found["benchmarks"] + of_arm["benchmarks"]}
    return found


def show(benchmarks_: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per group: the median of each arm, their ratio, and the goal if there is one."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for each in benchmarks_:
        groups.setdefault(each["group"], {})[each["params"]["arm"]] = each
    rows = []
    for name, arms in groups.items():
        medians = {arm: each["stats"]["median"] * 1e6 for arm, each in arms.items()}
        ratio = f"{medians['fastpath'] / medians['stock']:.2f}" if len(medians) == len(ARMS) else ""
        goal = next(iter(arms.values()))["extra_info"].get("goal_us")
        rows.append(
            [
                name,
                *(f"{medians[arm]:.2f}" if arm in medians else "" for arm in ARMS),
                ratio,
                f"{goal:g}" if goal else "",
            ]
        )
    results.show("Medians, microseconds", ("", *ARMS, "fastpath / stock", "goal"), rows)
    print(about.line())


def main() -> None:
    """Run both arms, save them as one run if asked, and print the table."""
    parser = side_by_side.parser("benchmarks.micro", benchmarks.micro.__doc__)
    parser.add_argument("--benchmark-save", metavar="NAME", help="save both arms as one run in .benchmarks/")
    options, arguments = parser.parse_known_args()
    found = run(arguments)
    if not found["benchmarks"]:
        return
    if options.benchmark_save:
        FileStorage(STORAGE, Logger(Logger.NORMAL), get_machine_id()).save(found, options.benchmark_save)
    show(found["benchmarks"])


if __name__ == "__main__":
    main()
