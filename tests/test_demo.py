"""The table and the picture of the demo, and the figures of ``benchmarks.server``. No server is started."""

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
from benchmarks.server.figures import Figure, figures
from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.capture import Capture, Piece, chat_request

BETTER, WORSE = 0.1, 5.0
"""Of fastpath: first text and the underrun, as shares of stock's; all else is alike."""


def start(arm: str, load: Name) -> Start:
    """A start in which fastpath has an earlier first text and a larger underrun."""
    change = {Figure.FIRST_TEXT: BETTER, Figure.DRY: WORSE} if arm == "fastpath" else {}
    names = [*{figure for _, figure, _ in ROWS}, Figure.FIRST_TEXT_P99, Figure.TTFP_P99]
    figures = {str(name): 100 * change.get(name, 1.0) for name in names}
    times = [{"first_audio_s": 0.1 + 0.05 * math.sin(number)} for number in range(128)]
    return Start(arm, load, {"waves": 64, "paced": 4.0}[load], figures, times, 30.0, {}, {})


def made(starts_an_arm: int) -> tuple[dict[str, Any], list[rows.Row]]:
    """A run with so many starts per arm."""
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


def test_pauses_in_text_and_in_audio_are_told_apart() -> None:
    """Pauses are measured between pieces of the same kind, whatever arrives between them."""
    pieces = [Piece(1.0, "a"), Piece(1.5, audio=b".."), Piece(4.0, "b"), Piece(4.5, audio=b"..")]
    capture = Capture(chat_request("Hello"), 0.0, pieces=pieces, e2e_s=5.0)
    found = figures([capture], 1, {"front_end": 0.1, "orchestrator": 0.2, "others": 0.3})
    assert (found[Figure.GAP], found[Figure.TEXT_GAP_P99], round(found[Figure.PROCESS_MS])) == (3000.0, 3000.0, 600)
