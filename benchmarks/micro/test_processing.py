"""``lean_processing``: what an entry of a raw output costs the orchestrator's thread, by how long its request is.

Upstream's ``_process_llm_stage_outputs`` without the loop around it, with its real stage pools, output processors and
statistics (a server without ``--disable-log-stats``). 16 requests, DELTA, one raw output a step with an entry of each.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from vllm.v1.engine import FinishReason
from vllm_omni.engine import OmniEngineCoreOutput

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

from .conftest import Measured

REQUESTS = 16
ROUNDS = 80

_COUNTED = {"num_generation_tokens": 1}  # as a scheduler's entries are

KINDS: dict[str, tuple[int, Any]] = {
    "thinker": (0, lambda name, finish: text(name, 1, finish=finish, **_COUNTED)),
    "talker": (1, lambda name, finish: OmniEngineCoreOutput(name, [7], finish_reason=finish, **_COUNTED)),
    "talker with codes": (1, lambda name, finish: codes(name, finish=finish, **_COUNTED)),
    "code2wav": (2, lambda name, finish: audio(name, *[0.5] * 10, finish=finish)),
}
"""Stage and entry. The token of the thinker is sent to the user. The token of the talker, and its codes where
``forward_gate`` is off, are sent to nobody. Code2wav makes ten samples of audio."""


class _Stage:
    """A stage with requests in progress, after a number of steps."""

    def __init__(self, kind: str, steps: int) -> None:
        self._stage, self._entry = KINDS[kind]
        pipeline = Pipeline()
        # In place of the Prometheus logger, so that upstream makes statistics; recording them is not processing.
        pipeline.orchestrator._stat_logger = SimpleNamespace(record=lambda *_, **__: None)
        self._process = pipeline.orchestrator._process_llm_stage_outputs
        self._names = [f"r{number}-{'0' * 32}" for number in range(REQUESTS)]  # as long as in a server
        for name in self._names:
            pipeline.add_request(name)
        for _ in range(steps):
            self.step()

    def step(self, finish: Any = None) -> float:
        """Process one raw output; seconds per entry."""
        raw = batch(*(self._entry(name, finish) for name in self._names))

        async def run() -> float:
            began = time.thread_time()
            await self._process(self._stage, 0, raw, set())
            return (time.thread_time() - began) / REQUESTS

        return asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [50, 450, 1950])
def test_processing(measured: Measured, benchmark: BenchmarkFixture, kind: str, step: int) -> None:
    """One entry, around that step of its request."""
    measured(_Stage(kind, step - ROUNDS // 2 if benchmark.enabled else 1).step, ROUNDS)


@pytest.mark.parametrize("kind", ["thinker", "talker with codes", "code2wav"])
@pytest.mark.parametrize("step", [450, 1950])
def test_end(measured: Measured, benchmark: BenchmarkFixture, kind: str, step: int) -> None:
    """One entry of a raw output that ends all of its requests, at that step."""
    measured(lambda: _Stage(kind, step if benchmark.enabled else 1).step(FinishReason.STOP), 3)
