"""Plain order while all is calm: what ends it, that nothing is lost on the way, and how it comes back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import Self

from tests.patches.soak_stage import Request, Stage, entry, patched, unique, until

pytestmark = pytest.mark.upstream

Task = dict[str, Any]


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with patched():
        yield


def calm(**values: Any) -> Any:
    """The thresholds."""
    from omni_fastpath.patches.save_queue_cap.calm import Calm

    return Calm(**values)


def task(stream: str, number: int = 0, payload: Any = None) -> Task:
    """A save task as upstream queues it."""
    return {"request": SimpleNamespace(external_req_id=stream), "multimodal_output": payload, "number": number}


class Rig:
    """A queue and its first lane, one call at a time; a context manager."""

    def __init__(self, **thresholds: Any) -> None:
        from omni_fastpath.patches.save_queue_cap.fair import FairQueue
        from omni_fastpath.patches.save_queue_cap.queue import SaveQueue

        self.queue = SaveQueue(FairQueue(entry().counters), entry().counters, calm=calm(**thresholds))
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(lambda: self.queue.add_lane(threading.current_thread())).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def step(self, *streams: str, payload: Any = None) -> bool:
        """One step that appends for these streams; whether the queue was managed before it."""
        managed = bool(self.queue.before_step())
        for stream in streams:
            self.queue.append(task(stream, payload=payload))
        return managed

    def take(self) -> Task | None:
        """As ``save_loop``: ask, then take."""
        found: Task | None = self._thread.submit(lambda: self.queue.popleft() if self.queue else None).result()
        return found

    def ask(self) -> bool:
        """Whether there is something for the lane."""
        return self.start_to_ask().result()

    def start_to_ask(self) -> Future[bool]:
        """Let the lane ask, and do not wait for it."""
        return self._thread.submit(lambda: bool(self.queue))

    def sent(self, taken: Any, seconds: float = 0.0) -> None:
        """The end of a send."""
        self._thread.submit(self.queue.sent, taken, seconds).result()

    def send(self, count: int) -> list[str]:
        """Send so many; whose they were."""
        found = []
        for _ in range(count):
            taken = self.take()
            assert taken is not None
            found.append(taken["request"].external_req_id)
            self.sent(taken)
        return found


# ---- What ends it ----


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_age_of_the_oldest_ends_the_calm(steps: int) -> None:
    """With a task unsent for so many appending steps streams get queues of their own; idle steps do not count."""
    with Rig(steps=steps) as rig:
        for _ in range(steps - 1):
            assert not rig.step("a", "b")
            for _ in range(5):
                assert not rig.step()
        assert not rig.step("a", "b")
        assert rig.step()
        assert rig.queue.streams["a"].tasks == steps


def test_no_stream_has_more_than_its_age_allows() -> None:
    """Whatever is sent when: while it is calm nobody has more tasks than the steps, and as many as may be in flight."""
    rng = random.Random(4)
    with Rig(steps=5, quiet_s=0.0) as rig:
        for _ in range(400):
            managed = rig.step(*rng.sample("abcdefgh", rng.randrange(9)))
            if not managed:
                assert max((each.tasks for each in rig.queue.streams.values()), default=0) <= 5 + 1
            rig.send(min(rng.choice((0, 4, 8)), rig.queue.tasks))
            rig.queue.calm_down(is_holding=False)


def test_slow_send_ends_the_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that lasts too long: what waits is sorted in, and the stream that is being sent is known to be."""
    from omni_fastpath.patches.save_queue_cap import slow

    with Rig() as rig:
        rig.step("a", "a", "b")
        taken = rig.take()
        assert not rig.step()
        monkeypatch.setattr(slow, "SLOW_S", 0.0)
        assert rig.step()
        assert rig.queue.streams["a"].in_flight is not None
        assert rig.queue.fair.helper.first_since_s is not None
        rig.sent(taken)
        assert rig.queue.streams["a"].in_flight is None
        assert rig.send(2) in (["a", "b"], ["b", "a"])


class Clock:
    """Monotonic seconds that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        """So much later."""
        self.now += seconds


def test_pause_of_the_whole_process_is_no_slow_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send of which two looks saw a second pass, and none that it went on in steps: the lane had no chance to run."""
    clock = Clock(monkeypatch)
    with Rig() as rig:
        rig.step("a", "b")
        rig.take()
        clock.pass_by(0.005)
        assert not rig.step("a")
        clock.pass_by(1.0)
        assert not rig.step("a")
        assert rig.send(1) == ["b"]


@pytest.mark.parametrize("step_s", [0.001, 0.005, 0.015, 0.05, 0.5])
def test_send_that_goes_on_from_step_to_step_is_slow(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """After 20 ms of steps, or the second whole one: however short or long they are."""
    from omni_fastpath.patches.save_queue_cap.slow import LOOK_S, SLOW_S

    clock = Clock(monkeypatch)
    with Rig() as rig:
        rig.step("a")
        rig.take()
        count = 0
        while not rig.step("a"):
            clock.pass_by(step_s)
            count += 1
            assert count < 100
        assert count - round(SLOW_S / min(step_s, LOOK_S)) in (0, 1)  # sums of fractions


def test_each_of_many_quick_sends_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is always in some send, late as it may be, is in no slow one."""
    clock = Clock(monkeypatch)
    with Rig() as rig:
        for _ in range(60):
            assert not rig.step("a")
            taken = rig.take()
            clock.pass_by(0.015)
            assert not rig.step("a")
            rig.sent(taken)


def test_lane_is_dominated_for_as_long_as_its_slow_send_lasted() -> None:
    """So that who waits for a slow stream's turns is held between these too, and soon no more after an accident."""
    from omni_fastpath.patches.save_queue_cap.slow import Watch

    watch = Watch()
    for now in (0.0, 0.01, 0.02, 0.1, 0.2):
        watch.look(0.0, now)
    assert watch.is_dominated(0.2)
    assert not watch.look(None, 0.2)
    assert watch.is_dominated(0.39)
    assert not watch.is_dominated(0.41)


def test_stream_whose_send_ended_the_calm_is_known_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One send of 0.1 s says it: its next task is the helper's."""
    clock = Clock(monkeypatch)
    with Rig() as rig:
        rig.step("a", "b", "a")
        rig.take()
        for _ in range(12):
            clock.pass_by(0.01)
            rig.step()
        assert not rig.queue.is_calm
        assert rig.ask()
        assert rig.queue.fair.streams["a"].is_slow


def test_idle_lane_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that found nothing to send sleeps; that is no slow send."""
    from omni_fastpath.patches.save_queue_cap import slow

    with Rig() as rig:
        rig.step("a")
        rig.send(1)
        assert not rig.ask()
        monkeypatch.setattr(slow, "SLOW_S", 0.0)
        assert not rig.step("a")


def test_many_tasks_end_the_calm() -> None:
    """At half of ``total_tasks``."""
    with Rig(tasks=10) as rig:
        rig.step(*"abcdefghi")
        assert not rig.step()
        rig.step("a")
        assert rig.step()


def test_bytes_end_the_calm() -> None:
    """What the lane weighs now and then: each step's batch once, whatever part of it each task has."""
    import torch

    with Rig(nbytes=1000) as rig:
        batch = torch.zeros(600, dtype=torch.uint8)
        rig.step("a", "b", payload={"x": batch[:10]})
        rig.step("a", payload={"x": batch[10:20]})
        rig.send(1)
        rig.queue._look_at_bytes(time.monotonic() + 1.0)
        assert not rig.step("a", payload={"x": torch.zeros(500, dtype=torch.uint8)[:5]})
        rig.queue._look_at_bytes(time.monotonic() + 2.0)
        assert rig.step()
        assert rig.queue.nbytes == 1100


def test_tasks_since_the_last_look_count_as_those_that_it_saw() -> None:
    """Where they may be too much they are looked at in the step, without the lane."""
    import torch

    with Rig(nbytes=1000, most_nbytes=1200) as rig:

        def step() -> bool:
            return rig.step("a", payload={"x": torch.zeros(100, dtype=torch.uint8)})

        step()
        step()
        rig.queue._look_at_bytes(time.monotonic())
        for _ in range(8):
            assert not step()
        assert step()  # ten were there
        assert rig.queue.streams["a"].tasks == 11


def test_larger_tasks_than_the_last_look_saw_end_the_calm_before_the_next() -> None:
    """A look comes four times a second: prompts that queue meanwhile are as dear as the newest task of a step says."""
    import torch

    with Rig(nbytes=1000, most_nbytes=1200) as rig:
        for _ in range(10):
            rig.step("a", payload={"x": torch.zeros(1, dtype=torch.uint8)})
        rig.queue._look_at_bytes(time.monotonic())
        for _ in range(2):
            assert not rig.step("a", payload={"x": torch.zeros(500, dtype=torch.uint8)})
        assert rig.step()
        assert rig.queue.nbytes > 1000


def test_one_large_task_among_small_ones_does_not_end_the_calm() -> None:
    """What the newest task says of the others is looked up before it counts."""
    import torch

    with Rig(nbytes=1000, most_nbytes=1200) as rig:
        rig.step("a", payload={"x": torch.zeros(500, dtype=torch.uint8)})
        for _ in range(20):
            assert not rig.step("a", payload={"x": torch.zeros(1, dtype=torch.uint8)})
        assert rig.queue.is_calm


def test_bytes_that_were_put_are_counted_until_they_were_fetched() -> None:
    """Half of ``total_bytes`` in shared memory, unfetched: a look first, and the calm ends if it finds them there."""
    request = Request(unique("s"))
    with Stage(calm=calm(nbytes=12_000), lanes=1) as stage:
        for number in range(4):
            stage.save(request, number, size=300)
            until(lambda: stage.queue.tasks == 0)
            stage.queue.before_step()
        assert stage.queue.is_calm
        stage.fetch(request.external_req_id)
        for number in range(2):
            stage.save(request, 10 + number, size=300)
        until(lambda: stage.queue.tasks == 0)
        stage.queue.before_step()
        assert stage.queue.is_calm  # it may be fetched, and a look is asked for
        until(lambda: (stage.queue.before_step(), stage.queue._bytes.seen_nbytes)[1] < 6000, "the look")
        for number in range(8):
            stage.save(request, 20 + number, size=300)
        until(stage.queue.before_step, "the end of the calm")
        name = request.external_req_id
        until(lambda: name in stage.queue.streams and stage.queue.streams[name].unfetched == 10, "the chunks by stream")
        assert stage.queue.nbytes >= 10 * 2400
        stage.fetch(request.external_req_id)


def test_unfetched_limit_and_small_credits_are_never_calm() -> None:
    """What is counted by stream needs streams: with ``unfetched_chunks``, or a credit that leaves no step."""
    from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
    from omni_fastpath.patches.save_queue_cap.attach import calm_of

    assert calm_of(SaveQueueOptions(unfetched_chunks=3)).steps == 0
    assert calm_of(SaveQueueOptions(per_stream_tasks=1, holds="always")).steps == 0
    # Sends are quick while it is calm: four times what holds a slow stream, less what is in flight and two at the end.
    assert calm_of(SaveQueueOptions(per_stream_tasks=3, holds="always")).steps == 7
    assert {calm_of(SaveQueueOptions(holds=each)).steps for each in ("never", "bytes", "always")} == {123}
    assert {calm_of(SaveQueueOptions(holds=each)).tasks for each in ("never", "bytes", "always")} == {16384}
    assert calm_of(SaveQueueOptions(per_stream_tasks=None)).steps > 500
    limits = calm_of(SaveQueueOptions.model_validate({"total_bytes": "1MiB"}))
    assert (limits.nbytes, limits.most_nbytes) == (7 * 2**17, 2**20)
    with Rig(steps=0) as rig:
        assert rig.step("a")


def test_helpers_waking_ends_the_calm() -> None:
    """The first lane hangs and nobody schedules: the helper, which looks every 0.1 s, sends the others."""
    slow, quick = Request(unique("slow")), Request(unique("quick"))
    with Stage(memory=True, calm=calm()) as stage:
        stage.gate.shut(slow.external_req_id)
        stage.save(slow, 0)
        until(lambda: stage.gate.inside)
        stage.save(slow, 1)
        stage.save(quick, 0, finished=True)
        assert stage.queue.is_calm
        until(lambda: stage.fetch(quick.external_req_id) == [0] or quick.external_req_id in stage.ended)
        assert not stage.queue.is_calm
        stage.gate.open()
        stage.drain()
        assert stage.fetch(slow.external_req_id) == [0, 1]
        assert not stage.gate.overlaps


# ---- On the way ----


def test_lane_that_was_told_of_a_task_gets_one() -> None:
    """The calm ends between a lane's question and its taking: a task is kept for it."""
    with Rig() as rig:
        rig.step("a", "b")
        assert rig.ask()
        rig.queue.manage()
        assert rig.queue.fair.lanes.first is not None
        assert rig.queue.fair.lanes.first.reserved is not None
        assert len(rig.send(2)) == 2
        assert rig.take() is None


def test_lane_that_asks_while_the_calm_ends_keeps_what_was_reserved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the lock meanwhile, and must not take another stream's task in place of the one that it has."""
    with Rig() as rig:
        rig.step("a", "b", "a")
        account, uncounted = rig.queue.fair.account, rig.queue._uncounted
        look, come = account.look_between_sends, uncounted.come
        has_looked = threading.Event()
        answers: list[Future[bool]] = []

        def looked(now: float) -> None:  # after the lane saw that nothing is reserved, before it takes the lock
            look(now)
            has_looked.set()

        def came() -> None:  # under the lock, before anything is reserved
            answers.append(rig.start_to_ask())
            assert has_looked.wait(30)
            come()

        monkeypatch.setattr(account, "look_between_sends", looked)
        monkeypatch.setattr(uncounted, "come", came)
        rig.queue.manage()
        assert answers[0].result()
        assert rig.send(3) == ["a", "b", "a"]
        assert rig.take() is None
        assert rig.queue.tasks == 0


def test_order_within_a_stream_is_that_of_arrival_through_all_changes() -> None:
    """Calm, managed, calm again, at any moment of a send: each stream's tasks leave in order, each once."""
    rng = random.Random(5)
    with Rig(quiet_s=0.0) as rig:
        sent: dict[str, list[int]] = {stream: [] for stream in "abc"}
        count = dict.fromkeys("abc", 0)
        flying: Task | None = None
        changes = 0
        for _ in range(3000):
            what = rng.random()
            if what < 0.4:
                stream = rng.choice("abc")
                rig.queue.append(task(stream, count[stream]))
                count[stream] += 1
            elif what < 0.7:
                if flying is not None:
                    rig.sent(flying, rng.choice((0.0, 0.3)))
                flying = rig.take()
                if flying is not None:
                    sent[flying["request"].external_req_id].append(flying["number"])
            elif what < 0.8:
                rig.ask() if flying is None else None
            elif what < 0.9:
                rig.queue.manage()
            else:
                rig.queue.judge.next_s = 0.0
                changes += not rig.queue.is_calm
                rig.queue.calm_down(is_holding=False)
        if flying is not None:
            rig.sent(flying)
        while (flying := rig.take()) is not None:
            sent[flying["request"].external_req_id].append(flying["number"])
            rig.sent(flying)
        assert sent == {stream: list(range(count[stream])) for stream in "abc"}
        assert (rig.queue.tasks, len(rig.queue), rig.queue.nbytes) == (0, 0, 0)
        assert changes > 50


@pytest.mark.parametrize("end", ["aside", "calm"])
def test_lane_that_asks_while_the_queue_becomes_plain_takes_nothing_out_of_it(end: str) -> None:
    """What stands in the one deque stays there, and goes out from there."""
    with Rig(quiet_s=0.0) as rig:
        rig.queue.manage()
        rig.step("a", "b", "a")

        def become_plain(_now: float) -> None:
            del vars(rig.queue.fair.account)["look_between_sends"]
            if end == "aside":
                rig.queue.step_aside(RuntimeError("told to"))
            else:
                rig.queue.calm_down(is_holding=False)

        vars(rig.queue.fair.account)["look_between_sends"] = become_plain
        rig.ask()
        assert rig.queue.is_plain
        rig.queue.append(task("b"))
        assert rig.send(4) == ["a", "b", "a", "b"]
        assert rig.take() is None


# ---- Back ----


def test_calm_comes_back_when_it_has_been_quiet() -> None:
    """Not at once, not while somebody is held, not with old tasks; then everything stands in the order of arrival."""
    with Rig(quiet_s=0.0) as rig:
        rig.queue.manage()
        rig.step("a", "b", "a")
        rig.queue.calm_down(is_holding=True)
        assert not rig.queue.is_calm
        rig.queue.judge.next_s = 0.0
        rig.queue.calm_down(is_holding=False)
        assert rig.queue.is_calm
        assert rig.send(3) == ["a", "b", "a"]


def test_calm_waits_for_a_while_without_unrest() -> None:
    """A hysteresis: the next slow send would only end it again."""
    with Rig(quiet_s=3600.0) as rig:
        rig.queue.manage()
        rig.queue.calm_down(is_holding=False)
        assert not rig.queue.is_calm


def test_calm_does_not_come_back_with_nearly_as_many_bytes_as_end_it() -> None:
    """Sorting in takes a step where thousands of tasks wait: below two thirds of them."""
    import torch

    with Rig(nbytes=1000, quiet_s=0.0) as rig:
        rig.queue.manage()
        for stream in "ab":
            rig.step(stream, payload={"x": torch.zeros(350, dtype=torch.uint8)})
        assert rig.queue.nbytes == 700
        rig.queue.calm_down(is_holding=False)
        assert not rig.queue.is_calm
        rig.send(1)
        rig.queue.judge.next_s = 0.0
        rig.queue.calm_down(is_holding=False)
        assert rig.queue.is_calm


def test_calm_does_not_come_back_while_a_lane_is_about_to_take_its_task() -> None:
    """A task that the first lane was told of stays that lane's: it would go out twice, or the lane find nothing."""
    with Rig(quiet_s=0.0) as rig:
        rig.queue.manage()
        rig.step("a", "b")
        assert rig.ask()
        rig.queue.judge.next_s = 0.0
        rig.queue.calm_down(is_holding=False)
        assert not rig.queue.is_calm
        assert rig.send(2) == ["a", "b"]


def test_stepping_aside_keeps_no_payload_alive() -> None:
    """What was handed over to the one deque is in no book of the managed queue any more."""
    with Rig(quiet_s=3600.0) as rig:
        rig.queue.manage()
        rig.step("a", "b", "a")
        assert any(stream.waiting for stream in rig.queue.fair.streams.values())
        rig.queue.step_aside(RuntimeError("told to"))
        assert not any(stream.waiting for stream in rig.queue.fair.table.found.values())
        assert rig.send(3) == ["a", "b", "a"]


def test_calm_does_not_come_back_beside_a_busy_helper() -> None:
    """One lane has a task in hand that the first lane could not see."""
    with Rig(quiet_s=0.0) as rig, ThreadPoolExecutor(1) as other:
        other.submit(lambda: rig.queue.add_lane(threading.current_thread(), threading.Condition())).result()
        rig.queue.manage()
        rig.step("a")
        rig.queue.fair.helper.first_since_s = time.monotonic() - 1.0  # the first lane is stuck
        taken = other.submit(lambda: rig.queue.popleft() if rig.queue else None).result()
        assert taken is not None
        rig.queue.fair.helper.first_since_s = None
        for _ in range(2):
            rig.queue.judge.next_s = 0.0
            rig.queue.calm_down(is_holding=False)
            assert not rig.queue.is_calm
        other.submit(rig.queue.sent, taken, 0.0).result()
        rig.queue.judge.next_s = 0.0
        rig.queue.calm_down(is_holding=False)
        assert rig.queue.is_calm


def test_nothing_stands_between_upstream_and_its_deque() -> None:
    """While it is calm ``append`` is the deque's own: it runs once a task on the scheduler's thread."""
    with Rig() as rig:
        append: Any = rig.queue.append
        assert append.__self__ is rig.queue.fair.inbox


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_chunk_once_and_in_order(lanes: int) -> None:
    """Under the real loop, calm ending and coming back all the time, some sends slow: as if nothing were."""
    rng = random.Random(6)
    requests = [Request(unique(f"s{n}")) for n in range(6)]
    with Stage(lanes=lanes, calm=calm(steps=3, quiet_s=0.0)) as stage:
        put = stage.connector.put

        def slow_at_times(*args: Any, **kwargs: Any) -> Any:
            if rng.random() < 0.02:
                time.sleep(0.03)
            return put(*args, **kwargs)

        stage.connector.put = slow_at_times
        for value in range(80):
            if stage.queue.before_step():
                stage.queue.calm_down(is_holding=False)
            for request in requests:
                stage.save(request, value, finished=value == 79)
            if value % 3 == 0:
                time.sleep(0.002)
        until(lambda: stage.queue.tasks == 0)
        for request in requests:
            assert stage.fetch(request.external_req_id) == list(range(80))
        assert not stage.gate.overlaps
        assert entry().counters["managed"] >= 1
