"""The queue by itself: order, lanes, fairness without a clock, and what it says that it holds."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.soak_stage import entry

pytestmark = pytest.mark.upstream

Task = dict[str, Any]


def queue() -> Any:
    """A queue without shared memory behind it."""
    from omni_fastpath.patches.save_queue_cap.fair import FairQueue

    return FairQueue(entry().counters)


def task(stream: str, number: int = 0) -> Task:
    """A save task as upstream queues it."""
    return {"request": SimpleNamespace(external_req_id=stream), "multimodal_output": None, "number": number}


def cleanup(stream: str) -> Task:
    """A clean-up task as upstream queues it for a stream at stage 1."""
    return {"cleanup_shm": (f"{stream}_1", 3)}


def numbers(tasks: list[Task]) -> list[tuple[str, int]]:
    """Stream and number of each."""
    return [(each["request"].external_req_id, each["number"]) for each in tasks]


class Lane:
    """A thread that sends, one call at a time."""

    def __init__(self, served: Any, helper: Any = None) -> None:
        self._queue = served
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(lambda: served.add_lane(threading.current_thread(), helper)).result()

    def take(self) -> Task | None:
        """As ``save_loop``: ask, then take."""
        found: Task | None = self._thread.submit(lambda: self._queue.popleft() if self._queue else None).result()
        return found

    def ask(self) -> bool:
        """Whether there is something for this lane; it is reserved then."""
        return self._thread.submit(lambda: bool(self._queue)).result()

    def take_unasked(self) -> Task:
        """Without asking before."""
        found: Task = self._thread.submit(self._queue.popleft).result()
        return found

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes lanes and ends them; those after the first are not patient, as when it is stuck."""
    from omni_fastpath.patches.save_queue_cap.helper import Helper

    monkeypatch.setattr(Helper, "is_first_stuck", lambda _self, _now: True)
    made: list[Lane] = []

    def make(served: Any) -> Lane:
        made.append(Lane(served))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- A deque for those who are no lane ----


def test_empty_queue_is_an_empty_deque(lanes: Any) -> None:
    """Empty: false, of length 0, and ``popleft`` raises ``IndexError``, in a lane as elsewhere."""
    made = queue()
    lane = lanes(made)
    assert not made
    assert len(made) == 0
    assert not lane.ask()
    for take in (made.popleft, lane.take_unasked):
        with pytest.raises(IndexError):
            take()


def test_plain_thread_takes_what_a_deque_gives() -> None:
    """A thread that is no lane and sends what it takes gets each task once, a stream's in order."""
    made = queue()
    for number in range(3):
        for stream in ("a", "b"):
            made.append(task(stream, number))
    assert len(made) == 6
    taken = []
    while made:
        taken.append(made.popleft())
        made.sent(taken[-1], 0.0)
    assert sorted(numbers(taken)) == [(stream, number) for stream in ("a", "b") for number in range(3)]
    for stream in ("a", "b"):
        assert [number for name, number in numbers(taken) if name == stream] == [0, 1, 2]
    assert not made
    assert len(made) == 0


def test_true_means_that_there_is_one_to_take() -> None:
    """Whoever is told that there is a task gets one, also while others of its stream are being sent."""
    made = queue()
    for number in range(2):
        made.append(task("a", number))
    first = made.popleft()
    while made:
        made.popleft()  # must not raise
    made.sent(first, 0.0)
    assert made
    assert made.popleft()["number"] == 1


def test_asking_from_elsewhere_reserves_nothing(lanes: Any) -> None:
    """The scheduler's thread may ask as often as it likes; the lane still finds the task."""
    made = queue()
    lane = lanes(made)
    made.append(task("a"))
    assert made
    assert made
    assert lane.take() is not None


# ---- Lanes ----


def test_order_within_a_stream_is_that_of_arrival(lanes: Any) -> None:
    """Whatever the costs, a stream's tasks leave in the order in which they came, clean-up tasks included."""
    made = queue()
    lane = lanes(made)
    rng = random.Random(1)
    expected: dict[str, list[Any]] = defaultdict(list)
    for number in range(200):
        stream = rng.choice("abc")
        each = cleanup(stream) if rng.random() < 0.1 else task(stream, number)
        expected[stream].append(each)
        made.append(each)
    found: dict[str, list[Any]] = defaultdict(list)
    while (each := lane.take()) is not None:
        stream = each["cleanup_shm"][0][0] if "cleanup_shm" in each else each["request"].external_req_id
        found[stream].append(each)
        made.sent(each, rng.random())
    assert found == expected


def test_never_two_lanes_in_one_stream(lanes: Any) -> None:
    """While one lane sends a stream's task, the other finds nothing of it, and the next one when that is done."""
    made = queue()
    one, other = lanes(made), lanes(made)
    for number in range(2):
        made.append(task("a", number))
    first = one.take()
    assert first is not None
    assert not other.ask()
    assert len(made) == 1
    made.sent(first, 0.0)
    second = other.take()
    assert second is not None
    assert second["number"] == 1


def test_two_lanes_serve_two_streams(lanes: Any) -> None:
    """A lane that hangs in one stream leaves the others to the other lane."""
    made = queue()
    one, other = lanes(made), lanes(made)
    made.append(task("slow"))
    assert one.take() is not None
    for number in range(3):
        made.append(task("slow", number + 1))
        made.append(task("quick", number))
    taken = []
    while (each := other.take()) is not None:
        taken.append(each)
        made.sent(each, 0.01)
    assert numbers(taken) == [("quick", 0), ("quick", 1), ("quick", 2)]


def test_reservation_stays_with_its_lane(lanes: Any) -> None:
    """A lane that has asked gets that task, whatever is queued and taken meanwhile."""
    made = queue()
    one, other = lanes(made), lanes(made)
    made.append(task("a"))
    assert one.ask()
    made.append(task("b"))
    assert numbers([other.take() or {}]) == [("b", 0)]
    assert not other.ask()
    assert numbers([one.take() or {}]) == [("a", 0)]


def test_racing_consumers_lose_and_double_nothing() -> None:
    """Four lanes and two producers at once: each task once, in its stream's order, never two of a stream at a time."""
    made = queue()
    streams, each_has = [f"s{n}" for n in range(8)], 250
    sent: dict[str, list[int]] = defaultdict(list)
    busy: set[str] = set()
    clashes: list[str] = []
    left = threading.Semaphore(0)

    def produce(mine: list[str]) -> None:
        for number in range(each_has):
            for stream in mine:
                made.append(task(stream, number))

    def consume() -> None:
        made.add_lane(threading.current_thread())
        while not done.is_set():
            while made:
                each = made.popleft()
                stream = each["request"].external_req_id
                if stream in busy:
                    clashes.append(stream)
                busy.add(stream)
                sent[stream].append(each["number"])
                busy.discard(stream)
                made.sent(each, 1e-6)
                left.release()

    done = threading.Event()
    threads = [threading.Thread(target=consume) for _ in range(4)]
    threads += [threading.Thread(target=produce, args=(streams[half::2],)) for half in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(left.acquire(timeout=30) for _ in range(len(streams) * each_has))
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    assert not clashes
    assert sent == {stream: list(range(each_has)) for stream in streams}
    assert (made.tasks, len(made), made.nbytes) == (0, 0, 0)


# ---- Fairness ----


def serve(made: Any, lane: Lane, costs: dict[str, float], turns: int, refill: tuple[str, ...] = ()) -> list[str]:
    """Serve so many tasks, each taking its stream's cost; streams of *refill* always have another."""
    order = []
    for _ in range(turns):
        each = lane.take()
        if each is None:
            break
        stream = each["request"].external_req_id
        order.append(stream)
        if stream in refill:
            made.append(task(stream))
        made.sent(each, costs[stream])
    return order


def test_slow_stream_does_not_starve_the_others(lanes: Any) -> None:
    """Streams with a backlog get the same time to send, so that one with dear sends gets as many fewer."""
    made = queue()
    lane = lanes(made)
    costs = {"slow": 0.2, "a": 0.02, "b": 0.02}  # all of them slow: quicker sends cost the same, whatever they took
    for stream in costs:
        made.append(task(stream))
    order = serve(made, lane, costs, 210, refill=tuple(costs))
    spent = {stream: order.count(stream) * cost for stream, cost in costs.items()}
    assert max(spent.values()) - min(spent.values()) <= 2 * costs["slow"] + 1e-9  # its first slow send is not charged


def test_one_slow_send_is_an_accident(lanes: Any) -> None:
    """A stream that a pause of the process hit once takes turns as before; the second slow put in a row is charged."""
    made = queue()
    lane = lanes(made)
    for number in range(6):
        for stream in ("hit", "a", "b"):
            made.append(task(stream, number))
    order = serve(made, lane, {"hit": 5.0, "a": 0.0, "b": 0.0}, 1)
    assert order == ["hit"]
    assert serve(made, lane, {"hit": 0.0, "a": 0.0, "b": 0.0}, 6).count("hit") == 2
    assert serve(made, lane, {"hit": 5.0, "a": 0.0, "b": 0.0}, 3).count("hit") == 1  # a slow one again, by itself
    assert serve(made, lane, {"hit": 5.0, "a": 0.0, "b": 0.0}, 3).count("hit") == 1  # and the second in a row
    assert "hit" not in serve(made, lane, {"hit": 5.0, "a": 0.0, "b": 0.0}, 4)


def test_quick_sends_without_a_put_do_not_hide_slow_puts(lanes: Any) -> None:
    """A chunk of many tasks is one put: what is between two slow puts says nothing about the connector."""
    made = queue()
    lane = lanes(made)
    for number in range(12):
        made.append(task("slow", number))
    for number in range(12):
        each = lane.take()
        assert each is not None
        made.sent(each, 0.3 if number % 5 == 4 else 0.0, has_put=number % 5 == 4)
    assert made.turns.now_s >= 0.3  # the second of two slow puts was charged


def test_new_stream_waits_for_nobodys_backlog(lanes: Any) -> None:
    """A stream that begins is served next, before what others have queued."""
    made = queue()
    lane = lanes(made)
    for number in range(50):
        made.append(task("old", number))
    serve(made, lane, {"old": 0.1}, 10)
    made.append(task("new"))
    order = serve(made, lane, {"old": 0.1, "new": 0.1}, 3)
    assert "new" in order[:2]


def test_stream_that_comes_back_gets_no_bonus(lanes: Any) -> None:
    """Time in which a stream had nothing is not saved up: back again it takes turns."""
    made = queue()
    lane = lanes(made)
    costs = {"away": 0.1, "busy": 0.1}
    for stream in costs:
        made.append(task(stream))
    serve(made, lane, costs, 100, refill=("busy",))
    for _ in range(10):
        made.append(task("away"))
    order = serve(made, lane, costs, 10, refill=("busy",))
    assert 4 <= order.count("away") <= 6


def test_stream_that_pauses_after_each_task_keeps_its_debt(lanes: Any) -> None:
    """A dear stream that is never backlogged for long is not served out of turn for it."""
    made = queue()
    lane = lanes(made)
    costs = {"slow": 1.0, "a": 0.01}
    made.append(task("a"))
    order: list[str] = []
    while order.count("slow") < 5:
        if not any(stream == "slow" and state.tasks for stream, state in made.streams.items()):
            made.append(task("slow"))
        order += serve(made, lane, costs, 1, refill=("a",))
    assert order.count("a") >= 300  # four times the second that "slow" was ahead


def test_benchmarks_order_of_arrival_is_that(lanes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a benchmark sets: one lane sends in the order of arrival, as upstream."""
    from omni_fastpath.patches.save_queue_cap import attach, fair
    from omni_simulated_device.slow_sends import serve_in_order_of_arrival

    monkeypatch.setattr(fair, "Turns", vars(fair)["Turns"])  # given back afterwards
    monkeypatch.setattr(attach, "AUDITED_PROCESSORS", attach.AUDITED_PROCESSORS)
    serve_in_order_of_arrival(attach)
    assert not attach.AUDITED_PROCESSORS
    made = queue()
    lane = lanes(made)
    rng = random.Random(2)
    expected = [task(rng.choice("abc"), number) for number in range(60)]
    for each in expected:
        made.append(each)
    taken = []
    while (got := lane.take()) is not None:
        taken.append(got)
        made.sent(got, rng.random())
    assert taken == expected


# ---- What it says that it holds ----


def test_tasks_count_what_is_queued_and_in_flight(lanes: Any) -> None:
    """A task counts from its arrival to the end of its send; the length counts those that nobody has taken."""
    made = queue()
    lane = lanes(made)
    for number in range(2):
        made.append(task("a", number))
    taken = lane.take()
    assert taken is not None
    assert (made.tasks, made.streams["a"].tasks, len(made)) == (2, 2, 1)
    made.sent(taken, 0.0)
    assert (made.tasks, made.streams["a"].tasks, len(made)) == (1, 1, 1)


def test_counters_say_what_went_through_and_how_much_at_most() -> None:
    """Tasks that went through, and the largest number queued, of one stream and of all."""
    made = queue()
    counters = entry().counters
    for number in range(3):
        made.append(task("a", number))
    made.append(task("b"))
    while made:
        made.sent(made.popleft(), 0.0)
    assert (counters["tasks"], counters["max_stream_tasks"], counters["max_queued_tasks"]) == (4, 3, 4)


def test_end_of_a_send_that_nobody_took_changes_nothing() -> None:
    """A task that was not taken from here, or ended already, does not count down."""
    made = queue()
    made.append(task("a"))
    made.sent(task("a"), 1.0)
    made.sent(task("never"), 1.0)
    taken = made.popleft()
    made.sent(taken, 0.0)
    made.sent(taken, 0.0)
    assert made.tasks == 0
    assert not made


@pytest.mark.parametrize("busy", [0, 300])
def test_streams_that_are_gone_are_forgotten(busy: int) -> None:
    """Thousands of streams, one after the other, leave a bounded number of books, those that came last among them."""
    made = queue()
    for number in range(busy):
        made.append(task(f"busy{number}"))
    taken = [made.popleft() for _ in range(busy)]
    for number in range(10_000):
        made.append(task(f"s{number}"))
        made.sent(made.popleft(), 0.001 * (number % 7))
    assert len(made.streams) <= busy + 1024
    assert {f"s{number}" for number in range(9_700, 10_000)} <= set(made.streams)
    assert all(each["request"].external_req_id in made.streams for each in taken)


@pytest.mark.parametrize("stream", ["plain", "with_underscores_1", "_", "7_0"])
def test_cleanup_belongs_to_its_stream(stream: str) -> None:
    """A clean-up task is found to be its stream's whatever the id looks like."""
    from omni_fastpath.patches.save_queue_cap.tasks import stream_of

    assert stream_of(cleanup(stream)) == stream == stream_of(task(stream))


def test_cleanup_waits_for_its_stream_and_the_next_generation_for_it(lanes: Any) -> None:
    """Chunks of an old request, its clean-up, chunks of the next request with that id: in this order, one at a time."""
    made = queue()
    one, other = lanes(made), lanes(made)
    expected = [task("a", 0), task("a", 1), cleanup("a"), task("a", 2)]
    for each in expected:
        made.append(each)
    taken = []
    while (each := one.take()) is not None:
        assert other.take() is None
        taken.append(each)
        made.sent(each, 0.0)
    assert taken == expected


# ---- The helper lane ----


@pytest.mark.parametrize(("patience_s", "helps"), [(3600.0, False), (0.0, True)])
def test_helper_works_only_while_the_first_lane_is_stuck(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, helps: bool
) -> None:
    """The second lane leaves everything to the first until one send of that lasts too long, and again afterwards."""
    from omni_fastpath.patches.save_queue_cap import slow

    monkeypatch.setattr(slow, "SLOW_S", patience_s)
    made = queue()
    first, helper = Lane(made), Lane(made)
    try:
        made.append(task("a"))
        made.sent(first.take(), 0.0)
        assert not first.ask()
        made.append(task("a"))
        stuck = first.take()
        made.append(task("b"))
        assert stuck is not None
        assert helper.ask() is helps
        if helps:
            assert helper.take_unasked() is not None
        made.sent(stuck, 1.0)
        first.ask()  # it is back: nothing or the next one
        assert helper.ask() is False
    finally:
        first.close()
        helper.close()


def test_append_alerts_the_helper_of_a_first_lane_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task behind a slow send wakes the helper once, until it asks for work; one behind a quick send does not."""
    from omni_fastpath.patches.save_queue_cap import slow

    class Condition(threading.Condition):
        def notify(self, n: int = 1) -> None:
            alerts.append(n)

    alerts: list[int] = []
    condition = Condition()
    monkeypatch.setattr(slow, "SLOW_S", 2.0)  # a stall of this machine is none
    made = queue()
    first, other = Lane(made), Lane(made, condition)
    try:
        made.append(task("a"))
        made.sent(first.take(), 0.0)
        assert not first.ask()
        made.append(task("a"))
        assert first.take() is not None
        made.append(task("b"))
        assert alerts == []  # the stream was quick, and so is this send so far
        monkeypatch.setattr(slow, "SLOW_S", 0.0)
        made.append(task("c"))
        made.append(task("d"))
        assert len(alerts) == 1
        assert other.take() is not None
        made.append(task("e"))
        assert len(alerts) == 2
    finally:
        first.close()
        other.close()


def test_helper_works_at_once_beside_a_send_that_may_be_slow() -> None:
    """A stream that has made no put yet is not waited for; after one slow one, which may be an accident, it is."""
    made = queue()
    first, helper = Lane(made), Lane(made, threading.Condition())
    try:
        for number, (seconds, helps) in enumerate([(0.0, True), (0.03, False), (0.0, False), (0.03, False)]):
            made.append(task("a", number))
            sending = first.take()
            assert sending is not None
            made.append(task("b", number))
            assert helper.ask() is helps
            made.sent(sending, seconds)
            made.sent((helper if helps else first).take(), 0.0)
            assert not first.ask()
    finally:
        first.close()
        helper.close()


def test_stream_known_to_be_slow_is_left_to_the_helper() -> None:
    """After two slow puts in a row the first lane serves the others, and the helper, at once, that one."""
    made = queue()
    first, helper = Lane(made), Lane(made, threading.Condition())
    try:
        for _ in range(2):
            made.append(task("slow"))
            made.sent(first.take(), 0.05)
        for number in range(3):
            made.append(task("slow", number))
        made.append(task("quick"))
        assert numbers([first.take() or {}]) == [("quick", 0)]  # and is in a send that is quick so far
        made.sent(task("nobody"), 0.0)
        assert numbers([helper.take() or {}]) == [("slow", 0)]
        assert not helper.ask()
        made.sent(made.streams["quick"].in_flight.task, 0.0)
        assert not first.ask()
        made.sent(made.streams["slow"].in_flight.task, 0.0)
        assert numbers([first.take() or {}]) == [("slow", 1)]
    finally:
        first.close()
        helper.close()


def test_slow_streams_are_not_left_to_a_helper_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper may be in a send for ever: the first lane serves other slow streams when it has nothing else."""
    from omni_fastpath.patches.save_queue_cap import helper as module

    made = queue()
    first, other = Lane(made), Lane(made, threading.Condition())
    try:
        for stream in ("a", "b"):
            for _ in range(2):
                made.append(task(stream))
                made.sent(first.take(), 0.05)
        for stream in ("a", "b"):
            made.append(task(stream))
        assert other.take() is not None
        assert not first.ask()
        monkeypatch.setattr(module, "HUNG_S", 0.0)
        assert first.ask()
        made.append(task("quick"))
        assert first.take() is not None
    finally:
        first.close()
        other.close()


def test_one_lane_serves_slow_streams_in_their_turn(lanes: Any) -> None:
    """Nobody else would."""
    made = queue()
    lane = lanes(made)
    for _ in range(3):
        made.append(task("slow"))
        taken = lane.take()
        assert taken is not None
        made.sent(taken, 0.1)


def test_stream_whose_only_put_was_slow_is_not_waited_for() -> None:
    """What one put says of a stream that has made no other is believed until the next."""
    made = queue()
    first, helper = Lane(made), Lane(made, threading.Condition())
    try:
        made.append(task("a"))
        made.sent(first.take(), 0.05)
        assert not first.ask()
        made.append(task("a"))
        assert first.ask()
        made.append(task("b"))
        assert helper.ask()
    finally:
        first.close()
        helper.close()


def test_first_lane_alerts_the_helper_before_a_send_that_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What already waits behind such a send does not wait for the next append either."""
    from omni_fastpath.patches.save_queue_cap.helper import Helper

    alerted: list[Any] = []
    monkeypatch.setattr(Helper, "alert", lambda self: alerted.append(self.condition))
    condition = threading.Condition()
    made = queue()
    first, helper = Lane(made), Lane(made, condition)
    try:
        made.append(task("a"))
        made.append(task("b"))
        assert first.ask()
        assert alerted == [condition]
    finally:
        first.close()
        helper.close()


# ---- Bytes ----


def test_bytes_are_those_of_unique_storage_and_return_to_zero() -> None:
    """Storage that several tasks share counts once, until the last of them is sent."""
    import torch

    made = queue()
    whole = torch.zeros(1000, dtype=torch.uint8)
    own = torch.zeros(10, dtype=torch.uint8)
    for stream, payload in (("a", {"x": whole, "y": whole}), ("b", {"x": whole, "z": own})):
        made.append({**task(stream), "multimodal_output": payload})
    assert made.nbytes == 1010
    first = made.popleft()
    made.sent(first, 0.0)
    assert made.nbytes == 1010
    made.sent(made.popleft(), 0.0)
    assert made.nbytes == 0


def test_bytes_do_not_drift() -> None:
    """Whatever is queued, shared, made its own and sent in whatever order: nothing queued is nothing counted."""
    import torch

    made = queue()
    rng = random.Random(3)
    pool = [torch.zeros(rng.randrange(0, 5000), dtype=torch.uint8) for _ in range(8)]
    flying: list[Task] = []
    for number in range(2000):
        if rng.random() < 0.5:
            payload: Any = {"x": rng.choice(pool), "view": [rng.choice(pool)[:7], None, "text"]}
            each = {**task(rng.choice("abcdefgh"), number), "multimodal_output": rng.choice([payload, None])}
            made.append(cleanup("a") if rng.random() < 0.1 else each)
        elif rng.random() < 0.2:
            assert made.nbytes >= 0  # weighed
            made.account.let_batches_go(float("inf"))
        elif made and rng.random() < 0.6:
            flying.append(made.popleft())
        elif flying:
            made.sent(flying.pop(rng.randrange(len(flying))), rng.random())
    while flying or made:
        if made:
            flying.append(made.popleft())
        made.sent(flying.pop(), 0.0)
    assert (made.tasks, made.nbytes, len(made), bool(made.account.storage)) == (0, 0, 0, False)
    assert not any(stream.tasks for stream in made.streams.values())
    assert made._counters["copied_tensors"]
