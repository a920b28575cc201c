"""``forward_gate`` and ``save_queue_cap`` on the real scheduler and adapter of the installed release."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import only
from tests.patches.small_stage import SmallStage

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

PAYLOAD = 8192
"""Bytes of one, beside its sampling rate."""
TOKENS = {"a": 12, "b": 20, "c": 7}


def patched(*names: str, **values: Any) -> AbstractContextManager[Any]:
    """Patches installed as in a stage process; the entry of the last one, which has these values."""
    return only(*names, process=Process.STAGE, **values)


def played(config: Any, device: str = "cuda") -> SmallStage:
    """A stage that has served three requests and was closed."""
    with SmallStage(config, device=device) as stage:
        stage.add_all(TOKENS)
        stage.run()
        assert stage.adapter.save_thread.is_alive()
    return stage


def complete(stage: SmallStage, tokens: dict[str, int]) -> None:
    """Every payload of every request is one chunk, in order, and the last says so."""
    for name, count in tokens.items():
        stream = stage.stream(name)
        chunks = stage.chunks[stream]
        assert [key for key, _, _ in chunks] == [f"{stream}_0_{number}" for number in range(count)]
        assert [codes[:2] for _, codes, _ in chunks] == [[number, number] for number in range(count)]
        assert [last for _, _, last in chunks] == [False] * (count - 1) + [True]


# ---- forward_gate ----


def said(output: Any) -> list[Any]:
    """The fields of an output without its payload; 0.28 lacks some."""
    names = ("new_token_ids", "finish_reason", "stop_reason", "num_generation_tokens", "is_segment_finished")
    found = [getattr(output, name, None) for name in (*names, "kv_transfer_params", "pooling_output")]
    return [*found, repr(getattr(output, "prefill_stats", None))]


def keys(output: Any) -> Any:
    """Those of an output's payload, if it has one."""
    return output.multimodal_output and sorted(output.multimodal_output)


@pytest.mark.parametrize("others", [(), ("save_queue_cap",)], ids=["alone", "both patches"])
def test_gate_leaves_all_but_the_payload(config: Any, others: tuple[str, ...]) -> None:
    """The orchestrator gets the same outputs without the payload, and the next stage the same chunks.

    The save queue copies payloads that the runner overwrites, and counts the bytes that nobody has fetched.
    """
    stock = played(config)
    with patched(*others, "forward_gate") as entry:
        ours = played(config, "cpu" if others else "cuda")
        assert entry.state is State.APPLIED, entry.reason
        for queue in map(LEDGER.named, others):
            assert (queue.state, queue.counters["tasks"]) == (State.APPLIED, sum(TOKENS.values())), queue.reason
            assert "not counted" not in queue.reason
            assert ours.queue._unfetched.nbytes > 0
        counted = entry.counters["multimodal_outputs"]
    assert ours.chunks == stock.chunks
    assert ours.outputs.keys() == stock.outputs.keys()
    for name, outputs in stock.outputs.items():
        assert [said(each) for each in ours.outputs[name]] == [said(each) for each in outputs]
        assert {each and tuple(each) for each in map(keys, outputs)} <= {None, ("codes.audio", "sr")}
        assert [keys(each) for each in ours.outputs[name]] == [keys(each) and ["sr"] for each in outputs]
    assert counted == sum(keys(each) is not None for outputs in stock.outputs.values() for each in outputs) > 30


# ---- save_queue_cap ----


@pytest.mark.parametrize("limit", [{"max_tasks": 32}, {"max_bytes": 32 * PAYLOAD}], ids=str)
def test_streams_are_held(config: Any, limit: dict[str, int]) -> None:
    """While nothing is sent, the largest streams are left out of steps; all but an aborted one become complete."""
    tokens = {"a": 100, "b": 100, "c": 100}
    with patched("save_queue_cap", max_hold_s=600.0, **limit) as entry:
        with SmallStage(config, codes=PAYLOAD // 8) as stage:
            stage.queue._unfetched = None  # nobody fetches here
            stage.add_all(tokens)
            stage.open.clear()
            steps = [stage.step() for _ in range(90)]
            most, nbytes, holds = stage.queue.tasks, stage.queue.nbytes, entry.counters["holds"]
            stage.abort(aborted := "c")
            stage.open.set()
            stage.run()
            complete(stage, {name: count for name, count in tokens.items() if name != aborted})
            found = [codes[0] for _, codes, _ in stage.chunks[stage.stream(aborted)]]
            assert found == list(range(len(found)))
        assert (entry.state, holds) == (State.APPLIED, 3)
        assert 32 < most <= 48 + 2 * len(tokens)
        assert nbytes <= most * (PAYLOAD + 8)
        assert not steps[-1]


def test_released_segments_go_when_the_chunks_before_them_are_sent(config: Any) -> None:
    """Where upstream releases unfetched segments (0.32), that is one more task of the stream, after its others."""
    with patched("save_queue_cap") as entry, SmallStage(config) as stage:
        release: Callable[[str], None] | None = getattr(stage.adapter, "release_shm_resources", None)
        if release is None:
            return
        stage.add_all(TOKENS)
        stage.open.clear()
        for _ in range(max(TOKENS.values())):
            stage.step()
        stage.adapter.request_ids_mapping["a"] = stage.stream("a")
        release("a")
        stage.open.set()
        stage.run()
        while stage.queue.tasks:
            pass
        complete(stage, TOKENS)
        assert not stage.segments(stage.stream("a"))
        assert stage.segments(stage.stream("b"))
        assert stage.adapter.save_thread.is_alive()
        assert entry.state is State.APPLIED
        assert entry.counters["tasks"] == sum(TOKENS.values()) + 1


def test_stage_that_sends_batches_is_not_applicable(config: Any) -> None:
    """Its save tasks have the chunks of all requests of a step."""
    with patched("save_queue_cap"), SmallStage(config) as stage:
        from omni_fastpath.patches.save_queue_cap.wrappers import not_applicable

        assert not_applicable(stage.scheduler) is None
        stage.adapter.custom_process_next_stage_input_batch_func = print
        assert "are one task here" in (not_applicable(stage.scheduler) or "")
