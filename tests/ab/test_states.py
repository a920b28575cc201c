"""In what a server's state files may contradict its arm."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.ab import states
from benchmarks.rigs import server_arms
from benchmarks.rigs.arm import Arm, WrongArmError
from benchmarks.rigs.overlays import ROOT
from benchmarks.rigs.snapshots import PatchRecord, Snapshot
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from tests.tools import made

DEFAULT = frozenset(patch.name for patch in PATCHES if patch.default_on)
NAMES = [patch.name for patch in PATCHES]


def snapshot(states_of: dict[str, State], role: Process = Process.SERVER, reason: str = "") -> Snapshot:
    """A state file in which every patch is off but these."""
    patches = {name: PatchRecord(state=states_of.get(name, State.OFF), reason=reason) for name in NAMES}
    said = made.snapshot(7, role, process_name=role.value, started=1, updated=0.0, patches=patches)
    return Snapshot.model_validate(said)


NONE = frozenset[str]()


def test_an_arm_that_is_what_it_says() -> None:
    """All patches are applied or have no use in a stage, and stock has none."""
    applied = snapshot(dict.fromkeys(DEFAULT, State.APPLIED))
    stage = snapshot(dict.fromkeys(DEFAULT, State.NOT_APPLICABLE), Process.STAGE)
    assert states.check([applied, stage], DEFAULT, NONE) == []
    assert states.check([snapshot({})], NONE, NONE) == []
    assert states.check([applied], NONE, NONE)[0] == f"server (7): {NAMES[0]} is applied, expected off"


@pytest.mark.parametrize("state", [State.FAILED, State.UNSUPPORTED, State.OFF])
def test_one_patch_that_does_not_serve_is_enough(state: State) -> None:
    """One patch that does not serve in one process is reported with its reason."""
    first = min(DEFAULT)
    stage = snapshot({**dict.fromkeys(DEFAULT, State.NOT_APPLICABLE), first: state}, Process.STAGE, "it moved")
    problems = states.check([snapshot(dict.fromkeys(DEFAULT, State.APPLIED)), stage], DEFAULT, NONE)
    assert problems == [f"stage (7): {first} is {state.value} (it moved), expected applied"]


def test_a_set_of_which_nothing_serves_is_no_arm() -> None:
    """If no patch of the set serves, or there is no file of a server process, the server is not the arm."""
    [problem] = states.check([snapshot(dict.fromkeys(DEFAULT, State.NOT_APPLICABLE))], DEFAULT, NONE)
    assert problem.startswith("none of ")
    stage = snapshot(dict.fromkeys(DEFAULT, State.APPLIED), Process.STAGE)
    assert "no state file of a server process" in states.check([stage], DEFAULT, NONE)[0]


def test_a_patch_that_was_named_must_serve_somewhere() -> None:
    """A patch of the default set may have no use, but one that has its own variable must serve."""
    first, *others = sorted(DEFAULT)
    found = snapshot({first: State.NOT_APPLICABLE, **dict.fromkeys(others, State.APPLIED)}, reason="no such stage")
    assert states.check([found], DEFAULT, NONE) == []
    assert states.check([found], DEFAULT, frozenset({first})) == [f"{first} serves in no process: no such stage"]


def test_an_arm_of_another_checkout_is_proved_by_its_code(tmp_path: Path) -> None:
    """A patch that is off, and a folder from which nothing is imported, are no such arm. This checkout is one too."""
    arm = Arm("default@older", {"OMNI_FASTPATH": "1", "PYTHONPATH": str(ROOT)}, None)
    found = {"api": snapshot(dict.fromkeys(DEFAULT, State.APPLIED))}

    def server(found: dict[str, Snapshot]) -> Any:
        return SimpleNamespace(snapshots=lambda: found, environment=lambda: {**os.environ, **arm.environment})

    assert server_arms.prove(server(found), arm, {"api"}) == found
    with pytest.raises(WrongArmError, match="stage has no state file"):
        server_arms.prove(server(found), arm, {"api", "stage"})
    with pytest.raises(WrongArmError, match="is off, expected applied"):
        server_arms.prove(server({"api": snapshot({})}), arm, {"api"})
    elsewhere = replace(arm, environment={**arm.environment, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(WrongArmError, match=f"by the code in {tmp_path}"):
        server_arms.prove(server(found), elsewhere, {"api"})
