"""``lean_processing``: what an entry of a raw output costs the orchestrator's thread, by how long its request is.

Upstream's ``_process_llm_stage_outputs`` without the loop around it, with its real stage pools, output processors and
statistics (a server without ``--disable-log-stats``). 16 requests, DELTA, one raw output a step with an entry of each.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .conftest import Measured

REQUESTS = 16
ROUNDS = 80

KINDS = {"thinker": 0, "talker": 1, "talker with codes": 1, "code2wav": 2}
"""With the stage. The thinker's token goes to the user. Nothing receives what the talker makes, a token, and without
``forward_gate`` a payload with it. Code2wav makes ten samples of audio."""


def _entry(kind: str, name: str, finish: Any = None) -> Any:
    from vllm_omni.engine import OmniEngineCoreOutput

    from benchmarks.rigs.inprocess import audio, codes, text

    counted = {"num_generation_tokens": 1, "finish_reason": finish}  # as a scheduler's entries are
    if kind == "thinker":
        return text(name, 1, finish=finish, num_generation_tokens=1)
    if kind == "code2wav":
        return audio(name, *[0.5] * 10, finish=finish)
    if kind == "talker":
        return OmniEngineCoreOutput(name, [7], **counted)
    return codes(name, finish=finish, num_generation_tokens=1)


class _Unlogged:
    """Stands in the place of the Prometheus logger, so that upstream makes statistics; recording is not processing."""

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""


class _Stage:
    """A stage whose requests are in progress.

    Args:
        kind: Of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        from benchmarks.rigs.inprocess import Pipeline

        self._kind, self._pipeline = kind, Pipeline()
        self._pipeline.orchestrator._stat_logger = _Unlogged()
        self.names = [f"r{number}-{'0' * 32}" for number in range(REQUESTS)]  # as long as a server's
        for name in self.names:
            self._pipeline.add_request(name)

    def step(self, finish: Any = None) -> float:
        """Process one raw output; seconds per entry."""
        from benchmarks.rigs.inprocess import batch

        raw = batch(*(_entry(self._kind, name, finish) for name in self.names))
        process = self._pipeline.orchestrator._process_llm_stage_outputs(KINDS[self._kind], 0, raw, set())

        async def run() -> float:
            began = time.thread_time()
            await process
            return (time.thread_time() - began) / REQUESTS

        return asyncio.run(run())

    def advance(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            self.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [50, 450, 1950])
def test_processing(measured: Measured, benchmark: BenchmarkFixture, kind: str, step: int) -> None:
    """One entry, around that step of its request."""
    stage = _Stage(kind)
    if benchmark.enabled:
        stage.advance(step - ROUNDS // 2)
    measured(stage.step, ROUNDS)


@pytest.mark.parametrize("kind", ["thinker", "talker with codes", "code2wav"])
@pytest.mark.parametrize("step", [450, 1950])
def test_end(measured: Measured, benchmark: BenchmarkFixture, kind: str, step: int) -> None:
    """One entry of a raw output in which all requests end after so many steps."""
    from vllm.v1.engine import FinishReason

    def once() -> float:
        stage = _Stage(kind)
        stage.advance(step if benchmark.enabled else 1)
        return stage.step(FinishReason.STOP)

    measured(once, 3)
