"""The demo's loads, the time that it says is left, its rows and its picture; no server is started."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("omni_simulated_device")

from benchmarks.demo import report
from benchmarks.demo.load import paced, waves
from benchmarks.demo.measure import ROWS, Name, Start, measures, pairs
from benchmarks.demo.progress import Progress
from benchmarks.server.figures import Figure
from omni_fastpath.tools.ab import phases, rows

BETTER, WORSE = 0.1, 5.0
"""Of fastpath: first text and the underrun, as shares of stock's; all else is alike."""


def test_the_open_loop_has_the_requests_of_the_closed_one_below_what_stock_sustained() -> None:
    """Evenly, a third as many, at a rate that follows from all of stock's starts."""
    load = paced(waves(), [3.0, 9.0, 5.0])
    assert load.levels == (4.0,)
    assert load.starts_s(4.0) == [number / 4 for number in range(42)]
    assert (load.deploy, load.lengths, load.stages) == (waves().deploy, waves().lengths, waves().stages)


def test_the_time_left_is_that_of_the_starts_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as none is over, of what was expected; then of those that are over."""
    now = 100.0
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now))
    said = io.StringIO()
    progress = Progress(Console(file=said, force_terminal=False), 4, 60)
    with progress.live, progress.phase("starting"):
        now += 30
    assert "done starting: 30.0 s; about 3.5 min left" in said.getvalue()
    now += 70
    progress.start_is_over()
    now += 20
    assert progress.left_s == 280
    now += 1000
    assert progress.left_s == 0


def start(arm: str, load: Name) -> Start:
    """One start, in which fastpath's first text came sooner and its underrun was larger."""
    change = {Figure.FIRST_TEXT: BETTER, Figure.DRY: WORSE} if arm == "fastpath" else {}
    names = [*{figure for _, figure, _ in ROWS}, Figure.FIRST_TEXT_P99, Figure.TTFP_P99]
    figures = {str(name): 100 * change.get(name, 1.0) for name in names}
    times = [{"first_audio_s": 0.1 + 0.05 * math.sin(number)} for number in range(128)]
    return Start(arm, load, {"waves": 64, "paced": 4.0}[load], figures, times, 30.0, {}, {})


def made(starts_an_arm: int, *loads: Name) -> tuple[dict[str, Any], list[rows.Row]]:
    """A run of so many starts of each."""
    starts = [start(arm, load) for load in loads for arm in ("stock", "fastpath") * starts_an_arm]
    parity = {"requests": 1, "starts": 2, "comparisons": 1, "audio_bytes": 1, "failed": 0, "differences": []}
    table = rows.rows(measures(starts), pairs(starts))
    asked = {"waves": waves(), "paced": paced(waves(), [5.0])}
    return report.plain({load: asked[load] for load in loads}, starts, table, [parity], "demo"), table


@pytest.mark.parametrize(("loads", "count"), [(("waves",), 6), (("waves", "paced"), 10)])
def test_the_best_row_and_the_worst_come_first_and_few_starts_decide_nothing(
    loads: tuple[Name, ...], count: int
) -> None:
    """Six rows after the first load and ten after both; each has a verdict with six starts, none with two."""
    for starts, verdicts in ((2, 0), (6, count)):
        data, table = made(starts, *loads)
        assert [row.verdict is not None for row in table].count(True) == verdicts
        said = io.StringIO()
        report.show(Console(file=said, width=200, force_terminal=False), data, table)
        lines = [line for line in said.getvalue().splitlines() if re.match(r" +(64 at a time|4 per second): ", line)]
        assert len(lines) == count
        assert "first text" in lines[0]
        assert "underrun" in lines[1]


def test_the_picture_follows_from_the_numbers_alone(tmp_path: Path) -> None:
    """Twice the same bytes, small enough for a page; too few starts are called that."""
    pictures = []
    for starts in (6, 6, 2):
        report.draw(made(starts, "waves", "paced")[0], tmp_path / "picture.svg")
        pictures.append((tmp_path / "picture.svg").read_text())
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) < 60_000
    assert ["NO RESULT" in each for each in pictures] == [False, False, True]
