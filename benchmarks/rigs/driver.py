"""Each arm in a process of its own, because patching is process-wide: start it, read its JSON line, alternate."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.rigs.arm import Arm, clean, turns
from benchmarks.rigs.arms import ARMS
from benchmarks.rigs.results import progress, save

AnArm = TypeVar("AnArm", bound=Arm)


def parser(description: str | None, rounds: int, arms: Iterable[str] = ARMS) -> argparse.ArgumentParser:
    """The options that every in-process benchmark has: ``--arm`` runs one arm here, else all run in turn."""
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=description, formatter_class=formatter)
    options.add_argument("--arm", choices=list(arms))
    options.add_argument("--rounds", type=int, default=rounds)
    return options


def run_module(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """Run ``python -m module ...`` in a process of its own and return its output.

    Args:
        module: Its name.
        arguments: Of its command line.
        environment: Of the process; unless given, this one's without what only an arm may say.
        folder: The process's working directory; unless given, this one's.

    Raises:
        RuntimeError: It failed; the message has its output.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    values = clean() if environment is None else environment
    done = subprocess.run(command, env=values, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def last_line(output: str) -> dict[str, Any]:
    """The last JSON line of an output; what upstream prints around it does not matter.

    Raises:
        RuntimeError: There is none.
    """
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"the process printed no JSON line:\n{output[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_arm(module: str, arm: Arm, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module --arm NAME ...`` in a process of its own and return its JSON line.

    Raises:
        RuntimeError: The arm failed; the message has its output.
    """
    return last_line(run_module(module, "--arm", arm.name, *arguments))


def announced(arms: Sequence[AnArm], rounds: int) -> Iterator[tuple[int, AnArm]]:
    """Round and arm in the order of running, each said when its turn comes."""
    for number, arm in turns(arms, rounds):
        progress(f"round {number + 1} of {rounds}: {arm.name}")
        yield number, arm


def alternate(module: str, arms: Sequence[Arm], rounds: int, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Lines of the arms, by name, run in turn, forwards and backwards, ``rounds`` times each; they are saved too."""
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for _, arm in announced(arms, rounds):
        line = run_arm(module, arm, *arguments)
        save(module.removeprefix("benchmarks."), {"arm": arm.name, **line})
        found[arm.name].append(line)
    return found
