"""A server that is not the arm that it should be is refused, so that its figures are not shown."""

from __future__ import annotations

import pytest

from benchmarks.rigs.arm import Arm, WrongArmError
from benchmarks.rigs.server_arms import check_server
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import PatchRecord, Snapshot
from tests.tools import made


def _snapshot(arm: Arm, process: Process) -> Snapshot:
    patches = {}
    for patch in PATCHES:
        state = State.APPLIED if process in patch.processes else State.NOT_APPLICABLE
        patches[patch.name] = PatchRecord(state=state if patch.name in arm.enabled else State.OFF)
    return Snapshot.model_validate(made.snapshot(1, process, started=1, updated=0.0, patches=patches))


def test_each_lying_process_is_named() -> None:
    """A state file is missing, a patch failed, a patch is missing, and a patch is on that nobody asked for."""
    arm = Arm("fastpath", {"OMNI_FASTPATH": "1"})
    server = {"api": _snapshot(arm, Process.SERVER), "stage0_replica0": _snapshot(arm, Process.STAGE)}
    server["api"].patches["budgeted_drain"] = PatchRecord(state=State.FAILED, reason="a seam")
    del server["api"].patches["nonblocking_dequeue"]
    server["stage0_replica0"].patches["save_queue_cap"] = PatchRecord(state=State.APPLIED, reason="asked for")
    with pytest.raises(WrongArmError) as caught:
        check_server(arm, server, {*server, "stage1_replica0"})
    assert str(caught.value).splitlines()[1:] == [
        "  stage1_replica0 has no state file",
        "  api: nonblocking_dequeue is not in the state file",
        "  api: budgeted_drain is failed (a seam), wanted applied or superseded",
        "  stage0_replica0: save_queue_cap is applied (asked for), wanted off",
    ]
