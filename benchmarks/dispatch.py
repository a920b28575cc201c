"""What dispatch costs: the real loops with queued raw outputs, processing stubbed.

    python -m benchmarks.dispatch

Upstream's processing, routing and terminal bookkeeping are replaced by functions that do nothing, so that what remains
is dequeue, keep-or-drop rule, order, budget, judging, yields, and the stubs themselves, which are printed. 15 of 16 raw
outputs bring nobody anything, the queue of issue #4561. ``others wait``: 200 more stand at each of the two stages
before, so that stages are chosen between; the figure is for each of the 600.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import ARMS, EVENT, FASTPATH, IN_TURN, STOCK, Arm, alternate, parser, spread, switch_on

ITEMS = 200
EVERY = 16
"""One raw output in so many brings somebody something."""
ROUNDS = 5

SUBJECTS = (STOCK, EVENT, FASTPATH, IN_TURN)


@dataclass(frozen=True)
class Case:
    """What is queued: ``entries`` requests in a raw output, and whether other stages have a backlog too."""

    entries: int
    contested: bool = False


CASES = {"batches of 1": Case(1), "batches of 32": Case(32), "of 1, others wait": Case(1, contested=True)}


def measure(arm: Arm, case: Case, repeats: int) -> list[float]:
    """Microseconds of dispatch a raw output, once a repeat."""
    from benchmarks.inprocess import Pipeline, audio, batch, codes, silent, text

    names = [f"r{number}" for number in range(case.entries)]
    heard, unheard = [audio(name, 1.0) for name in names], [silent(name) for name in names]
    outputs = {each: [_request_output(name, heard=each) for name in names] for each in (True, False)}
    figures = []
    for _ in range(repeats):
        pipeline = Pipeline(event_driven=arm.event_driven)
        for name in names:
            pipeline.add_request(name)
        orchestrator = pipeline.orchestrator
        routable = [number % EVERY == EVERY - 1 for number in range(ITEMS)]
        processed = [outputs[each] for each in routable]
        stamps: list[int] = []
        _stub(orchestrator, processed * 3, stamps)
        total = ITEMS
        if case.contested:
            total = 3 * ITEMS
            pipeline.put(0, *(batch(*(text(name, 1) for name in names)) for _ in range(ITEMS)))
            pipeline.put(1, *(batch(*(codes(name) for name in names)) for _ in range(ITEMS)))
        pipeline.put(2, *(batch(*(heard if each else unheard)) for each in routable))
        with pipeline:
            while len(stamps) < total:
                time.sleep(0.01)
        # From the first to the last: without the thread's and the orchestrator's start.
        figures.append((stamps[-1] - stamps[0]) / 1000 / (total - 1))
    return figures


def _stub(orchestrator: Any, processed: list[Any], stamps: list[int]) -> None:
    """Replace the work; the stubs do as little as they can, because what they cost counts as dispatch."""
    take = iter(processed).__next__

    async def process(*_: Any) -> Any:
        return take()

    async def handle(*_: Any, stamp: Any = stamps.append) -> None:
        stamp(time.perf_counter_ns())

    async def finish(*_: Any) -> None:
        return

    orchestrator._process_llm_stage_outputs = process
    orchestrator._handle_processed_outputs = handle
    orchestrator._finish_raw_terminal_requests = finish


def stubs_us(calls: int = 20_000) -> float:
    """What the stubs cost a raw output, microseconds: counted in every arm's figure."""

    class Orchestrator:
        _process_llm_stage_outputs: Any
        _handle_processed_outputs: Any
        _finish_raw_terminal_requests: Any

    orchestrator, stamps = Orchestrator(), list[int]()
    _stub(orchestrator, [None] * calls, stamps)

    async def run() -> None:
        for _ in range(calls):
            await orchestrator._process_llm_stage_outputs(0, 0, None, None)
            await orchestrator._handle_processed_outputs(0, 0, None)
            await orchestrator._finish_raw_terminal_requests(0, 0, None)

    started_ns = time.perf_counter_ns()
    asyncio.run(run())
    return (time.perf_counter_ns() - started_ns) / calls / 1000


def _request_output(name: str, heard: bool) -> Any:
    """What upstream's processing makes of such an entry; made once, because making it is not dispatch."""
    import torch
    from vllm.outputs import RequestOutput
    from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput, MultimodalPayload

    from benchmarks.inprocess import SAMPLE_RATE

    payload = MultimodalPayload({"audio": torch.ones(1 if heard else 0)}, {"sr": SAMPLE_RATE})
    completion = MultimodalCompletionOutput(
        multimodal_output=payload, index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(name, None, [], None, [completion], finished=False)


def main() -> None:
    """Run one arm (``--arm``), or all of them and print the table."""
    options = parser(__doc__, ROUNDS).parse_args()
    if options.arm:
        arm = ARMS[options.arm]
        switch_on(arm)
        repeats = 20 if arm.on or arm.event_driven else 3
        found = {name: statistics.median(measure(arm, case, repeats)) for name, case in CASES.items()}
        print(json.dumps(found | {"stubs": stubs_us()}))
        return
    results = alternate("benchmarks.dispatch", SUBJECTS, options.rounds)
    columns = (*CASES, "stubs")
    print(f"\nDispatch, microseconds a raw output ({ITEMS} queued on the last of three stages, processing stubbed)")
    print(f"{'arm':24}" + "".join(f"{name:>28}" for name in columns))
    for arm in SUBJECTS:
        cells = [spread([each[name] for each in results[arm.name]]) for name in columns]
        print(f"{arm.name:24}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
