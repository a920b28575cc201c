"""An arm is what it says, or its figures are not shown."""

from __future__ import annotations

import pytest

from benchmarks.rigs.arm import Arm, WrongArmError
from benchmarks.rigs.process_arms import check
from benchmarks.rigs.server_arms import check_gate, check_server
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import PatchRecord, Snapshot
from tests.tools import made

STOCK, FASTPATH = Arm("stock", {"OMNI_FASTPATH": "0"}), Arm("fastpath", {"OMNI_FASTPATH": "1"})
ROLES = {"api", "stage0_replica0", "stage1_replica0"}


def server_files(arm: Arm) -> dict[str, Snapshot]:
    """The state files of a server that is the arm, by role."""
    return {role: _snapshot(arm, Process.SERVER if role == "api" else Process.STAGE) for role in ROLES}


def _snapshot(arm: Arm, process: Process) -> Snapshot:
    patches = {}
    for patch in PATCHES:
        state = State.APPLIED if process in patch.processes else State.NOT_APPLICABLE
        patches[patch.name] = PatchRecord(state=state if patch.name in arm.enabled else State.OFF)
    return Snapshot.model_validate(made.snapshot(1, process, started=1, updated=0.0, patches=patches))


def test_each_lying_process_is_named() -> None:
    """One that has no state file, one patch that failed, one that is missing, one that nobody asked for."""
    server = server_files(FASTPATH)
    del server["stage1_replica0"]
    server["api"].patches["budgeted_drain"] = PatchRecord(state=State.FAILED, reason="a seam")
    del server["api"].patches["nonblocking_dequeue"]
    server["stage0_replica0"].patches["save_queue_cap"] = PatchRecord(state=State.APPLIED, reason="asked for")
    with pytest.raises(WrongArmError) as caught:
        check_server(FASTPATH, server, ROLES)
    assert str(caught.value).splitlines()[1:] == [
        "  stage1_replica0 has no state file",
        "  api: nonblocking_dequeue is not in the state file",
        "  api: budgeted_drain is failed (a seam), wanted applied or superseded",
        "  stage0_replica0: save_queue_cap is applied (asked for), wanted off",
    ]


def test_a_stage_patch_may_find_that_its_stage_is_another_pipelines() -> None:
    """Which stages a stage's patch serves is the pipeline's matter, and no lie."""
    server = server_files(FASTPATH)
    server["stage0_replica0"].patches["forward_gate"] = PatchRecord(state=State.NOT_APPLICABLE, reason="another model")
    check_server(FASTPATH, server, ROLES)


@pytest.mark.parametrize(("arm", "gated", "talker"), [(FASTPATH, 0, True), (STOCK, 1, True), (FASTPATH, 1, False)])
def test_engines_that_do_not_follow_the_arm_are_found(arm: Arm, gated: int, talker: bool) -> None:
    """Payloads that stages should keep back and sent, or the other way round."""
    server = server_files(arm)
    counters = server["stage1_replica0"].patches["forward_gate"].counters
    counters["multimodal_outputs"] = 1 - gated
    check_gate(arm, server, has_talker=talker)
    counters["multimodal_outputs"] = gated
    with pytest.raises(WrongArmError, match=f"{gated} outputs were gated"):
        check_gate(arm, server, has_talker=talker)


def test_a_process_without_patches_is_stock_and_nothing_else() -> None:
    """What the arm says and this process is not stands in the message."""
    assert check(Arm("stock"), Process.SERVER) == {}
    with pytest.raises(WrongArmError, match=r"no fastpath arm: .*budgeted_drain (was never tried|is off)"):
        check(FASTPATH, Process.SERVER)
