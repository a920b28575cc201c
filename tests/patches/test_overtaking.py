"""A request never overtakes itself: its end waits for what already waits of it. On the real orchestrator.

The queues are filled before the loop starts, so that all of it has arrived; stock's event-driven loop, which takes what
waits in the order of the stages, says what the messages are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.patches.content import endings, sequences
from tests.patches.drive import every_look_takes, recording, run, stages, switched_on

pytestmark = pytest.mark.upstream

MODES = pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
CASES: dict[str, dict[str, Any]] = {
    "async_chunk": {"async_chunk": True},
    "no async_chunk": {"async_chunk": False},
    "streaming": {"async_chunk": True, "streaming": True},
}

Fill = Callable[..., Any]


@pytest.fixture
def recorder() -> Iterator[Any]:
    """A recorder of what was dispatched."""
    with recording() as found:
        yield found


def filled(
    *,
    async_chunk: bool = True,
    streaming: bool = False,
    event_driven: bool = True,
    end: str = "stop",
    audio_only: bool = False,
) -> Any:
    """A request ``R`` whose text waits at stage 0, its codes at stage 1 and its last audio at stage 2; ``S`` beside it.

    Args:
        async_chunk: As the deploy YAML's key.
        streaming: ``R`` is a streaming-input session.
        event_driven: The orchestrator's mode.
        end: How ``R`` ends at stage 2: ``stop``, ``error``, or ``swallowed`` (its output processor has forgotten it).
        audio_only: The user of ``R`` asked for audio alone of a pipeline that gives text too.
    """
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

    pipeline = Pipeline(stages(1), async_chunk=async_chunk, event_driven=event_driven)
    for request in ("R", "S"):
        state = pipeline.add_request(request, resumable=streaming)
        if audio_only:
            state.final_output_stage_ids = {2}
    stop = FinishReason.STOP
    pipeline.put(0, *(batch(text("R", n), text("S", n)) for n in range(5)), batch(text("R", 5, finish=stop)))
    pipeline.put(1, *(batch(codes("R"), codes("S")) for _ in range(5)), batch(codes("R", finish=stop)))
    last = audio("R", 9.0, finish=FinishReason.ERROR if end == "error" else stop)
    if end == "error":
        last.stop_reason = "it broke"
    if end == "swallowed":
        pipeline.pools[2].output_processor.remove_request("R")
    pipeline.put(2, batch(audio("R", 1.0)), batch(last, audio("S", 2.0)), batch(audio("S", 3.0)))
    return pipeline


def of(request_id: str, messages: list[Any]) -> list[Any]:
    """One request's messages."""
    return [each for each in messages if each.request_id == request_id]


def dispatched(recorder: Any) -> list[tuple[int, list[str]]]:
    """Stage and requests of each raw output, in the order of dispatch."""
    return [(stage, [entry.request_id for entry in raw.outputs]) for stage, _, raw in recorder.of("dequeued")]


@MODES
@pytest.mark.parametrize("end", ["stop", "error", "swallowed"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_request_is_lost(case: str, end: str, event_driven: bool) -> None:
    """Of each stage the messages are stock's, and the last one of the request is its end, once."""
    given: dict[str, Any] = {"end": end, **CASES[case]}
    stock = run(filled(event_driven=True, **given))
    with switched_on(floor=0.0):
        fast = run(filled(event_driven=event_driven, **given))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock)
    assert endings(fast)["R"] == (1, "end")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("end", ["stop", "error", "swallowed"])
def test_audio_alone_of_a_pipeline_with_text(end: str, case: str) -> None:
    """A request for audio alone loses no message either, where upstream keeps only the last."""
    given: dict[str, Any] = {"end": end, "audio_only": True, **CASES[case]}
    stock = run(filled(**given))
    with switched_on(floor=0.0):
        fast = run(filled(**given))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock)


def test_others_in_the_raw_output_are_not_delayed(recorder: Any) -> None:
    """What shares a raw output with an end that is held goes on at once, and those behind it before it."""
    with switched_on(floor=0.0):
        run(filled())
    order_of = dispatched(recorder)
    assert order_of[:2] == [(2, ["R"]), (2, ["S"])]
    held = order_of.index((2, ["R"]), 1)
    assert order_of.index((2, ["S"]), 2) < held  # when, the floor of the stages that the end waits for says
    assert held > max(n for n, (stage, requests) in enumerate(order_of) if stage < 2 and "R" in requests)


def test_holds_are_counted(recorder: Any) -> None:
    """Each end that is held is counted once, and none where nothing waits at the stages before."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch
    from omni_fastpath.ledger import LEDGER

    counters = LEDGER.named("budgeted_drain").counters
    with switched_on(order="downstream_first", floor=0.0):
        run(filled())
        assert counters["held"] == 2  # at stage 1 behind the text, at stage 2
        pipeline = Pipeline()
        pipeline.add_request("alone")
        pipeline.put(2, batch(audio("alone", 1.0, finish=FinishReason.STOP)))
        run(pipeline)
        assert counters["held"] == 2


@MODES
def test_scheduler_statistics_of_a_split_raw_output_are_recorded_once(event_driven: bool) -> None:
    """Statistics and finished ids stay with the raw output that they came with, and do not wait."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import SchedulerStats

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline(event_driven=event_driven)
    pipeline.add_request("R")
    pipeline.put(0, batch(text("R", 1)), batch(text("R", 2, finish=FinishReason.STOP)))
    stats = SchedulerStats(num_waiting_reqs=3)
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP), stats=stats, finished=["R"]))
    seen: list[Any] = []
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def spy(stage_id: int, replica_id: int, raw: Any, ids: set[str]) -> Any:
        seen.append((stage_id, len(raw.outputs), raw.scheduler_stats, raw.finished_requests))
        return await process(stage_id, replica_id, raw, ids)

    pipeline.orchestrator._process_llm_stage_outputs = spy
    with switched_on(floor=0.0):
        run(pipeline)
    assert seen == [(2, 0, stats, {"R"}), (0, 1, None, None), (0, 1, None, None), (2, 1, None, None)]


def test_segment_end_is_not_held(recorder: Any) -> None:
    """A segment's end ends no request: it goes in its place."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline()
    pipeline.add_request("R", resumable=True)
    pipeline.put(0, *(batch(text("R", n)) for n in range(3)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP, is_segment_finished=True)), batch(audio("R", 2.0)))
    with switched_on(floor=0.0):
        run(pipeline)
    assert [stage for stage, _ in dispatched(recorder)] == [2, 2, 0, 0, 0]


@MODES
def test_hold_ends_when_the_replica_that_it_waits_for_is_evicted(event_driven: bool) -> None:
    """Text on a replica that is gone is never dispatched; the end that waited for it is."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline(stages(2), event_driven=event_driven)
    pipeline.add_request("R")
    pipeline.add_request("S", replicas=[1, 0, 0])
    pipeline.put(0, batch(text("R", 1)))
    pipeline.put(0, *(batch(text("S", n)) for n in range(3)), replica_id=1)
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP), audio("S", 1.0)))
    handle = pipeline.orchestrator._handle_processed_outputs

    async def evicts(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        """Evict R's thinker as soon as anything else is dispatched, between two raw outputs."""
        await handle(stage_id, replica_id, outputs)
        if pipeline.pools[0].clients[0] is not None:
            pipeline.pools[0].evict_replica(0)
            del pipeline.replicas[0][0]  # nobody waits for its queue

    pipeline.orchestrator._handle_processed_outputs = evicts
    with switched_on(floor=0.0), recording() as recorder:
        messages = run(pipeline)
    assert (0, ["R"]) not in dispatched(recorder)
    assert (2, ["R"]) in dispatched(recorder)
    assert [type(each).__name__ for each in of("S", messages)] == ["OutputMessage"] * 4


@pytest.mark.parametrize("end", ["STOP", "ERROR"])
@pytest.mark.parametrize("audio_only", [False, True])
def test_end_waits_for_what_came_before_it(recorder: Any, end: str, audio_only: bool) -> None:
    """Text that comes after an end is not waited for, unless it would overwrite the audio message at upstream."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline(stages(1))
    state = pipeline.add_request("R")
    if audio_only:
        state.final_output_stage_ids = {2}
    pipeline.put(0, batch(text("R", 1)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason[end])))
    handle = pipeline.orchestrator._handle_processed_outputs
    more = [batch(text("R", 2)), batch(text("R", 3, finish=FinishReason.STOP))]

    async def arrives(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        await handle(stage_id, replica_id, outputs)
        if stage_id == 0 and more:
            pipeline.replicas[0][0].outputs_queue.put_nowait(more.pop(0))

    pipeline.orchestrator._handle_processed_outputs = arrives
    with switched_on(floor=0.0):
        messages = run(pipeline, lambda running: running.put(1, batch(text("R", 9, finish=FinishReason.STOP))))
    late = audio_only and end == "STOP"
    assert [stage for stage, entries in dispatched(recorder) if entries][:4] == ([0, 0, 0, 2] if late else [0, 2, 0, 0])
    ends = [each for each in messages if each.stage_id == 2]
    assert [type(each).__name__ for each in ends] == ["ErrorMessage" if end == "ERROR" else "OutputMessage"]


def arriving(pipeline: Any, *batches: tuple[int, Any]) -> None:
    """Put raw outputs, each of a stage, into their queues in this order, before anything is dispatched."""

    def put_all() -> None:
        for stage_id, raw in batches:
            pipeline.replicas[stage_id][0].outputs_queue.put_nowait(raw)

    pipeline.settle()
    pipeline.do(put_all)


@MODES
@pytest.mark.parametrize("session", [False, True], ids=["error", "session"])
def test_end_at_a_stage_before_waits_too(session: bool, event_driven: bool) -> None:
    """An error, or a session's end, comes after what came before it at the stages behind, as in stock."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

    stop = FinishReason.STOP

    def fill(running: Any) -> None:
        end = text("R", 2, finish=stop if session else FinishReason.ERROR)
        arriving(
            running,
            *((2, batch(audio("R", float(n)))) for n in range(3)),
            (2, batch(audio("R", 3.0, finish=stop if session else None))),
            (0, batch(text("R", 1))),
            (0, batch(end)),
            *((1, batch(codes("R"))) for _ in range(3)),
            (1, batch(codes("R", finish=stop))),
        )

    def made(event_driven: bool) -> Any:
        pipeline = Pipeline(event_driven=event_driven)
        pipeline.add_request("R", resumable=session)
        return pipeline

    stock = run(made(event_driven=True), fill)
    with switched_on(floor=0.0):
        fast = run(made(event_driven), fill)
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


@MODES
@pytest.mark.parametrize("end", ["image", "error", "death"])
def test_diffusion_end_waits_for_text(end: str, event_driven: bool) -> None:
    """A diffusion stage's end, error or death comes after text that waits, as in stock, and leaves nothing behind."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm_omni.outputs import OmniRequestOutput

    from benchmarks.rigs.inprocess import Pipeline, Stage, batch, text

    def made(event_driven: bool) -> Any:
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

    def messages(pipeline: Any) -> list[Any]:
        with pipeline:  # ``settle`` finds no rest in a loop that polls each millisecond
            while "R" in pipeline.orchestrator.request_states and pipeline.thread.is_alive():
                time.sleep(0.002)
        found = [each for each in pipeline.messages() if each.request_id == "R"]
        return [(each.stage_id, type(each).__name__) for each in found]

    stock = messages(made(event_driven=True))
    with switched_on(floor=0.0):
        pipeline = made(event_driven)
        assert messages(pipeline) == stock
    assert stock[-1] == (1, "OutputMessage" if end == "image" else "ErrorMessage")
    assert "R" not in pipeline.pools[0]._output_timestamps_by_request


def test_end_that_is_held_goes_before_its_replicas_death() -> None:
    """A replica that dies behind a held end: the end is dispatched, and the death is no error of that request."""
    from vllm.v1.engine.exceptions import EngineDeadError

    def dying(*, event_driven: bool) -> Any:
        pipeline = filled(event_driven=event_driven)
        pipeline.put(2, EngineDeadError())
        return pipeline

    stock = run(dying(event_driven=True))
    with switched_on(floor=0.0):
        fast = run(dying(event_driven=True))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock) == {"R": (1, "end"), "S": (1, "end")}
    assert not any(type(each).__name__ == "ErrorMessage" for each in of("R", fast))


def dying_thinker(event_driven: bool, audio_of: str, count: int = 5) -> Any:
    """Two thinkers; ``D`` is bound to the second, which dies; codes of ``S`` wait, and audio of ``audio_of``."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes

    pipeline = Pipeline(stages(2), event_driven=event_driven)
    pipeline.add_request("S")
    pipeline.add_request("D", replicas=[1, 0, 0])
    pipeline.put(1, *(batch(codes("S")) for _ in range(count)))
    pipeline.put(2, *(batch(audio(audio_of, float(n))) for n in range(count)))
    pipeline.put(0, EngineDeadError(), replica_id=1)
    return pipeline


@MODES
def test_death_waits_for_its_own_requests_alone(recorder: Any, event_driven: bool) -> None:
    """The user of a dead replica is told at once when nothing of his waits, whatever else does."""
    with switched_on(order="stage_order", floor=0.0):
        pipeline = dying_thinker(event_driven, "S")
        told: list[int] = []
        dead = pipeline.orchestrator._handle_dead_replica

        async def handle(*given: Any) -> None:
            told.append(len(recorder.of("dequeued")))
            await dead(*given)

        pipeline.orchestrator._handle_dead_replica = handle
        messages = run(pipeline)
    assert told == [0]
    assert [type(each).__name__ for each in of("D", messages)] == ["ErrorMessage"]
    assert len(of("S", messages)) == 5


@MODES
def test_death_that_somebody_else_finds_is_told_once(event_driven: bool) -> None:
    """A dispatch that finds the replica dead while its death is held evicts it: the user gets one error."""
    from vllm.v1.engine.exceptions import EngineDeadError

    with switched_on(order="stage_order", floor=0.0):
        pipeline = dying_thinker(event_driven, "D")
        pool = pipeline.pools[0]
        handle = pipeline.orchestrator._handle_processed_outputs

        async def finds(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
            await handle(stage_id, replica_id, outputs)
            if pool._unavailable_replicas and pool.clients[1] is not None:
                await pipeline.orchestrator._handle_dead_replica(0, 1, EngineDeadError())

        pipeline.orchestrator._handle_processed_outputs = finds
        messages = run(pipeline)
    assert [type(each).__name__ for each in of("D", messages)].count("ErrorMessage") == 1
    assert not pool._unavailable_replicas


@MODES
@pytest.mark.parametrize("end", ["STOP", "ERROR"])
def test_hold_ends_behind_a_backlog_that_never_does(
    end: str, event_driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a floor too, what an end waits for gets its share beside a backlog that goes first and never ends."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes

    every_look_takes(monkeypatch, 40_000)
    with switched_on(floor=0.0):
        pipeline = Pipeline(event_driven=event_driven)
        for request in ("R", "S"):
            pipeline.add_request(request)
        pipeline.put(1, *(batch(codes("R")) for _ in range(5)), batch(codes("R", FinishReason.STOP)))
        pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason[end])), batch(audio("S", 1.0)))
        handle = pipeline.orchestrator._handle_processed_outputs
        dispatched = 0
        waited: list[int] = []

        async def endless(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
            nonlocal dispatched
            await handle(stage_id, replica_id, outputs)
            if stage_id == 2:
                dispatched += 1
                ended = 2 in pipeline.orchestrator.request_states["R"].finished_stage_ids if "R" in states else True
                if ended and not waited:
                    waited.append(dispatched)
                if not waited and dispatched < 20_000:
                    pipeline.replicas[2][0].outputs_queue.put_nowait(batch(audio("S", 1.0)))

        states = pipeline.orchestrator.request_states
        pipeline.orchestrator._handle_processed_outputs = endless
        run(pipeline)
    assert waited
    assert 5 < waited[0] < 20_000


def test_nothing_is_held_when_nothing_waits(recorder: Any) -> None:
    """If somebody else takes what an end waits for out of the queue, the end is let go when all queues are empty."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, silent, text

    pipeline = Pipeline(stages(1))
    pipeline.add_request("R")
    pipeline.add_request("S")
    pipeline.put(0, batch(text("R", 1)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP), silent("S")))
    process = pipeline.orchestrator._process_llm_stage_outputs

    async def thieving(stage_id: int, *rest: Any) -> Any:
        queue = pipeline.replicas[0][0].outputs_queue
        if not queue.empty():
            queue.get_nowait()
        return await process(stage_id, *rest)

    pipeline.orchestrator._process_llm_stage_outputs = thieving
    with switched_on(order="downstream_first", floor=0.0):
        run(pipeline)
    assert dispatched(recorder) == [(2, ["S"]), (2, ["R"])]
