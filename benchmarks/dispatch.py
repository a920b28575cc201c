"""What dispatch costs: the real loop, 200 raw outputs on the last of three stages, processing stubbed.

    python -m benchmarks.dispatch

Batches of one request. Upstream's processing, routing and terminal bookkeeping are replaced by functions that do
nothing, so that what remains is dequeue, keep-or-drop rule, judging, budget and yields. ``routable 1 of 16`` is the
queue of issue #4561: fifteen outputs that nobody sees before each one that somebody does.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from benchmarks.arms import ARMS, FASTPATH, ONE_ITEM, STOCK, alternate, parser, spread, switch_on

ITEMS = 200
ROUNDS = 5


def measure(every: int, repeats: int) -> list[float]:
    """Microseconds of dispatch an item, once a repeat; one output in ``every`` is routable."""
    from benchmarks.inprocess import Pipeline, audio, batch, silent

    figures = []
    for _ in range(repeats):
        pipeline = Pipeline()
        pipeline.add_request("one")
        orchestrator = pipeline.orchestrator
        heard, unheard = audio("one", 1.0), silent("one")
        outputs = {True: [_request_output(heard=True)], False: [_request_output(heard=False)]}
        routable = [number % every == every - 1 for number in range(ITEMS)]
        processed = iter([outputs[each] for each in routable])
        stamps: list[int] = []

        # The stubs do as little as they can: what they cost counts as dispatch.
        async def process(*_: Any, take: Any = processed.__next__) -> Any:
            return take()

        async def handle(*_: Any, stamp: Any = stamps.append) -> None:
            stamp(time.perf_counter_ns())

        async def finish(*_: Any) -> None:
            return

        orchestrator._process_llm_stage_outputs = process
        orchestrator._handle_processed_outputs = handle
        orchestrator._finish_raw_terminal_requests = finish
        pipeline.put(2, *(batch(heard if each else unheard) for each in routable))
        with pipeline:
            while len(stamps) < ITEMS:
                time.sleep(0.01)
        # From the first to the last: without the thread's and the orchestrator's start.
        figures.append((stamps[-1] - stamps[0]) / 1000 / (ITEMS - 1))
    return figures


def _request_output(heard: bool) -> Any:
    """What upstream's processing makes of such an entry; made once, because making it is not dispatch."""
    import torch
    from vllm.outputs import RequestOutput
    from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput, MultimodalPayload

    from benchmarks.inprocess import SAMPLE_RATE

    payload = MultimodalPayload({"audio": torch.ones(1 if heard else 0)}, {"sr": SAMPLE_RATE})
    completion = MultimodalCompletionOutput(
        multimodal_output=payload, index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput("one", None, [], None, [completion], finished=False)


def main() -> None:
    """Run one arm (``--arm``), or all of them and print the table."""
    options = parser(__doc__, ROUNDS).parse_args()
    if options.arm:
        arm = ARMS[options.arm]
        switch_on(arm)
        repeats = 20 if arm.on else 3
        print(json.dumps({name: statistics.median(measure(every, repeats)) for name, every in CASES.items()}))
        return
    arms = (STOCK, FASTPATH, ONE_ITEM)
    results = alternate("benchmarks.dispatch", arms, options.rounds)
    print(f"\nDispatch, microseconds a raw output ({ITEMS} queued on the last of three stages, processing stubbed)")
    print(f"{'arm':24}" + "".join(f"{name:>28}" for name in CASES))
    for arm in arms:
        cells = []
        for name in CASES:
            found = [each[name] for each in results[arm.name]]
            cells.append(spread(found))
        print(f"{arm.name:24}" + "".join(f"{cell:>28}" for cell in cells))


CASES = {"routable 1 of 16": 16, "all routable": 1}

if __name__ == "__main__":
    main()
