"""A request never overtakes itself: its end waits for what already waits of it. On the real orchestrator.

The queues are filled before the loop starts, so that all of it has arrived; stock's event-driven loop, which takes what
waits in the order of the stages, says what the messages are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.patches.content import endings, sequences
from tests.patches.drive import recording, run, stages, switched_on

pytestmark = pytest.mark.upstream

ORDERS = pytest.mark.parametrize("order", ["downstream_first", "visible_first"])
MODES = pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
VISIBLE = {
    "text and audio": (True, False, True),
    "audio": (False, False, True),
    "all three": (True, True, True),
}
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
    visible: tuple[bool, ...] = VISIBLE["text and audio"],
    async_chunk: bool = True,
    streaming: bool = False,
    event_driven: bool = True,
    end: str = "stop",
    audio_only: bool = False,
) -> Any:
    """A request ``R`` whose text waits at stage 0, its codes at stage 1 and its last audio at stage 2; ``S`` beside it.

    Args:
        visible: Which stages the user gets.
        async_chunk: As the deploy YAML's key.
        streaming: ``R`` is a streaming-input session.
        event_driven: The orchestrator's mode.
        end: How ``R`` ends at stage 2: ``stop``, ``error``, or ``swallowed`` (its output processor has forgotten it).
        audio_only: The user of ``R`` asked for audio alone of a pipeline that gives text too.
    """
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, codes, text

    pipeline = Pipeline(stages(1, visible), async_chunk=async_chunk, event_driven=event_driven)
    for request in ("R", "S"):
        state = pipeline.add_request(request, resumable=streaming)
        if not any(visible[:2]) or audio_only:
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


@ORDERS
@MODES
@pytest.mark.parametrize("end", ["stop", "error", "swallowed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seen", VISIBLE)
def test_nothing_of_the_request_is_lost(seen: str, case: str, end: str, event_driven: bool, order: str) -> None:
    """Of each stage the messages are stock's, and the last one of the request is its end, once."""
    given: dict[str, Any] = {"visible": VISIBLE[seen], "end": end, **CASES[case]}
    stock = run(filled(event_driven=True, **given))
    with switched_on(order=order, floor=0.0):
        fast = run(filled(event_driven=event_driven, **given))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock)
    assert endings(fast)["R"] == (1, "end")


@ORDERS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("end", ["stop", "error", "swallowed"])
def test_audio_alone_of_a_pipeline_with_text(end: str, case: str, order: str) -> None:
    """A request for audio alone loses no message either, where upstream keeps only the last."""
    given: dict[str, Any] = {"end": end, "audio_only": True, **CASES[case]}
    stock = run(filled(**given))
    with switched_on(order=order, floor=0.0):
        fast = run(filled(**given))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock)


@ORDERS
def test_others_in_the_raw_output_are_not_delayed(recorder: Any, order: str) -> None:
    """What shares a raw output with an end that is held goes on at once, as do the raw outputs behind it."""
    with switched_on(order=order, floor=0.0):
        run(filled())
    order_of = dispatched(recorder)
    assert order_of[:3] == [(2, ["R"]), (2, ["S"]), (2, ["S"])]
    held = order_of.index((2, ["R"]), 1)
    assert held > max(n for n, (stage, requests) in enumerate(order_of) if stage < 2 and "R" in requests)


def test_holds_are_counted(recorder: Any) -> None:
    """Each end that is held is counted once, and none where nothing waits at the stages before."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch
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


def test_other_requests_backlog_holds_nothing(recorder: Any) -> None:
    """A backlog at the stages before that has nothing of the request does not delay its end."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, codes, text

    pipeline = Pipeline()
    pipeline.add_request("R")
    pipeline.add_request("S")
    pipeline.put(0, *(batch(text("S", n)) for n in range(5)))
    pipeline.put(1, *(batch(codes("S")) for _ in range(5)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)))
    with switched_on(floor=0.0):
        run(pipeline)
    assert dispatched(recorder)[0] == (2, ["R"])


@ORDERS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("audio_only", [False, True])
def test_two_ends_of_a_request_are_let_go_in_order(recorder: Any, order: str, case: str, audio_only: bool) -> None:
    """Ends that are held at two stages are dispatched upstream first, although the other was held first."""
    with switched_on(order=order, floor=0.0):
        messages = run(filled(audio_only=audio_only, **CASES[case]))
    ends = [
        stage
        for stage, _, raw in recorder.of("dequeued")
        if any(entry.request_id == "R" and entry.finish_reason is not None for entry in raw.outputs)
    ]
    assert ends == [0, 1, 2]
    if case != "streaming":  # where upstream's output processor swallows a session's end
        assert [type(each).__name__ for each in of("R", messages) if each.stage_id == 1] == ["StageMetricsMessage"]


@MODES
def test_scheduler_statistics_of_a_split_raw_output_are_recorded_once(event_driven: bool) -> None:
    """Statistics and finished ids stay with the raw output that they came with, and do not wait."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import SchedulerStats

    from benchmarks.inprocess import Pipeline, audio, batch, text

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

    from benchmarks.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline()
    pipeline.add_request("R", resumable=True)
    pipeline.put(0, *(batch(text("R", n)) for n in range(3)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP, is_segment_finished=True)), batch(audio("R", 2.0)))
    with switched_on(floor=0.0):
        run(pipeline)
    assert [stage for stage, _ in dispatched(recorder)] == [2, 2, 0, 0, 0]


def test_text_at_any_replica_is_waited_for(recorder: Any) -> None:
    """Wherever something of the request waits at a stage before, its end comes after it."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline(stages(2))
    pipeline.add_request("R", replicas=[0, 0, 0])
    pipeline.put(0, batch(text("R", 1)), replica_id=1)
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)))
    with switched_on(floor=0.0):
        run(pipeline)
    assert [stage for stage, _ in dispatched(recorder)] == [0, 2]


@MODES
def test_hold_ends_when_the_replica_that_it_waits_for_is_evicted(event_driven: bool) -> None:
    """Text on a replica that is gone is never dispatched; the end that waited for it is."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, text

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


def test_more_text_that_arrives_meanwhile_is_waited_for_too(recorder: Any) -> None:
    """What of the request is read before its end is let go goes first as well."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline()
    pipeline.add_request("R")
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
        run(pipeline)
    assert [stage for stage, _ in dispatched(recorder) if _] == [0, 0, 0, 2]


def test_abort_while_held(recorder: Any) -> None:
    """An end that is held of a request that was aborted meanwhile reaches nobody and stops nothing."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, text

    pipeline = Pipeline()
    pipeline.add_request("R")
    pipeline.add_request("S")
    pipeline.put(0, batch(text("S", 1), text("R", 1)), batch(text("S", 2), text("R", 2)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)))
    handle = pipeline.orchestrator._handle_processed_outputs

    async def aborts(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
        if stage_id == 0:
            await pipeline.orchestrator._cleanup_request_ids(["R"], abort=True)
        await handle(stage_id, replica_id, outputs)

    pipeline.orchestrator._handle_processed_outputs = aborts
    with switched_on(floor=0.0):
        messages = run(pipeline)
    assert of("R", messages) == []
    assert len(of("S", messages)) == 2


@ORDERS
@MODES
def test_death_waits_for_what_waits(event_driven: bool, order: str) -> None:
    """Text that waits when a code2wav replica is found dead is delivered before the error, as in stock."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from benchmarks.inprocess import Pipeline, audio, batch, codes, text

    def dying(event_driven: bool) -> Any:
        pipeline = Pipeline(event_driven=event_driven)
        pipeline.add_request("R")
        pipeline.put(0, *(batch(text("R", n)) for n in range(5)))
        pipeline.put(1, *(batch(codes("R")) for _ in range(5)))
        pipeline.put(2, batch(audio("R", 1.0)), EngineDeadError())
        return pipeline

    stock = run(dying(event_driven=True))
    with switched_on(order=order, floor=0.0):
        fast = run(dying(event_driven))
    assert sequences(fast) == sequences(stock)
    assert Counter(type(each).__name__ for each in fast) == {"OutputMessage": 6, "ErrorMessage": 1}
    assert type(fast[-1]).__name__ == "ErrorMessage"


@ORDERS
def test_end_that_is_held_goes_before_its_replicas_death(order: str) -> None:
    """A replica that dies behind a held end: the end is dispatched, and the death is no error of that request."""
    from vllm.v1.engine.exceptions import EngineDeadError

    def dying(*, event_driven: bool) -> Any:
        pipeline = filled(event_driven=event_driven)
        pipeline.put(2, EngineDeadError())
        return pipeline

    stock = run(dying(event_driven=True))
    with switched_on(order=order, floor=0.0):
        fast = run(dying(event_driven=True))
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock) == {"R": (1, "end"), "S": (1, "end")}
    assert not any(type(each).__name__ == "ErrorMessage" for each in of("R", fast))


def test_nothing_is_held_when_nothing_waits(recorder: Any) -> None:
    """If somebody else takes what an end waits for out of the queue, the end is let go when all queues are empty."""
    from vllm.v1.engine import FinishReason

    from benchmarks.inprocess import Pipeline, audio, batch, silent, text

    pipeline = Pipeline(stages(1))
    pipeline.add_request("R")
    pipeline.add_request("S")
    pipeline.put(0, batch(text("R", 1)))
    pipeline.put(2, batch(audio("R", 1.0, finish=FinishReason.STOP)), batch(silent("S")))
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
