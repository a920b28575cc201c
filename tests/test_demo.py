"""The demo's loads, its rows, its words and its picture; no server is started."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("omni_simulated_device")
pytest.importorskip("matplotlib")

from benchmarks.demo import report
from benchmarks.demo.load import STAGES, loads
from benchmarks.demo.measure import ROWS, Start, measures
from benchmarks.rigs import user_arms, whole_server
from omni_fastpath.tools.ab import rows, verdict

LOADS = loads(2, quick=True)


def _start(arm: str, times: float) -> Start:
    engines = {"stage0_replica0": {"steps": 9, "work_us": 70.0, "late_p50_ms": 0.1, "late_p99_ms": 2.5}}
    figures = {load: {name: 2.0 if "throughput" in name else times for name in names} for load, names in ROWS.items()}
    requests = {name: [{"first_audio_s": times}] * 3 for name in LOADS}
    return Start(arm, figures, requests, 20.0, engines, user_arms.Proof({"api": {}}, {}), {})


def _starts(an_arm: int) -> list[Start]:
    stock = [_start("stock", 200 + place) for place in range(an_arm)]
    return stock + [_start("fastpath", 100 + place) for place in range(an_arm)]


def test_the_device_configuration_is_one_the_device_accepts() -> None:
    """Step times and silent outputs are in force, and the deploy YAML is there."""
    import json

    from omni_simulated_device.config import load as device_settings

    settings = device_settings(json.dumps({"stages": STAGES}))
    for name, wanted in STAGES.items():
        assert msgspec.structs.asdict(settings.stage(name)).items() >= wanted.items()
    assert all(whole_server.deploy(load.deploy).is_file() for load in loads().values())


def test_six_starts_an_arm_can_tell_every_row_that_is_named() -> None:
    """One primary row, and no more others than the default number of starts can decide."""
    found = rows.rows(measures(LOADS), _starts(verdict.STARTS))
    judged = [row for row in found if row.verdict is not None]
    assert sum(row.measure.primary for row in found) == 1
    assert {len(rows.by_arm(row)) for row in found} == {len(report.COLUMNS)}
    assert len(judged) <= 10
    words = {row.measure.title: row.verdict.word for row in judged if row.verdict is not None}
    assert {word for title, word in words.items() if "throughput" not in title} == {"better"}
    assert [word for title, word in words.items() if "throughput" in title] == ["the same"]
