"""Holds on upstream's real scheduler, adapter, input processor and connector: one stage in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import Self

from tests.patches.save_path import PATIENCE_S, Gate, entry, patched, unique, until

pytestmark = pytest.mark.upstream

BOTH = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])

NEVER: dict[str, Any] = {"max_bytes": None, "max_tasks": None, "max_hold_s": 3600.0}
"""No limit but those that a test names, and no hold that ends by itself."""


class Stage:
    """A rig with its tokens recorded, a gate in front of its connector, and a receiver; a context manager."""

    def __init__(self, config: Path, **rig: Any) -> None:
        from benchmarks.save_queue.rig import Rig

        self.rig = Rig(config, **rig)
        self.scheduler, self.adapter = self.rig.scheduler, self.rig.adapter
        self.queue: Any = self.adapter._pending_save_reqs
        self.gate = Gate(self.adapter.connector)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.next: dict[str, int] = defaultdict(int)
        self.sent: dict[str, list[Any]] = defaultdict(list)
        self._wrap()

    def _wrap(self) -> None:
        update = self.rig.update

        def recording_update() -> Any:
            outputs = update()
            for each in (outputs or {}).values():
                for output in each.outputs:
                    self.tokens[output.request_id] += list(output.new_token_ids)
            return outputs

        self.rig.update = recording_update  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self.rig.close()

    def until_idle(self, turns: int = 12) -> None:
        """Step until nothing was computed for some turns and nothing can be sent: every stream is held or done."""
        quiet, deadline = 0, time.monotonic() + PATIENCE_S
        while quiet < turns and self.rig.busy():
            assert time.monotonic() < deadline
            can_send = len(self.queue) and not self.gate.inside
            quiet = 0 if self.rig.turn() or can_send else quiet + 1
            time.sleep(0.0005)

    def until_sent(self) -> None:
        """Wait until nothing is queued or in flight."""
        from benchmarks.save_queue.rig import outstanding

        until(lambda: not outstanding(self.adapter) and not getattr(self.queue, "tasks", 0), "the queue's end")

    def receive(self, *names: str) -> bool:
        """Fetch what is there of these streams; True, so that it can stand in a condition."""
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        stage = self.rig.stage
        connector = SharedMemoryConnector({"stage_id": stage + 1})
        for name in names:
            while (got := connector.get(str(stage), str(stage + 1), f"{name}_{stage}_{self.next[name]}")) is not None:
                self.next[name] += 1
                self.sent[name].append(got[0])
        return True

    def content(self, name: str) -> list[Any]:
        """What a stream's chunks said, tensors as lists."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items()}
            return value.tolist() if hasattr(value, "tolist") else value

        return [plain(each) for each in self.sent[name]]


@contextmanager
def stage(config: Path, rig: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[Stage, dict[str, int]]]:
    """A stage with the patch and these limits alone; and the patch's counters, from nothing."""
    with patched(**{**NEVER, **options}) as counters, Stage(config, **(rig or {})) as made:
        yield made, counters


def stock(config: Path, prompt: str, tokens: int, **rig: Any) -> tuple[list[int], list[Any]]:
    """What upstream alone answers to a prompt, and the chunks that it sends."""
    with Stage(config, **rig) as made:
        name = unique(prompt)
        made.rig.add(prompt, tokens=tokens, external_req_id=name, prompt=prompt)
        made.rig.run()
        made.receive(name)
        return made.tokens[prompt], made.content(name)


# ---- Held and resumed ----


@BOTH
@pytest.mark.parametrize("number", [0, 1], ids=["thinker", "talker"])
def test_held_and_resumed_streams_yield_the_same(configs: dict[int, Path], number: int, asynchronous: bool) -> None:
    """All are held while a put hangs, in empty steps, and go on when it ends; tokens and chunks are those of stock."""
    rig = {"async_scheduling": asynchronous}
    prompts = [f"s{n}" for n in range(3)]
    names = {prompt: unique(prompt) for prompt in prompts}
    with stage(configs[number], rig, max_tasks=6) as (made, counters):
        made.gate.shut(names["s0"])
        for prompt in prompts:
            made.rig.add(prompt, tokens=60, external_req_id=names[prompt], prompt=prompt)
        made.until_idle()
        assert len(made.scheduler.running) == 3
        assert 6 < counters["max_queued_tasks"] <= 9 + 3 * (1 + asynchronous)
        assert counters["holds"] >= 3
        made.gate.open()
        made.rig.run()
        made.receive(*names.values())
        for prompt in prompts:
            assert (made.tokens[prompt], made.content(names[prompt])) == stock(configs[number], prompt, 60, **rig)


# ---- Ends while held ----


@BOTH
def test_abort_while_held(configs: dict[int, Path], asynchronous: bool) -> None:
    """A held request that is aborted is gone at once; its id comes again, and that request has its own chunks alone."""
    name = unique("s")
    with stage(configs[0], {"async_scheduling": asynchronous}, max_tasks=4) as (made, counters):
        free = made.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        made.rig.add("old", tokens=500, external_req_id=name, prompt="old")
        until(lambda: (made.rig.turn(), name in made.gate.order)[1])
        made.gate.shut(name)
        made.until_idle()
        assert counters["holds"] > 0
        made.rig.abort("old")
        assert not made.scheduler.requests
        made.gate.open()
        until(lambda: not made.adapter._sender_tokens, "the old generation's end")
        made.rig.add("new", tokens=12, external_req_id=name, prompt="new")
        made.rig.run()
        made.until_sent()
        made.receive(name)
        assert (made.tokens["new"], made.content(name)) == stock(configs[0], "new", 12, async_scheduling=asynchronous)
        assert made.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        assert not made.scheduler._omni_fastpath_save_queue.holds._holds
        until(lambda: made.queue.nbytes == 0, "the look at what was fetched")


# ---- Bytes ----


@BOTH
def test_receiver_that_stands_still_bounds_bytes(configs: dict[int, Path], asynchronous: bool) -> None:
    """Queued and unfetched: half as much again as the limit and what is in flight; streams go on with the fetches."""
    names = [unique(f"s{n}") for n in range(4)]
    limit = 2**19
    with stage(configs[0], {"async_scheduling": asynchronous}, max_bytes=limit) as (made, counters):
        for name in names:
            made.rig.add(name, tokens=60)
        made.until_idle(turns=60)
        assert made.scheduler.requests, "the limit was never reached"
        # The largest step is the prompt's, rows of two layers; each stream may have one in flight and add one.
        largest = 2 * 2 * 2048 * 2 * 16
        assert limit < counters["max_outstanding_bytes"] <= 1.5 * limit + 2 * len(names) * largest
        until(lambda: (made.rig.turn(), made.receive(*names), not made.rig.busy())[2], "the end")
        assert {len(made.tokens[name]) for name in names} == {60}
        assert counters["expired_holds"] == 0
        made.until_sent()
        until(lambda: (made.receive(*names), made.queue.nbytes == 0)[1], "the look at what was fetched")


def test_one_unfetched_stream_stops_no_other(configs: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end while it is held, it goes on as it is fetched, and text alone is never held."""
    from vllm_omni.engine.serialization import serialize_additional_information

    from omni_fastpath.patches.save_queue_cap.holds import Holds

    choose, held = Holds.choose, set[str]()

    def recorded(*args: Any) -> Any:
        found = choose(*args)
        held.update(each.external_req_id for each in found)
        return found

    monkeypatch.setattr(Holds, "choose", recorded)
    unfetched, others, text = unique("unfetched"), [unique(f"s{n}") for n in range(3)], unique("text")
    with stage(configs[0], {"step_ms": 5.0}, max_bytes=2**21) as (made, _):
        made.rig.add(unfetched, tokens=500)
        made.until_idle(turns=60)
        assert made.scheduler.requests, "the limit was never reached"
        information = serialize_additional_information({"omni_final_stage_id": 0})
        made.rig.add(text, tokens=300, additional_information=information)
        for name in others:
            made.rig.add(name, tokens=60)
        left = made.rig.scheduler.requests
        until(lambda: (made.rig.turn(), made.receive(*others), len(left) == 1)[2], "the others' end")
        assert [len(made.tokens[name]) for name in (*others, text)] == [60, 60, 60, 300]
        # Another is held for a moment where the fetching is slow: which share is whose is test_save_queue_policy's.
        assert unfetched in held
        assert text not in held
        before = len(made.tokens[unfetched])
        until(lambda: (made.receive(unfetched), made.rig.turn(), not made.rig.busy())[2], "its end")
        assert before < 500 == len(made.tokens[unfetched])


def test_put_that_hangs_stops_no_text(configs: dict[int, Path]) -> None:
    """With the defaults every token of every request comes out of the stage while a put hangs."""
    names = [unique(f"audio{n}") for n in range(4)]
    with patched() as counters, Stage(configs[0], max_num_seqs=16) as made:
        made.gate.shut(names[0])
        for name in names:
            made.rig.add(name, tokens=200)
        until(lambda: (made.rig.turn(), not made.rig.busy())[1], "the text")
        assert made.gate.inside
        assert [len(made.tokens[name]) for name in names] == [200] * 4
        assert counters["holds"] == 0
        made.gate.open()
        made.rig.run()


def test_null_limits_hold_nothing(configs: dict[int, Path]) -> None:
    """Without a limit no running request is looked at, and the state says why no stream is held."""
    with stage(configs[0]) as (made, _):
        assert made.scheduler._omni_fastpath_save_queue.holds is None
        assert "no stream is held: max_bytes and max_tasks are null" in entry().reason


# ---- Where no stream is held ----


def scheduler(kind: str = "OmniARScheduler", **config: Any) -> Any:
    """A scheduler of that class with this in its config."""
    from vllm_omni.core.sched import omni_ar_scheduler
    from vllm_omni.model_executor.models.voxcpm2.scheduler import VoxCPM2OmniARAsyncScheduler

    kinds = {**vars(omni_ar_scheduler), "VoxCPM2OmniARAsyncScheduler": VoxCPM2OmniARAsyncScheduler}
    made = kinds[kind].__new__(kinds[kind])
    defaults = {"parallel_config": SimpleNamespace(pipeline_parallel_size=1)}
    made.vllm_config = SimpleNamespace(**{**defaults, **config})
    made.current_step = 0
    return made


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("OmniARScheduler", {}, None),
        ("OmniARAsyncScheduler", {}, None),
        ("VoxCPM2OmniARAsyncScheduler", {}, "was not checked"),
        ("OmniARScheduler", {"lora_config": object()}, "LoRA"),
        ("OmniARScheduler", {"speculative_config": object()}, "speculative"),
        ("OmniARScheduler", {"kv_transfer_config": object()}, "KV cache is transferred"),
        (
            "OmniARScheduler",
            {"model_config": SimpleNamespace(omni_kv_config={"need_send_cache": True})},
            "KV cache is transferred",
        ),
        ("OmniARScheduler", {"model_config": SimpleNamespace(omni_kv_config={})}, None),
        ("OmniARScheduler", {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
    ],
)
def test_only_what_was_read_is_held(kind: str, config: dict[str, Any], says: str | None) -> None:
    """Limits are for schedulers and features that were read for them, by exact class."""
    from omni_fastpath.patches.save_queue_cap.wrappers import obstacle_to_holds

    found = obstacle_to_holds(scheduler(kind, **config))
    assert (found is None) if says is None else (found is not None and says in found)


def test_pairs_that_a_patched_scheduler_keeps_together_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's pairing of requests wraps vLLM's scheduler before it is made; who is held would leave its partner."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from omni_fastpath.patches.save_queue_cap.wrappers import obstacle_to_holds

    def paired(self: Any, throttle_prefills: bool = False) -> Any:
        raise NotImplementedError

    paired._cfg_pairing_patched = True  # type: ignore[attr-defined]  # upstream's mark
    monkeypatch.setattr(Scheduler, "schedule", paired)
    assert "pairs" in (obstacle_to_holds(scheduler()) or "")


def test_a_closed_rig_leaves_later_ones_alone(configs: dict[int, Path]) -> None:
    """What fed a closed rig forgets its segments: collected later, it would remove a later rig's of the same names."""
    from benchmarks.save_queue.rig import Rig

    with Rig(configs[1]) as rig:
        rig.add("a", tokens=3)
        feeder = rig._feeder
        assert feeder._pending_keys
    assert not feeder._pending_keys
