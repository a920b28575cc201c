"""Which task is sent next, which streams are held, and what counts as unfetched, without threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from omni_fastpath.patches.save_queue_cap.fair_queue import FairQueue
from omni_fastpath.patches.save_queue_cap.holds import Holds, Load
from omni_fastpath.patches.save_queue_cap.unfetched import ABANDONED_S, Unfetched

# ---- Which task is next ----


def push(queue: FairQueue, streams: Iterable[str]) -> None:
    """Queue a task for each."""
    for stream in streams:
        queue.push(stream, {"stream": stream})


def send(queue: FairQueue, seconds: float = 0.0, *, has_put: bool = True) -> str:
    """Send the next task; its stream."""
    stream: str = queue.pop().task["stream"]
    queue.sent(seconds, has_put=has_put)
    return stream


def learn(queue: FairQueue, *slow: str, seconds: float = 0.2) -> None:
    """Send a slow task of each of these."""
    push(queue, slow)
    for _ in slow:
        send(queue, seconds)


def test_slow_stream_does_not_starve() -> None:
    """While the other streams always have tasks, it gets its share of the save thread's time and no more."""
    queue = FairQueue()
    learn(queue, "slow")
    push(queue, ["slow"] * 50)
    others = [f"s{number}" for number in range(9)]
    spent = dict.fromkeys(("slow", "others"), 0.0)
    while sum(spent.values()) < 60.0:
        push(queue, [name for name in others if not queue.streams.get(name) or not queue.streams[name].tasks])
        slow = queue.pop().stream.key == "slow"
        seconds = 0.2 if slow else 0.01
        queue.sent(seconds, has_put=True)
        spent["slow" if slow else "others"] += seconds
    assert 0.04 < spent["slow"] / 60.0 < 0.11


def test_a_short_pause_of_the_process_costs_no_stream_its_turn() -> None:
    """A fast put makes a slow stream fast again."""
    queue = FairQueue()
    learn(queue, "paused")
    push(queue, ["paused", "c"])
    assert [send(queue), send(queue, 0.001)] == ["c", "paused"]
    push(queue, ["paused", "d"])
    assert send(queue) == "paused"


def test_tasks_without_a_put_do_not_hide_a_slow_stream() -> None:
    """Of a talker's frames only each 25th task has a put; the others do not make the stream fast."""
    queue = FairQueue()
    learn(queue, "slow")
    for _ in range(3):
        push(queue, ["slow"] * 25)
        for _ in range(24):
            assert send(queue, 0.0001, has_put=False) == "slow"
        push(queue, ["quick"])
        assert send(queue) == "quick"
        assert send(queue, 0.2) == "slow"


# ---- Which streams are held ----

LIMIT = 9000


class Stage:
    """Streams whose bytes grow with each step that they run, and a clock that a test sets."""

    def __init__(self, max_hold_s: float = 5.0) -> None:
        self.holds = Holds(LIMIT, None, max_hold_s)
        self.nbytes = Counter[str]()
        self.steps = Counter[str]()
        self.now = 0.0

    def step(self, size: int = 10) -> set[str]:
        """One step of all streams; the ones that were held."""
        total = sum(self.nbytes.values())
        held: Sequence[str] = ()
        if self.holds.is_over(total, 0):
            loads = [Load(each, each, self.steps[each], self.nbytes[each], 0) for each in self.nbytes]
            held = self.holds.choose(loads, total, 0, self.now)
        else:
            self.holds.end_all()
        for name in self.nbytes:
            if name not in held:
                self.steps[name] += 1
                self.nbytes[name] += size
        return set(held)


@pytest.mark.parametrize("much", [LIMIT + 1, 3 * LIMIT])
def test_one_unfetched_stream_stops_no_other(much: int) -> None:
    """Only it is held, and the others run at every step, although each of its expired holds adds a step."""
    stage = Stage(max_hold_s=1.0)
    stage.nbytes.update({"hung": much, **{f"s{number}": 30 for number in range(15)}})
    for _ in range(4000):
        stage.now += 0.05
        assert stage.step(size=10) <= {"hung"}
        for number in range(15):
            stage.nbytes[f"s{number}"] = 30  # theirs is fetched
    assert stage.steps["s0"] == 4000
    assert stage.holds.expired > 100


def test_held_stream_goes_on_as_it_drains() -> None:
    """A stream whose chunks are fetched slowly takes a step for each fetched chunk, as soon as it is at the limit."""
    stage = Stage(max_hold_s=3600.0)
    stage.nbytes["slow"] = LIMIT + 10
    for _ in range(100):
        assert stage.step() == {"slow"}
        stage.nbytes["slow"] -= 10
        assert stage.step() == set()
    assert stage.steps["slow"] == 100


@pytest.mark.parametrize("hung", [1, 2, 5, 16, 64])
def test_all_together_are_bounded(hung: int) -> None:
    """However many streams are never fetched, the total is at most 1.5 times the limit and a step of each."""
    stage = Stage(max_hold_s=3600.0)
    for number in range(hung):
        stage.nbytes[f"s{number}"] = 0
    for _ in range(3 * LIMIT // 10):
        stage.step()
    assert LIMIT < sum(stage.nbytes.values()) <= 1.5 * LIMIT + 10 * hung
    assert max(stage.nbytes.values()) - min(stage.nbytes.values()) <= 20, "alike streams have equal shares"


def test_expired_hold_stays_open_until_the_step_was_taken() -> None:
    """A stream that was not scheduled for another reason still gets the step."""
    holds, loads = Holds(LIMIT, None, 1.0), [Load("s", "s", 7, LIMIT + 1, 0)]
    assert holds.choose(loads, LIMIT + 1, 0, 0.0) == ["s"]
    assert [holds.choose(loads, LIMIT + 1, 0, now) for now in (2.0, 3.0, 90.0)] == [[], [], []]
    assert holds.choose([Load("s", "s", 8, LIMIT + 1, 0)], LIMIT + 1, 0, 91.0) == ["s"]
    assert (holds.began, holds.expired) == (2, 1)


# ---- What was put and not fetched ----


class Segments:
    """Shared memory: the names that are there."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.unfetched = Unfetched(self.there.__contains__)

    def put(self, stream: str, *numbers: int, nbytes: int = 100, now: float = 0.0) -> None:
        """Put chunks of these numbers."""
        for number in numbers:
            self.there.add(f"{stream}_0_{number}")
            self.unfetched.put(stream, 0, number, nbytes, now)

    def fetch(self, stream: str, *numbers: int) -> None:
        """Fetch them."""
        self.there -= {f"{stream}_0_{number}" for number in numbers}


def test_chunks_count_until_nobody_fetches_them_and_no_task_is_sent() -> None:
    """Chunks stop counting a minute after the last fetch or the last task of their stream."""
    segments = Segments()
    for stream in ("fetched", "sent", "gone"):
        segments.put(stream, *range(5))
    for minute in range(3):
        segments.fetch("fetched", minute)
        segments.unfetched.sent("sent", minute * ABANDONED_S)
        segments.unfetched.check(minute * ABANDONED_S)
    segments.unfetched.check(2 * ABANDONED_S + 1.0)
    assert [segments.unfetched.of(stream) for stream in ("fetched", "sent", "gone")] == [200, 500, 0]
    segments.unfetched.check(3 * ABANDONED_S + 1.0)
    assert (segments.unfetched.nbytes, len(segments.unfetched._streams)) == (0, 0)


def test_external_id_that_comes_again_starts_anew() -> None:
    """A new request reuses the names of an old one's chunks, which stop counting."""
    segments = Segments()
    segments.put("a", 0, 1, 2)
    segments.put("a", 0, nbytes=7)
    assert (segments.unfetched.of("a"), segments.unfetched.nbytes) == (7, 7)
