"""``python -m benchmarks.dispatch``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import benchmarks.dispatch
from benchmarks.rigs import about
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.arms import ARMS, EVENT, FASTPATH, FASTPATH_AGAIN, IN_TURN, STOCK
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import switch_on
from benchmarks.rigs.results import say, show, spread
from omni_fastpath.declare import Process

ITEMS = 200
EVERY = 16
"""One raw output in so many brings somebody something."""
ROUNDS = 5

SUBJECTS = (STOCK, EVENT, FASTPATH, IN_TURN, FASTPATH_AGAIN)


@dataclass(frozen=True)
class Case:
    """What is queued.

    Attributes:
        entries: Requests in a raw output.
        stage: The stage whose it is.
        contested: As many wait at each of the other stages.
        ends: As many wait at the last stage, and each of those ends a request.
    """

    entries: int
    stage: int = 0
    contested: bool = False
    ends: bool = False


CASES = {
    "first, of 1": Case(1),
    "first, of 4": Case(4),
    "first, of 32": Case(32),
    "last, of 1": Case(1, stage=2),
    "last, of 32": Case(32, stage=2),
    "of 1, others wait": Case(1, stage=2, contested=True),
    "of 32, others wait": Case(32, stage=2, contested=True),
    "of 32, ends wait": Case(32, ends=True),
}


def request_output(name: str, heard: bool) -> Any:
    """What upstream's processing makes of an entry; made once, because making it is not dispatch."""
    import torch
    from vllm.outputs import RequestOutput
    from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput, MultimodalPayload

    from benchmarks.rigs.inprocess import SAMPLE_RATE

    payload = MultimodalPayload({"audio": torch.ones(1 if heard else 0)}, {"sr": SAMPLE_RATE})
    completion = MultimodalCompletionOutput(
        multimodal_output=payload, index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(name, None, [], None, [completion], finished=False)


def measure(arm: Arm, case: Case, repeats: int) -> list[float]:
    """Microseconds of dispatch a raw output, once a repeat."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text

    # As long as a server's. Where requests end, each raw output is of the next ones: nothing comes of what has ended.
    names = [f"r{number}-{'0' * 32}" for number in range(case.entries + (ITEMS if case.ends else 0))]
    of_one = [names[number : number + case.entries] if case.ends else names for number in range(ITEMS)]
    outputs = {each: [request_output(name, heard=each) for name in of_one[0]] for each in (True, False)}
    routable = [number % EVERY == EVERY - 1 for number in range(ITEMS)]
    stop = FinishReason.STOP

    def raw_outputs(stage: int) -> list[Any]:
        if stage == 0:
            return [batch(*(text(name, 1) for name in each)) for each in of_one]
        if stage == 1:
            return [batch(*(codes(name) for name in each)) for each in of_one]
        if case.ends:
            return [
                batch(*(audio(name, 1.0, finish=None if at else stop) for at, name in enumerate(each)))
                for each in of_one
            ]
        return [batch(*(audio(name, 1.0) if each else silent(name) for name in names)) for each in routable]

    fed = (0, 1, 2) if case.contested else (0, 2) if case.ends else (case.stage,)
    figures = []
    for _ in range(repeats):
        pipeline = Pipeline(event_driven=arm.event_driven)
        for name in names:
            pipeline.add_request(name)
        stamps: list[int] = []
        stub(pipeline.orchestrator, [outputs[each] for each in routable] * 6, stamps.append)
        queues = [pipeline.replicas[stage][0].outputs_queue for stage in fed]
        waiting = [raw_outputs(stage) for stage in fed]
        began: list[int] = []

        def put_all(queues: Any = queues, waiting: Any = waiting, began: list[int] = began) -> None:
            began.append(time.perf_counter_ns())
            for queue, items in zip(queues, waiting, strict=True):
                for item in items:
                    queue.put_nowait(item)

        total = ITEMS * len(fed)
        with pipeline:
            pipeline.settle()
            stamps.clear()
            pipeline.do(put_all)
            last = 0
            while len(stamps) < total or len(stamps) != last:  # what was held is dispatched besides
                last = len(stamps)
                time.sleep(0.01)
        figures.append((stamps[-1] - began[0]) / 1000 / total)
    return figures


def stub(orchestrator: Any, processed: Iterable[Any], stamp: Callable[[int], Any]) -> None:
    """Replace the work; the stubs do as little as they can, because what they cost counts as dispatch."""
    take = iter(processed).__next__

    async def process(*_: Any) -> Any:
        return take()

    async def handle(*_: Any, stamp: Any = stamp) -> None:
        stamp(time.perf_counter_ns())

    async def finish(*_: Any) -> None:
        return

    orchestrator._handle_processed_outputs = handle
    orchestrator._process_llm_stage_outputs = process
    orchestrator._finish_raw_terminal_requests = finish


def main() -> None:
    """Run one arm (``--arm``), or all of them and print the table."""
    options = parser(benchmarks.dispatch.__doc__, ROUNDS).parse_args()
    if options.arm:
        arm = ARMS[options.arm]
        switch_on(arm, Process.SERVER)
        repeats = 20 if arm.on or arm.event_driven else 3
        found = {name: statistics.median(measure(arm, case, repeats)) for name, case in CASES.items()}
        say(found)
        return
    results = alternate("benchmarks.dispatch", SUBJECTS, options.rounds)
    title = f"Dispatch, microseconds a raw output ({ITEMS} put on a stage, processing stubbed)"
    rows = ([name, *(spread([each[case] for each in runs]) for case in CASES)] for name, runs in results.items())
    show(title, ("arm", *CASES), rows)
    print(about.line())


if __name__ == "__main__":
    main()
