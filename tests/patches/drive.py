"""Driving the real orchestrator with raw outputs that wait before its loop starts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath import config
from omni_fastpath.declare import Process, State
from omni_fastpath.install import apply, uninstall
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES


@contextmanager
def _installed(process: Process, *variables: str) -> Iterator[None]:
    apply(config.resolve(None, dict.fromkeys(variables, "1"), PATCHES), process, PATCHES)
    for entry in LEDGER:
        entry.counters.update(dict.fromkeys(entry.counters, 0))
    try:
        yield
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)


@contextmanager
def switched_on(**values: Any) -> Iterator[None]:
    """The default set installed, with these values of ``budgeted_drain``, and taken off afterwards."""
    with _installed(Process.SERVER, "OMNI_FASTPATH"):
        entry = LEDGER.named("budgeted_drain")
        entry.options = entry.patch.options(**values)
        yield


@contextmanager
def only(*names: str, process: Process = Process.SERVER, **values: Any) -> Iterator[Any]:
    """These patches alone installed, as such a process installs them, and taken off afterwards; for every release.

    Yields the entry of the last one, if any, which has these values. The counters of all begin from nothing. Skips
    where one of them is not for this release.
    """
    with _installed(process, *(f"OMNI_FASTPATH_{name.upper()}" for name in names)):
        entry = None
        for entry in map(LEDGER.named, names):
            if entry.state in (State.SUPERSEDED, State.NOT_APPLICABLE):
                pytest.skip(f"{entry.patch.name} is {entry.state.value} on this release")
            assert entry.state is State.APPLIED, entry.reason
        if entry is not None:
            entry.options = entry.patch.options(**values)
        yield entry


def engine_without_stages(add_request: Callable[..., None] = lambda *_, **__: None) -> Any:
    """Upstream's engine without stages, whose processing of inputs is this."""
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

    own = {"__init__": lambda _self: None, "__del__": lambda _self: None, "add_request": staticmethod(add_request)}
    return type("Engine", (AsyncOmniEngine,), own)()


@contextmanager
def silent() -> Iterator[None]:
    """Nothing is logged meanwhile."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def stages(replicas: int) -> list[Any]:
    """Thinker, talker and code2wav with so many replicas each."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI

    return [dataclasses.replace(stage, replicas=replicas) for stage in QWEN3_OMNI]


def run(pipeline: Any, *later: Callable[[Any], None]) -> list[Any]:
    """Run a pipeline whose queues are filled until they are empty, then each step; every message."""
    with pipeline:
        pipeline.settle()
        for step in later:
            step(pipeline)
            pipeline.settle()
    assert pipeline.crash is None
    found: list[Any] = pipeline.messages()
    return found


def before_processing(pipeline: Any, call: Callable[[int, Any], None]) -> None:
    """Call this with the stage and the raw output before each one is processed."""
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def processing(stage_id: int, replica_id: int, raw: Any, ids: set[str]) -> Any:
        call(stage_id, raw)
        return await process(stage_id, replica_id, raw, ids)

    pipeline.orchestrator._process_llm_stage_outputs = processing


async def front_end_takes(count: int, *, event_driven: bool, later: int = 0) -> list[int]:
    """Let upstream's loop of the front end hand out so many numbered messages of one request, and more later."""
    from vllm_omni.engine.messages import OutputMessage

    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    pipeline, found, done = without_orchestrator(), list[int](), asyncio.Event()

    async def put(message: Any) -> None:
        found.append(message.engine_outputs)
        if len(found) == count + later:
            done.set()

    def send(number: int) -> None:
        message = OutputMessage(request_id="one", stage_id=0, engine_outputs=number, finished=False)
        pipeline.writer.put_nowait(message)

    for number in range(count):
        send(number)
    served = front_end(pipeline, {"one": SimpleNamespace(put=put)}, event_driven=event_driven)
    served._final_output_handler()
    for number in range(count, count + later):
        await asyncio.sleep(0.003)
        send(number)
    await asyncio.wait_for(done.wait(), 30)
    served.final_output_task.cancel()
    await asyncio.gather(served.final_output_task, return_exceptions=True)
    return found
