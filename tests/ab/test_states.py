"""In what a server's state files may contradict its arm."""

from __future__ import annotations

import pytest

from benchmarks.ab import states
from benchmarks.ab.states import PatchRecord, Snapshot
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


def test_what_serves_nowhere_is_no_arm() -> None:
    """A set of which nothing serves, a patch with its own variable that does not, and no file of a server process."""
    first, *others = sorted(DEFAULT)
    [problem] = states.check([snapshot(dict.fromkeys(DEFAULT, State.NOT_APPLICABLE))], DEFAULT, NONE)
    assert problem.startswith("none of ")
    found = snapshot({first: State.NOT_APPLICABLE, **dict.fromkeys(others, State.APPLIED)}, reason="no such stage")
    assert states.check([found], DEFAULT, NONE) == []
    assert states.check([found], DEFAULT, frozenset({first})) == [f"{first} serves in no process: no such stage"]
    assert "no state file of a server process" in states.check([snapshot({}, Process.STAGE)], DEFAULT, NONE)[0]
