"""Driving the real orchestrator with raw outputs that wait before its loop starts."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

IN_TURN: dict[str, Any] = {"order": "stage_order", "floor": 0.0}
"""Options under which the end of a pass lets another stage in, and nothing else does."""


@contextmanager
def options(**values: Any) -> Iterator[None]:
    """Other values of ``budgeted_drain`` for the loops that start inside."""
    from omni_fastpath.ledger import LEDGER

    entry = LEDGER.named("budgeted_drain")
    before = entry.options
    entry.options = entry.patch.options(**values)
    try:
        yield
    finally:
        entry.options = before


@contextmanager
def switched_on(**values: Any) -> Iterator[None]:
    """The default set installed, with these values of ``budgeted_drain``, and taken off afterwards."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.patches import PATCHES

    apply(config.resolve([], {"OMNI_FASTPATH": "1"}, PATCHES), Process.SERVER)
    try:
        with options(**values):
            yield
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)


@contextmanager
def only(*names: str) -> Iterator[None]:
    """These patches alone installed, as a server installs them, and taken off afterwards; for every release.

    Skips where one of them is not for this release.
    """
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES

    apply(config.resolve([], {f"OMNI_FASTPATH_{name.upper()}": "1" for name in names}, PATCHES), Process.SERVER)
    entries = [LEDGER.named(name) for name in names]
    try:
        for entry in entries:
            if entry.state in (State.SUPERSEDED, State.NOT_APPLICABLE):
                pytest.skip(f"{entry.patch.name} is {entry.state.value} on this release")
            assert entry.state is State.APPLIED, entry.reason
        yield
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)


@contextmanager
def recording() -> Iterator[Any]:
    """A recorder, registered meanwhile."""
    from omni_fastpath.hooks import HOOKS
    from tests.fakes.recorder import Recorder

    recorder = Recorder()
    HOOKS.register(recorder)
    try:
        yield recorder
    finally:
        HOOKS.unregister(recorder)


def every_look_takes(monkeypatch: pytest.MonkeyPatch, nanoseconds: int) -> None:
    """Every look of ``budgeted_drain`` at the clock is so much after the last: how busy the machine is says nothing."""
    from omni_fastpath.patches.budgeted_drain import dispatch, drain, wakeup

    clock = iter(range(0, 10**12, nanoseconds))
    for module in (dispatch, drain, wakeup):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: next(clock))


def queued_replica(stage: Any, *waiting: Any, replica_id: int = 0, clock: Iterator[int] | None = None) -> Any:
    """A replica of ``stage`` for tests without upstream, at which these wait; it is added to the stage."""
    from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica

    items = deque(waiting)
    client = SimpleNamespace(get_output_nowait=lambda: items.popleft() if items else None)
    made = QueuedReplica(stage, (stage.stage_id, replica_id), client, items, clock or count())
    stage.replicas.append(made)
    return made


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
