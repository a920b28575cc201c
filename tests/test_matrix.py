"""The matrix of releases: what it looks for, and what it takes for wrong."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import overlays
from omni_fastpath.declare import State
from omni_fastpath.patches import PATCHES
from tests.matrix import __main__ as matrix
from tests.matrix import behaviour, cycle, served


def test_every_declared_release_can_be_fetched() -> None:
    """scripts/releases.txt, which the matrix runs, has each release that a row names; servers are of these."""
    known = overlays.releases()
    assert {release for patch in PATCHES for release in patch.releases} <= set(known)
    assert set(served.SERVERS) <= set(known)


def test_the_tests_for_every_release_are_found() -> None:
    """By their mark, so that files that cannot be imported elsewhere are not collected."""
    files = behaviour.marked(Path(__file__).parent)
    assert Path(__file__).parent / "test_inprocess.py" in files
    assert Path(__file__).parent / "test_replay.py" not in files


def test_ci_looks_at_the_ends_and_at_previews() -> None:
    """The oldest release, the newest and the previews; of the installed one what other tests have not."""
    assert matrix.for_ci() == ("0.22.0", "0.30.0", "0.32.0rc1")
    everything = {release: matrix.parts_of(release, matrix.PARTS, ci=True) for release in matrix.for_ci()}
    assert everything == {"0.22.0": matrix.PARTS, "0.30.0": ("seams", "cycle"), "0.32.0rc1": matrix.PARTS}
    assert matrix.parts_of("0.30.0", matrix.PARTS, ci=False) == matrix.PARTS
    assert matrix.parts_of("0.30.0", ("server", "cycle"), ci=True) == ("cycle",)


def test_a_release_that_cannot_be_had_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said with where to look, nothing else is looked at there, and the exit status is that of a failure."""
    from tests.matrix.workplace import Workplace

    monkeypatch.setattr(overlays, "ROOT", tmp_path)  # without scripts
    found = matrix.look(Workplace(tmp_path), "0.22.0", matrix.PARTS, served.LIGHT)
    [problem] = found["problems"]["seams"]
    assert problem.startswith("0.22.0 could not be had: scripts/release.sh said why")
    assert found["seconds"] == {}


@pytest.fixture
def upstream_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that counts as vLLM's."""
    module = types.ModuleType("vllm.matrix_test")

    class Engine:
        def step(self) -> None: ...

    Engine.__module__ = module.__name__
    module.Engine = Engine  # type: ignore[attr-defined]
    module.run = Engine.step  # type: ignore[attr-defined]
    module.seen = 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_slot_that_was_not_put_back_is_seen(upstream_module: Any) -> None:
    """In a module or in one of its classes, another object or none; a number that moved is upstream's own matter."""
    before = cycle.slots()
    upstream_module.seen = 1
    assert cycle.changed(before, cycle.slots()) == []
    upstream_module.Engine.step = lambda self: None
    del upstream_module.run
    assert cycle.changed(before, cycle.slots()) == ["vllm.matrix_test:Engine.step", "vllm.matrix_test:run"]


def test_something_of_ours_that_stays_is_seen(upstream_module: Any) -> None:
    """An attribute that upstream does not have."""
    from omni_fastpath.install import uninstall

    before = cycle.slots()
    upstream_module.Engine.added = uninstall
    upstream_module.Engine.other = lambda self: None
    assert cycle.changed(before, cycle.slots()) == ["vllm.matrix_test:Engine.added"]


def test_a_release_without_a_row_is_unsupported() -> None:
    """And on one with a row it is what the row says."""
    assert {patch.state_on("0.1.0") for patch in PATCHES} == {State.UNSUPPORTED}
    assert {patch.state_on("0.30.0") for patch in PATCHES} == {State.APPLIED}


def test_a_report_of_tests(tmp_path: Path) -> None:
    """Passed, skipped with the reason, failed with the first line."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><skipped message="no such mode"/></testcase>'
        '<testcase classname="a" name="three"><failure message="assert 1 == 2&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = behaviour.read(report)
    assert found == behaviour.Behaviour(1, {"a.two": "no such mode"}, {"a.three": "assert 1 == 2"})


def test_the_table_has_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """Below it, by release and part."""
    from rich.console import Console

    found = {"problems": {"seams": ["one", "two"]}, "seconds": {"seams": 3.0}, "seams": None}
    result = {"date": "today", "seconds": 60.0, "releases": {"0.22.0": found}}
    matrix.show(result, Console(width=150))
    said = capsys.readouterr().out
    assert "2 problems" in said
    assert "0.22.0, seams: one" in said
    assert "0.22.0, seams: two" in said
