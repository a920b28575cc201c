"""Two engines in one process: each orchestrator has its own drain, and they share what is written into upstream."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, stages
from tests.patches.test_budgeted_drain_content import three_stage_script

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

MODES = [(False, False), (True, True), (False, True)]


def outputs(messages: list[Any]) -> dict[tuple[str, int | None], list[tuple[Any, ...]]]:
    """What a user gets, by request and stage; stock up to 0.28 may lose the metrics of a stage that nobody sees."""
    return sequences(each for each in messages if type(each).__name__ == "OutputMessage")


def served(modes: tuple[bool, bool], drains: int) -> list[list[Any]]:
    """The messages of an orchestrator in each mode, served at the same time; so many of them have our drain."""
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.rigs.inprocess import Pipeline
    from omni_fastpath.patches.budgeted_drain.drain import DrainLoop

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Pipeline(stages(2), event_driven=mode)) for mode in modes]
        threads = stack.enter_context(ThreadPoolExecutor())
        list(threads.map(three_stage_script(0, RequestOutputKind.DELTA, bursts=True), running))
        for each in running:
            each.settle()
        assert len(DrainLoop.running) == drains
    assert [each.crash for each in running] == [None, None]
    return [each.messages() for each in running]


@pytest.mark.parametrize("modes", MODES, ids=["poll", "event-driven", "both"])
def test_two_orchestrators_serve_as_on_stock(modes: tuple[bool, bool]) -> None:
    """At the same time, under every patch of theirs, also one in each mode: each request's messages are stock's."""
    expected = [outputs(each) for each in served(modes, drains=0)]
    with only("nonblocking_dequeue", "budgeted_drain", "lean_processing"):
        found = served(modes, drains=2)
    assert [outputs(each) for each in found] == expected
    assert [endings(each) for each in found] == [{f"request-{n}": (1, "end") for n in range(6)}] * 2
