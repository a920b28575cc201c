"""``nonblocking_dequeue``: how the orchestrator's poll loop takes a raw output from the client of a replica."""

from __future__ import annotations

import asyncio
import time

import pytest

from .conftest import Measured

MANY = {"full": 200, "empty": 20}


@pytest.mark.parametrize("queue", ["full", "empty"])
def test_dequeue(measured: Measured, arm: str, queue: str) -> None:
    """One dequeue. Stock waits a millisecond at an empty queue and creates a task per dequeue."""
    from benchmarks.rigs.inprocess import Pipeline, batch, text

    async def run() -> float:
        pipeline = Pipeline()
        pool, [replica] = pipeline.pools[0], pipeline.replicas[0]
        if queue == "full":
            for _ in range(MANY[queue]):
                replica.outputs_queue.put_nowait(batch(text("one", 1)))
        began = time.perf_counter()
        for _ in range(MANY[queue]):
            if arm == "stock":
                await pool.poll_llm_raw_output(0, timeout_s=0.001)
            else:
                replica.get_output_nowait()
        return (time.perf_counter() - began) / MANY[queue]

    measured(lambda: asyncio.run(run()), 20)
