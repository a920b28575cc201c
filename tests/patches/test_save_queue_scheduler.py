"""Holds on upstream's real scheduler, adapter, input processor and connector: one stage in this process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from omni_fastpath.config import ConfigError
from tests.patches.soak_stage import PATIENCE_S, Gate, patched, slow_down, unique, until

pytestmark = pytest.mark.upstream


BOTH = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])

NEVER: dict[str, Any] = {
    "per_stream_tasks": None,
    "unfetched_chunks": None,
    "total_tasks": None,
    "total_bytes": None,
    "max_hold_s": 3600.0,
    "holds": "always",
}
"""No limit but those that a test names, and no hold that ends by itself."""


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Configs of the simulated deploy's stages; made once."""
    from benchmarks.save_queue.rig import stage_configs

    return stage_configs(tmp_path_factory.mktemp("stages"))


class Stage:
    """A rig with its tokens recorded, a gate in front of its connector, and a receiver; a context manager."""

    def __init__(self, config: Path, **rig: Any) -> None:
        from benchmarks.save_queue.rig import Rig

        self.rig = Rig(config, **rig)
        self.scheduler, self.adapter = self.rig.scheduler, self.rig.adapter
        self.queue: Any = self.adapter._pending_save_reqs
        self.gate = Gate(self.adapter.connector)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, Any] = {}
        self.steps: list[list[str]] = []
        self.preempted = 0
        self.next: dict[str, int] = defaultdict(int)
        self.sent: dict[str, list[Any]] = defaultdict(list)
        self._wrap()

    def _wrap(self) -> None:
        update, execute, preempt = self.rig.update, self.rig.execute, self.scheduler._preempt_request

        def recording_update() -> Any:
            outputs = update()
            for each in (outputs or {}).values():
                for output in each.outputs:
                    self.tokens[output.request_id] += list(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.reasons[output.request_id] = str(output.finish_reason)
            return outputs

        def recording_execute(scheduled: Any) -> Any:
            self.steps.append(list(scheduled.num_scheduled_tokens))
            return execute(scheduled)

        def recording_preempt(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.rig.update, self.rig.execute = recording_update, recording_execute  # type: ignore[method-assign]
        self.scheduler._preempt_request = recording_preempt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self.rig.close()
        if hasattr(self.queue, "lanes"):
            for lane in self.queue.lanes:
                lane.join(PATIENCE_S)
                assert not lane.is_alive()

    def steps_of(self, name: str) -> int:
        """Steps that a request was in."""
        return sum(name in step for step in self.steps)

    def until_idle(self, turns: int = 12) -> None:
        """Step until nothing was computed for some turns and no lane can send: everybody is held or done."""
        quiet, deadline = 0, time.monotonic() + PATIENCE_S
        while quiet < turns and self.rig.busy():
            assert time.monotonic() < deadline
            quiet = 0 if self.rig.turn() or self.can_send() else quiet + 1
            time.sleep(0.0005)

    def can_send(self) -> bool:
        """Whether a lane is free and something waits that it may send."""
        if not hasattr(self.queue, "lanes") or len(self.gate.inside) == len(self.queue.lanes):
            return False
        return any(stream.tasks and not self.gate.is_shut(key) for key, stream in list(self.queue.streams.items()))

    def until_sent(self) -> None:
        """Wait until nothing is queued or in flight."""
        from benchmarks.save_queue.rig import outstanding

        until(lambda: not outstanding(self.adapter) and not getattr(self.queue, "tasks", 0), "the queue's end")

    def receive(self, *names: str) -> None:
        """Fetch what is there of these streams."""
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        stage = self.rig.stage
        connector = SharedMemoryConnector({"stage_id": stage + 1})
        for name in names:
            while (got := connector.get(str(stage), str(stage + 1), f"{name}_{stage}_{self.next[name]}")) is not None:
                self.next[name] += 1
                self.sent[name].append(got[0])

    def content(self, name: str) -> list[Any]:
        """What a stream's chunks said, tensors as lists."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items()}
            return value.tolist() if hasattr(value, "tolist") else value

        return [plain(each) for each in self.sent[name]]


@contextmanager
def _narrow_limits() -> Iterator[None]:
    from omni_fastpath.patches.save_queue_cap import attach
    from omni_fastpath.patches.save_queue_cap import credits as holds

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(holds, "WIDE", 1)
        changed.setattr(attach, "WIDE", 1)
        yield


@contextmanager
def stage(config: Path, rig: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[Stage, dict[str, int]]]:
    """A stage with the patch and these limits alone; and the patch's counters.

    What a hold does is tested here, so that limits hold at their value; ``test_save_queue_credits`` has when they do.
    """
    with patched(**{**NEVER, **options}) as counters, _narrow_limits(), Stage(config, **(rig or {})) as made:
        yield made, counters


def stock(config: Path, prompts: dict[str, int], **rig: Any) -> dict[str, list[int]]:
    """What upstream alone answers to these prompts with so many tokens each."""
    with Stage(config, **rig) as made:
        for prompt, tokens in prompts.items():
            made.rig.add(prompt, tokens=tokens, external_req_id=unique(prompt), prompt=prompt)
        made.rig.run()
        return dict(made.tokens)


# ---- Held and resumed ----


@BOTH
@pytest.mark.parametrize("number", [0, 1], ids=["thinker", "talker"])
def test_held_and_resumed_stream_yields_the_same(configs: dict[int, Path], number: int, asynchronous: bool) -> None:
    """A stream stops at its credit, another one runs to its end meanwhile; both yield tokens and chunks as stock."""
    rig = {"async_scheduling": asynchronous}
    expected = stock(configs[number], {"held": 60, "free": 40}, **rig)
    with stage(configs[number], rig, per_stream_tasks=4) as (made, counters):
        held, free = unique("held"), unique("free")
        made.gate.shut(held)
        made.rig.add("held", tokens=60, external_req_id=held, prompt="held")
        made.rig.add("free", tokens=40, external_req_id=free, prompt="free")
        made.until_idle()
        assert list(made.scheduler.requests) == ["held"]
        assert made.queue.streams[held].tasks == 4
        assert counters["max_stream_tasks"] <= 4
        assert counters["holds"] >= 1
        assert made.tokens["free"] == expected["free"]
        made.gate.open()
        made.rig.run()
        assert dict(made.tokens) == expected
        assert not made.gate.overlaps
        made.until_sent()
        assert counters["expired_holds"] == 0
        made.receive(held, free)
        assert all(bool(made.sent[name][-1]["meta"]["finished"]) for name in (held, free))


def test_chunks_are_those_of_stock(configs: dict[int, Path]) -> None:
    """What the next stage reads of a stream that was held again and again is what it reads of stock, chunk by chunk."""
    found = []
    for ours in (False, True):
        with stage(configs[0], per_stream_tasks=3) if ours else plain(configs[0]) as (made, counters):
            name = unique("s")
            made.rig.add("s", tokens=40, external_req_id=name, prompt="same")
            slow_down(made.adapter.connector, 0.002)
            made.rig.run()
            made.receive(name)
            found.append(made.content(name))
            assert not ours or counters["holds"] >= 2
    assert found[0] == found[1]
    assert len(found[0]) == 39  # the prompt's rows go with those of the first token


@contextmanager
def plain(config: Path, rig: dict[str, Any] | None = None) -> Iterator[tuple[Stage, dict[str, int]]]:
    """Upstream alone."""
    with Stage(config, **(rig or {})) as made:
        yield made, {}


def test_talker_is_held_while_its_thinker_still_speaks(configs: dict[int, Path]) -> None:
    """A request that waits for a chunk of its own between its steps is bounded by its credit like any other."""
    with stage(configs[1], per_stream_tasks=4) as (made, counters):
        name = unique("s")
        thinker = Thinker(made, name)
        made.rig.add("s", tokens=60, external_req_id=name, prompt="s")
        made.gate.shut(name)
        for _ in range(50):
            thinker.speak()
            made.until_idle(turns=4)
        until(lambda: (made.rig.turn(), made.gate.inside)[1], "the send of the first 25 frames")
        made.until_idle(turns=60)
        assert counters["max_stream_tasks"] <= 4
        made.gate.open()
        thinker.speak(ends=True)
        made.rig.run()
        assert len(made.tokens["s"]) == 60


class Thinker:
    """Feeds a talker's request row by row instead of at once."""

    def __init__(self, made: Stage, name: str) -> None:
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        self._stage, self._name, self._chunks, self._row = made.rig.stage, name, 0, 0
        self._connector = made.rig._feeder = SharedMemoryConnector({"stage_id": self._stage - 1})
        made.rig._feed = lambda *_: self.speak(16)  # type: ignore[method-assign]

    def speak(self, rows: int = 1, *, ends: bool = False) -> None:
        """Send the next rows."""
        import torch
        from vllm_omni.data_entry_keys import EmbeddingsStruct, MetaStruct, OmniPayloadStruct

        from omni_simulated_device import content

        tags = content.encode_tags(content.content_key(0, "s"), range(self._row, self._row + rows), 60)
        tensor = torch.zeros(rows, 2048, dtype=torch.bfloat16)
        tensor[:, : content.ROW_BYTES] = torch.from_numpy(tags.copy())
        embed = EmbeddingsStruct(decode=tensor) if self._chunks else EmbeddingsStruct(prefill=tensor)
        chunk = OmniPayloadStruct(embed=embed, meta=MetaStruct(finished=torch.tensor(data=ends)))
        key = f"{self._name}_{self._stage - 1}_{self._chunks}"
        assert self._connector.put(str(self._stage - 1), str(self._stage), key, chunk)[0]
        self._chunks, self._row = self._chunks + 1, self._row + rows


@BOTH
def test_all_held(configs: dict[int, Path], asynchronous: bool) -> None:
    """Every stream may be held at once: the steps are empty then, and all complete when sends go on."""
    names = [unique(f"s{n}") for n in range(4)]
    with stage(configs[0], {"async_scheduling": asynchronous}, per_stream_tasks=3) as (made, counters):
        made.gate.shut(*names)
        for name in names:
            made.rig.add(name, tokens=30)
        made.until_idle()
        assert len(made.scheduler.running) == 4
        assert [made.queue.streams[name].tasks for name in names] == [3, 3, 3, 3]
        assert counters["max_queued_tasks"] == 12
        made.gate.open()
        made.rig.run()
        assert {len(made.tokens[name]) for name in names} == {30}


def test_two_slow_streams_and_two_lanes(configs: dict[int, Path]) -> None:
    """Both lanes hang in two streams: the third is held at its own credit, and completes once one lane is free."""
    slow, third = [unique("slow0"), unique("slow1")], unique("third")
    with stage(configs[0], per_stream_tasks=3) as (made, _):
        assert len(made.queue.lanes) == 2
        made.gate.shut(*slow)
        for name in slow:
            made.rig.add(name, tokens=20)
        until(lambda: (made.rig.turn(), len(made.gate.inside) == 2)[1])
        made.rig.add(third, tokens=20)
        made.until_idle()
        assert made.queue.streams[third].tasks == 3
        made.gate.open(slow[0])
        made.until_idle()
        assert {name: len(made.tokens[name]) for name in (*slow, third)} == {
            slow[0]: 20,
            slow[1]: made.steps_of(slow[1]),
            third: 20,
        }
        made.gate.open()
        made.rig.run()
        assert len(made.tokens[slow[1]]) == 20


# ---- Ends while held ----


@BOTH
def test_abort_while_held(configs: dict[int, Path], asynchronous: bool) -> None:
    """A held request that is aborted is gone at once; its backlog is discarded, its chunks cleaned up, others go on."""
    name, other = unique("s"), unique("other")
    with stage(configs[0], {"async_scheduling": asynchronous}, per_stream_tasks=4) as (made, _):
        made.rig.add(name, tokens=500)
        until(lambda: (made.rig.turn(), name in made.gate.order)[1])
        made.gate.shut(name)
        made.until_idle()
        assert made.scheduler.running
        made.rig.abort(name)
        made.rig.add(other, tokens=20)
        until(lambda: (made.rig.turn(), len(made.tokens[other]) == 20)[1], "the other's end")
        assert not made.scheduler.requests
        made.gate.open()
        made.rig.run()
        made.receive(name, other)
        assert made.sent[name] == []
        assert made.sent[other]
        made.until_sent()
        until(lambda: made.queue.nbytes == 0, "the look at what was fetched")
        assert not made.adapter._sender_tokens


def test_cancelled_generation_and_the_same_id_again(configs: dict[int, Path]) -> None:
    """A request that takes up a held and aborted one's external id sends all of its own chunks and none of the old."""
    name = unique("s")
    with stage(configs[0], per_stream_tasks=4) as (made, _):
        made.rig.add("old", tokens=500, external_req_id=name, prompt="old")
        made.gate.shut(name)
        made.until_idle()
        made.rig.abort("old")
        made.gate.open()
        until(lambda: not made.adapter._sender_tokens, "the old generation's end")
        made.rig.add("new", tokens=12, external_req_id=name, prompt="new")
        made.rig.run()
        made.receive(name)
        new = made.content(name)
    with plain(configs[0]) as (made, _):
        other = unique("t")
        made.rig.add("new", tokens=12, external_req_id=other, prompt="new")
        made.rig.run()
        made.receive(other)
        assert new == made.content(other)


def test_request_ends_while_over_the_cap(configs: dict[int, Path]) -> None:
    """The end of a request passes whatever is queued: nothing is sent, the total is over, and all of them end."""
    names = [unique(f"s{n}") for n in range(6)]
    with stage(configs[0], total_tasks=2) as (made, counters):
        made.gate.shut(*names)
        for name in names:
            made.rig.add(name, tokens=1)
        made.until_idle()
        assert not made.scheduler.requests
        assert counters["max_queued_tasks"] == 6
        made.gate.open()
        made.rig.run()
        made.receive(*names)
        assert all(bool(made.sent[name][-1]["meta"]["finished"]) for name in names)


def test_scheduler_that_goes_away_with_holds(configs: dict[int, Path]) -> None:
    """All requests aborted while all are held, tasks in flight: nothing is left anywhere."""
    names = [unique(f"s{n}") for n in range(3)]
    with stage(configs[0], per_stream_tasks=3) as (made, _):
        free = made.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        made.gate.shut(*names)
        for name in names:
            made.rig.add(name, tokens=50)
        made.until_idle()
        for name in names:
            made.rig.abort(name)
        made.gate.open()
        made.rig.run()
        assert made.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        made.until_sent()
        assert not made.scheduler._omni_fastpath_save_queue.credits.is_holding


@BOTH
def test_resumable_session_is_held_and_goes_on(configs: dict[int, Path], asynchronous: bool) -> None:
    """Three segments of one session, held within each: its tokens and chunks are those of stock."""
    found = []
    for ours in (False, True):
        rig = {"async_scheduling": asynchronous}
        with stage(configs[0], rig, per_stream_tasks=3) if ours else plain(configs[0], rig) as (made, counters):
            name = unique("s")
            if ours:
                slow_down(made.adapter.connector, 0.002)
            for segment in range(3):
                more = segment < 2
                made.rig.add("s", tokens=10, external_req_id=name, prompt=f"part{segment}", resumable=more)
                made.until_idle(turns=40)
                # The end of a session discards what is queued of it, in stock too.
                made.until_sent()
            made.receive(name)
            found.append((made.tokens["s"], made.content(name)))
            assert not ours or counters["holds"] >= 2
    assert found[0] == found[1]


# ---- The hold's own end ----


def test_hold_timeout_lets_single_steps_through(configs: dict[int, Path]) -> None:
    """Nothing is sent: after each ``max_hold_s`` exactly one step goes through, counted, and the request completes."""
    name = unique("s")
    with stage(configs[0], per_stream_tasks=4, max_hold_s=0.02) as (made, counters):
        made.gate.shut(name)
        made.rig.add(name, tokens=30)
        until(lambda: (made.rig.turn(), counters["expired_holds"] >= 5)[1], "five holds' ends")
        for _ in range(3):
            made.rig.turn()
        tasks, expired = made.queue.streams[name].tasks, counters["expired_holds"]
        assert 4 + expired - 1 <= tasks <= 4 + expired
        made.gate.open()
        made.rig.run()
        assert len(made.tokens[name]) == 30


def shortened(config: Path, folder: Path, tokens: int) -> Path:
    """The config of a model with a context of so many tokens, which fit a tiny KV cache."""
    import pickle

    vllm_config = pickle.loads(config.read_bytes())  # noqa: S301 - our own file
    vllm_config.model_config.max_model_len = tokens
    found = folder / "short.pickle"
    found.write_bytes(pickle.dumps(vllm_config))
    return found


def test_tiny_kv_cache(configs: dict[int, Path], tmp_path: Path) -> None:
    """Holds among preemptions: no deadlock, and tokens and their order are those of a stage with room for all."""
    prompts = {f"s{n}": 160 for n in range(12)}
    expected = stock(configs[0], prompts)
    names = {prompt: unique(prompt) for prompt in prompts}
    short = shortened(configs[0], tmp_path, 256)
    with stage(short, {"kv_cache_mib": 4}, per_stream_tasks=3) as (made, counters):
        slow_down(made.adapter.connector, 0.0005)
        for prompt, tokens in prompts.items():
            made.rig.add(prompt, tokens=tokens, external_req_id=names[prompt], prompt=prompt)
        deadline = time.monotonic() + PATIENCE_S
        while made.rig.busy():
            assert time.monotonic() < deadline
            made.rig.turn()
        made.rig.run()
        assert made.preempted > 0
        assert counters["holds"] > 0
        assert counters["expired_holds"] == 0
        assert dict(made.tokens) == expected
        made.receive(*names.values())
        assert all(bool(made.sent[name][-1]["meta"]["finished"]) for name in names.values())


# ---- Bounds ----


@BOTH
def test_total_tasks_bound(configs: dict[int, Path], asynchronous: bool) -> None:
    """Nothing is sent: never more than the cap and one step of each stream."""
    names = [unique(f"s{n}") for n in range(8)]
    with stage(configs[0], {"async_scheduling": asynchronous}, total_tasks=20) as (made, counters):
        made.gate.shut(*names)
        for name in names:
            made.rig.add(name, tokens=40)
        made.until_idle()
        assert 20 - 8 <= counters["max_queued_tasks"] <= 20 + 8
        assert counters["holds_for_total"] >= 1
        made.gate.open()
        made.rig.run()
        assert {len(made.tokens[name]) for name in names} == {40}


@BOTH
def test_total_bytes_bound(configs: dict[int, Path], asynchronous: bool) -> None:
    """The receiver stands still: queued and unfetched never exceed the cap, what is in flight and one step a stream."""
    names = [unique(f"s{n}") for n in range(4)]
    cap = 2**19
    with stage(configs[0], {"async_scheduling": asynchronous}, total_bytes=cap) as (made, counters):
        for name in names:
            made.rig.add(name, tokens=60)
        made.until_idle(turns=60)
        assert made.scheduler.requests, "the cap was never reached"
        # The largest step is the prompt's, rows of two layers; each stream may have one in flight and add one.
        largest = 2 * 2 * 2048 * 2 * 16
        assert cap / 2 < counters["max_outstanding_bytes"] <= cap + 2 * len(names) * largest
        deadline = time.monotonic() + PATIENCE_S
        while made.rig.busy():
            assert time.monotonic() < deadline
            made.rig.turn()
            made.receive(*names)
        made.rig.run()
        assert {len(made.tokens[name]) for name in names} == {60}

        def all_fetched() -> bool:
            made.receive(*names)  # again: the rig may have ended just before the lane's last send
            return bool(made.queue.nbytes == 0)

        until(all_fetched, "the look at what was fetched")


def test_unfetched_chunks_bound(configs: dict[int, Path]) -> None:
    """A receiver stays at most that many chunks behind, and what the credit lets queue; the stream completes."""
    name, other = unique("s"), unique("other")
    with stage(configs[0], unfetched_chunks=3, per_stream_tasks=3) as (made, counters):
        made.rig.add(name, tokens=25)
        made.until_idle(turns=30)
        assert 3 <= made.queue.streams[name].unfetched <= 2 + 3
        made.rig.add(other, tokens=25)
        deadline = time.monotonic() + PATIENCE_S
        while made.rig.busy() and other in made.scheduler.requests:
            assert time.monotonic() < deadline
            made.rig.turn()
            made.receive(other)
        assert len(made.tokens[other]) == 25
        assert name in made.scheduler.requests
        while made.rig.busy():
            assert time.monotonic() < deadline
            made.rig.turn()
            made.receive(name)
        made.rig.run()
        made.receive(name)
        assert len(made.tokens[name]) == 25
        assert counters["given_up"] == 0


def test_text_only_request_is_not_held(configs: dict[int, Path]) -> None:
    """A request that ends at this stage sends nothing that anybody would fetch, and is not held for it."""
    from vllm_omni.engine.serialization import serialize_additional_information

    name = unique("s")
    with stage(configs[0], unfetched_chunks=1, total_bytes=2**16) as (made, counters):
        information = serialize_additional_information({"omni_final_stage_id": 0})
        made.rig.add(name, tokens=60, additional_information=information)
        made.rig.run()
        assert len(made.tokens[name]) == 60
        assert counters["holds"] == 0


# ---- Nothing to do ----


def test_null_leaves_schedule_alone(configs: dict[int, Path]) -> None:
    """With every limit null nobody looks at the running requests: no credits are there, and nobody is ever held."""
    name = unique("s")
    with stage(configs[0]) as (made, counters):
        assert made.scheduler._omni_fastpath_save_queue.credits is None
        made.gate.shut(name)
        made.rig.add(name, tokens=100)
        made.until_idle()
        assert not made.scheduler.requests
        assert counters["max_stream_tasks"] >= 99
        made.gate.open()
        made.rig.run()


def test_nothing_slow_holds_nobody(configs: dict[int, Path]) -> None:
    """With the defaults and a receiver that keeps up, all complete and no hold has to end by itself."""
    names = [unique(f"s{n}") for n in range(8)]
    with patched() as counters, Stage(configs[0], step_ms=2.0) as made:
        stop = threading.Event()

        def receive() -> None:
            while not stop.is_set():
                made.receive(*names)
                time.sleep(0.001)

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            for name in names:
                made.rig.add(name, tokens=30)
            made.rig.run()
        finally:
            stop.set()
            thread.join(PATIENCE_S)
        assert counters["expired_holds"] == 0
        assert {len(made.tokens[name]) for name in names} == {30}


# ---- Refused ----


def test_small_credit_stops_the_stage(configs: dict[int, Path]) -> None:
    """A credit under 3 with async scheduling: the scheduler's constructor raises; without it the stage starts."""
    with pytest.raises(ConfigError, match="at least 3"), stage(configs[0], per_stream_tasks=2):
        pass
    with stage(configs[0], {"async_scheduling": False}, per_stream_tasks=1) as (made, _):
        name = unique("s")
        made.rig.add(name, tokens=10)
        made.rig.run()
        assert len(made.tokens[name]) == 10


def test_what_waits_is_its_own_before_the_next_step(configs: dict[int, Path]) -> None:
    """The runner may write into its buffers in the step that follows: what waits by then is sent as it was."""
    found = []
    for poison in (False, True):
        with stage(configs[0], per_stream_tasks=8) as (made, counters):
            name = unique("s")
            made.rig.add("s", tokens=12, external_req_id=name, prompt="same")
            made.gate.shut(name)
            for _ in range(6):
                stream = made.queue.streams.get(name)
                payloads = [held.task["multimodal_output"] for held in stream.waiting] if stream is not None else []
                rows = [tensor for each in payloads for key, tensor in each.items() if key.startswith("hidden_states")]
                scheduled = made.rig.schedule()
                now = [held.task["multimodal_output"] for held in stream.waiting] if stream is not None else []
                own = {id(tensor) for each in now for tensor in each.values()}
                for row in rows if poison else ():
                    if id(row) not in own:  # the runner's, not the queue's
                        row.fill_(-7)
                made.rig.execute(scheduled)
                made.rig.update()
                until(lambda: made.gate.inside or not made.queue.tasks)  # what is taken is upstream's to read
            assert made.queue.streams[name].tasks >= 5
            assert counters["copied_tensors"]
            made.gate.open()
            made.rig.run()
            made.receive(name)
            found.append(made.content(name))
    assert found[0] == found[1]


def test_a_closed_rig_leaves_later_ones_alone(configs: dict[int, Path]) -> None:
    """What fed a closed rig forgets its segments: collected later, it would remove a later rig's of the same names."""
    from benchmarks.save_queue.rig import Rig

    with Rig(configs[1]) as rig:
        rig.add("a", tokens=3)
        feeder = rig._feeder
        assert feeder._pending_keys
    assert not feeder._pending_keys
