"""The drain on whatever release is first on ``PYTHONPATH``: the same messages as stock's, the same ends, and no traces.

The real orchestrator, stage pools, output processors and client; both arms in one process, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, stages
from tests.patches.test_budgeted_drain_content import three_stage_script

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

THINKER, TALKER = range(2)
DRAIN = ("nonblocking_dequeue", "budgeted_drain")


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
    assert {key: found.pop(key) for key in expected} == expected
    more = {(stage_id, kind) for (_, stage_id), said in found.items() for kind, *_ in said}
    assert more <= {(TALKER, "StageMetricsMessage")}
    assert endings(fast) == endings(stock)


@pytest.mark.parametrize(
    ("seed", "kind", "values"),
    [
        (0, "DELTA", {}),
        (1, "CUMULATIVE", {"order": "stage_order"}),
        (2, "FINAL_ONLY", {"order": "downstream_first", "floor": 0.0}),
    ],
)
def test_messages_are_the_same(event_driven: bool, seed: int, kind: str, values: dict[str, Any]) -> None:
    """Every request and stage gets the same messages in the same order, its end last and once."""
    from vllm.sampling_params import RequestOutputKind

    from omni_fastpath.ledger import LEDGER

    script = three_stage_script(seed, RequestOutputKind[kind], bursts=kind != "CUMULATIVE")
    stock = run(script, event_driven)
    with only(*DRAIN, **values):
        fast = run(script, event_driven)
    assert LEDGER.named("budgeted_drain").counters["items"] > 0
    assert not LEDGER.named("budgeted_drain").has_failed
    assert_stock_or_more(stock, fast)
    assert endings(fast) == {f"request-{n}": (1, "end") for n in range(6)}


@pytest.mark.parametrize("slot", ["kept", "replaced", "detached"])
def test_a_death_is_told_once_whatever_becomes_of_its_slot(event_driven: bool, slot: str) -> None:
    """Who was bound to the dead replica gets what came before, then one error; the one in its slot is not touched."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from benchmarks.rigs.inprocess import QWEN3_OMNI, Pipeline, Replica, audio, batch, codes

    with only(*DRAIN, order="stage_order", floor=0.0):
        pipeline = Pipeline(stages(2), event_driven=event_driven)
        pipeline.add_request("S")
        pipeline.add_request("D", replicas=[1, 0, 0])
        pipeline.put(1, *(batch(codes("S")) for _ in range(5)))
        pipeline.put(2, *(batch(audio("D", float(n))) for n in range(5)))
        pipeline.put(THINKER, EngineDeadError(), replica_id=1)
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
