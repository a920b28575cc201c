"""The parity run's arithmetic, its table, its checks of an arm and its report; no server is started."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omni_simulated_device")
pytest.importorskip("jinja2")

from rich.console import Console

from benchmarks.parity import figures, report
from benchmarks.parity.__main__ import main
from benchmarks.parity.figures import Start
from benchmarks.parity.load import BASE, QUICK, REPLICAS, STAGES, Load
from benchmarks.parity.measure import CpuMeter, Outcome
from benchmarks.parity.words import describe, heading
from benchmarks.rigs import server_arms as serving
from benchmarks.rigs import user_arms
from benchmarks.rigs.samples import Sample, in_wave, times
from benchmarks.rigs.side_by_side import plan
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import PatchRecord, Snapshot
from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.answers import compare, parity_line
from omni_fastpath.tools.ab.arm import WrongArmError
from omni_fastpath.tools.ab.capture import Capture, Event
from omni_fastpath.tools.ab.errors import MeasureError
from omni_fastpath.tools.ab.page import render
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.rows import Better, Measure, Row

PRIMARY = f"{figures.PRIMARY} ({figures.OPEN_LOOP})"
LATER = "later waves, p50 (time to first audio packet (TTFP), capture client)"
ORDER = ["stock", "fastpath", "fastpath", "stock"]


def _sample(order_: int, ttfp: float, *, error: str | None = None) -> Sample:
    return Sample(order_, ttft=ttfp / 2, ttfp=ttfp, e2e=4 * ttfp, error=error, digest=str(order_), audio_bytes=10)


def _start(arm: str, throughput: float = 2.0, ttfp: float = 0.1, *, count: int = 8) -> Start:
    samples = [_sample(place, ttfp * (1 + place / 10)) for place in range(count)]
    return Start(arm, throughput, 0, 4.0, {"api": 2.0, "stage0_replica0": 1.0}, samples, 60.0, samples)


def _row(stock: list[float], fastpath: list[float], better: Better = "higher") -> Row:
    return Row(
        Measure("group", "name", "", better, lambda start: start.throughput), {"stock": stock, "fastpath": fastpath}
    )


# ---- Load and waves ----


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
    assert [sample.order for sample in in_wave(samples, "first", 2)] == [0, 1]
    assert [sample.order for sample in in_wave(samples, "later", 2)] == [2, 3, 4, 5]


def test_failed_requests_have_no_times() -> None:
    """The time of an error is not a latency."""
    assert times([_sample(0, 0.1), _sample(1, 0.2, error="503")], "ttfp") == [0.1]


def test_a_wave_in_which_everything_failed_has_no_figure() -> None:
    """It shows a dash, and its row no verdict and no difference."""
    assert rows.shown(math.nan, 2) == "-"
    assert _row([math.nan, 1.0], [1.0, 1.0]).exceeds_spread is None
    starts = _starts(6)
    failed = [dataclasses.replace(each, error="503") for each in starts[0].samples]
    starts[0] = dataclasses.replace(starts[0], samples=failed)
    found = {row.measure.title: row.verdict for row in figures.table(starts, 2)}
    assert found[LATER] is None
    assert found[PRIMARY] is not None


# ---- Rows ----


@pytest.mark.parametrize(
    ("stock", "fastpath", "exceeds"),
    [
        ([1.0, 1.2], [2.0, 2.1], True),
        ([2.0, 2.1], [1.0, 1.2], True),
        ([1.0, 2.0], [1.6, 1.7], False),  # the difference, 0.15, is within stock's own spread
        ([1.0, 1.0], [1.0, 1.0], False),
        ([1.0, 1.5], [2.0, 2.0], True),
        ([1.0, 2.0], [2.5, 2.5], False),  # as large as the spread is not larger
        ([1.0], [9.0], None),
    ],
)
def test_a_difference_is_described_beside_the_wider_spread(
    stock: list[float], fastpath: list[float], exceeds: bool | None
) -> None:
    """Also when the difference is to our disadvantage; a single start has no spread."""
    assert _row(stock, fastpath).exceeds_spread is exceeds


def _starts(an_arm: int) -> list[Start]:
    """Starts in which fastpath has more throughput and later audio, always."""
    stock = [_start("stock", 2.0 + place / 100, 0.1 + place / 1000) for place in range(an_arm)]
    return stock + [_start("fastpath", 3.0 + place / 100, 0.2 + place / 1000) for place in range(an_arm)]


@pytest.mark.parametrize(
    ("starts", "primary", "throughput"),
    [
        (2, "too few starts", "too few starts"),
        (4, "worse", "too few starts"),
        (6, "worse", "better"),
    ],
)
def test_four_starts_an_arm_do_for_the_primary_row_and_six_for_all(starts: int, primary: str, throughput: str) -> None:
    """The summary says so while they are fewer; rows that nobody named beforehand have no verdict."""
    table = figures.table(_starts(starts), 2)
    found = {row.measure.title: row.verdict for row in table if row.verdict is not None}
    assert len(found) == 10
    assert found[PRIMARY].word == primary
    assert found["throughput (vllm bench serve --omni)"].word == throughput
    said = " ".join(rows.summary(table))
    assert (f"With {starts} starts an arm: 4 would do for {PRIMARY}, 6 for all." in said) == (starts < 6)
    assert f"Of all {len(table)} rows, the arms differ by more than the wider spread" in said


def test_without_an_open_loop_there_is_no_verdict() -> None:
    """The primary measure is its; no other takes its place afterwards."""
    starts = [dataclasses.replace(each, paced=()) for each in _starts(6)]
    table = figures.table(starts, 2)
    assert all(row.verdict is None for row in table)
    assert "There is no verdict" in rows.summary(table)[0]


def test_ratio_is_the_median_of_all_pairs() -> None:
    """Over a zero, such as no failure in either arm, there is none."""
    assert _row([1.0, 2.0], [3.0, 5.0]).ratio == pytest.approx((2.5 + 3.0) / 2)
    assert _row([0.0, 0.0], [0.0, 0.0]).ratio is None


def test_the_table_has_every_measure_and_column() -> None:
    """Bench, then first and later waves of each time, a column for each start."""
    starts = [_start("stock"), _start("fastpath", 3.0, 0.05), _start("fastpath", 3.1, 0.05), _start("stock", 2.1)]
    table = figures.table(starts, concurrency=2)
    head = rows.header(starts)
    assert head[:5] == ["measure", "stock 1", "stock 2", "fastpath 1", "fastpath 2"]
    assert {len(rows.cells(row)) for row in table} == {len(head)}
    cells = {(row.measure.group, row.measure.name): rows.cells(row) for row in table}
    throughput = cells["vllm bench serve --omni", "throughput"]
    assert throughput[1:] == ["2.00", "2.10", "3.00", "3.10", "0.10", "0.10", "1.49", "too few starts"]
    groups = {row.measure.group for row in table}
    assert sum("TTFP" in group for group in groups) == sum("E2E" in group for group in groups) == 1
    first = cells["time to first audio packet (TTFP), capture client", "first wave, p50"]
    later = cells["time to first audio packet (TTFP), capture client", "later waves, p50"]
    assert first[1] == "105"
    assert later[1] == "145"
    assert "One start an arm has no spread." in rows.summary(figures.table(starts[:2], 2))


# ---- The proof of an arm ----


def _snapshots(arm: str) -> dict[str, Snapshot]:
    """State files of a true server of the arm, by role."""
    roles = serving.roles(STAGES, REPLICAS)
    return {role: _snapshot(arm, Process.SERVER if role == "api" else Process.STAGE) for role in roles}


def _snapshot(arm: str, process: Process) -> Snapshot:
    patches = {}
    for patch in PATCHES:
        if arm == "stock" or patch.name not in user_arms.FASTPATH.enabled:
            patches[patch.name] = PatchRecord(state=State.OFF, reason="OMNI_FASTPATH=0")
        elif process in patch.processes:
            patches[patch.name] = PatchRecord(
                state=State.APPLIED, counters={user_arms.ENGAGED.get(patch.name, "any"): 5}
            )
        else:
            patches[patch.name] = PatchRecord(state=State.NOT_APPLICABLE, reason="another process")
    return Snapshot(
        schema=2,
        pid=1,
        started=1,
        boot="",
        namespace=1,
        ppid=1,
        role=process,
        process_name="",
        omni_fastpath="",
        vllm=None,
        vllm_omni=None,
        updated=0.0,
        source=None,
        patches=patches,
    )


def test_each_arm_is_on_by_the_means_that_a_user_has() -> None:
    """Stock by OMNI_FASTPATH=0, fastpath by its deploy YAML alone; anything else is not that arm."""
    user_arms.check_means(user_arms.STOCK, {"OMNI_FASTPATH": "0", "HOME": "/"})
    user_arms.check_means(user_arms.FASTPATH, {"HOME": "/"})
    with pytest.raises(WrongArmError, match=r"no fastpath arm.*OMNI_FASTPATH_BUDGETED_DRAIN"):
        user_arms.check_means(user_arms.FASTPATH, {"OMNI_FASTPATH_BUDGETED_DRAIN": "1"})
    with pytest.raises(WrongArmError, match="no stock arm"):
        user_arms.check_means(user_arms.STOCK, {})


def test_the_counters_are_the_api_servers() -> None:
    """What the report shows of a server."""
    proof = user_arms.proof_of(_snapshots("fastpath"))
    assert proof.counters["budgeted_drain"] == {"items": 5}
    assert proof.processes["stage0_replica1"]["budgeted_drain"]["state"] == "not_applicable"


def test_applied_but_idle_is_refused() -> None:
    """A counter that moved less than once a request means that the patch did not do the work."""
    snapshots = _snapshots("fastpath")
    before = user_arms.proof_of(snapshots)
    for name, event in user_arms.ENGAGED.items():
        snapshots["api"].patches[name].counters[event] = 15
    after = user_arms.proof_of(snapshots)
    assert user_arms.check_engaged(before, after, 10)["nonblocking_dequeue"] == {"dequeued": 10}
    with pytest.raises(WrongArmError, match="items moved by 10 during 11 requests"):
        user_arms.check_engaged(before, after, 11)


def test_nothing_of_this_shell_reaches_an_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that the user has exported would make an arm what it does not say."""
    monkeypatch.setenv("OMNI_FASTPATH_BUDGETED_DRAIN", "0")
    monkeypatch.setenv("OMNI_FASTPATH", "1")
    stock = user_arms.environment(user_arms.STOCK, "{}", tmp_path)
    fastpath = user_arms.environment(user_arms.FASTPATH, "{}", tmp_path)
    assert stock["OMNI_FASTPATH"] == "0"
    assert stock["OMNI_FASTPATH_BUDGETED_DRAIN"] is None
    assert fastpath["OMNI_FASTPATH"] is fastpath["OMNI_FASTPATH_BUDGETED_DRAIN"] is None


def test_the_fastpath_arm_is_the_overlay_that_a_user_writes(tmp_path: Path) -> None:
    """``fastpath: true`` on top of the base, and nothing else; the stock arm is the base itself."""
    import yaml

    assert user_arms.deploy_config(user_arms.STOCK, BASE, tmp_path) == BASE
    written = yaml.safe_load(user_arms.deploy_config(user_arms.FASTPATH, BASE, tmp_path).read_text(encoding="utf-8"))
    assert written == {"base_config": str(BASE.resolve()), "fastpath": True}


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
    moved = {"budgeted_drain": {"items": 7, "longest_stretch_us": 0}} if arm == "fastpath" else {}
    return Outcome(_start(arm, throughput), captures, user_arms.proof_of(_snapshots(arm)), moved, {"duration": 4.0})


def _outcomes(audio: bytes = b"sound") -> list[Outcome]:
    return [
        _outcome("stock", 2.0, [_capture(0), _capture(1)]),
        _outcome("fastpath", 3.0, [_capture(0), _capture(1, audio)]),
        _outcome("fastpath", 3.1, [_capture(0), _capture(1)]),
        _outcome("stock", 2.1, [_capture(0), _capture(1)]),
    ]


def _compared(outcomes: list[Outcome]) -> dict[str, Any]:
    return compare([(each.start.arm, [one.answer() for one in each.captures]) for each in outcomes])


def _reported(outcomes: list[Outcome], load: Load) -> tuple[dict[str, Any], str]:
    about = describe(load, ORDER, 60.0)
    table = figures.table([outcome.start for outcome in outcomes], load.concurrency)
    parity = _compared(outcomes)
    return report.plain(outcomes, table, parity, about), render(report.page(outcomes, table, parity, about, load))


def test_the_report_needs_nothing_else_and_says_it_all() -> None:
    """Nothing to load; the page's pictures and two more; the table's figures; the overlay; how to run it again."""
    pytest.importorskip("plotly")
    data, page = _reported(_outcomes(), QUICK)
    assert json.loads(json.dumps(data))["rows"][0]["verdict"]["word"] == "too few starts"
    page = page[page.index("<body>") :]
    assert not re.search(r"<(?:link|img|iframe)\b|@import|(?:href|src)\s*=", page)
    assert page.count('id="picture-') == 5
    assert "3.10" in page
    assert "fastpath: true" in page
    assert "python -m benchmarks.parity --concurrency 4" in page
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
    parity = _compared(_outcomes())
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


@pytest.mark.parametrize(("starts", "decides"), [(1, False), (2, False), (4, True), (6, True)])
def test_the_demo_says_beforehand_whether_it_can_decide(starts: int, decides: bool) -> None:
    """With too few starts for any verdict it says so before it begins, and how many would do."""
    said = plan("This", "make it", ["stock", "fastpath"] * starts, 1.7)
    assert f"starts {2 * starts} servers" in said[0]
    assert ("--starts 6" in " ".join(said)) == (not decides)
