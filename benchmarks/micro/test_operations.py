"""Single operations with pytest-benchmark: ``make micro``. Not part of the tests; nothing here asserts a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def _on() -> Iterator[None]:
    from benchmarks.rigs.arms import FASTPATH
    from benchmarks.rigs.process_arms import switch_on
    from omni_fastpath.declare import Process
    from omni_fastpath.install import uninstall
    from omni_fastpath.patches import PATCHES

    switch_on(FASTPATH, Process.SERVER)
    yield
    for patch in reversed(PATCHES):
        uninstall(patch)


def test_dequeue_of_one(benchmark: Any) -> None:
    """A put and the non-blocking dequeue of it."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

    replica = Replica(0, QWEN3_OMNI[0], 0)

    def take() -> Any:
        replica.outputs_queue.put_nowait("raw")
        return replica.get_output_nowait()

    assert benchmark(take) == "raw"


def test_pass_of_sixteen(benchmark: Any) -> None:
    """A drain pass over sixteen silent outputs, real processing."""
    from benchmarks.rigs.inprocess import Pipeline, batch, silent
    from omni_fastpath.patches.budgeted_drain.wrappers import drain_loop

    pipeline = Pipeline()
    pipeline.add_request("one")
    orchestrator = pipeline.orchestrator
    loop = drain_loop(orchestrator)
    loop._max_time_ns = 10**12  # the first, cold pass must not end on its time budget
    events = asyncio.new_event_loop()
    events.run_until_complete(loop._look())

    def fill() -> Any:
        pipeline.put(2, *(batch(silent("one")) for _ in range(16)))
        return (), {}

    def drain() -> None:
        stage = loop._order.next()
        assert stage is not None
        events.run_until_complete(loop._pass(stage))

    benchmark.pedantic(drain, setup=fill, rounds=200)
    events.close()
    assert pipeline.replicas[2][0].outputs_queue.empty()


def test_judging_a_silent_output(benchmark: Any) -> None:
    """The default policy on a DELTA output that brings nothing."""
    from benchmarks.dispatch.outputs import request_output
    from benchmarks.rigs.inprocess import Pipeline, batch, silent
    from omni_fastpath.hooks import RawOutputView
    from omni_fastpath.patches.budgeted_drain.upstream import default_policy

    pipeline = Pipeline()
    pipeline.add_request("one")
    view = RawOutputView(
        2, 0, True, batch(silent("one")), [request_output("one", heard=False)], pipeline.orchestrator.request_states
    )
    assert benchmark(default_policy(), view) is False


def test_wakeup_of_the_front_end(benchmark: Any) -> None:
    """From a put on another thread to the awaiting drain, both ways: one put wakes, its answer wakes the other."""
    import janus

    from omni_fastpath.patches.final_output_wakeup.wrappers import WakeOnPut

    there: janus.Queue[int] = janus.Queue()
    back = threading.Event()
    events = asyncio.new_event_loop()

    async def serve() -> None:
        on_put = WakeOnPut.of(there)
        while True:
            waiter = on_put.arm()
            back.set()
            await waiter
            if there.sync_q.get_nowait() < 0:
                return

    thread = threading.Thread(target=events.run_until_complete, args=(serve(),))
    thread.start()

    def round_trip() -> None:
        back.wait()
        back.clear()
        there.sync_q.put_nowait(1)
        back.wait()

    benchmark(round_trip)
    back.wait()
    there.sync_q.put_nowait(-1)
    thread.join()
    events.close()
