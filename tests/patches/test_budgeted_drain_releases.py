"""The drain on the release that is first on ``PYTHONPATH``: stock's messages and ends.

The real orchestrator, stage pools, output processors and client; both arms in one process, one after the other.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from tests.patches.content import endings, sequences
from tests.patches.drive import only, stages
from tests.patches.test_budgeted_drain_content import three_stage_script

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

THINKER, TALKER = range(2)
DRAIN = ("nonblocking_dequeue", "budgeted_drain")


def served(script: Any, *modes: bool, drains: int = 0) -> list[list[Any]]:
    """The messages of an orchestrator in each of these modes, served at the same time, and so many by a drain."""
    from benchmarks.rigs.inprocess import Pipeline
    from omni_fastpath.patches.budgeted_drain.drain import Drain

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Pipeline(stages(2), event_driven=mode)) for mode in modes]
        threads = stack.enter_context(ThreadPoolExecutor())
        list(threads.map(script, running))
        for each in running:
            each.settle()
        assert len(Drain.running) == drains
    assert not any(each.crash for each in running)
    return [each.messages() for each in running]


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
        (1, "CUMULATIVE", {"max_items": 1}),
        (2, "FINAL_ONLY", {"max_time_us": 50}),
    ],
)
def test_messages_are_the_same(event_driven: bool, seed: int, kind: str, values: dict[str, Any]) -> None:
    """Every request and stage gets the same messages in the same order, its end last and once."""
    from vllm.sampling_params import RequestOutputKind

    from omni_fastpath.ledger import LEDGER

    script = three_stage_script(seed, RequestOutputKind[kind], bursts=kind != "CUMULATIVE")
    [stock] = served(script, event_driven)
    with only(*DRAIN, **values):
        [fast] = served(script, event_driven, drains=1)
    assert LEDGER.named("budgeted_drain").counters["items"] > 0
    assert not LEDGER.named("budgeted_drain").has_failed
    assert_stock_or_more(stock, fast)
    assert endings(fast) == {f"request-{n}": (1, "end") for n in range(6)}


def test_a_death_comes_after_what_arrived_before_it(event_driven: bool) -> None:
    """A request of the dead replica gets its earlier outputs of all stages, then one error."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes

    with only(*DRAIN), Pipeline(stages(2), event_driven=event_driven) as pipeline:
        pipeline.settle()
        pipeline.add_request("S")
        pipeline.add_request("D", replicas=[1, 0, 0])

        def arrive() -> None:
            talker, code2wav = (pipeline.replicas[stage][0].outputs_queue for stage in (1, 2))
            for n in range(5):
                talker.put_nowait(batch(codes("S")))
                code2wav.put_nowait(batch(audio("D", float(n))))
            pipeline.replicas[THINKER][1].outputs_queue.put_nowait(EngineDeadError())

        pipeline.do(arrive)
        pipeline.settle()
        messages = pipeline.messages()
    assert {each.request_id for each in messages} == {"D"}
    assert [type(each).__name__ for each in messages] == ["OutputMessage"] * 5 + ["ErrorMessage"]
    assert list(pipeline.orchestrator.request_states) == ["S"]
    assert pipeline.pools[THINKER].select_replica_id("somebody new") == 0


@pytest.mark.parametrize("modes", [(False, False), (True, True), (False, True)], ids=["poll", "event-driven", "both"])
def test_two_orchestrators_are_served_as_on_stock(modes: tuple[bool, bool]) -> None:
    """Two engines in one process, in the same mode or not: each has its own drain, and messages as on stock."""
    from vllm.sampling_params import RequestOutputKind

    script = three_stage_script(0, RequestOutputKind.DELTA, bursts=True)
    stock = served(script, *modes)
    with only(*DRAIN, "lean_processing"):
        fast = served(script, *modes, drains=2)
    for one, other in zip(stock, fast, strict=True):
        assert_stock_or_more(one, other)
