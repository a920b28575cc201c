"""The demo's loads, the time that it says is left, its rows and its picture; no server is started."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

pytest.importorskip("omni_simulated_device")

from benchmarks.demo import report
from benchmarks.demo.load import STAGES, paced, waves
from benchmarks.demo.measure import ROWS, Start, measures
from benchmarks.demo.progress import Progress
from benchmarks.rigs import whole_server
from benchmarks.server.figures import Figure
from omni_fastpath.tools.ab import phases, rows

BETTER, WORSE = 0.1, 5.0
"""Of fastpath: first text and the largest gap, as shares of stock's; all else is alike."""


def test_the_device_configuration_is_one_the_device_accepts() -> None:
    """Step times and silent outputs are in force, and the deploy YAML is there."""
    import json

    from omni_simulated_device.config import load as device_settings

    settings = device_settings(json.dumps({"stages": STAGES}))
    for name, wanted in STAGES.items():
        assert msgspec.structs.asdict(settings.stage(name)).items() >= wanted.items()
    assert whole_server.deploy(waves().deploy).is_file()


def test_the_open_loop_has_the_requests_of_the_closed_one_at_a_rate() -> None:
    """Evenly, half as many."""
    load = paced(waves(), 4.0)
    assert load.starts_s(4.0) == [number / 4 for number in range(64)]
    assert (load.deploy, load.lengths) == (waves().deploy, waves().lengths)


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


def start(arm: str) -> Start:
    """One start, in which fastpath's first text came sooner and its gap was larger."""
    change = {Figure.FIRST_TEXT: BETTER, Figure.GAP: WORSE} if arm == "fastpath" else {}
    figures: dict[str, dict[str, float]] = {"waves": {}, "paced": {}}
    for load, name, _ in ROWS:
        figures[load][name] = 100 * change.get(name, 1.0)
    times = [{"first_audio_s": 0.1 + 0.05 * math.sin(number)} for number in range(128)]
    return Start(arm, 4.0, figures, {"waves": times, "paced": times[:64]}, 30.0, {}, {})


def made(starts_an_arm: int) -> tuple[dict[str, Any], list[rows.Row]]:
    """A run of so many starts of each."""
    starts = [start(arm) for arm in ("stock", "fastpath") * starts_an_arm]
    parity = {"requests": 1, "starts": 2, "comparisons": 1, "audio_bytes": 1, "failed": 0, "differences": []}
    table = rows.rows(measures(32, starts), starts)
    return report.plain(waves(), starts, table, parity, "demo"), table


def test_the_best_row_and_the_worst_come_first_and_few_starts_decide_nothing() -> None:
    """Ten rows; each has a verdict with six starts, none with two."""
    for starts, verdicts in ((2, 0), (6, 10)):
        data, table = made(starts)
        assert [row.verdict is not None for row in table].count(True) == verdicts
        said = io.StringIO()
        report.show(Console(file=said, width=200, force_terminal=False), data, table)
        lines = [line for line in said.getvalue().splitlines() if re.match(r" +(32 at a time|4 a second): ", line)]
        assert len(lines) == 10
        assert "first text" in lines[0]
        assert "largest gap" in lines[1]
        assert all(re.search("first text|largest gap", line) for line in lines[2:4])


def test_the_picture_follows_from_the_numbers_alone(tmp_path: Path) -> None:
    """Twice the same bytes, small enough for a page; too few starts are called that."""
    pictures = []
    for starts in (6, 6, 2):
        report.draw(made(starts)[0], tmp_path / "picture.svg")
        pictures.append((tmp_path / "picture.svg").read_text())
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) < 60_000
    assert ["NO RESULT" in each for each in pictures] == [False, False, True]
