"""A server as an arm: the environment that makes it one, and the proof that it is."""

from __future__ import annotations

import os
from collections.abc import Iterable

from benchmarks.rigs.server import Server
from omni_fastpath.statefile import Snapshot
from omni_fastpath.tools.ab.arm import FOREIGN, Arm, check_server


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
