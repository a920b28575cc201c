"""The event-driven mode: upstream's readers, queue and dispatcher are replaced; what else they did is done."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.rigs.inprocess import Pipeline, audio, batch

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


def test_client_that_is_replaced_by_one_to_be_polled(event_driven: bool) -> None:
    """Another client in a replica's slot, one without a queue, is polled from then on; nothing breaks."""
    waiting = [batch(audio("one", 1.0))]

    class Double:
        stage_type = "llm"
        final_output = True
        final_output_type = "audio"

        async def get_output_async(self) -> Any:
            return waiting.pop(0) if waiting else batch()

        def shutdown(self) -> None:
            """Nothing to do."""

    with Pipeline(event_driven=event_driven) as running:
        running.add_request("one")
        running.settle()
        queue = running.replicas[2][0].outputs_queue

        def swap() -> None:
            running.pools[2].clients[0] = Double()

        running.do(swap)
        while waiting and running.thread.is_alive():
            time.sleep(0.005)
        running.settle()
        assert len(running.messages()) == 1
        assert "put_nowait" not in vars(queue)
    assert running.crash is None


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
