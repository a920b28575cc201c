"""Where a pass of the drain ends, when its loop yields, and how it starts and stops, on the real orchestrator."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import IN_TURN, before_processing, options, run

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


STOP, ERROR = FinishReason.STOP, FinishReason.ERROR


def _passes(recorder: Any, stage_id: int) -> list[tuple[int, str]]:
    return [(report.items, report.ended) for (report,) in recorder.of("pass") if report.stage_id == stage_id]


def _drain(
    recorder: Any, kind: str, *entries: Any, values: dict[str, Any] | None = None, stage: int = 2, beside: int = 0
) -> Any:
    """Queue entries, one raw output each, before the loop starts, and run until the queues are empty; the messages.

    ``beside`` more wait at the talker, enough for as many of its passes while the stages take turns.
    """
    with options(**({"max_time_us": 1_000_000} | (values or {}))):
        pipeline = Pipeline()
        for request in ("one", "two", "beside"):
            pipeline.add_request(request, RequestOutputKind[kind])
        pipeline.put(1, *(batch(codes("beside")) for _ in range(16 * beside)))
        pipeline.put(stage, *(batch(each) for each in entries))
        return run(pipeline)


def _contested(recorder: Any, kind: str, *entries: Any, stage: int = 2, **values: Any) -> Any:
    """Do the same where a routable output ends a pass, because the stages take turns and another one has a backlog."""
    return _drain(recorder, kind, *entries, values=IN_TURN | values, stage=stage, beside=len(entries) + 1)


@pytest.mark.parametrize(
    ("kind", "before", "last"),
    [
        pytest.param("DELTA", [silent("one")] * 3, audio("one", 1.0), id="audio under DELTA"),
        pytest.param("FINAL_ONLY", [silent("one"), audio("one", 1.0)], audio("one", 2.0, finish=STOP), id="an end"),
        pytest.param("DELTA", [silent("two")], silent("one", finish_reason=ERROR, stop_reason="broke"), id="an error"),
    ],
)
def test_a_pass_ends_at_what_a_user_receives(recorder: Any, kind: str, before: list[Any], last: Any) -> None:
    """An entry without a message does not end it; under FINAL_ONLY only the end has one, and an error has no output."""
    _contested(recorder, kind, *before, last, silent("two"), silent("two"))
    assert _passes(recorder, 2) == [(len(before) + 1, "routable"), (2, "empty")]


@pytest.mark.parametrize("stage", [1, 2])
def test_item_budget_ends_a_pass_and_is_counted(recorder: Any, stage: int) -> None:
    """Without a routable output a pass ends on the item budget and is counted as such, at every stage."""
    _drain(recorder, "DELTA", *[(codes if stage == 1 else silent)("one")] * 10, values={"max_items": 4}, stage=stage)
    assert _passes(recorder, stage) == [(4, "items"), (4, "items"), (2, "empty")]
    assert LEDGER.named("budgeted_drain").counters["ended_items"] == 2


def test_time_budget_ends_a_pass_and_is_counted(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processing is slow, a pass ends on the time budget and is counted as such."""
    from omni_fastpath.patches.budgeted_drain import dispatch, drain, wakeup

    clock = count(0, 40_000)  # each reading is so many nanoseconds later, however busy the machine is
    for module in (dispatch, drain, wakeup):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(clock))
    _drain(recorder, "DELTA", *[silent("one")] * 9, values={"max_time_us": 100})
    counters = LEDGER.named("budgeted_drain").counters
    assert counters["ended_time"] == 2
    assert counters["ended_items"] == 0
    assert sum(items for items, _ in _passes(recorder, 2)) == 9


def test_all_are_taken_when_routable_does_not_stop(recorder: Any) -> None:
    """With ``stop_at_first_routable: false`` only the budgets end a pass, and plugins see each routed output."""
    entries = [audio("one", float(i)) for i in range(10)]
    _contested(recorder, "DELTA", *entries, stop_at_first_routable=False, max_items=8)
    assert _passes(recorder, 2) == [(8, "items"), (2, "empty")]
    assert [stage for stage, _, _ in recorder.of("routed")].count(2) == 10


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


def test_loop_yields_inside_a_pass_after_slow_work(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run in the middle of a pass whose items are slow; the longest stretch is recorded."""
    from omni_fastpath.patches.budgeted_drain import drain

    monkeypatch.setattr(drain, "_YIELD_AFTER_NS", 0)
    entry = LEDGER.named("budgeted_drain")
    ran_between: list[int] = []
    pipeline = Pipeline()
    pipeline.add_request("one")
    pipeline.put(2, *(batch(silent("one")) for _ in range(8)))

    def processed(*_: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: ran_between.append(len(recorder.of("dequeued"))))

    before_processing(pipeline, processed)
    run(pipeline)
    assert ran_between == list(range(1, 9))
    assert entry.counters["longest_stretch_us"] > 0


def test_a_drain_that_cannot_be_built_leaves_upstreams_loop(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the drain cannot start, upstream's loop runs and the state is failed."""
    from omni_fastpath.patches.budgeted_drain.drain import DrainLoop

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(DrainLoop, "__init__", broken)
    pipeline = Pipeline()
    pipeline.add_request("one")
    with pipeline:
        pipeline.put(2, batch(audio("one", 1.0)))
        pipeline.settle()
        assert len(pipeline.messages()) == 1
    assert LEDGER.named("budgeted_drain").has_failed


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
