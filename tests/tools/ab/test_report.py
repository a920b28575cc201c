"""What a report says: Markdown, terminal, data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_fastpath.tools.ab import commands, report
from omni_fastpath.tools.ab.files import Answer, Series, Start


def _series(starts: int = 6, factor: float = 2.0, ended: str = "", failed: int = 0, answer: str = "abc") -> Series:
    found = []
    for place in range(2 * starts):
        arm = "ABBA"[place % 4]
        slow = factor if arm == "B" else 1.0
        found.append(
            Start(
                arm=arm,
                place=place + 1,
                measured={
                    "median_ttft_ms": slow * (100 + place),
                    "p97_ttft_ms": 200.0 + place,
                    "request_throughput": 2.0,
                },
                answers=[Answer(status=200, text=answer if arm == "B" else "abc", audio_bytes=10)],
                failed=failed if arm == "B" else 0,
                serve=["vllm", "serve", "<model>"],
                variables={"X": "a|b" if arm == "A" else "<b>"},
            )
        )
    return Series(("A", "B"), found, 12, ended=ended)


def test_markdown_has_what_was_named_and_folds_the_rest() -> None:
    """A table of verdicts, the legend, the answers; arms' names cannot break it."""
    said = report.markdown(report.judge(_series()))
    assert said.startswith("### B against A\n")
    assert "| first text (TTFT), median, ms | 105 (100 to 111)" in said.replace(".5", "").replace(".0", "")
    assert "worse (" in said
    assert "Verdict: exact Mann-Whitney test over starts. first text (TTFT), median was chosen in advance" in said
    assert "1 further measures, without a verdict" in said
    assert "- A: X=a\\|b" in said
    assert "X=&lt;b>" in said
    assert "byte-identical" in said
    assert "```\nvllm serve '<model>'\n" in said


@pytest.mark.parametrize(
    ("series", "code"),
    [
        (_series(), 1),
        (_series(factor=1.0), 0),
        (_series(factor=0.5), 0),
        (_series(factor=1.0, failed=2), 1),
        (_series(factor=1.0, answer="abd"), 1),
        (_series(ended="it fell"), 3),
    ],
)
def test_exit_codes(series: Series, code: int) -> None:
    """Worse, more failed requests and other answers are 1; the same and better are 0; a series that failed is 3."""
    assert report.judge(series).exit_code == code


@pytest.mark.parametrize("without", [6, 1])
def test_a_measure_that_the_second_arm_lost_is_exit_code_1(without: int) -> None:
    """Without any verdict, because the primary measure is gone, and with no value where there is none."""
    whole = _series(factor=1.0)
    lost = [start for start in whole.starts if start.arm == "B"][:without]
    starts = [
        start.model_copy(update={"measured": {"request_throughput": 2.0}}) if start in lost else start
        for start in whole.starts
    ]
    judged = report.judge(Series(whole.arms, starts, 12))
    assert judged.exit_code == 1
    told = f"0% of the starts of A and {without / 6:.0%} of the starts of B have no first text (TTFT), median"
    assert told in report.markdown(judged)
    json.dumps(report.as_data(judged), allow_nan=False)
    assert report.judge(Series(("B", "A"), starts, 12)).exit_code == 4


def test_the_last_word_is_one_sentence() -> None:
    """What is better and what is worse, by their names, and in how many no difference was shown."""
    expected = {
        0.5: "better in 1 (first text (TTFT), median), worse in none, no difference shown in 1.",
        2.0: "better in none, worse in 1 (first text (TTFT), median), no difference shown in 1.",
    }
    for factor, said in expected.items():
        found = report.notes(report.judge(_series(factor=factor)))[0]
        assert found == f"B compared with A in 2 measures chosen in advance: {said}"


@pytest.mark.parametrize(
    ("words", "alarmed"),
    [("--request-rate 4", False), ("", True), ("--request-rate=inf", True), ("--max-concurrency 8", False)],
)
def test_saturation_is_an_alarm(words: str, alarmed: bool) -> None:
    """A rate that is infinite, by the client's default too; a closed loop is none, another client's load its own."""
    bench = ["vllm", "bench", "serve", *words.split()]
    whole = _series(1)
    for command, expected in ((bench, alarmed), (["mine", "-n", "3"], False)):
        assert (commands.SATURATION in _alarms(whole, command)) is expected


def _alarms(series: Series, bench: list[str]) -> list[str]:
    starts = [start.model_copy(update={"bench": bench}) for start in series.starts]
    return report.alarms(report.judge(Series(series.arms, starts, 2)))


@pytest.mark.parametrize(("words", "alarmed"), [("--num-prompts 40", True), ("--num-prompts=100", False), ("", False)])
def test_a_p99_that_is_one_request_is_an_alarm(words: str, alarmed: bool) -> None:
    """Of fewer than 100 requests the 99th percentile is the slowest; the client's default is 1,000."""
    alarms = _alarms(_series(1), ["vllm", "bench", "serve", "--request-rate", "4", *words.split()])
    assert ("With 40 requests p99 is the slowest one. Send at least 100 (--num-prompts)." in alarms) is alarmed


def test_a_series_that_was_cut_short_says_so(tmp_path: Path) -> None:
    """In the data and in Markdown, which are written; one arm alone has no verdict and breaks nothing."""
    whole = _series()
    judged = report.judge(Series(whole.arms, whole.starts[:1], 12, ended="interrupted"))
    report.write(judged, tmp_path)
    data = json.loads((tmp_path / "ab.json").read_text())
    assert (data["complete"], data["ended"], data["exit_code"]) == (False, "interrupted", 130)
    assert all(row["verdict"] is None for row in data["rows"])
    said = (tmp_path / "ab.md").read_text()
    assert "INCOMPLETE: 1 of 12 starts were measured; interrupted" in said
    assert "or an arm has no start" in said
