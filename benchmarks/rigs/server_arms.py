"""A server as an arm: the environment that makes it one, and the proof that it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from benchmarks.rigs.arm import FOREIGN, Arm, WrongArmError
from benchmarks.rigs.process_arms import SERVES, has_no_use
from benchmarks.rigs.server import Server
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import Snapshot

GATE = "forward_gate"

STATE_FILES_SETTLE_S = 2.5
"""After which a state file has the last counters: ``omni_fastpath.statefile.REFRESH_S``, and a little."""


def environment(arm: Arm) -> dict[str, str | None]:
    """What makes a server the arm, for `Server`: nothing of ours from this shell gets through (None removes it)."""
    values: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith(FOREIGN))
    values["VLLM_OMNI_EVENT_DRIVEN_ORCH"] = "1" if arm.event_driven else "0"
    return values | (dict(arm.environment) if arm.on else {"OMNI_FASTPATH": "0"})


def roles(stages: int, replicas: int = 1) -> frozenset[str]:
    """The processes of a server that must have a state file, as `server.role` names them."""
    return frozenset({"api", *(f"stage{stage}_replica{each}" for stage in range(stages) for each in range(replicas))})


def prove(server: Server, arm: Arm, expected: Iterable[str]) -> dict[str, Snapshot]:
    """What the state files of a server's processes say, by role, after a check that it is the arm.

    Raises:
        WrongArmError: It is not.
    """
    found = server.snapshots()
    check_server(arm, found, expected)
    return found


def check_gate(arm: Arm, processes: Mapping[str, Snapshot], *, has_talker: bool) -> None:
    """Check after a load that stages, light engines too, kept their payload back if the arm says so, and only then.

    Args:
        arm: What the server should be.
        processes: As `check_server` has them; the counters must be up to date.
        has_talker: Whether the model has a stage that sends its payload twice: Qwen3-Omni's talker.

    Raises:
        WrongArmError: They did not.
    """
    stages = [each.patches[GATE] for each in processes.values() if each.role is Process.STAGE]
    outputs = sum(each.counters.get("multimodal_outputs", 0) for each in stages)
    wanted = GATE in arm.enabled and has_talker
    if bool(outputs) != wanted:
        words = "some" if wanted else "none"
        raise WrongArmError(f"this server is no {arm.name} arm: {outputs} outputs were gated, wanted {words}")


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


def _wanted(is_on: bool, patch: Patch, here: Process) -> tuple[State, ...]:
    if not is_on:
        return (State.OFF,)
    if here not in patch.processes or has_no_use(patch):
        return (State.NOT_APPLICABLE,)
    # Which stage a stage's patch serves is its pipeline's matter; in the server an option of upstream's is the choice.
    is_sure = here is Process.SERVER and not patch.upstream_option
    return SERVES if is_sure else (*SERVES, State.NOT_APPLICABLE)
