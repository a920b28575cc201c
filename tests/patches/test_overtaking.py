"""A request never overtakes itself: its end waits for what already waits of it. On the real orchestrator.

The queues are filled before the loop starts, so that all of it has arrived; stock's event-driven loop, which takes what
waits in the order of the stages, says what the messages are.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats
from vllm_omni.outputs import OmniRequestOutput

from benchmarks.rigs.inprocess import Pipeline, Stage, audio, batch, codes, text
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.budgeted_drain.drain import DrainLoop
from tests.patches.content import endings, sequences
from tests.patches.drive import run, stages, switched_on

pytestmark = pytest.mark.upstream


def of(request_id: str, messages: list[Any]) -> list[Any]:
    """One request's messages."""
    return [each for each in messages if each.request_id == request_id]


def test_raw_output_is_split_where_an_end_is_held(event_driven: bool) -> None:
    """Statistics, finished ids and other requests' entries go at once; the end goes after its text, counted as held.

    Meanwhile it keeps itself alive, and not what it came with.
    """
    pipeline = Pipeline(event_driven=event_driven)
    pipeline.add_request("R")
    pipeline.add_request("S")
    pipeline.put(0, batch(text("R", 1)), batch(text("R", 2, finish=FinishReason.STOP)))
    stats = SchedulerStats(num_waiting_reqs=3)
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP), audio("S", 1.0), stats=stats, finished=["R"]))
    seen: list[Any] = []
    kept: list[Any] = []
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def spy(stage_id: int, replica_id: int, raw: Any, ids: set[str]) -> Any:
        seen.append((stage_id, len(raw.outputs), raw.scheduler_stats, raw.finished_requests))
        kept.append([each.raw[0] for each in DrainLoop.running[-1]._dispatcher.works if each.raw])
        return await process(stage_id, replica_id, raw, ids)

    pipeline.orchestrator._process_llm_stage_outputs = spy
    with switched_on(floor=0.0):
        run(pipeline)
        assert LEDGER.named("budgeted_drain").counters["held"] == 1
    assert seen == [(2, 1, stats, {"R"}), (0, 1, None, None), (0, 1, None, None), (2, 1, None, None)]
    [held] = kept[1]
    assert [each.request_id for each in held.outputs] == ["R"]
    assert (held.scheduler_stats, held.finished_requests) == (None, None)


@pytest.mark.parametrize("audio_only", [False, True])
def test_end_waits_for_what_came_before_it(recorder: Any, audio_only: bool) -> None:
    """Text that comes after an end is not waited for, unless it would overwrite the audio message at upstream."""
    pipeline = Pipeline(stages(1))
    state = pipeline.add_request("R")
    if audio_only:
        state.final_output_stage_ids = {2}
    pipeline.put(0, batch(text("R", 1)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)))
    handle = pipeline.orchestrator._handle_processed_outputs
    more = [batch(text("R", 2)), batch(text("R", 3, finish=FinishReason.STOP))]

    async def arrives(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        await handle(stage_id, replica_id, outputs)
        if stage_id == 0 and more:
            pipeline.replicas[0][0].outputs_queue.put_nowait(more.pop(0))

    pipeline.orchestrator._handle_processed_outputs = arrives
    with switched_on(floor=0.0):
        messages = run(pipeline, lambda running: running.put(1, batch(text("R", 9, finish=FinishReason.STOP))))
    order = [stage for stage, _, raw in recorder.of("dequeued") if raw.outputs]
    assert order[:4] == ([0, 0, 0, 2] if audio_only else [0, 2, 0, 0])
    assert [type(each).__name__ for each in messages if each.stage_id == 2] == ["OutputMessage"]


def test_end_goes_when_what_it_waits_for_has_left(recorder: Any, event_driven: bool) -> None:
    """A replica that is detached takes what waits in it along; an end that waited for that goes nevertheless."""
    pipeline = Pipeline(stages(1), event_driven=event_driven)
    pipeline.add_request("R")
    pipeline.put(0, batch(text("R", 1)), batch(text("R", 2)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)))
    handle = pipeline.orchestrator._handle_processed_outputs

    async def detaching(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        await handle(stage_id, replica_id, outputs)
        if stage_id == 0:
            pipeline.pools[0].clients[0] = None
            pipeline.replicas[0].clear()

    pipeline.orchestrator._handle_processed_outputs = detaching
    with switched_on(floor=0.0):
        run(pipeline)
    assert [stage for stage, _, raw in recorder.of("dequeued") if raw.outputs] == [0, 2]


def test_end_of_a_session_waits_for_the_stages_behind(event_driven: bool) -> None:
    """It comes after what came before it there, as in stock: it is the whole session's, at whichever stage."""
    stop = FinishReason.STOP

    def arrive(running: Any) -> None:
        raw = [
            *((2, audio("R", float(n), finish=stop if n == 3 else None)) for n in range(4)),
            (0, text("R", 1)),
            (0, text("R", 2, finish=stop)),
            *((1, codes("R", finish=stop if n == 3 else None)) for n in range(4)),
        ]

        def put_all() -> None:
            for stage_id, entry in raw:
                running.replicas[stage_id][0].outputs_queue.put_nowait(batch(entry))

        running.settle()
        running.do(put_all)

    def made(event_driven: bool) -> Any:
        pipeline = Pipeline(event_driven=event_driven)
        pipeline.add_request("R", resumable=True)
        return pipeline

    stock = run(made(event_driven=True), arrive)
    with switched_on(order="stage_order", floor=0.0):
        fast = run(made(event_driven), arrive)
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock) == {"R": (1, "end")}


class Diffusion:
    """A diffusion stage's client with outputs that wait."""

    stage_type, final_output, final_output_type = "diffusion", True, "image"

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.down = False

    def get_diffusion_output_nowait(self) -> Any:
        """The next output, None without one; an exception among them is raised."""
        if not self.outputs:
            return None
        found = self.outputs.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Nothing runs."""

    def shutdown(self) -> None:
        """Nothing to shut down."""
        self.down = True


def diffusion_pipeline(end: str, event_driven: bool) -> Any:
    """Text of ``R`` and ``S`` waits, and at a diffusion stage an image, an error or a death, which ends ``R``."""
    pipeline = Pipeline((Stage(True, "text"), Stage(True, "image")), async_chunk=False, event_driven=event_driven)
    for request in ("R", "S"):
        pipeline.add_request(request).final_output_stage_ids = {0, 1}
    pipeline.pools[1].output_processor.request_states.clear()
    pipeline.put(0, *(batch(text("R", n), text("S", n)) for n in range(20)))
    pipeline.put(0, batch(text("R", 20, finish=FinishReason.STOP)))
    image = OmniRequestOutput(request_id="R", finished=True, final_output_type="image", images=[1], stage_id=1)
    failed = OmniRequestOutput.from_error("R", "it broke")
    pipeline.pools[1].clients[0] = Diffusion({"image": image, "error": failed, "death": EngineDeadError()}[end])
    del pipeline.replicas[1][0]
    return pipeline
