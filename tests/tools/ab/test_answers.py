"""What can be said of the answers of two arms, on a device that repeats itself and on one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from omni_fastpath.tools.ab.answers import judge, judged_line


def answer(**changes: Any) -> dict[str, Any]:
    """A request that was answered."""
    whole = {"status": 200, "text": "x" * 100, "audio_bytes": 1000, "error": None, "error_code": None}
    return {**whole, "images": [], "finished": True, **changes}


def _judge(a: list[Any], b: list[Any]) -> dict[str, Any]:
    return judge([("A", [each]) for each in a] + [("B", [each]) for each in b], ("A", "B"))


def test_bytes_count_where_a_was_identical_with_itself() -> None:
    """If at least two starts of A are identical, answers are compared by bytes."""
    same = _judge([answer(), answer()], [answer()])
    assert (same["how"], same["differences"]) == ("bytes", [])
    assert "the 2 starts of A answered identically" in judged_line(same)
    other = _judge([answer(), answer()], [answer(text="y")])
    assert len(other["differences"]) == 1
    assert "THE ANSWERS DIFFER" in judged_line(other)


def test_elsewhere_lengths_may_differ_as_those_of_one_arm_do() -> None:
    """Otherwise lengths in B may exceed those in A by the spread of A, but not by more."""
    a = [answer(), answer(text="x" * 110)]
    assert _judge(a, [answer(text="x" * 120)])["differences"] == []
    found = _judge(a, [answer(text="x" * 130)])
    assert found["how"] == "lengths"
    assert found["differences"] == ["request 0: length of text: 100 to 110 in A, 130 to 130 in B"]
    assert "Not compared by bytes" in judged_line(_judge(a, [answer()]))


def test_a_single_start_has_no_spread_to_judge_lengths_by() -> None:
    """With one start of A, lengths are not compared."""
    assert _judge([answer()], [answer(text="y" * 100, audio_bytes=900)])["differences"] == []


@pytest.mark.parametrize("changes", [{"status": 500}, {"error": "no"}, {"error_code": 5}, {"finished": False}])
def test_errors_and_ends_must_hold_on_every_device(changes: dict[str, Any]) -> None:
    """Errors and ends are compared even if answers are not identical."""
    found = _judge([answer(), answer(text="other")], [answer(**changes)])
    assert len(found["differences"]) == 1
    assert next(iter(changes)) in found["differences"][0]


def test_what_a_does_too_is_no_difference() -> None:
    """A failure that also occurs in a start of A is no difference."""
    assert _judge([answer(), answer(error="no", status=500)], [answer(error="no", status=500)])["differences"] == []


def test_one_arm_alone_is_not_compared() -> None:
    """Without starts of both arms, or without requests, nothing is compared."""
    assert judge([("A", [answer()]), ("B", [])], ("A", "B"))["how"] == "nothing"
    assert "not compared, there are fixed requests only for" in judged_line(judge([], ("A", "B")))


def test_answers_that_say_nothing_are_not_called_identical() -> None:
    """Empty answers are not called identical, but their errors are compared."""
    mute = answer(text="", audio_bytes=0)
    found = _judge([mute, mute], [mute])
    assert found["how"] == "nothing"
    assert "not compared, no answer has text" in judged_line(found)
    assert len(_judge([mute, mute], [answer(text="", audio_bytes=0, status=500)])["differences"]) == 1
