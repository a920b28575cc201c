"""``budgeted_drain``: the orchestrator's real loop, with the work that it dispatches replaced by stubs.

Upstream's processing, routing and terminal bookkeeping do nothing here. What remains is the overhead per raw output:
the put into the client's queue, dequeue, order, budget, yields, and the stubs themselves. It is measured on the
orchestrator's thread, from the first put to the last dispatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.outputs import RequestOutput
from vllm.v1.engine import FinishReason
from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput, MultimodalPayload

from benchmarks.rigs.inprocess import SAMPLE_RATE, Pipeline, audio, batch, codes, silent, text

from .conftest import Measured

EVERY = 16
"""Of raw outputs of code2wav, one in so many has audio (the queue of vllm-omni issue #4561)."""


@dataclass(frozen=True)
class Case:
    """The raw outputs that are queued at once while the loop sleeps.

    Attributes:
        outputs: Raw outputs per stage.
        entries: Requests in each raw output.
        stages: The stages that send them.
        ends: Each raw output of the last stage ends a request whose text is queued at the first.
    """

    outputs: int = 200
    entries: int = 1
    stages: tuple[int, ...] = (0,)
    ends: bool = False


CASES = {
    "idle": Case(outputs=1),
    "1 entry": Case(),
    "32 entries": Case(entries=32),
    "32 entries of audio": Case(entries=32, stages=(2,)),
    "32 entries, others wait": Case(entries=32, stages=(0, 1, 2)),
    "32 entries, ends wait": Case(entries=32, stages=(0, 2), ends=True),
}


@pytest.mark.parametrize("mode", ["poll", "event"])
@pytest.mark.parametrize("name", CASES)
def test_dispatch(measured: Measured, arm: str, name: str, mode: str) -> None:
    """One raw output, in each of upstream's two modes."""
    case = CASES[name]
    slow = arm == "stock" and mode == "poll"  # it waits a millisecond at each empty stage
    measured(lambda: _dispatched(case, event_driven=mode == "event"), 5 if slow else 20)


def _dispatched(case: Case, *, event_driven: bool) -> float:
    """Seconds per raw output."""
    # As long as in a server. With ends, each raw output has later requests, because upstream drops those that ended.
    names = [f"r{number}-{'0' * 32}" for number in range(case.entries + (case.outputs if case.ends else 0))]
    of_one = [names[number : number + case.entries] if case.ends else names for number in range(case.outputs)]
    heard = [number % EVERY == EVERY - 1 for number in range(case.outputs)]
    pipeline = Pipeline(event_driven=event_driven)
    for name in names:
        pipeline.add_request(name)
    made = {each: [_request_output(name, heard=each) for name in of_one[0]] for each in (True, False)}
    stamps: list[float] = []
    _stub(pipeline.orchestrator, [made[each] for each in heard] * 6, stamps.append)
    waiting = [
        (
            pipeline.replicas[stage][0].outputs_queue,
            [batch(*_entries(stage, *each, ends=case.ends)) for each in zip(of_one, heard, strict=True)],
        )
        for stage in case.stages
    ]

    def put_all() -> float:
        began = time.perf_counter()
        for queue, items in waiting:
            for item in items:
                queue.put_nowait(item)
        return began

    total = case.outputs * len(case.stages)
    with pipeline:
        pipeline.settle()
        began, last = pipeline.do(put_all), 0
        while len(stamps) < total or len(stamps) != last:  # ends that were held are dispatched separately
            last = len(stamps)
            time.sleep(0.01)
    return (stamps[-1] - began) / total


def _entries(stage: int, names: Sequence[str], heard: bool, *, ends: bool) -> list[Any]:
    if stage == 0:
        return [text(name, 1) for name in names]
    if stage == 1:
        return [codes(name) for name in names]
    if ends:
        return [audio(names[0], 1.0, finish=FinishReason.STOP), *(audio(name, 1.0) for name in names[1:])]
    return [audio(name, 1.0) if heard else silent(name) for name in names]


def _request_output(name: str, heard: bool) -> Any:
    """The output of upstream's processing, made beforehand because it is not part of dispatch."""
    payload = MultimodalPayload({"audio": torch.ones(1 if heard else 0)}, {"sr": SAMPLE_RATE})
    completion = MultimodalCompletionOutput(
        multimodal_output=payload, index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(name, None, [], None, [completion], finished=False)


def _stub(orchestrator: Any, processed: Iterable[Any], stamp: Callable[[float], Any]) -> None:
    """Replace the work by stubs that do as little as possible, because their cost counts as dispatch."""
    take = iter(processed).__next__

    async def process(*_: Any) -> Any:
        return take()

    async def handle(*_: Any, stamp: Any = stamp) -> None:
        stamp(time.perf_counter())

    async def finish(*_: Any) -> None:
        return

    orchestrator._handle_processed_outputs = handle
    orchestrator._process_llm_stage_outputs = process
    orchestrator._finish_raw_terminal_requests = finish
