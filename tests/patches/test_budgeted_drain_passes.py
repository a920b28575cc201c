"""Where a pass of the drain ends, when its loop yields, and how it starts and stops, on the real orchestrator."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.rigs.inprocess import Pipeline, audio, batch, silent
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import before_processing, options, run

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


def _drained(recorder: Any, entries: int, **values: Any) -> list[tuple[int, str, int]]:
    """The passes over so many raw outputs that are queued before the loop starts: items, end, and what is left."""
    with options(**{"max_time_us": 1_000_000, **values}):
        pipeline = Pipeline()
        pipeline.add_request("one")
        pipeline.put(2, *(batch(silent("one")) for _ in range(entries)))
        run(pipeline)
    return [(report.items, report.ended, report.queued) for (report,) in recorder.of("pass")]


def test_item_budget_ends_a_pass_and_is_counted(recorder: Any) -> None:
    """After so many raw outputs the loop yields, and the pass is counted as ended by the item budget."""
    assert _drained(recorder, 10, max_items=4) == [(4, "items", 6), (4, "items", 2), (2, "empty", 0)]
    counters = LEDGER.named("budgeted_drain").counters
    assert [counters[name] for name in ("items", "passes", "ended_items", "ended_empty")] == [10, 3, 2, 1]


def test_time_budget_ends_a_pass_and_is_counted(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processing is slow, a pass ends on the time budget and is counted as such."""
    from omni_fastpath.patches.budgeted_drain import drain, wakeup

    clock = count(0, 40_000)  # each reading is so many nanoseconds later, however busy the machine is
    for module in (drain, wakeup):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(clock))
    assert _drained(recorder, 9, max_time_us=100) == [(3, "time", 6), (3, "time", 3), (3, "empty", 0)]
    assert LEDGER.named("budgeted_drain").counters["ended_time"] == 2


def test_processing_error_ends_the_orchestrator_as_upstream_ends_it(recorder: Any) -> None:
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
    """Other tasks run between two passes; the longest stretch without them is recorded."""
    ran_between: list[int] = []
    pipeline = Pipeline()
    pipeline.add_request("one")
    pipeline.put(2, *(batch(silent("one")) for _ in range(8)))

    def processed(*_: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: ran_between.append(len(recorder.of("dequeued"))))

    before_processing(pipeline, processed)
    with options(max_items=2, max_time_us=1_000_000):
        run(pipeline)
    assert ran_between == [2, 2, 4, 4, 6, 6, 8, 8]
    assert LEDGER.named("budgeted_drain").counters["longest_stretch_us"] > 0


def test_monitor_is_told(event_driven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's monitor gets the backlog in event-driven mode until it is empty, and nothing in poll mode."""
    from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor  # not on every release

    monkeypatch.setenv("VLLM_OMNI_ORCH_MONITOR_PATH", str(tmp_path / "monitor.json"))
    told: list[int] = []

    class Monitor(OrchestratorMonitor):  # type: ignore[misc]
        def set_dispatch_queue_size(self, size: int) -> None:
            told.append(size)
            super().set_dispatch_queue_size(size)

    made = Pipeline(event_driven=event_driven)
    made.orchestrator._orch_monitor = Monitor(replica_sampler=made.orchestrator._sample_replica_metrics)
    made.add_request("one")
    with made:
        made.settle()
        made.put(2, *(batch(audio("one", float(n))) for n in range(40)))
        made.settle()
    windows = json.loads((tmp_path / "monitor.json").read_text(encoding="utf-8"))["windows"]
    assert sum(windows["loop_active"]) > 0
    assert sum(windows["loop_idle"]) > 0
    if event_driven:
        assert (max(told), told[-1]) == (40, 0)
        assert max(windows["dispatch_queue_high_water"]) == 40
    else:
        assert told == []
