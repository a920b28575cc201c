"""What an arm asks of omni-fastpath, and in what its state files may contradict it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import PatchRecord, Snapshot
from omni_fastpath.tools.ab import states
from omni_fastpath.tools.ab.states import Expected
from tests.tools import made

DEFAULT = frozenset(patch.name for patch in PATCHES if patch.default_on)
NAMES = [patch.name for patch in PATCHES]


def snapshot(states_of: dict[str, State], role: Process = Process.SERVER, reason: str = "") -> Snapshot:
    """A state file in which every patch is off but these."""
    patches = {name: PatchRecord(state=states_of.get(name, State.OFF), reason=reason) for name in NAMES}
    said = made.snapshot(7, role, process_name=role.value, started=1, updated=0.0, patches=patches)
    return Snapshot.model_validate(said)


# ---- Asked for ----


@pytest.mark.parametrize(("environ", "asked"), [({}, False), ({"OMNI_FASTPATH": "0"}, True)])
def test_stock_may_leave_a_state_file(environ: dict[str, str], asked: bool) -> None:
    """A server that is off as a whole leaves one, which proves a stock arm, and one without variables does not."""
    assert states.expected(environ, ["vllm"]) == Expected(frozenset(), frozenset(), asked=asked)


def test_what_variables_switch() -> None:
    """Variables change the default set, and patches that have their own variable are marked."""
    first, opt_in = min(DEFAULT), next(patch for patch in PATCHES if not patch.default_on and not patch.requires)
    off = next(patch for patch in PATCHES if patch.name == first)
    found = states.expected({"OMNI_FASTPATH": "1", opt_in.env: "1", off.env: "0"}, [])
    assert found.named == {opt_in.name}
    assert opt_in.name in found.enabled
    assert first not in found.enabled


def test_a_deploy_yaml_asks_too(tmp_path: Path) -> None:
    """The deploy YAML of the command counts, variables override it, and a missing file is refused."""
    file = tmp_path / "deploy.yaml"
    file.write_text("fastpath: true\n")
    assert states.expected({}, ["vllm", "--deploy-config", str(file)]).enabled == DEFAULT
    assert states.expected({"OMNI_FASTPATH": "0"}, [f"--deploy-config={file}"]).enabled == frozenset()
    with pytest.raises(ConfigError, match="no such file"):
        states.expected({}, ["--deploy-config", str(tmp_path / "none.yaml")])


# ---- Proved ----

ON = Expected(DEFAULT, frozenset(), asked=True)
STOCK = Expected(frozenset(), frozenset(), asked=True)


def test_an_arm_that_is_what_it_says() -> None:
    """All patches are applied or have no use in a stage, stock has none, and a server without variables no file."""
    applied = snapshot(dict.fromkeys(DEFAULT, State.APPLIED))
    stage = snapshot(dict.fromkeys(DEFAULT, State.NOT_APPLICABLE), Process.STAGE)
    assert states.check([applied, stage], ON) == []
    assert states.check([snapshot({})], STOCK) == []
    assert states.check([applied], STOCK)[0] == f"server (7): {NAMES[0]} is applied, expected off"
    assert states.check([], Expected(frozenset(), frozenset(), asked=False)) == []


@pytest.mark.parametrize("state", [State.FAILED, State.UNSUPPORTED, State.OFF])
def test_one_patch_that_does_not_serve_is_enough(state: State) -> None:
    """One patch that does not serve in one process is reported with its reason."""
    first = min(DEFAULT)
    stage = snapshot({**dict.fromkeys(DEFAULT, State.NOT_APPLICABLE), first: state}, Process.STAGE, "it moved")
    problems = states.check([snapshot(dict.fromkeys(DEFAULT, State.APPLIED)), stage], ON)
    assert problems == [f"stage (7): {first} is {state.value} (it moved), expected applied"]


def test_a_set_of_which_nothing_serves_is_no_arm() -> None:
    """If no patch of the set serves, the server is not the arm."""
    [problem] = states.check([snapshot(dict.fromkeys(DEFAULT, State.NOT_APPLICABLE))], ON)
    assert problem.startswith("none of ")


def test_a_patch_that_was_named_must_serve_somewhere() -> None:
    """A patch of the default set may have no use, but one that has its own variable must serve."""
    first, *others = sorted(DEFAULT)
    found = snapshot({first: State.NOT_APPLICABLE, **dict.fromkeys(others, State.APPLIED)}, reason="no such stage")
    assert states.check([found], ON) == []
    named = Expected(DEFAULT, frozenset({first}), asked=True)
    assert states.check([found], named) == [f"{first} serves in no process: no such stage"]


def test_without_a_state_file_of_a_server_nothing_is_proved() -> None:
    """State files of stages are not enough."""
    stage = snapshot(dict.fromkeys(DEFAULT, State.APPLIED), Process.STAGE)
    assert "no state file of a server process" in states.check([stage], ON)[0]
