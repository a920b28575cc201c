"""What a report says: Markdown, terminal, data."""

from __future__ import annotations

import json

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
                measured={"median_ttft_ms": slow * (100 + place), "p97_ttft_ms": 200 + place, "request_throughput": 2},
                answers=[Answer(status=200, text=answer if arm == "B" else "abc", audio_bytes=10)],
                failed=failed if arm == "B" else 0,
                serve=["vllm", "serve", "<model>"],
                variables={"X": "a|b" if arm == "A" else "<b>"},
            )
        )
    return Series(("A", "B"), found, 12, ended=ended)


def test_markdown_has_what_was_named_and_folds_the_rest() -> None:
    """It has verdicts, legend, summary and answers, and the names of arms are escaped."""
    said = report.markdown(report.judge(_series()))
    assert said.startswith("### B against A\n")
    assert "| first text (TTFT), median, ms | 105 (100 to 111)" in said.replace(".5", "").replace(".0", "")
    assert "worse (" in said
    assert "Verdict: exact Mann-Whitney test over starts. first text (TTFT), median was chosen in advance" in said
    assert "1 further measures, without a verdict" in said
    assert "- A: X=a\\|b" in said
    assert "X=&lt;b>" in said
    assert "B compared with A in 2 measures chosen in advance: better in none, worse in 1 (first text" in said
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
    """Worse measures, more failures or other answers are 1, no difference or better is 0, and a failed series is 3."""
    assert report.judge(series).exit_code == code


@pytest.mark.parametrize("without", [6, 1])
def test_a_measure_that_the_second_arm_lost_is_exit_code_1(without: int) -> None:
    """If B lacks the primary measure in a start, there is an alarm and no verdict."""
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


@pytest.mark.parametrize(
    ("words", "alarmed"),
    [("--request-rate 4", False), ("", True), ("--request-rate=inf", True), ("--max-concurrency 8", False)],
)
def test_saturation_is_an_alarm(words: str, alarmed: bool) -> None:
    """An infinite rate, the client's default, is an alarm, but not a closed loop or another client."""
    bench = ["vllm", "bench", "serve", *words.split()]
    whole = _series(1)
    for command, expected in ((bench, alarmed), (["mine", "-n", "3"], False)):
        assert (commands.SATURATION in _alarms(whole, command)) is expected


def _alarms(series: Series, bench: list[str]) -> list[str]:
    starts = [start.model_copy(update={"bench": bench}) for start in series.starts]
    return report.alarms(report.judge(Series(series.arms, starts, 2)))


@pytest.mark.parametrize(("words", "alarmed"), [("--num-prompts 40", True), ("--num-prompts=100", False), ("", False)])
def test_a_p99_that_is_one_request_is_an_alarm(words: str, alarmed: bool) -> None:
    """With fewer than 100 requests the 99th percentile is the slowest one. The default is 1,000."""
    alarms = _alarms(_series(1), ["vllm", "bench", "serve", "--request-rate", "4", *words.split()])
    assert ("With 40 requests p99 is the slowest one. Send at least 100 (--num-prompts)." in alarms) is alarmed
