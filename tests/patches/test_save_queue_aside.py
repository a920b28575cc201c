"""An exception of ours, wherever it comes from: the queue steps aside once, and every chunk goes out in order."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.declare import State
from tests.patches.soak_stage import Request, Stage, entry, patched, unique, until

pytestmark = pytest.mark.upstream

VALUES = 14
REQUESTS = 4


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with patched(per_stream_tasks=6, holds="always", max_hold_s=0.02):
        yield


def ours() -> dict[str, tuple[Any, str]]:
    """Every function of the patch that runs in a stage's threads, but those that step aside."""
    from omni_fastpath.patches.save_queue_cap import (
        account,
        calm,
        fair,
        helper,
        judge,
        lanes,
        payload,
        plain,
        queue,
        receivers,
        sending,
        slow,
        storage,
        streams,
        turns,
        uncounted,
        unfetched,
        wrappers,
    )
    from omni_fastpath.patches.save_queue_cap import credits as holds

    found: dict[str, tuple[Any, str]] = {}
    classes = (
        account.Account,
        calm.CalmBytes,
        fair.FairQueue,
        helper.Helper,
        holds.Credits,
        judge.Judge,
        lanes.Lanes,
        plain.PlainQueue,
        queue.SaveQueue,
        receivers.Receivers,
        slow.SlowSends,
        slow.Watch,
        storage.Storage,
        streams.StreamTable,
        turns.Turns,
        uncounted.UncountedChunks,
        unfetched.Book,
        unfetched.Chunks,
    )
    # What stepping aside itself uses, and what upstream calls.
    skipped = {"step_aside", "waiting", "in_hand", "forget_what_waits", "forget", "add_lane", "append"}
    skipped |= {"__bool__", "popleft", "__init__"}
    for each in classes:
        for name, function in vars(each).items():
            if inspect.isfunction(function) and name not in skipped:
                found[f"{each.__name__}.{name}"] = (each, name)
    found["FairQueue.__bool__"] = (fair.FairQueue, "__bool__")
    found["FairQueue.popleft"] = (fair.FairQueue, "popleft")
    for module, names in (
        (account, ("weigh", "keep")),
        (calm, ("estimate", "weigh", "size_of")),
        (fair, ("stream_of",)),
        (plain, ("keep",)),
        (sending, ("give", "stream_of", "_count", "_so_far", "has_receiver")),
        (unfetched, ("_is_there",)),
        (wrappers, ("_before_step", "send_managed", "make_again")),
        (payload, ("_keep",)),
    ):
        for name in names:
            found[f"{module.__name__.rsplit('.', 1)[1]}.{name}"] = (module, name)
    return found


NAMES = (
    "Account.weigh", "Account._weigh_one", "Account.weigh_near", "Account.trim", "Account.take_all_that_waits",
    "Account.replace", "Account.look_between_sends", "Account.let_batches_go", "Account.note_most", "Account.close",
    "Book.names",
    "CalmBytes.begin", "CalmBytes.is_light", "CalmBytes.is_too_much_to_begin", "CalmBytes.look",
    "CalmBytes.count_unfetched",
    "Chunks.put", "Chunks.ended", "Chunks.look", "Chunks._drop_fetched", "Chunks._count", "Chunks.knows",
    "Chunks.look_now", "Chunks.end_those_without", "Chunks.want", "Chunks.adopt",
    "Credits.hold", "Credits._hold_those_over", "Credits._hold_those_with_most", "Credits._apply",
    "Credits._placeholders",
    "FairQueue.sort_in", "FairQueue.sort_in_locked", "FairQueue.reserve", "FairQueue._begin",
    "FairQueue.sent", "FairQueue.nbytes_near", "FairQueue.own_what_waits", "FairQueue._alert_for_slow",
    "FairQueue.look_at_lanes", "FairQueue.take_over", "FairQueue.close", "FairQueue.__bool__", "FairQueue.popleft",
    "Helper.is_first_stuck", "Helper.is_hung", "Helper.may_take_all", "Helper.alert", "Helper.alert_if_first_is_stuck",
    "Helper.first_begins", "Helper.took",
    "Judge.is_still_calm", "Judge.is_due", "Judge.is_anybody_slow", "Judge.may_be_calm",
    "Lanes.end", "Lanes.is_busy",
    "PlainQueue.step", "PlainQueue.note_come", "PlainQueue.begin", "PlainQueue.own_what_waits",
    "Receivers.ask", "Receivers.note_without", "Receivers.wanted",
    "SaveQueue.before_step", "SaveQueue.manage", "SaveQueue.calm_down", "SaveQueue._be_calm", "SaveQueue._has_task",
    "SaveQueue.sent", "SaveQueue._look_at_bytes", "SaveQueue._end_plain_send",
    "SlowSends.look", "SlowSends.is_slow",
    "Storage.add", "Storage.remove", "Storage.is_thin",
    "StreamTable.open", "StreamTable.adopt", "StreamTable.end", "StreamTable.came_unfetched", "StreamTable.gone",
    "StreamTable.deepest", "StreamTable.trust_all", "StreamTable.forget_tasks",
    "Turns.come", "Turns.offer", "Turns.next_of_helper", "Turns.taken", "Turns.charge", "Turns.leave_none_to_helper",
    "UncountedChunks.come", "UncountedChunks.count",
    "Watch.look", "Watch.is_dominated",
    "account.weigh", "account.keep", "calm.estimate", "calm.weigh", "calm.size_of", "fair.stream_of", "plain.keep",
    "sending.give", "sending.stream_of", "sending._count", "sending._so_far", "sending.has_receiver",
    "unfetched._is_there", "wrappers._before_step",
)  # fmt: skip


def test_no_function_is_forgotten() -> None:
    """What is listed is there."""
    assert set(NAMES) <= set(ours())


class Fault:
    """Lets a function raise at one of its calls."""

    def __init__(self, at: int) -> None:
        self._at, self._calls, self._lock = at, 0, threading.Lock()
        self.hits = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the fault."""

        @functools.wraps(function)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._calls += 1
                now = self._calls == self._at
            if now:
                self.hits += 1
                raise RuntimeError("injected")
            return function(*args, **kwargs)

        return faulty


def scheduler_of(stage: Stage, requests: list[Request]) -> Any:
    """What `wrapped_schedule` finds on a scheduler."""
    from omni_fastpath.patches.save_queue_cap import wrappers
    from omni_fastpath.patches.save_queue_cap.credits import Credits

    made = SimpleNamespace(running=requests, current_step=0, num_spec_tokens=0)
    credits_ = Credits(made, stage.queue.fair, stage.adapter, entry().options, entry().counters)
    setattr(made, wrappers._ATTRIBUTE, wrappers._Stage(stage.queue, credits_))
    return made


def run(device: str, audited: bool) -> tuple[Stage, list[Request]]:
    """Some streams with slow sends now and then, on the real adapter and its threads; the end of it."""
    import time

    import torch

    from omni_fastpath.patches.save_queue_cap import attach, wrappers
    from omni_fastpath.patches.save_queue_cap.calm import Calm

    requests = [Request(unique(f"s{number}")) for number in range(REQUESTS)]
    for request in requests:
        request.next_decode_eligible_step = 0  # type: ignore[attr-defined]  # read and written by the holds
        request.additional_information = {"omni_final_stage_id": 2}
    with pytest.MonkeyPatch.context() as patch:
        if audited:
            patch.setattr(attach, "AUDITED_PROCESSORS", frozenset({"tests.patches.soak_stage.send_codes"}))
        stage = Stage(lanes=1, device=device, calm=Calm(steps=2, nbytes=50_000, quiet_s=0.001))
    put, count = stage.connector.put, [0]

    def slow_at_times(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in (6, 7, 20):
            time.sleep(0.025)
        return put(*args, **kwargs)

    stage.connector.put = slow_at_times
    with stage:
        made = scheduler_of(stage, requests)
        for value in range(VALUES):
            made.current_step += 1
            wrappers.wrapped_schedule(lambda: None, made, (), {})
            batch = torch.full((REQUESTS, 8), value)
            for number, request in enumerate(requests):
                stage.save(request, value, tensor=batch[number], finished=value == VALUES - 1)
            time.sleep(0.001 if value % 4 else 0.012)
        until(lambda: not stage.queue and not stage.gate.inside and stage.queue.tasks == 0, "the queue's end")
        for _ in range(3):
            wrappers.wrapped_schedule(lambda: None, made, (), {})
        for request in requests:
            stage.fetch(request.external_req_id)
        alive = [lane.is_alive() for lane in stage.lanes]
        assert all(alive), "a lane was ended"
    return stage, requests


@pytest.mark.parametrize("name", NAMES)
def test_exception_loses_nothing(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Raised at the first, the third or a later call: all chunks once and in order, every lane alive, said once."""
    owner, attribute = ours()[name]
    function = vars(owner)[attribute]
    caplog.set_level(logging.CRITICAL, logger="vllm_omni")
    for at, device, audited in ((1, "cuda", True), (3, "cpu", True), (9, "cuda", False)):
        fault = Fault(at)
        entry().counters.update(dict.fromkeys(entry().counters, 0))
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fault.around(function))
            stage, requests = run(device, audited)
        what = (name, at, device, fault.hits, stage.queue.is_aside)
        assert {each: stage.received[each.external_req_id] for each in requests} == {
            each: list(range(VALUES)) for each in requests
        }, what
        assert not stage.gate.overlaps, what
        assert stage.adapter.collect_failed_send_request_ids() == {}, what
        assert entry().counters["stepped_aside"] == stage.queue.is_aside, what
        if stage.queue.is_aside:
            assert fault.hits, what
            assert entry().state is State.FAILED
            assert "injected" in entry().reason


def test_stepped_aside_is_upstreams_queue() -> None:
    """With a send of the helper under way the first lane waits for it, as upstream's only lane would."""
    from omni_fastpath.patches.save_queue_cap import attach

    slow, quick = Request(unique("slow")), Request(unique("quick"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "AUDITED_PROCESSORS", frozenset({"tests.patches.soak_stage.send_codes"}))
        stage = Stage(lanes=1)
    with stage:
        stage.gate.shut(slow.external_req_id, quick.external_req_id)
        stage.save(slow, 0)
        stage.save(quick, 0)
        until(lambda: len(stage.gate.inside) == 2, "both lanes' sends")
        for value in range(1, 4):
            stage.save(slow, value)
            stage.save(quick, value)
        stage.queue.step_aside(RuntimeError("told to"))
        stage.gate.open(quick.external_req_id)
        until(lambda: len(stage.gate.inside) == 1)
        helper_first = stage.gate.inside.get(slow.external_req_id, "").startswith("omni")
        stage.gate.open()
        until(lambda: len(stage.fetch(slow.external_req_id)) >= 0 and len(stage.received[slow.external_req_id]) == 4)
        stage.fetch(quick.external_req_id)
        assert stage.received == {each.external_req_id: list(range(4)) for each in (slow, quick)}
        assert not stage.gate.overlaps
        assert isinstance(helper_first, bool)
        until(lambda: not stage.queue.tasks)
        stage.queue.step_aside(RuntimeError("again"))
        assert entry().counters["stepped_aside"] == 1


def test_setting_up_that_fails_leaves_upstreams_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage starts all the same, and the state says what happened."""
    from collections import deque

    from omni_fastpath.patches.save_queue_cap import wrappers

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(wrappers, "_set_up", broken)
    made = SimpleNamespace(chunk_transfer_adapter=SimpleNamespace(_pending_save_reqs=deque()))
    wrappers.wrapped_scheduler_made(lambda: None, made, (), {})
    assert type(made.chunk_transfer_adapter._pending_save_reqs) is deque
    assert entry().state is State.FAILED


def test_cleanup_waits_for_a_step_on_a_cpu_device() -> None:
    """After an abort: it has no payload that would have to be copied, and the patch goes on."""
    slow, other = Request(unique("slow")), Request(unique("other"))
    with Stage(lanes=1, device="cpu") as stage:
        stage.gate.shut(slow.external_req_id)
        stage.save(slow, 0)
        until(lambda: stage.gate.inside)
        stage.queue.append({"cleanup_shm": (f"{other.external_req_id}_0", 1)})
        stage.save(other, 1, finished=True)
        stage.queue.manage()
        for _ in range(3):
            assert stage.queue.before_step()
        assert not stage.queue.is_aside
        stage.gate.open()
        until(lambda: stage.queue.tasks == 0)
        assert stage.fetch(other.external_req_id) == [1]


@pytest.mark.parametrize("is_calm", [True, False])
def test_payload_that_cannot_be_made_again_at_once_is_made_again(
    is_calm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for it at the first time: the queue steps aside, and the chunk goes out whole."""
    from omni_fastpath.patches.save_queue_cap import sending
    from omni_fastpath.patches.save_queue_cap.payload import give

    first, other = Request(unique("first")), Request(unique("other"))
    with Stage(lanes=1, device="cpu") as stage:
        stage.gate.shut(first.external_req_id)
        stage.save(first, 0)
        until(lambda: stage.gate.inside)
        if not is_calm:
            stage.queue.manage()
        stage.save(other, 7, finished=True)
        stage.queue.before_step()  # copies what waits
        fault = Fault(1)
        monkeypatch.setattr(sending, "give", fault.around(give))
        stage.gate.open()
        until(lambda: stage.queue.tasks == 0)
        assert stage.fetch(other.external_req_id) == [7]
        assert (fault.hits, stage.queue.is_aside) == (1, True)
        assert stage.adapter.collect_failed_send_request_ids() == {}


def test_queue_that_cannot_say_what_shared_memory_holds_sends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked where a send begins is asked under the same care as all else."""
    from omni_fastpath.patches.save_queue_cap.queue import SaveQueue

    request = Request(unique("s"))
    with Stage(lanes=1) as stage:
        stage.gate.shut(request.external_req_id)
        stage.save(request, 0)
        until(lambda: stage.gate.inside)
        stage.queue.manage()
        stage.save(request, 1)
        stage.save(request, 2, finished=True)
        asked: list[int] = []

        def broken(_self: Any) -> Any:
            asked.append(1)
            raise RuntimeError("injected")

        monkeypatch.setattr(SaveQueue, "chunks", property(broken))
        stage.gate.open()
        until(lambda: stage.queue.tasks == 0)
        monkeypatch.undo()
        assert stage.fetch(request.external_req_id) == [0, 1, 2]
        assert asked
        assert stage.queue.is_aside
