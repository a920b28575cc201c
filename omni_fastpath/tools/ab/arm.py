"""An arm: what is switched on, in this process or in a server, and the proof that it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from omni_fastpath import config
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.install import apply, is_installed, row_here
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import Snapshot

FOREIGN = ("OMNI_FASTPATH", "_OMNI_FASTPATH", "VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS")
"""How the variables begin that only an arm itself may set: what this shell says must not get through."""

_SERVES = (State.APPLIED, State.SUPERSEDED)


class WrongArmError(RuntimeError):
    """A process was not what its arm says; its figures must not be shown."""


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: As tables show it.
        environment: Our variables in this arm; empty is stock.
        event_driven: The orchestrator and the front end run in upstream's event-driven mode.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    event_driven: bool = False

    @property
    def on(self) -> bool:
        """Whether anything of ours is on in this arm."""
        return bool(self.enabled)

    @property
    def enabled(self) -> frozenset[str]:
        """The patches that its variables switch on."""
        return frozenset(config.resolve([], self.environment, PATCHES).enabled)


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without what only an arm may say."""
    return {key: value for key, value in environ.items() if not key.startswith(FOREIGN)}


def switch_on(arm: Arm, process: Process) -> None:
    """Install in this process what the arm says, and check it.

    Raises:
        WrongArmError: Something of it is not on, or something else is.
    """
    if arm.on:
        apply(config.resolve([], arm.environment, PATCHES), process)
    check(arm, process)


def check(arm: Arm, process: Process) -> dict[str, dict[str, int]]:
    """The counters of what is on in this process, by patch, after a check that it is what the arm says.

    Raises:
        WrongArmError: It is not.
    """
    here = {patch.name for patch in PATCHES if process in patch.processes and not _has_no_use(patch)}
    installed = {patch.name for patch in PATCHES if is_installed(patch.name)}
    entries = {entry.patch.name: entry for entry in LEDGER}
    problems = [f"{name} is installed" for name in sorted(installed - arm.enabled)]
    wanted = sorted(arm.enabled & here)
    for name in wanted:
        if name not in entries:
            problems.append(f"{name} was never tried")
        elif entries[name].state not in _SERVES:
            problems.append(f"{name} is {entries[name].state.value}: {entries[name].reason}")
    if problems:
        raise WrongArmError(f"this process is no {arm.name} arm: {'; '.join(problems)}")
    return {name: dict(entries[name].counters) for name in wanted}


def check_server(arm: Arm, processes: Mapping[str, Snapshot], expected: Iterable[str]) -> None:
    """Check what the processes of a server say in their state files.

    Args:
        arm: What the server should be.
        processes: Role of a process in the server to its state file.
        expected: The roles that must have one; for stock, those of a server that was told ``OMNI_FASTPATH=0``.

    Raises:
        WrongArmError: The server is not what the arm says; the message names each point.
    """
    problems = [f"{role} has no state file" for role in sorted(set(expected) - processes.keys())]
    for role, snapshot in sorted(processes.items()):
        for patch in PATCHES:
            record = snapshot.patches.get(patch.name)
            if record is None:
                problems.append(f"{role}: {patch.name} is not in the state file")
                continue
            wanted = _wanted(patch.name in arm.enabled, patch, snapshot.role)
            if record.state not in wanted:
                words = " or ".join(state.value for state in wanted)
                problems.append(f"{role}: {patch.name} is {record.state.value} ({record.reason}), wanted {words}")
    if problems:
        raise WrongArmError(f"this server is no {arm.name} arm:\n  " + "\n  ".join(problems))


def _has_no_use(patch: Patch) -> bool:
    """Whether the installed release has nothing for it to do."""
    row = row_here(patch)
    return row is not None and row.state is State.NOT_APPLICABLE


def _wanted(is_on: bool, patch: Patch, here: Process) -> tuple[State, ...]:
    if not is_on:
        return (State.OFF,)
    if here not in patch.processes or _has_no_use(patch):
        return (State.NOT_APPLICABLE,)
    # Which stage a stage's patch serves is its pipeline's matter; in the server there is no such choice.
    return _SERVES if here is Process.SERVER else (*_SERVES, State.NOT_APPLICABLE)
