"""Driving the real orchestrator with raw outputs that wait before its loop starts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath import config
from omni_fastpath.declare import Process, State
from omni_fastpath.install import apply, uninstall
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches import PATCHES

IN_TURN: dict[str, Any] = {"order": "stage_order", "floor": 0.0}
"""Options under which the end of a pass lets another stage in, and nothing else does."""


@contextmanager
def options(**values: Any) -> Iterator[None]:
    """Other values of ``budgeted_drain`` for the loops that start inside."""
    entry = LEDGER.named("budgeted_drain")
    before = entry.options
    entry.options = entry.patch.options(**values)
    try:
        yield
    finally:
        entry.options = before


@contextmanager
def _installed(process: Process, *variables: str) -> Iterator[None]:
    apply(config.resolve([], dict.fromkeys(variables, "1"), PATCHES), process)
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
    with _installed(Process.SERVER, "OMNI_FASTPATH"), options(**values):
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


@contextmanager
def recording(plugin: Any = None) -> Iterator[Any]:
    """A recorder, or this plugin, registered meanwhile."""
    from omni_fastpath.hooks import HOOKS
    from tests.fakes.recorder import Recorder

    registered = plugin or Recorder()
    HOOKS.register(registered)
    try:
        yield registered
    finally:
        HOOKS.unregister(registered)


def every_reading_takes(monkeypatch: pytest.MonkeyPatch, nanoseconds: int) -> None:
    """``budgeted_drain`` reads the clock so much later each time: how busy the machine is says nothing."""
    from omni_fastpath.patches.budgeted_drain import dispatch, drain, wakeup

    clock = iter(range(0, 10**12, nanoseconds))
    for module in (dispatch, drain, wakeup):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(clock))


def queued_replica(stage: Any, *waiting: Any, replica_id: int = 0, clock: Iterator[int] | None = None) -> Any:
    """A replica of ``stage`` for tests without upstream, at which these wait."""
    from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica

    items = deque(waiting)
    client = SimpleNamespace(get_output_nowait=lambda: items.popleft() if items else None)
    return QueuedReplica(stage, (stage.stage_id, replica_id), client, items, clock or count())


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


async def front_end_takes(count: int, *, event_driven: bool, later: int = 0) -> list[int]:
    """Let upstream's loop of the front end take numbered messages of one request, and return the numbers.

    Args:
        count: How many are queued when it begins.
        event_driven: The front end's mode.
        later: Messages that arrive when the front end has begun to wait, one after the other.
    """
    from vllm_omni.engine.messages import OutputMessage

    from benchmarks.rigs.inprocess import front_end, without_orchestrator

    pipeline, taken, done = without_orchestrator(), list[int](), asyncio.Event()

    async def put(message: Any) -> None:
        taken.append(message.engine_outputs)
        if len(taken) == count + later:
            done.set()

    def send(number: int) -> None:
        pipeline.outputs.sync_q.put_nowait(
            OutputMessage(request_id="one", stage_id=0, engine_outputs=number, finished=False)
        )

    for number in range(count):
        send(number)
    found = front_end(pipeline, {"one": SimpleNamespace(put=put)}, event_driven=event_driven)
    found._final_output_handler()
    for number in range(count, count + later):
        await asyncio.sleep(0.003)
        send(number)
    await asyncio.wait_for(done.wait(), 30)
    found.final_output_task.cancel()
    await asyncio.gather(found.final_output_task, return_exceptions=True)
    return taken
