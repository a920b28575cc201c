"""The arms of in-process benchmarks: what is switched on, and the check that it is.

Each arm runs in a process of its own (patching is process-wide) and prints one JSON line. Arms alternate, and the first
is run twice as often, as an A/A pair that shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: As tables show it.
        environment: Our variables in this arm; empty is stock.
        event_driven: The orchestrator and the front end run in upstream's event-driven mode; the benchmark builds its
            pipeline with it.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    event_driven: bool = False

    @property
    def on(self) -> bool:
        """Whether anything of ours is on in this arm."""
        return bool(self.environment)


STOCK = Arm("stock")
EVENT = Arm("stock, event-driven", event_driven=True)
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
ONE_ITEM = Arm("fastpath, max_items 1", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS": "1"})

IN_TURN = Arm("fastpath, stage_order", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_BUDGETED_DRAIN__ORDER": "stage_order"})

ARMS = {arm.name: arm for arm in (STOCK, EVENT, FASTPATH, ONE_ITEM, IN_TURN)}


def switch_on(arm: Arm) -> None:
    """Install what the arm says in this process, and assert that it is so; for stock, that nothing is ours."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, is_installed
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES

    if not arm.on:
        assert not any(is_installed(patch.name) for patch in PATCHES)
        return
    apply(config.resolve([], arm.environment, PATCHES), Process.SERVER)
    states = {entry.patch.name: entry.state for entry in LEDGER if Process.SERVER in entry.patch.processes}
    assert set(states.values()) == {State.APPLIED}, states


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every in-process benchmark has: ``--arm`` runs one arm here, else all run in turn."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--arm", choices=ARMS)
    options.add_argument("--rounds", type=int, default=rounds)
    return options


def spread(values: Sequence[float]) -> str:
    """Median, least and most of a figure's runs."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def run_arm(module: str, arm: Arm, *arguments: str) -> dict[str, Any]:
    """Run ``python -m module --arm NAME ...`` in a process of its own and return its JSON line.

    Raises:
        RuntimeError: The arm failed; the message has its output.
    """
    foreign = ("OMNI_FASTPATH", "VLLM_OMNI_EVENT_DRIVEN_ORCH")  # what an arm is, the arm alone says
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    command = [sys.executable, "-W", "ignore", "-m", module, "--arm", arm.name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def turns(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """Round and arm in the order of running: forwards and backwards, ``rounds`` times each."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            print(f"  round {number + 1} of {rounds}: {arm.name}", file=sys.stderr, flush=True)
            yield number, arm


def alternate(module: str, arms: Sequence[Arm], rounds: int, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Run the arms in turn, forwards and backwards, ``rounds`` times each."""
    results: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for _, arm in turns(arms, rounds):
        results[arm.name].append(run_arm(module, arm, *arguments))
    return results
