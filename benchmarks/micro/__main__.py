"""``python -m benchmarks.micro``: pytest once per arm, then the arms side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.micro
from benchmarks.micro.conftest import ARMS
from benchmarks.rigs import about, results, side_by_side
from benchmarks.rigs.arm import clean

FOLDER = Path(__file__).parent


def run(arguments: Sequence[str]) -> list[Mapping[str, Any]]:
    """The benchmarks of both arms; exits if one failed."""
    at_once = "--benchmark-disable" in arguments
    # pytest-benchmark's own tables show one arm, which is useful only beside a saved run.
    quiet = [] if any("--benchmark-compare" in each for each in arguments) else ["--benchmark-quiet"]
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
        texts = [file.read_text(encoding="utf-8") for file in files.values() if file.exists()]
    return [each for text in filter(None, texts) for each in json.loads(text)["benchmarks"]]


def show(benchmarks_: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per group: the median of each arm, and their ratio."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for each in benchmarks_:
        groups.setdefault(each["group"], {})[each["params"]["arm"]] = each
    rows = []
    for name, arms in groups.items():
        medians = {arm: each["stats"]["median"] * 1e6 for arm, each in arms.items()}
        ratio = f"{medians['fastpath'] / medians['stock']:.2f}" if len(medians) == len(ARMS) else ""
        rows.append([name, *(f"{medians[arm]:.2f}" if arm in medians else "" for arm in ARMS), ratio])
    results.show("Medians, microseconds", ("", *ARMS, "fastpath / stock"), rows)
    print(about.line())


def main() -> None:
    """Run both arms and print the table."""
    parser = side_by_side.parser("benchmarks.micro", benchmarks.micro.__doc__)
    if found := run(parser.parse_known_args()[1]):
        show(found)


if __name__ == "__main__":
    main()
