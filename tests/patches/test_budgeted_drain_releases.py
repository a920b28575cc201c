"""The drain on whatever release is first on ``PYTHONPATH``: the same messages as stock's, the same ends, and no traces.

The real orchestrator, stage pools, output processors and client; both arms in one process, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, options, stages
from tests.patches.test_budgeted_drain_content import three_stage_script
from tests.patches.test_overtaking import dying_thinker

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

THINKER, TALKER, CODE2WAV = range(3)


@pytest.fixture(params=[False, True], ids=["poll", "event-driven"])
def event_driven(request: pytest.FixtureRequest) -> bool:
    """The orchestrator's mode."""
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


@pytest.mark.parametrize("slot", ["kept", "replaced", "detached"])
def test_a_death_is_told_once_whatever_becomes_of_its_slot(event_driven: bool, slot: str) -> None:
    """Who was bound to the dead replica gets what came before, then one error; the one in its slot is not touched."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

    with drain_on(order="stage_order", floor=0.0):
        pipeline = dying_thinker(event_driven, "D")
        pool, dead = pipeline.pools[THINKER], pipeline.replicas[THINKER][1]
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
