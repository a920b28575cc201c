"""What a pass is: where it ends, what it leaves to others, and that an idle loop sleeps. On the real orchestrator."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from benchmarks.rigs.inprocess import QWEN3_OMNI, Pipeline, Replica, audio, batch, codes, silent
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import IN_TURN, every_reading_takes, options, run

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


def _passes(recorder: Any, stage_id: int) -> list[tuple[int, str]]:
    return [(report.items, report.ended) for (report,) in recorder.of("pass") if report.stage_id == stage_id]


def _drain(
    recorder: Any, kind: str, *entries: Any, values: dict[str, Any] | None = None, stage: int = 2, beside: int = 0
) -> Any:
    """Queue entries, one raw output each, before the loop starts, and run until they are gone; every message.

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
    """The same where a routable output ends a pass: the stages take turns, and another one has a backlog."""
    return _drain(recorder, kind, *entries, values=IN_TURN | values, stage=stage, beside=len(entries) + 1)


def test_delta_passes_over_the_silent_and_stops_at_audio(recorder: Any) -> None:
    """N N N A N N: the first pass takes four and ends at A, the second finds the queue empty."""
    _contested(recorder, "DELTA", *[silent("one")] * 3, audio("one", 1.0), silent("one"), silent("one"))
    assert _passes(recorder, 2) == [(4, "routable"), (2, "empty")]


def test_final_only_passes_over_everything_but_the_end(recorder: Any) -> None:
    """Under FINAL_ONLY upstream makes no object before the end, which is what stops the pass."""
    end = audio("one", 2.0, finish=FinishReason.STOP)
    messages = _contested(recorder, "FINAL_ONLY", silent("one"), audio("one", 1.0), end, silent("two"), silent("two"))
    assert _passes(recorder, 2) == [(3, "routable"), (2, "empty")]
    assert len(messages) == 1


def test_error_and_segment_end_stop_a_pass(recorder: Any) -> None:
    """What leaves no processed object behind is read from the raw output."""
    error = silent("one")
    error.finish_reason, error.stop_reason = FinishReason.ERROR, "broke"
    _contested(recorder, "DELTA", silent("two"), error, silent("two"), silent("two"))
    assert _passes(recorder, 2) == [(2, "routable"), (2, "empty")]


@pytest.mark.parametrize("stage", [1, 2])
def test_item_budget_ends_a_pass_and_is_counted(recorder: Any, stage: int) -> None:
    """Nothing routable in sight: the pass ends on the item budget, counted as that, also where no user sees it."""
    _drain(recorder, "DELTA", *[(codes if stage == 1 else silent)("one")] * 10, values={"max_items": 4}, stage=stage)
    assert _passes(recorder, stage) == [(4, "items"), (4, "items"), (2, "empty")]
    assert LEDGER.named("budgeted_drain").counters["ended_items"] == 2


def test_time_budget_ends_a_pass_and_is_counted(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dear processing: the pass ends on the time budget, counted as that, not on the item budget."""
    every_reading_takes(monkeypatch, 40_000)
    _drain(recorder, "DELTA", *[silent("one")] * 9, values={"max_time_us": 100})
    counters = LEDGER.named("budgeted_drain").counters
    assert counters["ended_time"] == 2
    assert counters["ended_items"] == 0
    assert sum(items for items, _ in _passes(recorder, 2)) == 9


def test_all_are_taken_when_routable_does_not_stop(recorder: Any) -> None:
    """With ``stop_at_first_routable: false`` only the budgets end a pass. Plugins are told of each routed output."""
    entries = [audio("one", float(i)) for i in range(10)]
    _contested(recorder, "DELTA", *entries, stop_at_first_routable=False, max_items=8)
    assert _passes(recorder, 2) == [(8, "items"), (2, "empty")]
    assert [stage for stage, _, _ in recorder.of("routed")].count(2) == 10


def test_processing_error_ends_the_orchestrator_as_upstream_ends_it(recorder: Any) -> None:
    """An exception from upstream's processing is not swallowed: the orchestrator's thread ends with it."""
    pipeline = Pipeline()

    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError("processing")

    pipeline.orchestrator._process_llm_stage_outputs = broken
    pipeline.put(2, batch(silent("one")))
    with pipeline:
        pipeline._thread.join(10)
    assert isinstance(pipeline.crash, ZeroDivisionError)


def test_loop_yields_inside_a_pass_after_dear_work(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others on the event loop run in the middle of a pass whose items are dear; the longest stretch is recorded."""
    from omni_fastpath.patches.budgeted_drain import drain

    monkeypatch.setattr(drain, "_YIELD_AFTER_NS", 0)
    entry = LEDGER.named("budgeted_drain")
    ran_between: list[int] = []
    pipeline = Pipeline()
    pipeline.add_request("one")
    pipeline.put(2, *(batch(silent("one")) for _ in range(8)))
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def dear(*args: Any) -> Any:
        asyncio.get_running_loop().call_soon(lambda: ran_between.append(len(recorder.of("dequeued"))))
        return await process(*args)

    pipeline.orchestrator._process_llm_stage_outputs = dear
    with pipeline:
        pipeline.settle()
    assert ran_between == list(range(1, 9))
    assert entry.counters["longest_stretch_us"] > 0


def test_death_of_a_replaced_client_does_not_evict_its_successor(recorder: Any) -> None:
    """A replica that re-registers into its slot survives its predecessor's death, told while an output is processed."""
    pipeline = Pipeline()
    pipeline.add_request("one")
    pool = pipeline.pools[2]
    old, new = pipeline.replicas[2][0], Replica(2, QWEN3_OMNI[2], 0)
    pipeline.put(2, batch(silent("one")))

    async def swapping(*_args: Any) -> Any:
        assert pool.clients[0] is old
        pool.clients[0] = new
        raise EngineDeadError

    pipeline.orchestrator._process_llm_stage_outputs = swapping
    with pipeline:
        time.sleep(0.3)
        assert pipeline.do(lambda: pool.clients[0]) is new
        assert not new.down


def test_a_drain_that_cannot_be_built_leaves_upstreams_loop(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If our loop fails to start, upstream's runs, and the state says so."""
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
    """Upstream's monitor sees the backlog shrink to nothing in event-driven mode, and is told none in poll mode."""
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
