"""What a report says: Markdown, page, data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from omni_fastpath.tools.ab import page, report
from omni_fastpath.tools.ab.files import Series, Start

ANSWER = {
    "status": 200,
    "text": "abc",
    "token_ids": [1],
    "audio_bytes": 10,
    "error": None,
    "error_code": None,
    "finished": True,
    "order": "the end once and last",
}
STATES = [
    {
        "process": "APIServer",
        "role": "server",
        "stage": None,
        "replica": None,
        "source": None,
        "patches": {"budgeted_drain": {"state": "applied", "reason": "", "counters": {"items": 5, "passes": 0}}},
    }
]


def _series(starts: int = 6, factor: float = 2.0, ended: str = "", failed: int = 0) -> Series:
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
                answers=[ANSWER],
                states=STATES if arm == "B" else [],
                failed=failed if arm == "B" else 0,
                serve=["vllm", "serve", "<model>"],
            )
        )
    words = {"A": "X=a|b", "B": "X=<b>"}
    return Series(("A", "B"), found, 12, ended=ended, arm_words=words, command="omni-fastpath ab -- a -- b")


def test_markdown_has_what_was_named_and_folds_the_rest() -> None:
    """A table of verdicts, the legend, the answers; arms' names cannot break it."""
    said = report.markdown(report.judge(_series()))
    assert said.startswith("### B against A\n")
    assert "| median_ttft, ms (first text) | 105 (100 to 111)" in said.replace(".5", "").replace(".0", "")
    assert "worse (" in said
    assert "Verdict: exact Mann-Whitney over starts; median_ttft (first text) was named beforehand" in said
    assert "1 further measures, without a verdict" in said
    assert "- A: X=a\\|b" in said
    assert "X=&lt;b>" in said
    assert "byte-identical" in said
    assert "```\nomni-fastpath ab -- a -- b\n```" in said
    assert "| B | budgeted_drain | applied | 5 items | APIServer |" in said


def test_the_page_needs_nothing_else() -> None:
    """Tables, states, commands, everything escaped; with plotly its script and pictures, nothing fetched."""
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    text = page.render(report.as_page(report.judge(_series())))
    body = text[text.index("<body>") :]
    assert "median_ttft, ms" in body
    assert 'class="worse"' in body
    assert "X=&lt;b&gt;" in body
    assert "vllm serve" in body
    assert body.count('id="picture-') == 3
    assert "Plotly.newPlot" in body
    assert len(text) > 500_000
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", text[: text.index("<style>")] + body)


def test_what_is_drawn_is_what_plotly_knows() -> None:
    """Every property of every picture; the page itself is made without that check."""
    plotly = pytest.importorskip("plotly.graph_objects")
    for figure in page.figures(report.as_page(report.judge(_series()))):
        assert plotly.Figure(figure).data


def test_a_page_that_cannot_be_made_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are written, and what went wrong is said."""
    monkeypatch.setattr(page, "render", lambda _: 1 / 0)
    said = report.write(report.judge(_series(2)), tmp_path)
    assert "ZeroDivisionError" in said[-1]
    assert (tmp_path / "ab.json").is_file()


def test_without_plotly_the_page_says_so() -> None:
    """The tables are there."""
    pytest.importorskip("jinja2")
    text = page.render(report.as_page(report.judge(_series())), pictures=False)
    assert "plotly is not installed" in text
    assert "median_ttft, ms" in text
    assert "<script" not in text


def test_a_series_that_was_cut_short_says_so_everywhere() -> None:
    """In the data, in Markdown and on the page; one arm alone has no verdict and breaks nothing."""
    pytest.importorskip("jinja2")
    whole = _series()
    cut = Series(whole.arms, whole.starts[:1], 12, ended="interrupted", arm_words=whole.arm_words)
    judged = report.judge(cut)
    data = json.loads(json.dumps(report.plain(judged), allow_nan=False))
    assert (data["complete"], data["ended"], data["exit_code"]) == (False, "interrupted", 130)
    assert all(row["verdict"] is None for row in data["rows"])
    told = "INCOMPLETE: 1 of 12 starts were measured; interrupted"
    assert told in report.markdown(judged)
    assert told in page.render(report.as_page(judged), pictures=False)
    assert "one arm has no start" in report.markdown(judged)


@pytest.mark.parametrize(
    ("series", "code"),
    [
        (_series(), 1),
        (_series(factor=1.0), 0),
        (_series(factor=0.5), 0),
        (_series(factor=1.0, failed=2), 1),
        (_series(ended="it fell"), 3),
    ],
)
def test_exit_codes(series: Series, code: int) -> None:
    """Worse is 1, the same and better are 0; so are more failed requests; 3 is a series that failed."""
    assert report.judge(series).exit_code == code


def test_a_state_file_that_was_not_found_is_not_called_none() -> None:
    """A server that a user started may have it where we do not look."""
    whole = _series(2)
    starts = [start.model_copy(update={"states": [], "states_seen": False}) for start in whole.starts]
    said = report.markdown(report.judge(Series(whole.arms, starts, len(starts))))
    assert "No state file of A, B was found: nothing was asked of omni-fastpath there, or it lies elsewhere." in said


def test_brackets_in_a_name_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Users name their arms; a table shows the name as it is."""
    starts = [start.model_copy(update={"arm": {"A": "x[/y]", "B": "[red]z"}[start.arm]}) for start in _series().starts]
    report.show(report.judge(Series(("x[/y]", "[red]z"), starts, len(starts))), Console(width=200))
    assert "[red]z / x[/y]" in capsys.readouterr().out


def test_all_is_written(tmp_path: Path) -> None:
    """JSON, Markdown, and the page where jinja2 is."""
    pytest.importorskip("jinja2")
    said = report.write(report.judge(_series(2)), tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"ab.json", "ab.md", "ab.html"}
    assert said[-1] == f"page: {tmp_path}/new/ab.html"
    data = json.loads((tmp_path / "new" / "ab.json").read_text())
    assert data["order"] == [*"ABBA"]
    assert data["schema"] == report.SCHEMA


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
    told = f"0 of 6 starts of A and {without} of 6 of B have no median_ttft_ms, p97_ttft_ms"
    assert told in report.markdown(judged)
    json.dumps(report.plain(judged), allow_nan=False)
    assert report.judge(Series(("B", "A"), starts, 12)).exit_code == 0
