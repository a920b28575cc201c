"""The demo's load, its rows, its words and its picture; no server is started."""

from __future__ import annotations

import pytest

pytest.importorskip("omni_simulated_device")
pytest.importorskip("matplotlib")

from benchmarks.demo import report
from benchmarks.demo.load import QUICK, SILENT, Load
from benchmarks.demo.measure import Start, measures
from benchmarks.rigs import user_arms, whole_server
from benchmarks.rigs.samples import Sample
from omni_fastpath.tools.ab import rows, verdict
from omni_fastpath.tools.ab.answers import compare, parity_line

LOAD = Load(streams=2, waves=2, paced=3, alone=1)


def _samples(count: int, ttfp: float) -> list[Sample]:
    return [
        Sample(place, ttfp / 2, ttfp * (1 + place / 10), 4 * ttfp, None, str(place), 10, gap=ttfp, dry=0.0)
        for place in range(count)
    ]


def _start(arm: str, ttfp: float) -> Start:
    engines = {"stage0_replica0": {"steps": 9, "work_us": 70.0, "late_p50_ms": 0.1, "late_p99_ms": 2.5}}
    waves = _samples(LOAD.streams * LOAD.waves, ttfp)
    proof = user_arms.Proof({"api": {}}, {})
    return Start(arm, _samples(1, ttfp), waves, _samples(3, ttfp), 2.0, 30.0, 20.0, engines, proof, {})


def _starts(an_arm: int) -> list[Start]:
    stock = [_start("stock", 0.2 + place / 1000) for place in range(an_arm)]
    return stock + [_start("fastpath", 0.1 + place / 1000) for place in range(an_arm)]


def test_the_device_configuration_is_one_the_device_accepts() -> None:
    """Step times and silent outputs are in force, and the deploy YAML is there."""
    from omni_simulated_device.config import load as device_settings

    settings = device_settings(Load().device)
    assert {name: settings.stage(name).base_ms for name in Load().step_ms} == dict(Load().step_ms)
    assert settings.stage("code2wav").silent == SILENT
    assert whole_server.deploy(Load().deploy).is_file()
    assert whole_server.deploy(QUICK.deploy).is_file()


def test_six_starts_an_arm_can_tell_every_row_that_is_named() -> None:
    """One primary row, and no more others than the default number of starts can decide."""
    found = rows.rows(measures(LOAD), _starts(verdict.STARTS))
    judged = [row for row in found if row.verdict is not None]
    assert sum(row.measure.primary for row in found) == 1
    assert len(judged) <= 10
    words = {row.measure.title: row.verdict.word for row in judged if row.verdict is not None}
    assert {word for title, word in words.items() if "throughput" not in title} == {"better"}
    assert [word for title, word in words.items() if "throughput" in title] == ["the same"]


def test_the_first_wave_is_not_among_the_later_ones() -> None:
    """As many requests as streams are the first wave."""
    values = {measure.name: measure.read(_start("stock", 0.1)) for measure in measures(LOAD)}
    assert values["TTFP first wave p50"] == pytest.approx(105)
    assert values["TTFP later waves p50"] == pytest.approx(125)


def test_a_row_shows_the_median_and_how_far_starts_lie_apart() -> None:
    """A single start lies nowhere."""
    [row, *_] = rows.rows(measures(LOAD), _starts(3))
    assert rows.by_arm(row)[:3] == ["TTFP p50, ms", "201 (200 to 202)", "101 (100 to 102)"]
    assert len(rows.by_arm(row)) == len(report.COLUMNS)
    [row, *_] = rows.rows(measures(LOAD), _starts(1))
    assert rows.by_arm(row)[1:] == ["200", "100", "0.50", "too few starts"]


def test_answers_are_compared_with_the_first_start() -> None:
    """By what a capture says of them; a difference is named, and the line says so."""
    answer = {"status": 200, "error": None, "audio_bytes": 10, "text": "a"}
    same = compare([("stock", [answer]), ("fastpath", [answer])])
    assert (same["comparisons"], same["failed"], same["differences"]) == (1, 0, [])
    assert "byte-identical" in parity_line(same)
    other = compare([("stock", [answer]), ("fastpath", [{**answer, "text": "b"}])])
    assert other["differences"] == ["start 2 (fastpath) against start 1 (stock): request 0: text: 'b' against 'a'"]
    assert "DID NOT ANSWER ALIKE" in parity_line(other)
