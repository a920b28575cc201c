"""How long an output waits on its way, at low load, and how often an idle pipeline wakes.

    python -m benchmarks.latency

One stage. A feeder process sends real raw outputs over ZMQ; vLLM's socket reader decodes them; the real loop, stage
pool, output processor and routing handle them on the orchestrator's thread; the real front-end drain on uvloop hands
them to a request's queue. Four stamps for each: arrived in the client's queue, processing starts, routed, handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.arms import ARMS, FASTPATH, STOCK, alternate, parser, spread, switch_on

OUTPUTS = 1000
GAP_S = 0.006
"""Mean gap between two outputs: far below saturation, and longer than the poll loop's cadence."""
IDLE_S = 5.0
ROUNDS = 3


def feed(address: str, count: int, seed: int) -> None:
    """The feeder process: one raw output every ``GAP_S`` on average, numbered in its token id."""
    import zmq
    from vllm.v1.serial_utils import MsgpackEncoder

    from benchmarks.inprocess import batch, text

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


def measure(count: int) -> dict[str, float]:
    """Run the pipeline in this process and return percentiles in microseconds and wakes a second."""
    import uvloop

    return uvloop.run(_measure(count))


async def _measure(count: int) -> dict[str, float]:
    import zmq
    import zmq.asyncio
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm_omni.engine import OmniEngineCoreOutputs

    from benchmarks.inprocess import Pipeline, Stage

    arrived: list[int] = []
    starts: list[int] = []
    routed: list[int] = []
    handed: list[int] = []
    pipeline = Pipeline([Stage(final_output=True, modality="text")])
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
    front_end = _front_end(pipeline, handed)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        address = f"ipc://{Path(folder) / 'feed'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PULL)  # type: ignore[attr-defined] # used by the orchestrator's loop only
        socket.bind(address)
        replica.read_from(socket, MsgpackDecoder(OmniEngineCoreOutputs))
        running.enter_context(pipeline)
        front_end._final_output_handler()
        feeder = context.Process(target=feed, args=(address, count, 1))
        feeder.start()
        while len(handed) < count:  # noqa: ASYNC110 - the hand-over is upstream's; polling it disturbs nothing
            await asyncio.sleep(0.05)
        await asyncio.to_thread(feeder.join)
        orchestrator_thread, front_end_thread = pipeline._thread.native_id, threading.get_native_id()
        before = _switches(orchestrator_thread), _switches(front_end_thread)
        await asyncio.sleep(IDLE_S)
        after = _switches(orchestrator_thread), _switches(front_end_thread)
        front_end.final_output_task.cancel()
        await asyncio.gather(front_end.final_output_task, return_exceptions=True)
    hops = {
        "arrival to processing": [b - a for a, b in zip(arrived[:count], starts, strict=True)],
        "routed to handed over": [b - a for a, b in zip(routed, handed, strict=True)],
    }
    figures = {}
    for name, values in hops.items():
        ranked = sorted(values[len(values) // 10 :])  # the first ones pay for imports and caches
        figures[f"{name} p50"] = ranked[len(ranked) // 2] / 1000
        figures[f"{name} p99"] = ranked[int(len(ranked) * 0.99)] / 1000
    figures["idle wakes/s, orchestrator"] = (after[0] - before[0]) / IDLE_S
    figures["idle wakes/s, front end"] = (after[1] - before[1]) / IDLE_S
    return figures


def _front_end(pipeline: Any, handed: list[int]) -> Any:
    """Upstream's front end with its own drain, without a server around it."""
    from vllm_omni.engine.omni_engine_base import OmniEngineBase
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.client_request_state import ClientRequestState

    class Engine(OmniEngineBase):  # type: ignore[misc]
        def __init__(self) -> None:  # no super(): there are no stages
            self.output_queue = pipeline.outputs

        def is_alive(self) -> bool:
            return True

        def __del__(self) -> None:
            """Nothing to shut down."""

    front_end = object.__new__(AsyncOmni)
    front_end.engine, front_end.final_output_task = Engine(), None
    front_end.request_states = {"one": ClientRequestState("one", queue=StampedQueue(handed))}
    return front_end


def _switches(thread: int | None) -> int:
    """How often the kernel saw a thread go to sleep: one for each wake."""
    for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise RuntimeError("the kernel does not count context switches")


def main() -> None:
    """Run one arm (``--arm``), or both and print the table."""
    arguments = parser(__doc__, ROUNDS)
    arguments.add_argument("--outputs", type=int, default=OUTPUTS)
    options = arguments.parse_args()
    if options.arm:
        switch_on(ARMS[options.arm])
        print(json.dumps(measure(options.outputs)))
        return
    results = alternate("benchmarks.latency", (STOCK, FASTPATH), options.rounds, "--outputs", str(options.outputs))
    print(f"\nLow load, one stage, {options.outputs} outputs a run: median of {options.rounds} runs (least to most)")
    print(f"{'':34}{'stock':>30}{'fastpath':>30}{'ratio':>10}")
    for name in results["stock"][0]:
        unit = "" if "wakes" in name else " (us)"
        stock, fast = ([run[name] for run in results[arm]] for arm in ("stock", "fastpath"))
        cells = [spread(values) for values in (stock, fast)]
        ratio = statistics.median(fast) / max(statistics.median(stock), 1e-9)
        print(f"{name + unit:34}{cells[0]:>30}{cells[1]:>30}{ratio:>10.2f}")


if __name__ == "__main__":
    main()
