"""The drain on whatever release is first on ``PYTHONPATH``: the same messages as stock's, the same ends, and no traces.

The real orchestrator, stage pools, output processors and client; both arms in one process, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, options, recording, stages
from tests.patches.test_budgeted_drain_content import three_stage_script
from tests.patches.test_overtaking import Diffusion, dying_thinker

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

THINKER, TALKER, CODE2WAV = range(3)


@pytest.fixture(params=[False, True], ids=["poll", "event-driven"])
def event_driven(request: pytest.FixtureRequest) -> bool:
    """The modes that this release has."""
    from benchmarks.rigs.upstream import event_driven_modes

    if request.param not in event_driven_modes():
        pytest.skip("this release has no event-driven orchestrator")
    return bool(request.param)


@contextmanager
def drain_on(**values: Any) -> Iterator[None]:
    """The drain and what it requires, installed as a server installs them."""
    with only("nonblocking_dequeue", "budgeted_drain"), options(**values):
        yield


def run(script: Any, event_driven: bool) -> list[Any]:
    """Every message of a pipeline of three stages with two replicas each."""
    from benchmarks.rigs.inprocess import Pipeline

    with Pipeline(stages(2), event_driven=event_driven) as running:
        script(running)
        running.settle()
        found: list[Any] = running.messages()
    assert running.crash is None
    return found


def assert_stock_or_more(stock: list[Any], fast: list[Any]) -> None:
    """The same messages; up to 0.28 stock loses the metrics of a hidden stage that ends after the last one."""
    expected, found = sequences(stock), sequences(fast)
    for key, said in found.items():
        if key[1] == TALKER and key not in expected and not keeps_last_message():
            assert [kind for kind, *_ in said] == ["StageMetricsMessage"]
        else:
            assert said == expected[key]
    assert expected.keys() <= found.keys()
    assert endings(fast) == endings(stock)


def keeps_last_message() -> bool:
    """Whether upstream keeps a request until all of its stages have ended."""
    from vllm_omni.engine.orchestrator import OrchestratorRequestState

    return "pending_final_output" in OrchestratorRequestState.__dataclass_fields__


@pytest.mark.parametrize(
    "values",
    [{}, {"order": "stage_order"}, {"order": "downstream_first", "floor": 0.0}],
    ids=["visible_first", "stage_order", "downstream_first"],
)
@pytest.mark.parametrize(("seed", "kind"), list(enumerate(["DELTA", "CUMULATIVE", "FINAL_ONLY"])))
@pytest.mark.parametrize("bursts", [False, True], ids=["at once", "in bursts"])
def test_messages_are_the_same(event_driven: bool, bursts: bool, seed: int, kind: str, values: dict[str, Any]) -> None:
    """Every request and stage gets the same messages in the same order, its end last and once."""
    from vllm.sampling_params import RequestOutputKind

    from omni_fastpath.ledger import LEDGER

    script = three_stage_script(seed, RequestOutputKind[kind], bursts=bursts)
    stock = run(script, event_driven)
    with drain_on(**values):
        fast = run(script, event_driven)
    assert LEDGER.named("budgeted_drain").counters["items"] > 0
    assert not LEDGER.named("budgeted_drain").counters["judge_errors"]
    assert_stock_or_more(stock, fast)
    assert endings(fast) == {f"request-{n}": (1, "end") for n in range(6)}


def test_a_request_does_not_overtake_itself(event_driven: bool) -> None:
    """The end of its audio waits for its text and its codes, however much of that stands in the queues."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

    stop = FinishReason.STOP
    with drain_on(floor=0.0):
        pipeline = Pipeline(stages(1), event_driven=event_driven)
        pipeline.add_request("one")
        pipeline.put(THINKER, *(batch(text("one", at)) for at in range(40)), batch(text("one", 99, finish=stop)))
        pipeline.put(TALKER, *(batch(codes("one")) for _ in range(40)), batch(codes("one", finish=stop)))
        pipeline.put(CODE2WAV, batch(audio("one", 1.0)), batch(audio("one", 2.0, finish=stop)))
        with pipeline:
            pipeline.settle()
        found = [(each.stage_id, type(each).__name__) for each in pipeline.messages()]
    assert found[0] == (CODE2WAV, "OutputMessage")
    assert found[-1] == (CODE2WAV, "OutputMessage")
    assert found.count((THINKER, "OutputMessage")) == 41
    assert found.count((TALKER, "StageMetricsMessage")) == 1


def test_statistics_of_a_held_end_are_not_lost(event_driven: bool) -> None:
    """Where upstream drops what has statistics alone, they go with the entry that is held."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import SchedulerStats

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, text

    with drain_on():
        pipeline = Pipeline(stages(1), event_driven=event_driven)
        pipeline.add_request("one")
        pipeline.put(THINKER, *(batch(text("one", at)) for at in range(3)))
        stats = SchedulerStats(num_waiting_reqs=3)
        pipeline.put(CODE2WAV, batch(audio("one", 2.0, finish=FinishReason.STOP), stats=stats))
        seen = []
        process = pipeline.pools[CODE2WAV].process_llm_raw_outputs

        async def spy(replica_id: int, raw: Any, **given: Any) -> Any:
            seen.append(raw.scheduler_stats)
            return await process(replica_id, raw, **given)

        pipeline.pools[CODE2WAV].process_llm_raw_outputs = spy
        with pipeline:
            pipeline.settle()
    assert [each for each in seen if each is not None] == [stats]


@pytest.mark.parametrize("error", ["EngineDeadError", "RuntimeError"])
@pytest.mark.parametrize("backlog", [False, True])
def test_errors_end_what_stock_lets_them_end(event_driven: bool, backlog: bool, error: str) -> None:
    """A replica's death, and an exception that nobody knows: the same messages, the same orchestrator afterwards.

    With a backlog, of each request only what it ends with: stock may dispatch the death first.
    """

    def outcome() -> Any:
        from vllm.v1.engine import FinishReason
        from vllm.v1.engine.exceptions import EngineDeadError

        from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

        raised = EngineDeadError("engine is gone") if error == "EngineDeadError" else RuntimeError("odd")
        pipeline = Pipeline(stages(2), event_driven=event_driven)
        pipeline.add_request("a", replicas=[0, 0, 0])
        pipeline.add_request("b", replicas=[1, 1, 1])
        pipeline.__enter__()
        pipeline.put(THINKER, batch(text("a", 1)), batch(text("a", 2)))
        pipeline.put(THINKER, batch(text("b", 1)), replica_id=1)
        pipeline.put(CODE2WAV, batch(audio("a", 1.0)))
        pipeline.put(CODE2WAV, batch(audio("b", 2.0)), replica_id=1)
        pipeline.settle()
        if backlog:
            pipeline.do(lambda: _queue(pipeline, CODE2WAV, *(batch(audio("a", float(at))) for at in range(40))))
        pipeline.do(lambda: _queue(pipeline, TALKER, batch(codes("a")), raised))
        found = _told(pipeline, error)
        if pipeline.thread.is_alive():
            pipeline.put(CODE2WAV, batch(audio("b", 3.0, finish=FinishReason.STOP)), replica_id=1)
            pipeline.put(THINKER, batch(text("b", 2, finish=FinishReason.STOP)), replica_id=1)
            pipeline.put(TALKER, batch(codes("b", finish=FinishReason.STOP)), replica_id=1)
            pipeline.settle()
            pipeline.__exit__()
        found += pipeline.messages()
        orchestrator = pipeline.orchestrator
        said = endings(found) if backlog else sequences(found)
        fatal = [getattr(orchestrator, name, None) for name in ("_fatal_error", "_fatal_error_stage_id")]
        return said, type(pipeline.crash).__name__, fatal, orchestrator._shutdown_event.is_set()

    stock = outcome()
    with drain_on():
        fast = outcome()
    if not keeps_last_message() and isinstance(stock[0], dict):
        fast[0].pop(("b", TALKER), None)
        stock[0].pop(("b", TALKER), None)
    assert fast == stock


def _queue(pipeline: Any, stage_id: int, *items: Any) -> None:
    for item in items:
        pipeline.replicas[stage_id][0].outputs_queue.put_nowait(item)


def _told(pipeline: Any, error: str) -> list[Any]:
    """What the orchestrator says until it has ended by the error, or has told somebody of it and has nothing to do."""
    found: list[Any] = []
    while error == "EngineDeadError" and not any(type(each).__name__ == "ErrorMessage" for each in found):
        found.append(pipeline.outputs.sync_q.get(timeout=120))
    if error == "EngineDeadError" and not pipeline.orchestrator._shutdown_event.is_set():
        pipeline.settle()
    else:
        pipeline.thread.join(timeout=120)
        assert not pipeline.thread.is_alive()
    return found


def test_a_death_waits_for_what_came_before_it(event_driven: bool) -> None:
    """What of a request waits at another stage is delivered before its error, also where the death ends everything."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from benchmarks.rigs.inprocess import Pipeline, audio, batch

    with drain_on(order="stage_order"):
        pipeline = Pipeline(stages(1), event_driven=event_driven)
        pipeline.add_request("one")
        pipeline.put(CODE2WAV, *(batch(audio("one", float(at))) for at in range(40)))
        pipeline.put(THINKER, EngineDeadError("gone"))
        pipeline.__enter__()
        found = _told(pipeline, "EngineDeadError")
        if pipeline.thread.is_alive():
            pipeline.__exit__()
        kinds = [type(each).__name__ for each in found + pipeline.messages()]
    assert kinds == ["OutputMessage"] * 40 + ["ErrorMessage"]


@pytest.mark.parametrize("slot", ["kept", "replaced", "detached"])
def test_a_death_is_told_once_whatever_becomes_of_its_slot(event_driven: bool, slot: str) -> None:
    """Who was bound to the dead replica gets what came before, then one error; the one in its slot is not touched."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

    with drain_on(order="stage_order", floor=0.0):
        pipeline = dying_thinker(event_driven, "D")
        pool, dead = pipeline.pools[THINKER], pipeline.replicas[THINKER][1]
        if not hasattr(pool, "_unavailable_replicas"):
            pytest.skip("a death ends the orchestrator on this release")
        new = Replica(THINKER, QWEN3_OMNI[THINKER], 1)
        handle = pipeline.orchestrator._handle_processed_outputs

        async def attaches(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
            await handle(stage_id, replica_id, outputs)
            if slot != "kept" and pool._unavailable_replicas and pool.clients[1] is dead:
                if slot == "replaced":
                    pool.add_client("tcp://new", new, replica_id=1)
                else:
                    pool.clients[1] = None

        pipeline.orchestrator._handle_processed_outputs = attaches
        with pipeline:
            pipeline.settle()
    messages = pipeline.messages()
    assert [(each.request_id, type(each).__name__) for each in messages] == [
        *[("D", "OutputMessage")] * 5,
        ("D", "ErrorMessage"),
    ]
    assert list(pipeline.orchestrator.request_states) == ["S"]
    assert pool.select_replica_id("somebody new") == 0
    if slot == "replaced":
        assert pool.clients[1] is new
        assert pool.is_replica_available(1)


@pytest.mark.parametrize("end", ["image", "error", "death"])
def test_a_diffusion_stages_end_waits_for_text(event_driven: bool, end: str) -> None:
    """Its image, its error or its death comes after the text that waits; what it says is stock's."""
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm_omni.outputs import OmniRequestOutput

    from benchmarks.rigs.inprocess import Pipeline, Stage, batch, text

    def outcome(texts: int) -> Any:
        pipeline = Pipeline((Stage(True, "text"), Stage(True, "image")), async_chunk=False, event_driven=event_driven)
        pipeline.add_request("R").final_output_stage_ids = {0, 1}
        pipeline.pools[1].output_processor.request_states.clear()
        pipeline.put(THINKER, *(batch(text("R", n)) for n in range(texts)))
        pipeline.put(THINKER, batch(text("R", 99, finish=FinishReason.STOP)))
        image = OmniRequestOutput(request_id="R", finished=True, final_output_type="image", images=[1], stage_id=1)
        failed = OmniRequestOutput.from_error("R", "it broke")
        pipeline.pools[1].clients[0] = Diffusion({"image": image, "error": failed, "death": EngineDeadError()}[end])
        del pipeline.replicas[1][0]
        states = pipeline.orchestrator.request_states
        with pipeline:
            while "R" in states and not pipeline.orchestrator._shutdown_event.is_set() and pipeline.thread.is_alive():
                time.sleep(0.005)
        said = [(each.stage_id, type(each).__name__) for each in pipeline.messages()]
        return said, type(pipeline.crash).__name__

    stock = outcome(0)
    with drain_on(floor=0.0):
        fast = outcome(20)
    assert fast[1] == stock[1]
    assert fast[0][:21] == [(THINKER, "OutputMessage")] * 21
    assert fast[0][21:] == [each for each in stock[0] if each[0] != THINKER]


def test_a_replica_that_is_attached_meanwhile_is_served(event_driven: bool) -> None:
    """It wakes the loop, and what it sends comes."""
    from benchmarks.rigs.inprocess import Pipeline, Replica, Stage, audio, batch
    from benchmarks.rigs.upstream import add_client

    with drain_on(), Pipeline(stages(1), event_driven=event_driven) as pipeline:
        pipeline.settle()
        late = pipeline.do(lambda: Replica(CODE2WAV, Stage(True, "audio"), 1))
        pipeline.replicas[CODE2WAV].append(late)
        assert pipeline.do(lambda: add_client(pipeline.pools[CODE2WAV], "tcp://late", late)) == 1
        pipeline.do(lambda: pipeline.add_request("one", replicas=[0, 0, 1]))
        pipeline.put(CODE2WAV, batch(audio("one", 1.0)), replica_id=1)
        pipeline.settle()
        assert [each.stage_id for each in pipeline.messages()] == [CODE2WAV]


def test_nothing_is_left_behind(event_driven: bool) -> None:
    """After the patches are taken off every slot holds the very object that it held, and so does each queue."""
    from benchmarks.rigs.inprocess import Pipeline, audio, batch
    from omni_fastpath.install import seams_here
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.seams import find

    ours = [patch for patch in PATCHES if patch.name in ("nonblocking_dequeue", "budgeted_drain")]
    slots = [find(seam) for patch in ours for seam in seams_here(patch)]
    before = [slot.raw() for slot in slots]
    with drain_on():
        assert [slot.raw() for slot in slots] != before
        with Pipeline(stages(1), event_driven=event_driven) as pipeline:
            pipeline.add_request("one")
            pipeline.put(CODE2WAV, batch(audio("one", 1.0)))
            pipeline.settle()
        assert "put_nowait" not in vars(pipeline.replicas[CODE2WAV][0].outputs_queue)
    assert [slot.raw() for slot in slots] == before
    assert pipeline.crash is None


def test_hooks_are_called(event_driven: bool) -> None:
    """Each raw output, each pass and each output that is routed is seen."""
    from benchmarks.rigs.inprocess import Pipeline, audio, batch

    with drain_on(), recording() as recorder:
        pipeline = Pipeline(stages(1), event_driven=event_driven)
        pipeline.add_request("one")
        pipeline.put(CODE2WAV, batch(audio("one", 1.0)), batch(audio("one", 2.0)))
        with pipeline:
            pipeline.settle()
    assert len(recorder.of("dequeued")) == len(recorder.of("routed")) == 2
    assert sum(report.items for (report,) in recorder.of("pass")) == 2


# ---- First audio that the stage before sends ----


def _first_audio_scenario(event_driven: bool) -> list[Any]:
    import torch
    from vllm.v1.engine import FinishReason
    from vllm_omni.data_entry_keys import FIRST_AUDIO_KEY, FIRST_AUDIO_REQUIRED_KEY

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, text

    def marked(name: str, key: str, *samples: float) -> Any:
        entry = audio(name, *samples)
        entry.multimodal_output[key] = torch.tensor(True)
        return batch(entry)

    names, stop = [f"r{number}" for number in range(4)], FinishReason.STOP
    pipeline = Pipeline(stages(1), event_driven=event_driven)
    for name in names:
        pipeline.add_request(name)
    pipeline.put(CODE2WAV, *(marked(name, FIRST_AUDIO_REQUIRED_KEY, 1.0, 2.0) for name in names))
    pipeline.put(THINKER, *(batch(text(name, step)) for step in range(30) for name in names))
    pipeline.put(TALKER, *(marked(name, FIRST_AUDIO_KEY, 9.0) for name in names))
    with pipeline:
        pipeline.settle()
        # Later, because a stage that an end waits for has a floor.
        pipeline.put(CODE2WAV, *(batch(audio(name, 3.0, finish=stop)) for name in names))
        pipeline.put(TALKER, *(batch(codes(name, finish=stop)) for name in names))
        pipeline.put(THINKER, *(batch(text(name, 99, finish=stop)) for name in names))
        pipeline.settle()
    assert pipeline.crash is None
    return pipeline.messages()


def test_first_audio_goes_before_what_nobody_hears(event_driven: bool) -> None:
    """A stage at which somebody's first audio waits counts as seen; the content is stock's (``talker_first_audio``)."""
    keys = pytest.importorskip("vllm_omni.data_entry_keys")
    if not hasattr(keys, "FIRST_AUDIO_KEY"):
        pytest.skip("this release has no first audio of another stage")
    stock = _first_audio_scenario(event_driven)
    with drain_on(floor=0.0):
        fast = _first_audio_scenario(event_driven)
    assert sequences(fast) == sequences(stock)
    assert endings(fast) == endings(stock)
    order = [each.stage_id for each in fast if type(each).__name__ == "OutputMessage"]
    assert order[:8] == [CODE2WAV] * 8  # of each request its first audio, and what stood behind it
