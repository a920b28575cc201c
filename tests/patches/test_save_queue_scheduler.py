"""The save queue on upstream's scheduler and adapter, in cases that the state machine does not play."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import Process
from omni_fastpath.patches.save_queue_cap.save_queue import has_receiver
from omni_fastpath.patches.save_queue_cap.wrappers import obstacle_to_holds
from tests.patches.drive import only
from tests.patches.small_stage import PATIENCE_S, SmallStage

pytestmark = pytest.mark.upstream


def test_chunks_count_until_they_are_fetched(config: Any) -> None:
    """By the sizes of their segments; chunks of a request for text alone never count, because they are not fetched."""
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    with only("save_queue_cap", process=Process.STAGE), SmallStage(config) as stage:
        stage.add("text", tokens=5).additional_information = {"omni_final_stage_id": 0}
        stage.add("audio", tokens=5)
        stage.run()
        until(lambda: not (stage.queue.tasks or stage.adapter._sender_tokens))  # sent, and cleaned up behind it
        stream = stage.stream("audio")
        sizes = [path.stat().st_size for path in stage.segments(stream) if not path.name.startswith("shm_")]
        assert len(sizes) == 5
        assert stage.queue.nbytes == stage.queue.of(stream)[0] == sum(sizes)
        receiver = SharedMemoryConnector({"stage_id": 1})
        assert all(receiver.get("0", "1", f"{stream}_0_{number}") is not None for number in range(5))
        until(lambda: stage.queue.nbytes == 0)


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        ({"omni_final_stage_id": 1}, True),
        (SimpleNamespace(entries={"omni_final_stage_id": SimpleNamespace(scalar_data=0)}), False),
        (SimpleNamespace(entries={}), True),
    ],
)
def test_a_request_that_ends_at_this_stage_has_no_receiver(information: Any, expected: bool) -> None:
    """Plain or packed additional information says so."""
    assert has_receiver(SimpleNamespace(additional_information=information), 0) is expected


# ---- Where no stream is held ----


def scheduler(kind: str = "OmniARScheduler", **config: Any) -> Any:
    """A scheduler of that class with this in its config."""
    from vllm_omni.core.sched import omni_ar_scheduler
    from vllm_omni.model_executor.models.voxcpm2.scheduler import VoxCPM2OmniARAsyncScheduler

    kinds = {**vars(omni_ar_scheduler), "VoxCPM2OmniARAsyncScheduler": VoxCPM2OmniARAsyncScheduler}
    made = kinds[kind].__new__(kinds[kind])
    defaults = {"parallel_config": SimpleNamespace(pipeline_parallel_size=1)}
    made.vllm_config = SimpleNamespace(**{**defaults, **config})
    made.current_step = 0
    return made


SENDS_CACHE = SimpleNamespace(omni_kv_config={"need_send_cache": True})


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("OmniARScheduler", {}, None),
        ("OmniARAsyncScheduler", {}, None),
        ("VoxCPM2OmniARAsyncScheduler", {}, "was not checked"),
        ("OmniARScheduler", {"lora_config": object()}, "LoRA"),
        ("OmniARScheduler", {"speculative_config": object()}, "speculative"),
        ("OmniARScheduler", {"kv_transfer_config": object()}, "KV cache is transferred"),
        ("OmniARScheduler", {"model_config": SENDS_CACHE}, "KV cache is transferred"),
        ("OmniARScheduler", {"model_config": SimpleNamespace(omni_kv_config={})}, None),
        ("OmniARScheduler", {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
    ],
)
def test_only_checked_schedulers_and_features_have_holds(kind: str, config: dict[str, Any], says: str | None) -> None:
    """Streams are held only for schedulers, by exact class, and features that were checked."""
    found = obstacle_to_holds(scheduler(kind, **config))
    assert (found is None) if says is None else (found is not None and says in found)


def test_pairs_that_a_patched_scheduler_keeps_together_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's pairing wraps vLLM's scheduler, and a held request would be separated from its partner."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def paired(self: Any, throttle_prefills: bool = False) -> Any:
        raise NotImplementedError

    paired._cfg_pairing_patched = True  # type: ignore[attr-defined]  # upstream's mark
    monkeypatch.setattr(Scheduler, "schedule", paired)
    assert "pairs" in (obstacle_to_holds(scheduler()) or "")
