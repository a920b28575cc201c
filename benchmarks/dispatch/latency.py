"""How long an output waits on its way, at low load.

    python -m benchmarks.dispatch.latency

One stage. A feeder process sends real raw outputs over ZMQ; vLLM's socket reader decodes them; the real loop, stage
pool, output processor and routing handle them on the orchestrator's thread; the real front-end drain on uvloop hands
them to a request's queue. Four stamps for each: arrived in the client's queue, processing starts, routed, handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rigs.arms import ARMS, EVENT, FASTPATH, STOCK
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import switch_on
from benchmarks.rigs.results import say, spread
from omni_fastpath.declare import Process
from omni_fastpath.tools.ab import about
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.quantiles import quantile

OUTPUTS = 1000
GAP_S = 0.006
"""Mean gap between two outputs: far below saturation, and longer than the poll loop's cadence."""
ROUNDS = 3


def feed(address: str, count: int, seed: int) -> None:
    """The feeder process: one raw output every ``GAP_S`` on average, numbered in its token id."""
    import zmq
    from vllm.v1.serial_utils import MsgpackEncoder

    from benchmarks.rigs.inprocess import batch, text

    rng = random.Random(seed)
    encoder = MsgpackEncoder()
    socket = zmq.Context().socket(zmq.PUSH)  # type: ignore[attr-defined]
    socket.connect(address)
    time.sleep(0.5)
    for number in range(count):
        time.sleep(rng.uniform(0.2, 1.8) * GAP_S)
        socket.send_multipart(encoder.encode(batch(text("one", number))))
    socket.close(linger=5000)


class StampedQueue(asyncio.Queue):  # type: ignore[type-arg]
    """A client's output queue that notes when each item arrived."""

    def __init__(self, stamps: list[int]) -> None:
        super().__init__()
        self._stamps = stamps

    def _put(self, item: Any) -> None:
        self._stamps.append(time.perf_counter_ns())
        super()._put(item)


def measure(arm: Arm, count: int) -> dict[str, float]:
    """Run the pipeline in this process and return percentiles in microseconds."""
    import uvloop

    return uvloop.run(_measure(arm, count))


async def _measure(arm: Arm, count: int) -> dict[str, float]:
    import zmq
    import zmq.asyncio
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm_omni.engine import OmniEngineCoreOutputs

    from benchmarks.rigs.inprocess import Pipeline, Stage, front_end

    arrived: list[int] = []
    starts: list[int] = []
    routed: list[int] = []
    handed: list[int] = []
    pipeline = Pipeline([Stage(final_output=True, modality="text")], event_driven=arm.event_driven)
    pipeline.add_request("one")
    replica = pipeline.replicas[0][0]
    replica.outputs_queue = StampedQueue(arrived)
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def stamped_process(*args: Any) -> Any:
        starts.append(time.perf_counter_ns())
        return await process(*args)

    put = pipeline.orchestrator.output_async_queue.put

    class StampedOutput:
        async def put(self, message: Any) -> None:
            routed.append(time.perf_counter_ns())
            await put(message)

    pipeline.orchestrator._process_llm_stage_outputs = stamped_process
    pipeline.orchestrator.output_async_queue = StampedOutput()
    drain = front_end(pipeline, {"one": StampedQueue(handed)}, event_driven=arm.event_driven)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        address = f"ipc://{Path(folder) / 'feed'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)  # type: ignore[attr-defined] # used by the orchestrator's loop only
        socket.bind(address)
        replica.read_from(socket, MsgpackDecoder(OmniEngineCoreOutputs))
        running.enter_context(pipeline)
        drain._final_output_handler()
        feeder = context.Process(target=feed, args=(address, count, 1))
        feeder.start()
        while len(handed) < count:  # noqa: ASYNC110 - the hand-over is upstream's; polling it disturbs nothing
            await asyncio.sleep(0.05)
        await asyncio.to_thread(feeder.join)
        drain.final_output_task.cancel()
        await asyncio.gather(drain.final_output_task, return_exceptions=True)
    hops = {
        "arrival to processing": [b - a for a, b in zip(arrived[:count], starts, strict=True)],
        "routed to handed over": [b - a for a, b in zip(routed, handed, strict=True)],
    }
    figures = {}
    for name, values in hops.items():
        counted = values[len(values) // 10 :]  # the first ones pay for imports and caches
        figures[f"{name} p50"] = quantile(counted, 0.5) / 1000
        figures[f"{name} p99"] = quantile(counted, 0.99) / 1000
    return figures


def main() -> None:
    """Run one arm (``--arm``), or both and print the table."""
    options = parser(__doc__, ROUNDS).parse_args()
    if options.arm:
        arm = ARMS[options.arm]
        switch_on(arm, Process.SERVER)
        say(measure(arm, OUTPUTS))
        return
    arms = (STOCK, EVENT, FASTPATH)
    results = alternate("benchmarks.dispatch.latency", arms, options.rounds)
    print(f"\nLow load, one stage, {OUTPUTS} outputs a run: median of {options.rounds} runs (least to most)")
    print(f"{'':34}" + "".join(f"{arm.name:>30}" for arm in arms) + f"{'fastpath / stock':>20}")
    for name in (each for each in results["stock"][0] if each != "about"):
        runs = [[run[name] for run in results[arm.name]] for arm in arms]
        ratio = statistics.median(runs[-1]) / max(statistics.median(runs[0]), 1e-9)
        print(f"{name + ' (us)':34}" + "".join(f"{spread(values):>30}" for values in runs) + f"{ratio:>20.2f}")
    print(about.line())


if __name__ == "__main__":
    main()
