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
    """With two starts of A at least."""
    same = _judge([answer(), answer()], [answer()])
    assert (same["how"], same["differences"]) == ("bytes", [])
    assert "the 2 starts of A answered identically" in judged_line(same)
    other = _judge([answer(), answer()], [answer(text="y")])
    assert len(other["differences"]) == 1
    assert "THE ANSWERS DIFFER" in judged_line(other)


def test_elsewhere_lengths_may_differ_as_those_of_one_arm_do() -> None:
    """Of A 100 and 110; B may lie beyond them by as much, and not by more."""
    a = [answer(), answer(text="x" * 110)]
    assert _judge(a, [answer(text="x" * 120)])["differences"] == []
    found = _judge(a, [answer(text="x" * 130)])
    assert found["how"] == "lengths"
    assert found["differences"] == ["request 0: length of text: 100 to 110 in A, 130 to 130 in B"]
    assert "Not compared by bytes" in judged_line(_judge(a, [answer()]))


def test_a_single_start_has_no_spread_to_judge_lengths_by() -> None:
    """They are not compared."""
    assert _judge([answer()], [answer(text="y" * 100, audio_bytes=900)])["differences"] == []


@pytest.mark.parametrize("changes", [{"status": 500}, {"error": "no"}, {"error_code": 5}, {"finished": False}])
def test_errors_and_ends_must_hold_on_every_device(changes: dict[str, Any]) -> None:
    """Even where bits do not."""
    found = _judge([answer(), answer(text="other")], [answer(**changes)])
    assert len(found["differences"]) == 1
    assert next(iter(changes)) in found["differences"][0]


def test_what_a_does_too_is_no_difference() -> None:
    """A request that fails in a start of A may fail in one of B."""
    assert _judge([answer(), answer(error="no", status=500)], [answer(error="no", status=500)])["differences"] == []


def test_one_arm_alone_is_not_compared() -> None:
    """Nor are starts that were asked nothing."""
    assert judge([("A", [answer()]), ("B", [])], ("A", "B"))["how"] == "nothing"
    assert "not compared, there are fixed requests only for" in judged_line(judge([], ("A", "B")))


def test_answers_that_say_nothing_are_not_called_identical() -> None:
    """Nothing was compared, and the sentence says so; what must hold holds still."""
    mute = answer(text="", audio_bytes=0)
    found = _judge([mute, mute], [mute])
    assert found["how"] == "nothing"
    assert "not compared, no answer has text" in judged_line(found)
    assert len(_judge([mute, mute], [answer(text="", audio_bytes=0, status=500)])["differences"]) == 1
