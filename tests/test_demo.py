"""The demo's arithmetic, its table, its checks of an arm and its report; no server is started."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omni_simulated_device")
pytest.importorskip("matplotlib")

from rich.console import Console

from benchmarks.demo import arms, figures
from benchmarks.demo.__main__ import main
from benchmarks.demo.figures import Measure, Row, Sample, Start
from benchmarks.demo.load import QUICK, Load, order
from benchmarks.demo.measure import CpuMeter, MeasureError, Outcome
from benchmarks.demo.progress import Phases
from benchmarks.demo.words import compare, describe, heading, parity_line
from benchmarks.serving.capture import Capture, Event
from omni_fastpath.declare import State
from omni_fastpath.statefile import PatchRecord


def _sample(order_: int, ttfp: float, *, error: str | None = None) -> Sample:
    return Sample(order_, ttft=ttfp / 2, ttfp=ttfp, e2e=4 * ttfp, error=error, digest=str(order_), audio_bytes=10)


def _start(arm: str, throughput: float = 2.0, ttfp: float = 0.1, *, count: int = 8) -> Start:
    samples = [_sample(place, ttfp * (1 + place / 10)) for place in range(count)]
    return Start(arm, throughput, 0, 4.0, {"api": 2.0, "stage0_replica0": 1.0}, samples, 60.0)


def _row(stock: list[float], fastpath: list[float], better: figures.Better = "higher") -> Row:
    return Row(
        Measure("group", "name", "", better, lambda start: start.throughput), {"stock": stock, "fastpath": fastpath}
    )


# ---- Load and waves ----


def test_the_order_of_starts_mirrors_each_pair() -> None:
    """Drift over the run must hit both arms alike."""
    assert order(1) == ["stock", "fastpath"]
    assert order(2) == ["stock", "fastpath", "fastpath", "stock"]
    assert order(3)[4:] == ["stock", "fastpath"]


def test_every_start_gets_the_same_requests() -> None:
    """Four waves of prompts of one length, the same again when asked again, none among them of the warm-up."""
    load = Load(concurrency=3, input_tokens=12, output_tokens=7)
    requests = load.capture_requests()
    assert requests == load.capture_requests()
    assert len(requests) == load.requests == 12
    prompts = [request.body["messages"][0]["content"] for request in requests]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len(set(prompts)) == len(prompts)
    assert not {request.body["messages"][0]["content"] for request in load.warm_up_requests()} & set(prompts)
    assert all(request.body["max_tokens"] == 7 and request.body["ignore_eos"] for request in requests)


def test_the_device_configuration_is_one_the_device_accepts() -> None:
    """The simulated device refuses unknown keys; the step times are in force."""
    from omni_simulated_device.config import load as device_settings

    settings = device_settings(Load().device)
    assert {name: settings.stage(name).base_ms for name in Load().step_ms} == dict(Load().step_ms)


def test_waves_are_blocks_in_start_order() -> None:
    """Captures may come in any order; a wave goes by when a request was started."""
    samples = [_sample(place, 0.1) for place in (5, 0, 3, 1, 4, 2)]
    assert [sample.order for sample in figures.in_wave(samples, "first", 2)] == [0, 1]
    assert [sample.order for sample in figures.in_wave(samples, "later", 2)] == [2, 3, 4, 5]


def test_failed_requests_have_no_times() -> None:
    """The time of an error is not a latency."""
    assert figures.times([_sample(0, 0.1), _sample(1, 0.2, error="503")], "ttfp") == [0.1]


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([3.0], 0.99, 3.0), ([1.0, 2.0, 3.0], 0.5, 2.0), ([1.0, 2.0], 0.25, 1.25)]
)
def test_percentile_interpolates(values: list[float], share: float, expected: float) -> None:
    """As the usual definition has it."""
    assert figures.percentile(values, share) == pytest.approx(expected)


def test_percentile_of_nothing_is_no_number() -> None:
    """A wave in which everything failed shows a dash, and no verdict."""
    assert math.isnan(figures.percentile([], 0.5))
    assert figures.shown(math.nan, 2) == "-"
    assert _row([math.nan, 1.0], [1.0, 1.0]).verdict == "unknown"


# ---- Rows ----


@pytest.mark.parametrize(
    ("stock", "fastpath", "better", "verdict"),
    [
        ([1.0, 1.2], [2.0, 2.1], "higher", "yes, better"),
        ([1.0, 1.2], [2.0, 2.1], "lower", "yes, worse"),
        ([2.0, 2.1], [1.0, 1.2], "lower", "yes, better"),
        ([1.0, 2.0], [1.6, 1.7], "higher", "no"),  # the difference, 0.15, is within stock's own spread
        ([1.0, 1.0], [1.0, 1.0], "higher", "no"),
        ([1.0, 1.5], [2.0, 2.0], "higher", "yes, better"),
        ([1.0, 2.0], [2.5, 2.5], "higher", "no"),  # as large as the spread is not larger
        ([1.0, 1.2], [2.0, 2.1], "neither", "yes"),
        ([1.0], [9.0], "higher", "unknown"),
    ],
)
def test_a_difference_counts_beyond_the_wider_spread(
    stock: list[float], fastpath: list[float], better: figures.Better, verdict: str
) -> None:
    """Also when the difference is to our disadvantage."""
    assert _row(stock, fastpath, better).verdict == verdict


def test_ratio_is_of_the_means() -> None:
    """Over a zero, such as no failure in either arm, there is none."""
    assert _row([1.0, 3.0], [3.0, 5.0]).ratio == 2.0
    assert _row([0.0, 0.0], [0.0, 0.0]).ratio is None


def test_the_table_has_every_measure_and_column() -> None:
    """Bench, then first and later waves of each time, a column for each start."""
    starts = [_start("stock"), _start("fastpath", 3.0, 0.05), _start("fastpath", 3.1, 0.05), _start("stock", 2.1)]
    table = figures.rows(starts, concurrency=2)
    head = figures.header(starts)
    assert head[:5] == ["measure", "stock 1", "stock 2", "fastpath 1", "fastpath 2"]
    assert {len(figures.cells(row)) for row in table} == {len(head)}
    cells = {(row.measure.group, row.measure.name): figures.cells(row) for row in table}
    throughput = cells["vllm bench serve --omni", "throughput"]
    assert throughput[1:] == ["2.00", "2.10", "3.00", "3.10", "0.10", "0.10", "1.49", "yes, better"]
    groups = {row.measure.group for row in table}
    assert sum("TTFP" in group for group in groups) == sum("E2E" in group for group in groups) == 1
    first = cells["time to first audio packet (TTFP), capture client", "first wave, p50"]
    later = cells["time to first audio packet (TTFP), capture client", "later waves, p50"]
    assert first[1] == "105"
    assert later[1] == "145"
    assert "better in" in figures.summary(table)
    assert "nothing can be said" in figures.summary(figures.rows(starts[:2], 2))


# ---- The proof of an arm ----

_ROLES = {"api", *(f"stage{stage}_replica{replica}" for stage in range(3) for replica in range(2))}


def _states(arm: str) -> dict[str, dict[str, PatchRecord]]:
    off = PatchRecord(state=State.OFF, reason="OMNI_FASTPATH=0")
    elsewhere = PatchRecord(state=State.NOT_APPLICABLE, reason="another process")
    states = {}
    for role in _ROLES:
        if arm == "stock":
            states[role] = dict.fromkeys(arms.ENGAGED, off)
        elif role == "api":
            states[role] = {
                name: PatchRecord(state=State.APPLIED, counters={event: 5}) for name, event in arms.ENGAGED.items()
            }
        else:
            states[role] = dict.fromkeys(arms.ENGAGED, elsewhere)
    return states


def test_a_true_arm_passes() -> None:
    """Each arm as it should be; the counters are the API server's."""
    arms.check("stock", _states("stock"), _ROLES, {"OMNI_FASTPATH": "0"})
    proof = arms.check("fastpath", _states("fastpath"), _ROLES, {})
    assert proof.counters["budgeted_drain"] == {"items": 5}


@pytest.mark.parametrize(("claimed", "really"), [("stock", "fastpath"), ("fastpath", "stock")])
def test_the_other_arm_is_refused(claimed: str, really: str) -> None:
    """The figures of one arm never stand under the other's name."""
    environment = {"OMNI_FASTPATH": "0"} if really == "stock" else {}
    with pytest.raises(arms.WrongArmError, match=f"no {claimed} arm"):
        arms.check(claimed, _states(really), _ROLES, environment)


def test_a_lying_process_is_named() -> None:
    """One process that has no state file, one patch that failed, one that is off for another reason."""
    states = _states("fastpath")
    del states["stage2_replica1"]
    states["api"]["budgeted_drain"] = PatchRecord(state=State.FAILED, reason="a seam")
    with pytest.raises(arms.WrongArmError) as caught:
        arms.check("fastpath", states, _ROLES, {"OMNI_FASTPATH_BUDGETED_DRAIN": "1"})
    assert "stage2_replica1 has no state file" in str(caught.value)
    assert "api: budgeted_drain is failed (a seam), wanted applied" in str(caught.value)
    assert "has OMNI_FASTPATH_BUDGETED_DRAIN in its environment" in str(caught.value)
    states = _states("stock")
    states["stage0_replica0"]["final_output_wakeup"] = PatchRecord(state=State.OFF, reason="not asked for")
    with pytest.raises(arms.WrongArmError, match="off because of 'not asked for'"):
        arms.check("stock", states, _ROLES, {"OMNI_FASTPATH": "0"})
    with pytest.raises(arms.WrongArmError, match="no OMNI_FASTPATH=0"):
        arms.check("stock", _states("stock"), _ROLES, {})


def test_applied_but_idle_is_refused() -> None:
    """A counter that moved less than once a request means that the patch did not do the work."""
    before = arms.check("fastpath", _states("fastpath"), _ROLES, {})
    states = _states("fastpath")
    for name, event in arms.ENGAGED.items():
        states["api"][name] = PatchRecord(state=State.APPLIED, counters={event: 15})
    after = arms.check("fastpath", states, _ROLES, {})
    assert arms.check_engaged(before, after, 10)["nonblocking_dequeue"] == {"dequeued": 10}
    with pytest.raises(arms.WrongArmError, match="items moved by 10 during 11 requests"):
        arms.check_engaged(before, after, 11)


def test_nothing_of_this_shell_reaches_an_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that the user has exported would make an arm what it does not say."""
    monkeypatch.setenv("OMNI_FASTPATH_BUDGETED_DRAIN", "0")
    monkeypatch.setenv("OMNI_FASTPATH", "1")
    stock = arms.environment("stock", "{}", tmp_path)
    fastpath = arms.environment("fastpath", "{}", tmp_path)
    assert stock["OMNI_FASTPATH"] == "0"
    assert stock["OMNI_FASTPATH_BUDGETED_DRAIN"] is None
    assert fastpath["OMNI_FASTPATH"] is fastpath["OMNI_FASTPATH_BUDGETED_DRAIN"] is None


def test_the_fastpath_arm_is_the_overlay_that_a_user_writes(tmp_path: Path) -> None:
    """``fastpath: true`` on top of the base, and nothing else; the stock arm is the base itself."""
    import yaml

    assert arms.deploy_config("stock", arms.BASE, tmp_path) == arms.BASE
    written = yaml.safe_load(arms.deploy_config("fastpath", arms.BASE, tmp_path).read_text(encoding="utf-8"))
    assert written == {"base_config": str(arms.BASE.resolve()), "fastpath": True}


# ---- Measuring ----


class _Counting:
    """A server whose processor time is told by a list."""

    def __init__(self, *used: float) -> None:
        self._used = list(used)

    def cpu_seconds(self) -> dict[str, float]:
        return {"api": self._used.pop(0) if len(self._used) > 1 else self._used[0]}


def test_processor_time_is_read_for_the_load_alone() -> None:
    """Between two samples it is interpolated; a load outside of the samples is an error, not a guess."""
    meter = CpuMeter(_Counting(0.0))  # type: ignore[arg-type]
    meter._times = [10.0, 20.0, 30.0]
    meter._used = [{"api": 0.0}, {"api": 5.0}, {"api": 6.0}]
    assert meter.between(12.0, 20.0) == {"api": pytest.approx(4.0)}
    assert meter.between(10.0, 30.0) == {"api": pytest.approx(6.0)}
    with pytest.raises(MeasureError, match="not within"):
        meter.between(9.0, 20.0)


def test_the_meter_samples_until_it_is_left() -> None:
    """Also when what it measures raises."""
    meter = CpuMeter(_Counting(1.0, 2.0))  # type: ignore[arg-type]
    begun = time.perf_counter()
    with pytest.raises(ZeroDivisionError), meter.running():
        raise ZeroDivisionError
    assert begun <= meter._times[0] < meter._times[-1] <= time.perf_counter()


# ---- Report ----


def _capture(place: int, audio: bytes = b"sound") -> Capture:
    request = QUICK.capture_requests()[place]
    events = [Event("audio", 0.1, {"modality": "audio", "finish_reason": "stop"}, audio)]
    return Capture(request, place, 0.0, 200, events, e2e_s=0.2)


def _outcome(arm: str, throughput: float, captures: list[Capture]) -> Outcome:
    states = arms.check(arm, _states(arm), _ROLES, {"OMNI_FASTPATH": "0"} if arm == "stock" else {})
    moved = {"budgeted_drain": {"items": 7, "longest_stretch_us": 0}} if arm == "fastpath" else {}
    return Outcome(_start(arm, throughput), captures, states, moved, {"duration": 4.0})


def _outcomes(audio: bytes = b"sound") -> list[Outcome]:
    return [
        _outcome("stock", 2.0, [_capture(0), _capture(1)]),
        _outcome("fastpath", 3.0, [_capture(0), _capture(1, audio)]),
        _outcome("fastpath", 3.1, [_capture(0), _capture(1)]),
        _outcome("stock", 2.1, [_capture(0), _capture(1)]),
    ]


def _reported(outcomes: list[Outcome], load: Load) -> tuple[dict[str, Any], str]:
    from benchmarks.demo import report

    about = describe(load, order(2), 60.0)
    table = figures.rows([outcome.start for outcome in outcomes], load.concurrency)
    parity = compare(outcomes)
    return report.plain(outcomes, table, parity, about), report.page(outcomes, table, parity, about, load)


def test_the_report_needs_nothing_else_and_says_it_all() -> None:
    """No address of anything to load; three plots; the table's figures; the overlay; how to run it again."""
    data, page = _reported(_outcomes(), QUICK)
    assert json.loads(json.dumps(data))["rows"][0]["verdict"] == "yes, better"
    addresses = re.findall(r"(?:href|src)\s*=\s*[\"']([^\"']*)", page) + re.findall(r"url\(([^)]*)", page)
    assert addresses
    assert all(address.startswith("#") for address in addresses)
    assert not re.search(r"<(?:script|link|img|iframe)\b|@import", page)
    assert page.count("<svg") == 3
    assert "3.10" in page
    assert "fastpath: true" in page
    assert "python -m benchmarks.demo --concurrency 4" in page
    assert "byte-identical" in page
    assert all(line.split(";")[0].split(",")[0] in page for line in heading(data["about"]))


def test_arms_that_answer_differently_are_said_to() -> None:
    """In the report, in the line under the table, and in the numbers."""
    data, page = _reported(_outcomes(b"noise"), QUICK)
    assert data["parity"]["differences"][0].startswith("start 2 (fastpath) against start 1 (stock): request 1: audio")
    assert "DID NOT ANSWER ALIKE" in page
    assert "byte-identical" not in page
    assert "DID NOT ANSWER ALIKE" in parity_line(data["parity"])


def test_comparisons_are_counted() -> None:
    """Each start after the first is compared with the first."""
    parity = compare(_outcomes())
    assert (parity["starts"], parity["requests"], parity["comparisons"]) == (4, 2, 6)
    assert "2 requests in each of 4 starts, 6 comparisons" in parity_line(parity)


# ---- Progress and command line ----


def test_phases_are_said_with_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    """One line when a phase begins and one when it ends, also when it fails."""
    phases = Phases(Console(file=sys.stdout, width=80), 2)
    with phases.running():
        with phases.phase("first [bold]"):
            pass
        with pytest.raises(ValueError, match="no"), phases.phase("second"):
            raise ValueError("no")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[0-9.]+ s\b", "T", line) for line in lines] == [
        "[    T]    ... first [bold]",
        "[    T]   done first [bold]: T",
        "[    T]    ... second",
        "[    T] failed second: failed after T",
    ]


@pytest.mark.parametrize("arguments", [["--starts", "0"], ["--concurrency", "-1"], ["--concurrency", "x"], ["--fast"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Named, before anything is started."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
