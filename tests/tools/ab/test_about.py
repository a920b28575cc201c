"""A result line says where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.tools.ab import about


def test_a_result_line_names_versions_commit_and_machine() -> None:
    """What a figure needs to be made again is on its line."""
    found = about.about()
    assert found["versions"].keys() >= {"python", "omni-fastpath"}
    assert found["machine"].keys() == {"processor", "cores", "memory_gib"}
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 12
    assert found["date"].endswith("Z")


def test_an_installation_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package was installed from a wheel the commit is None, not an error."""
    monkeypatch.setattr(about, "__file__", str(tmp_path / "a/b/c/d.py"))
    assert about.commit.__wrapped__() is None
