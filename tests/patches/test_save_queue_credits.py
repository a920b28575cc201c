"""Who is left out of the next step, on a stand-in that skips as vLLM's scheduler does; and where the patch refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from tests.patches.soak_stage import entry

pytestmark = pytest.mark.upstream

NONE: dict[str, Any] = {
    "per_stream_tasks": None,
    "unfetched_chunks": None,
    "total_tasks": None,
    "total_bytes": None,
    "max_hold_s": 3600.0,
}


def counters() -> dict[str, int]:
    """The patch's."""
    found: dict[str, int] = entry().counters
    return found


@dataclass
class Member:
    """What is read of a running request."""

    request_id: str
    external_req_id: str
    num_output_placeholders: int = 0
    num_computed_tokens: int = 0
    next_decode_eligible_step: int = 0
    status: Any = None


@dataclass
class Scheduler:
    """Counts steps and skips as ``Scheduler.schedule``; with *deep*, a step's task comes one step later."""

    num_spec_tokens: int = 0
    deep: bool = False
    running: list[Any] = field(default_factory=list)
    current_step: int = 0

    def schedule(self) -> list[str]:
        """The requests of one step."""
        self.current_step += 1
        chosen = [each for each in self.running if self.current_step >= each.next_decode_eligible_step]
        for each in chosen:
            each.num_computed_tokens += 1
        return [each.request_id for each in chosen]


class Rig:
    """Credits over a queue that nobody serves but the test; its lanes are stuck, or nobody is slow."""

    def __init__(
        self, streams: int = 1, *, spec: int = 0, chunks: Any = None, is_stuck: bool = True, **options: Any
    ) -> None:
        import vllm_omni  # noqa: F401 - adds to vLLM's statuses
        from vllm.v1.request import RequestStatus

        from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
        from omni_fastpath.patches.save_queue_cap.credits import Credits
        from omni_fastpath.patches.save_queue_cap.fair import FairQueue

        self.queue = FairQueue(counters(), chunks=chunks)
        self.queue.slow.is_pressed = self.queue.slow.is_anybody_slow = is_stuck
        vars(self.queue)["look_at_lanes"] = lambda _now: None
        options = {"holds": "always", **options}
        self.scheduler = Scheduler(num_spec_tokens=spec)
        for number in range(streams):
            name = f"s{number}"
            self.scheduler.running.append(Member(f"{name}-internal", name, status=RequestStatus.RUNNING))
        self.adapter = SimpleNamespace(_save_cond=threading.Condition())
        self.credits = Credits(
            self.scheduler, self.queue, self.adapter, SaveQueueOptions(**{**NONE, **options}), counters()
        )
        self.most = 0

    def member(self, number: int = 0) -> Any:
        """A running request."""
        return self.scheduler.running[number]

    def save(self, stream: str, payload: Any = None) -> None:
        """Queue a task."""
        self.queue.append({"request": SimpleNamespace(external_req_id=stream), "multimodal_output": payload})
        self.most = max(self.most, self.queue.tasks)

    def send(self, count: int = 1) -> None:
        """Send some tasks, whosever turn it is."""
        for _ in range(count):
            self.queue.sent(self.queue.popleft(), 0.0)

    def schedule(self) -> list[str]:
        """The streams of the next step."""
        self.credits.hold()
        return [name.removesuffix("-internal") for name in self.scheduler.schedule()]

    def step(self, payload: Any = None) -> list[str]:
        """A step whose tasks are queued at once."""
        stepped = self.schedule()
        for stream in stepped:
            self.save(stream, payload)
        return stepped


def expire(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the clock forward by two hours, as the holds see it."""
    from omni_fastpath.patches.save_queue_cap import credits as module

    now = time.monotonic() + 7200
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))


# ---- One stream ----


def test_limits_are_four_times_as_wide_while_nobody_is_slow() -> None:
    """A backlog is the processor's then, and everybody's alike; it is bounded all the same."""
    rig = Rig(is_stuck=False, per_stream_tasks=8)
    for _ in range(31):
        assert rig.step() == ["s0"]
    assert rig.step() == ["s0"]
    assert rig.schedule() == []
    rig.send(8)
    assert rig.schedule() == ["s0"]


def test_total_is_four_times_as_wide_while_nobody_is_slow() -> None:
    """As each stream's own."""
    rig = Rig(2, is_stuck=False, total_tasks=8)
    for _ in range(16):
        assert rig.step() == ["s0", "s1"]
    assert rig.schedule() == []
    assert rig.queue.tasks == 32


def test_stream_that_is_slow_itself_is_held_at_the_credit() -> None:
    """Beside a quick one with as many tasks, which is not."""
    rig = Rig(2, is_stuck=False, per_stream_tasks=8)
    for _ in range(8):
        rig.step()
    rig.queue.streams["s0"].is_slow = True
    assert rig.schedule() == ["s1"]
    rig.queue.streams["s0"].is_slow = False  # a quick send says that it was an accident
    assert rig.schedule() == ["s0", "s1"]


def test_held_at_the_credit_and_back_when_drained() -> None:
    """A stream steps until it has as many tasks as its credit, is skipped, and steps again once one was sent."""
    rig = Rig(per_stream_tasks=4)
    steps = [rig.step() for _ in range(7)]
    assert steps == [["s0"]] * 4 + [[]] * 3
    rig.send()
    assert rig.step() == ["s0"]
    assert rig.step() == []
    assert rig.most == 4
    assert (counters()["holds"], counters()["holds_for_tasks"], counters()["held_steps"]) == (2, 2, 4)


def test_only_the_stream_that_is_over_is_held() -> None:
    """Others run on beside it."""
    rig = Rig(3, per_stream_tasks=2)
    for _ in range(2):
        rig.save("s1")
    assert rig.schedule() == ["s0", "s2"]


@pytest.mark.parametrize(("tasks", "placeholders", "held"), [(2, 1, False), (2, 2, True), (1, 3, True), (0, 4, False)])
def test_placeholders_count_as_tasks(tasks: int, placeholders: int, held: bool) -> None:
    """What is in flight on the device will queue a task and counts; a stream with nothing queued is never behind."""
    rig = Rig(per_stream_tasks=4)
    for _ in range(tasks):
        rig.save("s0")
    rig.member().num_output_placeholders = placeholders
    assert rig.schedule() == ([] if held else ["s0"])


@pytest.mark.parametrize(("placeholders", "held"), [(3, False), (4, True), (6, True)])
def test_draft_tokens_are_one_task_a_step(placeholders: int, held: bool) -> None:
    """With two draft tokens a step, three placeholders are one step."""
    rig = Rig(spec=2, per_stream_tasks=4)
    for _ in range(2):
        rig.save("s0")
    rig.member().num_output_placeholders = placeholders
    assert rig.schedule() == ([] if held else ["s0"])


def test_hold_is_one_step_long() -> None:
    """A hold leaves nothing behind: a scheduler that is not asked again schedules the stream in the next step."""
    rig = Rig(per_stream_tasks=1)
    rig.save("s0")
    assert rig.schedule() == []
    assert rig.scheduler.schedule() == ["s0-internal"]


def test_later_step_of_somebody_else_stays() -> None:
    """What upstream itself set for a request is never made earlier."""
    rig = Rig(per_stream_tasks=1)
    rig.save("s0")
    rig.member().next_decode_eligible_step = 10
    rig.schedule()
    assert rig.member().next_decode_eligible_step == 10


def test_parked_request_is_held_too() -> None:
    """A request that waits for a chunk of its own when we look may run in the very step: it is held like any other."""
    from vllm.v1.request import RequestStatus

    rig = Rig(per_stream_tasks=1)
    rig.save("s0")
    rig.member().status = RequestStatus.WAITING_FOR_CHUNK
    assert rig.schedule() == []


def test_leaving_ends_the_hold() -> None:
    """Nothing is kept of a request that is aborted, preempted or ended while it is held."""
    rig = Rig(2, per_stream_tasks=1)
    rig.save("s0")
    rig.step()
    member = rig.scheduler.running.pop(0)
    rig.schedule()
    assert "s0-internal" not in rig.credits._holds
    rig.scheduler.running.append(member)
    assert "s0" not in rig.schedule()
    assert counters()["holds_for_tasks"] == 3  # s0, s1 and s0 again


def test_all_held() -> None:
    """Everybody may be held at once; each comes back as its own tasks are sent."""
    rig = Rig(3, per_stream_tasks=2)
    for _ in range(2):
        assert len(rig.step()) == 3
    assert rig.schedule() == []
    rig.send(3)
    assert len(rig.schedule()) == 3


# ---- The end of a hold ----


def test_expired_hold_lets_exactly_one_step_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``max_hold_s`` one step goes through, counted, and the next hold begins."""
    rig = Rig(per_stream_tasks=2)
    for _ in range(3):
        rig.step()
    assert rig.schedule() == []
    expire(rig, monkeypatch)
    assert [rig.step() for _ in range(4)] == [["s0"], [], [], []]
    assert (counters()["expired_holds"], counters()["holds"]) == (1, 2)
    assert rig.queue.tasks == 3


def test_pass_waits_until_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired hold lets a step through also when the first steps after could not schedule the request."""
    rig = Rig(per_stream_tasks=1)
    rig.save("s0")
    rig.schedule()
    expire(rig, monkeypatch)
    for _ in range(3):  # no KV blocks, say
        rig.credits.hold()
        rig.scheduler.current_step += 1
    assert rig.schedule() == ["s0"]
    assert rig.schedule() == []
    assert counters()["expired_holds"] == 1


def test_each_stream_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was held a moment ago does not go through with one that was held for long."""
    rig = Rig(2, per_stream_tasks=1)
    rig.save("s0")
    rig.schedule()
    expire(rig, monkeypatch)
    rig.save("s1")
    assert rig.schedule() == ["s0"]


# ---- Totals ----


def test_total_tasks_hold_those_with_the_most() -> None:
    """At the total, the streams with the least on its way go on, those with the most wait."""
    rig = Rig(3, total_tasks=8)
    for stream, count in (("s0", 4), ("s1", 1), ("s2", 2)):
        for _ in range(count):
            rig.save(stream)
    assert rig.step() == ["s1"]
    assert rig.schedule() == []
    assert counters()["holds_for_total"] == 3


def test_stream_without_anything_on_its_way_always_steps() -> None:
    """Over the total too: holding it would help nobody."""
    rig = Rig(3, total_tasks=2)
    for _ in range(5):
        rig.save("s0")
    assert rig.step() == ["s1", "s2"]
    assert rig.step() == []


@pytest.mark.parametrize("streams", [8, 64, 300, 600])
def test_total_is_the_cap_and_a_step_of_each(streams: int) -> None:
    """Nobody sends: all together never have more than the cap and one step of each stream that had nothing."""
    rig = Rig(streams, total_tasks=100)
    for _ in range(50):
        rig.step()
    assert max(100, streams) <= rig.most <= 100 + streams
    assert rig.most <= max(100, streams)


@pytest.mark.parametrize("streams", [64, 257, 600])
def test_nothing_queued_is_nobody_held(streams: int) -> None:
    """However many streams are on the device, none is held while none has a task queued."""
    rig = Rig(streams, per_stream_tasks=8, total_tasks=512, total_bytes=2**28)
    for member in rig.scheduler.running:
        member.num_output_placeholders = 1
    assert len(rig.schedule()) == streams
    assert counters()["holds"] == 0


def test_total_bytes_bound_what_is_queued() -> None:
    """Nobody sends: queued bytes never exceed the cap and a step of each stream."""
    import torch

    rig = Rig(4, total_bytes=2**16)
    step = 3000
    for _ in range(40):
        rig.schedule()
        for member in rig.scheduler.running:
            if rig.scheduler.current_step >= member.next_decode_eligible_step:
                rig.save(member.external_req_id, torch.zeros(step, dtype=torch.uint8))
    assert 2**16 - 4 * step <= rig.queue.nbytes <= 2**16 + 4 * step


def test_total_counts_what_is_on_the_device() -> None:
    """Steps in flight will queue a task each and count towards the total already."""
    rig = Rig(3, total_tasks=6)
    for member in rig.scheduler.running:
        rig.save(member.external_req_id)
        member.num_output_placeholders = 1
    assert rig.schedule() == []


def test_known_stream_without_anything_on_its_way_always_steps() -> None:
    """The same for one that has sent before and whose send time is remembered."""
    rig = Rig(2, total_tasks=2)
    rig.save("s1")
    rig.queue.sent(rig.queue.popleft(), 100.0)
    assert "s1" in rig.queue.streams
    for _ in range(5):
        rig.save("s0")
    assert rig.schedule() == ["s1"]


def test_step_that_would_not_fit_waits() -> None:
    """A stream is held when a step like its last one would go beyond the bytes, not only when they are used up."""
    import torch

    rig = Rig(total_bytes=2**16)
    for _ in range(5):
        rig.step(torch.zeros(30000, dtype=torch.uint8))
    assert rig.queue.nbytes == 60000


def test_all_drained_after_a_total_hold() -> None:
    """Once sent, everybody runs again."""
    rig = Rig(3, total_tasks=3)
    for _ in range(5):
        rig.step()
    rig.send(rig.queue.tasks)
    assert len(rig.step()) == 3


def test_expired_total_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold for the totals ends too: one step of each stream."""
    rig = Rig(2, total_tasks=2)
    for _ in range(3):
        rig.step()
    assert rig.schedule() == []
    expire(rig, monkeypatch)
    assert [len(rig.step()) for _ in range(3)] == [2, 0, 0]
    assert counters()["expired_holds"] == 2


# ---- Unfetched chunks ----


class Chunks:
    """Shared memory, as the holds see it."""

    nbytes = 0
    abandoned_nbytes = 0
    wanted = 0

    def want(self, within_s: float) -> bool:
        """Called by whoever holds a stream for it, or is near to."""
        self.wanted += 1
        return True

    def look(self, now: float) -> None:
        """The lanes'."""


def put(rig: Rig, stream: str, count: int) -> None:
    """Send so many chunks of a stream that nobody has fetched."""
    for _ in range(count):
        rig.save(stream)
        rig.queue.sent(rig.queue.popleft(), 0.0, is_unfetched=True)


def test_unfetched_chunks_hold_their_stream_and_ask_for_a_look() -> None:
    """At the limit the stream waits, the lanes are asked to look, and a fetch lets it go on."""
    chunks = Chunks()
    rig = Rig(2, chunks=chunks, unfetched_chunks=3)
    put(rig, "s0", 2)
    assert rig.schedule() == ["s0", "s1"]
    assert not chunks.wanted
    put(rig, "s0", 1)
    assert rig.schedule() == ["s1"]
    assert chunks.wanted
    rig.queue.table.gone("s0", 1, fetched=True)
    assert rig.schedule() == ["s0", "s1"]
    assert counters()["holds_for_unfetched"] == 1


def test_receiver_that_fetches_no_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold in which nobody fetched a single chunk is not renewed: that request has ended at the next stage."""
    rig = Rig(chunks=Chunks(), unfetched_chunks=3)
    put(rig, "s0", 8)
    rig.schedule()
    expire(rig, monkeypatch)
    assert [rig.schedule() for _ in range(5)] == [["s0"]] * 5
    assert (counters()["given_up"], counters()["expired_holds"]) == (1, 1)
    rig.queue.table.gone("s0", 1, fetched=True)  # it fetches after all
    assert rig.schedule() == []


def test_slow_receiver_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that fetched something during the hold is there: one step goes through, then the stream waits on."""
    rig = Rig(chunks=Chunks(), unfetched_chunks=3)
    put(rig, "s0", 5)
    rig.schedule()
    rig.queue.table.gone("s0", 1, fetched=True)
    expire(rig, monkeypatch)
    assert [rig.schedule() for _ in range(3)] == [["s0"], [], []]
    assert counters()["given_up"] == 0


def test_next_request_of_a_name_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given up was a request; the next one with its external id has a receiver of its own."""
    rig = Rig(chunks=Chunks(), unfetched_chunks=3)
    put(rig, "s0", 3)
    rig.schedule()
    expire(rig, monkeypatch)
    rig.schedule()
    assert counters()["given_up"] == 1
    rig.queue.table.gone("s0", 3, fetched=False)  # the old one's chunks are forgotten
    put(rig, "s0", 3)
    assert rig.schedule() == []


def test_hold_for_tasks_alone_asks_for_no_look() -> None:
    """No fetch can end it."""
    chunks = Chunks()
    rig = Rig(2, chunks=chunks, total_tasks=2)
    for _ in range(3):
        rig.step()
    assert rig.schedule() == []
    assert not chunks.wanted


def test_look_is_the_helpers_while_the_first_lane_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a fetch wakes the lane that can look: the helper, not a thread that is in a send."""
    from omni_fastpath.patches.save_queue_cap.helper import Helper

    woken: list[str] = []
    rig = Rig(chunks=Chunks(), unfetched_chunks=3)
    put(rig, "s0", 3)
    monkeypatch.setattr(rig.adapter._save_cond, "notify", lambda: woken.append("first"))
    rig.schedule()
    assert woken == ["first"]
    rig.queue.helper.condition = threading.Condition()
    monkeypatch.setattr(Helper, "alert", lambda _self: woken.append("helper"))
    monkeypatch.setattr(Helper, "is_first_stuck", lambda _self, _now: True)
    rig.schedule()
    assert woken == ["first", "helper"]


def test_bytes_near_their_limit_ask_for_a_look() -> None:
    """Half of the bytes on their way: what was fetched since the last look may not be counted off yet."""
    import torch

    chunks = Chunks()
    rig = Rig(chunks=chunks, total_bytes=2**16)
    rig.step(torch.zeros(2**15 - 1, dtype=torch.uint8))
    rig.schedule()
    assert not chunks.wanted
    rig.step(torch.zeros(1000, dtype=torch.uint8))
    rig.schedule()
    assert chunks.wanted


# ---- A held stream drains for a while ----


def test_held_stream_drains_to_three_quarters_of_its_credit() -> None:
    """Let go at each task that was sent, streams that are all behind would take turns in steps of few of them."""
    rig = Rig(per_stream_tasks=8)
    for _ in range(8):
        rig.step()
    assert rig.schedule() == []
    rig.send()
    assert (rig.queue.tasks, rig.schedule()) == (7, [])
    rig.send()
    assert rig.schedule() == ["s0"]
    assert counters()["holds"] == 1


def test_hold_below_the_credit_ends_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its time is over a stream that is under its credit runs, and no hold is said to have expired."""
    rig = Rig(per_stream_tasks=8)
    for _ in range(8):
        rig.step()
    assert rig.schedule() == []
    rig.send()
    assert rig.schedule() == []
    expire(rig, monkeypatch)
    assert rig.schedule() == ["s0"]
    assert counters()["expired_holds"] == 0


def test_stream_held_for_the_totals_may_use_its_credit() -> None:
    """Draining to a share of the credit is for streams that were over it."""
    rig = Rig(2, per_stream_tasks=8, total_tasks=14)
    for _ in range(7):
        rig.step()
    assert rig.schedule() == []
    rig.send(4)
    assert rig.schedule() != []
    assert counters()["holds_for_tasks"] == 0


# ---- Null ----


def test_null_is_no_limit() -> None:
    """With every limit null nobody is ever held."""
    rig = Rig(3)
    for _ in range(300):
        assert len(rig.step()) == 3
    assert counters()["holds"] == 0


# ---- Where the patch serves, does not, and refuses ----


def stage(
    *,
    asynchronous: bool = True,
    pipeline: int = 1,
    v2: bool = False,
    generation: bool = False,
    chunked: bool = True,
    last: bool = False,
) -> Any:
    """A scheduler of that kind whose constructor has come as far as our seam."""
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
    from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

    kind: Any = OmniGenerationScheduler if generation else OmniARScheduler
    made = kind.__new__(kind)
    made.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    made.use_v2_model_runner = v2
    made.current_step = 0
    connector = SimpleNamespace(stage_id=0, reap_consumed=lambda: None, close=lambda: None)
    made.chunk_transfer_adapter = (
        SimpleNamespace(
            connector=connector,
            custom_process_next_stage_input_func=None if last else test_null_is_no_limit,
            save_thread=threading.current_thread(),
            stop_event=threading.Event(),
            _pending_save_reqs=None,
        )
        if chunked
        else None
    )
    return made


class Weak(SimpleNamespace):
    """A namespace that can be referred to weakly and hashed."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def started(made: Any, **options: Any) -> tuple[State, str]:
    """Run the seam's wrapper on it; the state and its reason."""
    from omni_fastpath.patches.save_queue_cap import wrappers

    if made.chunk_transfer_adapter is not None:
        made.chunk_transfer_adapter = Weak(**vars(made.chunk_transfer_adapter))
    ours = entry()
    before, ours.options = ours.options, ours.patch.options(**options)
    try:
        wrappers.wrapped_scheduler_made(lambda: None, made, (), {})
        return ours.state, ours.reason
    finally:
        ours.options = before
        if made.chunk_transfer_adapter is not None:
            made.chunk_transfer_adapter.stop_event.set()
        LEDGER.set(ours.patch, State.OFF, "")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: stage(chunked=False), "no async-chunk"),
        (lambda: stage(v2=True, chunked=False), "model runner v2"),
        (lambda: stage(v2=True), "model runner v2"),
        (lambda: stage(generation=True), "autoregressive"),
        (lambda: stage(last=True), "no stage takes"),
    ],
    ids=["no async-chunk", "v2 without adapter", "v2", "generation", "last stage"],
)
def test_not_applicable_says_why_and_touches_nothing(made: Callable[[], Any], says: str) -> None:
    """Where there is no queue to bound the state says so, and the stage is as upstream made it."""
    scheduler = made()
    state, reason = started(scheduler)
    assert state is State.NOT_APPLICABLE
    assert says in reason
    assert not hasattr(scheduler, "_omni_fastpath_save_queue")
    if scheduler.chunk_transfer_adapter is not None:
        assert scheduler.chunk_transfer_adapter._pending_save_reqs is None


@pytest.mark.parametrize("credit", [1, 2])
def test_small_credit_with_async_scheduling_is_refused(credit: int) -> None:
    """Two steps are in flight always: a credit below 3 stops the stage at its start, with the way out."""
    with pytest.raises(ConfigError, match=r"per_stream_tasks.*at least 3"):
        started(stage(), per_stream_tasks=credit, holds="always")


@pytest.mark.parametrize(("credit", "asynchronous"), [(3, True), (None, True), (1, False), (2, False)])
def test_credit_that_goes_with_the_scheduling(credit: int | None, asynchronous: bool) -> None:
    """3 with async scheduling, anything without it, and null always."""
    state, _ = started(stage(asynchronous=asynchronous), per_stream_tasks=credit)
    assert state is State.APPLIED


def test_pipeline_parallelism_is_refused() -> None:
    """It uses the same field: where every limit is to hold the stage does not start; by default nobody is held."""
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2"):
        started(stage(pipeline=2), holds="always")
    state, reason = started(stage(pipeline=2))
    assert state is State.APPLIED
    assert "no stream is held: pipeline parallelism" in reason


def test_all_null_only_replaces_the_queue() -> None:
    """Without a limit nothing is refused, and ``schedule`` is upstream's alone."""
    from omni_fastpath.patches.save_queue_cap.queue import SaveQueue

    scheduler = stage(pipeline=2)
    nothing = {key: None for key in NONE if key != "max_hold_s"}
    state, reason = started(scheduler, **nothing)
    assert state is State.APPLIED
    assert "save queue (synchronous full payloads) is not covered" in reason
    assert isinstance(scheduler.chunk_transfer_adapter._pending_save_reqs, SaveQueue)
    assert scheduler._omni_fastpath_save_queue.credits is None


def test_schedule_without_credits_is_only_passed_on() -> None:
    """A scheduler that has no credits gets its own answer, with its own arguments."""
    from omni_fastpath.patches.save_queue_cap.wrappers import wrapped_schedule

    seen: list[Any] = []
    answer = wrapped_schedule(lambda *a, **k: seen.append((a, k)) or "answer", stage(), (True,), {})  # type: ignore[func-returns-value]
    assert answer == "answer"
    assert seen == [((True,), {})]
