"""The tables of ``benchmarks.server`` and the demo, and their figures. No server is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks import picture
from benchmarks.ab.capture import Capture, Piece, chat_request
from benchmarks.demo import __main__ as demo
from benchmarks.rigs import about, results, server_arms, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.overlays import ROOT
from benchmarks.server import measure, report
from benchmarks.server.arms import ARMS, named
from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Load
from benchmarks.server.measure import USUAL_HOST

LOAD = Load(levels=(8, 64))


def start(change: Mapping[Figure, float], late_ms: float = 0.1) -> dict[str, Any]:
    """A start whose figures are alike but for these factors."""
    usual = {str(name): 100 * change.get(name, 1.0) for name in Figure}
    instrument = {Figure.ENGINES_LATE: late_ms, Figure.CLIENT_LATE: 1.0, Figure.CLIENT: 0.2}
    return {"figures": {"8": {**usual, Figure.ENGINES_LATE: 0.1} | instrument, "64": usual | instrument}, "answers": {}}


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is left out, as it takes seconds."""
    monkeypatch.setattr(Load, "limit", lambda *_: [])
    for each in (report, picture):
        monkeypatch.setattr(each, "figures", lambda _: dict.fromkeys(map(str, Figure), 50.0))


@pytest.mark.parametrize(("starts", "better", "worse"), [(2, 0, 0), (6, 2, 2)])
def test_too_few_starts_give_no_verdict(
    capsys: pytest.CaptureFixture[str], starts: int, better: int, worse: int
) -> None:
    """Six starts that all differ are judged at each level; two are not, and the limit is beside them."""
    change = {Figure.TEXT: 0.1, Figure.DRY_P99: 5.0}
    report.show({"poll": [start({})] * starts, "default": [start(change)] * starts}, LOAD, USUAL_HOST)
    said = capsys.readouterr().out
    assert (said.count(" better ("), said.count(" worse (")) == (better, worse)
    assert said.count("2.00") >= 2


@pytest.mark.parametrize("shown", [report.show, report.show_parts])
def test_a_level_that_measured_the_machine_is_named_and_not_judged(
    capsys: pytest.CaptureFixture[str], shown: Callable[..., None]
) -> None:
    """Engines that were late in one start of any arm make the level unfit."""
    found = {"poll": [start({})] * 6, "default": [start({Figure.TEXT: 0.1}, late_ms=7.0)] * 6}
    for each in found["default"]:
        each["figures"]["8"][Figure.ENGINES_LATE] = 0.1
    shown(found, LOAD, USUAL_HOST)
    said = capsys.readouterr().out
    assert "64 MEASURED THIS MACHINE" in said
    assert "8 MEASURED" not in said
    assert said.count(" better (") == (shown is report.show)


def test_a_part_is_starred_where_no_start_is_within_those_of_the_default_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One start within the range of the first arm's is no difference."""
    base = [start({Figure.TEXT: each}) for each in (0.9, 1.0, 1.1, 1.2)]
    beyond, within = ([start({Figure.TEXT: each}) for each in pair] for pair in ((1.3, 1.4), (1.0, 1.4)))
    report.show_parts({"default": base, "without-a": beyond, "without-b": within}, Load(levels=(8,)), USUAL_HOST)
    rows = {line.split()[1].strip(","): line for line in capsys.readouterr().out.splitlines() if "without-" in line}
    assert {name: "*" in row for name, row in rows.items()} == {"without-a": True, "without-b": False}


@pytest.mark.parametrize(("holds", "found"), [(0, 0), (8, 8), (100, 100), (1000, measure.LADDER[-1])])
def test_capacity_is_the_most_streams_that_are_borne(monkeypatch: pytest.MonkeyPatch, holds: int, found: int) -> None:
    """Found by halves on one server: both ends of the ladder, and a rung between them."""

    def level(_server: Any, _load: Load, streams: float, _log: Path) -> tuple[dict[Figure, float], list[Capture]]:
        return {Figure.AUDIO_P99: 100.0, Figure.DRY_P99: 150.0 if streams <= holds else 151.0}, []

    monkeypatch.setattr(measure, "serving", lambda *_: nullcontext())
    monkeypatch.setattr(measure, "run_level", level)
    monkeypatch.setattr(measure, "figures", lambda _: dict.fromkeys(map(str, Figure), 50.0))
    said = measure.capacity(ARMS["poll"], LOAD, Path())
    assert said["capacity"] == found
    assert len(said["figures"]) <= 5


def test_a_run_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starts of the same load count, those of another do not, and a line that was cut off is made again."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    made: list[str] = []

    def measured(arm: Arm, _log: Path) -> dict[str, Any]:
        made.append(arm.name)
        return {}

    def go_on(of: Mapping[str, Any], starts: int = 2) -> list[int]:
        arms = (ARMS["default"], ARMS["poll"], ARMS["default"])
        found = whole_server.run_starts("r", arms, starts, measured, of=of)
        return list(map(len, found.values()))

    assert go_on({"load": LOAD}, 1) == [2, 1]
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write('{"arm": "poll", "of"')
    assert go_on({"load": LOAD}) == [4, 2]
    assert go_on({"load": LOAD}) == [4, 2]
    assert made == ["default", "poll", "default", "default", "poll", "default"]
    assert go_on({"load": Load(levels=(8,))}, 1) == [2, 1]


def test_an_arm_by_the_code_of_another_checkout() -> None:
    """It is named by that checkout's commit, and has all of the arm's variables and the place of the code."""
    usual, [older] = ARMS["with-queue_metrics"], named(f"with-queue_metrics@{ROOT}/docs/..")
    assert (older.name, older.event_driven) == (f"{usual.name}@{about.commit()}", None)
    assert older.environment == {**usual.environment, "PYTHONPATH": str(ROOT)}
    assert server_arms.environment(older).items() >= older.environment.items()


def test_pauses_in_text_and_in_audio_are_told_apart() -> None:
    """Pauses are measured between pieces of the same kind, whatever arrives between them."""
    pieces = [Piece(1.0, "a"), Piece(1.5, audio=b".."), Piece(4.0, "b"), Piece(4.5, audio=b"..")]
    capture = Capture(chat_request("Hello"), 0.0, pieces=pieces, e2e_s=5.0)
    found = figures([capture], 0.6)
    assert (found[Figure.GAP], found[Figure.TEXT_GAP_P99], round(found[Figure.PROCESS_MS])) == (3000.0, 3000.0, 600)


@pytest.mark.parametrize(("starts", "late_ms"), [(1, 0.1), (6, 0.1), (6, 7.0)])
def test_the_demo_ends_with_one_screen(starts: int, late_ms: float) -> None:
    """It fits a terminal, its sentence is the run's, and verdicts need six starts and engines that kept time."""

    def arm(waits: float) -> list[dict[str, Any]]:
        of = start({Figure.TEXT_P99: waits}, late_ms)["figures"]["64"]
        return [{"figures": dict.fromkeys(demo.LOADS, of), "answers": {key: ["a"] for key in demo.LOADS}}] * starts

    found = {"poll": arm(98.0), "event": arm(40.0), "default": arm(2.0)}
    lines = demo.screen(found, demo.LOADS)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    said = " ".join(lines)
    assert "takes 9.8 s on stock" in said
    assert "4.0 s with its event-driven loop" in said
    assert "0.2 s with the plugin" in said
    assert ("no verdict" in said) == (starts == 1)
    assert ("  better" in said) == (starts == 6 and late_ms < 5)
    assert ("MEASURED THIS MACHINE" in said) == (late_ms > 5)


def test_a_point_is_filled_where_it_is_shown_better_and_left_out_where_engines_were_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is filled where it is better than each stock loop, and red where worse than one. Late engines have none."""
    of_default = {Figure.TEXT_P99: 0.1, Figure.RATE: 0.9}
    arms: dict[str, dict[Figure, float]] = {"poll": {}, "event": {Figure.TEXT_P99: 0.5}, "default": of_default}
    load = dataclasses.asdict(Load(levels=(8, 64)))
    lines = [{"arm": arm, "load": load, **start(change, late_ms=7.0)} for arm, change in arms.items() for _ in range(6)]
    for line in lines:
        line["figures"]["8"] = {**line["figures"]["64"], Figure.ENGINES_LATE: 0.1}
    monkeypatch.setattr(results, "read", lambda _: lines)
    found = picture.read(["name"])
    rungs = found["audio"]
    assert Figure.TEXT_P99 in rungs[8].better
    assert Figure.RATE in rungs[8].worse
    assert (rungs[8].is_fit, rungs[64].is_fit) == (True, False)
    marks = [line for line in picture.draw(found) if "<circle" in line]
    assert len(marks) == len(picture.MARKS) + 5  # of the legend, and at 8 streams of the panels with audio
