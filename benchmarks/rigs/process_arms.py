"""This process as an arm: what it says is installed, and the proof that it is."""

from __future__ import annotations

from benchmarks.rigs.arm import Arm, WrongArmError
from omni_fastpath import config
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.install import apply, is_installed, row_here
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES


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
