"""An arm: what is switched on in a server or in a process, and whose turn it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from omni_fastpath import config
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.install import apply, is_installed, row_here
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES

FOREIGN = ("OMNI_FASTPATH", "_OMNI_FASTPATH", "VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS")
"""How the variables begin that only an arm itself may set: what this shell says must not get through."""

T = TypeVar("T")


class WrongArmError(RuntimeError):
    """A process was not what its arm says; its figures must not be shown."""


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: As tables show it.
        environment: Our variables in this arm; empty is stock.
        event_driven: The orchestrator and the front end run in upstream's event-driven mode; None: as the release does.
        arguments: Of ``vllm serve``.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    event_driven: bool | None = False
    arguments: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        """Whether anything of ours is on in this arm."""
        return bool(self.enabled)

    @property
    def enabled(self) -> frozenset[str]:
        """The patches that its variables switch on."""
        return frozenset(config.resolve(None, self.environment, PATCHES).enabled)


STOCK = Arm("stock")
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without what only an arm may say."""
    return {key: value for key, value in environ.items() if not key.startswith(FOREIGN)}


def turns(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Round and arm in the order of running: A B, B A, A B, ... for two arms; a round has each arm once.

    So what drifts on the machine hits all alike.
    """
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield number, arm


# ---- This process as an arm ----


def switch_on(arm: Arm, process: Process) -> None:
    """Install in this process what the arm says, and check it.

    Raises:
        WrongArmError: Something of it is not on, or something else is.
    """
    if arm.on:
        apply(config.resolve(None, arm.environment, PATCHES), process, PATCHES)
    check(arm, process)


def check(arm: Arm, process: Process) -> dict[str, dict[str, int]]:
    """The counters of what is on in this process, by patch, after a check that it is what the arm says.

    Raises:
        WrongArmError: It is not.
    """
    here = {patch.name for patch in PATCHES if process in patch.processes and not has_no_use(patch)}
    installed = {patch.name for patch in PATCHES if is_installed(patch.name)}
    entries = {entry.patch.name: entry for entry in LEDGER}
    problems = [f"{name} is installed" for name in sorted(installed - arm.enabled)]
    wanted = sorted(arm.enabled & here)
    for name in wanted:
        if name not in entries:
            problems.append(f"{name} was never tried")
        elif not entries[name].state.satisfies_requirement:
            problems.append(f"{name} is {entries[name].state.value}: {entries[name].reason}")
    if problems:
        raise WrongArmError(f"this process is no {arm.name} arm: {'; '.join(problems)}")
    return {name: dict(entries[name].counters) for name in wanted}


def has_no_use(patch: Patch) -> bool:
    """Whether the installed release has nothing for it to do."""
    row = row_here(patch)
    return row is not None and row.state is State.NOT_APPLICABLE
