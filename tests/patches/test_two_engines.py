"""Two engines in one process: each orchestrator has its own drain, and they share what is written into upstream."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings
from tests.patches.drive import only
from tests.test_inprocess import STEPS, outputs, pipeline, put, raw_outputs

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

MODES = [(False, False), (True, True), (False, True)]


def served(*pipelines: Any) -> list[list[Any]]:
    """The messages of each, with the same raw outputs put into each in turn."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(each) for each in pipelines]
        # Each has its own: on some releases processing takes the payload out.
        for rows in zip(*(raw_outputs() for _ in running), strict=True):
            for each, (stage, raw) in zip(running, rows, strict=True):
                put(each, stage, raw)
        for each in running:
            each.settle()
    assert [each.crash for each in pipelines] == [None] * len(pipelines)
    return [each.messages() for each in pipelines]


@pytest.mark.parametrize("modes", MODES, ids=["poll", "event-driven", "both"])
def test_two_orchestrators_serve_as_on_stock(modes: tuple[bool, bool]) -> None:
    """At the same time, under every patch of theirs, also one in each mode: each request's messages are stock's."""
    from omni_fastpath.ledger import LEDGER

    expected = [outputs(each) for each in served(*map(pipeline, modes))]
    with only("nonblocking_dequeue", "budgeted_drain", "lean_processing"):
        before = LEDGER.named("budgeted_drain").counters["items"]
        found = served(*map(pipeline, modes))
        taken = LEDGER.named("budgeted_drain").counters["items"] - before
    assert [outputs(each) for each in found] == expected
    assert [endings(each) for each in found] == [dict.fromkeys(STEPS, (1, "end"))] * 2
    assert taken == 2 * sum(1 for _ in raw_outputs())
