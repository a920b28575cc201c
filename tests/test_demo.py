"""The table and the picture of the demo. No server is started."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("omni_simulated_device")

from benchmarks.demo import report
from benchmarks.demo.load import paced, waves
from benchmarks.demo.measure import ROWS, Name, Start, measures, pairs
from benchmarks.server.figures import Figure
from omni_fastpath.tools.ab import rows

BETTER, WORSE = 0.1, 5.0
"""Of fastpath: first text and the underrun, as shares of stock's; all else is alike."""


def start(arm: str, load: Name) -> Start:
    """One start, in which fastpath's first text came sooner and its underrun was larger."""
    change = {Figure.FIRST_TEXT: BETTER, Figure.DRY: WORSE} if arm == "fastpath" else {}
    names = [*{figure for _, figure, _ in ROWS}, Figure.FIRST_TEXT_P99, Figure.TTFP_P99]
    figures = {str(name): 100 * change.get(name, 1.0) for name in names}
    times = [{"first_audio_s": 0.1 + 0.05 * math.sin(number)} for number in range(128)]
    return Start(arm, load, {"waves": 64, "paced": 4.0}[load], figures, times, 30.0, {}, {})


def made(starts_an_arm: int) -> tuple[dict[str, Any], list[rows.Row]]:
    """A run of so many starts of each."""
    asked: dict[Name, Any] = {"waves": waves(), "paced": paced(waves(), [5.0])}
    starts = [start(arm, load) for load in asked for arm in ("stock", "fastpath") * starts_an_arm]
    parity = {"requests": 1, "starts": 2, "comparisons": 1, "audio_bytes": 1, "failed": 0, "differences": []}
    table = rows.rows(measures(starts), pairs(starts))
    return report.plain(asked, starts, table, [parity], "demo"), table


@pytest.mark.parametrize(("starts", "verdicts"), [(2, 0), (6, 10)])
def test_the_table_and_the_picture_of_a_run(tmp_path: Path, starts: int, verdicts: int) -> None:
    """The best row is first, the worst is second, and too few starts give neither a verdict nor a result."""
    data, table = made(starts)
    assert [row.verdict is not None for row in table].count(True) == verdicts
    said = io.StringIO()
    report.show(Console(file=said, width=200, force_terminal=False), data, table)
    lines = [line for line in said.getvalue().splitlines() if re.match(r" +(64 at a time|4 per second): ", line)]
    assert len(lines) == 10
    assert "first text" in lines[0]
    assert "underrun" in lines[1]
    report.draw(data, tmp_path / "picture.svg")
    assert ("NO RESULT" in (tmp_path / "picture.svg").read_text()) is (not verdicts)
