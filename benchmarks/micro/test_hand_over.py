"""``delivery``: what the front end's thread spends on taking a message from the orchestrator's queue."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import Measured

MESSAGES = 2_000


@pytest.mark.parametrize("queued", [10, 100, 3_000])
def test_hand_over(measured: Measured, queued: int) -> None:
    """One message, while that number is queued, of as many requests up to 128. One message in eight has audio."""
    import torch
    from vllm_omni.engine.messages import OutputMessage

    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    def message(number: int) -> Any:
        payload = {"audio": torch.zeros(9_600), "sr": 24_000} if number % 8 == 0 else {}
        return OutputMessage(
            request_id=f"r{number % min(queued, 128)}",
            stage_id=2 if payload else 0,
            engine_outputs=SimpleNamespace(multimodal_output=payload, outputs=[]),
            finished=False,
        )

    messages = [message(number) for number in range(queued + MESSAGES)]

    async def run() -> float:
        pipeline = without_orchestrator()
        engine = front_end(pipeline, {}, event_driven=False).engine
        put = pipeline.outputs.sync_q.put_nowait
        for each in messages[:queued]:
            put(each)
        spent_ns = 0
        for each in messages[queued:]:
            put(each)
            began = time.perf_counter_ns()
            await engine.try_get_output_async()
            spent_ns += time.perf_counter_ns() - began
        return spent_ns / MESSAGES / 1e9

    measured(lambda: asyncio.run(run()), 10)
