"""A result line says where it comes from."""

from __future__ import annotations

from benchmarks.rigs import about


def test_a_result_line_names_versions_commit_and_machine() -> None:
    """What a figure needs to be made again is on its line."""
    found = about.about()
    assert found["versions"].keys() >= {"python", "omni-fastpath"}
    assert found["machine"].keys() == {"processor", "cores", "memory_gib"}
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 12
    assert found["date"].endswith("Z")
