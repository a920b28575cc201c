"""The rig of the real orchestrator without engines: what it serves on every release."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

STEPS = {"one": 12, "two": 5, "three": 1}
MODES = pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
TEXT, AUDIO = 0, 2

Rows = Iterator[tuple[int, Any]]
Put = Callable[[Any, int, Any], None]


def pipeline(event_driven: bool) -> Any:
    """Three stages with two replicas each, and the requests; skips where this release has no such mode."""
    from benchmarks.rigs import upstream
    from benchmarks.rigs.inprocess import Pipeline
    from tests.patches.drive import stages

    if event_driven not in upstream.event_driven_modes():
        pytest.skip("this release has no event-driven orchestrator")
    found = Pipeline(stages(2), event_driven=event_driven)
    for number, name in enumerate(STEPS):
        found.add_request(name, replicas=[number % 2] * 3)
    return found


def raw_outputs() -> Rows:
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


def replica_of(raw: Any) -> int:
    """Where its request is bound to."""
    return list(STEPS).index(raw.outputs[0].request_id) % 2


def put(found: Any, stage: int, raw: Any) -> None:
    """As the socket's reader does."""
    found.put(stage, raw, replica_id=replica_of(raw))


def served(found: Any, put: Put) -> list[Any]:
    """Every message, with the queues never empty for long."""
    with found as running:
        for stage, raw in raw_outputs():
            put(running, stage, raw)
        running.settle()
    assert found.crash is None
    messages: list[Any] = found.messages()
    return messages


def outputs(messages: list[Any]) -> dict[tuple[str, int | None], list[tuple[Any, ...]]]:
    """What a user gets, by request and stage; stock up to 0.28 may lose the metrics of a stage that nobody sees."""
    return sequences(each for each in messages if type(each).__name__ == "OutputMessage")


@MODES
def test_the_orchestrator_serves_what_stages_send(event_driven: bool) -> None:
    """A message for each visible output with tokens or samples, in its request's order; each request ends once."""
    messages = served(pipeline(event_driven), put)
    visible = Counter((each.request_id, each.stage_id) for each in messages if type(each).__name__ == "OutputMessage")
    assert {name: visible[name, TEXT] for name in STEPS} == STEPS
    for name, steps in STEPS.items():
        assert visible[name, AUDIO] >= len(range(0, steps, 3)), visible
    assert visible.keys() == {(name, stage) for name in STEPS for stage in (TEXT, AUDIO)}
    assert endings(messages) == dict.fromkeys(STEPS, (1, "end"))
    for (name, stage), sent in outputs(messages).items():
        if stage == TEXT:
            tokens = [each[3][0]["token_ids"] for each in sent]
            assert list(itertools.chain(*tokens)) == [100 + step for step in range(STEPS[name])]
