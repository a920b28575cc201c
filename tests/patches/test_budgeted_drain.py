"""The drain on the real orchestrator: passes and their ends, and messages as on stock's."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import ExitStack, nullcontext
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm_omni")

import torch
from vllm.v1.engine import FinishReason

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text
from omni_fastpath.ledger import LEDGER
from tests.patches.content import plain, sequences
from tests.patches.drive import before_processing, only, run, switched_on
from tests.patches.lines import InjectedError
from tests.patches.test_queue_metrics import DRAIN, TALKER, filled

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release


# ---- Passes ----


def test_audio_takes_turns_with_what_arrived_earlier(recorder: Any) -> None:
    """A raw output in which a request ends waits for its place, and so does what its replica sent after it."""
    pipeline = Pipeline()
    for name in ("one", "two"):
        pipeline.add_request(name)
    texts = [(0, batch(text("one", token))) for token in range(4)]
    audios = [(2, batch(audio("one", 0.1))) for _ in range(3)]
    queued = [*texts, *audios[:2], (2, batch(audio("two", 0.1, finish=FinishReason.STOP))), audios[2]]

    def arrive() -> None:
        for stage, raw in queued:
            pipeline.replicas[stage][0].outputs_queue.put_nowait(raw)

    with switched_on():
        run(pipeline, lambda _: pipeline.do(arrive))
    assert [stage for stage, _, _ in recorder.of("dequeued")] == [2, 0, 2, 0, 0, 0, 2, 2]


def test_nothing_overtakes_an_arrival_without_a_place() -> None:
    """After a failed arrival later ones get no place, so that a request's end waits for what came before it."""
    from omni_fastpath.patches.budgeted_drain.drain import Drain

    class Broken(OrderedDict[int, Any]):
        def __setitem__(self, _place: int, _replica: Any) -> None:
            raise InjectedError

    pipeline, stages = Pipeline(), list[int]()
    pipeline.add_request("one")
    before_processing(pipeline, lambda stage, _: stages.append(stage))

    def arrive() -> None:
        (drain,) = Drain.running
        drain._line = Broken()
        pipeline.replicas[0][0].outputs_queue.put_nowait(batch(text("one", 1, finish=FinishReason.STOP)))
        drain._line = OrderedDict()
        pipeline.replicas[2][0].outputs_queue.put_nowait(batch(audio("one", 0.1, finish=FinishReason.STOP)))

    with switched_on():
        run(pipeline, lambda _: pipeline.do(arrive))
    assert stages == [0, 2]


def test_nothing_overtakes_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception just before a raw output is taken, each queued one is still dispatched in its place."""
    is_gone = Mock(side_effect=chain([InjectedError], repeat(False)))
    monkeypatch.setattr("omni_fastpath.patches.budgeted_drain.replicas.Replica.is_gone", is_gone)
    pipeline, stages = Pipeline(), list[int]()
    pipeline.add_request("one")
    before_processing(pipeline, lambda stage, _: stages.append(stage))
    pipeline.put(0, batch(text("one", 1)), batch(text("one", 2, finish=FinishReason.STOP)))
    pipeline.put(2, batch(audio("one", 0.1, finish=FinishReason.STOP)))
    with switched_on():
        run(pipeline)
    assert stages == [0, 0, 2]


def test_time_budget_ends_a_pass_and_is_counted(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processing is slow, a pass ends on the time budget and is counted as such."""
    from omni_fastpath.patches.budgeted_drain import drain

    clock = count(0, 40_000)  # each reading is so many nanoseconds later, however busy the machine is
    monkeypatch.setattr(drain, "perf_counter_ns", lambda: next(clock))
    pipeline = Pipeline()
    pipeline.add_request("one")
    pipeline.put(2, *(batch(silent("one")) for _ in range(9)))
    with switched_on(max_time_us=100):
        run(pipeline)
    passes = [(report.items, report.ended, report.queued) for (report,) in recorder.of("pass")]
    assert passes == [(3, "time", 6), (3, "time", 3), (3, "empty", 0)]
    assert LEDGER.named("budgeted_drain").counters["ended_time"] == 2


@pytest.mark.usefixtures("installed")
def test_processing_error_ends_the_orchestrator_as_upstream_ends_it() -> None:
    """An exception from upstream's processing is not swallowed: the orchestrator's thread ends with it."""
    pipeline = Pipeline()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("processing")

    before_processing(pipeline, broken)
    pipeline.put(2, batch(silent("one")))
    with pipeline:
        pipeline._thread.join(10)
    assert isinstance(pipeline.crash, ZeroDivisionError)


def test_loop_yields_after_each_pass(recorder: Any) -> None:
    """After so many raw outputs a pass ends and other tasks run; both are counted."""
    ran_between: list[int] = []
    pipeline = Pipeline()
    pipeline.add_request("one")
    pipeline.put(2, *(batch(silent("one")) for _ in range(8)))

    def processed(*_: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: ran_between.append(len(recorder.of("dequeued"))))

    before_processing(pipeline, processed)
    with switched_on(max_items=2, max_time_us=1_000_000):
        run(pipeline)
    assert ran_between == [2, 2, 4, 4, 6, 6, 8, 8]
    counters = LEDGER.named("budgeted_drain").counters
    assert [counters[name] for name in ("items", "ended_items", "ended_empty")] == [8, 3, 1]


@pytest.mark.usefixtures("installed")
def test_monitor_is_told(event_driven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's monitor gets the backlog in event-driven mode until it is empty, and nothing in poll mode."""
    from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor  # not on every release

    monkeypatch.setenv("VLLM_OMNI_ORCH_MONITOR_PATH", str(tmp_path / "monitor.json"))
    told: list[int] = []

    monkeypatch.setattr(OrchestratorMonitor, "set_dispatch_queue_size", lambda _self, size: told.append(size))
    made = Pipeline(event_driven=event_driven)
    made.orchestrator._orch_monitor = OrchestratorMonitor(replica_sampler=made.orchestrator._sample_replica_metrics)
    made.add_request("one")
    with made:
        made.settle()
        made.put(2, *(batch(audio("one", float(n))) for n in range(40)))
        made.settle()
    windows = json.loads((tmp_path / "monitor.json").read_text(encoding="utf-8"))["windows"]
    assert sum(windows["loop_active"]) > 0
    assert sum(windows["loop_idle"]) > 0
    assert ([max(told), told[-1]] if event_driven else told) == ([40, 0] if event_driven else [])


# ---- Messages ----


def test_payload_carrier_is_rehydrated(event_driven: bool) -> None:
    """A dict payload that travels as bytes (model runner v2) is restored before processing, in both modes.

    Upstream's event-driven loop of 0.30 leaves it packed.
    """
    from vllm_omni.engine.serialization import serialize_additional_information

    seen: list[Any] = []
    for arm in (nullcontext(), switched_on()):
        with arm:
            pipeline = Pipeline(event_driven=event_driven)
            entry = codes("somebody")
            entry.multimodal_output = None
            entry.pooling_output_payload = serialize_additional_information({"codes": {"audio": torch.ones(2, 3)}})
            before_processing(pipeline, lambda _stage, raw: seen.append(plain(raw.outputs[0].pooling_output)))
            pipeline.put(1, batch(entry))
            run(pipeline)
    restored = plain({"codes.audio": torch.ones(2, 3)})
    assert seen == [None if event_driven else restored, restored]
    assert LEDGER.named("budgeted_drain").counters["items"] == 1


def served(kind: str, modes: tuple[bool, ...], drains: int = 0) -> list[list[Any]]:
    """The messages of an orchestrator in each of these modes, served at the same time, and so many by a drain."""
    from omni_fastpath.patches.budgeted_drain.drain import Drain

    with ExitStack() as stack:
        running = [stack.enter_context(filled(mode, kind=kind, ends=True)) for mode in modes]
        for each in running:
            each.settle()
        assert len(Drain.running) == drains
    assert not any(each.crash for each in running)
    return [each.messages() for each in running]


def assert_stock_or_more(stock: list[Any], fast: list[Any]) -> None:
    """The same messages; up to 0.28 stock loses the metrics of a hidden stage that ends after the last one."""
    expected, found = sequences(stock), sequences(fast)
    assert {key: found.pop(key) for key in expected} == expected
    more = {(stage_id, kind) for (_, stage_id), said in found.items() for kind, *_ in said}
    assert more <= {(TALKER, "StageMetricsMessage")}


@every_release
@pytest.mark.parametrize(
    ("modes", "kind", "values"),
    [
        ((False, False), "DELTA", {}),
        ((True, True), "CUMULATIVE", {"max_items": 1}),
        ((False, True), "FINAL_ONLY", {"max_time_us": 50}),
    ],
)
def test_orchestrators_are_served_as_on_stock(modes: tuple[bool, ...], kind: str, values: dict[str, Any]) -> None:
    """Two engines in one process: each has its own drain, and each request stock's messages in order, its end last."""
    stock = served(kind, modes)
    with only("lean_processing", *DRAIN, **values) as entry:
        fast = served(kind, modes, drains=2)
        assert entry.counters["items"] > 0
        assert not entry.has_failed
    for one, other in zip(stock, fast, strict=True):
        assert_stock_or_more(one, other)
        for name in ("one", "two"):
            ends = [getattr(each, "finished", False) for each in other if each.request_id == name]
            assert (sum(ends), ends[-1]) == (1, True)
