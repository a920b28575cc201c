"""Two engines in one process: each orchestrator has its own drain, and they share what is written into upstream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, stages

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

STEPS = {"one": 12, "two": 5, "three": 1}
MODES = [(False, False), (True, True), (False, True)]


def pipeline(event_driven: bool) -> Any:
    """Three stages with two replicas each, and the requests."""
    from benchmarks.rigs.inprocess import Pipeline

    found = Pipeline(stages(2), event_driven=event_driven)
    for number, name in enumerate(STEPS):
        found.add_request(name, replicas=[number % 2] * 3)
    return found


def raw_outputs() -> Iterator[tuple[int, Any]]:
    """Stage and raw output, step by step: tokens, codec frames, and audio at every third step and the last one."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import audio, batch, codes, silent, text

    for step in range(max(STEPS.values())):
        for name, steps in STEPS.items():
            if step >= steps:
                continue
            finish = FinishReason.STOP if step == steps - 1 else None
            heard = finish is not None or step % 3 == 0
            yield 0, batch(text(name, 100 + step, finish=finish))
            yield 1, batch(codes(name, finish=finish))
            yield 2, batch(audio(name, 0.25 * step, finish=finish) if heard else silent(name))


def outputs(messages: list[Any]) -> dict[tuple[str, int | None], list[tuple[Any, ...]]]:
    """What a user gets, by request and stage; stock up to 0.28 may lose the metrics of a stage that nobody sees."""
    return sequences(each for each in messages if type(each).__name__ == "OutputMessage")


def served(*pipelines: Any) -> list[list[Any]]:
    """The messages of each, with the same raw outputs put into each in turn."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(each) for each in pipelines]
        # Each has its own: on some releases processing takes the payload out.
        for rows in zip(*(raw_outputs() for _ in running), strict=True):
            for each, (stage, raw) in zip(running, rows, strict=True):
                each.put(stage, raw, replica_id=list(STEPS).index(raw.outputs[0].request_id) % 2)
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
