"""What can be said of the answers of two arms, on a device that repeats itself and on one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ab.answers import compare


def answer(**changes: Any) -> dict[str, Any]:
    """A request that was answered."""
    whole = {"status": 200, "text": "x" * 100, "audio_bytes": 1000, "error": None, "error_code": None}
    return {**whole, "images": [], "finished": True, **changes}


def _compare(a: list[Any], b: list[Any]) -> tuple[list[str], str]:
    return compare([[each] for each in a], [[each] for each in b])


def test_bytes_count_where_a_was_identical_with_itself() -> None:
    """If at least two starts of A are identical, answers are compared by bytes."""
    same, said = _compare([answer(), answer()], [answer()])
    assert (same, "alike" in said, "byte by byte" in said) == ([], True, True)
    other, said = _compare([answer(), answer()], [answer(text="y")])
    assert (len(other), "1 DIFFERENCES" in said) == (1, True)


def test_elsewhere_lengths_may_differ_as_those_of_one_arm_do() -> None:
    """Otherwise lengths in B may exceed those in A by A's spread, but not by more. One start of A has no spread."""
    a = [answer(), answer(text="x" * 110)]
    assert _compare(a, [answer(text="x" * 120)])[0] == []
    found, said = _compare(a, [answer(text="x" * 130)])
    assert (found, "lengths" in said) == (["request 0: length of text: 100 to 110 in A, 130 to 130 in B"], True)
    assert _compare([answer()], [answer(text="y" * 100, audio_bytes=900)])[0] == []


@pytest.mark.parametrize("changes", [{"status": 500}, {"error": "no"}, {"error_code": 5}, {"finished": False}])
def test_errors_and_ends_must_hold_on_every_device(changes: dict[str, Any]) -> None:
    """Errors and ends are compared even if answers are not identical, and one that A has too is no difference."""
    [found] = _compare([answer(), answer(text="other")], [answer(**changes)])[0]
    assert next(iter(changes)) in found
    assert _compare([answer(), answer(**changes)], [answer(**changes)])[0] == []
